"""Tells how often and for how long an engine fails what the other one answers.

Requests fail together: an engine that ends, or stalls, fails all that it has. So three things are counted of an arm:

    failure   a request that the arm alone failed, if it has received and answered another one since the failure before was
              sent: an outage is one, however many requests it fails
    event     a failure `FAILURE_INTERVAL_SECONDS` after the last event: an engine that stalls, and fails some requests, has few
    outage    the requests that the arm alone failed since its last answer; an attempt is one that was sent after the attempt
              before had failed

Guarantees: a request that both engines fail, or reject, counts for neither. Both arms are counted alike, so that equal ones have
equal counts. Not guaranteed: that a failure is the drafter's fault.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from aerie.analysis.paired.failures import FAILURE_INTERVAL_SECONDS, FailureCounts
from aerie.evaluator.skip_reasons import SkipReason

MAX_ANSWERS = 512
"""Latest answers that are remembered: those of two minutes, at four requests in a second."""
_FAILURES = {
    SkipReason.CANARY_FAILED: "canary",
    SkipReason.CANARY_UNAVAILABLE: "canary",
    SkipReason.CONTROL_FAILED: "control",
    SkipReason.CONTROL_UNAVAILABLE: "control",
}
"""The arm that alone has not answered."""
_UNAVAILABLE = (SkipReason.CANARY_UNAVAILABLE, SkipReason.CONTROL_UNAVAILABLE)
_ANSWERED_BY_BOTH = (SkipReason.WITHOUT_METRICS, SkipReason.STOP_STRING, SkipReason.TOO_SHORT)


@dataclass
class ArmFailures:
    """Failures of an arm. Times are in seconds of one clock."""

    failures: int = 0
    events: int = 0
    attempts: int = 0
    """Attempts of the outage; 0 after an answer."""
    _outage_started: float = 0.0
    _attempt_ended: float = 0.0
    _outage_ended: float = 0.0
    _failure_sent: float = -math.inf
    _event_sent: float = -math.inf
    _answers: deque[tuple[float, float]] = field(default_factory=lambda: deque([(-math.inf, -math.inf)], maxlen=MAX_ANSWERS))
    """When requests were sent and answered, of the latest answers. Before the first failure, the arm counts as well."""

    @property
    def outage_seconds(self) -> float:
        """Seconds from the first request of the outage to the end of the last one; 0 after an answer."""
        return self._outage_ended - self._outage_started if self.attempts else 0.0

    def answer(self, sent: float, ended: float) -> None:
        """Count a request that was sent and answered then."""
        self.attempts = 0
        self._answers.append((sent, ended))

    def fail(self, sent: float, ended: float, *, is_unavailable: bool) -> None:
        """Count a request that was sent and failed then. `is_unavailable`: the engine is paused or has too many requests, which
        is part of an outage and no failure."""
        if not self.attempts:
            self._outage_started = self._outage_ended = sent
        if not self.attempts or sent >= self._attempt_ended:
            self.attempts += 1
            self._attempt_ended = ended
        self._outage_ended = max(self._outage_ended, ended)
        if is_unavailable:
            return
        is_separate = any(self._failure_sent <= began and answered <= sent for began, answered in self._answers)
        self._failure_sent = max(self._failure_sent, sent)
        if not is_separate:
            return
        self.failures += 1
        if sent >= self._event_sent + FAILURE_INTERVAL_SECONDS:
            self.events += 1
            self._event_sent = sent


@dataclass
class FailureTracker:
    """Failures of both arms."""

    canary: ArmFailures = field(default_factory=ArmFailures)
    control: ArmFailures = field(default_factory=ArmFailures)

    def count(self, reason: SkipReason | None, sent: float, ended: float) -> None:
        """Count a request that both engines got. `reason`: why it gives no pair; None for a pair."""
        failed = _FAILURES.get(reason) if reason is not None else None
        if failed is None and reason is not None and reason not in _ANSWERED_BY_BOTH:
            return
        for name, arm in (("canary", self.canary), ("control", self.control)):
            if name == failed:
                arm.fail(sent, ended, is_unavailable=reason in _UNAVAILABLE)
            else:
                arm.answer(sent, ended)

    def close_batch(self) -> FailureCounts:
        """Return the counts since the last batch, and the canary's outage."""
        canary, control = self.canary, self.control
        counts = FailureCounts(
            canary.failures, canary.events, control.failures, control.events, canary.attempts, canary.outage_seconds
        )
        for arm in (canary, control):
            arm.failures = arm.events = 0
        return counts
