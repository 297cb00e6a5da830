"""Decisions: evidence, thresholds, objectives, cooldowns, explorations, and turning speculation off."""

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
"""A data-parallel engine, which supports only fixed settings."""
GOOD = (0.9, 0.88, 0.88, 0.88, 0.88, 0.88, 0.88)
BAD = (0.25, 0.2, 0.2)
SURE = TuningPolicy(min_probability_better=0.99)
"""A policy that needs more evidence for a change."""


def cheap_steps(batch: float, tokens: float) -> float:
    """Return the seconds of a step that hardly depend on the number of verified tokens."""
    return 8e-3 + 4e-4 * tokens + 2e-6 * batch * (tokens + 1)


def expensive_steps(batch: float, tokens: float) -> float:
    """Return the seconds of a step that depend on every verified token."""
    return 4e-3 + 1e-3 * tokens + 1.5e-4 * batch * (tokens + 1)


def make_context(current: SpeculationSetting, **changes: object) -> TuningContext:
    own = TuningContext(ENGINE, current, 7, 4, 100 * HOUR)
    return replace(own, **changes)  # type: ignore[arg-type]


def decide(
    telemetry: TuningTelemetry, context: TuningContext, policy: TuningPolicy | None = None, seed: int = 1
) -> TuningDecision:
    return decide_setting(telemetry, context, policy or TuningPolicy(), seed)


@pytest.fixture(scope="module")
def better_with_more() -> TuningTelemetry:
    """Telemetry of K = 3 with a canary at 7, on an engine for which 7 is far better."""
    return telemetry([K3, Static(7)], cheap_steps, spread(1, 60, 60), GOOD)


def test_without_evidence_the_decision_lists_the_missing_data() -> None:
    decision = decide(TuningTelemetry(), make_context(K3))
    assert decision.action is TuningAction.INSUFFICIENT
    assert decision.setting is None
    assert "0 windows measure the cost of a step" in decision.reason
    assert "acceptance was counted in 0 blocks" in decision.reason
    assert len(decision.missing_data) == 3


def test_a_significantly_better_setting_is_proposed(better_with_more: TuningTelemetry) -> None:
    decision = decide(better_with_more, make_context(K3))
    assert (decision.action, decision.setting) == (TuningAction.CHANGE, Static(7))
    best = decision.predictions[0]
    assert best.setting == Static(7)
    assert best.gain[0] < best.gain[1] < best.gain[2] < best.gain[3]
    assert best.gain[1] > TuningPolicy().required_median_gain()
    truths = [
        cheap_steps(b, 3) / (1 + expected_accepted(3)) / (cheap_steps(b, 7) / (1 + expected_accepted(7))) - 1 for b in (1, 60)
    ]
    assert min(truths) - 0.03 < best.gain[2] < max(truths) + 0.03


def expected_accepted(tokens: int, conditionals: Sequence[float] = GOOD) -> float:
    survival, total = 1.0, 0.0
    for q in conditionals[:tokens]:
        survival *= q
        total += survival
    return total


def test_the_best_setting_stays(better_with_more: TuningTelemetry) -> None:
    decision = decide(better_with_more, make_context(Static(7)))
    assert decision.action is TuningAction.HOLD
    assert all(prediction.rejection_reason for prediction in decision.predictions if prediction.setting != Static(7))


def test_the_same_seed_gives_the_same_decision(better_with_more: TuningTelemetry) -> None:
    first, second = (decide(better_with_more, make_context(K3), seed=5) for _ in range(2))
    assert first.predictions == second.predictions
    assert first.reason == second.reason


@pytest.mark.parametrize(
    ("history", "what"),
    [
        (TrialHistory(changed_at=99 * HOUR), "the setting was changed 1.0 h ago; the next change is possible in 5.0 h"),
        (TrialHistory(rolled_back_at=90 * HOUR), "a change was rolled back 10.0 h ago; the next change is possible in 14.0 h"),
        (TrialHistory(inconclusive_at=99 * HOUR), "a trial was inconclusive 1.0 h ago; the next change is possible in 5.0 h"),
    ],
)
def test_a_cooldown_delays_a_better_setting(better_with_more: TuningTelemetry, history: TrialHistory, what: str) -> None:
    decision = decide(better_with_more, make_context(K3, history=history))
    assert decision.action is TuningAction.HOLD
    assert decision.setting == Static(7)
    assert what in decision.reason


def test_a_setting_that_misses_an_objective_is_not_proposed(better_with_more: TuningTelemetry) -> None:
    predictions = decide(better_with_more, make_context(K3)).predictions
    limit = next(prediction for prediction in predictions if prediction.setting == Static(7)).latencies.time_per_output_token
    tight = make_context(K3, objectives=LatencyObjectives(time_per_output_token=0.5 * limit[0]))
    decision = decide(better_with_more, tight)
    assert decision.action is TuningAction.HOLD
    assert all(prediction.latencies.probability_met < 0.95 for prediction in decision.predictions)
    assert (
        "the objectives are met with a probability of"
        in next(prediction for prediction in decision.predictions if prediction.setting == Static(7)).rejection_reason
    )


def test_slower_speculation_is_turned_off() -> None:
    decision = decide(telemetry([K3, Static(1)], expensive_steps, spread(4, 100, 60), BAD), make_context(K3))
    assert (decision.action, decision.setting) == (TuningAction.CHANGE, Off())
    assert "speculation is slower" in decision.reason


def test_an_unproven_gain_is_explored_if_it_is_worth_a_canary() -> None:
    decision = decide(telemetry([K3], cheap_steps, spread(1, 60, 60), GOOD), make_context(K3), SURE)
    assert decision.action is TuningAction.EXPLORE
    assert isinstance(decision.setting, Static)
    assert decision.setting.tokens > 3
    assert decision.exploration_value > decision.exploration_cost > 0


def test_an_exploration_keeps_the_current_setting_beyond_known_batches() -> None:
    data = telemetry([K3], cheap_steps, spread(1, 60, 60), GOOD)
    decision = decide(data, make_context(K3, engine=SCHEDULE_ENGINE), SURE)
    assert decision.action is TuningAction.EXPLORE
    assert isinstance(decision.setting, Schedule)
    known_tier, outer_tier = decision.setting.tiers
    assert known_tier.first == 1
    assert 55 < known_tier.last < 70, "the largest batch that was seen"
    assert known_tier.tokens > 3
    assert outer_tier.tokens == 3
    assert f"An exploration canary with {describe_setting(decision.setting)} " in decision.reason

    # Its number of tokens is measured: another one is explored next, if any.
    more = telemetry([K3, decision.setting], cheap_steps, spread(1, 60, 60), GOOD)
    next_decision = decide(
        more,
        make_context(K3, engine=SCHEDULE_ENGINE, explored_setting=None),
        replace(SURE, min_probability_better=0.9999999, min_gain=10.0),
    )
    assert next_decision.setting is None or max_speculative_tokens(next_decision.setting) != known_tier.tokens


def test_a_failed_schedule_excludes_schedules_and_its_tokens() -> None:
    data = telemetry([K3], cheap_steps, spread(1, 60, 60), GOOD)
    first = decide(data, make_context(K3, engine=SCHEDULE_ENGINE), SURE).setting
    assert isinstance(first, Schedule)
    crashed = FailedTrial(first, 101 * HOUR, 99 * HOUR, was_compared=False)
    decision = decide(data, make_context(K3, engine=SCHEDULE_ENGINE, failed_trials=(crashed,)), SURE)
    assert decision.action is TuningAction.EXPLORE
    assert isinstance(decision.setting, Static)
    assert decision.setting.tokens != max_speculative_tokens(first)
    slower = replace(crashed, was_compared=True, trial_started_at=100 * HOUR)
    decision = decide(data, make_context(K3, engine=SCHEDULE_ENGINE, failed_trials=(slower,)), SURE)
    assert isinstance(decision.setting, Schedule)
    assert max_speculative_tokens(decision.setting) != max_speculative_tokens(first)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replicas": 2}, "there are 2 replicas, and 3 are needed"),
        ({"queued_requests": 7.0}, "7 requests are queued"),
        ({"history": TrialHistory(changed_at=99 * HOUR)}, "the setting was changed 1.0 h ago"),
        ({"objectives": LatencyObjectives(time_per_output_token=0.0036)}, "too close to its objective"),
    ],
)
def test_no_exploration_at_the_cost_of_users(changes: dict[str, object], reason: str) -> None:
    data = telemetry([K3], cheap_steps, spread(1, 60, 60), GOOD)
    decision = decide(data, make_context(K3, **changes), replace(SURE, urgent_exploration_value=1.0))
    assert decision.action is TuningAction.HOLD
    assert reason in decision.reason


def test_a_valuable_exploration_is_made_despite_queued_requests() -> None:
    data = telemetry([K3], cheap_steps, spread(1, 60, 60), GOOD)
    decision = decide(data, make_context(K3, queued_requests=7.0), SURE)
    assert decision.action is TuningAction.EXPLORE
    assert decision.exploration_value - decision.exploration_cost > SURE.urgent_exploration_value
    assert decide(data, make_context(K3, queued_requests=7.0, replicas=2), SURE).action is TuningAction.HOLD


def test_one_queued_request_per_replica_allows_an_exploration() -> None:
    data = telemetry([K3], cheap_steps, spread(1, 60, 60), GOOD)
    busy, usual = (
        decide(data, make_context(K3, queued_requests=waiting), replace(SURE, urgent_exploration_value=1.0)).action
        for waiting in (5.0, 4.0)
    )
    assert (busy, usual) == (TuningAction.HOLD, TuningAction.EXPLORE)


def test_an_exploration_continues_as_a_trial_if_likely_better() -> None:
    data = telemetry([K3, Static(7)], cheap_steps, spread(1, 60, 60), GOOD)
    strict = TuningPolicy(min_probability_better=0.9999999, min_gain=10.0)
    assert decide(data, make_context(K3), strict).action is not TuningAction.CHANGE
    decision = decide(data, make_context(K3, explored_setting=Static(7)), strict)
    assert (decision.action, decision.setting) == (TuningAction.CHANGE, Static(7))
    assert "Its exploration canary continues as a trial" in decision.reason
    other = decide(data, make_context(K3, explored_setting=Static(2)), strict)
    assert other.action is TuningAction.HOLD, "no second canary beside the first"


def test_a_gain_that_the_current_load_does_not_show_waits() -> None:
    """Fewer tokens are far better with many requests in a step, and worse with few, in a day with a quiet night."""
    busy, quiet = 20 * spread(30, 90, 60), 2 * spread(1, 2, 60)
    data = telemetry([K3, Static(1)], expensive_steps, [*quiet, *busy, *quiet], (0.9, 0.85, 0.8), end=100 * HOUR)
    policy = TuningPolicy(min_exploration_value=1.0)
    decision = decide(data, make_context(K3, engine=SCHEDULE_ENGINE), policy)
    assert decision.action is TuningAction.HOLD, decision.reason
    assert decision.setting is not None
    assert "the trial waits for a load that shows the gain" in decision.reason
    busy_data = telemetry([K3, Static(1)], expensive_steps, [*quiet, *quiet, *busy], (0.9, 0.85, 0.8), end=100 * HOUR)
    assert decide(busy_data, make_context(K3, engine=SCHEDULE_ENGINE), policy).action is TuningAction.CHANGE


def test_an_exploration_needs_capacity_on_the_remaining_replicas() -> None:
    """When 2 of 4 replicas load, the others have twice the requests: at 40 in a step they are overloaded."""
    quiet, busy = (telemetry([K3], expensive_steps, spread(low, 3 * low, 60), end=100 * HOUR) for low in (1, 20))
    policy = TuningPolicy(min_probability_better=0.99, min_exploration_value=-1.0, urgent_exploration_value=1.0)
    with_all_replicas = decide(busy, make_context(K3), policy)
    assert with_all_replicas.action is TuningAction.EXPLORE
    decision = decide(busy, make_context(K3, borrowed_replicas=2), policy)
    assert decision.action is TuningAction.HOLD
    assert re.search(
        r"while 2 of 4 replicas load, each token would take (\d+ % longer|too long): it waits for a lower load", decision.reason
    )
    assert decide(quiet, make_context(K3, borrowed_replicas=1), policy).action is TuningAction.EXPLORE
    assert decide(quiet, make_context(K3, borrowed_replicas=4), policy).action is TuningAction.HOLD


@pytest.mark.parametrize(
    ("changed", "before", "pause"),
    [(None, 0, 1), (None, 1, 2), (None, 2, 4), (None, 3, 7), (None, 4, 7), (1, 1, 2), (99, 3, 1), (101, 3, 1)],
)
def test_exploration_pauses_grow_until_the_setting_changes(changed: float | None, before: int, pause: int) -> None:
    explored = (100 * HOUR, *((30 - 5 * index) * HOUR for index in range(before)))
    history = TrialHistory(exploration_times=explored, changed_at=None if changed is None else changed * HOUR)
    due = 100 * HOUR + pause * 24 * HOUR
    assert "the next is possible in" in (
        history.exploration_pause_reason(due - 1, TuningPolicy(), urgent=False, untested_direction=False) or ""
    )
    assert history.exploration_pause_reason(due, TuningPolicy(), urgent=False, untested_direction=False) is None
    assert history.exploration_pause_reason(124 * HOUR, TuningPolicy(), urgent=True, untested_direction=False) is None


def test_an_untested_direction_is_explored_after_a_short_pause() -> None:
    history = TrialHistory(exploration_times=(0.0, -30 * HOUR))
    may = [
        history.exploration_pause_reason(hours * HOUR, TuningPolicy(), urgent=False, untested_direction=True) is None
        for hours in (5, 6, 11, 12, 47, 48)
    ]
    assert may == [False, True, True, False, False, True]


def test_an_exploration_tests_only_its_direction() -> None:
    history = TrialHistory(exploration_times=(93 * HOUR, 20 * HOUR))
    below = telemetry([K3, Static(2)], cheap_steps, spread(1, 60, 60), GOOD)
    decision = decide(below, make_context(K3, history=history), replace(SURE, urgent_exploration_value=1.0))
    assert decision.action is TuningAction.EXPLORE
    assert decision.setting is not None
    assert max_speculative_tokens(decision.setting) > 3
    above = telemetry([K3, Static(4)], cheap_steps, spread(1, 60, 60), GOOD)
    decision = decide(above, make_context(K3, history=history), replace(SURE, urgent_exploration_value=1.0, min_gain=0.3))
    assert decision.action is TuningAction.HOLD
    assert "the last exploration was 7.0 h ago" in decision.reason


def test_a_canary_measures_acceptance_once_a_day_while_off() -> None:
    data = telemetry([Off()], expensive_steps, spread(1, 60, 60))
    late = decide(data, make_context(Off(), history=TrialHistory(last_drafted_at=70 * HOUR)))
    assert (late.action, late.setting) == (TuningAction.EXPLORE, K3)
    early = decide(data, make_context(Off(), history=TrialHistory(last_drafted_at=90 * HOUR)))
    assert early.action is TuningAction.HOLD
    assert "is possible in 14.0 h" in early.reason


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_small_fleet_explores_only_with_surge_capacity(replicas: int) -> None:
    data = telemetry([Off()], expensive_steps, spread(1, 60, 60))
    assert decide(data, make_context(Off(), replicas=replicas)).action is TuningAction.EXPLORE
    lending = decide(data, make_context(Off(), replicas=replicas, borrowed_replicas=1))
    assert (lending.action, lending.blocked_reason) == (TuningAction.HOLD, "CannotProbe")
    assert "capacity: Surge" in lending.reason


def test_speculation_stays_on_if_no_canary_could_measure_it_later() -> None:
    data = telemetry([K3, Static(1)], expensive_steps, spread(4, 100, 60), BAD)
    decision = decide(data, make_context(K3, replicas=2, borrowed_replicas=1))
    assert (decision.action, decision.setting, decision.blocked_reason) == (TuningAction.HOLD, Off(), "CannotProbe")
    assert "spec.speculation.numSpeculativeTokens: 0 to turn speculation off" in decision.reason


def test_the_next_best_setting_is_tried_after_a_failed_trial(better_with_more: TuningTelemetry) -> None:
    failed = FailedTrial(Static(7), 101 * HOUR, 99 * HOUR, was_compared=False)
    decision = decide(better_with_more, make_context(K3, failed_trials=(failed,)))
    assert decision.action in (TuningAction.CHANGE, TuningAction.EXPLORE)
    assert decision.setting not in (K3, Static(7))
    (seven,) = (prediction for prediction in decision.predictions if prediction.setting == Static(7))
    assert seven.rejection_reason == "its trials failed; the next is possible in 1.0 h."
    expired = replace(failed, backoff_until=99.9 * HOUR)
    assert decide(better_with_more, make_context(K3, failed_trials=(expired,))).setting == Static(7)


@pytest.mark.parametrize(("times", "hours"), [(1, 24), (2, 48), (5, 384)])
def test_the_pause_after_failures_in_a_row_doubles(better_with_more: TuningTelemetry, times: int, hours: int) -> None:
    history = TrialHistory(
        rolled_back_at=(100 - hours + 1) * HOUR, consecutive_failures=times, trial_started_at=(99 - hours) * HOUR
    )
    decision = decide(better_with_more, make_context(K3, history=history))
    assert decision.action is TuningAction.HOLD
    assert "is possible in 1.0 h" in decision.reason


@pytest.mark.parametrize(
    "objectives",
    [LatencyObjectives(time_per_output_token=0.006), LatencyObjectives(time_to_first_token=0.05)],
    ids=["TPOT", "TTFT"],
)
def test_an_exploration_is_likely_to_meet_the_objectives(objectives: LatencyObjectives) -> None:
    data = telemetry([K3], load_dependent_steps, spread(2, 30, 60), GOOD)
    assert decide(data, make_context(K3), SURE).action is TuningAction.EXPLORE
    decision = decide(data, make_context(K3, objectives=objectives), SURE)
    slow = {
        prediction.setting
        for prediction in decision.predictions
        if prediction.latencies.probability_no_worse < SURE.min_exploration_objective_probability
    }
    assert slow, "some candidate is likely to break it"
    assert decision.action is not TuningAction.EXPLORE or decision.setting not in slow


def test_surge_pods_add_to_the_required_gain() -> None:
    assert (
        TuningPolicy().required_pessimistic_gain(2 / 1)
        > TuningPolicy().required_pessimistic_gain(2 / 6)
        > TuningPolicy().required_pessimistic_gain()
    )
    data = telemetry([K3], cheap_steps, spread(1, 60, 60), GOOD)
    few, none = (decide(data, make_context(K3, surge_pods=extra), SURE) for extra in (2, 0))
    assert few.exploration_cost > none.exploration_cost


def test_a_schedule_is_proposed_where_no_fixed_setting_fits_all_batches() -> None:
    def step_seconds(batch: float, tokens: float) -> float:
        return 7e-3 + 3e-4 * tokens + 4e-5 * batch * (tokens + 1)

    data = telemetry([K3, Static(1), Static(7)], step_seconds, spread(1, 250, 90), GOOD)
    engine = EngineConfig(Version.parse("0.33.0"), is_moe=False)
    decision = decide(data, make_context(Static(1), engine=engine))
    assert decision.action is TuningAction.CHANGE
    assert isinstance(decision.setting, Schedule)
    assert decision.setting.tiers[0].tokens > decision.setting.tiers[-1].tokens


def load_dependent_steps(batch: float, tokens: float) -> float:
    """Return the seconds of a step in which K = 7 is better than 3 with 10 requests, and worse with 20."""
    return 6e-3 + 2e-4 * tokens + 1.4e-4 * batch * (tokens + 1)


SCHEDULE_ENGINE = EngineConfig(Version.parse("0.33.0"), is_moe=False)
LOW_LOAD = telemetry([K3, Static(7)], load_dependent_steps, spread(2, 10, 60), GOOD)


def test_a_setting_worse_at_extrapolated_loads_waits_for_a_day() -> None:
    decision = decide(LOW_LOAD, make_context(K3))
    assert decision.setting != Static(7)
    (seven,) = (prediction for prediction in decision.predictions if prediction.setting == Static(7))
    assert seven.gain[2] > 0.05
    assert seven.worst_extrapolated_gain is not None
    assert seven.worst_extrapolated_gain < -0.02
    assert "at the lowest or highest expected load it loses" in seven.rejection_reason
    assert "less than a day of load is known" in seven.rejection_reason
    day = telemetry([K3, Static(7)], load_dependent_steps, 24 * spread(2, 10, 60), GOOD)
    day_decision = decide(day, make_context(K3))
    assert day_decision.action is TuningAction.CHANGE
    assert all(
        prediction.worst_extrapolated_gain is None and "a day" not in prediction.rejection_reason
        for prediction in day_decision.predictions
    )


def test_the_load_before_a_change_limits_a_setting() -> None:
    """A setting that is better only for a quiet morning is not proposed after a busy day."""
    day = [*(23 * spread(22, 60, 60)), *(2 * spread(2, 10, 60))]
    decision = decide(telemetry([K3, Static(7)], load_dependent_steps, day, GOOD, end=100 * HOUR), make_context(K3))
    assert decision.evidence.change_points.load is not None
    (seven,) = (prediction for prediction in decision.predictions if prediction.setting == Static(7))
    assert seven.gain[2] > 0.05
    assert seven.worst_extrapolated_gain is not None
    assert seven.worst_extrapolated_gain < -0.1
    assert decision.setting != Static(7)


def test_a_schedule_keeps_the_setting_beyond_known_loads() -> None:
    decision = decide(LOW_LOAD, make_context(K3, engine=SCHEDULE_ENGINE))
    assert decision.action is TuningAction.CHANGE
    assert str(decision.setting) == "1-10:7,11-20:3"
    (chosen,) = (prediction for prediction in decision.predictions if prediction.setting == decision.setting)
    (seven,) = (prediction for prediction in decision.predictions if prediction.setting == Static(7))
    assert chosen.gain == pytest.approx(seven.gain)
    assert chosen.worst_extrapolated_gain is not None
    assert chosen.worst_extrapolated_gain > -0.02


def test_a_setting_better_at_low_load_must_meet_the_peak_objective() -> None:
    """K = 7 is better than 3 with 10 requests in a step, no worse with 20, and slower than the objective with 40."""

    def step_seconds(batch: float, tokens: float) -> float:
        return 6e-3 + 2e-4 * tokens + 7e-5 * batch * (tokens + 1)

    low_load = telemetry([K3, Static(7)], step_seconds, spread(2, 10, 60), GOOD)
    length = {prediction.setting: prediction.acceptance_length for prediction in decide(low_load, make_context(K3)).predictions}
    assert decide(low_load, make_context(K3)).setting == Static(7)
    peak_seconds = {setting: step_seconds(40, max_speculative_tokens(setting)) / length[setting] for setting in (K3, Static(7))}
    assert peak_seconds[Static(7)] > peak_seconds[K3]
    limit = LatencyObjectives(time_per_output_token=1.25 * (peak_seconds[K3] + peak_seconds[Static(7)]) / 2)
    decision = decide(low_load, make_context(K3, objectives=limit))
    assert decision.setting != Static(7)
    (seven,) = (prediction for prediction in decision.predictions if prediction.setting == Static(7))
    assert seven.worst_extrapolated_gain is not None
    assert seven.worst_extrapolated_gain > -0.02, "at twice the load it is no worse"
    assert seven.latencies.time_per_output_token[1] < 0.6 * (limit.time_per_output_token or 0.0)
    assert seven.latencies.probability_met < 0.95
    assert "the objectives are met with a probability of" in seven.rejection_reason
    text = explain_decision(decision, low_load, make_context(K3, objectives=limit), TuningPolicy())
    assert "At the largest load, that of time per output token has to be met too" in text
    assert (
        "objectives"
        not in explain_decision(decision, low_load, make_context(K3), TuningPolicy()).partition("A change is tried")[2]
    )
    guarded = decide(low_load, make_context(K3, objectives=limit, engine=SCHEDULE_ENGINE))
    assert (guarded.action, str(guarded.setting)) == (TuningAction.CHANGE, "1-10:7,11-20:3")


def test_fewer_tokens_for_a_busy_hour_apply_only_to_its_batches() -> None:
    busy = telemetry([Static(7), K3], lambda batch, tokens: 4e-3 + load_dependent_steps(batch, tokens), spread(22, 60, 60), GOOD)
    decision = decide(busy, make_context(Static(7), engine=SCHEDULE_ENGINE), TuningPolicy(min_exploration_value=1.0))
    assert decision.action is TuningAction.CHANGE
    assert isinstance(decision.setting, Schedule)
    assert decision.setting.tokens_at(10) == 7
    assert decision.setting.tokens_at(45) < 7


def test_candidates_that_the_engine_does_not_support_are_listed(better_with_more: TuningTelemetry) -> None:
    decision = decide(better_with_more, make_context(K3))
    assert any(
        candidate.label == "schedules" and "data parallel size 2" in candidate.reason
        for candidate in decision.excluded_candidates
    )
