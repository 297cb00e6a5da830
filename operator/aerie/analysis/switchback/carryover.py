"""Bounds what a drafter leaves behind for the next one, and measures it.

After a change, requests that run or wait hold keys and values of the previous drafter. So acceptance moves from the previous
drafter's level to the new one's in some time. Assume that it moves fastest at first and has arrived after
`carryover_seconds`. The slowest such course is the straight one, 1 - t / carryover. The counted part of a window then contains
the effect of the drafter in the window before it with the weight c1, and of that before with c2 (0 in windows of half of
`carryover_seconds` and more, after their wash-out).

The second window of a pair follows the other drafter. The first one does so too, or it repeats the drafter before it. So a pair
shows this share of an effect:

    begins with a repeat   1 - c1 - 2 c2
    begins with a change   1 - 2 c1

* **Bound.** A promotion needs evidence against a limit, such as -2 %. Pairs are tested against the share of the limit that they
  would still show, at least 0. So windows too short to exclude a carry-over promote only a canary that is better than the stable
  drafter, and the long windows of a schedule, where c1 is small, are tested against nearly the limit itself. A rollback is tested
  against equal drafters, of which nothing can be carried over.
* **Estimate.** Which pairs begin with a repeat is drawn. So the mean effect of those less that of the others estimates the part
  of an effect that is carried over, without a model. The estimate is in the state, with its interval.

Guarantee: within the assumption, no carry-over makes a canary at the limit appear better than the limit that is tested.
Not guaranteed: a carry-over that lasts longer than `carryover_seconds`. Cached blocks are separated by drafter
(`aerie_vllm.cache_salt`), but those of a request that is in progress at a change stay with the drafter before. Conversations that
continue with them show less of an effect. The first pair of a pod that has just joined or restarted, and the first one of longer
windows, are treated like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aerie.analysis.statistics.confidence_sequence import PairedMoments, SequenceParameters, ratio_bounds
from aerie.analysis.switchback.design import Window

CARRYOVER_ALPHA = 0.005
"""Alpha of each of the four bounds of the carry-over's interval."""
_TIGHTEST_PAIRS = 30.0


def carried_shares(window: Window, carryover_seconds: float) -> tuple[float, float]:
    """Return c1 and c2 of a window whose predecessors are as long, for a carry-over of at most twice that length.

    >>> carried_shares(Window(0, 0.0, 60.0, 20.0), 30.0)
    (0.041666666666666664, 0.0)
    """
    beyond = _mean_course(window, carryover_seconds - window.length_seconds, carryover_seconds)
    return _mean_course(window, carryover_seconds, carryover_seconds) - beyond, beyond


def _mean_course(window: Window, until_seconds: float, carryover_seconds: float) -> float:
    """Return the mean of max(0, until - t) / carryover over the counted part of a window."""
    overlap = min(window.length_seconds, until_seconds) - window.washout_seconds
    if overlap <= 0:
        return 0.0
    middle = window.washout_seconds + overlap / 2
    return (until_seconds - middle) / carryover_seconds * overlap / window.counted_seconds


def shown_share(window: Window, carryover_seconds: float, *, is_repeat: bool) -> float:
    """Return the share of an effect that a pair of windows like this one shows at least; never below 0."""
    if carryover_seconds > 2 * window.length_seconds:
        return 0.0
    last, earlier = carried_shares(window, carryover_seconds)
    return max(0.0, 1 - last - 2 * earlier if is_repeat else 1 - 2 * last)


@dataclass(frozen=True, slots=True)
class CarryoverEstimate:
    """Effect of pairs that begin with a repeat, less that of pairs that begin with a change: 0 without a carry-over."""

    estimate: float
    lower: float
    upper: float


def estimate_carryover(moments: Mapping[str, PairedMoments]) -> CarryoverEstimate | None:
    """Return the estimate from the moments of "repeat" and "change" pairs; None while there are none of both."""
    repeat, change = moments.get("repeat", PairedMoments()), moments.get("change", PairedMoments())
    if repeat.control_mean <= 0 or change.control_mean <= 0:
        return None
    parameters = SequenceParameters(CARRYOVER_ALPHA, _TIGHTEST_PAIRS)
    (repeat_lower, repeat_upper), (change_lower, change_upper) = (
        ratio_bounds(pairs, parameters, parameters) for pairs in (repeat, change)
    )
    difference = repeat.canary_mean / repeat.control_mean - change.canary_mean / change.control_mean
    return CarryoverEstimate(difference, repeat_lower - change_upper, repeat_upper - change_lower)
