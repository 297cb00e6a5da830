"""What the endpoint reads from the environment, and what it needs from the files of the pod.

| variable | meaning |
|---|---|
| `AERIE_DRAFTER_TOKEN_FILE` | file with the bearer token; without it the endpoint is off |
| `AERIE_DRAFTER_ROOTS` | folders, separated by `:`, below which drafters are loaded from |
| `AERIE_DRAFTER_EXPECTED` | file with the drafter that a new process comes to: `requests.ExpectedDrafter`; it may be missing |
| `AERIE_DRAFTER_OWN_CACHE` | folder of the volume with the Hub's cache, if no other pod has it: drafters are removed from it |
| `AERIE_DRAFTER_OWN_CACHE_BYTES` | limit of that volume; without it the disk is the limit |

Guarantees: token and expectation are read at each use, so that both may change while the process runs. A folder or file is
accepted only if it is below a root after all links are resolved, and each file is a regular file. Not guaranteed: that a file is
still the same when a worker opens it; the worker therefore computes the SHA-256 of the bytes that it loads.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aerie_vllm.rejection import RejectionError

TOKEN_FILE = "AERIE_DRAFTER_TOKEN_FILE"
ROOTS = "AERIE_DRAFTER_ROOTS"
EXPECTED = "AERIE_DRAFTER_EXPECTED"
OWN_CACHE = "AERIE_DRAFTER_OWN_CACHE"
OWN_CACHE_BYTES = "AERIE_DRAFTER_OWN_CACHE_BYTES"
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 4096


@dataclass(frozen=True)
class Settings:
    """The settings of one process."""

    token_file: Path
    roots: tuple[Path, ...]
    expected: Path | None
    own_cache: Path | None = None
    own_cache_bytes: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings | None:
        """Return the settings, or None where no token file is named. Raises ValueError for a root that is no absolute path."""
        token_file = environment.get(TOKEN_FILE, "")
        if not token_file:
            return None
        roots = tuple(Path(root) for root in environment.get(ROOTS, "").split(":") if root)
        for root in roots:
            if not root.is_absolute():
                raise ValueError(f"{ROOTS} has {str(root)!r}, which is no absolute path: write absolute paths, separated by `:`.")
        expected = environment.get(EXPECTED, "")
        own_cache, limit = environment.get(OWN_CACHE, ""), environment.get(OWN_CACHE_BYTES, "")
        return cls(
            Path(token_file),
            roots,
            Path(expected) if expected else None,
            Path(own_cache) if own_cache else None,
            int(limit) if limit else None,
        )

    def check_token(self, authorization: bytes | None) -> None:
        """Compare an Authorization header with the token, in constant time. Raises RejectionError."""
        expected = _read_token(self.token_file)
        scheme, _, credential = (authorization or b"").partition(b" ")
        # Digests are compared, so that not even the token's length shows in the time.
        digests = [hashlib.sha256(secret).digest() for secret in (credential.strip(), expected)]
        if not hmac.compare_digest(*digests) or scheme.lower() != b"bearer":
            message = "the request has no valid token: send the Secret's token as `Authorization: Bearer TOKEN`."
            raise RejectionError(401, "Unauthorized", message)

    def resolve_folder(self, folder: str, names: Iterable[str]) -> str:
        """Return the folder without links. Raises RejectionError unless it and its regular files are below a root."""
        if not os.path.isabs(folder) or "\0" in folder:
            raise RejectionError(
                400, "InvalidFolder", f"folder is {folder[:200]!r}: send the absolute path of the drafter's folder."
            )
        resolved = os.path.realpath(folder)
        root = next((root for root in map(os.path.realpath, self.roots) if _is_below(resolved, root)), None)
        if root is None:
            roots = ", ".join(map(str, self.roots)) or "none"
            message = f"folder {folder!r} is not below a root of drafters ({ROOTS}: {roots}): mount the drafter there."
            raise RejectionError(403, "FolderOutsideRoots", message)
        for name in names:
            path = os.path.join(resolved, name)
            target = os.path.realpath(path)
            if not _is_below(target, root):
                message = f"{path} is a link out of {root}, so it is not read: copy the file into the drafter's folder."
                raise RejectionError(403, "LinkOutsideRoots", message)
            try:
                mode = os.stat(target).st_mode
            except (OSError, ValueError) as error:
                raise RejectionError(422, "FileMissing", f"{path} cannot be read ({error}): copy the file there first.") from None
            if not stat.S_ISREG(mode):
                raise RejectionError(
                    422, "NotAFile", f"{path} is no regular file: a drafter is config.json and safetensors files."
                )
        return resolved


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath((path, root)) == root


def _read_token(path: Path) -> bytes:
    """Return the token. Raises RejectionError if the file has none that is long enough to be secret."""
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES).strip()
    except OSError as error:
        message = f"the token file {path} cannot be read ({error.strerror}): mount the Secret with the token."
        raise RejectionError(503, "NoToken", message) from None
    if len(token) < MIN_TOKEN_BYTES:
        message = f"the token file {path} has {len(token)} bytes: write a random token of {MIN_TOKEN_BYTES} bytes or more."
        raise RejectionError(503, "NoToken", message)
    return token
