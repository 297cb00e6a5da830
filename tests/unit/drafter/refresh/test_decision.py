"""The decision: both bounds count, and a missing interval is no result."""

from __future__ import annotations

import math

import pytest

from aerie_drafter.evaluate.expected import Interval
from aerie_drafter.refresh.decision import decide, recovered_share

NONE = Interval(0.1, math.nan, math.nan)


@pytest.mark.parametrize(
    ("new", "old", "accepted", "reason"),
    [
        (Interval(0.10, 0.05, 0.15), Interval(-0.005, -0.015, 0.005), True, "above -2.0%"),
        (Interval(0.10, 0.05, 0.15), Interval(-0.015, -0.025, -0.005), False, "not shown to be above -2.0%"),
        (Interval(0.10, 0.05, 0.15), Interval(-0.05, -0.06, -0.04), False, "the old prompts: -5.0% (-6.0% to -4.0%), not above"),
        (Interval(0.01, -0.01, 0.03), Interval(0.0, -0.01, 0.01), False, "not shown to be above +0.0%"),
        (Interval(-0.03, -0.04, -0.02), Interval(0.0, -0.01, 0.01), False, "the new prompts: -3.0% (-4.0% to -2.0%), not above"),
        (NONE, Interval(0.0, -0.01, 0.01), False, "the new prompts: too few"),
        (Interval(0.10, 0.05, 0.15), NONE, False, "the old prompts: too few"),
        (Interval(0.10, 0.05, 0.15), None, True, "what the drafter forgot is unknown"),
    ],
)
def test_both_domains_decide(new: Interval, old: Interval | None, accepted: bool, reason: str) -> None:
    decision = decide(new, old, min_new_gain=0.0, max_old_loss=0.02)
    assert decision.is_accepted is accepted
    assert reason in "; ".join(decision.reasons)


def test_the_recovered_share_is_that_of_the_loss() -> None:
    assert recovered_share(2.4, 2.0, 2.3) == pytest.approx(0.75)
    assert recovered_share(2.0, 2.4, 2.5) is None
