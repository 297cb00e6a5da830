"""Decides, for each resource that is tuned, which speculation setting it should have: in the background of the passes.

    reader ─ hear ─► Tuned: windows ─┐
    pass ─ follow ─► Subject ────────┴─ interval is over ─► Order ─► child process ─► Advice, ConfigMap ─► next pass

Guarantees: nothing is decided without windows of requests since the last time, and then the advice says why: no page could be
read, there were no requests, or all windows were left out. A resource without requests costs no process. One decision at a time;
one that fails is counted, logged, and tried again later and later, and what was counted is kept for it. What an earlier operator
has written is what it goes on from. What is known is of one family of engines (`tuned.Facts`): with another image, version or
argument it begins anew, and what is written of another family is dropped on reading. Not guaranteed: the windows of the interval
in which an operator dies.
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
from aerie.controller.tuning.session import (
    RevisionFactsCache,
    TuningInputs,
    TuningSession,
    build_tuning_inputs,
    median_startup_seconds,
)
from aerie.controller.tuning.worker_client import TuningWorkerClient, TuningWorkerError
from aerie.controller.work_queue import Backoff, NamespacedName, WorkQueue
from aerie.engine.metrics.sample import Sample
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.children import tuning_record as keeping
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.trials.failures import COOLDOWNS_AFTER_ROLLBACK
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.recommendation import Recommendation, RecommendationError
from aerie.tuning.telemetry import TuningTelemetry
from aerie.tuning.worker.protocol import DecisionRequest, DecisionResponse

_log = logging.getLogger(__name__)

IMMEDIATE_DELAY_INTERVALS = 0.1
"""Intervals after which it is decided where that is due at once: by an operator that has just begun where the one before it would
have, again and again while a canary explores, because it may be kept, and after it."""


class Tuner:
    """See the module. `tell` is called with a resource that there is a new advice for, `count` with how each decision ended and
    its seconds, and `silence` says why nothing is read of a resource's pods."""

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
        """Tune the resource from now on, as was observed and as its status is."""
        resource, stable = snapshot.resource, status.stable
        if not keeping.is_tuning_enabled(resource) or stable is None:
            self.forget(key)
            return
        wanted = build_tuning_inputs(snapshot, status, stable, self._revision_facts.setdefault(key, RevisionFactsCache()))
        tuned = self._sessions.get(key)
        if tuned is None or tuned.inputs.uid != wanted.uid:
            tuned = self._sessions[key] = TuningSession(wanted)
            self._restore(tuned, snapshot)
            self._queue.add_after(key, self._first_decision_delay(key, tuned))
        elif tuned.inputs != wanted:
            self._update_inputs(key, tuned, wanted, snapshot)
        tuned.startup_seconds = median_startup_seconds(snapshot.live_pods(stable.revision)) or tuned.startup_seconds
        tuned.retain_pods(frozenset(name for name, _ in find_engine_endpoints(snapshot)))

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone, or not tuned."""
        self._sessions.pop(key, None)
        self._revision_facts.pop(key, None)

    def record_sample(
        self, owner: NamespacedName, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float
    ) -> None:
        """A believed reading of a pod."""
        tuned = self._sessions.get(owner)
        if tuned is not None:
            tuned.record_sample(pod, endpoint, sampled_at, sample, interval)

    def recommendation(self, key: NamespacedName, uid: str | None) -> Recommendation | None:
        """The latest advice for the resource with this uid."""
        tuned = self._sessions.get(key)
        return tuned.recommendation if tuned is not None and tuned.inputs.uid == uid else None

    def tuning_record(self, key: NamespacedName, uid: str | None) -> TuningRecord | None:
        """What is known of the resource with this uid, for its ConfigMap."""
        tuned = self._sessions.get(key)
        return tuned.tuning_record if tuned is not None and tuned.inputs.uid == uid else None

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

    # ------------------------------------------------------------------------------------------------------- what there is
    def _restore(self, session: TuningSession, snapshot: Snapshot) -> None:
        """What an earlier operator has written, if it is of these engines."""
        found = keeping.read_tuning_record(snapshot)
        if found is None or found.engine_family != session.inputs.engine_family:
            return
        session.tuning_record = found
        try:
            session.recommendation = Recommendation.from_dict(json.loads(found.recommendation))
        except (RecommendationError, ValueError):
            session.recommendation = None

    def _first_decision_delay(self, key: NamespacedName, session: TuningSession) -> float:
        """Seconds until the first decision: resources that came together are decided on one by one."""
        interval = session.inputs.interval
        spread = zlib.crc32(str(key).encode()) / 2**32
        if session.tuning_record is None:
            return interval * (1 + IMMEDIATE_DELAY_INTERVALS * spread)
        left = session.tuning_record.decision_time + interval - self._clock.now().timestamp()
        return min(interval, max(left, 0.0)) + interval * IMMEDIATE_DELAY_INTERVALS * (1 + spread)

    def _update_inputs(self, key: NamespacedName, session: TuningSession, inputs: TuningInputs, snapshot: Snapshot) -> None:
        before, session.inputs = session.inputs, inputs
        if before.engine_family != inputs.engine_family:  # other engines: nothing that was counted is of them
            session.tuning_record = session.pending_telemetry = session.recommendation = None
            session.last_scrapes.clear()
            self._restore(session, snapshot)
        elif before.scale != inputs.scale or before.horizon != inputs.horizon:
            session.pending_telemetry = None
        if before.interval != inputs.interval:
            self._queue.add_after(key, inputs.interval)
        if before.history.explored != inputs.history.explored or (
            inputs.explored_setting is not None and before.explored_setting is None
        ):
            self._queue.add_after(key, IMMEDIATE_DELAY_INTERVALS * inputs.interval)  # what a canary teaches may be acted on

    # ------------------------------------------------------------------------------------------------------------ deciding
    async def _run_decision(self, key: NamespacedName) -> None:
        tuned = self._sessions.get(key)
        if tuned is None:
            return
        began, outcome = asyncio.get_running_loop().time(), "failed"
        before, kept = tuned.recommendation, tuned.tuning_record
        try:
            outcome = await self._decide(key, tuned)
            self._queue.forget(key)
            self._queue.add_after(key, _decision_delay(tuned.inputs))
        except TuningWorkerError as error:
            seconds = self._queue.add_rate_limited(key)
            _log.warning("%s: no decision on its speculation setting: %s; again in %.0f s", key, error, seconds)
        except Exception:  # noqa: BLE001 - one resource's fault must not end the others' decisions
            self._queue.add_rate_limited(key)
            _log.exception("%s: the decision on its speculation setting ended with an error of Aerie's own", key)
        self._record_decision(outcome, asyncio.get_running_loop().time() - began)
        if self._sessions.get(key) is tuned and (
            tuned.tuning_record is not kept or not _is_same_recommendation(before, tuned.recommendation)
        ):
            self._enqueue(key)

    async def _decide(self, key: NamespacedName, session: TuningSession) -> str:
        """An advice, by a process of its own where there is something to decide on; how it ended."""
        read, telemetry = session.sample_count, session.take_telemetry()
        now = round(self._clock.now().timestamp(), 3)
        reason = self._insufficient_data_reason(key, session, telemetry, read)
        if reason or telemetry is None:
            session.recommendation = Recommendation(session.inputs.revision, now, "Insufficient", None, None, reason)
            return "nothing"
        subject, order = session.inputs, _build_decision_request(session, telemetry, now)
        try:
            answer = await self._worker.request_decision(order)
        except BaseException:
            if session.inputs.engine_family == subject.engine_family and session.inputs.scale == telemetry.scale:
                session.restore_telemetry(telemetry)
            raise
        if (session.inputs.engine_family, session.inputs.scale) != (subject.engine_family, subject.scale):
            return "outdated"
        session.recommendation = answer.recommendation
        session.tuning_record = _build_tuning_record(subject, answer, now)
        _log.info("%s: tuning says %s: %s", key, answer.recommendation.action, answer.recommendation.reason)
        return answer.recommendation.action.lower()

    def _insufficient_data_reason(
        self, key: NamespacedName, session: TuningSession, telemetry: TuningTelemetry | None, sample_count: int
    ) -> str:
        """Why there is nothing to decide on; empty where there is."""
        subject = session.inputs
        if subject.current_setting is None or subject.engine is None:
            return "no record tells what the engines of the stable revision are: it comes with the next revision."
        if sample_count == 0:
            return f"nothing was read of the pods in the last interval{_format_cause(self._unavailable_reason(key))}"
        if telemetry is None:
            return "there were no requests in the last interval, so there is nothing to decide on."
        if telemetry.newest_window_end is not None and any(True for _ in telemetry.blocks()):
            return ""
        sentence, _ = telemetry.excluded_windows.most_common(1)[0]
        return f"of the last interval nothing counts: {sentence}"


def _decision_delay(inputs: TuningInputs) -> float:
    """Seconds between two decisions."""
    return inputs.interval * (IMMEDIATE_DELAY_INTERVALS if inputs.explored_setting is not None else 1.0)


def _format_cause(reason: str) -> str:
    return f": {reason.rstrip('.')}." if reason else "."


def _is_same_recommendation(before: Recommendation | None, after: Recommendation | None) -> bool:
    """Whether nothing but the moment is another."""
    return before == after or (
        before is not None and after is not None and replace(before, decision_time=after.decision_time) == after
    )


def _build_decision_request(session: TuningSession, telemetry: TuningTelemetry, now: float) -> DecisionRequest:
    subject, policy = session.inputs, TuningPolicy()
    assert subject.current_setting is not None
    assert subject.engine is not None
    policy = replace(
        policy,
        cooldown=subject.cooldown,
        cooldown_after_rollback=COOLDOWNS_AFTER_ROLLBACK * subject.cooldown,
        reload=session.startup_seconds or policy.reload,
        canary=subject.interval,
        probe=subject.horizon,
    )
    return DecisionRequest(
        revision=subject.revision,
        now=now,
        current=subject.current_setting,
        engine=subject.engine,
        most=subject.max_speculative_tokens,
        replicas=subject.replicas,
        waiting=session.queued_requests,
        lent=subject.borrowed_replicas,
        extra=subject.surge_pods,
        failed=subject.failed_settings,
        exploring=subject.explored_setting,
        objectives=subject.objectives,
        history=subject.history,
        policy=policy,
        horizon=subject.horizon,
        scale=subject.scale,
        kept=session.tuning_record.telemetry if session.tuning_record is not None else "",
        since=telemetry,
    )


def _build_tuning_record(inputs: TuningInputs, response: DecisionResponse, now: float) -> TuningRecord:
    return TuningRecord(
        now, inputs.engine_family, response.packed_telemetry, json.dumps(response.recommendation.to_dict()), response.explanation
    )
