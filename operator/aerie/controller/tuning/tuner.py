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
from aerie.controller.scraping.targets import Target, targets
from aerie.controller.tuning.session import Records, Subject, Tuned, reload_of, subject
from aerie.controller.tuning.worker_client import Decider, DeciderError
from aerie.controller.work_queue import Backoff, Key, WorkQueue
from aerie.engine.metrics.sample import Sample
from aerie.manifests.tuning_config_map import Kept
from aerie.rollout.children import tuning_record as keeping
from aerie.rollout.facts.snapshot import Observed
from aerie.rollout.trials.failures import AFTER_ROLLBACK
from aerie.tuning.decision.policy import Policy
from aerie.tuning.recommendation import Advice, AdviceError
from aerie.tuning.telemetry import Telemetry
from aerie.tuning.worker.protocol import Answer, Order

_log = logging.getLogger(__name__)

SOONEST = 0.1
"""Intervals after which it is decided where that is due at once: by an operator that has just begun where the one before it would
have, again and again while a canary explores, because it may be kept, and after it."""


class Tuner:
    """See the module. `tell` is called with a resource that there is a new advice for, `count` with how each decision ended and
    its seconds, and `silence` says why nothing is read of a resource's pods."""

    def __init__(
        self,
        tell: Callable[[Key], None],
        count: Callable[[str, float], None] = lambda *_: None,
        silence: Callable[[Key], str] = lambda _: "",
        clock: Clock | None = None,
        decider: Decider | None = None,
    ) -> None:
        self._tell, self._count, self._silence = tell, count, silence
        self._clock = clock or Clock()
        self._decider = decider or Decider()
        self._queue = WorkQueue(Backoff(first=30.0, most=1800.0))
        self._tuned: dict[Key, Tuned] = {}
        self._records: dict[Key, Records] = {}

    def follow(self, key: Key, observed: Observed, status: Status) -> None:
        """Tune the resource from now on, as was observed and as its status is."""
        resource, stable = observed.resource, status.stable
        if not keeping.tunes(resource) or stable is None:
            self.forget(key)
            return
        wanted = subject(observed, status, stable, self._records.setdefault(key, Records()))
        tuned = self._tuned.get(key)
        if tuned is None or tuned.subject.uid != wanted.uid:
            tuned = self._tuned[key] = Tuned(wanted)
            self._recall(tuned, observed)
            self._queue.add_after(key, self._first(key, tuned))
        elif tuned.subject != wanted:
            self._changed(key, tuned, wanted, observed)
        tuned.reload = reload_of(observed.group(stable.revision)) or tuned.reload
        tuned.forget_others(frozenset(name for name, _ in targets(observed)))

    def forget(self, key: Key) -> None:
        """The resource is gone, or not tuned."""
        self._tuned.pop(key, None)
        self._records.pop(key, None)

    def hear(self, owner: Key, pod: str, target: Target, at: float, sample: Sample, interval: float) -> None:
        """A believed reading of a pod."""
        tuned = self._tuned.get(owner)
        if tuned is not None:
            tuned.hear(pod, target, at, sample, interval)

    def advice(self, key: Key, uid: str | None) -> Advice | None:
        """The latest advice for the resource with this uid."""
        tuned = self._tuned.get(key)
        return tuned.advice if tuned is not None and tuned.subject.uid == uid else None

    def kept(self, key: Key, uid: str | None) -> Kept | None:
        """What is known of the resource with this uid, for its ConfigMap."""
        tuned = self._tuned.get(key)
        return tuned.kept if tuned is not None and tuned.subject.uid == uid else None

    async def run(self) -> None:
        """Decide until cancelled."""
        try:
            while True:
                key, _ = await self._queue.get()
                try:
                    await self._turn(key)
                finally:
                    self._queue.done(key)
        finally:
            await self._decider.close()

    # ------------------------------------------------------------------------------------------------------- what there is
    def _recall(self, tuned: Tuned, observed: Observed) -> None:
        """What an earlier operator has written, if it is of these engines."""
        found = keeping.written(observed)
        if found is None or found.family != tuned.subject.family:
            return
        tuned.kept = found
        try:
            tuned.advice = Advice.from_dict(json.loads(found.advice))
        except (AdviceError, ValueError):
            tuned.advice = None

    def _first(self, key: Key, tuned: Tuned) -> float:
        """Seconds until the first decision: resources that came together are decided on one by one."""
        interval = tuned.subject.interval
        spread = zlib.crc32(str(key).encode()) / 2**32
        if tuned.kept is None:
            return interval * (1 + SOONEST * spread)
        left = tuned.kept.at + interval - self._clock.now().timestamp()
        return min(interval, max(left, 0.0)) + interval * SOONEST * (1 + spread)

    def _changed(self, key: Key, tuned: Tuned, wanted: Subject, observed: Observed) -> None:
        before, tuned.subject = tuned.subject, wanted
        if before.family != wanted.family:  # other engines: nothing that was counted is of them
            tuned.kept = tuned.since = tuned.advice = None
            tuned.tails.clear()
            self._recall(tuned, observed)
        elif before.scale != wanted.scale or before.horizon != wanted.horizon:
            tuned.since = None
        if before.interval != wanted.interval:
            self._queue.add_after(key, wanted.interval)
        if before.history.explored != wanted.history.explored or (wanted.exploring is not None and before.exploring is None):
            self._queue.add_after(key, SOONEST * wanted.interval)  # what a canary teaches may be acted on

    # ------------------------------------------------------------------------------------------------------------ deciding
    async def _turn(self, key: Key) -> None:
        tuned = self._tuned.get(key)
        if tuned is None:
            return
        began, outcome = asyncio.get_running_loop().time(), "failed"
        before, kept = tuned.advice, tuned.kept
        try:
            outcome = await self._decide(key, tuned)
            self._queue.forget(key)
            self._queue.add_after(key, _pause(tuned.subject))
        except DeciderError as error:
            seconds = self._queue.failed(key)
            _log.warning("%s: no decision on its speculation setting: %s; again in %.0f s", key, error, seconds)
        except Exception:  # noqa: BLE001 - one resource's fault must not end the others' decisions
            self._queue.failed(key)
            _log.exception("%s: the decision on its speculation setting ended with an error of Aerie's own", key)
        self._count(outcome, asyncio.get_running_loop().time() - began)
        if self._tuned.get(key) is tuned and (tuned.kept is not kept or not _says_the_same(before, tuned.advice)):
            self._tell(key)

    async def _decide(self, key: Key, tuned: Tuned) -> str:
        """An advice, by a process of its own where there is something to decide on; how it ended."""
        read, telemetry = tuned.read, tuned.taken()
        now = round(self._clock.now().timestamp(), 3)
        reason = self._nothing(key, tuned, telemetry, read)
        if reason or telemetry is None:
            tuned.advice = Advice(tuned.subject.revision, now, "Insufficient", None, None, reason)
            return "nothing"
        subject, order = tuned.subject, _order(tuned, telemetry, now)
        try:
            answer = await self._decider.ask(order)
        except BaseException:
            if tuned.subject.family == subject.family and tuned.subject.scale == telemetry.scale:
                tuned.given_back(telemetry)
            raise
        if (tuned.subject.family, tuned.subject.scale) != (subject.family, subject.scale):
            return "outdated"
        tuned.advice = answer.advice
        tuned.kept = _kept(subject, answer, now)
        _log.info("%s: tuning says %s: %s", key, answer.advice.action, answer.advice.reason)
        return answer.advice.action.lower()

    def _nothing(self, key: Key, tuned: Tuned, telemetry: Telemetry | None, read: int) -> str:
        """Why there is nothing to decide on; empty where there is."""
        subject = tuned.subject
        if subject.current is None or subject.engine is None:
            return "no record tells what the engines of the stable revision are: it comes with the next revision."
        if read == 0:
            return f"nothing was read of the pods in the last interval{_because(self._silence(key))}"
        if telemetry is None:
            return "there were no requests in the last interval, so there is nothing to decide on."
        if telemetry.newest is not None and any(True for _ in telemetry.blocks()):
            return ""
        sentence, _ = telemetry.left_out.most_common(1)[0]
        return f"of the last interval nothing counts: {sentence}"


def _pause(subject: Subject) -> float:
    """Seconds between two decisions."""
    return subject.interval * (SOONEST if subject.exploring is not None else 1.0)


def _because(silence: str) -> str:
    return f": {silence.rstrip('.')}." if silence else "."


def _says_the_same(before: Advice | None, after: Advice | None) -> bool:
    """Whether nothing but the moment is another."""
    return before == after or (before is not None and after is not None and replace(before, at=after.at) == after)


def _order(tuned: Tuned, telemetry: Telemetry, now: float) -> Order:
    subject, policy = tuned.subject, Policy()
    assert subject.current is not None
    assert subject.engine is not None
    policy = replace(
        policy,
        cooldown=subject.cooldown,
        cooldown_after_rollback=AFTER_ROLLBACK * subject.cooldown,
        reload=tuned.reload or policy.reload,
        canary=subject.interval,
        probe=subject.horizon,
    )
    return Order(
        revision=subject.revision,
        now=now,
        current=subject.current,
        engine=subject.engine,
        most=subject.most,
        replicas=subject.replicas,
        waiting=tuned.waiting,
        lent=subject.lent,
        extra=subject.extra,
        failed=subject.failed,
        exploring=subject.exploring,
        objectives=subject.objectives,
        history=subject.history,
        policy=policy,
        horizon=subject.horizon,
        scale=subject.scale,
        kept=tuned.kept.telemetry if tuned.kept is not None else "",
        since=telemetry,
    )


def _kept(subject: Subject, answer: Answer, now: float) -> Kept:
    return Kept(now, subject.family, answer.telemetry, json.dumps(answer.advice.to_dict()), answer.explanation)
