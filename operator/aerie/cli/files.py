"""Reads what a person names on the command line: manifests, and amounts of memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from aerie.api import KIND, SpeculativeDeployment
from aerie.cli.console import CommandError
from aerie.engine.catalog import Catalog, CatalogError, published


def read_deployment(file: str) -> SpeculativeDeployment:
    """The one SpeculativeDeployment of a manifest (`-`: standard input). Raises CommandError, ResourceError."""
    documents = [document for document in _documents(file) if document.get("kind") == KIND]
    if len(documents) != 1:
        found = f"holds {len(documents)} of them" if documents else "holds none"
        raise CommandError(f"{file} must hold exactly one {KIND}, and {found}: give a file with the one to check.")
    return SpeculativeDeployment.from_dict(documents[0], unknown="refuse")


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
    maps = [document for document in _documents(file) if document.get("kind") == "ConfigMap"]
    data = maps[0].get("data") if len(maps) == 1 else None
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise CommandError(f"{file} must hold one ConfigMap whose data are texts, one per catalog entry: see docs/preflight.md.")
    return data


def _documents(file: str) -> list[dict[str, Any]]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CommandError(f"{file} cannot be read ({reason}): give a YAML file.") from error
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise CommandError(f"{file} is not YAML: {' '.join(str(error).split())}.") from None
    return [document for document in documents if isinstance(document, dict)]


_UNITS = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9, "Mi": 2**20, "MiB": 2**20, "Gi": 2**30, "GiB": 2**30}


def read_memory(text: str) -> int:
    """Bytes of `80GiB`, `80Gi`, `85GB` or a plain number. Raises CommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise CommandError(f"--gpu-memory is '{text}': write the memory of one GPU like 80GiB.")
    return int(float(match[1]) * _UNITS[match[2]])
