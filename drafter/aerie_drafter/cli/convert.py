"""`aerie-drafter convert`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from aerie.terminal import err, out, sanitize_text
from aerie_drafter.convert import CheckpointOrigin, ConversionOverrides, LayerIdConvention, import_checkpoint
from aerie_drafter.errors import ConfigError


def command(
    source: Annotated[Path, typer.Argument(help="Another project's checkpoint: a folder with config.json and weights.")],
    folder: Annotated[Path, typer.Argument(help="Output folder; an earlier conversion is replaced.")],
    target: Annotated[Path | None, typer.Option(help="Folder of the target; needed if its number of layers decides.")] = None,
    target_name: Annotated[str, typer.Option(help="Name of the target in the checkpoint. Default: the folder.")] = "",
    origin: Annotated[CheckpointOrigin | None, typer.Option(help="Project that wrote the checkpoint. Default: detected.")] = None,
    layers: Annotated[str, typer.Option(help="Auxiliary layers in vLLM's numbering, such as 2,16,29.")] = "",
    layer_ids: Annotated[
        LayerIdConvention, typer.Option(help="Whether layer ids of the checkpoint name inputs or outputs of layers.")
    ] = LayerIdConvention.AUTO,
    trained: Annotated[
        datetime | None, typer.Option(help="Date of the training, for SpecForge.", formats=["%Y-%m-%d"], metavar="YYYY-MM-DD")
    ] = None,
    norm_output: Annotated[
        bool | None, typer.Option("--norm-output/--no-norm-output", help="Whether it was trained with norm_output, if known.")
    ] = None,
) -> None:
    """Import another project's checkpoint in the format that vLLM serves."""
    try:
        aux_layer_ids = tuple(int(number) for number in layers.split(",")) if layers else None
    except ValueError:
        raise ConfigError(f"--layers is {layers!r}: expected: integers separated by commas.") from None
    overrides = ConversionOverrides(
        origin=origin,
        aux_layer_ids=aux_layer_ids,
        layer_id_convention=layer_ids,
        training_date=trained.date() if trained else None,
        norm_output=norm_output,
    )
    conversion = import_checkpoint(source, folder, overrides, target=target, target_name=target_name)
    for finding in conversion.findings:
        err.print(sanitize_text(finding))
    out.print(f"{sanitize_text(str(folder))}: {conversion.checkpoint.config.eagle_version}, from {conversion.origin.value}")
