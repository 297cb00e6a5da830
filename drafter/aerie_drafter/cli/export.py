"""`aerie-drafter export`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from aerie.terminal import err, out, sanitize_text
from aerie_drafter.export import ExportFormat, build_serve_command, export_checkpoint


class WeightPrecision(Enum):
    """Type of the written weights."""

    KEEP = "keep"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the PyTorch type; None keeps the type of each tensor."""
        dtype: torch.dtype | None = None if self is WeightPrecision.KEEP else getattr(torch, self.value)
        return dtype


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a trained drafter.")],
    folder: Annotated[Path, typer.Argument(help="Output folder; an earlier export is replaced.")],
    target: Annotated[str, typer.Option(help="Name or folder of the target. Default: that of the checkpoint.")] = "",
    form: Annotated[
        ExportFormat, typer.Option(help="Format: vLLM's own, or that of the speculators library.")
    ] = ExportFormat.VLLM,
    tokens: Annotated[int, typer.Option(help="num_speculative_tokens to recommend.")] = 3,
    acceptance_length: Annotated[
        float | None,
        typer.Option(help="Acceptance length measured with that setting, for the model card. Default: that of the training."),
    ] = None,
    measured_on: Annotated[str, typer.Option(help="Data of that measurement.")] = "",
    evaluation: Annotated[
        Path | None,
        typer.Option(help="Output of `evaluate --exact --output json`: the card gets its table by temperature and category."),
    ] = None,
    embeddings: Annotated[bool, typer.Option(help="Include the embedding; without it vLLM shares the target's.")] = True,
    dtype: Annotated[WeightPrecision, typer.Option(help="Type of the weights.")] = WeightPrecision.KEEP,
) -> None:
    """Export a checkpoint for serving with vLLM, with a model card."""
    card = export_checkpoint(
        checkpoint,
        folder,
        target=target,
        export_format=form,
        num_speculative_tokens=tokens,
        acceptance_length=acceptance_length,
        measured_on=measured_on,
        evaluation=evaluation,
        include_embedding=embeddings,
        dtype=dtype.dtype,
    )
    err.print(f"wrote {sanitize_text(str(folder))}; serve it with")
    out.print(sanitize_text(build_serve_command(card, str(folder.resolve()))))
