"""Metrics of one arm's engines as the status shows them: three values, and when a change of them justifies a write.

A status that followed every scrape would be written with every scrape. So a value stays until it has moved by more than its
tolerance, which exceeds the noise of the scraper's windows. Then all three are rewritten. Where a value is unknown, the last one
stays: an arm without traffic shows what it achieved when it had some.

The stable arm also has a reference, which its acceptance length is compared with. Where no comparison gave it, it is that of the
first windows that hold enough (`aerie.analysis.reference`), without the warm-up of each engine. It is set once and then stays, so
a slow decrease is seen too.

Guarantee: metrics belong to one revision; another revision in the same arm starts without any. Not guaranteed: that a value is
fresh, or that two values are comparable. The canary's analysis reads counters, not these values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from aerie.analysis.post_promotion import MAX_NOISE_ACCEPTED_PER_DRAFT
from aerie.analysis.reference import AcceptanceCounts
from aerie.analysis.state import MIN_DRAFTS_FOR_ZERO_ACCEPTANCE
from aerie.api.status import Arm, InPlaceRollout
from aerie.engine.metrics.sample import Counters


@dataclass(frozen=True, slots=True)
class ArmMetrics:
    """Metrics of one arm, rounded for a reader. Each is None where the counters do not determine it."""

    acceptance_length: float | None = None
    """vLLM's definition: 1 + accepted / drafts. None without a drafter, and while too few drafts for a conclusion were all
    rejected."""
    time_per_output_token: float | None = None
    """Seconds, averaged over tokens."""
    time_to_first_token: float | None = None
    """Seconds, averaged over requests."""
    acceptance_by_position: tuple[float, ...] = field(default=(), compare=False)
    """Share of drafts whose first, second, ... token is accepted; empty without drafts. The status does not show it."""
    reference_acceptance_length: float | None = field(default=None, compare=False)
    """Acceptance length of the engines that are warm; None while they have counted too little for a reference."""
    standard_error: float = field(default=0.0, compare=False)
    """Relative standard error of the acceptance length; infinite where too little is counted to compare it."""


_RELATIVE_TOLERANCES: Mapping[str, float] = {"acceptance_length": 0.03, "time_per_output_token": 0.1, "time_to_first_token": 0.2}
"""Relative change of each metric that causes no write. A window holds 500 requests once traffic suffices. Over those, each
tolerance is four standard errors or more, where requests differ in acceptance by 15 % of it and in latency by 50 to 100 %."""

MIN_ACCEPTANCE_LENGTH = 1.0
"""Displayed acceptance length of a drafter of which next to nothing is accepted."""

_ArmT = TypeVar("_ArmT", bound=Arm)


class CountedDrafter(NamedTuple):
    """The drafter of which a pod's counters are; while it stays the same, a window is of one drafter."""

    promoted: str | None = None
    """Revision of the drafter that was promoted in place; None for the drafter of the pods' own revision."""
    trial: str | None = None
    """Revision of the rollout in place that is in progress: pods change their drafter meanwhile."""


OWN_DRAFTER = CountedDrafter()


class MetricSums(NamedTuple):
    """Sums from which the metrics of a window follow: a few numbers, so that a thousand pods' are added in a millisecond."""

    draft_positions: int | None
    """Draft positions; None without a drafter."""
    drafts: float
    accepted_tokens: float
    step_seconds: float
    tokens_after_first: float
    """Output tokens without first tokens."""
    first_token_seconds: float
    first_tokens: float
    accepted_by_position: tuple[float, ...] = ()
    """Drafts accepted up to and including the first, second, ... token."""
    warm: AcceptanceCounts = AcceptanceCounts()
    """Acceptance of the engines that are warm."""

    @classmethod
    def from_window(cls, window: Counters, *, is_warm: bool = False) -> MetricSums:
        """Return the sums of a window. `is_warm`: it began after the warm-up of its engine."""
        speculation = window.speculation
        return cls(
            None if speculation is None else len(speculation.accepted_per_position),
            0.0 if speculation is None else speculation.drafts,
            0.0 if speculation is None else speculation.accepted,
            window.step_seconds,
            window.generation_tokens - window.first_tokens,
            window.time_to_first_token.sum,
            window.first_tokens,
            () if speculation is None else speculation.accepted_per_position,
            AcceptanceCounts(window.first_tokens, speculation.drafts, speculation.accepted)
            if speculation is not None and is_warm
            else AcceptanceCounts(),
        )

    def add(self, other: MetricSums) -> MetricSums | None:
        """Return the sum of both; None where only one has a drafter, or their draft positions differ."""
        if self.draft_positions != other.draft_positions:
            return None
        pairs = zip(self.accepted_by_position, other.accepted_by_position, strict=True)
        return MetricSums(
            self.draft_positions,
            self.drafts + other.drafts,
            self.accepted_tokens + other.accepted_tokens,
            self.step_seconds + other.step_seconds,
            self.tokens_after_first + other.tokens_after_first,
            self.first_token_seconds + other.first_token_seconds,
            self.first_tokens + other.first_tokens,
            tuple(own + added for own, added in pairs),
            self.warm.add(other.warm),
        )

    @property
    def arm_metrics(self) -> ArmMetrics:
        """Metrics of these sums. A metric without a count is None."""
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
            tuple(accepted / self.drafts for accepted in self.accepted_by_position) if self.drafts > 0 else (),
            self.warm.reference_length,
            AcceptanceCounts(self.first_tokens, self.drafts, self.accepted_tokens).standard_error,
        )


def compute_arm_metrics(window: Counters) -> ArmMetrics:
    """Return the metrics of a window, or of several pods' windows together."""
    return MetricSums.from_window(window).arm_metrics


def debounce_metrics(current: ArmMetrics, measured: ArmMetrics) -> ArmMetrics:
    """Return the metrics to show: `current` until one metric of `measured` has moved beyond its tolerance.

    An acceptance length that has dropped to 1.00 is always shown: it is a fault, however close the last value was.
    """
    pairs = [(name, getattr(current, name), getattr(measured, name)) for name in _RELATIVE_TOLERANCES]
    drops_to_minimum = measured.acceptance_length == MIN_ACCEPTANCE_LENGTH != current.acceptance_length
    is_significant = drops_to_minimum or any(
        _exceeds_tolerance(before, after, _RELATIVE_TOLERANCES[name]) for name, before, after in pairs
    )
    return merge_metrics(current, measured) if is_significant else current


def merge_metrics(current: ArmMetrics, measured: ArmMetrics) -> ArmMetrics:
    """Return the measured metrics, and the current ones where nothing was measured."""
    measured_values = {name: value for name in _RELATIVE_TOLERANCES if (value := getattr(measured, name)) is not None}
    return replace(current, **measured_values)


def read_status_metrics(arm: Arm) -> ArmMetrics:
    """Return the metrics that the status shows of an arm."""
    return ArmMetrics(arm.acceptance_length, arm.time_per_output_token, arm.time_to_first_token)


def with_arm_metrics(arm: _ArmT, previous_arm: Arm | None, measured: ArmMetrics | None, *, status_changes: bool = False) -> _ArmT:
    """Return the arm with its metrics. `previous_arm` is the status of the same arm before, of whatever revision.

    `status_changes`: the status is written in any case. Then no metric is held back: metrics of compared arms should not
    contradict the comparison, which two values, each within its tolerance, can do.
    """
    current = (
        read_status_metrics(previous_arm)
        if previous_arm is not None
        and (previous_arm.revision, previous_arm.served_revision) == (arm.revision, arm.served_revision)
        else ArmMetrics()
    )
    shown = current if measured is None else (merge_metrics if status_changes else debounce_metrics)(current, measured)
    return arm.model_copy(update={name: getattr(shown, name) for name in _RELATIVE_TOLERANCES})


def awaits_reference(stable: Arm | None, rollout: InPlaceRollout | None) -> bool:
    """Return whether the stable arm has no reference yet, and its pods can give it.

    Pods that alternate between two drafters cannot. Nor can they where the load decides how much is drafted: their acceptance
    length changes with it.
    """
    if stable is None or rollout is not None or stable.reference_acceptance_length is not None:
        return False
    return stable.setting is not None and stable.setting.mode == "Static"


def identify_counted_drafter(revision: str, stable: Arm | None, rollout: InPlaceRollout | None) -> CountedDrafter:
    """Return which drafters the pods of a revision may serve with. `stable`, `rollout`: of the status."""
    if stable is None or stable.revision != revision:
        return OWN_DRAFTER
    promoted = stable.in_place.revision if stable.in_place is not None else None
    return CountedDrafter(promoted, rollout.revision if rollout is not None else None)


def _exceeds_tolerance(before: float | None, after: float | None, tolerance: float) -> bool:
    if after is None:
        return False
    return before is None or abs(after - before) > tolerance * abs(before)


def _mean_seconds(seconds: float, count: float) -> float | None:
    if not count > 0:
        return None
    mean = seconds / count
    return round(mean, 2 - math.floor(math.log10(mean))) if mean > 0 else 0.0  # three digits
