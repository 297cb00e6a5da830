"""Counts of pairs of answers, as read from the evaluator of a shadow evaluation.

Not guaranteed: that a batch is new; the state of the evaluation has the number of the last batch that it has counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.analysis.paired.state import PairBatch


@dataclass(frozen=True)
class PairObservation:
    """The latest response of an evaluator."""

    process: str = ""
    """Name of the evaluator's process: numbers of batches begin again with each. Empty before the first response."""
    batches: tuple[PairBatch, ...] = ()
    """Batches that were not acknowledged when it was read."""
    problem: str = ""
    """Why the evaluator has not responded for a while, as a sentence; empty if it responds."""
