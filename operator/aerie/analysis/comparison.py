"""The result of one criterion, as users see it: the canary relative to its control."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of the canary against the control, after the last counted block."""

    metric: str
    """Name of the criterion."""
    sample_count: int
    """Blocks counted so far; of the output-equivalence probe, prompts that were answered."""
    message: str | None = None
    """The result as a sentence, where no number has it."""
    estimate: float | None = None
    """Canary over control, minus 1."""
    lower: float | None = None
    """Anytime-valid lower bound of the estimate."""
    upper: float | None = None
    """Anytime-valid upper bound of the estimate."""
