"""Decisions: evidence first, thresholds, objectives, cooldowns, exploring, and turning speculation off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from aerie.engine.arguments import EngineArguments
from aerie.engine.releases import Version
from aerie.engine.speculation import Off, Schedule, SpeculationSetting, Static, describe_setting, max_speculative_tokens
from aerie.tuning.decision.candidates import EngineConfig
from aerie.tuning.decision.explain import explain_decision
from aerie.tuning.decision.policy import FailedTrial, LatencyObjectives, TrialHistory, TuningPolicy
from aerie.tuning.decision.recommend import decide_setting
from aerie.tuning.decision.types import TuningAction, TuningContext, TuningDecision
from aerie.tuning.telemetry import HOUR, TuningTelemetry
from tests.unit.tuning.windows import K3, spread, telemetry

ENGINE = EngineConfig(Version.parse("0.33.0"), EngineArguments(data_parallel=2, api_server_count=1), is_moe=False)
"""Data parallel, so that fixed settings are all there is."""
GOOD = (0.9, 0.88, 0.88, 0.88, 0.88, 0.88, 0.88)
BAD = (0.25, 0.2, 0.2)
SURE = TuningPolicy(min_probability_better=0.99)
"""So that what is likely is not yet enough for a change."""


def cheap(batch: float, tokens: float) -> float:
    """Steps that hardly care how much they verify."""
    return 8e-3 + 4e-4 * tokens + 2e-6 * batch * (tokens + 1)


def dear(batch: float, tokens: float) -> float:
    """Steps for which every token counts."""
    return 4e-3 + 1e-3 * tokens + 1.5e-4 * batch * (tokens + 1)


def situation(current: SpeculationSetting, **changes: object) -> TuningContext:
    own = TuningContext(ENGINE, current, 7, 4, 100 * HOUR)
    return replace(own, **changes)  # type: ignore[arg-type]


def decided(found: TuningTelemetry, where: TuningContext, policy: TuningPolicy | None = None, seed: int = 1) -> TuningDecision:
    return decide_setting(found, where, policy or TuningPolicy(), seed)


@pytest.fixture(scope="module")
def better_with_more() -> TuningTelemetry:
    """K = 3 with a canary at 7, on an engine for which 7 is far better."""
    return telemetry([K3, Static(7)], cheap, spread(1, 60, 60), GOOD)


def test_without_evidence_nothing_is_done_and_what_is_missing_is_said() -> None:
    found = decided(TuningTelemetry(), situation(K3))
    assert found.action is TuningAction.INSUFFICIENT
    assert found.setting is None
    assert "0 windows measure the cost of a step" in found.reason
    assert "acceptance was counted in 0 blocks" in found.reason
    assert len(found.missing_data) == 3


def test_a_setting_that_is_surely_better_is_proposed(better_with_more: TuningTelemetry) -> None:
    found = decided(better_with_more, situation(K3))
    assert (found.action, found.setting) == (TuningAction.CHANGE, Static(7))
    best = found.predictions[0]
    assert best.setting == Static(7)
    assert best.gain[0] < best.gain[1] < best.gain[2] < best.gain[3]
    assert best.gain[1] > TuningPolicy().required_median_gain()
    truths = [cheap(b, 3) / (1 + sum_of(3)) / (cheap(b, 7) / (1 + sum_of(7))) - 1 for b in (1, 60)]
    assert min(truths) - 0.03 < best.gain[2] < max(truths) + 0.03


def sum_of(tokens: int, conditionals: Sequence[float] = GOOD) -> float:
    survival, total = 1.0, 0.0
    for q in conditionals[:tokens]:
        survival *= q
        total += survival
    return total


def test_the_best_setting_stays(better_with_more: TuningTelemetry) -> None:
    found = decided(better_with_more, situation(Static(7)))
    assert found.action is TuningAction.HOLD
    assert all(one.rejection_reason for one in found.predictions if one.setting != Static(7))


def test_the_same_seed_gives_the_same_decision(better_with_more: TuningTelemetry) -> None:
    first, again = (decided(better_with_more, situation(K3), seed=5) for _ in range(2))
    assert first.predictions == again.predictions
    assert first.reason == again.reason


@pytest.mark.parametrize(
    ("history", "what"),
    [
        (TrialHistory(changed_at=99 * HOUR), "the setting was changed 1.0 h ago; the next change is possible in 5.0 h"),
        (TrialHistory(rolled_back_at=90 * HOUR), "a change was rolled back 10.0 h ago; the next change is possible in 14.0 h"),
        (TrialHistory(inconclusive_at=99 * HOUR), "a trial was inconclusive 1.0 h ago; the next change is possible in 5.0 h"),
    ],
)
def test_a_cooldown_holds_back_what_is_better(better_with_more: TuningTelemetry, history: TrialHistory, what: str) -> None:
    found = decided(better_with_more, situation(K3, history=history))
    assert found.action is TuningAction.HOLD
    assert found.setting == Static(7)
    assert what in found.reason


def test_a_setting_that_breaks_an_objective_is_not_proposed(better_with_more: TuningTelemetry) -> None:
    first = decided(better_with_more, situation(K3)).predictions
    limit = next(one for one in first if one.setting == Static(7)).latencies.time_per_output_token
    tight = situation(K3, objectives=LatencyObjectives(time_per_output_token=0.5 * limit[0]))
    found = decided(better_with_more, tight)
    assert found.action is TuningAction.HOLD
    assert all(one.latencies.probability_met < 0.95 for one in found.predictions)
    assert (
        "the objectives are met with a probability of"
        in next(one for one in found.predictions if one.setting == Static(7)).rejection_reason
    )


def test_speculation_that_loses_is_turned_off() -> None:
    found = decided(telemetry([K3, Static(1)], dear, spread(4, 100, 60), BAD), situation(K3))
    assert (found.action, found.setting) == (TuningAction.CHANGE, Off())
    assert "speculation is slower" in found.reason


def test_an_unproven_gain_is_explored_where_it_is_worth_a_canary() -> None:
    found = decided(telemetry([K3], cheap, spread(1, 60, 60), GOOD), situation(K3), SURE)
    assert found.action is TuningAction.EXPLORE
    assert isinstance(found.setting, Static)
    assert found.setting.tokens > 3
    assert found.exploration_value > found.exploration_cost > 0


def test_a_canary_explores_at_the_batches_that_were_seen_and_keeps_the_current_setting_beyond_them() -> None:
    data = telemetry([K3], cheap, spread(1, 60, 60), GOOD)
    found = decided(data, situation(K3, engine=SCHEDULING), SURE)
    assert found.action is TuningAction.EXPLORE
    assert isinstance(found.setting, Schedule)
    seen, beyond = found.setting.tiers
    assert seen.first == 1
    assert 55 < seen.last < 70, "the largest batch that was seen"
    assert seen.tokens > 3
    assert beyond.tokens == 3
    assert f"An exploration canary with {describe_setting(found.setting)} " in found.reason

    # What it has shown is known: another number of tokens is explored next, if any.
    more = telemetry([K3, found.setting], cheap, spread(1, 60, 60), GOOD)
    again = decided(
        more,
        situation(K3, engine=SCHEDULING, explored_setting=None),
        replace(SURE, min_probability_better=0.9999999, min_gain=10.0),
    )
    assert again.setting is None or max_speculative_tokens(again.setting) != seen.tokens


def test_after_a_schedule_that_never_served_none_explores_and_the_same_tokens_are_left_alone() -> None:
    data = telemetry([K3], cheap, spread(1, 60, 60), GOOD)
    first = decided(data, situation(K3, engine=SCHEDULING), SURE).setting
    assert isinstance(first, Schedule)
    crashed = FailedTrial(first, 101 * HOUR, 99 * HOUR, was_compared=False)
    found = decided(data, situation(K3, engine=SCHEDULING, failed_trials=(crashed,)), SURE)
    assert found.action is TuningAction.EXPLORE
    assert isinstance(found.setting, Static)
    assert found.setting.tokens != max_speculative_tokens(first)
    slower = replace(crashed, was_compared=True, trial_started_at=100 * HOUR)
    found = decided(data, situation(K3, engine=SCHEDULING, failed_trials=(slower,)), SURE)
    assert isinstance(found.setting, Schedule)
    assert max_speculative_tokens(found.setting) != max_speculative_tokens(first)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replicas": 2}, "there are 2 replicas, and 3 are needed"),
        ({"queued_requests": 7.0}, "7 requests are queued"),
        ({"history": TrialHistory(changed_at=99 * HOUR)}, "the setting was changed 1.0 h ago"),
        ({"objectives": LatencyObjectives(time_per_output_token=0.0036)}, "too close to its objective"),
    ],
)
def test_nothing_is_explored_at_the_users_cost(changes: dict[str, object], reason: str) -> None:
    data = telemetry([K3], cheap, spread(1, 60, 60), GOOD)
    found = decided(data, situation(K3, **changes), replace(SURE, urgent_exploration_value=1.0))
    assert found.action is TuningAction.HOLD
    assert reason in found.reason


def test_what_is_worth_far_more_than_the_wait_is_explored_though_requests_wait() -> None:
    data = telemetry([K3], cheap, spread(1, 60, 60), GOOD)
    found = decided(data, situation(K3, queued_requests=7.0), SURE)
    assert found.action is TuningAction.EXPLORE
    assert found.exploration_value - found.exploration_cost > SURE.urgent_exploration_value
    assert decided(data, situation(K3, queued_requests=7.0, replicas=2), SURE).action is TuningAction.HOLD


def test_a_request_each_may_wait_for_the_next_step() -> None:
    data = telemetry([K3], cheap, spread(1, 60, 60), GOOD)
    busy, usual = (
        decided(data, situation(K3, queued_requests=waiting), replace(SURE, urgent_exploration_value=1.0)).action
        for waiting in (5.0, 4.0)
    )
    assert (busy, usual) == (TuningAction.HOLD, TuningAction.EXPLORE)


def test_a_canary_that_explores_is_kept_where_its_setting_is_likely_to_be_better() -> None:
    data = telemetry([K3, Static(7)], cheap, spread(1, 60, 60), GOOD)
    strict = TuningPolicy(min_probability_better=0.9999999, min_gain=10.0)
    assert decided(data, situation(K3), strict).action is not TuningAction.CHANGE
    found = decided(data, situation(K3, explored_setting=Static(7)), strict)
    assert (found.action, found.setting) == (TuningAction.CHANGE, Static(7))
    assert "Its exploration canary continues as a trial" in found.reason
    other = decided(data, situation(K3, explored_setting=Static(2)), strict)
    assert other.action is TuningAction.HOLD, "no second canary beside the first"


def test_what_does_not_show_at_the_load_of_the_hour_waits_for_another_one() -> None:
    """A day with a quiet night: with many requests in a step fewer tokens are far better, with few worse."""
    busy, quiet = 20 * spread(30, 90, 60), 2 * spread(1, 2, 60)
    data = telemetry([K3, Static(1)], dear, [*quiet, *busy, *quiet], (0.9, 0.85, 0.8), end=100 * HOUR)
    only = TuningPolicy(min_exploration_value=1.0)
    found = decided(data, situation(K3, engine=SCHEDULING), only)
    assert found.action is TuningAction.HOLD, found.reason
    assert found.setting is not None
    assert "the trial waits for a load that shows the gain" in found.reason
    again = telemetry([K3, Static(1)], dear, [*quiet, *quiet, *busy], (0.9, 0.85, 0.8), end=100 * HOUR)
    assert decided(again, situation(K3, engine=SCHEDULING), only).action is TuningAction.CHANGE


def test_a_canary_explores_where_the_replicas_that_stay_can_bear_the_load() -> None:
    """With 2 of 4 out, the others have twice the requests: at 40 in a step that is more than they can do."""
    quiet, busy = (telemetry([K3], dear, spread(low, 3 * low, 60), end=100 * HOUR) for low in (1, 20))
    policy = TuningPolicy(min_probability_better=0.99, min_exploration_value=-1.0, urgent_exploration_value=1.0)
    spared = decided(busy, situation(K3), policy)
    assert spared.action is TuningAction.EXPLORE
    found = decided(busy, situation(K3, borrowed_replicas=2), policy)
    assert found.action is TuningAction.HOLD
    assert re.search(
        r"while 2 of 4 replicas load, each token would take (\d+ % longer|too long): it waits for a lower load", found.reason
    )
    assert decided(quiet, situation(K3, borrowed_replicas=1), policy).action is TuningAction.EXPLORE
    assert decided(quiet, situation(K3, borrowed_replicas=4), policy).action is TuningAction.HOLD


@pytest.mark.parametrize(
    ("changed", "before", "pause"),
    [(None, 0, 1), (None, 1, 2), (None, 2, 4), (None, 3, 7), (None, 4, 7), (1, 1, 2), (99, 3, 1), (101, 3, 1)],
)
def test_canaries_explore_ever_more_seldom_until_the_setting_is_changed(changed: float | None, before: int, pause: int) -> None:
    explored = (100 * HOUR, *((30 - 5 * index) * HOUR for index in range(before)))
    history = TrialHistory(exploration_times=explored, changed_at=None if changed is None else changed * HOUR)
    due = 100 * HOUR + pause * 24 * HOUR
    assert "the next is possible in" in (
        history.exploration_pause_reason(due - 1, TuningPolicy(), urgent=False, untested_direction=False) or ""
    )
    assert history.exploration_pause_reason(due, TuningPolicy(), urgent=False, untested_direction=False) is None
    assert history.exploration_pause_reason(124 * HOUR, TuningPolicy(), urgent=True, untested_direction=False) is None


def test_where_nothing_was_tried_yet_a_canary_explores_soon_after_the_other_or_in_its_time() -> None:
    history = TrialHistory(exploration_times=(0.0, -30 * HOUR))
    may = [
        history.exploration_pause_reason(hours * HOUR, TuningPolicy(), urgent=False, untested_direction=True) is None
        for hours in (5, 6, 11, 12, 47, 48)
    ]
    assert may == [False, True, True, False, False, True]


def test_what_lies_on_the_other_side_is_not_what_a_canary_has_shown() -> None:
    history = TrialHistory(exploration_times=(93 * HOUR, 20 * HOUR))
    below = telemetry([K3, Static(2)], cheap, spread(1, 60, 60), GOOD)
    found = decided(below, situation(K3, history=history), replace(SURE, urgent_exploration_value=1.0))
    assert found.action is TuningAction.EXPLORE
    assert found.setting is not None
    assert max_speculative_tokens(found.setting) > 3
    above = telemetry([K3, Static(4)], cheap, spread(1, 60, 60), GOOD)
    found = decided(above, situation(K3, history=history), replace(SURE, urgent_exploration_value=1.0, min_gain=0.3))
    assert found.action is TuningAction.HOLD
    assert "the last exploration was 7.0 h ago" in found.reason


def test_while_off_a_canary_asks_for_acceptance_again_once_a_day() -> None:
    data = telemetry([Off()], dear, spread(1, 60, 60))
    late = decided(data, situation(Off(), history=TrialHistory(last_drafted_at=70 * HOUR)))
    assert (late.action, late.setting) == (TuningAction.EXPLORE, K3)
    early = decided(data, situation(Off(), history=TrialHistory(last_drafted_at=90 * HOUR)))
    assert early.action is TuningAction.HOLD
    assert "is possible in 14.0 h" in early.reason


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_small_fleet_asks_again_where_the_canary_needs_no_replica(replicas: int) -> None:
    data = telemetry([Off()], dear, spread(1, 60, 60))
    assert decided(data, situation(Off(), replicas=replicas)).action is TuningAction.EXPLORE
    lending = decided(data, situation(Off(), replicas=replicas, borrowed_replicas=1))
    assert (lending.action, lending.blocked_reason) == (TuningAction.HOLD, "CannotProbe")
    assert "capacity: Surge" in lending.reason


def test_speculation_is_not_turned_off_where_no_canary_could_ask_for_it_again() -> None:
    data = telemetry([K3, Static(1)], dear, spread(4, 100, 60), BAD)
    found = decided(data, situation(K3, replicas=2, borrowed_replicas=1))
    assert (found.action, found.setting, found.blocked_reason) == (TuningAction.HOLD, Off(), "CannotProbe")
    assert "spec.speculation.numSpeculativeTokens: 0 to turn speculation off" in found.reason


def test_a_setting_that_has_failed_lately_is_left_alone_and_the_next_best_is_tried(better_with_more: TuningTelemetry) -> None:
    failed = FailedTrial(Static(7), 101 * HOUR, 99 * HOUR, was_compared=False)
    found = decided(better_with_more, situation(K3, failed_trials=(failed,)))
    assert found.action in (TuningAction.CHANGE, TuningAction.EXPLORE)
    assert found.setting not in (K3, Static(7))
    (seven,) = (one for one in found.predictions if one.setting == Static(7))
    assert seven.rejection_reason == "its trials failed; the next is possible in 1.0 h."
    over = replace(failed, backoff_until=99.9 * HOUR)
    assert decided(better_with_more, situation(K3, failed_trials=(over,))).setting == Static(7)


@pytest.mark.parametrize(("times", "hours"), [(1, 24), (2, 48), (5, 384)])
def test_the_pause_after_failures_in_a_row_doubles(better_with_more: TuningTelemetry, times: int, hours: int) -> None:
    history = TrialHistory(
        rolled_back_at=(100 - hours + 1) * HOUR, consecutive_failures=times, trial_started_at=(99 - hours) * HOUR
    )
    found = decided(better_with_more, situation(K3, history=history))
    assert found.action is TuningAction.HOLD
    assert "is possible in 1.0 h" in found.reason


@pytest.mark.parametrize(
    "objectives",
    [LatencyObjectives(time_per_output_token=0.006), LatencyObjectives(time_to_first_token=0.05)],
    ids=["TPOT", "TTFT"],
)
def test_a_canary_explores_only_with_what_is_likely_to_keep_the_objectives(objectives: LatencyObjectives) -> None:
    data = telemetry([K3], dear_with_load, spread(2, 30, 60), GOOD)
    assert decided(data, situation(K3), SURE).action is TuningAction.EXPLORE
    found = decided(data, situation(K3, objectives=objectives), SURE)
    slow = {
        one.setting
        for one in found.predictions
        if one.latencies.probability_no_worse < SURE.min_exploration_objective_probability
    }
    assert slow, "some candidate is likely to break it"
    assert found.action is not TuningAction.EXPLORE or found.setting not in slow


def test_pods_beyond_the_replicas_have_to_be_paid_back() -> None:
    assert (
        TuningPolicy().required_pessimistic_gain(2 / 1)
        > TuningPolicy().required_pessimistic_gain(2 / 6)
        > TuningPolicy().required_pessimistic_gain()
    )
    data = telemetry([K3], cheap, spread(1, 60, 60), GOOD)
    few, none = (decided(data, situation(K3, surge_pods=extra), SURE) for extra in (2, 0))
    assert few.exploration_cost > none.exploration_cost


def test_a_schedule_is_proposed_where_no_fixed_setting_fits_all_batches() -> None:
    def truth(batch: float, tokens: float) -> float:
        return 7e-3 + 3e-4 * tokens + 4e-5 * batch * (tokens + 1)

    data = telemetry([K3, Static(1), Static(7)], truth, spread(1, 250, 90), GOOD)
    engine = EngineConfig(Version.parse("0.33.0"), is_moe=False)
    found = decided(data, situation(Static(1), engine=engine))
    assert found.action is TuningAction.CHANGE
    assert isinstance(found.setting, Schedule)
    assert found.setting.tiers[0].tokens > found.setting.tiers[-1].tokens


def dear_with_load(batch: float, tokens: float) -> float:
    """With 10 requests in a step K = 7 is better than 3, and with 20 worse."""
    return 6e-3 + 2e-4 * tokens + 1.4e-4 * batch * (tokens + 1)


SCHEDULING = EngineConfig(Version.parse("0.33.0"), is_moe=False)
NIGHT = telemetry([K3, Static(7)], dear_with_load, spread(2, 10, 60), GOOD)


def test_what_might_be_worse_under_a_load_that_was_not_seen_waits_for_a_day() -> None:
    found = decided(NIGHT, situation(K3))
    assert found.setting != Static(7)
    (seven,) = (one for one in found.predictions if one.setting == Static(7))
    assert seven.gain[2] > 0.05
    assert seven.worst_extrapolated_gain is not None
    assert seven.worst_extrapolated_gain < -0.02
    assert "at the lowest or highest expected load it loses" in seven.rejection_reason
    assert "less than a day of load is known" in seven.rejection_reason
    day = telemetry([K3, Static(7)], dear_with_load, 24 * spread(2, 10, 60), GOOD)
    known = decided(day, situation(K3))
    assert known.action is TuningAction.CHANGE
    assert all(one.worst_extrapolated_gain is None and "a day" not in one.rejection_reason for one in known.predictions)


def test_what_was_before_the_load_changed_may_come_again() -> None:
    """A quiet morning after a busy day: what is better for it alone is not for the fleet."""
    day = [*(23 * spread(22, 60, 60)), *(2 * spread(2, 10, 60))]
    found = decided(telemetry([K3, Static(7)], dear_with_load, day, GOOD, end=100 * HOUR), situation(K3))
    assert found.evidence.change_points.load is not None
    (seven,) = (one for one in found.predictions if one.setting == Static(7))
    assert seven.gain[2] > 0.05
    assert seven.worst_extrapolated_gain is not None
    assert seven.worst_extrapolated_gain < -0.1
    assert found.setting != Static(7)


def test_a_schedule_keeps_what_ran_beyond_the_load_that_was_seen() -> None:
    found = decided(NIGHT, situation(K3, engine=SCHEDULING))
    assert found.action is TuningAction.CHANGE
    assert str(found.setting) == "1-10:7,11-20:3"
    (chosen,) = (one for one in found.predictions if one.setting == found.setting)
    (seven,) = (one for one in found.predictions if one.setting == Static(7))
    assert chosen.gain == pytest.approx(seven.gain)
    assert chosen.worst_extrapolated_gain is not None
    assert chosen.worst_extrapolated_gain > -0.02


def test_what_is_better_at_night_must_not_break_the_objective_at_noon() -> None:
    """With 10 requests in a step K = 7 is better than 3, with 20 no worse, and with 40 slower than it may be."""

    def steep(batch: float, tokens: float) -> float:
        return 6e-3 + 2e-4 * tokens + 7e-5 * batch * (tokens + 1)

    night = telemetry([K3, Static(7)], steep, spread(2, 10, 60), GOOD)
    length = {one.setting: one.acceptance_length for one in decided(night, situation(K3)).predictions}
    assert decided(night, situation(K3)).setting == Static(7)
    noon = {setting: steep(40, max_speculative_tokens(setting)) / length[setting] for setting in (K3, Static(7))}
    assert noon[Static(7)] > noon[K3]
    limit = LatencyObjectives(time_per_output_token=1.25 * (noon[K3] + noon[Static(7)]) / 2)
    found = decided(night, situation(K3, objectives=limit))
    assert found.setting != Static(7)
    (seven,) = (one for one in found.predictions if one.setting == Static(7))
    assert seven.worst_extrapolated_gain is not None
    assert seven.worst_extrapolated_gain > -0.02, "at twice the load it is no worse"
    assert seven.latencies.time_per_output_token[1] < 0.6 * (limit.time_per_output_token or 0.0)
    assert seven.latencies.probability_met < 0.95
    assert "the objectives are met with a probability of" in seven.rejection_reason
    text = explain_decision(found, night, situation(K3, objectives=limit), TuningPolicy())
    assert "At the largest load, that of time per output token has to be met too" in text
    assert "objectives" not in explain_decision(found, night, situation(K3), TuningPolicy()).partition("A change is tried")[2]
    guarded = decided(night, situation(K3, objectives=limit, engine=SCHEDULING))
    assert (guarded.action, str(guarded.setting)) == (TuningAction.CHANGE, "1-10:7,11-20:3")


def test_fewer_tokens_for_a_busy_hour_are_for_its_batches_alone() -> None:
    busy = telemetry([Static(7), K3], lambda batch, tokens: 4e-3 + dear_with_load(batch, tokens), spread(22, 60, 60), GOOD)
    found = decided(busy, situation(Static(7), engine=SCHEDULING), TuningPolicy(min_exploration_value=1.0))
    assert found.action is TuningAction.CHANGE
    assert isinstance(found.setting, Schedule)
    assert found.setting.tokens_at(10) == 7
    assert found.setting.tokens_at(45) < 7


def test_candidates_that_the_engine_cannot_run_are_named(better_with_more: TuningTelemetry) -> None:
    found = decided(better_with_more, situation(K3))
    assert any(one.label == "schedules" and "data parallel size 2" in one.reason for one in found.excluded_candidates)
