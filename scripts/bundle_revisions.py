"""Write the revisions of the bundle's checkpoints into the files that name them.

The lab's Hub has each checkpoint of drafter/bundle at one revision: the first 40 digits of its digest in registry.json.
Manifests, tables and tests write the revision out, as users do. `make bundle` changes it, and `make crds` writes the new one.

Guarantees: only a revision that follows the name of a checkpoint of the bundle is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

REGISTRY = Path("drafter") / "bundle" / "registry.json"
REVISION_LENGTH = 40
_FOLDERS = ("lab", "tests", "examples", "docs")
_SUFFIXES = (".md", ".py", ".toml", ".yaml")
_SAME_FILES = {"eagle31-again": "eagle31"}
"""Repositories of the demos with the files of another."""
_REVISION_OF_CHECKPOINT = re.compile(
    r"(?P<before>aerie/bundle-(?P<name>[a-z0-9-]+)\b[^a-z0-9]{1,6}(?:(?:commit|revision)[^a-z0-9]{1,6})?)"
    r"(?P<revision>[0-9a-f]{40})\b"
)


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, content with the registry's revisions) of each file that names one. Raises OSError."""
    revisions = read_revisions(root)
    paths = (path for folder in _FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in _SUFFIXES)
    for path in paths:
        text = path.read_text()
        if _REVISION_OF_CHECKPOINT.search(text):
            yield path, set_revisions(text, revisions)


def read_revisions(root: Path) -> dict[str, str]:
    """Return the revision of each checkpoint of the bundle, by its folder's name."""
    registry = json.loads((root / REGISTRY).read_text())
    checkpoints = {"target": registry["target"], **registry["drafters"]}
    return {name: checkpoint["digest"].removeprefix("sha256:")[:REVISION_LENGTH] for name, checkpoint in checkpoints.items()}


def set_revisions(text: str, revisions: Mapping[str, str]) -> str:
    """Return the text with the revision of each checkpoint of the bundle that it names."""

    def replace(match: re.Match[str]) -> str:
        name = _SAME_FILES.get(match["name"], match["name"])
        return match["before"] + revisions.get(name, match["revision"])

    return _REVISION_OF_CHECKPOINT.sub(replace, text)
