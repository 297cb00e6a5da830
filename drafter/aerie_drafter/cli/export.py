"""`aerie-drafter export`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from aerie.terminal import sanitize_text
from aerie_drafter.cli.console import err, out
from aerie_drafter.export import ExportFormat, build_serve_command, export_checkpoint


class WeightPrecision(Enum):
    """Type of the written weights."""

    KEEP = "keep"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's; None to keep each as it is."""
        found: torch.dtype | None = None if self is WeightPrecision.KEEP else getattr(torch, self.value)
        return found


def command(
    checkpoint: Annotated[Path, typer.Argument(help="A drafter's folder, as training wrote it.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; an earlier export in it is replaced.")],
    target: Annotated[str, typer.Option(help="The target's name or folder; default: what the checkpoint says.")] = "",
    form: Annotated[ExportFormat, typer.Option(help="vLLM's own form, or that of the speculators library.")] = ExportFormat.VLLM,
    tokens: Annotated[int, typer.Option(help="num_speculative_tokens to recommend.")] = 3,
    acceptance_length: Annotated[float | None, typer.Option(help="Measured at that many tokens; for the model card.")] = None,
    measured_on: Annotated[str, typer.Option(help="On what it was measured.")] = "",
    embeddings: Annotated[bool, typer.Option(help="Write the embedding too; without it vLLM shares the target's.")] = True,
    dtype: Annotated[WeightPrecision, typer.Option(help="Type of the weights.")] = WeightPrecision.KEEP,
) -> None:
    """Make of a checkpoint what vLLM serves, with a model card."""
    card = export_checkpoint(
        checkpoint,
        folder,
        target=target,
        export_format=form,
        num_speculative_tokens=tokens,
        acceptance_length=acceptance_length,
        measured_on=measured_on,
        include_embedding=embeddings,
        dtype=dtype.dtype,
    )
    err.print(f"{sanitize_text(str(folder))} is written; serve it with")
    out.print(sanitize_text(build_serve_command(card, str(folder.resolve()))))
