"""Invalid metrics: without evidence no setting changes, the decision has a reason, and nothing raises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
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

pytestmark = pytest.mark.slow

NOW = 100 * HOUR
POLICY = TuningPolicy(draws=50)
SCHEDULE = Schedule((ScheduleTier(1, 8, 3), ScheduleTier(9, 64, 1)), 3)


def make_context(current: SpeculationSetting = K3, **changes: object) -> TuningContext:
    own = TuningContext(EngineConfig(Version.parse("0.33.0"), is_moe=False), current, 7, 4, NOW)
    return replace(own, **changes)  # type: ignore[arg-type]


def decide(telemetry: TuningTelemetry, context: TuningContext) -> TuningDecision:
    decision = decide_setting(telemetry, context, POLICY, 1)
    assert explain_decision(decision, telemetry, context, POLICY)
    assert decision_to_json(decision)["reason"] == decision.reason
    return decision


def step(batch: float, tokens: float) -> float:
    return 8e-3 + 4e-4 * tokens + 1e-5 * batch * (tokens + 1)


def make_valid_telemetry(setting: SpeculationSetting = K3, end: float = NOW) -> TuningTelemetry:
    return telemetry([setting], step, spread(1, 60, 60), end=end)


def test_windows_of_a_manually_changed_k_are_excluded_and_reported() -> None:
    telemetry = make_valid_telemetry(end=NOW - 2 * HOUR)
    for minute in range(119, -1, -1):
        telemetry.add(ReplicaWindow("3/0", NOW - 60.0 * minute, K3, window(Static(5), 8, 0.01)))
    decision = decide(telemetry, make_context())
    assert decision.action is TuningAction.INSUFFICIENT
    assert "the newest windows of K=3 ended 1.9 h ago" in decision.reason
    assert (
        "120 windows were excluded because the engine is built for 5 draft tokens, and the setting is '3'"
        in decision.missing_data[-1]
    )


def test_lost_metrics_are_no_evidence() -> None:
    decision = decide(make_valid_telemetry(end=NOW - 3 * HOUR), make_context())
    assert decision.action is TuningAction.INSUFFICIENT
    assert "no traffic, no metrics" in decision.reason


def test_several_api_servers_leave_the_batch_unknown() -> None:
    telemetry = TuningTelemetry(api_servers=2)
    for minute in range(120):
        telemetry.add(ReplicaWindow("a", NOW - 60.0 * minute, K3, window(K3, 8, 0.01)))
    decision = decide(telemetry, make_context())
    assert decision.action is TuningAction.INSUFFICIENT
    assert "--api-server-count=1" in decision.reason


def test_off_without_windows_is_not_explored() -> None:
    decision = decide(TuningTelemetry(), make_context(Off()))
    assert decision.action is TuningAction.INSUFFICIENT
    assert "no window of no speculation was counted" in decision.reason


def test_data_parallel_engines_are_not_offered_a_schedule() -> None:
    engine = EngineConfig(Version.parse("0.33.0"), EngineArguments(data_parallel=4, api_server_count=1), is_moe=False)
    decision = decide(make_valid_telemetry(), make_context(engine=engine))
    assert not any(isinstance(prediction.setting, Schedule) for prediction in decision.predictions)
    assert any("data parallel size 4" in candidate.reason for candidate in decision.excluded_candidates)


def test_other_buckets_and_invalid_counters_are_excluded() -> None:
    clean = make_valid_telemetry()
    before = decide(clean, make_context())
    broken = make_valid_telemetry()
    valid = window(K3, 8, 0.01)
    speculation = valid.speculation
    assert speculation is not None
    other_buckets = Histogram((0.3, math.inf), (5.0, 10.0), 2.0)
    for invalid in (
        replace(valid, request_steps=math.nan),
        replace(valid, step_seconds=math.inf),
        replace(valid, iterations=-5.0),
        replace(valid, time_to_first_token=other_buckets, time_per_output_token=other_buckets),
        replace(valid, speculation=replace(speculation, accepted_per_position=(9e12, 1.0, 1.0))),
        replace(valid, speculation=replace(speculation, drafts=math.nan)),
        replace(valid, speculation=None),
    ):
        broken.add(ReplicaWindow("3/0", NOW, K3, invalid))
    assert sum(broken.excluded_windows.values()) >= 6
    after = decide(broken, make_context())
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
    speculation = (
        SpeculationCounters(draw(numbers), draw(numbers), draw(numbers), tuple(positions)) if draw(st.booleans()) else None
    )
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
        speculation=speculation,
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
def test_invalid_windows_never_raise_or_change_the_setting(
    windows: list[ReplicaWindow], current: SpeculationSetting, waiting: float, replicas: int
) -> None:
    telemetry = TuningTelemetry()
    for replica_window in windows:
        telemetry.add(replica_window)
    decision = decide(telemetry, make_context(current, queued_requests=waiting, replicas=replicas))
    if (
        decision.action is not TuningAction.INSUFFICIENT
    ):  # without speculation it may explore, and only with windows of the engines
        assert current == Off()
        assert decision.action is not TuningAction.CHANGE
        assert any(block.setting == Off() for block in telemetry.blocks())
    assert decision.reason


@settings(max_examples=12, deadline=None)
@given(st.lists(readings, min_size=1, max_size=20))
def test_invalid_windows_among_valid_ones_never_raise(windows: list[ReplicaWindow]) -> None:
    telemetry = make_valid_telemetry()
    for replica_window in windows:
        telemetry.add(replica_window)
    decision = decide(telemetry, make_context())
    for prediction in decision.predictions:
        assert all(map(math.isfinite, prediction.gain))


def decide_with_only(current: SpeculationSetting) -> TuningDecision:
    """Decide after two hours with only this setting, whose steps take equally long at every batch."""
    telemetry = TuningTelemetry()
    for minute in range(120):
        telemetry.add(ReplicaWindow("a", NOW - 60.0 * minute, current, window(current, 1 + minute % 60, 0.01)))
    return decide(telemetry, make_context(current))


def test_a_setting_without_acceptance_counters_stays() -> None:
    decision = decide_with_only(Adaptive(3))
    assert decision.action is TuningAction.INSUFFICIENT
    assert decision.missing_data


def test_a_schedule_of_three_tiers_gives_enough_evidence() -> None:
    decision = decide_with_only(Schedule((ScheduleTier(1, 2, 3), ScheduleTier(3, 8, 2), ScheduleTier(9, 64, 1)), 3))
    assert decision.action in (TuningAction.CHANGE, TuningAction.EXPLORE), "whether one canary first teaches more is a near thing"
    assert decision.reason.startswith("K=2 is"), "steps cost the same, and two are surely accepted"
