"""Rates of windows, and windows without a rate: from captured expositions, and from drafts whose acceptance is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.metrics import rates
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.rates import Bounds, Unknown
from aerie.engine.metrics.sample import Counters, SpeculationCounters, diff_samples
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static

EMPTY = Histogram((1.0, math.inf), (0.0, 0.0), 0.0)


def window(
    speculation: SpeculationCounters | None = None,
    *,
    requests: int = 0,
    cached: int = 0,
    preemptions: int = 0,
    **changes: float,
) -> Counters:
    base = Counters(
        generation_tokens=0.0,
        prompt_tokens=100.0 * requests,
        computed_prompt_tokens=100.0 * requests - cached,
        prefix_cache_queries=0.0,
        prefix_cache_hits=0.0,
        preemptions=preemptions,
        finished={},
        request_steps=0.0,
        step_seconds=0.0,
        iterations=0.0,
        queued_requests=0.0,
        queue_seconds=0.0,
        time_to_first_token=Histogram((1.0, math.inf), (float(requests), float(requests)), 0.5 * requests),
        time_per_output_token=EMPTY,
        speculation=speculation,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def count_drafts(drafts: list[tuple[int, int]], positions: int) -> SpeculationCounters:
    """Return vLLM's counters after these drafts, each (draft tokens, accepted)."""
    accepted = [sum(1.0 for _, accepted_tokens in drafts if accepted_tokens > position) for position in range(positions)]
    return SpeculationCounters(float(len(drafts)), float(sum(k for k, _ in drafts)), sum(accepted), tuple(accepted))


def drafts_of_lengths(lengths: list[int]) -> st.SearchStrategy[list[tuple[int, int]]]:
    draft = st.sampled_from(lengths).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length)))
    return st.lists(draft, min_size=1, max_size=60)


def true_survival(drafts: list[tuple[int, int]], position: int) -> float | None:
    """Return the accepted share at this position of the drafts that reached it."""
    reached = [accepted for length, accepted in drafts if length > position]
    return sum(accepted > position for accepted in reached) / len(reached) if reached else None


# ------------------------------------------------------------------------------------------------------------- acceptance
def test_rates_of_captured_expositions() -> None:
    data = Path(__file__).parent / "data"
    scrapes = [parse_exposition((data / f"vllm-0.32.0-ngram-{n}.prom").read_bytes()) for n in (1, 2)]
    real = diff_samples(scrapes[0], scrapes[1])
    assert isinstance(real, Counters)
    assert rates.acceptance_length(real, Static(3)) == Bounds(1 + 224 / 177, 1 + 224 / 177)
    assert rates.mean_draft_length(real) == 425 / 177
    assert rates.mean_batch(real) == Bounds(303 / 107, 303 / 107)
    assert rates.tokens_per_step(real) == 512 / 303
    # Accepted tokens after the end of a request are counted and not emitted.
    assert 512 / 303 < 1 + 224 / 303
    survival = rates.survival_by_position(real, Static(3))
    assert isinstance(survival, tuple)
    # Prompt lookup sometimes finds fewer than 3 tokens, so that deep positions are only bounded.
    assert [bounds.low for bounds in survival] == [125 / 177, 61 / 177, 38 / 177]
    assert not survival[2].is_exact


@given(drafts_of_lengths([3]), st.integers(0, 20), st.integers(0, 20))
def test_dummy_drafts_are_bounded(drafts: list[tuple[int, int]], dummies: int, more_requests: int) -> None:
    """The true acceptance lies between the bounds for any share of padded requests."""
    counters = count_drafts(drafts + [(3, 0)] * dummies, 3)
    padded = window(counters, requests=dummies + more_requests, cached=100 * dummies)
    length = rates.acceptance_length(padded, Static(3))
    assert isinstance(length, Bounds)
    assert length.low <= 1 + sum(accepted for _, accepted in drafts) / len(drafts) + 1e-9
    assert 1 + sum(accepted for _, accepted in drafts) / len(drafts) <= length.high + 1e-9
    survival = rates.survival_by_position(padded, Static(3))
    assert isinstance(survival, tuple)
    for position, bounds in enumerate(survival):
        expected = true_survival(drafts, position)
        assert expected is not None
        assert bounds.low - 1e-9 <= expected <= bounds.high + 1e-9


def test_dummy_drafts_that_vllm_counted_are_bounded() -> None:
    """8 equal prompts of one block and one token, 1 token of output each, K = 3: no verification at all, and 7 drafts counted.

    vLLM 0.32.0 as in data/README.md, in a run of its own.
    """
    padded = window(SpeculationCounters(7, 21, 0, (0, 0, 0)), requests=8, prompt_tokens=8 * 129.0, computed_prompt_tokens=136.0)
    assert rates.true_drafts(padded, Static(3)) == Bounds(0, 7)
    assert rates.acceptance_length(padded, Static(3)) == Bounds(1, 4)


@given(drafts_of_lengths([1, 2, 3]))
def test_cut_drafts_are_bounded(drafts: list[tuple[int, int]]) -> None:
    survival = rates.survival_by_position(window(count_drafts(drafts, 3)), Static(3))
    assert isinstance(survival, tuple)
    for position, bounds in enumerate(survival):
        expected = true_survival(drafts, position)
        assert bounds.low <= bounds.high <= 1
        if expected is not None:
            assert bounds.low - 1e-9 <= expected <= bounds.high + 1e-9


@given(drafts_of_lengths([3]), st.integers(0, 50))
def test_without_padded_or_cut_drafts_all_bounds_are_exact(drafts: list[tuple[int, int]], requests: int) -> None:
    unpadded = window(count_drafts(drafts, 3), requests=requests)
    length = rates.acceptance_length(unpadded, Static(3))
    survival = rates.survival_by_position(unpadded, Static(3))
    assert isinstance(length, Bounds)
    assert length.is_exact
    assert isinstance(survival, tuple)
    assert all(bounds.is_exact for bounds in survival)
    assert [bounds.low for bounds in survival] == [true_survival(drafts, position) for position in range(3)]
    assert length.low == pytest.approx(1 + sum(bounds.low for bounds in survival))


TWO_TIERS = Schedule((ScheduleTier(1, 4, 4), ScheduleTier(5, 64, 2)), 4)


@given(drafts_of_lengths([2, 4]), st.integers(0, 50))
def test_two_tiers_are_solved_exactly(drafts: list[tuple[int, int]], requests: int) -> None:
    """Prompts from the cache change nothing: a schedule pads no drafts."""
    survival = rates.survival_by_position(window(count_drafts(drafts, 4), requests=requests, cached=100 * requests), TWO_TIERS)
    assert isinstance(survival, tuple)
    for position, bounds in enumerate(survival):
        expected = true_survival(drafts, position)
        if expected is None:  # no draft reached this position
            assert bounds.low == 0
        else:
            assert bounds.low == pytest.approx(expected)
            assert bounds.is_exact


def test_one_drafting_tier_equals_a_fixed_number() -> None:
    schedule = Schedule((ScheduleTier(1, 8, 3), ScheduleTier(9, 64, 0)), 3)
    survival = rates.survival_by_position(window(count_drafts([(3, 3), (3, 1)], 3), requests=9, cached=900), schedule)
    assert survival == (Bounds(1, 1), Bounds(0.5, 0.5), Bounds(0.5, 0.5))


def test_three_tiers_are_bounded() -> None:
    schedule = Schedule((ScheduleTier(1, 2, 5), ScheduleTier(3, 8, 3), ScheduleTier(9, 64, 1)), 5)
    survival = rates.survival_by_position(window(count_drafts([(5, 2), (1, 1)], 5)), schedule)  # or two drafts of 3
    assert survival == (Bounds(1, 1), Bounds(0.5, 1), Bounds(0, 0), Bounds(0, 1), Bounds(0, 1))
    reason = rates.survival_by_position(window(count_drafts([(5, 2), (9, 9)], 5)), schedule)
    assert isinstance(reason, Unknown)
    assert "drafts of 1 and 5" in reason.message


@given(st.lists(st.sampled_from([(1, 1), (3, 2), (3, 3), (5, 1), (5, 5)]), min_size=1, max_size=30))
def test_the_bounds_of_three_tiers_contain_the_true_counts(drafts: list[tuple[int, int]]) -> None:
    schedule = Schedule((ScheduleTier(1, 2, 5), ScheduleTier(3, 8, 3), ScheduleTier(9, 64, 1)), 5)
    offered = rates.drafts_by_position(window(count_drafts(drafts, 5)), schedule)
    assert isinstance(offered, tuple)
    for position, bounds in enumerate(offered):
        drafts_at_position = sum(length > position for length, _ in drafts)
        assert bounds.low - 1e-9 <= drafts_at_position <= bounds.high + 1e-9
    assert rates.acceptance_length(window(count_drafts([(5, 2), (1, 1)], 5)), schedule) == Bounds(2.5, 2.5)


@pytest.mark.parametrize("drafts", [[(1, 0), (1, 1)], [(3, 0), (1, 0), (1, 0)]])
def test_draft_tokens_that_contradict_the_tiers_have_a_reason(drafts: list[tuple[int, int]]) -> None:
    reason = rates.survival_by_position(window(count_drafts(drafts, 4)), TWO_TIERS)
    assert isinstance(reason, Unknown)
    assert "do not come from drafts of 2 and 4" in reason.message


def test_few_cut_drafts_do_not_hide_a_tier() -> None:
    drafts = [(2, 1)] * 500 + [(1, 0)]
    survival = rates.survival_by_position(window(count_drafts(drafts, 4)), TWO_TIERS)
    assert isinstance(survival, tuple)
    assert survival[0].low == 500 / 501


@given(drafts_of_lengths([3]), st.data())
def test_adaptive_verification_gives_lower_bounds(drafts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Tokens that the device trims count as not accepted: the acceptance without trimming is never below the bound."""
    trimmed = [(3, data.draw(st.integers(0, accepted))) for _, accepted in drafts]
    length = rates.acceptance_length(window(count_drafts(trimmed, 3)), Adaptive(3))
    survival = rates.survival_by_position(window(count_drafts(trimmed, 3)), Adaptive(3))
    assert isinstance(length, Bounds)
    assert length.low <= 1 + sum(accepted for _, accepted in drafts) / len(drafts) <= length.high == 4
    assert isinstance(survival, tuple)
    for position, bounds in enumerate(survival):
        expected = true_survival(drafts, position)
        assert expected is not None
        assert bounds.low <= expected <= bounds.high == 1


@pytest.mark.parametrize("setting", [Static(3), Adaptive(3), Schedule((ScheduleTier(1, 4, 3),), 3)])
def test_without_drafts_acceptance_is_unknown(setting: SpeculationSetting) -> None:
    for speculation, reason in ((None, rates.NOT_SPECULATING), (SpeculationCounters(0, 0, 0, (0, 0, 0)), rates.NO_DRAFTS)):
        assert rates.acceptance_length(window(speculation), setting) == reason
        assert rates.survival_by_position(window(speculation), setting) == reason
        assert rates.mean_draft_length(window(speculation)) == reason


def test_off_has_no_acceptance_even_with_counters() -> None:
    assert rates.acceptance_length(window(count_drafts([(3, 1)], 3)), Off()) == rates.NOT_SPECULATING


def test_other_positions_than_the_settings_are_unknown() -> None:
    survival = rates.survival_by_position(window(count_drafts([(3, 1)], 3)), Static(5))
    assert survival == Unknown("the engine counts 3 positions, not the 5 of the setting '5'.")


def test_bounds_are_widest_when_all_drafts_may_be_padded() -> None:
    padded = window(count_drafts([(3, 0)] * 4, 3), requests=9, cached=900)
    assert rates.acceptance_length(padded, Static(3)) == Bounds(1, 4)
    assert rates.survival_by_position(padded, Static(3)) == (Bounds(0, 1),) * 3


def test_preempted_requests_may_be_padded_again() -> None:
    assert rates.true_drafts(window(count_drafts([(3, 1)] * 9, 3), requests=2, cached=1, preemptions=3), Static(3)) == Bounds(
        5, 9
    )


# --------------------------------------------------------------------------------------------------- batch, requests
def test_several_api_servers_bound_the_batch() -> None:
    counters = window(requests=4, request_steps=600.0, iterations=300.0)
    assert rates.mean_batch(counters) == Bounds(2, 2)
    assert rates.mean_batch(counters, api_servers=3) == Bounds(2, 6)
    with pytest.raises(ValueError, match="at least 1 API-server"):
        rates.mean_batch(counters, api_servers=0)


def test_a_window_without_traffic_has_reasons() -> None:
    idle = window()
    assert rates.mean_batch(idle) == rates.NO_STEPS
    assert rates.mean_step_interval(idle) == rates.NO_STEPS
    assert rates.error_share(idle) == rates.NO_REQUESTS


def test_step_interval_and_tokens_per_step() -> None:
    """Four requests get 3 tokens each in 50 steps of 0.02 s: the step interval does not show the tokens."""
    counters = window(requests=4, generation_tokens=4.0 * (1 + 50 * 3), request_steps=200.0, step_seconds=200 * 0.02)
    assert rates.mean_step_interval(counters) == pytest.approx(0.02)
    assert rates.tokens_per_step(counters) == pytest.approx(3)


def test_error_share() -> None:
    counters = replace(window(requests=4), finished={"stop": 6.0, "error": 2.0})
    assert rates.finished_requests(counters) == 8
    assert rates.error_share(counters) == 0.25
