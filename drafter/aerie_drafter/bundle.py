"""Paths of the shipped bundle: a small target, three drafters for it and prompts, in drafter/bundle of the repository.

The bundle belongs to the repository and is in no wheel, so that the package does not install 30 MB of weights.
"""

from __future__ import annotations

from pathlib import Path

from aerie_drafter.errors import CheckpointError

BUNDLE_FOLDER = Path(__file__).resolve().parent.parent / "bundle"


def find_bundle_path(name: str = "", bundle_folder: Path = BUNDLE_FOLDER) -> Path:
    """Return the path of `name` in the bundle (target, eagle3, eagle31, weak, prompts.jsonl, registry.json), or of the bundle
    itself. Raises CheckpointError if it does not exist."""
    path = bundle_folder / name
    if not (bundle_folder / "registry.json").is_file():
        raise CheckpointError(
            f"{bundle_folder}: the bundle is missing; it is part of the repository, and `make bundle` creates it."
        )
    if not path.exists():
        model_names = ", ".join(sorted(path.name for path in bundle_folder.iterdir() if (path / "config.json").is_file()))
        raise CheckpointError(
            f"{bundle_folder}: the bundle has no '{name}'; it has {model_names}, prompts.jsonl and registry.json."
        )
    return path
