"""Reads what a person names on the command line: manifests, and amounts of memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aerie.api import KIND, ResourceError, SpeculativeDeployment
from aerie.api.validation.admission import pruned, refusals
from aerie.cli.console import CommandError
from aerie.engine.models.drafter_catalog import Catalog, CatalogError, published
from aerie.yaml_documents import DocumentError, read_documents


def read_deployment(file: str) -> SpeculativeDeployment:
    """The one SpeculativeDeployment of a manifest (`-`: standard input), as the API server would take it.

    Raises CommandError; ResourceError: the API server would refuse it.
    """
    documents = [document for document in read_objects(file) if document.get("kind") == KIND]
    if len(documents) != 1:
        found = f"holds {len(documents)} of them" if documents else "holds none"
        raise CommandError(f"{shown(file)} must hold exactly one {KIND}, and {found}: give a file with the one to check.")
    return parse_deployment(documents[0])


def parse_deployment(document: dict[str, Any]) -> SpeculativeDeployment:
    """The resource as the API server would take it. Raises ResourceError: it would refuse it."""
    document = pruned(document)
    if said := refusals(document):
        raise ResourceError("\n".join(said))
    return SpeculativeDeployment.from_dict(document, unknown="refuse")


CATALOG = "A ConfigMap with catalog entries of your own: its manifest, or the folder that it is mounted at."


def read_catalog(own: str | None) -> Catalog:
    """The catalog, with the rows of a ConfigMap (`CATALOG`). Raises CommandError, CatalogError."""
    if own is None:
        return published()
    return published().extended(_entries(own))


def read_usable_catalog(own: str | None) -> tuple[Catalog, list[str]]:
    """The catalog without the rows that cannot be read, and a sentence on each of these: an operator that started before somebody
    wrote them has to be able to start again. Raises CommandError."""
    rows, problems = _entries(own) if own is not None else {}, []
    for name, text in list(rows.items()):
        try:
            published().extended({name: text})
        except CatalogError as error:
            problems.append(f"the catalog's entry {name} is left out: {error}")
            del rows[name]
    return published().extended(rows), problems


def _entries(own: str) -> dict[str, str]:
    return _mounted(Path(own)) if Path(own).is_dir() else dict(_data(own))


def _mounted(folder: Path) -> dict[str, str]:
    """A file for each key; the names with two dots are how a volume changes all files at once."""
    try:
        files = [path for path in sorted(folder.iterdir()) if not path.name.startswith("..") and path.is_file()]
        return {path.name: path.read_text(encoding="utf-8") for path in files}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a file of it is not text"
        raise CommandError(f"{folder} cannot be read ({reason}): give the folder that a ConfigMap is mounted at.") from error


def _data(file: str) -> dict[str, str]:
    maps = [document for document in read_objects(file) if document.get("kind") == "ConfigMap"]
    data = maps[0].get("data") if len(maps) == 1 else None
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise CommandError(f"{file} must hold one ConfigMap whose data are texts, one per catalog entry: see docs/preflight.md.")
    return data


def read_objects(file: str) -> list[dict[str, Any]]:
    """The Kubernetes objects of a file (`-`: standard input), those of a List too. Raises CommandError."""
    try:
        documents = read_documents(file)
    except DocumentError as error:
        raise CommandError(str(error)) from None
    objects: list[dict[str, Any]] = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
        objects += [found for found in (items if isinstance(items, list) else [document]) if isinstance(found, dict)]
    return objects


def shown(file: str) -> str:
    """A file's name for sentences."""
    return "standard input" if file == "-" else file


_UNITS = {"": 1, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
          "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30, "ti": 2**40, "tib": 2**40}  # fmt: skip


def read_memory(text: str) -> int:
    """Bytes of `80GiB`, `80Gi`, `80g`, `85GB` or a plain number from 2^30 on. Raises CommandError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:[.][0-9]{1,9})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise CommandError(f"--gpu-memory is '{text[:40]}': write the memory of one GPU like 80GiB.")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 2**30:
        raise CommandError(
            f"--gpu-memory is '{text[:40]}', which is {size} bytes, and a GPU has at least 1 GiB: write it with its unit, "
            "like 80GiB."
        )
    return size
