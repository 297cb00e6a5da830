"""Finds the shipped bundle: a small target, three drafters for it and prompts, in drafter/bundle of the repository.

It is data of the repository and in no wheel, so that installing the package does not bring 30 MB of weights.
"""

from __future__ import annotations

from pathlib import Path

from aerie_drafter.errors import CheckpointError

BUNDLE_FOLDER = Path(__file__).resolve().parent.parent / "bundle"


def find_bundle_path(name: str = "", bundle_folder: Path = BUNDLE_FOLDER) -> Path:
    """The folder or file `name` of the bundle: target, eagle3, eagle31, weak, prompts.jsonl, registry.json; without a name,
    the bundle's own. Raises CheckpointError where it is not there."""
    found = bundle_folder / name
    if not (bundle_folder / "registry.json").is_file():
        raise CheckpointError(
            f"{bundle_folder}: the bundle is not here; it comes with the repository, and `make bundle` there makes it."
        )
    if not found.exists():
        known = ", ".join(sorted(path.name for path in bundle_folder.iterdir() if (path / "config.json").is_file()))
        raise CheckpointError(f"{bundle_folder}: the bundle has no '{name}'; it has {known}, prompts.jsonl and registry.json.")
    return found
