"""Counts of pairs, in numbered batches that the operator fetches and acknowledges.

    pairs ─► open batch ─(fetch)─► closed batch ─(acknowledged by the next fetch)─► forgotten

There is at most one closed batch: the next one is closed when it is acknowledged. Until then, counts go into the open batch.

Guarantees: memory does not grow, however long nobody fetches. A batch has the same content each time that it is fetched. With the
process and the number of the last batch that it has counted, the operator counts no pair twice, and loses none while the process
runs. Not guaranteed: that batches outlive the process.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.failures import FailureCounts
from aerie.analysis.paired.sums import PairSums
from aerie.evaluator.answers import Answer
from aerie.evaluator.failures import FailureTracker
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.evaluator.pairs import Pair, add_answers, add_seconds, add_slot_seconds, add_steps
from aerie.evaluator.skip_reasons import SkipReason


@dataclass
class _ArmCounts:
    """Sums over the answers of an arm."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Seconds of generation."""
    accepted: Counter[int] = field(default_factory=Counter)
    """Verification steps by the number of accepted draft tokens."""
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer, seconds: float) -> None:
        self.tokens += answer.tokens
        self.steps += answer.steps
        self.seconds += seconds
        self.accepted.update(dict(enumerate(answer.histogram)))
        self.finish_reasons[answer.finish_reason] += 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "accepted": [self.accepted[number] for number in range(max(self.accepted, default=-1) + 1)],
            "finish_reasons": dict(self.finish_reasons),
        }


@dataclass
class _Batch:
    """Counts since `started`, in seconds of the epoch."""

    started: float
    ended: float | None = None
    """Time of the fetch that closed it; None while it is open."""
    steps: PairSums = field(default_factory=PairSums)
    seconds: PairSums = field(default_factory=PairSums)
    slots: PairSums = field(default_factory=PairSums)
    """The seconds by time slots."""
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    canary: _ArmCounts = field(default_factory=_ArmCounts)
    control: _ArmCounts = field(default_factory=_ArmCounts)
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    received: int = 0
    dropped: int = 0
    failures: FailureCounts = field(default_factory=FailureCounts)
    """Failures of one engine alone, and the canary's outage; set when it is closed."""

    def add(self, pair: Pair, time: float) -> None:
        self.steps = add_steps(self.steps, pair)
        self.seconds = add_seconds(self.seconds, pair)
        self.slots = add_slot_seconds(self.slots, pair, time)
        self.answers = add_answers(self.answers, pair)
        self.canary.add(pair.canary, pair.canary_seconds)
        self.control.add(pair.control, pair.control_seconds)

    @property
    def is_empty(self) -> bool:
        return not (self.received or self.skipped or self.steps.pairs)

    def to_dict(self, number: int) -> dict[str, Any]:
        return {
            "number": number,
            "started": self.started,
            "ended": self.ended,
            "steps": self.steps.to_dict(),
            "seconds": self.seconds.to_dict(),
            "slots": self.slots.to_dict(),
            "answers": self.answers.to_dict(),
            "canary": self.canary.to_dict(),
            "control": self.control.to_dict(),
            "skipped": {str(reason): count for reason, count in sorted(self.skipped.items())},
            "received": self.received,
            "dropped": self.dropped,
            "failures": self.failures.to_dict(),
        }


class BatchLog:
    """Counts requests and pairs. `clock`: seconds of the epoch."""

    def __init__(self, metrics: EvaluatorMetrics, clock: Callable[[], float]) -> None:
        self.process = secrets.token_hex(8)
        """Identifies the process: numbers of batches begin again with each."""
        self._metrics, self._clock = metrics, clock
        self._open = _Batch(clock())
        self._closed: _Batch | None = None
        self._failures = FailureTracker()
        self._number = 0
        """Number of the last batch that was closed."""

    def receive(self) -> None:
        """Count a request."""
        self._open.received += 1
        self._metrics.received.inc()

    def drop(self) -> None:
        """Count a request that was received and not read."""
        self._open.dropped += 1
        self._metrics.dropped.inc()

    def skip(self, reason: SkipReason) -> None:
        """Count a request that was received and gives no pair."""
        self._open.skipped[reason] += 1
        self._metrics.skip(reason)

    def add(self, pair: Pair) -> None:
        """Count a pair."""
        self._open.add(pair, self._clock())
        self._metrics.pairs.inc()

    def track_failures(self, reason: SkipReason | None, sent: float, ended: float) -> None:
        """Count which engine failed a request that both got. `reason`: why it gives no pair; None for a pair. `sent` and `ended`:
        in seconds of a clock that never goes back."""
        self._failures.count(reason, sent, ended)

    def fetch(self, process: str, after: int) -> dict[str, Any]:
        """Return the batches that are not acknowledged; `after` acknowledges those up to it, of the process with this name."""
        if process == self.process and after >= self._number:
            self._closed = None
        if self._closed is None and not self._open.is_empty:
            self._open.ended, self._open.failures = self._clock(), self._failures.close_batch()
            self._closed, self._number = self._open, self._number + 1
            self._open = _Batch(self._open.ended)
        return {"process": self.process, "batches": [] if self._closed is None else [self._closed.to_dict(self._number)]}
