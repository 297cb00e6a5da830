"""An evaluator in a simulated cluster: it counts pairs of answers while its Deployment exists, as the real one does.

Guarantees: the batches of a process are numbered from 1, and a batch stays as it is until it is acknowledged. A process ends with
its Deployment, and when the Deployment's arguments change; pairs that nobody has read are lost with it. `delivered` has all pairs
of the batches that were ever returned, each once. Not guaranteed: answers; their counts are drawn.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from aerie.analysis.paired.answers import AnswerCounts, DifferenceSums
from aerie.analysis.paired.failures import FailureCounts
from aerie.analysis.paired.state import PairBatch
from aerie.analysis.paired.sums import BUCKETS, PairSums, paired_score, time_slot_bucket
from aerie.rollout.facts.pairs import PairObservation

CHANGED_ANSWERS = AnswerCounts(repetitions=DifferenceSums(60, 44.0, 6.0, 25.0))
"""Answers of a canary that repeats itself."""


class SimulatedEvaluator:
    """An evaluator. `gain`: the canary's gain in tokens per step."""

    def __init__(self, gain: float = 0.0) -> None:
        self.gain = gain
        self.slowness = 0.0
        """What the canary's time per token has in excess of the control's, relative to it."""
        self.pairs_per_fetch = 40
        self.skipped: dict[str, int] = {}
        """Requests that give no pair, by reason, of each batch."""
        self.outage_seconds = 0.0
        """How long the canary has answered nothing; 0 while it answers."""
        self.answers = AnswerCounts()
        self.problem = ""
        """Why it does not respond."""
        self.delivered = 0
        self.restarts = 0
        self._rng = random.Random(7)  # noqa: S311 - no secrets
        self._numbers = itertools.count(1)
        self._arguments: list[str] | None = None
        self._process, self._closed = "", list[PairBatch]()

    def follow(self, deployment: dict[str, Any] | None) -> None:
        """Run as the Deployment says; without one, not at all."""
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"] if deployment is not None else None
        if arguments != self._arguments:
            self._arguments = arguments
            self.restart()

    def restart(self) -> None:
        """End the process; another one begins if there is a Deployment."""
        self.restarts += 1
        self._process, self._closed, self._numbers = f"process{self.restarts}", [], itertools.count(1)

    def fetch(self, process: str, after: int) -> PairObservation:
        """Return the response to a fetch that acknowledges the batches of the process up to this number."""
        if self._arguments is None or self.problem:
            return PairObservation(problem=self.problem)
        if process == self._process and self._closed and after >= self._closed[0].number:
            self._closed = []
        if not self._closed and (self.pairs_per_fetch or self.skipped):
            self._closed = [self._draw_batch(next(self._numbers))]
            self.delivered += self._closed[0].steps.pairs
        return PairObservation(self._process, tuple(self._closed))

    def _draw_batch(self, number: int) -> PairBatch:
        steps, seconds, slots, rng = PairSums(), PairSums(), PairSums(), self._rng
        for pair in range(self.delivered, self.delivered + self.pairs_per_fetch):
            tokens = rng.lognormvariate(4.0, 0.8)
            control = tokens / rng.uniform(1.5, 3.0)
            canary = control / (1 + self.gain) * rng.lognormvariate(-0.005, 0.1)
            bucket = rng.randrange(BUCKETS)
            steps = steps.add_pair(bucket, *paired_score(canary, tokens, control, tokens))
            times = paired_score(tokens * (1 + self.slowness), tokens, tokens, tokens)
            seconds, slots = seconds.add_pair(bucket, *times), slots.add_pair(time_slot_bucket(pair), *times)
        received = self.pairs_per_fetch + sum(self.skipped.values())
        events = [int(f"{arm}_failed" in self.skipped) for arm in ("canary", "control")]
        outage = (4, self.outage_seconds) if self.outage_seconds else (0, 0.0)
        failures = FailureCounts(events[0], events[0], events[1], events[1], *outage)
        return PairBatch(number, steps, seconds, slots, self.answers, dict(self.skipped), received, 0, failures)
