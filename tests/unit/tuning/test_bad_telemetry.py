"""Broken metrics: nothing is done without evidence, the reason can be read, and nothing raises."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.engine.arguments import EngineArguments
from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, SpeculationCounters
from aerie.engine.releases import Version
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.tuning.decision.candidates import EngineConfig
from aerie.tuning.decision.explain import decision_to_json, explain_decision
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.decision.recommend import decide_setting
from aerie.tuning.decision.types import TuningAction, TuningContext, TuningDecision
from aerie.tuning.telemetry import HOUR, ReplicaWindow, TuningTelemetry
from tests.unit.tuning.windows import EDGES, K3, spread, telemetry, window

NOW = 100 * HOUR
POLICY = TuningPolicy(draws=50)
SCHEDULE = Schedule((ScheduleTier(1, 8, 3), ScheduleTier(9, 64, 1)), 3)


def situation(current: SpeculationSetting = K3, **changes: object) -> TuningContext:
    own = TuningContext(EngineConfig(Version.parse("0.33.0"), is_moe=False), current, 7, 4, NOW)
    return replace(own, **changes)  # type: ignore[arg-type]


def decided(found: TuningTelemetry, where: TuningContext) -> TuningDecision:
    decision = decide_setting(found, where, POLICY, 1)
    assert explain_decision(decision, found, where, POLICY)
    assert decision_to_json(decision)["reason"] == decision.reason
    return decision


def step(batch: float, tokens: float) -> float:
    return 8e-3 + 4e-4 * tokens + 1e-5 * batch * (tokens + 1)


def healthy(setting: SpeculationSetting = K3, end: float = NOW) -> TuningTelemetry:
    return telemetry([setting], step, spread(1, 60, 60), end=end)


def test_a_k_that_was_changed_by_hand_is_no_evidence_and_is_said() -> None:
    found = healthy(end=NOW - 2 * HOUR)
    for minute in range(119, -1, -1):
        found.add(ReplicaWindow("3/0", NOW - 60.0 * minute, K3, window(Static(5), 8, 0.01)))
    decision = decided(found, situation())
    assert decision.action is TuningAction.INSUFFICIENT
    assert "the newest windows of K=3 ended 1.9 h ago" in decision.reason
    assert "120 of them because the engine is built for 5 draft tokens, and the setting is '3'" in decision.missing_data[-1]


def test_lost_metrics_are_no_evidence() -> None:
    decision = decided(healthy(end=NOW - 3 * HOUR), situation())
    assert decision.action is TuningAction.INSUFFICIENT
    assert "no traffic, no metrics" in decision.reason


def test_several_api_servers_leave_the_batch_unknown() -> None:
    found = TuningTelemetry(api_servers=2)
    for minute in range(120):
        found.add(ReplicaWindow("a", NOW - 60.0 * minute, K3, window(K3, 8, 0.01)))
    decision = decided(found, situation())
    assert decision.action is TuningAction.INSUFFICIENT
    assert "--api-server-count=1" in decision.reason


def test_off_without_any_window_is_not_even_explored() -> None:
    decision = decided(TuningTelemetry(), situation(Off()))
    assert decision.action is TuningAction.INSUFFICIENT
    assert "no window of no speculation was counted" in decision.reason


def test_data_parallel_engines_are_not_offered_a_schedule() -> None:
    engine = EngineConfig(Version.parse("0.33.0"), EngineArguments(data_parallel=4, api_server_count=1), is_moe=False)
    decision = decided(healthy(), situation(engine=engine))
    assert not any(isinstance(one.setting, Schedule) for one in decision.predictions)
    assert any("data parallel size 4" in one.reason for one in decision.excluded_candidates)


def test_other_buckets_and_broken_counters_among_good_windows_are_left_out() -> None:
    clean = healthy()
    before = decided(clean, situation())
    broken = healthy()
    good = window(K3, 8, 0.01)
    spoken = good.speculation
    assert spoken is not None
    odd = Histogram((0.3, math.inf), (5.0, 10.0), 2.0)
    for one in (
        replace(good, request_steps=math.nan),
        replace(good, step_seconds=math.inf),
        replace(good, iterations=-5.0),
        replace(good, time_to_first_token=odd, time_per_output_token=odd),
        replace(good, speculation=replace(spoken, accepted_per_position=(9e12, 1.0, 1.0))),
        replace(good, speculation=replace(spoken, drafts=math.nan)),
        replace(good, speculation=None),
    ):
        broken.add(ReplicaWindow("3/0", NOW, K3, one))
    assert sum(broken.excluded_windows.values()) >= 6
    after = decided(broken, situation())
    assert after.action is before.action
    assert after.setting == before.setting


numbers = st.one_of(
    st.sampled_from([0.0, 1.0, 1e3, 1e7, 1e18, -1.0, math.nan, math.inf, 1e-12]), st.floats(0, 1e6), st.floats(allow_nan=True)
)


@st.composite
def counters(draw: st.DrawFn) -> Counters:
    def histogram() -> Histogram:
        return Histogram(EDGES, tuple(draw(st.lists(numbers, min_size=len(EDGES), max_size=len(EDGES)))), draw(numbers))

    positions = draw(st.lists(numbers, min_size=0, max_size=4))
    spoken = SpeculationCounters(draw(numbers), draw(numbers), draw(numbers), tuple(positions)) if draw(st.booleans()) else None
    return Counters(
        generation_tokens=draw(numbers),
        prompt_tokens=draw(numbers),
        computed_prompt_tokens=draw(numbers),
        prefix_cache_queries=draw(numbers),
        prefix_cache_hits=draw(numbers),
        preemptions=draw(numbers),
        finished={"stop": draw(numbers)},
        request_steps=draw(numbers),
        step_seconds=draw(numbers),
        iterations=draw(numbers),
        queued_requests=draw(numbers),
        queue_seconds=draw(numbers),
        time_to_first_token=histogram(),
        time_per_output_token=histogram(),
        speculation=spoken,
    )


SETTINGS: list[SpeculationSetting] = [K3, Static(1), Static(7), Off(), Adaptive(3), SCHEDULE]
readings = st.builds(
    ReplicaWindow,
    st.sampled_from(["a", "b"]),
    st.one_of(st.floats(NOW - 24 * HOUR, NOW), st.just(NOW)),
    st.sampled_from(SETTINGS),
    counters(),
    st.sampled_from([0.0, 1e5, math.inf, math.nan]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(readings, max_size=60), st.sampled_from(SETTINGS), st.floats(0, 100), st.integers(0, 64))
def test_garbage_never_raises_and_never_acts(
    found: list[ReplicaWindow], current: SpeculationSetting, waiting: float, replicas: int
) -> None:
    kept = TuningTelemetry()
    for one in found:
        kept.add(one)
    decision = decided(kept, situation(current, queued_requests=waiting, replicas=replicas))
    if decision.action is not TuningAction.INSUFFICIENT:  # while off one may ask, and then only where the engines are heard of
        assert current == Off()
        assert decision.action is not TuningAction.CHANGE
        assert any(block.setting == Off() for block in kept.blocks())
    assert decision.reason


@settings(max_examples=12, deadline=None)
@given(st.lists(readings, min_size=1, max_size=20))
def test_garbage_among_good_windows_never_raises(found: list[ReplicaWindow]) -> None:
    kept = healthy()
    for one in found:
        kept.add(one)
    decision = decided(kept, situation())
    for prediction in decision.predictions:
        assert all(map(math.isfinite, prediction.gain))


def alone(current: SpeculationSetting) -> TuningDecision:
    """On two hours of nothing but this setting, whose steps take the same at every batch."""
    found = TuningTelemetry()
    for minute in range(120):
        found.add(ReplicaWindow("a", NOW - 60.0 * minute, current, window(current, 1 + minute % 60, 0.01)))
    return decided(found, situation(current))


def test_a_setting_whose_counters_tell_no_acceptance_is_left_as_it_is() -> None:
    decision = alone(Adaptive(3))
    assert decision.action is TuningAction.INSUFFICIENT
    assert decision.missing_data


def test_a_schedule_of_three_tiers_tells_enough_to_leave_it() -> None:
    decision = alone(Schedule((ScheduleTier(1, 2, 3), ScheduleTier(3, 8, 2), ScheduleTier(9, 64, 1)), 3))
    assert decision.action in (TuningAction.CHANGE, TuningAction.EXPLORE), "whether one canary first teaches more is a near thing"
    assert decision.reason.startswith("K=2 is"), "steps cost the same, and two are surely accepted"
