"""What a pod reports of its drafter: the body of GET `/aerie/drafter` (plugin/aerie_vllm/control.py, `describe`).

Guarantees: a state that is returned is complete and consistent: digests are those of the files, windows are numbered without gaps
and only the last one may be open, with the loaded drafter. Counters are finite, not negative and in vLLM's form
(`metrics.exposition`), or the window has the reason instead. Sizes are limited: files, windows, texts. Not guaranteed: that times
increase, because a pod's wall clock may be set back; or that the numbers are true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from aerie.engine.drafter_endpoint.calls import DrafterFiles, DrafterSource, compute_digest
from aerie.engine.drafter_endpoint.fields import FieldError, JsonObject, parse_object
from aerie.engine.metrics.exposition import ExpositionError, parse_series
from aerie.engine.metrics.sample import Counters

MAX_STATE_BYTES = 2 * 1024 * 1024
"""Bytes of a state; 129 windows with all counters of vLLM 0.32 have about one MiB."""
MAX_FILES, MAX_WINDOWS = 64, 129
"""The plugin's limits: files of a drafter, windows that ended and the current one."""
MAX_WINDOW_NUMBER = 10**9
_MAX_TIME, _MAX_COUNT, _MAX_RANKS = 1e11, 10**9, 100_000
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"config\.json|[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_PROCESS_ID = re.compile(r"[0-9a-f]{32}")
_TURN = re.compile(r"[A-Za-z0-9._:/-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{0,100}")
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{1,63}")
_CHANGE_PHASE = re.compile(r"Staging|Swapping")
_PREPARATION_PHASE = re.compile(r"Running|Ready|Failed")
_FOLDER = re.compile(r"/[^\x00-\x1f\x7f]{0,4095}")
_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]{1,96}(/[A-Za-z0-9_.-]{1,96})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_COUNTER_LABELS = ("engine", "position", "source", "finished_reason", "le")


@dataclass(frozen=True)
class Problem:
    """A reason, one word in CamelCase, and a message for users."""

    reason: str
    message: str


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter in the memory of a pod's engine."""

    digest: str
    files: Mapping[str, str]
    """SHA-256 (hex) by file name."""
    kind: str
    """`eagle3`, `eagle3.1`, or the name of another method."""


@dataclass(frozen=True)
class DrafterLease:
    """The time for which a drafter on trial stays loaded."""

    digest: str
    remaining_seconds: float


@dataclass(frozen=True)
class PodIsolation:
    """The time for which a pod is not ready because drafters are compared in it."""

    remaining_seconds: float
    unfinished_requests: int | None
    """Requests that the engine serves or queues; None where vLLM does not say."""


@dataclass(frozen=True)
class ChangeInProgress:
    """A change that the pod performs now."""

    phase: Literal["Staging", "Swapping"]
    seconds: float
    """Seconds since the phase began."""


@dataclass(frozen=True)
class PreparedDrafter:
    """The latest preparation of a drafter in the pod, and its result."""

    source: DrafterSource
    """The requested source."""
    phase: Literal["Running", "Ready", "Failed"]
    seconds: float
    """Seconds that it took, or takes since it began."""
    drafter: DrafterFiles | None
    """The files and their folder in the pod; None unless Ready."""
    kind: str
    """The kind as in `LoadedDrafter`; empty unless Ready."""
    commit: str | None
    """Commit of the Hub's repository; None for a folder, and unless Ready."""
    problem: Problem | None
    """Why it failed; None unless Failed."""


@dataclass(frozen=True)
class FailedChange:
    """Why the pod did not make a change that it had begun."""

    problem: Problem
    digest: str
    """The drafter that was to be loaded."""
    time: float
    """Seconds of Unix time by the pod's clock."""


@dataclass(frozen=True)
class DrafterWindow:
    """The time from one change of the drafter to the next; times are seconds of Unix time by the pod's clock."""

    number: int
    """1 for the first window of the process, and so on."""
    digest: str
    turn: str | None
    """The caller's name of the window."""
    started: float
    settled: float | None
    """End of the wash-out; None while it lasts."""
    ended: float | None
    """None for the current window."""
    counters: Counters | None
    """What vLLM counted after the wash-out; None if not all that a comparison needs is there, or it is invalid."""
    counters_problem: str = ""
    """Why there are no counters."""


@dataclass(frozen=True)
class WindowCursor:
    """Windows that have been read: those of this process up to this number."""

    process_id: str
    number: int


@dataclass(frozen=True)
class DrafterState:
    """What a pod reports of its drafter."""

    problem: Problem | None
    """Why the pod must not get requests; None if it may."""
    unfit: Problem | None
    """Why this engine can never change its drafter in place."""
    process_id: str
    """Identifier of the API server's process; windows are numbered within it."""
    process_started: float
    method: str
    """vLLM's name of the drafting method; empty while it is unknown."""
    ranks: int
    is_counting: bool
    """Whether vLLM counts at all; it does not with --disable-log-stats."""
    own: LoadedDrafter | None
    """The drafter that the pod returns to; None until its files have been read."""
    loaded: LoadedDrafter | None
    """The drafter in use; None before it is known, and after a failure that could not be undone."""
    lease: DrafterLease | None
    change: ChangeInProgress | None
    swaps: int
    failures: int
    last_failure: FailedChange | None
    """The latest swap that failed."""
    last_rejection: FailedChange | None
    """The latest change that was rejected after its files had begun to be read."""
    prepared: PreparedDrafter | None
    """The latest preparation since the process started."""
    windows: tuple[DrafterWindow, ...]
    """Windows by number, those that the query selected; the last one is the current one unless none was selected."""
    isolation: PodIsolation | None = None
    can_isolate: bool = True
    """Whether the pod can be isolated: an earlier release of the plugin cannot."""


def parse_state(body: bytes) -> DrafterState:
    """Parse the body of a response. Raises FieldError."""
    fields = parse_object(body)
    process_id, process_started = fields.read_object(
        "process", lambda process: (process.read_text("id", _PROCESS_ID), process.read_number("started", _MAX_TIME))
    )
    method, ranks, is_counting = fields.read_object(
        "engine",
        lambda engine: (
            engine.read_text("method", _NAME),
            engine.read_integer("ranks", _MAX_RANKS),
            engine.read_boolean("counting"),
        ),
    )
    state = DrafterState(
        problem=_read_problem(fields, "problem"),
        unfit=_read_problem(fields, "unfit"),
        process_id=process_id,
        process_started=process_started,
        method=method,
        ranks=ranks,
        is_counting=is_counting,
        own=_read_drafter(fields, "own"),
        loaded=_read_drafter(fields, "loaded"),
        lease=fields.read_optional("lease", lambda name: fields.read_object(name, _parse_lease)),
        change=fields.read_optional("change", lambda name: fields.read_object(name, _parse_change)),
        swaps=fields.read_integer("swaps", _MAX_COUNT),
        failures=fields.read_integer("failures", _MAX_COUNT),
        last_failure=_read_failed_change(fields, "last_failure"),
        last_rejection=_read_failed_change(fields, "last_rejection"),
        prepared=fields.read_optional("prepared", lambda name: fields.read_object(name, _parse_preparation)),
        windows=fields.read_list("windows", MAX_WINDOWS, _parse_window),
        isolation=fields.read_optional("isolation", lambda name: fields.read_object(name, _parse_isolation))
        if fields.has("isolation")
        else None,
        can_isolate=fields.has("isolation"),
    )
    _check_windows(state)
    return state


def parse_problem(body: bytes) -> Problem:
    """Parse the body of a response with an error status. Raises FieldError."""
    return _parse_problem(parse_object(body))


def _read_problem(fields: JsonObject, name: str) -> Problem | None:
    return fields.read_optional(name, lambda field_name: fields.read_object(field_name, _parse_problem))


def _parse_problem(fields: JsonObject) -> Problem:
    return Problem(fields.read_text("reason", _REASON), fields.read_message("message"))


def _read_drafter(fields: JsonObject, name: str) -> LoadedDrafter | None:
    return fields.read_optional(name, lambda field_name: fields.read_object(field_name, _parse_drafter))


def _parse_drafter(fields: JsonObject) -> LoadedDrafter:
    files = fields.read_texts("files", MAX_FILES, _FILE_NAME, _DIGEST)
    digest = fields.read_text("digest", _DIGEST)
    if digest != compute_digest(files):
        raise FieldError("a drafter's digest is not that of its files")
    return LoadedDrafter(digest, files, fields.read_text("kind", _NAME))


def _parse_lease(fields: JsonObject) -> DrafterLease:
    return DrafterLease(fields.read_text("digest", _DIGEST), fields.read_number("remaining_seconds", _MAX_TIME))


def _parse_isolation(fields: JsonObject) -> PodIsolation:
    unfinished = fields.read_optional("unfinished_requests", lambda name: fields.read_integer(name, _MAX_COUNT))
    return PodIsolation(fields.read_number("remaining_seconds", _MAX_TIME), unfinished)


def _parse_change(fields: JsonObject) -> ChangeInProgress:
    phase = cast(Literal["Staging", "Swapping"], fields.read_text("phase", _CHANGE_PHASE))
    return ChangeInProgress(phase, fields.read_number("seconds", _MAX_TIME))


def _read_failed_change(fields: JsonObject, name: str) -> FailedChange | None:
    return fields.read_optional(name, lambda field_name: fields.read_object(field_name, _parse_failed_change))


def _parse_failed_change(fields: JsonObject) -> FailedChange:
    return FailedChange(_parse_problem(fields), fields.read_text("digest", _DIGEST), fields.read_number("time", _MAX_TIME))


def _parse_source(fields: JsonObject) -> DrafterSource:
    if fields.has("folder"):
        return DrafterSource(folder=fields.read_text("folder", _FOLDER))
    return DrafterSource(repository=fields.read_text("repository", _REPOSITORY), revision=fields.read_text("revision", _REVISION))


def _parse_preparation(fields: JsonObject) -> PreparedDrafter:
    source = fields.read_object("source", _parse_source)
    phase = cast(Literal["Running", "Ready", "Failed"], fields.read_text("phase", _PREPARATION_PHASE))
    seconds = fields.read_number("seconds", _MAX_TIME)
    if phase != "Ready":
        problem = fields.read_object("problem", _parse_problem) if phase == "Failed" else None
        return PreparedDrafter(source, phase, seconds, None, "", None, problem)
    drafter, folder = _parse_drafter(fields), fields.read_text("folder", _FOLDER)
    commit = fields.read_text("commit", _COMMIT) if source.repository is not None else None
    return PreparedDrafter(source, phase, seconds, DrafterFiles(drafter.files, folder), drafter.kind, commit, None)


def _parse_window(fields: JsonObject) -> DrafterWindow:
    counters, problem = _parse_counters(fields)
    return DrafterWindow(
        number=fields.read_integer("number", MAX_WINDOW_NUMBER),
        digest=fields.read_text("digest", _DIGEST),
        turn=fields.read_optional("turn", lambda name: fields.read_text(name, _TURN)),
        started=fields.read_number("started", _MAX_TIME),
        settled=fields.read_optional("settled", lambda name: fields.read_number(name, _MAX_TIME)),
        ended=fields.read_optional("ended", lambda name: fields.read_number(name, _MAX_TIME)),
        counters=counters,
        counters_problem=problem,
    )


def _parse_counters(fields: JsonObject) -> tuple[Counters | None, str]:
    """Return the counters, or why there are none."""
    # A series has at most one label that distinguishes its values, so its value is given under the name of each.
    lines = ((series, dict.fromkeys(_COUNTER_LABELS, label), value) for series, label, value in fields.iter_numbers("counts"))
    try:
        return parse_series(lines, None).counters, ""
    except ExpositionError as error:
        return None, str(error)


def _check_windows(state: DrafterState) -> None:
    """Raise FieldError if the windows contradict each other or the loaded drafter."""
    for previous, window in zip(state.windows, state.windows[1:], strict=False):
        if window.number != previous.number + 1 or previous.ended is None:
            raise FieldError("windows are not numbered without gaps, or an earlier one has not ended")
    current = state.windows[-1] if state.windows else None
    if current is None or current.ended is not None:
        return
    if state.loaded is not None and current.digest != state.loaded.digest:
        raise FieldError("the current window is not of the loaded drafter")
