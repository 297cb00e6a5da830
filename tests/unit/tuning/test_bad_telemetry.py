"""Broken metrics: nothing is done without evidence, the reason can be read, and nothing raises."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.engine.arguments import Arguments
from aerie.engine.histogram import Histogram
from aerie.engine.samples import Counters, Speculation
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, Tier
from aerie.engine.versions import Version
from aerie.tuning.candidates import Engine
from aerie.tuning.decide import decide
from aerie.tuning.decision import Action, Decision, Situation
from aerie.tuning.explain import explain, to_json
from aerie.tuning.policy import Policy
from aerie.tuning.telemetry import HOUR, Reading, Telemetry
from tests.unit.tuning.windows import EDGES, K3, spread, telemetry, window

NOW = 100 * HOUR
POLICY = Policy(draws=50)
SCHEDULE = Schedule((Tier(1, 8, 3), Tier(9, 64, 1)), 3)


def situation(current: Setting = K3, **changes: object) -> Situation:
    own = Situation(Engine(Version.parse("0.33.0"), experts=False), current, 7, 4, NOW)
    return replace(own, **changes)  # type: ignore[arg-type]


def decided(found: Telemetry, where: Situation) -> Decision:
    decision = decide(found, where, POLICY, 1)
    assert explain(decision, found, where, POLICY)
    assert to_json(decision)["reason"] == decision.reason
    return decision


def step(batch: float, tokens: float) -> float:
    return 8e-3 + 4e-4 * tokens + 1e-5 * batch * (tokens + 1)


def healthy(setting: Setting = K3, end: float = NOW) -> Telemetry:
    return telemetry([setting], step, spread(1, 60, 60), end=end)


def test_a_k_that_was_changed_by_hand_is_no_evidence_and_is_said() -> None:
    found = healthy(end=NOW - 2 * HOUR)
    for minute in range(119, -1, -1):
        found.add(Reading("3/0", NOW - 60.0 * minute, K3, window(Static(5), 8, 0.01)))
    decision = decided(found, situation())
    assert decision.action is Action.INSUFFICIENT
    assert "the newest windows of K=3 ended 1.9 h ago" in decision.reason
    assert "120 of them for this: the engine is built for 5 draft tokens, and the setting is '3'" in decision.missing[-1]


def test_lost_metrics_are_no_evidence() -> None:
    decision = decided(healthy(end=NOW - 3 * HOUR), situation())
    assert decision.action is Action.INSUFFICIENT
    assert "no traffic, no metrics" in decision.reason


def test_several_api_servers_leave_the_batch_unknown() -> None:
    found = Telemetry(api_servers=2)
    for minute in range(120):
        found.add(Reading("a", NOW - 60.0 * minute, K3, window(K3, 8, 0.01)))
    decision = decided(found, situation())
    assert decision.action is Action.INSUFFICIENT
    assert "--api-server-count=1" in decision.reason


def test_off_without_any_window_is_not_even_explored() -> None:
    decision = decided(Telemetry(), situation(Off()))
    assert decision.action is Action.INSUFFICIENT
    assert "no window of no speculation was counted" in decision.reason


def test_data_parallel_engines_are_not_offered_a_schedule() -> None:
    engine = Engine(Version.parse("0.33.0"), Arguments(data_parallel=4, api_servers=1), experts=False)
    decision = decided(healthy(), situation(engine=engine))
    assert not any(isinstance(one.setting, Schedule) for one in decision.predictions)
    assert any("data parallel size 4" in one.why for one in decision.left_out)


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
        broken.add(Reading("3/0", NOW, K3, one))
    assert sum(broken.left_out.values()) >= 6
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
    spoken = Speculation(draw(numbers), draw(numbers), draw(numbers), tuple(positions)) if draw(st.booleans()) else None
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


SETTINGS: list[Setting] = [K3, Static(1), Static(7), Off(), Adaptive(3), SCHEDULE]
readings = st.builds(
    Reading,
    st.sampled_from(["a", "b"]),
    st.one_of(st.floats(NOW - 24 * HOUR, NOW), st.just(NOW)),
    st.sampled_from(SETTINGS),
    counters(),
    st.sampled_from([0.0, 1e5, math.inf, math.nan]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(readings, max_size=60), st.sampled_from(SETTINGS), st.floats(0, 100), st.integers(0, 64))
def test_garbage_never_raises_and_never_acts(found: list[Reading], current: Setting, waiting: float, replicas: int) -> None:
    kept = Telemetry()
    for one in found:
        kept.add(one)
    decision = decided(kept, situation(current, waiting=waiting, replicas=replicas))
    if decision.action is not Action.INSUFFICIENT:  # while off one may ask, and then only where the engines are heard of
        assert current == Off()
        assert decision.action is not Action.CHANGE
        assert any(block.setting == Off() for block in kept.blocks())
    assert decision.reason


@settings(max_examples=12, deadline=None)
@given(st.lists(readings, min_size=1, max_size=20))
def test_garbage_among_good_windows_never_raises(found: list[Reading]) -> None:
    kept = healthy()
    for one in found:
        kept.add(one)
    decision = decided(kept, situation())
    for prediction in decision.predictions:
        assert all(map(math.isfinite, prediction.gain))


def alone(current: Setting) -> Decision:
    """On two hours of nothing but this setting, whose steps take the same at every batch."""
    found = Telemetry()
    for minute in range(120):
        found.add(Reading("a", NOW - 60.0 * minute, current, window(current, 1 + minute % 60, 0.01)))
    return decided(found, situation(current))


def test_a_setting_whose_counters_tell_no_acceptance_is_left_as_it_is() -> None:
    decision = alone(Adaptive(3))
    assert decision.action is Action.INSUFFICIENT
    assert decision.missing


def test_a_schedule_of_three_tiers_tells_enough_to_leave_it() -> None:
    decision = alone(Schedule((Tier(1, 2, 3), Tier(3, 8, 2), Tier(9, 64, 1)), 3))
    assert decision.action in (Action.CHANGE, Action.EXPLORE), "whether one canary first teaches more is a near thing"
    assert decision.reason.startswith("K=2 is"), "steps cost the same, and two are surely accepted"
