"""What the engine drafts with, and who may change it: the state behind the endpoint.

Two drafters matter: the engine's own, which it was started with or promoted to, and the loaded one. They differ only while a
lease lasts. A change has two phases. Staging reads and checks the files beside the running engine, and may take minutes; a return
to the own drafter does not wait for it. Swapping pauses the engine, and only one swap runs at a time.

Guarantees: `loaded` is what all ranks draft with, unless `broken`. Without a lease the own drafter is loaded. A change that is
rejected or fails leaves drafter, lease and window as they were. A change applies only if the drafter that it was meant to replace
is still loaded. Not guaranteed: that a change ends before its caller's timeout; it runs to its end also without the caller.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from aerie_vllm.counters import Counts, WindowLog
from aerie_vllm.engine import Engine
from aerie_vllm.lease import DeadMansSwitch, Lease
from aerie_vllm.metrics import Metrics
from aerie_vllm.rejection import ChangeFailedError, EndpointError, EngineDeadError, RejectionError
from aerie_vllm.requests import ChangeRequest, DrafterFiles, LeaseRequest, parse_expected
from aerie_vllm.settings import Settings
from aerie_vllm.staging import stage_drafter
from aerie_vllm.swap import BrokenError, swap_drafter
from aerie_vllm.worker_protocol import Drafter, Problem, Report

_log = logging.getLogger(f"vllm.{__name__}")
MAX_READY_PAUSE_SECONDS = 10.0
"""A pod whose engine is paused for longer gets no requests."""
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.5, 10.0


class Durations(TypedDict):
    """How long the parts of a change took, in seconds."""

    staging: float
    pause: float
    swap: float


@dataclass
class Change:
    """A change that a caller has requested."""

    digest: str
    started: float
    superseded: asyncio.Event = field(default_factory=asyncio.Event)


class DrafterControl:
    """The drafters of the engines behind this API server."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        read_counts: Callable[[], Counts],
        metrics: Metrics,
        wall_time: Callable[[], float],
    ) -> None:
        self._engine, self._settings, self._metrics, self._wall_time = engine, settings, metrics, wall_time
        self._read_counts = read_counts
        self.windows = WindowLog(read_counts, wall_time)
        self._switch = DeadMansSwitch(self._end_lease)
        self._process = {"id": uuid.uuid4().hex, "started": wall_time()}
        self._reports: Sequence[Report] = ()
        self._own: Drafter | None = None
        self._loaded: Drafter | None = None
        self._since: float | None = None
        self._unfit = engine.find_unfit_reason()
        self._broken: Problem | None = None
        starting = Problem(reason="Starting", message="the workers have not reported their drafter yet: wait some seconds.")
        self._start_problem: Problem | None = self._unfit or starting
        """Why the drafter that is expected at the start is not loaded yet; None when it is."""
        self._change: Change | None = None
        self._swap_lock = asyncio.Lock()
        self._swap_started: float | None = None
        self._swaps = self._failures = 0
        self._last_failure: dict[str, object] | None = None

    # ---------------------------------------------------------------------------------------------------------- reports
    @property
    def own(self) -> Drafter | None:
        """The drafter that the engine returns to."""
        return self._own

    @property
    def loaded(self) -> Drafter | None:
        """The drafter that all ranks draft with; None before the workers have reported it, and when broken."""
        return self._loaded

    def find_unready_reason(self) -> Problem | None:
        """Return why this pod must not get requests, or None if it may."""
        if self._engine.is_dead:
            return EngineDeadError().problem
        if self._broken is not None:
            return self._broken
        if (started := self._swap_started) is not None and (seconds := _now() - started) > MAX_READY_PAUSE_SECONDS:
            return {
                "reason": "LongSwap",
                "message": f"a swap has been in progress for {seconds:.0f} s: wait, or restart the pod.",
            }
        # A pod without an expectation serves its own drafter from the start: reading it delays no request.
        return self._start_problem if self._settings.expected is not None else None

    def describe(self, after_window: int | None) -> dict[str, object]:
        """Return all that the endpoint reports, with the windows numbered above `after_window`, or the current one."""
        problem = self.find_unready_reason()
        current, lease = self.windows.current, self._switch.lease
        if after_window is None:
            after_window = 0 if current is None else current.number - 1
        report = self._reports[0] if self._reports else None
        remaining = self._switch.compute_remaining_seconds()
        return {
            "ready": problem is None,
            "problem": problem,
            "unfit": self._unfit,
            "process": self._process,
            "engine": {
                "architecture": report["architecture"] if report else "",
                "method": report["method"] if report else "",
                "ranks": len(self._reports),
                "counting": bool(self._read_counts()),
            },
            "own": self._own,
            "loaded": self._loaded,
            "since": self._since,
            "lease": None if lease is None else {"digest": lease.digest, "remaining_seconds": remaining},
            "change": self._describe_change(),
            "swaps": self._swaps,
            "failures": self._failures,
            "last_failure": self._last_failure,
            "windows": self.windows.list_windows(after_window),
        }

    def _describe_change(self) -> dict[str, object] | None:
        if (started := self._swap_started) is not None:
            return {"phase": "Swapping", "seconds": _now() - started}
        if (change := self._change) is not None:
            return {"phase": "Staging", "digest": change.digest, "seconds": _now() - change.started}
        return None

    # ------------------------------------------------------------------------------------------------------------ calls
    async def change(self, request: ChangeRequest) -> Durations:
        """Load a drafter. Raises EndpointError."""
        own, loaded = self._require_drafters()
        if request.expected_digest not in (None, loaded["digest"]):
            raise _loaded_changed_error(loaded["digest"], str(request.expected_digest))
        if request.lease_seconds is not None and self._start_problem is not None:
            message = f"the drafter expected at the start is not loaded yet ({self._start_problem['message']}): wait until it is."
            raise RejectionError(409, "NotReady", message)
        if (running := self._describe_change()) is not None:
            message = f"a change is in progress ({running['phase']}, for {running['seconds']:.1f} s): wait until it has ended."
            raise RejectionError(409, "ChangeInProgress", message)
        self._change = change = Change(request.drafter.digest, _now())
        try:
            retained = (own["digest"], loaded["digest"])
            drafter = await stage_drafter(self._engine, self._settings, request.drafter, retained, change.superseded)
            staging = _now() - change.started
            async with self._swap_lock:
                if (current := self._require_drafters()[1]["digest"]) != loaded["digest"]:
                    raise _loaded_changed_error(current, loaded["digest"])
                pause, swap = await self._swap(drafter, lambda: self._commit(drafter, request))
            return {"staging": staging, "pause": pause, "swap": swap}
        finally:
            self._change = None

    def renew(self, request: LeaseRequest) -> None:
        """Renew the lease of the loaded drafter. Raises RejectionError."""
        lease = self._switch.lease
        if lease is None or lease.digest != request.digest:
            current = "there is none" if lease is None else f"it is that of drafter {lease.digest}"
            message = f"drafter {request.digest} has no lease ({current}): read the state, and decide again."
            raise RejectionError(409, "NoLease", message)
        if self._switch.compute_remaining_seconds() <= 0:
            message = f"the lease of drafter {request.digest} has ended, and the engine returns to its own: begin a new trial."
            raise RejectionError(409, "LeaseEnded", message)
        self._switch.arm(request.digest, request.lease_seconds)

    async def return_to_own(self) -> Durations:
        """Load the engine's own drafter, and withdraw a change that is still staging. Raises EndpointError."""
        if self._change is not None:
            self._change.superseded.set()
        self._require_drafters()
        pause, swap = await self._swap_home()
        return {"staging": 0.0, "pause": pause, "swap": swap}

    # -------------------------------------------------------------------------------------------------------- the tasks
    async def run(self) -> None:
        """Come to the expected drafter, and act on leases that end, until cancelled."""
        start = asyncio.ensure_future(self._start())
        try:
            await self._switch.run()
        finally:
            start.cancel()

    async def _start(self) -> None:
        try:
            if self._unfit is None:
                await _retry_until_done(self._discover)
                await _retry_until_done(self._load_expected)
        except EngineDeadError:
            _log.warning("the engine has ended")
        except Exception:
            _log.exception("the start of the endpoint failed")
            self._start_problem = {"reason": "InternalError", "message": "the endpoint failed: its log has the cause."}
            raise

    async def _discover(self) -> bool:
        """Read what the workers hold; True when that is known, or will never be."""
        try:
            self._reports = await self._engine.describe()
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises; a worker without the extension, for one
            message = (
                f"the workers do not answer ({type(error).__name__}: {error}): start vLLM with "
                "--worker-extension-cls aerie_vllm.worker.DrafterWorker."
            )
            self._start_problem = {"reason": "WorkersDoNotAnswer", "message": message}
            _log.warning(message)
            return False
        self._unfit = next((report["unfit"] for report in self._reports if report["unfit"] is not None), None)
        self._broken = next((report["broken"] for report in self._reports if report["broken"] is not None), None)
        own = [report["own"] for report in self._reports]
        digests = {drafter["digest"] for drafter in own if drafter is not None}
        if len(digests) > 1:
            message = f"the ranks were started with different drafters ({sorted(digests)}): mount the same files for all."
            self._unfit = {"reason": "RanksDiffer", "message": message}
        if (problem := self._unfit or self._broken) is not None:
            self._start_problem = problem
            return True
        if not own or None in own:
            return False
        self._own = self._loaded = drafter = own[0]
        assert drafter is not None
        self._since = self._wall_time()
        self.windows.begin(drafter["digest"], None, settles=False)
        await self._engine.label_tokens(drafter["digest"])
        return True

    async def _load_expected(self) -> bool:
        """Load and promote the drafter that the pod expects; True when it is loaded or none is expected."""
        if self._own is None or self._start_problem is None:  # unfit, broken, or a caller has promoted a drafter
            return True
        try:
            expected = await asyncio.get_running_loop().run_in_executor(None, self._read_expected)
            if expected is not None and expected.digest != self._own["digest"]:
                await self.change(ChangeRequest(expected, None, None, None, 0.0))
        except EngineDeadError:
            raise
        except EndpointError as error:
            _log.warning("the expected drafter is not loaded: %s", error.message)
            self._metrics.count_rejection(error.reason)
            self._start_problem = error.problem
            return self._broken is not None
        self._start_problem = None
        return True

    def _read_expected(self) -> DrafterFiles | None:
        if self._settings.expected is None:
            return None
        try:
            text = self._settings.expected.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RejectionError(422, "ExpectedUnreadable", f"{self._settings.expected} cannot be read: {error}.") from None
        return parse_expected(text) if text.strip() else None

    async def _end_lease(self, lease: Lease) -> None:
        """Return to the own drafter, because a lease has ended."""
        _log.warning("the lease of drafter %s has ended, so the engine returns to its own drafter", lease.digest)
        await self._swap_home(lease)

    # --------------------------------------------------------------------------------------------------------- a change
    def _require_drafters(self) -> tuple[Drafter, Drafter]:
        """Return the own drafter and the loaded one. Raises RejectionError where no drafter can be changed."""
        if self._engine.is_dead:
            raise RejectionError(503, "EngineDead", EngineDeadError().message)
        if (problem := self._unfit or self._broken) is not None:
            raise RejectionError(409, problem["reason"], problem["message"])
        if self._own is None or self._loaded is None:
            problem = self._start_problem
            assert problem is not None
            raise RejectionError(503, problem["reason"], problem["message"])
        return self._own, self._loaded

    async def _swap_home(self, lease: Lease | None = None) -> tuple[float, float]:
        """Swap to the own drafter; where a lease has ended, only if no other call has changed the lease meanwhile."""
        async with self._swap_lock:
            own, loaded = self._require_drafters()
            if loaded["digest"] == own["digest"] or (lease is not None and self._switch.lease is not lease):
                return 0.0, 0.0
            return await self._swap(own, lambda: self._set_loaded(own, None, 0.0))

    async def _swap(self, drafter: Drafter, commit: Callable[[], None]) -> tuple[float, float]:
        """Swap, under the lock, unless the drafter is loaded; then commit. Returns the seconds of pause and swap."""
        assert self._loaded is not None
        if drafter["digest"] == self._loaded["digest"]:
            commit()
            return 0.0, 0.0
        self._swap_started = _now()
        try:
            times = await swap_drafter(self._engine, drafter["digest"], self._loaded["digest"], commit)
        except ChangeFailedError as error:
            self._failures += 1
            self._last_failure = {"time": self._wall_time(), "digest": drafter["digest"], **error.problem}
            if isinstance(error, BrokenError):
                self._broken, self._loaded = error.problem, None
                self._switch.clear()
            raise
        finally:
            self._swap_started = None
        self._swaps += 1
        self._metrics.observe_swap(times.pause_seconds)
        return times.pause_seconds, times.swap_seconds

    def _commit(self, drafter: Drafter, request: ChangeRequest) -> None:
        """Record a change that all ranks have made."""
        if request.lease_seconds is None:
            self._own, self._start_problem = drafter, None
        assert self._own is not None
        self._set_loaded(drafter, request.turn, request.settle_seconds)
        if request.lease_seconds is not None and drafter["digest"] != self._own["digest"]:
            self._switch.arm(drafter["digest"], request.lease_seconds)

    def _set_loaded(self, drafter: Drafter, turn: str | None, settle_seconds: float) -> None:
        """Record the loaded drafter without a lease, and begin its window."""
        if self._loaded is None or drafter["digest"] != self._loaded["digest"]:
            self._since = self._wall_time()
        self._loaded = drafter
        self._switch.clear()
        current = self.windows.current
        if turn is not None and current is not None and (current.digest, current.turn) == (drafter["digest"], turn):
            return  # a call that is repeated, because its response was lost, must not divide the window
        window = self.windows.begin(drafter["digest"], turn, settles=settle_seconds > 0)
        if settle_seconds > 0:
            asyncio.get_running_loop().call_later(settle_seconds, self.windows.settle, window.number)


async def _retry_until_done(step: Callable[[], Awaitable[bool]]) -> None:
    """Repeat a step with back-off until it returns True. Raises what it raises."""
    retry_seconds = _FIRST_RETRY_SECONDS
    while not await step():
        await asyncio.sleep(retry_seconds)
        retry_seconds = min(2 * retry_seconds, _MAX_RETRY_SECONDS)


def _loaded_changed_error(loaded: str, expected: str) -> RejectionError:
    message = f"drafter {loaded} is loaded, not {expected}: read the state, and decide again."
    return RejectionError(409, "LoadedChanged", message)


def _now() -> float:
    return asyncio.get_running_loop().time()
