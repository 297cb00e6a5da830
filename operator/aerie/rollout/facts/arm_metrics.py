"""What the engines of one arm achieve, as the status shows it: three figures, and when they are worth a write.

A status that followed every reading would be written with every reading. So a figure stays as it is until it has moved by
more than its tolerance, which lies above the noise of the windows that the scraper keeps; then all of them are written anew.
Where nothing is known, the last figures stay: an arm without traffic shows what it did when it had some.

Guarantee: figures are of one revision alone; another revision in the same place starts without any. Not guaranteed: that a
figure is fresh, or that two of them may be compared: what decides about a canary reads counters, not these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

from aerie.analysis.post_promotion import MAX_NOISE_ACCEPTED_PER_DRAFT
from aerie.analysis.state import MIN_DRAFTS_FOR_ZERO_ACCEPTANCE
from aerie.api.status import Arm
from aerie.engine.metrics.sample import Counters


@dataclass(frozen=True, slots=True)
class ArmMetrics:
    """Each None where the counters do not tell it. Rounded to what a person reads."""

    acceptance_length: float | None = None
    """vLLM's own: 1 + accepted / drafts. None without a drafter, and where too few drafts to tell were all rejected."""
    time_per_output_token: float | None = None
    """Seconds, averaged over tokens."""
    time_to_first_token: float | None = None
    """Seconds, averaged over requests."""


_RELATIVE_TOLERANCES: Mapping[str, float] = {"acceptance_length": 0.03, "time_per_output_token": 0.1, "time_to_first_token": 0.2}
"""By figure, the share by which it may move without a write. Over the 500 requests that a window holds once it has the traffic,
these are four standard errors or more, where requests differ in acceptance by 15 % of it and in latency by 50 to 100 %."""

MIN_ACCEPTANCE_LENGTH = 1.0
"""The acceptance length, as it is shown, of a drafter of which next to nothing is accepted."""

_ArmT = TypeVar("_ArmT", bound=Arm)


class MetricSums(NamedTuple):
    """What the figures of a window are made of: a few numbers, so that those of a thousand pods are added up in a millisecond."""

    draft_positions: int | None
    """Draft positions; None without a drafter."""
    drafts: float
    accepted_tokens: float
    step_seconds: float
    tokens_after_first: float
    """Output tokens without first tokens."""
    first_token_seconds: float
    first_tokens: float

    @classmethod
    def from_window(cls, window: Counters) -> MetricSums:
        speculation = window.speculation
        return cls(
            None if speculation is None else len(speculation.accepted_per_position),
            0.0 if speculation is None else speculation.drafts,
            0.0 if speculation is None else speculation.accepted,
            window.step_seconds,
            window.generation_tokens - window.first_tokens,
            window.time_to_first_token.sum,
            window.first_tokens,
        )

    def add(self, other: MetricSums) -> MetricSums | None:
        """Both together; None where one has a drafter and the other none, or they draft otherwise."""
        if self.draft_positions != other.draft_positions:
            return None
        return MetricSums(self.draft_positions, *(mine + theirs for mine, theirs in zip(self[1:], other[1:], strict=True)))

    @property
    def arm_metrics(self) -> ArmMetrics:
        """Where nothing was counted, the figure is not known."""
        length = None
        if (
            self.draft_positions is not None
            and self.drafts > 0
            and (
                self.drafts >= MIN_DRAFTS_FOR_ZERO_ACCEPTANCE or self.accepted_tokens > MAX_NOISE_ACCEPTED_PER_DRAFT * self.drafts
            )
        ):
            length = round(min(1.0 + max(1, self.draft_positions), 1 + self.accepted_tokens / self.drafts), 2)
        return ArmMetrics(
            length,
            _mean_seconds(self.step_seconds, self.tokens_after_first),
            _mean_seconds(self.first_token_seconds, self.first_tokens),
        )


def compute_arm_metrics(window: Counters) -> ArmMetrics:
    """The figures of a window, or of several pods' windows together."""
    return MetricSums.from_window(window).arm_metrics


def debounce_metrics(current: ArmMetrics, measured: ArmMetrics) -> ArmMetrics:
    """What to show after `shown` when `found` is measured: `shown` itself until one figure has moved beyond its tolerance, or the
    acceptance length has come down to 1.00, which is a fault however near it was before."""
    pairs = [(field.name, getattr(current, field.name), getattr(measured, field.name)) for field in fields(ArmMetrics)]
    silent = measured.acceptance_length == MIN_ACCEPTANCE_LENGTH != current.acceptance_length
    moved = silent or any(_exceeds_tolerance(before, after, _RELATIVE_TOLERANCES[name]) for name, before, after in pairs)
    return merge_metrics(current, measured) if moved else current


def merge_metrics(current: ArmMetrics, measured: ArmMetrics) -> ArmMetrics:
    """What was found, and what was shown where nothing was."""
    pairs = [(getattr(current, field.name), getattr(measured, field.name)) for field in fields(ArmMetrics)]
    return ArmMetrics(*(before if after is None else after for before, after in pairs))


def read_status_metrics(arm: Arm) -> ArmMetrics:
    """The figures that a status shows of an arm."""
    return ArmMetrics(arm.acceptance_length, arm.time_per_output_token, arm.time_to_first_token)


def with_arm_metrics(arm: _ArmT, previous_arm: Arm | None, measured: ArmMetrics | None, *, status_changes: bool = False) -> _ArmT:
    """The arm with its figures; `before` is what the status said of the same place, of whatever revision.

    `written`: the status is written in any case. Figures of arms that are compared should not contradict the comparison, which
    two that are each within their tolerance can.
    """
    known = (
        read_status_metrics(previous_arm) if previous_arm is not None and previous_arm.revision == arm.revision else ArmMetrics()
    )
    shown = known if measured is None else (merge_metrics if status_changes else debounce_metrics)(known, measured)
    return arm.model_copy(update={field.name: getattr(shown, field.name) for field in fields(ArmMetrics)})


def _exceeds_tolerance(before: float | None, after: float | None, tolerance: float) -> bool:
    if after is None:
        return False
    return before is None or abs(after - before) > tolerance * abs(before)


def _mean_seconds(seconds: float, of: float) -> float | None:
    if not of > 0:
        return None
    found = seconds / of
    return round(found, 2 - math.floor(math.log10(found))) if found > 0 else 0.0  # three digits
