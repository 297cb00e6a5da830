"""Turns an image reference into the command on this machine that stands for it. The rows are data: images.toml.

Guarantees: an unknown reference is an ImageError that names it and explains how to add a row; nothing is ever downloaded.
Not guaranteed: that tag or digest mean anything. The lab has one version of each program; a row that asks for the tag ({tag}), as
the simulator's do, decides itself what it means.
"""

from __future__ import annotations

import fnmatch
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from aerie_lab.binaries import find_family_folder
from aerie_lab.errors import BuildError, LabError, StateError

SIMULATED_IMAGE_TABLE = Path(__file__).parent / "simulated.toml"
"""A table in which vllm/vllm-openai is the simulator."""


class ImageError(LabError):
    """An image reference that the lab cannot stand in for."""


@dataclass(frozen=True)
class Image:
    """Command and environment of a container of this image, unless its pod overrides them."""

    entrypoint: list[str]
    arguments: list[str] = field(default_factory=list)
    path_folders: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def normalize_repository(reference: str) -> str:
    """Return the reference without tag and digest, with the registry and folder that container engines add.

    >>> repository("busybox:1.36"), repository("ghcr.io/a/b@sha256:00"), repository("vllm/vllm-openai:v0.33.0")
    ('docker.io/library/busybox', 'ghcr.io/a/b', 'docker.io/vllm/vllm-openai')
    """
    head, _, last = reference.split("@", 1)[0].rpartition("/")
    name = f"{head}/{last.split(':', 1)[0]}" if head else last.split(":", 1)[0]
    first = name.split("/", 1)[0]
    if "/" not in name:
        return f"docker.io/library/{name}"
    if "." not in first and ":" not in first and first != "localhost":
        return f"docker.io/{name}"
    if first == "docker.io" and name.count("/") == 1:
        return f"docker.io/library/{name.removeprefix('docker.io/')}"
    return name


def parse_tag(reference: str) -> str:
    """Return the reference's tag; empty where it has none.

    >>> tag("localhost:5000/vllm-openai:v0.33.0@sha256:00"), tag("localhost:5000/vllm-openai")
    ('v0.33.0', '')
    """
    return reference.split("@", 1)[0].rpartition("/")[2].partition(":")[2]


class ImageTable:
    """The rows of the given TOML files, then the lab's own."""

    def __init__(self, files: Sequence[Path] = (), find_binaries_folder: Callable[[str], Path] = find_family_folder) -> None:
        own = resources.files("aerie_lab.images").joinpath("images.toml").read_text()
        texts = [(file, _read_table(file)) for file in files] + [(Path("images.toml"), own)]
        self._images: list[dict[str, Any]] = []
        self._volumes: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        """Rows for the lab's Hub: repository, commit and the folder that stands for it."""
        self._find_binaries_folder = find_binaries_folder
        for file, text in texts:
            try:
                document = tomllib.loads(text)
            except (ValueError, RecursionError) as error:
                raise StateError(f"image table {file} is not TOML: {error}.") from error
            for unknown in sorted(document.keys() - {"image", "volume", "checkpoint"}):
                raise StateError(f"image table {file}: unknown entry '{unknown}': [[image]], [[volume]], [[checkpoint]] only.")
            self._images += _parse_rows(document, str(file), "image", ("repository", "entrypoint"), _IMAGE_FIELDS)
            for row in _parse_rows(document, str(file), "volume", ("repository", "folder"), _VOLUME_FIELDS):
                self._volumes.append(row | {"folder": str(file.absolute().parent / row["folder"])})
            for row in _parse_rows(document, str(file), "checkpoint", tuple(_CHECKPOINT_FIELDS), _CHECKPOINT_FIELDS):
                if not _COMMIT_PATTERN.fullmatch(row["commit"]):
                    raise StateError(
                        f"image table {file}: 'commit' of {row['repository']} is '{row['commit']}': write 40 hexadecimal digits."
                    )
                self.checkpoints.append(row | {"folder": str(file.absolute().parent / row["folder"])})

    def resolve_image(self, reference: str) -> Image:
        """Return the command that stands for `reference`. Raises ImageError."""
        row = self._find_row(self._images, reference)
        if row is None:
            raise ImageError(
                f"image '{reference}' is not in the lab's image table: add a row with repository = "
                f"'{normalize_repository(reference)}' to a TOML file and start the lab with `aerie-lab up --images FILE`"
            )
        try:
            return Image(
                entrypoint=[self._fill_placeholders(part, reference) for part in row["entrypoint"]],
                arguments=[self._fill_placeholders(part, reference) for part in row.get("arguments", [])],
                path_folders=[self._fill_placeholders(part, reference) for part in row.get("path", [])],
                environment={k: self._fill_placeholders(v, reference) for k, v in row.get("environment", {}).items()},
            )
        except BuildError as error:
            raise ImageError(f"image '{reference}': {error}") from error

    def resolve_volume(self, reference: str) -> Path:
        """Return the folder that stands for the image volume `reference`. Raises ImageError."""
        row = self._find_row(self._volumes, reference)
        if row is None:
            raise ImageError(
                f"image volume '{reference}' is not in the lab's image table: add a [[volume]] row with repository = "
                f"'{normalize_repository(reference)}' and folder = '...' to a TOML file given with `aerie-lab up --images FILE`"
            )
        folder = Path(row["folder"])
        if not folder.is_dir():
            raise ImageError(f"image volume '{reference}': {folder} is not a folder")
        return folder

    @staticmethod
    def _find_row(rows: list[dict[str, Any]], reference: str) -> dict[str, Any] | None:
        name = normalize_repository(reference)
        return next((row for row in rows if fnmatch.fnmatchcase(name, _repository_pattern(row["repository"]))), None)

    def _fill_placeholders(self, text: str, reference: str) -> str:
        def value(match: re.Match[str]) -> str:
            placeholder = match[1]
            if placeholder == "python":
                return sys.executable
            if placeholder == "python-folder":
                return str(Path(sys.executable).parent)
            if placeholder == "tag":
                return parse_tag(reference)
            if placeholder.startswith("binaries:"):
                return str(self._find_binaries_folder(placeholder.removeprefix("binaries:")))
            raise AssertionError(f"{match[0]} was let through by _check_placeholders")

        return _PLACEHOLDER.sub(value, text)


_PLACEHOLDERS = "{python}, {python-folder}, {tag}, {binaries:FAMILY}"
_PLACEHOLDER = re.compile(r"\{([a-z:-]+)\}")
_IMAGE_FIELDS: dict[str, type] = {"repository": str, "entrypoint": list, "arguments": list, "path": list, "environment": dict}
_VOLUME_FIELDS: dict[str, type] = {"repository": str, "folder": str}
_CHECKPOINT_FIELDS: dict[str, type] = {"repository": str, "commit": str, "folder": str}
_COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")


def _repository_pattern(row: str) -> str:
    return row if row.startswith("*") else normalize_repository(row)  # a row that begins with * means any registry


def _read_table(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise StateError(f"image table {file} cannot be read: {error.strerror}.") from error


def _parse_rows(
    document: dict[str, Any], name: str, kind: str, required_fields: tuple[str, ...], field_types: dict[str, type]
) -> list[dict[str, Any]]:
    rows = document.get(kind, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise StateError(f"image table {name}: write each row as [[{kind}]].")
    for row in rows:
        for missing in sorted(set(required_fields) - row.keys()):
            raise StateError(f"image table {name}: a [[{kind}]] row has no '{missing}': {row}.")
        for unknown in sorted(row.keys() - field_types.keys()):
            raise StateError(
                f"image table {name}: unknown field '{unknown}' in a [[{kind}]] row: {', '.join(sorted(field_types))}."
            )
        for key, value in row.items():
            _check_value(f"image table {name}: '{key}' of {row['repository']}", value, field_types[key])
    return rows


def _check_value(where: str, value: Any, kind: type) -> None:
    parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
    if not isinstance(value, kind) or not all(isinstance(part, str) for part in parts):
        shape = {"str": "a string", "list": "a list of strings", "dict": "a table of strings"}[kind.__name__]
        raise StateError(f"{where} is {value!r}: it must be {shape}.")
    for part in parts:
        for placeholder in _PLACEHOLDER.findall(part):
            if placeholder not in ("python", "python-folder", "tag") and not placeholder.startswith("binaries:"):
                raise StateError(f"{where}: unknown placeholder {{{placeholder}}}: {_PLACEHOLDERS}.")
