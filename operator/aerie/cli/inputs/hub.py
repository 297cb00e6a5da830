"""Reads checkpoints from the Hugging Face Hub for a command, and names them on standard error."""

from __future__ import annotations

from aerie.checkpoints import read_repository
from aerie.cli.console import err
from aerie.engine.models.checkpoint import Checkpoint
from aerie.terminal import sanitize_text


def read_hub_checkpoint(repository: str, revision: str | None) -> Checkpoint:
    """Return a checkpoint, of which configs and headers are read. Raises CheckpointError."""
    err.print(f"[dim]reading headers of {sanitize_text(repository)}[/]")
    checkpoint = read_repository(repository, revision)
    commit = checkpoint.name.rpartition("@")[2]
    if commit != revision:
        branch = f"{repository} at {revision or 'main'}"
        advice = "set the commit in the resource, because a branch can move"
        err.print(f"[yellow]note:[/] {sanitize_text(branch)} is commit {sanitize_text(commit)} now; {advice}.")
    return checkpoint
