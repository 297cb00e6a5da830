"""Reads inputs that the command line names: manifests, catalogs, and amounts of memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aerie.api import KIND, ResourceError, SpeculativeDeployment
from aerie.api.validation.admission import find_manifest_errors, prune_manifest
from aerie.cli.console import CommandError
from aerie.engine.models.drafter_catalog import CatalogError, DrafterCatalog, load_published_catalog
from aerie.yaml_documents import YamlDocumentError, read_yaml_documents


def read_deployment(file: str) -> SpeculativeDeployment:
    """Return the one SpeculativeDeployment of a manifest (`-`: standard input), as the API server would accept it.

    Raises CommandError; ResourceError: the API server would reject it.
    """
    documents = [document for document in read_objects(file) if document.get("kind") == KIND]
    if len(documents) != 1:
        count = f"contains {len(documents)}" if documents else "contains none"
        raise CommandError(f"{display_file_name(file)} must contain exactly one {KIND}, but {count}: set a file with one.")
    return parse_deployment(documents[0])


def parse_deployment(document: dict[str, Any]) -> SpeculativeDeployment:
    """Return the resource as the API server would accept it. Raises ResourceError: it would reject it."""
    document = prune_manifest(document)
    if errors := find_manifest_errors(document):
        raise ResourceError("\n".join(errors))
    return SpeculativeDeployment.from_dict(document, unknown_fields="forbid")


CATALOG_HELP = "ConfigMap with additional catalog entries: its manifest, or the folder that it is mounted at."


def read_catalog(extension_file: str | None) -> DrafterCatalog:
    """Return the catalog, with the entries of a ConfigMap (`CATALOG_HELP`). Raises CommandError, CatalogError."""
    if extension_file is None:
        return load_published_catalog()
    return load_published_catalog().with_user_entries(_read_catalog_entries(extension_file))


def read_valid_catalog(extension_file: str | None) -> tuple[DrafterCatalog, list[str]]:
    """Return the catalog without the entries that cannot be read, and a message for each of these. An operator must be able to
    restart after somebody has written an invalid entry. Raises CommandError."""
    entries, problems = _read_catalog_entries(extension_file) if extension_file is not None else {}, []
    for name, text in list(entries.items()):
        try:
            load_published_catalog().with_user_entries({name: text})
        except CatalogError as error:
            problems.append(f"the catalog entry {name} is ignored: {error}")
            del entries[name]
    return load_published_catalog().with_user_entries(entries), problems


def _read_catalog_entries(extension_file: str) -> dict[str, str]:
    return (
        _read_mounted_config_map(Path(extension_file))
        if Path(extension_file).is_dir()
        else dict(_read_config_map_manifest(extension_file))
    )


def _read_mounted_config_map(folder: Path) -> dict[str, str]:
    """Read a file for each key; names with two leading dots are how a volume replaces all files at once."""
    try:
        files = [path for path in sorted(folder.iterdir()) if not path.name.startswith("..") and path.is_file()]
        return {path.name: path.read_text(encoding="utf-8") for path in files}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "one of its files is not text"
        raise CommandError(f"{folder} cannot be read ({reason}): set the folder that a ConfigMap is mounted at.") from error


def _read_config_map_manifest(file: str) -> dict[str, str]:
    config_maps = [document for document in read_objects(file) if document.get("kind") == "ConfigMap"]
    data = config_maps[0].get("data") if len(config_maps) == 1 else None
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise CommandError(
            f"{file} must contain one ConfigMap whose data are strings, one per catalog entry: see docs/how-to/find-a-drafter.md."
        )
    return data


def read_objects(file: str) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of a file (`-`: standard input), with those of a List. Raises CommandError."""
    try:
        documents = read_yaml_documents(file)
    except YamlDocumentError as error:
        raise CommandError(str(error)) from None
    objects: list[dict[str, Any]] = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
        objects += [item for item in (items if isinstance(items, list) else [document]) if isinstance(item, dict)]
    return objects


def display_file_name(file: str) -> str:
    """Return a file's name for messages."""
    return "standard input" if file == "-" else file


def parse_memory_bytes(text: str) -> int:
    """Return the bytes of `80GiB`, `80Gi`, `80g`, `85GB` or a plain number of at least 2^30. Raises CommandError."""
    from kubernetes.utils.quantity import parse_quantity  # the package takes as long to import as the command to run

    match = re.fullmatch(r"([0-9]{1,15}(?:[.][0-9]{1,9})?)\s*(?:([mgt])(i?)b?)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise CommandError(f"--gpu-memory is '{text[:40]}': set the memory of one GPU, such as 80GiB.")
    number, prefix, binary = (part or "" for part in match.groups())
    size = int(parse_quantity(f"{number}{prefix.upper()}{binary.lower()}"))  # type: ignore[no-untyped-call]
    if size < 2**30:
        raise CommandError(
            f"--gpu-memory is '{text[:40]}', which is {size} bytes, but a GPU has at least 1 GiB: add the unit, such as 80GiB."
        )
    return size
