"""`aerie-drafter convert`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from aerie.terminal import sanitize_text
from aerie_drafter.cli.console import err, out
from aerie_drafter.convert import CheckpointOrigin, ConversionOverrides, LayerIdConvention, import_checkpoint
from aerie_drafter.errors import ConfigError


def command(
    source: Annotated[Path, typer.Argument(help="Another project's checkpoint: a folder with config.json and weights.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; an earlier conversion in it is replaced.")],
    target: Annotated[Path | None, typer.Option(help="The target's folder, where its number of layers is needed.")] = None,
    target_name: Annotated[str, typer.Option(help="What the checkpoint is to call its target; default: the folder.")] = "",
    origin: Annotated[CheckpointOrigin | None, typer.Option(help="The project that wrote it; default: found out.")] = None,
    layers: Annotated[str, typer.Option(help="Auxiliary layers as vLLM counts them, such as 2,16,29.")] = "",
    layer_ids: Annotated[
        LayerIdConvention, typer.Option(help="Whether its layer ids are inputs or outputs of layers.")
    ] = LayerIdConvention.AUTO,
    trained: Annotated[datetime | None, typer.Option(help="Day of training, for SpecForge.", formats=["%Y-%m-%d"])] = None,
    norm_output: Annotated[
        bool | None, typer.Option("--norm-output/--no-norm-output", help="How it was trained, if you know.")
    ] = None,
    full_attention: Annotated[bool, typer.Option(help="Take in one with a sliding window as one without.")] = False,
) -> None:
    """Bring in another project's checkpoint, as what vLLM serves."""
    try:
        named = tuple(int(one) for one in layers.split(",")) if layers else None
    except ValueError:
        raise ConfigError(f"--layers is {layers!r}: whole numbers with commas between are expected.") from None
    wishes = ConversionOverrides(
        origin=origin,
        aux_layer_ids=named,
        layer_id_convention=layer_ids,
        training_date=trained.date() if trained else None,
        norm_output=norm_output,
        assume_full_attention=full_attention,
    )
    found = import_checkpoint(source, folder, wishes, target=target, target_name=target_name)
    for finding in found.findings:
        err.print(sanitize_text(finding))
    out.print(f"{sanitize_text(str(folder))}: {found.checkpoint.config.eagle_version}, from {found.origin.value}")
