"""What the engine drafts with, and who may change it: the state behind the endpoint.

Two drafters matter: the engine's own, which it was started with or promoted to, and the loaded one. They differ only while a
lease lasts. A change has two phases. Staging reads and checks the files beside the running engine, and may take minutes; a return
to the own drafter does not wait for it. Swapping pauses the engine, and only one swap runs at a time.

A pod can be isolated: it is not ready, so that no Service or route leads users to it, and its engine serves whoever knows the
pod's address. Isolation has a lease, too. When it ends, the engine returns to its own drafter, and then the pod is ready again.

Guarantees: `loaded` is what all ranks draft with, unless `broken`. Without a lease the own drafter is loaded. A change that is
rejected or fails leaves drafter, lease and window as they were; a preparation always does. A change applies only if the drafter
that it was meant to replace is still loaded, and goes before a preparation. A change for an isolated pod is made in no other.
Not guaranteed: that a change ends before the timeout
of its caller; it runs to its end also without the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from aerie_vllm.counters import Counts, WindowLog
from aerie_vllm.engine import Engine
from aerie_vllm.lease import DeadMansSwitch, Lease
from aerie_vllm.metrics import Metrics
from aerie_vllm.preparation import Preparer
from aerie_vllm.rejection import ChangeFailedError, EndpointError, EngineDeadError, RejectionError
from aerie_vllm.requests import ChangeRequest, DrafterFiles, DrafterSource, ExpectedDrafter, LeaseRequest, parse_expected
from aerie_vllm.settings import Settings
from aerie_vllm.source_reader import ReadSource, SourceFiles
from aerie_vllm.staging import stage_drafter
from aerie_vllm.swap import BrokenError, swap_drafter
from aerie_vllm.worker_protocol import Drafter, Problem, Report, compute_digest

_log = logging.getLogger(f"vllm.{__name__}")
MAX_READY_PAUSE_SECONDS = 10.0
"""A pod whose engine is paused for longer gets no requests."""
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.5, 30.0


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
        read_source: ReadSource,
    ) -> None:
        self._engine, self._settings, self._metrics, self._wall_time = engine, settings, metrics, wall_time
        self._read_counts, self._read_source = read_counts, read_source
        self.windows = WindowLog(read_counts, wall_time)
        self._switch = DeadMansSwitch("the drafter on trial", self._end_lease)
        self._isolation = DeadMansSwitch("the isolation", self._end_isolation_lease)
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
        self._expects = settings.expected is not None
        """Whether a drafter may be expected at the start: until the file with it has been read."""
        self._change: Change | None = None
        self._preparer = Preparer(self._read_files, self._check_prepared, metrics)
        self._staging_lock = asyncio.Lock()
        """Held while ranks read a drafter, of which each reads one at a time; a change holds it until its swap has ended."""
        self._check_withdrawn = asyncio.Event()
        """Set when the ranks have to read another drafter than the one that is prepared."""
        self._swap_lock = asyncio.Lock()
        self._swap_started: float | None = None
        self._swaps = self._failures = 0
        self._last_failure: dict[str, object] | None = None
        self._last_rejection: dict[str, object] | None = None

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
        if self._expects and self._start_problem is not None:
            return self._start_problem
        if self._isolation.lease is not None:
            remaining = self._isolation.compute_remaining_seconds()
            message = f"the pod is isolated from users, for {remaining:.0f} s unless that is renewed: wait."
            return {"reason": "Isolated", "message": message}
        return None

    @property
    def turn(self) -> str | None:
        """The caller's name of the current window."""
        return None if self.windows.current is None else self.windows.current.turn

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
            "isolation": self._describe_isolation(),
            "change": self._describe_change(),
            "swaps": self._swaps,
            "failures": self._failures,
            "last_failure": self._last_failure,
            "last_rejection": self._last_rejection,
            "prepared": self._preparer.describe(),
            "windows": self.windows.list_windows(after_window),
        }

    def _describe_isolation(self) -> dict[str, object] | None:
        if self._isolation.lease is None:
            return None
        remaining = self._isolation.compute_remaining_seconds()
        return {"remaining_seconds": remaining, "unfinished_requests": self._engine.count_unfinished_requests()}

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
        if request.lease_seconds is not None:
            self._require_start()
        self._require_isolation(request)
        if (running := self._describe_change()) is not None:
            message = f"a change is in progress ({running['phase']}, for {running['seconds']:.1f} s): wait until it has ended."
            raise RejectionError(409, "ChangeInProgress", message)
        self._change = change = Change(request.drafter.digest, _now())
        try:
            self._check_withdrawn.set()
            retained = (own["digest"], loaded["digest"])
            async with self._staging_lock:
                drafter = await stage_drafter(self._engine, self._settings, request.drafter, retained, change.superseded)
                staging = _now() - change.started
                async with self._swap_lock:
                    if (current := self._require_drafters()[1]["digest"]) != loaded["digest"]:
                        raise _loaded_changed_error(current, loaded["digest"])
                    self._require_isolation(request)
                    pause, swap = await self._swap(drafter, lambda: self._commit(drafter, request))
            return {"staging": staging, "pause": pause, "swap": swap}
        except RejectionError as error:
            self._last_rejection = {"time": self._wall_time(), "digest": change.digest, **error.problem}
            if error.status == 422 and request.drafter.folder is not None:
                self._preparer.forget(change.digest)
            raise
        finally:
            self._change = None

    def prepare(self, source: DrafterSource) -> bool:
        """Begin to prepare the source's drafter; return whether it is prepared already. Raises RejectionError."""
        self._require_drafters()
        return self._preparer.begin(source)

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

    def isolate(self, lease_seconds: float) -> None:
        """Isolate the pod from users, or renew the isolation. Raises RejectionError."""
        self._require_drafters()
        self._require_start()
        self._isolation.arm(None, lease_seconds)

    async def return_to_own(self) -> Durations:
        """Load the engine's own drafter, and then end an isolation. Withdraws a change that is staging. Raises EndpointError."""
        if self._change is not None:
            self._change.superseded.set()
        self._require_drafters()
        pause, swap = await self._swap_home()
        self._isolation.clear()
        return {"staging": 0.0, "pause": pause, "swap": swap}

    async def close(self) -> None:
        """Withdraw what is being read; a swap in progress continues."""
        if self._change is not None:
            self._change.superseded.set()
        await self._preparer.close()

    # -------------------------------------------------------------------------------------------------------- the tasks
    async def run(self) -> None:
        """Come to the expected drafter, and act on leases that end, until cancelled."""
        tasks = [asyncio.ensure_future(work) for work in (self._start(), self._isolation.run())]
        try:
            await self._switch.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _start(self) -> None:
        try:
            await self._repeat(self._find_expectation)
            if self._unfit is None:
                await self._repeat(self._discover)
            await self._repeat(self._load_expected)
        except EngineDeadError:
            _log.warning("the engine has ended")

    async def _repeat(self, step: Callable[[], Awaitable[bool]]) -> None:
        """Repeat a step of the start with back-off until it returns True, also after an exception. Raises EngineDeadError."""
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            try:
                if await step():
                    return
            except EngineDeadError:
                raise
            except Exception:  # noqa: BLE001 - a process that cannot be started, for one
                _log.exception("the start of the endpoint failed, and is repeated in %.1f s", retry_seconds)
                message = "the endpoint failed, and repeats its start: its log has the cause."
                self._start_problem = {"reason": "InternalError", "message": message}
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, _MAX_RETRY_SECONDS)

    async def _find_expectation(self) -> bool:
        """Find whether a drafter is expected; always True."""
        with contextlib.suppress(RejectionError):  # `_load_expected` reports it
            self._expects = await self._read_expected() is not None
        return True

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
            problem = next((report["own_problem"] for report in self._reports if report["own_problem"] is not None), None)
            self._start_problem = problem or self._start_problem
            return False
        self._own = self._loaded = drafter = own[0]
        assert drafter is not None
        self._start_problem = {"reason": "Starting", "message": "the drafter that is expected at the start is being read: wait."}
        self._since = self._wall_time()
        self._engine.separate_blocks(drafter["digest"])
        self.windows.begin(drafter["digest"], None, settles=False)
        await self._engine.label_tokens(drafter["digest"])
        return True

    async def _load_expected(self) -> bool:
        """Load and promote the drafter that the pod expects; True when it is loaded or none is expected."""
        if self._has_started() or self._broken is not None:  # a caller has promoted a drafter, or none can be loaded
            return True
        try:
            expected = await self._read_expected()
            self._expects = expected is not None
            if expected is not None and (self._own is None or compute_digest(expected.files) != self._own["digest"]):
                self._require_drafters()
                drafter = await self._get_expected(expected)
                if self._has_started():  # a caller has promoted a drafter meanwhile
                    return True
                await self.change(ChangeRequest(drafter, None, None, None, 0.0))
        except EngineDeadError:
            raise
        except EndpointError as error:
            _log.warning("the expected drafter is not loaded: %s", error.message)
            self._metrics.count_rejection(error.reason)
            self._start_problem = error.problem
            return self._broken is not None
        self._start_problem = self._unfit
        return True

    def _has_started(self) -> bool:
        return self._start_problem is None

    async def _read_expected(self) -> ExpectedDrafter | None:
        return await asyncio.get_running_loop().run_in_executor(None, _read_expected, self._settings.expected)

    async def _read_files(self, source: DrafterSource) -> SourceFiles:
        """Read a source's files; a fetch may remove drafters that are neither own, loaded, expected nor in a change."""
        needed = [drafter["digest"] for drafter in (self._own, self._loaded) if drafter is not None]
        if self._change is not None:
            needed.append(self._change.digest)
        with contextlib.suppress(RejectionError):
            if (expected := await self._read_expected()) is not None:
                needed.append(compute_digest(expected.files))
        return await self._read_source(source, needed)

    async def _get_expected(self, expected: ExpectedDrafter) -> DrafterFiles:
        """Return the expected drafter in a folder of the pod, and fetch it if it is the Hub's. Raises RejectionError."""
        if expected.source.folder is not None:
            return DrafterFiles(expected.source.folder, expected.files)
        drafter = (await self._read_files(expected.source)).drafter
        if drafter.files != expected.files:
            message = (
                f"{expected.source.repository} at {expected.source.revision} has drafter {drafter.digest}, and "
                f"{compute_digest(expected.files)} is expected: correct the revision or the digests."
            )
            raise RejectionError(422, "DigestMismatch", message)
        return drafter

    async def _end_lease(self, lease: Lease) -> None:
        """Return to the own drafter, because a lease has ended."""
        _log.warning("the lease of drafter %s has ended, so the engine returns to its own drafter", lease.digest)
        await self._swap_home(lease)

    async def _end_isolation_lease(self, lease: Lease) -> None:
        """Return to the own drafter before users reach the pod again, because nobody has renewed the isolation."""
        _log.warning("the lease of the isolation has ended, so the engine returns to its own drafter")
        if self._isolation.lease is lease:
            await self._swap_home()

    # --------------------------------------------------------------------------------------------------------- a change
    async def _check_prepared(self, drafter: DrafterFiles) -> Drafter:
        """Bring a prepared drafter into the memory of all ranks; changes go first. Raises EndpointError."""
        while True:
            async with self._staging_lock:
                self._check_withdrawn.clear()
                own, loaded = self._require_drafters()
                retained = (own["digest"], loaded["digest"])
                try:
                    return await stage_drafter(self._engine, self._settings, drafter, retained, self._check_withdrawn)
                except RejectionError:
                    if not self._check_withdrawn.is_set():
                        raise

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

    def _require_start(self) -> None:
        """Raise RejectionError while the drafter that is expected at the start is not loaded."""
        if self._start_problem is not None:
            message = f"the drafter expected at the start is not loaded yet ({self._start_problem['message']}): wait until it is."
            raise RejectionError(409, "NotReady", message)

    def _require_isolation(self, request: ChangeRequest) -> None:
        """Raise RejectionError if the change is for an isolated pod, and this pod is not isolated."""
        if request.isolated and self._isolation.compute_remaining_seconds() <= 0:
            message = "the change is for an isolated pod, and the isolation of this pod has ended: isolate the pod anew."
            raise RejectionError(409, "NotIsolated", message)

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
        if request.isolated and request.lease_seconds is not None:
            self._isolation.arm(None, request.lease_seconds)
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


def _read_expected(path: Path | None) -> ExpectedDrafter | None:
    """Return the drafter in the file, or None without a file or with an empty one. Raises RejectionError."""
    if path is None:
        return None
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RejectionError(422, "ExpectedUnreadable", f"{path} cannot be read: {error}.") from None
    return parse_expected(text) if text.strip() else None


def _loaded_changed_error(loaded: str, expected: str) -> RejectionError:
    message = f"drafter {loaded} is loaded, not {expected}: read the state, and decide again."
    return RejectionError(409, "LoadedChanged", message)


def _now() -> float:
    return asyncio.get_running_loop().time()
