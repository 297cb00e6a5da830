"""The tuner's recommendation in the status: what is shown, what is not written again, and what is rejected as invalid."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.rollout.revision.desired import build_status_setting, read_status_setting
from aerie.tuning.recommendation import Recommendation, RecommendationError
from tests.unit.rollout.tuned_world import K3, recommend, speculation, tuned_world


def test_without_recommendation_there_is_no_tuning_status() -> None:
    world = tuned_world()
    assert speculation(world) == {"current": K3}
    assert "SpeculationTuned" not in {condition["type"] for condition in world.status["conditions"]}


def test_tuning_blocker_is_shown_and_survives_restart() -> None:
    world = tuned_world()
    recommend(world, None, "Insufficient", "4 of 6 blocks of five minutes are there.")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "InsufficientData")
    assert speculation(world)["message"] == world.message("SpeculationTuned") == "4 of 6 blocks of five minutes are there."
    before = copy.deepcopy(world.status)
    world.recommendation = None
    world.step()
    assert world.status == before


def test_small_changes_of_recommendation_are_not_written() -> None:
    world = tuned_world(speculation={"tuning": {"mode": "Recommend"}})
    recommend(world, reason="K=5 is +8.0 % better.")
    world.step()
    before = copy.deepcopy(world.status)
    recommend(world, reason="K=5 is +8.3 % better.")
    world.step()
    assert world.status == before
    recommend(world, Static(4), reason="K=4 is +8.3 % better.")
    world.step()
    assert speculation(world)["recommended"] == {"mode": "Static", "numSpeculativeTokens": 4}


def test_blocked_tuner_is_not_reported_optimal() -> None:
    world = tuned_world()
    recommend(world, Off(), "Hold", "no canary could ask for acceptance again.")
    assert world.recommendation is not None
    world.recommendation = replace(world.recommendation, blocked_reason="CannotProbe")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "CannotProbe")


# ------------------------------------------------------------------------------------------------------------------- round trips
def speculation_settings() -> st.SearchStrategy[SpeculationSetting]:
    tokens = st.integers(1, 15)
    schedules = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 7)), min_size=1, max_size=4).map(_schedule)
    return st.one_of(st.just(Off()), tokens.map(Static), tokens.map(Adaptive), schedules)


def _schedule(steps: list[tuple[int, int]]) -> Schedule:
    tiers, first = [], 1
    for width, tokens in steps:
        tiers.append(ScheduleTier(first, first + width, tokens))
        first += width + 1
    tiers[0] = ScheduleTier(tiers[0].first, tiers[0].last, max(1, tiers[0].tokens))
    return Schedule(tuple(tiers), max(tier.tokens for tier in tiers))


@given(speculation_settings())
def test_setting_round_trips_through_status_and_recommendation(setting: SpeculationSetting) -> None:
    assert read_status_setting(build_status_setting(setting)) == setting
    recommendation = Recommendation("r1", 1.5, "Change", setting, (0.1, 0.2, 0.3), "It is better.")
    assert Recommendation.from_dict(recommendation.to_dict()) == recommendation


def test_invalid_recommendation_is_rejected() -> None:
    good = Recommendation("r1", 1.5, "Change", Static(5), (0.1, 0.2, 0.3), "It is better.").to_dict()
    for change in (
        {"action": "Try"},
        {"setting": None},
        {"predicted_gain": [0.1]},
        {"predicted_gain": [0.1, float("nan"), 0.2]},
        {"decision_time": "soon"},
        {"blocked_reason": "Bored"},
    ):
        with pytest.raises(RecommendationError):
            Recommendation.from_dict({**good, **change})
    with pytest.raises(RecommendationError):
        Recommendation.from_dict({})
