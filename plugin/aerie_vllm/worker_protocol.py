"""What the API server requests of the workers, and what a worker returns: the one interface of the two halves.

The API server calls the methods below by name, on every rank of every engine, through the engine client's `collective_rpc`. They
run in the engine's loop, so between two steps: while one runs, no request advances. Results travel as msgpack, so they are plain
dicts of str, int, float, bool, list and None.

    aerie_drafter_describe()                  -> Report
    aerie_drafter_stage(folder, files, keep)  -> Report   starts a thread and returns; call `describe` until `staging` has ended
    aerie_drafter_swap(digest)                -> SwapReport   to be called while the engine is paused

Guarantees: no method raises; what went wrong is in the result, and `loaded` names what the rank drafts with afterwards. Only
`swap` changes what the engine drafts with. A stage that hangs on a disk delays neither `swap` nor `describe`.

Not guaranteed: agreement of the ranks. The caller compares their results and swaps all back where they differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Literal, TypedDict

DESCRIBE = "aerie_drafter_describe"
STAGE = "aerie_drafter_stage"
SWAP = "aerie_drafter_swap"
MAX_MESSAGE_CHARACTERS = 2000
"""Longest message of a problem."""


class Problem(TypedDict):
    """A reason against a drafter or a swap: `reason` is one CamelCase word, `message` what is, why, and what to do."""

    reason: str
    message: str


class Drafter(TypedDict):
    """A drafter in this rank's memory."""

    digest: str
    """`compute_digest(files)`."""
    files: dict[str, str]
    """SHA-256 (hex) by file name: config.json and every safetensors file. Exactly the bytes that were read."""
    kind: str
    """`eagle3`, `eagle3.1`, or another method's name: `eagle`, `draft_model`, `dflash`, ..."""
    flags: dict[str, bool]
    """What the gates are set to: fc_norm, norm_output, norm_before_fc, norm_before_residual. Empty without gates."""


class Staging(TypedDict):
    """The latest `stage`, until the next one replaces it."""

    digest: str
    state: Literal["Reading", "Staged", "Rejected"]
    problem: Problem | None
    """Why it was rejected; nothing has changed then."""
    seconds: float
    """Time from the call until it ended, or until now."""


class Report(TypedDict):
    """What one rank holds."""

    rank: int
    """The rank among those of its engine."""
    architecture: str
    """The drafter's class in vLLM: `Eagle3LlamaForCausalLM`; empty without a drafter."""
    method: str
    """vLLM's name of the method: `eagle3`; empty without a drafter."""
    own: Drafter | None
    """The drafter of the engine's arguments; None until a thread has read its files (`describe` starts it), and where `unfit`."""
    own_problem: Problem | None
    """Why its files could not be read so far, where that may pass: the next `describe` reads them again."""
    unfit: Problem | None
    """Why this engine can never change its drafter in place."""
    loaded: str | None
    """The digest of what this rank drafts with; None while `own` is None."""
    held: list[Drafter]
    """Drafters that `swap` accepts: what is loaded, what was loaded before, and what is staged."""
    staging: Staging | None
    broken: Problem | None
    """A failed swap could not be undone: what the rank drafts with is not defined. Only a restart helps."""


class SwapReport(TypedDict):
    """What a swap on one rank did."""

    rank: int
    loaded: str | None
    """The digest of what this rank drafts with now."""
    problem: Problem | None
    """Why the swap failed; `loaded` is then what it was, unless `broken`."""
    broken: Problem | None
    seconds: float


def build_problem(reason: str, message: str) -> Problem:
    """Return a problem whose message is short and can be encoded as UTF-8, whatever a file has put into it.

    A lone surrogate in a report would end the thread that sends all outputs of the engine, and no request would be answered.
    """
    text = message[:MAX_MESSAGE_CHARACTERS].encode(errors="backslashreplace").decode()
    return Problem(reason=reason, message=text[:MAX_MESSAGE_CHARACTERS])


def compute_digest(files: Mapping[str, str]) -> str:
    """Return the drafter's digest: SHA-256 (hex) of {file name: SHA-256} as JSON with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True, separators=(",", ":")).encode()).hexdigest()
