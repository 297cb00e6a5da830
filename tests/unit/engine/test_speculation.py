"""Speculation settings: which are valid, their names, and their K."""

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


def test_names_and_maximum_tokens_of_settings() -> None:
    schedule = Schedule((ScheduleTier(1, 4, 5), ScheduleTier(5, 64, 1)), 5)
    cases: list[tuple[SpeculationSetting, str, str, int]] = [
        (Off(), "off", "no speculation", 0),
        (Static(3), "3", "K=3", 3),
        (schedule, "1-4:5,5-64:1", "schedule 1-4:5,5-64:1", 5),
        (Adaptive(7), "up to 7", "adaptive verification up to 7", 7),
    ]
    for setting, text, name, max_tokens in cases:
        assert str(setting) == text
        assert describe_setting(setting) == name
        assert max_speculative_tokens(setting) == max_tokens


def test_a_schedule_gives_tokens_by_batch_size() -> None:
    schedule = Schedule((ScheduleTier(1, 4, 5), ScheduleTier(5, 64, 1), ScheduleTier(65, 128, 0)), 7)
    assert [schedule.tokens_at(batch) for batch in (1, 4, 5, 64, 65, 128, 1000)] == [5, 5, 1, 1, 0, 0, 0]
    assert schedule.nonzero_token_counts == (1, 5)
    with pytest.raises(ValueError, match="at least 1 request"):
        schedule.tokens_at(0)


@pytest.mark.parametrize(
    ("tiers", "maximum", "message"),
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
def test_schedules_that_vllm_would_change_or_reject(tiers: tuple[ScheduleTier, ...], maximum: int, message: str) -> None:
    with pytest.raises(SpeculationSettingError, match=message):
        Schedule(tiers, maximum)


def test_zero_tokens_is_rejected_in_favour_of_off() -> None:
    with pytest.raises(SpeculationSettingError, match="use Off"):
        Static(0)
    with pytest.raises(SpeculationSettingError, match="use Off"):
        Adaptive(0)
