"""Reads the drafters of pods at intervals, and performs the changes that the latest plan of their resource has for them.

    reconcile ─ follow(plan.drafters) ─► pods ─► quick pool: read; prepare, renew, return; read ─┬─► observation ─► reconcile
                                             └─► load pool:  load; then read ────────────────────────┘

A plan is a desired state and not an order: a call is sent only while the latest plan has it, and every plan repeats what has not
been observed yet. So nothing is lost with the process.

Guarantees: only pods that the resource owns get calls. A pod gets one request at a time. A return to the own drafter does not
wait for a load that is in progress: the load's connection is closed first, and the pod withdraws it. A call that failed is
repeated with growing delays. Every call has a deadline (client.py). Each pool limits its calls, those of one namespace and those
of one resource (fair_queue.py), and loads, which may take minutes, take no turn of returns and renewals. An operator whose Lease
has expired sends no changes. Failures are values in the observation, and never fail a reconcile. Not guaranteed: an order among
the pods of a plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import httpx

from aerie.controller.clock import Clock
from aerie.controller.drafters.client import DrafterClient
from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.http_fetch import create_http_client
from aerie.controller.scraping.scrape_pool import ScrapePool, limit_scrape_rate
from aerie.controller.scraping.targets import EngineEndpoint, find_engine_endpoints
from aerie.controller.tokens import ResourceTokens
from aerie.controller.work_queue import Backoff, NamespacedName
from aerie.engine.drafter_endpoint.calls import (
    DrafterCall,
    IsolatePod,
    LoadDrafter,
    PrepareDrafter,
    RenewLease,
    ReturnToOwn,
)
from aerie.engine.drafter_endpoint.response import ChangeDurations, EndpointProblem
from aerie.engine.drafter_endpoint.state import DrafterState, WindowCursor
from aerie.rollout.facts.drafters import MAX_FAILED_READS, CallResult, DrafterObservation, with_state
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import PodDrafterPlan

_log = logging.getLogger(__name__)

MAX_QUICK_CALLS, MAX_QUICK_CALLS_PER_NAMESPACE = 256, 128
"""Reads, renewals and returns in progress at once; a resource has half of its namespace's."""
MAX_LOADS, MAX_LOADS_PER_NAMESPACE = 256, 64
"""Loads in progress at once."""
BUSY_READ_DELAY_SECONDS = 1.0
"""Seconds between two reads of a pod that prepares or changes a drafter, and answers."""
MEASUREMENT_READ_DELAY_SECONDS = 5.0
"""Maximum seconds between two reads of a pod whose rate of requests is being measured, and that answers."""
MAX_READ_DELAY_SECONDS = 60.0
"""Maximum seconds between two reads of a pod that does not answer."""
CALL_BACKOFF = Backoff(initial_seconds=1.0, max_seconds=30.0)
"""Delay until a call that failed is repeated."""

_CALL_NAMES: Mapping[type, str] = {
    PrepareDrafter: "prepare",
    LoadDrafter: "load",
    RenewLease: "renew",
    IsolatePod: "isolate",
    ReturnToOwn: "return",
}


@dataclass(eq=False)
class _Pod:
    """A pod that is followed, in one run of its engine."""

    owner: NamespacedName
    owner_uid: str
    endpoint: EngineEndpoint
    interval: float
    cursor: WindowCursor | None = None
    call: DrafterCall | None = None
    """The plan's call that is to be sent."""
    call_due_at: float = 0.0
    """Time of the event loop before which the call is not sent."""
    next_call: DrafterCall | None = None
    """The plan's call that replaces `call` from `next_call_due_at` on, a time of the event loop."""
    next_call_due_at: float = 0.0
    failed_call: DrafterCall | None = None
    """The latest call, if it failed."""
    retry_at: float = 0.0
    """Time of the event loop before which `failed_call` is not repeated."""
    observation: DrafterObservation = field(default_factory=DrafterObservation)
    withdrawal: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request in progress is no longer needed."""

    @property
    def address(self) -> str:
        return self.endpoint.url.removesuffix("/metrics")

    @property
    def read_delay(self) -> float:
        """Seconds until the next read."""
        failures, state = self.observation.failed_reads, self.observation.state
        if state is None and failures == 0:
            return 0.0
        if state is not None and failures == 0 and (state.change is not None or _is_preparing(state)):
            return min(self.interval, BUSY_READ_DELAY_SECONDS)
        return min(max(self.interval, MAX_READ_DELAY_SECONDS), self.interval * 2.0 ** min(failures, 30))


class DrafterExecutor:
    """Executor for all resources. `enqueue` is called with a resource of which something new is observed, `may_change` before
    each change, `record_call` with the kind and the outcome of each call that has ended (metrics.py)."""

    def __init__(
        self,
        tokens: ResourceTokens,
        enqueue: Callable[[NamespacedName], None],
        may_change: Callable[[], bool],
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        record_call: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._tokens, self._enqueue, self._may_change, self._clock = tokens, enqueue, may_change, clock
        self._transport, self._record_call = transport, record_call
        self._pods: dict[NamespacedName, _Pod] = {}
        self._pods_by_owner: dict[NamespacedName, set[NamespacedName]] = {}
        self._busy: set[NamespacedName] = set()
        """Pods with a request in progress."""
        self._quick_pool, self._load_pool = (
            ScrapePool(MAX_READ_DELAY_SECONDS, FairQueue(self._find_owner, per_namespace), maximum)
            for per_namespace, maximum in (
                (MAX_QUICK_CALLS_PER_NAMESPACE, MAX_QUICK_CALLS),
                (MAX_LOADS_PER_NAMESPACE, MAX_LOADS),
            )
        )

    # ------------------------------------------------------------------------------------------------------- reconciles
    def follow(self, key: NamespacedName, snapshot: Snapshot, plans: Iterable[PodDrafterPlan]) -> None:
        """Read and change the pods of the resource according to its plan from now on, and no other pods of it."""
        plan_by_pod = {plan.pod: plan for plan in plans}
        endpoints = dict(find_engine_endpoints(snapshot)) if plan_by_pod else {}
        names = {NamespacedName(key.namespace, pod): pod for pod in plan_by_pod if pod in endpoints}
        for name in self._pods_by_owner.get(key, set()) - names.keys():
            self._drop(name)
        scrape_interval = snapshot.resource.spec.metrics.scrape_interval.total_seconds()
        interval = limit_scrape_rate(scrape_interval, len(names))
        for name, pod_name in names.items():
            plan = plan_by_pod[pod_name]
            pod_interval = min(interval, MEASUREMENT_READ_DELAY_SECONDS) if plan.is_measured else interval
            self._follow_pod(key, snapshot.resource.metadata.uid or "", name, endpoints[pod_name], pod_interval)
            planned_from = snapshot.engines.drafters.get(pod_name, DrafterObservation())
            self._plan_call(name, self._pods[name], plan, planned_from)

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        for name in tuple(self._pods_by_owner.get(key, ())):
            self._drop(name)
        self._tokens.forget(key)

    def observations(self, key: NamespacedName) -> Mapping[str, DrafterObservation]:
        """Return what is observed of the resource's pods, by name; a pod that has not been read yet has an empty observation."""
        return {name.name: self._pods[name].observation for name in self._pods_by_owner.get(key, ())}

    def _follow_pod(self, key: NamespacedName, uid: str, name: NamespacedName, endpoint: EngineEndpoint, interval: float) -> None:
        pod = self._pods.get(name)
        if pod is not None and (pod.owner, pod.owner_uid, pod.endpoint) == (key, uid, endpoint):
            is_sooner, pod.interval = interval < pod.interval, interval
            if is_sooner:
                self._schedule(name, pod)
            return
        if pod is not None:
            self._drop(name)
        self._pods[name] = pod = _Pod(key, uid, endpoint, interval)
        self._pods_by_owner.setdefault(key, set()).add(name)
        self._quick_pool.queue.add(name)

    def _plan_call(self, name: NamespacedName, pod: _Pod, plan: PodDrafterPlan, planned_from: DrafterObservation) -> None:
        """Take over the plan's calls, unless they are in progress or have succeeded since the observation that it is based on."""
        pod.cursor, pod.next_call = plan.cursor, None
        call, running = plan.call, pod.observation.call
        if plan.next_call is not None:
            delay = (plan.next_call.due_at - self._clock.now()).total_seconds()
            if delay <= 0:
                call = plan.next_call.call
            else:
                pod.next_call, pod.next_call_due_at = plan.next_call.call, _now() + delay
        is_running = call == running and not pod.withdrawal.is_set()
        call = None if is_running or _has_succeeded_since(pod.observation.result, planned_from.result, call) else call
        if call != pod.call:
            pod.call, pod.call_due_at = call, pod.retry_at if call == pod.failed_call else 0.0
            if isinstance(call, ReturnToOwn) and isinstance(running, LoadDrafter):
                pod.withdrawal.set()
        elif pod.next_call is None:
            return
        self._schedule(name, pod)

    def _drop(self, name: NamespacedName) -> None:
        pod = self._pods.pop(name)
        pod.withdrawal.set()
        owned = self._pods_by_owner[pod.owner]
        owned.discard(name)
        if not owned:
            del self._pods_by_owner[pod.owner]

    def _find_owner(self, name: NamespacedName) -> NamespacedName:
        pod = self._pods.get(name)
        return name if pod is None else pod.owner

    # ------------------------------------------------------------------------------------------------------- turns
    async def run(self) -> None:
        """Read and change pods until cancelled."""
        async with create_http_client(self._transport) as http_client, asyncio.TaskGroup() as group:
            take_turn = functools.partial(self._take_turn, DrafterClient(http_client))
            for pool in (self._quick_pool, self._load_pool):
                group.create_task(pool.run(take_turn, group))

    def _select_pool(self, pod: _Pod) -> ScrapePool:
        return self._load_pool if isinstance(pod.call, LoadDrafter) and pod.call_due_at <= _now() else self._quick_pool

    def _schedule(self, name: NamespacedName, pod: _Pod) -> None:
        """Schedule the pod's next turn: when its call is due, or for a read."""
        if name in self._busy:
            return  # its end schedules the next turn
        delays = [pod.read_delay]
        if pod.call is not None:
            delays.append(pod.call_due_at - _now())
        if pod.next_call is not None:
            delays.append(pod.next_call_due_at - _now())
        self._select_pool(pod).queue.add_after(name, max(0.0, min(delays)))

    async def _take_turn(self, client: DrafterClient, pool: ScrapePool, name: NamespacedName) -> None:
        pod = self._pods.get(name)
        if pod is None or name in self._busy:
            return
        if pod.next_call is not None and pod.next_call_due_at <= _now():
            pod.call, pod.call_due_at, pod.next_call = pod.next_call, 0.0, None
        if self._select_pool(pod) is not pool:
            self._schedule(name, pod)
            return
        self._busy.add(name)
        before = _summarize(pod.observation)
        try:
            await self._serve_pod(client, pod)
        except Exception:  # noqa: BLE001 - one pod must not stop the others
            _log.exception("pod %s: the call of its drafter endpoint failed with an internal error", name)
            pod.observation = replace(pod.observation, failed_reads=pod.observation.failed_reads + 1)
            _postpone_call(pod)
        finally:
            pod.observation = replace(pod.observation, call=None, call_started_at=None)
            self._busy.discard(name)
            if (current := self._pods.get(name)) is not None:
                self._schedule(name, current)
        if current is pod and _summarize(pod.observation) != before:
            self._enqueue(pod.owner)

    async def _serve_pod(self, client: DrafterClient, pod: _Pod) -> None:
        """Send the call that is due, then read the state."""
        token = await self._tokens.ensure(pod.owner, pod.owner_uid)
        if isinstance(token, EndpointProblem):
            self._record_read_failure(pod, token)
            _postpone_call(pod)
            return
        if not self._may_change():
            _postpone_call(pod)
        if pod.call is not None and pod.call_due_at <= _now():
            call, pod.call = pod.call, None
            pod.withdrawal.clear()
            pod.observation = replace(pod.observation, call=call, call_started_at=self._clock.now())
            outcome = await _send_unless_withdrawn(client.send_call(pod.address, token, call), pod.withdrawal)
            if outcome is None:
                return
            self._record_result(pod, call, outcome)
        state = await client.read_state(pod.address, token, pod.cursor)
        if isinstance(state, EndpointProblem):
            self._record_read_failure(pod, state)
            return
        pod.observation = with_state(pod.observation, state, self._clock.now())

    def _record_result(self, pod: _Pod, call: DrafterCall, outcome: ChangeDurations | EndpointProblem) -> None:
        if isinstance(outcome, EndpointProblem):
            outcome = self._tokens.explain_rejection(pod.owner, outcome)
        previous = pod.observation.result
        attempts = previous.attempts + 1 if previous is not None and pod.failed_call == call else 1
        pod.observation = replace(pod.observation, result=CallResult(call, outcome, self._clock.now(), attempts))
        pod.failed_call = None
        self._record_call(_CALL_NAMES[type(call)], _name_outcome(outcome))
        if isinstance(outcome, EndpointProblem):
            pod.failed_call, pod.retry_at = call, _now() + CALL_BACKOFF.delay(attempts)
            _log.info("%s: %s of its pod %s failed: %s", pod.owner, type(call).__name__, pod.address, outcome.message)

    def _record_read_failure(self, pod: _Pod, problem: EndpointProblem) -> None:
        problem = self._tokens.explain_rejection(pod.owner, problem)
        failed_reads = pod.observation.failed_reads + 1
        if failed_reads == 1:
            _log.info("%s: the drafter of its pod %s cannot be read: %s", pod.owner, pod.address, problem.message)
        pod.observation = replace(pod.observation, problem=problem, failed_reads=failed_reads)


def _is_preparing(state: DrafterState) -> bool:
    return state.prepared is not None and state.prepared.phase == "Running"


def _name_outcome(outcome: ChangeDurations | EndpointProblem) -> str:
    """Return the outcome in the metric: pods choose their reasons, so those are no values of a label."""
    if not isinstance(outcome, EndpointProblem):
        return "done"
    return "rejected" if outcome.status is not None and 400 <= outcome.status < 500 else "failed"


def _has_succeeded_since(latest: CallResult | None, planned_from: CallResult | None, call: DrafterCall | None) -> bool:
    """Return whether a call is done that the plan could not know of: sent again, it would be rejected for what it did itself."""
    return latest is not None and latest is not planned_from and latest.problem is None and latest.call == call


def _postpone_call(pod: _Pod) -> None:
    """Send the call later, because it cannot be sent now."""
    pod.call_due_at = max(pod.call_due_at, _now() + CALL_BACKOFF.delay(max(1, pod.observation.failed_reads)))


async def _send_unless_withdrawn(
    request: Awaitable[ChangeDurations | EndpointProblem], withdrawal: asyncio.Event
) -> ChangeDurations | EndpointProblem | None:
    """Return the outcome of a request, or None if it was withdrawn; its connection is closed then."""
    sending, withdrawing = asyncio.ensure_future(request), asyncio.ensure_future(withdrawal.wait())
    try:
        await asyncio.wait((sending, withdrawing), return_when=asyncio.FIRST_COMPLETED)
        return sending.result() if sending.done() else None
    finally:
        withdrawing.cancel()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


def _summarize(observation: DrafterObservation) -> object:
    """Return the parts of an observation whose change is worth a reconcile: not the time and the counters that always grow."""
    state, problem = observation.state, observation.problem
    parts = None
    if state is not None:
        ended = max((window.number for window in state.windows if window.ended is not None), default=0)
        digests = [drafter and drafter.digest for drafter in (state.own, state.loaded)]
        lease, change = state.lease and state.lease.digest, state.change and state.change.phase
        prepared = state.prepared and (state.prepared.source, state.prepared.phase)
        parts = (state.process_id, *digests, lease, change, prepared, state.problem, state.unfit, state.failures, ended)
    return parts, problem and problem.reason, min(observation.failed_reads, MAX_FAILED_READS), observation.result


def _now() -> float:
    return asyncio.get_running_loop().time()
