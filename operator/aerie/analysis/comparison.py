"""The result of one criterion, as users see it: the canary relative to its control."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    requirement: str | None = None
    """What an acceptance needs of the metric, in short; None where it needs nothing."""
    met: bool | None = None
    """Whether that is met now, by the verdict's own tests; None together with `requirement`."""

    def with_requirement(self, text: str, *, is_met: bool, is_replaced: bool = False) -> Comparison:
        """Return the comparison with what an acceptance needs of it.

        `is_replaced`: the canary is significantly faster, which an acceptance takes instead.
        """
        requirement = f"{text}, replaced by the time per output token" if is_replaced and not is_met else text
        return replace(self, requirement=requirement, met=is_met or is_replaced)
