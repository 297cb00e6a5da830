"""One engine: identities of vLLM's counters that hold for any traffic, and each rule separately."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aerie_lab.engine.acceptance import NO_DRIFT, Acceptance, Drift, expected_length, expected_survival
from aerie_lab.engine.counters import Counters
from aerie_lab.engine.replica import Replica
from aerie_lab.engine.request import EngineSettings, Request
from aerie_lab.engine.step import StepTimeFormula

TIME = StepTimeFormula(
    base_seconds=5e-3,
    seconds_per_token=2e-5,
    seconds_per_draft_token=3e-4,
    seconds_per_cached_token=1e-8,
    seconds_per_prompt_token=2e-5,
)
ALL, TWO, NONE = Acceptance((1.0,)), Acceptance((1.0, 1.0, 0.0)), Acceptance((0.0,))


def engine(seed: int = 0, drift: Drift = NO_DRIFT, step_time: StepTimeFormula = TIME, **limits: Any) -> Replica:
    return Replica(EngineSettings(**{"num_speculative_tokens": 3, **limits}), step_time, seed=seed, drift=drift)


def request(name: str = "a", prompt: int = 20, tokens: int = 10, acceptance: Acceptance = TWO, **more: Any) -> Request:
    return Request(name, prompt, tokens, acceptance, **more)


def check_identities(counters: Counters, finished: list[Request]) -> None:
    """Assert what holds in every metrics response of vLLM, once all requests have finished."""
    assert counters.generation_tokens == sum(r.generated_tokens for r in finished) == counters.request_generation_tokens.total
    assert counters.prompt_tokens == sum(r.prompt_tokens for r in finished) == counters.request_prompt_tokens.total
    assert counters.time_to_first_token.count == len(finished) == sum(counters.request_success.values())
    assert counters.iteration_tokens.total == (
        counters.generation_tokens + counters.prompt_tokens - counters.prompt_tokens_cached
    )
    assert counters.request_prefill_kv_computed_tokens.total == counters.prompt_tokens - counters.prompt_tokens_cached
    positions = counters.spec_decode_num_accepted_tokens_per_pos.tolist()
    assert sum(positions) == counters.spec_decode_num_accepted_tokens <= counters.spec_decode_num_draft_tokens
    assert positions == sorted(positions, reverse=True)
    assert not positions or positions[0] <= counters.spec_decode_num_drafts
    assert counters.spec_decode_num_drafts <= counters.inter_token_latency.count + counters.time_to_first_token.count
    steps = counters.inter_token_latency.count + counters.time_to_first_token.count
    assert counters.generation_tokens <= steps + counters.spec_decode_num_accepted_tokens
    assert counters.iteration_tokens.count <= steps
    for histogram in (counters.e2e_request_latency, counters.request_time_per_output_token, counters.request_decode_time):
        assert histogram.count == len(finished)
    assert counters.request_num_preemptions.total == counters.num_preemptions
    assert (counters.num_requests_running, counters.num_requests_waiting, counters.kv_cache_usage_perc) == (0, 0, 0.0)


traffic = st.lists(
    st.tuples(
        st.floats(0, 2), st.integers(1, 400), st.integers(1, 60), st.sampled_from([ALL, TWO, NONE, Acceptance((0.7,), 1.0)])
    ),
    min_size=1,
    max_size=25,
)
limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.sampled_from([16, 64, 8192]),
        "num_blocks": st.sampled_from([33, 60, 1000]),
        "max_model_len": st.sampled_from([410, 512]),
        "num_speculative_tokens": st.sampled_from([None, 1, 3]),
        "k_schedule": st.sampled_from([None, ((1, 2, 3), (3, 8, 1)), ((1, 4, 2), (5, 8, 0))]),
        "drops_last_block": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(traffic=traffic, limits=limits, shared=st.booleans())
def test_identities_hold_for_any_traffic(
    traffic: list[tuple[float, int, int, Acceptance]], limits: dict[str, Any], shared: bool
) -> None:
    replica = engine(**limits)
    finished: list[Request] = []
    for number, (at, prompt, tokens, acceptance) in enumerate(sorted(traffic, key=lambda t: t[0])):
        finished += replica.advance(at)
        segments = (("system", min(prompt, 100)), (number, prompt - min(prompt, 100))) if shared else ()
        replica.submit(request(str(number), prompt, tokens, acceptance, segments=segments), at)
    finished += replica.advance(math.inf)
    assert len(finished) == len(traffic)
    assert replica.next_step_end is None
    check_identities(replica.counters, finished)
    if limits["num_speculative_tokens"] is None:
        assert replica.counters.spec_decode_num_drafts == 0


SURE = Acceptance((1.0,))
WITHOUT_DRAFTS = ((0.0, 1, 4, SURE), (0.0, 1, 10, Acceptance((0.7,), 1.0)), *[(0.0, 1, 2, SURE)] * 3)
"""Five requests, in a tier without drafts; the last of them then drafts."""


@settings(max_examples=60, deadline=None)
@given(traffic=traffic, limits=limits, cuts=st.lists(st.floats(0, 3), max_size=6))
@example(
    traffic=list(WITHOUT_DRAFTS),
    limits={
        "max_num_seqs": 5,
        "max_num_batched_tokens": 16,
        "num_blocks": 33,
        "max_model_len": 410,
        "num_speculative_tokens": 1,
        "k_schedule": ((1, 4, 2), (5, 8, 0)),
        "drops_last_block": False,
    },
    cuts=[],
)
def test_batched_steps_equal_single_steps(
    traffic: list[tuple[float, int, int, Acceptance]], limits: dict[str, Any], cuts: list[float]
) -> None:
    """Time may be divided anywhere, even into single steps: requests end at the same times, with the same counters."""
    ordered = sorted(traffic, key=lambda t: t[0])

    def run(mode: Literal["at once", "one by one", "as they come"]) -> tuple[list[tuple[str, int, float]], Counters]:
        replica = engine(step_time=replace(TIME, log_sd=0.1), **limits)
        done: list[Request] = []

        def advance(until: float) -> None:
            while mode == "one by one" and (end := replica.next_step_end) is not None and end <= until:
                done.extend(replica.advance(end))
            done.extend(replica.advance(until))

        events = [(at, None) for at in cuts] + [(item[0], item) for item in ordered]
        for number, (at, item) in enumerate(sorted(events, key=lambda e: e[0])):
            if mode != "at once":
                advance(at)
            if item is not None:
                replica.submit(request(str(number), *item[1:]), at)
        advance(math.inf)
        return [(r.name, r.generated_tokens, round(r.last_token_time, 9)) for r in done], replica.counters

    one_by_one, expected = run("one by one")
    for together, counters in (run("as they come"), run("at once")):
        assert sorted(together) == sorted(one_by_one)
        for name, value in vars(expected).items():
            actual = vars(counters)[name]
            if hasattr(value, "counts"):
                assert actual.counts == value.counts, name
                assert actual.total == pytest.approx(value.total), name
            else:
                assert actual == value, name


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_acceptance_converges_to_its_analytical_value(spread: float) -> None:
    acceptance = Acceptance((0.75, 0.7, 0.6), spread)
    replica = engine(max_num_seqs=64, seed=3)
    for number in range(4000):
        replica.submit(request(str(number), 10, 300, acceptance), 0.0)
    replica.advance(math.inf)
    counters = replica.counters
    measured = 1 + counters.spec_decode_num_accepted_tokens / counters.spec_decode_num_drafts
    assert measured == pytest.approx(expected_length(acceptance, 3), rel=0.01)
    rates = counters.spec_decode_num_accepted_tokens_per_pos / counters.spec_decode_num_drafts
    assert rates.tolist() == pytest.approx(expected_survival(acceptance, 3).tolist(), rel=0.03)


def test_acceptance_and_step_times_follow_their_distributions() -> None:
    """Acceptance per position and the log-normal time of a step are kept, though draws ahead are discarded."""
    acceptance, noise = Acceptance((0.75, 0.7, 0.6)), 0.2
    # The median step is the same for any batch, and two edges of the buckets are near it.
    replica = engine(
        step_time=StepTimeFormula(base_seconds=0.03, seconds_per_token=0.0, log_sd=noise),
        k_schedule=((1, 3, 3), (4, 256, 2)),
        seed=2,
    )
    now = 0.0
    for number, gap in enumerate(np.random.default_rng(1).exponential(0.3, 3000).tolist()):
        now += gap
        replica.advance(now)
        replica.submit(request(str(number), 10, 60, acceptance), now)
    replica.advance(math.inf)
    counters = replica.counters
    intervals, drafts = counters.inter_token_latency, counters.spec_decode_num_drafts
    assert drafts == intervals.count > 60_000
    rates = counters.spec_decode_num_accepted_tokens_per_pos / drafts
    survival = acceptance.survival(3)
    assert rates[:2].tolist() == pytest.approx(survival[:2].tolist(), rel=0.015)
    full = counters.spec_decode_num_draft_tokens - 2 * drafts  # drafts of three tokens
    assert 0.1 * drafts < full < 0.9 * drafts
    assert counters.spec_decode_num_accepted_tokens_per_pos[2] / full == pytest.approx(survival[2], rel=0.03)
    assert intervals.total / intervals.count == pytest.approx(0.03 * math.exp(noise**2 / 2), rel=0.01)
    for edge in (0.025, 0.05):
        share = sum(n for bound, n in zip(intervals.bounds, intervals.counts, strict=False) if bound <= edge) / intervals.count
        assert share == pytest.approx(NormalDist().cdf(math.log(edge / 0.03) / noise), abs=0.01)


def test_one_request_step_by_step() -> None:
    replica = engine()
    replica.submit(request(prompt=20, tokens=8), 1.0)
    first_end = replica.next_step_end
    assert first_end is not None
    assert first_end == pytest.approx(1.0 + 5e-3 + 3 * 3e-4 + 20 * 2e-5)
    assert replica.advance(first_end) == []
    counters = replica.counters
    assert (counters.generation_tokens, counters.time_to_first_token.count, counters.inter_token_latency.count) == (1, 1, 0)
    assert counters.spec_decode_num_drafts == 0
    (done,) = replica.advance(math.inf)
    # 1 token from the prefill, then 3 per step (2 accepted): 1 + 3 + 3 + 1, the last step truncated at the answer's end.
    assert (counters.inter_token_latency.count, counters.iteration_tokens.count) == (3, 4)
    assert (counters.spec_decode_num_drafts, counters.spec_decode_num_draft_tokens) == (3, 9)
    assert counters.spec_decode_num_accepted_tokens_per_pos.tolist() == [3, 3, 0]
    assert counters.generation_tokens == 8 < 4 + counters.spec_decode_num_accepted_tokens
    assert done.finish_reason == "length"
    assert done.time_per_output_token == pytest.approx((done.last_token_time - first_end) / 7)


def test_an_answer_that_ends_early_is_counted_as_stopped() -> None:
    replica = engine()
    replica.submit(request(tokens=100, stop_after=5), 0.0)
    (done,) = replica.advance(math.inf)
    assert (done.finish_reason, done.generated_tokens) == ("stop", 5)
    assert replica.counters.request_success["stop"] == 1


def test_a_request_joins_the_next_step_not_the_one_in_flight() -> None:
    replica = engine()
    replica.submit(request("a", tokens=50), 0.0)
    first_end = replica.next_step_end
    assert first_end is not None
    replica.submit(request("b", tokens=50), first_end / 2)
    replica.advance(first_end)
    assert replica.counters.time_to_first_token.count == 1
    assert replica.counters.request_queue_time.count == 0
    done = {r.name: r for r in replica.advance(math.inf)}
    assert done["b"].scheduled_time == first_end


def test_prompts_are_prefilled_in_chunks_that_return_nothing() -> None:
    replica = engine(max_num_batched_tokens=64)
    replica.submit(request(prompt=200, tokens=1), 0.0)
    ends = []
    while (end := replica.next_step_end) is not None:
        ends.append(end)
        replica.advance(end)
    assert len(ends) == 4  # 64 + 64 + 64 + 8
    assert replica.counters.iteration_tokens.count == 1, "a step without output is no observation"
    assert replica.counters.iteration_tokens.total == 201


def test_a_fully_cached_prompt_gives_dummy_drafts_with_static_k_only() -> None:
    for schedule, dummies in ((None, 1), (((1, 64, 3),), 0)):
        replica = engine(drops_last_block=False, k_schedule=schedule)
        prompt = (("p", 33),)
        replica.submit(request("a", 33, 1, ALL, segments=prompt), 0.0)
        replica.advance(math.inf)
        replica.submit(request("b", 33, 1, ALL, segments=prompt), 1.0)
        replica.advance(math.inf)
        counters = replica.counters
        assert counters.prefix_cache_hits == counters.prompt_tokens_cached == 32
        assert (counters.spec_decode_num_drafts, counters.spec_decode_num_draft_tokens) == (dummies, 3 * dummies)
        assert counters.spec_decode_num_accepted_tokens == 0
        assert counters.time_to_first_token.count == 2


def test_an_eagle_drafter_costs_the_last_cached_block() -> None:
    replica = engine()
    for name in "ab":
        replica.submit(request(name, 33, 1, segments=(("p", 33),)), 0.0)
        replica.advance(math.inf)
    assert replica.counters.prefix_cache_hits == 16


def test_a_schedule_uses_the_batch_size_of_the_previous_step() -> None:
    replica = engine(k_schedule=((1, 1, 3), (2, 8, 1)))
    replica.submit(request("a", tokens=41, acceptance=NONE), 0.0)
    replica.advance(0.1)
    for name in "bc":
        replica.submit(request(name, tokens=21, acceptance=NONE), 0.1)
    replica.advance(math.inf)
    counters = replica.counters
    assert counters.spec_decode_num_drafts == counters.inter_token_latency.count == 80
    assert 80 < counters.spec_decode_num_draft_tokens < 3 * 80
    assert len(counters.spec_decode_num_accepted_tokens_per_pos) == 3


def test_schedules_extend_over_gaps_and_tails_and_are_capped() -> None:
    table = EngineSettings(
        max_num_seqs=12, num_speculative_tokens=4, k_schedule=((1, 2, 9), (5, 6, 1), (9, 9, 0))
    ).build_k_table()
    assert table == [0, 4, 4, 4, 4, 1, 1, 1, 1, 0, 0, 0, 0]


def test_the_newest_request_is_preempted_and_recomputed() -> None:
    replica = engine(num_blocks=1 + 8, max_model_len=128, drops_last_block=False)
    for name in "ab":
        replica.submit(request(name, 40, 60, NONE), 0.0)
    done = {r.name: r for r in replica.advance(math.inf)}
    assert replica.counters.num_preemptions >= 1
    assert done["a"].preemptions == 0 < done["b"].preemptions
    check_identities(replica.counters, list(done.values()))
    # The interval across a preemption is one observation, and the time to first token is not observed again.
    assert replica.counters.inter_token_latency.count == 2 * 59


def test_the_model_length_ends_answers_and_shortens_the_last_drafts() -> None:
    replica = engine(max_model_len=64)
    replica.submit(request(prompt=40, tokens=100, acceptance=NONE), 0.0)
    (done,) = replica.advance(math.inf)
    assert (done.generated_tokens, done.finish_reason) == (24, "length")
    counters = replica.counters
    assert counters.spec_decode_num_draft_tokens < 3 * counters.inter_token_latency.count


def test_an_aborted_request_is_not_counted_as_finished() -> None:
    replica = engine()
    aborted, kept_request = request("gone", tokens=100), request("stays", tokens=40)
    replica.submit(aborted, 0.0)
    replica.submit(kept_request, 0.0)
    replica.advance(0.05)
    before = replica.counters.generation_tokens
    assert aborted.generated_tokens > 0
    replica.abort(aborted)
    assert replica.counters.num_requests_running == 1
    (done,) = replica.advance(math.inf)
    assert done is kept_request
    assert replica.counters.request_success == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 0}
    assert replica.counters.generation_tokens == before + 40 - (before - aborted.generated_tokens)
    assert replica.counters.kv_cache_usage_perc == 0


def test_drift_with_context_lowers_acceptance() -> None:
    lengths = []
    for drift in (Drift(), Drift(per_1k_context=-1.0)):
        replica = engine(drift=drift, seed=5)
        for number in range(20):
            replica.submit(request(str(number), 1000, 2000, Acceptance((0.7,))), 0.0)
        replica.advance(math.inf)
        lengths.append(replica.counters.spec_decode_num_accepted_tokens / replica.counters.spec_decode_num_drafts)
    assert lengths[1] < 0.6 * lengths[0]


def test_a_prompt_that_is_too_long_is_rejected() -> None:
    with pytest.raises(ValueError, match="prompt of 64 tokens: give 1 to 63"):
        engine(max_model_len=64).submit(request(prompt=64), 0.0)


def test_a_cache_too_small_for_one_request_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"max seq len \(512\), 512 tokens of KV cache are needed, which is more than there are \(496\)"
    ):
        EngineSettings(max_model_len=512, num_blocks=32)
    with pytest.raises(ValueError, match="max_num_batched_tokens is 3: give more than num_speculative_tokens"):
        EngineSettings(num_speculative_tokens=3, max_num_batched_tokens=3)
