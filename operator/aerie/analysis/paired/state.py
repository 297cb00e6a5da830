"""The counts of a shadow evaluation so far, and the change by each further batch of an evaluator.

    evaluator ─► batches, numbered by each process from 1 ─► add_batches ─► sums of steps and seconds, counts of answers

Guarantees: a batch that is added twice counts once, because the state has the last number of each evaluator process: so both the
operator and the evaluator may end at any moment. State and dict convert into each other without loss. The size of the state does
not grow with the number of pairs.
A batch of an evaluator that lies has plausible counts, or is a ValueError: it cannot make a later evaluation fail.
Not guaranteed: a batch that an evaluator lost before the state was saved is not counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.failures import FailureCounts
from aerie.analysis.paired.sums import PairSums
from aerie.analysis.state import VerdictOutcome

CANARY_FAILED, CONTROL_FAILED, BOTH_FAILED = "canary_failed", "control_failed", "both_failed"
"""Reasons in `PairedState.skipped`: one arm did not answer what the other one answered, or neither did."""
WITHOUT_METRICS = "without_metrics"
"""Reason in `PairedState.skipped`: an answer has no counts of speculation."""
MAX_SKIP_REASONS = 32
"""Maximum number of reasons in `PairedState.skipped`; an evaluator has half as many."""
MAX_COUNT = 2**40
"""Maximum of any number in a batch: sums of them stay exact as floats."""


@dataclass(frozen=True, slots=True)
class PairBatch:
    """What an evaluator counted since its batch before."""

    number: int
    """Number in its process, from 1."""
    steps: PairSums
    """Verification steps per token."""
    seconds: PairSums
    """Seconds of generation per token."""
    slots: PairSums
    """The same, by time slots instead of clusters."""
    answers: AnswerCounts
    skipped: Mapping[str, int]
    """Requests that gave no pair, by reason."""
    received: int
    """Requests received."""
    dropped: int
    """Those that were dropped, because the engines had enough."""
    failures: FailureCounts = field(default_factory=FailureCounts)
    """Failures of one arm alone, and the canary's outage at the end of the batch."""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PairBatch:
        """Return the batch of an evaluator's response. Raises ValueError for anything else."""
        try:
            _check_numbers({name: document[name] for name in cls.__slots__})
            batch = cls(
                number=int(document["number"]),
                steps=PairSums.from_dict(document["steps"]),
                seconds=PairSums.from_dict(document["seconds"]),
                slots=PairSums.from_dict(document["slots"]),
                answers=AnswerCounts.from_dict(document["answers"]),
                skipped={str(reason): int(count) for reason, count in document["skipped"].items()},
                received=int(document["received"]),
                dropped=int(document["dropped"]),
                failures=FailureCounts.from_dict(document["failures"]),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"the evaluator's batch is not readable ({type(error).__name__}: {error}); run both in the same version of Aerie."
            ) from error
        counts = (batch.answers.is_plausible, batch.failures.is_plausible, batch.slots.pairs == batch.seconds.pairs)
        if batch.number < 1 or not all((*map(_is_plausible, (batch.steps, batch.seconds, batch.slots)), *counts)):
            raise ValueError("the evaluator's batch has sums that no answers have; check the evaluator's image.")
        if len(batch.skipped) > MAX_SKIP_REASONS or not all(map(_REASON.fullmatch, batch.skipped)):
            raise ValueError("the evaluator's batch has unknown reasons in skipped; run both in the same version of Aerie.")
        return batch


_REASON = re.compile(r"[a-z_]{1,32}")


def _check_numbers(value: object) -> None:
    """Raise ValueError unless all numbers in a document are finite, and from 0 to MAX_COUNT."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_numbers(item)
    elif type(value) not in (int, float) or not 0 <= value <= MAX_COUNT:  # type: ignore[operator]
        raise ValueError("a value is no number from 0 on")


def _is_plausible(sums: PairSums) -> bool:
    """Return whether pairs can have these sums: counts are whole, and the inequality of Cauchy and Schwarz holds."""
    slack = 1 + 1e-6
    return (
        all(type(count) is int for count in sums.counts)
        and sums.canary_total**2 <= slack * sums.pairs * sums.canary_squares
        and sums.control_total**2 <= slack * sums.pairs * sums.control_squares
        and sums.cross_products <= slack * math.sqrt(sums.canary_squares) * math.sqrt(sums.control_squares)
    )


@dataclass(frozen=True, slots=True)
class PairedState:
    """Counts of all batches so far, and the verdict once there is one."""

    counted_batches: Mapping[str, int] = field(default_factory=dict)
    """Number of the last batch that is counted, by evaluator process: the next fetch acknowledges it."""
    steps: PairSums = field(default_factory=PairSums)
    seconds: PairSums = field(default_factory=PairSums)
    slots: PairSums = field(default_factory=PairSums)
    """The seconds by time slots."""
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    skipped: Mapping[str, int] = field(default_factory=dict)
    failures: FailureCounts = field(default_factory=FailureCounts)
    """Failures of one arm alone, and the canary's outage as of the latest batch."""
    received: int = 0
    dropped: int = 0
    outcome: VerdictOutcome = "Continue"
    message: str = ""
    """Message of a verdict other than Continue."""
    rollback_reason: str = ""
    """Reason of a rollback (`verdict`)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON."""
        document = {name: getattr(self, name) for name in self.__slots__}
        parts = {name: document[name].to_dict() for name in ("steps", "seconds", "slots", "answers", "failures")}
        return {**document, **parts, "counted_batches": dict(self.counted_batches), "skipped": dict(self.skipped)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PairedState:
        parsed = {
            "steps": PairSums.from_dict(document["steps"]),
            "seconds": PairSums.from_dict(document["seconds"]),
            "slots": PairSums.from_dict(document["slots"]),
            "answers": AnswerCounts.from_dict(document["answers"]),
            "failures": FailureCounts.from_dict(document["failures"]),
        }
        return cls(**{**document, **parsed})


def add_batches(state: PairedState, process: str, batches: Iterable[PairBatch]) -> PairedState:
    """Return the state with the batches of an evaluator process that it has not counted yet, in any order."""
    for batch in sorted(batches, key=lambda each: each.number):
        if batch.number <= state.counted_batches.get(process, 0):
            continue
        state = replace(
            state,
            counted_batches={**state.counted_batches, process: batch.number},
            steps=state.steps.merge(batch.steps),
            seconds=state.seconds.merge(batch.seconds),
            slots=state.slots.merge(batch.slots),
            answers=state.answers.merge(batch.answers),
            skipped=_merge_skipped(state.skipped, batch.skipped),
            failures=state.failures.merge(batch.failures),
            received=state.received + batch.received,
            dropped=state.dropped + batch.dropped,
        )
    return state


def _merge_skipped(counts: Mapping[str, int], further: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of the counts, with a limited number of reasons."""
    merged = Counter(counts) + Counter(further)
    return dict(sorted(merged.items())[:MAX_SKIP_REASONS])
