"""Decides in the background which speculation setting each tuned resource should have.

    scraper ─ record_sample ─► TuningSession: windows ─┐
    reconcile ─ track ─► TuningInputs ─────────────────┴─ interval is over ─► DecisionRequest ─► worker process ─┐
    next reconcile ◄─ ConfigMap, Recommendation ◄────────────────────────────────────────────────────────────────┘

Guarantees: nothing is decided without windows of requests since the last decision. Without them the recommendation says why: no
metrics could be read, there were no requests, or all windows were excluded. A resource without requests costs no process.
There is one decision at a time. One that fails is counted, logged, and retried with growing delays, and its telemetry is kept.

The tuner continues from the record of an earlier operator. All its data is of one engine family (`RevisionFacts`): with
another image, version or argument it starts over, and a record of another family is ignored. Not guaranteed: the windows of the
interval in which an operator dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Callable
from dataclasses import replace

from aerie.api.status import Status
from aerie.controller.clock import Clock
from aerie.controller.scraping.targets import EngineEndpoint, find_engine_endpoints
from aerie.controller.tuning.inputs import TuningInputs, build_tuning_inputs
from aerie.controller.tuning.revision_facts import RevisionFactsCache
from aerie.controller.tuning.session import TuningSession
from aerie.controller.tuning.startup_time import median_startup_seconds
from aerie.controller.tuning.worker_client import TuningWorkerClient, TuningWorkerError
from aerie.controller.work_queue import Backoff, NamespacedName, WorkQueue
from aerie.engine.metrics.sample import Sample
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.children.tuning_record import is_tuning_enabled, read_tuning_record
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.trials.failures import COOLDOWNS_AFTER_ROLLBACK
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.recommendation import Recommendation, RecommendationError
from aerie.tuning.telemetry import TuningTelemetry
from aerie.tuning.worker.protocol import DecisionRequest, DecisionResponse

_log = logging.getLogger(__name__)

IMMEDIATE_DELAY_INTERVALS = 0.1
"""Delay in intervals of a decision that is due immediately.

It applies after a start of the operator, if the previous operator would have decided; repeatedly while a canary explores, because
its setting may be kept; and after the exploration.
"""


class Tuner:
    """Tuner of all resources.

    `enqueue` is called with a resource that has a new recommendation, and `record_decision` with the outcome and the seconds of
    each decision. `unavailable_reason` returns why a resource's pods have no metrics.
    """

    def __init__(
        self,
        enqueue: Callable[[NamespacedName], None],
        record_decision: Callable[[str, float], None] = lambda *_: None,
        unavailable_reason: Callable[[NamespacedName], str] = lambda _: "",
        clock: Clock | None = None,
        worker: TuningWorkerClient | None = None,
    ) -> None:
        self._enqueue, self._record_decision, self._unavailable_reason = enqueue, record_decision, unavailable_reason
        self._clock = clock or Clock()
        self._worker = worker or TuningWorkerClient()
        self._queue = WorkQueue(Backoff(initial_seconds=30.0, max_seconds=1800.0))
        self._sessions: dict[NamespacedName, TuningSession] = {}
        self._revision_facts: dict[NamespacedName, RevisionFactsCache] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Tune the resource from now on, according to its snapshot and status."""
        resource, stable = snapshot.resource, status.stable
        if not is_tuning_enabled(resource) or stable is None:
            self.forget(key)
            return
        inputs = build_tuning_inputs(snapshot, status, stable, self._revision_facts.setdefault(key, RevisionFactsCache()))
        session = self._sessions.get(key)
        if session is None or session.inputs.uid != inputs.uid:
            session = self._sessions[key] = TuningSession(inputs)
            self._restore(session, snapshot)
            self._queue.add_after(key, self._first_decision_delay(key, session))
        elif session.inputs != inputs:
            self._update_inputs(key, session, inputs, snapshot)
        session.startup_seconds = median_startup_seconds(snapshot.cluster.live_pods(stable.revision)) or session.startup_seconds
        session.retain_pods(frozenset(name for name, _ in find_engine_endpoints(snapshot)))

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted or is not tuned."""
        self._sessions.pop(key, None)
        self._revision_facts.pop(key, None)

    def record_sample(
        self, owner: NamespacedName, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float
    ) -> None:
        """Record a valid sample of a pod."""
        session = self._sessions.get(owner)
        if session is not None:
            session.record_sample(pod, endpoint, sampled_at, sample, interval)

    def recommendation(self, key: NamespacedName, uid: str | None) -> Recommendation | None:
        """Return the latest recommendation for the resource with this uid."""
        session = self._sessions.get(key)
        return session.recommendation if session is not None and session.inputs.uid == uid else None

    def tuning_record(self, key: NamespacedName, uid: str | None) -> TuningRecord | None:
        """Return the tuning record of the resource with this uid, for its ConfigMap."""
        session = self._sessions.get(key)
        return session.tuning_record if session is not None and session.inputs.uid == uid else None

    async def run(self) -> None:
        """Decide until cancelled."""
        try:
            while True:
                key, _ = await self._queue.get()
                try:
                    await self._run_decision(key)
                finally:
                    self._queue.done(key)
        finally:
            await self._worker.close()

    # -------------------------------------------------------------------------------------------------------------- inputs
    def _restore(self, session: TuningSession, snapshot: Snapshot) -> None:
        """Restore the record that an earlier operator has written, if it is of the same engine family."""
        record = read_tuning_record(snapshot)
        if record is None or record.engine_family != session.inputs.engine_family:
            return
        session.tuning_record = record
        try:
            session.recommendation = Recommendation.from_dict(json.loads(record.recommendation))
        except (RecommendationError, ValueError):
            session.recommendation = None

    def _first_decision_delay(self, key: NamespacedName, session: TuningSession) -> float:
        """Return the seconds until the first decision.

        They are spread, so that the decisions on resources that came together do not fall together.
        """
        interval = session.inputs.interval
        fraction = zlib.crc32(str(key).encode()) / 2**32
        if session.tuning_record is None:
            return interval * (1 + IMMEDIATE_DELAY_INTERVALS * fraction)
        remaining = session.tuning_record.decision_time + interval - self._clock.now().timestamp()
        return min(interval, max(remaining, 0.0)) + interval * IMMEDIATE_DELAY_INTERVALS * (1 + fraction)

    def _update_inputs(self, key: NamespacedName, session: TuningSession, inputs: TuningInputs, snapshot: Snapshot) -> None:
        previous, session.inputs = session.inputs, inputs
        if previous.engine_family != inputs.engine_family:  # other engines: the telemetry does not apply to them
            session.tuning_record = session.pending_telemetry = session.recommendation = None
            session.last_scrapes.clear()
            self._restore(session, snapshot)
        elif previous.scale != inputs.scale or previous.horizon != inputs.horizon:
            session.pending_telemetry = None
        if previous.interval != inputs.interval:
            self._queue.add_after(key, inputs.interval)
        if previous.history.exploration_times != inputs.history.exploration_times or (
            inputs.explored_setting is not None and previous.explored_setting is None
        ):
            # The results of a canary may lead to a change.
            self._queue.add_after(key, IMMEDIATE_DELAY_INTERVALS * inputs.interval)

    # ----------------------------------------------------------------------------------------------------------- decisions
    async def _run_decision(self, key: NamespacedName) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        started, outcome = asyncio.get_running_loop().time(), "failed"
        previous_recommendation, previous_record = session.recommendation, session.tuning_record
        try:
            outcome = await self._decide(key, session)
            self._queue.forget(key)
            self._queue.add_after(key, _decision_delay(session.inputs))
        except TuningWorkerError as error:
            seconds = self._queue.add_rate_limited(key)
            _log.warning("%s: no decision on its speculation setting: %s; retrying in %.0f s", key, error, seconds)
        except Exception:  # noqa: BLE001 - a fault with one resource must not stop the decisions of the others
            self._queue.add_rate_limited(key)
            _log.exception("%s: the decision on its speculation setting failed with an internal error", key)
        self._record_decision(outcome, asyncio.get_running_loop().time() - started)
        if self._sessions.get(key) is session and (
            session.tuning_record is not previous_record
            or not _is_same_recommendation(previous_recommendation, session.recommendation)
        ):
            self._enqueue(key)

    async def _decide(self, key: NamespacedName, session: TuningSession) -> str:
        """Update the recommendation, by the worker process where there is enough data, and return the outcome."""
        sample_count, telemetry = session.sample_count, session.take_telemetry()
        now = round(self._clock.now().timestamp(), 3)
        reason = self._insufficient_data_reason(key, session, telemetry, sample_count)
        if reason or telemetry is None:
            session.recommendation = Recommendation(session.inputs.revision, now, "Insufficient", None, None, reason)
            return "no_data"
        inputs, request = session.inputs, _build_decision_request(session, telemetry, now)
        try:
            response = await self._worker.request_decision(request)
        except BaseException:
            if session.inputs.engine_family == inputs.engine_family and session.inputs.scale == telemetry.scale:
                session.restore_telemetry(telemetry)
            raise
        if (session.inputs.engine_family, session.inputs.scale) != (inputs.engine_family, inputs.scale):
            return "superseded"
        session.recommendation = response.recommendation
        session.tuning_record = _build_tuning_record(inputs, response, now)
        _log.info("%s: tuning recommends %s: %s", key, response.recommendation.action, response.recommendation.reason)
        return response.recommendation.action.lower()

    def _insufficient_data_reason(
        self, key: NamespacedName, session: TuningSession, telemetry: TuningTelemetry | None, sample_count: int
    ) -> str:
        """Return why there is not enough data for a decision; empty when there is."""
        inputs = session.inputs
        if inputs.current_setting is None or inputs.engine is None:
            return "there is no record of the engines of the stable revision; the next revision will have one."
        if sample_count == 0:
            return f"no metrics of the pods were read in the last interval{_format_cause(self._unavailable_reason(key))}"
        if telemetry is None:
            return "there were no requests in the last interval, so there is nothing to decide on."
        if telemetry.newest_window_end is not None and any(True for _ in telemetry.blocks()):
            return ""
        exclusion_reason, _ = telemetry.excluded_windows.most_common(1)[0]
        return f"all windows of the last interval are excluded: {exclusion_reason}"


def _decision_delay(inputs: TuningInputs) -> float:
    """Return the seconds between two decisions."""
    return inputs.interval * (IMMEDIATE_DELAY_INTERVALS if inputs.explored_setting is not None else 1.0)


def _format_cause(reason: str) -> str:
    return f": {reason.rstrip('.')}." if reason else "."


def _is_same_recommendation(previous: Recommendation | None, current: Recommendation | None) -> bool:
    """Return True when nothing but the decision time differs."""
    return previous == current or (
        previous is not None and current is not None and replace(previous, decision_time=current.decision_time) == current
    )


def _build_decision_request(session: TuningSession, telemetry: TuningTelemetry, now: float) -> DecisionRequest:
    inputs, policy = session.inputs, TuningPolicy()
    assert inputs.current_setting is not None
    assert inputs.engine is not None
    policy = replace(
        policy,
        cooldown_seconds=inputs.cooldown,
        cooldown_after_rollback_seconds=COOLDOWNS_AFTER_ROLLBACK * inputs.cooldown,
        reload_seconds=session.startup_seconds or policy.reload_seconds,
        exploration_seconds=inputs.interval,
        probe_interval_seconds=inputs.horizon,
    )
    return DecisionRequest(
        revision=inputs.revision,
        now=now,
        current_setting=inputs.current_setting,
        engine=inputs.engine,
        max_speculative_tokens=inputs.max_speculative_tokens,
        replicas=inputs.replicas,
        queued_requests=session.queued_requests,
        borrowed_replicas=inputs.borrowed_replicas,
        surge_pods=inputs.surge_pods,
        failed_trials=inputs.failed_settings,
        explored_setting=inputs.explored_setting,
        objectives=inputs.objectives,
        history=inputs.history,
        policy=policy,
        horizon=inputs.horizon,
        scale=inputs.scale,
        packed_telemetry=session.tuning_record.telemetry if session.tuning_record is not None else "",
        new_telemetry=telemetry,
    )


def _build_tuning_record(inputs: TuningInputs, response: DecisionResponse, now: float) -> TuningRecord:
    return TuningRecord(
        now, inputs.engine_family, response.packed_telemetry, json.dumps(response.recommendation.to_dict()), response.explanation
    )
