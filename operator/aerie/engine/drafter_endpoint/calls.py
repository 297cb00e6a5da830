"""The calls that change a pod's drafter, and their HTTP requests (plugin/aerie_vllm/requests.py parses the same bodies).

Guarantees: equal calls are equal values and equal requests. A load or a return that is repeated leaves the drafter as it is. Not
guaranteed: that the endpoint accepts a call; it checks every field itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

DRAFTER_PATH, LEASE_PATH = "/aerie/drafter", "/aerie/drafter/lease"


def compute_digest(files: Mapping[str, str]) -> str:
    """Return a drafter's digest: SHA-256 (hex) of {file name: SHA-256} as JSON with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter's files."""

    files: Mapping[str, str]
    """SHA-256 (hex) by file name: config.json and every safetensors file."""
    folder: str | None = None
    """Absolute path of their folder in the pod; None for a drafter that the engine holds in memory."""

    @property
    def digest(self) -> str:
        """The drafter's digest."""
        return compute_digest(self.files)


@dataclass(frozen=True)
class LoadDrafter:
    """Load a drafter, for the time of a lease or as the pod's own."""

    drafter: DrafterFiles
    lease_seconds: float | None
    """Seconds until the pod returns to its own drafter, unless the lease is renewed; None makes this drafter its own."""
    expected_digest: str | None = None
    """Digest of the drafter that has to be loaded before the change; None if any may be."""
    turn: str | None = None
    """Name of the window that begins with the change; a call with the name of the current window begins none."""
    settle_seconds: float = 0.0
    """Seconds of the window that are its wash-out."""


@dataclass(frozen=True)
class RenewLease:
    """Renew the lease of the loaded drafter."""

    digest: str
    lease_seconds: float


@dataclass(frozen=True)
class ReturnToOwn:
    """Load the pod's own drafter. It withdraws a change whose files are still being read."""


DrafterCall = LoadDrafter | RenewLease | ReturnToOwn


@dataclass(frozen=True)
class CallRequest:
    """HTTP request of a call."""

    method: str
    path: str
    body: bytes | None


def build_request(call: DrafterCall) -> CallRequest:
    """Return the request of a call."""
    match call:
        case LoadDrafter():
            fields: dict[str, object] = {
                "files": dict(call.drafter.files),
                "lease_seconds": call.lease_seconds,
                "settle_seconds": call.settle_seconds,
            }
            optional = {"folder": call.drafter.folder, "expected_digest": call.expected_digest, "turn": call.turn}
            fields |= {name: value for name, value in optional.items() if value is not None}
            return CallRequest("PUT", DRAFTER_PATH, json.dumps(fields).encode())
        case RenewLease():
            body = {"digest": call.digest, "lease_seconds": call.lease_seconds}
            return CallRequest("POST", LEASE_PATH, json.dumps(body).encode())
        case ReturnToOwn():
            return CallRequest("DELETE", DRAFTER_PATH, None)
