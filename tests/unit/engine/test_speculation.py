"""Speculation settings: what may exist, and what K they mean."""

from __future__ import annotations

import pytest

from aerie.engine.speculation import (
    Adaptive,
    Off,
    Schedule,
    ScheduleTier,
    SpeculationSetting,
    SpeculationSettingError,
    Static,
    describe_setting,
    max_speculative_tokens,
)


def test_words() -> None:
    schedule = Schedule((ScheduleTier(1, 4, 5), ScheduleTier(5, 64, 1)), 5)
    shown: list[tuple[SpeculationSetting, str, str, int]] = [
        (Off(), "off", "no speculation", 0),
        (Static(3), "3", "K=3", 3),
        (schedule, "1-4:5,5-64:1", "schedule 1-4:5,5-64:1", 5),
        (Adaptive(7), "up to 7", "adaptive verification up to 7", 7),
    ]
    for setting, text, name, deepest in shown:
        assert str(setting) == text
        assert describe_setting(setting) == name
        assert max_speculative_tokens(setting) == deepest


def test_a_schedule_by_batch_size() -> None:
    schedule = Schedule((ScheduleTier(1, 4, 5), ScheduleTier(5, 64, 1), ScheduleTier(65, 128, 0)), 7)
    assert [schedule.tokens_at(batch) for batch in (1, 4, 5, 64, 65, 128, 1000)] == [5, 5, 1, 1, 0, 0, 0]
    assert schedule.nonzero_token_counts == (1, 5)
    with pytest.raises(ValueError, match="at least 1 request"):
        schedule.tokens_at(0)


@pytest.mark.parametrize(
    ("tiers", "maximum", "why"),
    [
        ((), 3, "at least one tier"),
        ((ScheduleTier(2, 4, 1),), 3, "has none at 1"),
        ((ScheduleTier(1, 4, 1), ScheduleTier(6, 8, 1)), 3, "has none at 5"),
        ((ScheduleTier(1, 4, 1), ScheduleTier(4, 8, 1)), 3, "has none at 5"),
        ((ScheduleTier(1, 0, 1),), 3, "ends where it begins or later, not 1-0"),
        ((ScheduleTier(1, 4, 5),), 3, "0 to 3 tokens, the schedule's maximum, not 5"),
        ((ScheduleTier(1, 4, -1),), 3, "not -1"),
        ((ScheduleTier(1, 4, 0),), 3, "in none: use Off"),
    ],
)
def test_schedules_that_vllm_would_change_or_refuse(tiers: tuple[ScheduleTier, ...], maximum: int, why: str) -> None:
    with pytest.raises(SpeculationSettingError, match=why):
        Schedule(tiers, maximum)


def test_no_tokens_at_all_is_off() -> None:
    with pytest.raises(SpeculationSettingError, match="use Off"):
        Static(0)
    with pytest.raises(SpeculationSettingError, match="use Off"):
        Adaptive(0)
