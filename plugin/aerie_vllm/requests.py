"""The bodies of the endpoint's calls, and of the file with the expected drafter, from JSON to checked values.

Guarantees: an unknown field, a field twice, a wrong type and a value out of its range raise `RejectionError` with the field, the
value and the fix. Not guaranteed: that the files exist, or that they are a drafter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from aerie_vllm.rejection import RejectionError
from aerie_vllm.worker_protocol import compute_digest

MAX_FILES = 64
MAX_LEASE_SECONDS = 3600.0
"""Longest lease: a drafter on trial stays no longer after its operator has ended."""
_FILE_NAME = re.compile(r"config\.json|[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"/[^\x00-\x1f\x7f]{0,4095}")
_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]{1,96}(/[A-Za-z0-9_.-]{1,96})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,199}")
_TURN = re.compile(r"[A-Za-z0-9._:/-]{1,64}")
_SOURCE_FIELDS = ("folder", "repository", "revision")
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter on disk."""

    folder: str | None
    """None for a drafter that the engine already holds."""
    files: dict[str, str]
    """SHA-256 (hex) by file name."""

    @property
    def digest(self) -> str:
        """The drafter's digest."""
        return compute_digest(self.files)


@dataclass(frozen=True)
class DrafterSource:
    """Where a drafter's files come from: a folder, or a revision of a repository of the Hub."""

    folder: str | None = None
    repository: str | None = None
    revision: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        """The fields that are set, as in a request."""
        fields = {"folder": self.folder, "repository": self.repository, "revision": self.revision}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class ExpectedDrafter:
    """The drafter that a new process comes to."""

    source: DrafterSource
    files: dict[str, str]
    """SHA-256 (hex) by file name."""


@dataclass(frozen=True)
class ChangeRequest:
    """Body of PUT: the drafter to load, and for how long."""

    drafter: DrafterFiles
    lease_seconds: float | None
    """Seconds until the engine returns to its own drafter; None makes this drafter its own."""
    expected_digest: str | None
    """The digest that has to be loaded now; None if any may be."""
    turn: str | None
    """The caller's name of the window that begins with the change."""
    settle_seconds: float
    """Seconds after the change that are counted apart, because requests of the previous drafter are still in them."""
    isolated: bool = False
    """Whether the change must not be made unless the pod is isolated."""


@dataclass(frozen=True)
class LeaseRequest:
    """Body of a renewal."""

    digest: str
    lease_seconds: float


def parse_change(body: bytes) -> ChangeRequest:
    """Parse the body of PUT. Raises RejectionError."""
    optional = ("folder", "lease_seconds", "expected_digest", "turn", "settle_seconds", "isolated")
    fields = _parse_object(body, ("files",), optional)
    lease, settle, isolated = fields.get("lease_seconds"), fields.get("settle_seconds", 0), fields.get("isolated", False)
    if not isinstance(isolated, bool):
        raise _invalid("isolated", isolated, "send true or false")
    return ChangeRequest(
        parse_drafter(fields),
        None if lease is None else _parse_seconds("lease_seconds", lease, 1.0),
        None if fields.get("expected_digest") is None else _parse_text("expected_digest", fields["expected_digest"], _SHA256),
        None if fields.get("turn") is None else _parse_text("turn", fields["turn"], _TURN),
        _parse_seconds("settle_seconds", settle, 0.0),
        isolated,
    )


def parse_isolation(body: bytes) -> float:
    """Return the seconds of an isolation's lease. Raises RejectionError."""
    return _parse_seconds("lease_seconds", _parse_object(body, ("lease_seconds",), ())["lease_seconds"], 1.0)


def parse_lease(body: bytes) -> LeaseRequest:
    """Parse the body of a renewal. Raises RejectionError."""
    fields = _parse_object(body, ("digest", "lease_seconds"), ())
    return LeaseRequest(
        _parse_text("digest", fields["digest"], _SHA256), _parse_seconds("lease_seconds", fields["lease_seconds"], 1.0)
    )


def parse_preparation(body: bytes) -> DrafterSource:
    """Parse the body of a preparation. Raises RejectionError."""
    return _parse_source(_parse_object(body, (), _SOURCE_FIELDS))


def parse_expected(text: bytes) -> ExpectedDrafter:
    """Parse the file with the expected drafter. Raises RejectionError."""
    fields = _parse_object(text, ("files",), _SOURCE_FIELDS)
    files = parse_drafter({"files": fields.pop("files")}).files
    return ExpectedDrafter(_parse_source(fields), files)


def _parse_source(fields: dict[str, object]) -> DrafterSource:
    if fields.keys() == {"folder"}:
        return DrafterSource(folder=_parse_text("folder", fields["folder"], _FOLDER))
    if fields.keys() != {"repository", "revision"}:
        message = f"the body has {', '.join(sorted(fields)) or 'no source'}: send either folder, or repository and revision."
        raise RejectionError(400, "InvalidSource", message)
    return DrafterSource(
        repository=_parse_text("repository", fields["repository"], _REPOSITORY),
        revision=_parse_text("revision", fields["revision"], _REVISION),
    )


def _parse_object(body: bytes, required: Sequence[str], optional: Sequence[str]) -> dict[str, object]:
    try:
        # A field twice would let two readers see two different requests.
        value: object = json.loads(body.decode(), object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RejectionError(400, "InvalidBody", f"the body is no JSON ({_shorten(error)}): send one JSON object.") from None
    if not isinstance(value, dict):
        raise RejectionError(400, "InvalidBody", f"the body is {type(value).__name__}: send one JSON object.")
    for name in value:
        if name not in required and name not in optional:
            fields = ", ".join((*required, *optional))
            raise RejectionError(400, "UnknownField", f"the body has the field {_shorten(name)!r}: the fields are {fields}.")
    for name in required:
        if name not in value:
            raise RejectionError(400, "MissingField", f"the body has no field {name}: add it.")
    return value


def _reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(fields := dict(pairs)) != len(pairs):
        raise ValueError("a field is there twice")
    return fields


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def parse_drafter(fields: dict[str, object]) -> DrafterFiles:
    """Return the drafter in the fields `files` and, if it is there, `folder`. Raises RejectionError."""
    folder, files = fields.get("folder"), fields["files"]
    if folder is not None and not isinstance(folder, str):
        raise _invalid("folder", folder, "send the absolute path of the drafter's folder")
    if not isinstance(files, dict) or not 1 < len(files) <= MAX_FILES:
        fix = f"send the SHA-256 of config.json and of each safetensors file by file name, at most {MAX_FILES}"
        raise _invalid("files", files, fix)
    for name, digest in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise _invalid("files", name, "name only config.json and safetensors files of the folder itself")
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise _invalid(f"files[{name}]", digest, "send the SHA-256 of the file as 64 lower-case hexadecimal digits")
    if "config.json" not in files:
        raise _invalid("files", sorted(files), "add config.json")
    return DrafterFiles(folder, files)


def _parse_seconds(name: str, value: object, minimum: float) -> float:
    fix = f"send a number of seconds from {minimum:g} to {MAX_LEASE_SECONDS:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _invalid(name, value, fix)
    if not math.isfinite(value) or not minimum <= value <= MAX_LEASE_SECONDS:
        raise _invalid(name, value, fix)
    return float(value)


def _parse_text(name: str, value: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _invalid(name, value, f"send text that matches {pattern.pattern}")
    return value


def _invalid(name: str, value: object, fix: str) -> RejectionError:
    return RejectionError(400, "InvalidField", f"{name} is {_shorten(repr(value))}: {fix}.")


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
