"""The calls that prepare and change a pod's drafter, and their HTTP requests.

plugin/aerie_vllm/requests.py parses the same bodies.

Guarantees: equal calls are equal values and equal requests. A load or a return that is repeated leaves the drafter as it is, and
a preparation that is repeated leaves its result. Not guaranteed: that the endpoint accepts a call; it checks every field itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

DRAFTER_PATH, LEASE_PATH, PREPARE_PATH = "/aerie/drafter", "/aerie/drafter/lease", "/aerie/drafter/prepare"
ISOLATION_PATH = "/aerie/isolation"


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
class DrafterSource:
    """Where a pod gets a drafter's files: a folder of the pod, or a revision of a repository of the Hub.

    Raises ValueError for both or neither.
    """

    folder: str | None = None
    """Absolute path of the folder in the pod."""
    repository: str | None = None
    """`owner/name` on the Hub."""
    revision: str | None = None
    """Commit, tag or branch of the repository."""

    def __post_init__(self) -> None:
        if self.fields.keys() not in ({"folder"}, {"repository", "revision"}):
            raise ValueError(f"{self} needs either folder, or repository and revision.")

    @property
    def fields(self) -> dict[str, str]:
        """The fields that are set, as in a request or a file with an expected drafter."""
        fields = {"folder": self.folder, "repository": self.repository, "revision": self.revision}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class PrepareDrafter:
    """Fetch a drafter's files where needed, hash them, and check them against the engine, which continues as it is.

    The pod answers before it has ended; `DrafterState.prepared` has the progress and the result. Another source replaces a
    preparation in progress. The same source is prepared again only if it has failed.
    """

    source: DrafterSource


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
    isolated: bool = False
    """Whether the pod makes the change only while it is isolated. It then stays isolated for the time of the lease."""


@dataclass(frozen=True)
class RenewLease:
    """Renew the lease of the loaded drafter."""

    digest: str
    lease_seconds: float


@dataclass(frozen=True)
class IsolatePod:
    """Keep the pod from becoming ready, so that no Service or route leads users to it, for the time of a lease."""

    lease_seconds: float
    """Seconds until the pod returns to its own drafter and users reach it, unless a change renews the isolation."""


@dataclass(frozen=True)
class ReturnToOwn:
    """Load the pod's own drafter, and end its isolation. It withdraws a change whose files are still being read."""


DrafterCall = LoadDrafter | PrepareDrafter | RenewLease | IsolatePod | ReturnToOwn


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
            if call.isolated:  # pods with an earlier release of the plugin do not know the field
                fields["isolated"] = True
            return CallRequest("PUT", DRAFTER_PATH, json.dumps(fields).encode())
        case PrepareDrafter():
            return CallRequest("POST", PREPARE_PATH, json.dumps(call.source.fields).encode())
        case RenewLease():
            body = {"digest": call.digest, "lease_seconds": call.lease_seconds}
            return CallRequest("POST", LEASE_PATH, json.dumps(body).encode())
        case IsolatePod():
            return CallRequest("POST", ISOLATION_PATH, json.dumps({"lease_seconds": call.lease_seconds}).encode())
        case ReturnToOwn():
            return CallRequest("DELETE", DRAFTER_PATH, None)
