"""A fleet whose engines change their drafters in place, in virtual time: World, with engines and the operator's calls.

    reconcile ─► plan ─► status ─► calls to engines ─► reports ─► reconcile ...

An engine is a model of the plugin (plugin/aerie_vllm/control.py): own and loaded drafter, lease, windows with counters, and
preparations. Calls take time, may fail, and are repeated while a plan has them, as by the operator's executor.

Guarantees: everything follows from the seed and the calls of a test. `violations` lists what must never happen.
Not guaranteed: staging and swapping as two phases; a change is made at the end of its call.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from aerie.engine.drafter_endpoint.calls import (
    DrafterCall,
    DrafterFiles,
    DrafterSource,
    IsolatePod,
    LoadDrafter,
    PrepareDrafter,
    RenewLease,
    ReturnToOwn,
)
from aerie.engine.drafter_endpoint.response import ChangeDurations, EndpointProblem
from aerie.engine.drafter_endpoint.state import (
    DrafterLease,
    DrafterState,
    DrafterWindow,
    LoadedDrafter,
    PodIsolation,
    PreparedDrafter,
    Problem,
    WindowCursor,
)
from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, SpeculationCounters
from aerie.manifests import naming
from aerie.rollout.facts.drafters import CallResult, DrafterObservation, with_state
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan
from tests.snapshots import replace_facts
from tests.unit.rollout.world import IMAGE, World

DRAFTERS = ("eagle3", "better", "equal", "worse")
EFFECTS = {"better": 0.09, "worse": -0.15}
"""Relative difference of a drafter's tokens per step."""
LOAD_SECONDS, SWAP_SECONDS, PREPARE_SECONDS = 2.0, 0.1, 3.0
READ_INTERVAL, MEASUREMENT_INTERVAL, BUSY_INTERVAL = 15.0, 5.0, 1.0
_DONE = ChangeDurations(0.0, 0.05, 0.05)
_RESTART = timedelta(seconds=60)


def drafter_files(name: str) -> dict[str, str]:
    """Return the files of the drafter with this name."""
    return {file: hashlib.sha256(f"{name}/{file}".encode()).hexdigest() for file in ("config.json", "model.safetensors")}


def folder_of(name: str) -> str:
    return f"/models/drafters/{name}"


def digest_of(name: str) -> str:
    return DrafterFiles(drafter_files(name)).digest


NAMES_BY_DIGEST = {digest_of(name): name for name in (*DRAFTERS, *(f"{name}!" for name in DRAFTERS))}
FILES = {digest: drafter_files(name) for digest, name in NAMES_BY_DIGEST.items()}
"""Files by digest; those of a name with ! are what a pod with other files has in the folder."""


@dataclass
class Counts:
    """What an engine has counted since its start."""

    tokens: float = 0.0
    steps: float = 0.0
    requests: float = 0.0

    def since(self, earlier: Counts) -> Counters:
        """Return the counters of a window."""
        tokens, steps, requests = (getattr(self, name) - getattr(earlier, name) for name in ("tokens", "steps", "requests"))
        histogram = Histogram((1.0, float("inf")), (requests, requests), 0.1 * requests)
        return Counters(
            generation_tokens=tokens + requests,
            prompt_tokens=0.0,
            computed_prompt_tokens=0.0,
            prefix_cache_queries=0.0,
            prefix_cache_hits=0.0,
            preemptions=0.0,
            finished={"stop": requests},
            request_steps=steps,
            step_seconds=0.02 * steps,
            iterations=steps,
            queued_requests=requests,
            queue_seconds=0.0,
            time_to_first_token=histogram,
            time_per_output_token=histogram,
            speculation=SpeculationCounters(steps, 3 * steps, tokens - steps, ((tokens - steps) / 3,) * 3),
        )


@dataclass
class Window:
    """A window of an engine."""

    number: int
    digest: str
    turn: str | None
    started: float
    start_counts: Counts
    settled: float | None
    settled_counts: Counts | None
    settle_at: float
    ended: float | None = None
    end_counts: Counts | None = None


@dataclass
class Engine:
    """The engine of one pod, in one run of its process."""

    pod: str
    process_id: str
    own: str
    """Digest of its own drafter."""
    now: float
    """Time up to which it has counted, in Unix seconds."""
    rng: random.Random
    requests_per_second: float
    noise: float = 0.03
    """Relative dispersion of the tokens per step."""
    clock_offset: float = 0.0
    """Seconds by which the pod's clock is ahead."""
    loaded: str = ""
    promoted_at: float | None = None
    """Time of the latest call that changed its own drafter."""
    lease_until: float | None = None
    isolated_until: float | None = None
    unfinished_requests: int = 0
    """Requests of users that an isolated engine still serves."""
    report_unfinished: Callable[[], int | None] | None = None
    """What it reports instead of that number."""
    hangs_with: str | None = None
    """Drafter with which the engine answers no request."""
    evaluator_noise: float | None = 0.0
    """Relative dispersion between the windows of a pair in isolation, which have the same requests; None: no evaluator sends
    any."""
    counts: Counts = field(default_factory=Counts)
    windows: list[Window] = field(default_factory=list)
    prepared: PreparedDrafter | None = None
    prepared_at: float = 0.0
    unfit: Problem | None = None
    problem: Problem | None = None
    hangs: bool = False
    """Whether it answers no call and no read."""
    rejects: bool = False
    """Whether it rejects to prepare and to load other drafters."""
    copies: dict[str, str] = field(default_factory=dict)
    """Folders with the files of another drafter."""
    other_files: bool = False
    """Whether the folder has other files in this pod."""

    def __post_init__(self) -> None:
        self.loaded = self.own
        self._begin(self.own, None, 0.0)

    # -- time
    def advance(self, now: float) -> None:
        """Count until now, and act on the lease and the end of the wash-out."""
        while self.now < now:
            window = self.windows[-1]
            ends = [now]
            if self.lease_until is not None and self.lease_until > self.now:
                ends.append(self.lease_until)
            if self.isolated_until is not None and self.isolated_until > self.now:
                ends.append(self.isolated_until)
            if window.settled is None and window.settle_at > self.now:
                ends.append(window.settle_at)
            end = min(ends)
            self._count(end - self.now)
            self.now = end
            if window.settled is None and self.now >= window.settle_at:
                window.settled, window.settled_counts = self.now, replace(self.counts)
            if self.lease_until is not None and self.now >= self.lease_until:
                self._load(self.own, None, 0.0)
            if self.isolated_until is not None and self.now >= self.isolated_until:
                self._load(self.own, None, 0.0)
                self.isolated_until = None

    def _count(self, seconds: float) -> None:
        noise = self.noise if self.isolated_until is None else self.evaluator_noise
        hangs = NAMES_BY_DIGEST.get(self.loaded) == self.hangs_with
        requests = 0.0 if noise is None or hangs else self.requests_per_second * seconds
        length = 2.5 * (1 + EFFECTS.get(NAMES_BY_DIGEST.get(self.loaded, ""), 0.0)) * (1 + self.rng.gauss(0, noise or 0.0))
        self.counts = Counts(
            self.counts.tokens + 100 * requests, self.counts.steps + 100 * requests / length, self.counts.requests + requests
        )

    def break_down(self) -> None:
        """Report that a change failed and could not be undone."""
        self.problem = Problem("Broken", "the weights could not be restored.")
        self.lease_until = None
        self.loaded = self.own

    # -- calls
    def perform(self, call: DrafterCall) -> ChangeDurations | EndpointProblem:
        """Perform a call now."""
        match call:
            case PrepareDrafter(source):
                if self.prepared is None or self.prepared.source != source or self.prepared.phase == "Failed":
                    self.prepared = PreparedDrafter(source, "Running", 0.0, None, "", None, None)
                    self.prepared_at = self.now + PREPARE_SECONDS
            case LoadDrafter():
                return self._change(call)
            case RenewLease():
                return EndpointProblem("NoLease", "no lease", 409)
            case IsolatePod(lease_seconds):
                self.isolated_until = self.now + lease_seconds
            case ReturnToOwn():
                if self.loaded != self.own:
                    self._load(self.own, None, 0.0)
                self.isolated_until = None
        return _DONE

    def _change(self, call: LoadDrafter) -> ChangeDurations | EndpointProblem:
        digest = call.drafter.digest
        if self.problem is not None:
            return EndpointProblem(self.problem.reason, self.problem.message, 409)
        if call.expected_digest not in (None, self.loaded):
            return EndpointProblem("LoadedChanged", "another drafter is loaded", 409)
        if self.rejects and digest != self.own:
            return EndpointProblem("WrongShape", "fc.weight has another shape.", 422)
        if call.drafter.folder is None and digest not in (self.own, self.loaded):
            return EndpointProblem("NotHeld", "it is not in memory", 422)
        has_files = NAMES_BY_DIGEST[digest].endswith("!") == self.other_files
        if not has_files and digest not in (self.own, self.loaded):
            return EndpointProblem("WrongDigest", "the files differ", 422)
        if call.isolated and self.isolated_until is None:
            return EndpointProblem("NotIsolated", "the pod is not isolated", 409)
        if call.isolated and call.lease_seconds is not None:
            self.isolated_until = self.now + call.lease_seconds
        if call.lease_seconds is None:
            self.own, self.promoted_at = digest, self.now
        current = self.windows[-1]
        if call.turn is not None and (current.digest, current.turn) == (digest, call.turn):
            self.lease_until = None
        else:
            self._load(digest, call.turn, call.settle_seconds)
        self.loaded = digest
        self.lease_until = self.now + call.lease_seconds if call.lease_seconds is not None and digest != self.own else None
        return _DONE

    def _load(self, digest: str, turn: str | None, settle_seconds: float) -> None:
        self.loaded, self.lease_until = digest, None
        self._begin(digest, turn, settle_seconds)

    def _begin(self, digest: str, turn: str | None, settle_seconds: float) -> None:
        if self.windows:
            last = self.windows[-1]
            last.ended, last.end_counts = self.now, replace(self.counts)
            if last.settled is None:
                last.settled, last.settled_counts = self.now, replace(self.counts)
        is_settled = settle_seconds == 0
        self.windows.append(
            Window(
                len(self.windows) + 1,
                digest,
                turn,
                self.now,
                replace(self.counts),
                self.now if is_settled else None,
                replace(self.counts) if is_settled else None,
                self.now + settle_seconds,
            )
        )

    # -- reads
    def read(self, cursor: WindowCursor | None) -> DrafterState:
        """Return the report."""
        prepared = self.prepared
        if prepared is not None and prepared.phase == "Running" and self.now >= self.prepared_at:
            self.prepared = prepared = self._finish_preparation(prepared.source)
        after = cursor.number if cursor is not None and cursor.process_id == self.process_id else 0
        lease = None if self.lease_until is None else DrafterLease(self.loaded, self.lease_until - self.now)
        isolation = None
        if self.isolated_until is not None:
            unfinished = self.unfinished_requests if self.report_unfinished is None else self.report_unfinished()
            isolation = PodIsolation(self.isolated_until - self.now, unfinished)
        is_isolated = isolation is not None and self.problem is None
        return DrafterState(
            problem=Problem("Isolated", "the pod is isolated from users: wait.") if is_isolated else self.problem,
            unfit=self.unfit,
            process_id=self.process_id,
            process_started=self.windows[0].started + self.clock_offset,
            method="eagle3",
            ranks=1,
            is_counting=True,
            own=LoadedDrafter(self.own, FILES[self.own], "eagle3"),
            loaded=None if self.problem is not None else LoadedDrafter(self.loaded, FILES[self.loaded], "eagle3"),
            lease=lease,
            change=None,
            swaps=len(self.windows) - 1,
            failures=0,
            last_failure=None,
            last_rejection=None,
            prepared=prepared,
            windows=tuple(self._report_window(window) for window in self.windows[-129:] if window.number > after),
            isolation=isolation,
        )

    def _finish_preparation(self, source: DrafterSource) -> PreparedDrafter:
        if self.rejects:
            problem = Problem("WrongShape", "fc.weight has another shape.")
            return PreparedDrafter(source, "Failed", 1.0, None, "", None, problem)
        assert source.folder is not None
        name = source.folder.rpartition("/")[2]
        name = self.copies.get(name, name)
        files = drafter_files(f"{name}!" if self.other_files else name)
        return PreparedDrafter(source, "Ready", 1.0, DrafterFiles(files, source.folder), "eagle3", None, None)

    def _report_window(self, window: Window) -> DrafterWindow:
        end = window.end_counts or self.counts
        offset = self.clock_offset
        return DrafterWindow(
            window.number,
            window.digest,
            window.turn,
            window.started + offset,
            None if window.settled is None else window.settled + offset,
            None if window.ended is None else window.ended + offset,
            end.since(window.settled_counts or end),
        )


@dataclass
class RunningCall:
    """A call of the executor to a pod."""

    call: DrafterCall
    ends_at: datetime


@dataclass
class FollowedPod:
    """What the operator's executor knows of a pod."""

    process_id: str
    cursor: WindowCursor | None = None
    is_measured: bool = False
    planned: DrafterCall | None = None
    running: RunningCall | None = None
    retry_at: datetime | None = None
    read_at: datetime | None = None
    observation: DrafterObservation = field(default_factory=DrafterObservation)


class Fleet(World):
    """A fleet, see the module's docstring."""

    def __init__(
        self, replicas: int = 1, requests_per_second: float = 6.0, seed: int = 0, noise: float = 0.03, **spec: Any
    ) -> None:
        rollout = {"inPlace": {"mode": "Auto"}, **spec.pop("rollout", {})}
        super().__init__(replicas=replicas, rollout=rollout, **spec)
        self.random = random.Random(seed)  # noqa: S311 - no secrets
        self.requests_per_second, self.noise = requests_per_second, noise
        self.clock_offset = 0.0
        """Seconds by which the clocks of all nodes are ahead; for engines that start later."""
        self.engines: dict[str, Engine] = {}
        self.followed: dict[str, FollowedPod] = {}
        self.reconcile_at: datetime | None = self.now
        self.drafters_by_revision: dict[str, str] = {}
        self.processes = itertools.count(1)
        self.violations: list[str] = []
        self.reconciles = 0
        self.idle = 0
        self.on_reconcile: Callable[[ReconcilePlan], None] = lambda _: None

    # -- Kubernetes
    def schedule(self, places: int = 10_000) -> None:
        super().schedule(places)
        names = {pod["metadata"]["name"] for pod in self.pods}
        for pod in self.pods:
            pod["metadata"].setdefault("uid", f"uid-{pod['metadata']['name']}")
            pod.setdefault("spec", {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]})
            pod["status"]["podIP"] = "10.0.0.7"
        for name in self.engines.keys() - names:
            del self.engines[name]

    def ready(self, revision: str | None = None, value: str = "True") -> None:
        super().ready(revision, value)
        for pod in self.pods:
            if pod["metadata"]["name"] not in self.engines:
                self.start_engine(pod)

    def start_engine(self, pod: dict[str, Any]) -> None:
        """Start the process of a pod, which comes to the drafter that it expects."""
        name, revision = pod["metadata"]["name"], pod["metadata"]["labels"][naming.REVISION_LABEL]
        own = self.expected_digest(revision) or digest_of(self.drafter_of_revision(revision))
        self.engines[name] = Engine(
            name,
            f"{next(self.processes):032x}",
            own,
            self.now.timestamp(),
            self.random,
            self.requests_per_second,
            self.noise,
            self.clock_offset,
        )

    def expected_digest(self, revision: str) -> str | None:
        """Return the digest of the drafter in the ConfigMap for new pods."""
        name = naming.expected_drafter_config_map_name("chat", revision)
        config_map = self.objects.get(("ConfigMap", name))
        if config_map is None:
            return None
        return DrafterFiles(json.loads(config_map["data"][naming.EXPECTED_DRAFTER_KEY])["files"]).digest

    def drafter_of_revision(self, revision: str) -> str:
        """Return the name of the drafter in the arguments of a revision's pods, from its record; pods outlive the record."""
        for (kind, _), item in self.objects.items():
            if kind == "ConfigMap" and "resource.json" in item.get("data", {}):
                source = json.loads(item["data"]["resource.json"])["spec"]["drafter"]["source"]
                name = str(source["persistentVolumeClaim"]["path"])
                self.drafters_by_revision[item["metadata"]["labels"][naming.REVISION_LABEL]] = name
        return self.drafters_by_revision[revision]

    def ready_pod(self, name: str, value: str) -> None:
        """Set the condition Ready of a pod."""
        pod = next(pod for pod in self.pods if pod["metadata"]["name"] == name)
        pod["status"]["conditions"] = [{"type": "Ready", "status": value, "lastTransitionTime": self.now.isoformat()}]
        self.wake()

    def crash_engine(self, name: str, seconds: float = 60.0) -> None:
        """End the process of a pod now; the next one is ready after some seconds (`restart_pods`)."""
        pod = next(pod for pod in self.pods if pod["metadata"]["name"] == name)
        del self.engines[name]
        container = (pod["status"].get("containerStatuses") or [{}])[0]
        finished = (self.now + timedelta(seconds=self.clock_offset)).replace(microsecond=0).isoformat()
        engine = {
            "name": naming.ENGINE_CONTAINER,
            "ready": False,
            "restartCount": container.get("restartCount", 0) + 1,
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": finished}},
        }
        condition = {"type": "Ready", "status": "False", "lastTransitionTime": self.now.isoformat()}
        pod["status"] = {"phase": "Running", "conditions": [condition], "containerStatuses": [engine]}
        pod["ready_at"] = self.now + timedelta(seconds=seconds)
        self.followed.pop(name, None)
        self.wake()

    def delete_pod(self, name: str) -> None:
        """Delete a pod; its Deployment makes another one, which is ready after some seconds."""
        self.pods = [pod for pod in self.pods if pod["metadata"]["name"] != name]
        self.engines.pop(name, None)
        self.followed.pop(name, None)
        self.run_deployments()

    def run_deployments(self) -> None:
        """Create and delete pods as the Deployments ask for."""
        before = {pod["metadata"]["name"] for pod in self.pods}
        self.schedule()
        for pod in self.pods:
            if pod["metadata"]["name"] not in before:
                pod["ready_at"] = self.now + timedelta(seconds=60)
        if before != {pod["metadata"]["name"] for pod in self.pods}:
            self.wake()

    def scale(self, replicas: int) -> None:
        self.edit(replicas=replicas)
        self.wake()

    def start_pods(self) -> None:
        """Start the processes of pods whose time has come."""
        for pod in self.pods:
            if pod.get("ready_at") is not None and pod["ready_at"] <= self.now:
                del pod["ready_at"]
                condition = {"type": "Ready", "status": "True", "lastTransitionTime": self.now.isoformat()}
                containers = [{**item, "ready": True} for item in pod["status"].get("containerStatuses") or []]
                pod["status"] = {"phase": "Running", "conditions": [condition], "containerStatuses": containers}
                self.start_engine(pod)
                self.wake()

    def probe_readiness(self) -> None:
        """Report isolated pods as not ready, as the kubelet does from its probe on."""
        for pod in self.pods:
            engine = self.engines.get(pod["metadata"]["name"])
            if engine is None:
                continue
            engine.advance(self.now.timestamp())
            value = "True" if engine.isolated_until is None else "False"
            conditions = pod["status"].get("conditions") or [{"status": "Unknown"}]
            if {value, conditions[0]["status"]} == {"True", "False"} and (value == "False" or pod.get("isolated")):
                pod["isolated"] = value == "False"
                self.ready_pod(pod["metadata"]["name"], value)

    # -- the operator
    def observed(self) -> Snapshot:
        observations = {name: pod.observation for name, pod in self.followed.items()}
        return replace_facts(super().observed(), drafters=observations)

    def plan(self) -> ReconcilePlan:
        return build_reconcile_plan(self.observed(), IMAGE, self.now, self.catalog)

    def wake(self) -> None:
        self.reconcile_at = self.now

    def reconcile(self, parts: int = 10**6) -> ReconcilePlan:
        """Reconcile once; the operator's process ends after `parts` writes, and the next one begins without memory."""
        before = dict(self.document.get("status") or {})
        plan = self.step(parts)
        self.reconciles += 1
        writes = len(plan.objects_to_apply) + len(plan.objects_to_delete) + 1
        if parts < writes:
            self.restart_operator()
            return plan
        has_written = writes > 1 or plan.status.to_dict() != before
        self.idle = (
            0 if has_written or plan.requeue_after is None or plan.requeue_after.total_seconds() > 0.005 else self.idle + 1
        )
        self.reconcile_at = None if plan.requeue_after is None else self.now + plan.requeue_after
        if has_written:
            self.wake()  # the watch reports the write
        self.follow(plan)
        self.record_violations()
        self.on_reconcile(plan)
        return plan

    def restart_operator(self) -> None:
        """End the operator's process and start another one. Calls in progress are carried out by the pods or not."""
        for name, pod in self.followed.items():
            if pod.running is not None and name in self.engines and self.random.random() < 0.5:
                engine = self.engines[name]
                engine.advance(self.now.timestamp())
                engine.perform(pod.running.call)
        self.followed, self.rollout_history = {}, None
        self.wake()

    def follow(self, plan: ReconcilePlan) -> None:
        """Follow a plan, as controller/drafters/executor.py does."""
        plans = {item.pod: item for item in plan.drafters}
        for name in self.followed.keys() - plans.keys():
            del self.followed[name]
        for name, item in plans.items():
            engine = self.engines.get(name)
            if engine is None:
                self.followed.pop(name, None)
                continue
            pod = self.followed.get(name)
            if pod is None or pod.process_id != engine.process_id:
                pod = self.followed[name] = FollowedPod(engine.process_id, read_at=self.now + timedelta(milliseconds=100))
            pod.cursor, pod.is_measured = item.cursor, item.is_measured
            if pod.is_measured and pod.read_at is not None:
                pod.read_at = min(pod.read_at, self.now + timedelta(seconds=MEASUREMENT_INTERVAL))
            running = pod.running.call if pod.running is not None else None
            pod.planned = None if item.call == running else item.call
            if isinstance(pod.planned, ReturnToOwn) and isinstance(running, LoadDrafter):
                pod.running, pod.observation = None, replace(pod.observation, call=None)
            self._send(name, pod)

    def _send(self, name: str, pod: FollowedPod) -> None:
        if pod.planned is None or pod.running is not None:
            return
        result = pod.observation.result
        is_repeated = result is not None and result.call == pod.planned and result.problem is not None
        if is_repeated and pod.retry_at is not None and pod.retry_at > self.now:
            return
        call, pod.planned = pod.planned, None
        engine = self.engines[name]
        is_held = isinstance(call, LoadDrafter) and call.drafter.digest in {window.digest for window in engine.windows}
        seconds = LOAD_SECONDS if isinstance(call, LoadDrafter) and not is_held else SWAP_SECONDS
        pod.running = RunningCall(call, self.now + timedelta(seconds=seconds))
        pod.observation = replace(pod.observation, call=call, call_started_at=self.now)

    def _finish_calls(self) -> None:
        for name, pod in list(self.followed.items()):
            engine = self.engines.get(name)
            if engine is None or engine.process_id != pod.process_id:
                continue
            if pod.running is not None and pod.running.ends_at <= self.now:
                self._finish_call(pod, engine)
                self._send(name, pod)
            elif pod.read_at is not None and pod.read_at <= self.now and pod.running is None:
                self._read(pod, engine)
            elif pod.planned is not None and pod.running is None:
                self._send(name, pod)

    def _finish_call(self, pod: FollowedPod, engine: Engine) -> None:
        assert pod.running is not None
        call, pod.running = pod.running.call, None
        outcome: ChangeDurations | EndpointProblem
        if engine.hangs:
            outcome = EndpointProblem("Timeout", "the pod does not answer: wait.")
        else:
            engine.advance(self.now.timestamp())
            outcome = engine.perform(call)
        previous = pod.observation.result
        attempts = previous.attempts + 1 if previous is not None and previous.call == call and previous.problem else 1
        pod.observation = replace(pod.observation, call=None, result=CallResult(call, outcome, self.now, attempts))
        pod.retry_at = self.now + timedelta(seconds=min(30.0, 2.0 ** (attempts - 1)))
        self._read(pod, engine)
        self.wake()

    def _read(self, pod: FollowedPod, engine: Engine) -> None:
        before = pod.observation.state
        if engine.hangs:
            problem = EndpointProblem("Timeout", "the pod does not answer: wait.")
            failed = pod.observation.failed_reads + 1
            pod.observation = replace(pod.observation, problem=problem, failed_reads=failed)
            pod.read_at = self.now + timedelta(seconds=min(60.0, READ_INTERVAL * 2**failed))
            if failed == 1:
                self.wake()
            return
        engine.advance(self.now.timestamp())
        state = engine.read(pod.cursor)
        pod.observation = with_state(pod.observation, state, self.now)
        is_busy = state.prepared is not None and state.prepared.phase == "Running"
        interval = min(READ_INTERVAL, MEASUREMENT_INTERVAL) if pod.is_measured else READ_INTERVAL
        pod.read_at = self.now + timedelta(seconds=BUSY_INTERVAL if is_busy else interval)
        if _summary(before) != _summary(state):
            self.wake()

    # -- time
    def run(self, duration: timedelta, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass, or until the condition holds; return whether it does."""
        end = self.now + duration
        while True:
            while self.reconcile_at is not None and self.reconcile_at <= self.now:
                self.reconcile_at = None
                self.reconcile()
                self.check_jobs()
                self.run_deployments()
                if self.idle > 20:
                    self.violations.append("it spins")
                    return False
            if until():
                return True
            if self.now >= end:
                return False
            self.now = min(self._iter_event_times(end))
            self.start_pods()
            self.probe_readiness()
            self._finish_calls()

    def check_jobs(self) -> None:
        before = len(self.checks)
        self.check()
        if len(self.checks) != before:
            self.wake()

    def _iter_event_times(self, end: datetime) -> Iterator[datetime]:
        yield end
        soon = self.now + timedelta(milliseconds=1)
        if self.reconcile_at is not None:
            yield max(self.reconcile_at, soon)
        for pod in self.followed.values():
            if pod.running is not None:
                yield max(pod.running.ends_at, soon)
            elif pod.read_at is not None:
                yield max(pod.read_at, soon)
            if pod.planned is not None and pod.running is None and pod.retry_at is not None:
                yield max(pod.retry_at, soon)
        for item in self.pods:
            if item.get("ready_at") is not None:
                yield max(item["ready_at"], soon)

    # -- for assertions
    def record_violations(self) -> None:
        """Record what must never be."""
        rollout = self.status.get("inPlaceRollout")
        for engine in self.engines.values():
            engine.advance(self.now.timestamp())
            name = NAMES_BY_DIGEST[engine.loaded]
            is_leased = engine.lease_until is not None
            if engine.loaded != engine.own and not is_leased:
                self.violations.append(f"{engine.pod} drafts with {name} without a lease")
            is_evaluation = rollout is not None and rollout["phase"] == "Evaluating" and engine.loaded != engine.own
            if is_evaluation and (engine.isolated_until is None or engine.unfinished_requests):
                self.violations.append(f"users reach {name} in {engine.pod} during its shadow evaluation")
        if rollout is not None and self.status.get("canary") is not None:
            self.violations.append("a canary runs beside a rollout in place")

    def loaded_names(self) -> list[str]:
        """Return the drafters in use, by pod in the order of names."""
        for engine in self.engines.values():
            engine.advance(self.now.timestamp())
        return [NAMES_BY_DIGEST[self.engines[name].loaded] for name in sorted(self.engines)]

    def own_names(self) -> set[str]:
        """Return the drafters that pods return to."""
        return {NAMES_BY_DIGEST[engine.own] for engine in self.engines.values()}

    @property
    def phase(self) -> str:
        return str(self.status.get("phase"))

    def run_until_phase(self, *phases: str, minutes: float = 60) -> None:
        """Let time pass until the resource is in one of the phases."""
        reached = self.run(timedelta(minutes=minutes), lambda: self.phase in phases)
        assert reached, f"{self.phase} after {minutes} min: {self.message('Progressing')} {self.violations}"


def _summary(state: DrafterState | None) -> object:
    if state is None:
        return None
    ended = max((window.number for window in state.windows if window.ended is not None), default=0)
    prepared = state.prepared and state.prepared.phase
    return state.process_id, state.own, state.loaded, state.lease and state.lease.digest, prepared, ended


def serving_fleet(replicas: int = 1, **arguments: Any) -> Fleet:
    """Return a fleet that serves with the drafter eagle3."""
    fleet = Fleet(replicas, **arguments)
    for _ in range(20):
        fleet.reconcile()
        fleet.check_jobs()
        fleet.schedule()
        fleet.ready()
        if fleet.phase == "Ready":
            return fleet
    raise AssertionError(fleet.message("Progressing"))
