"""Requests and blocks that are missing never promote: few, lost or failed requests, crashes, and dropped blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aerie.analysis.criteria.criterion import FAILED_REQUESTS
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.state import add_block, add_restarts
from aerie.analysis.verdict import evaluate_analysis
from tests.golden import Messages
from tests.unit.analysis.simulated_blocks import NEW_STATE, PLAN, run_blocks, side


def test_few_requests_without_failures_do_not_promote(messages: Messages) -> None:
    """None of three finished requests in a block has failed, but 2 % might fail."""
    few = {
        "finished_requests": 3 / 240,
        "truncated_requests": 3 / 240,
        "first_tokens": 3 / 240,
        "first_token_seconds": 3 / 240,
        "timed_requests": 3 / 240,
    }
    noise, state, verdict = np.random.default_rng(1), NEW_STATE, evaluate_analysis(NEW_STATE, PLAN, 0.0)[1]
    for index in range(1, 120):
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, accepted_tokens=1.2, **few), side(noise, **few))
        state = add_block(state, block, PLAN)
        state, verdict = evaluate_analysis(state, PLAN, 120.0 * index)
        assert verdict.outcome == "Continue"
    messages.check("few requests", verdict.message)


def test_with_little_traffic_a_wider_margin_of_failures_decides() -> None:
    few = dict.fromkeys(
        ("finished_requests", "truncated_requests", "first_tokens", "first_token_seconds", "timed_requests"), 10 / 240
    )
    noise, wide = np.random.default_rng(1), replace(PLAN, failure_margin=0.05)
    state = NEW_STATE
    for index in range(1, 16):
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, accepted_tokens=1.2, **few), side(noise, **few))
        state = add_block(state, block, wide)
    assert evaluate_analysis(state, wide, 1800.0)[1].outcome == "Promote"
    assert evaluate_analysis(state, PLAN, 1800.0)[1].outcome == "Continue"


BEGUN = (
    *(
        "drafts",
        "accepted_tokens",
        "decode_tokens",
        "decode_seconds",
        "output_tokens",
        "finished_requests",
        "truncated_requests",
        "first_tokens",
    ),
    *("first_token_seconds", "timed_requests", "slow_first_token_requests", "slow_output_requests"),
)


def test_a_canary_that_loses_half_of_its_requests_is_not_promoted(messages: Messages) -> None:
    """Half of the canary's clients disconnect before their first token, starting with block 8."""
    noise, state, verdict = np.random.default_rng(1), NEW_STATE, evaluate_analysis(NEW_STATE, PLAN, 0.0)[1]
    for index in range(1, 118):
        change = dict.fromkeys(BEGUN, 0.5) | {"load": 2.0} if index > 7 else {}
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, **{"accepted_tokens": 1.2, **change}), side(noise))
        state = add_block(state, block, PLAN)
        state, verdict = evaluate_analysis(state, PLAN, 120.0 * index)
        assert verdict.outcome != "Promote"
    messages.check("half of the requests missing", verdict.message)


def test_an_episode_of_unequal_loads_delays_a_promotion_by_its_own_length(messages: Messages) -> None:
    """Half of the canary's clients are away for 25 blocks. With few requests a block, a queue of a minute has such an effect."""
    noise, state, verdicts = np.random.default_rng(1), NEW_STATE, {}
    for index in range(1, 118):
        change = dict.fromkeys(BEGUN, 0.5) | {"load": 2.0} if 4 < index <= 29 else {}
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, **{"accepted_tokens": 1.2, **change}), side(noise))
        state = add_block(state, block, PLAN)
        verdicts[index] = evaluate_analysis(state, PLAN, 120.0 * index)[1]
    unmatched = state.unmatched_block_count
    assert 25 <= unmatched <= 27
    assert min(index for index, verdict in verdicts.items() if verdict.outcome == "Promote") == 4 + unmatched + unmatched
    messages.check("unequal loads have ended", verdicts[53].message)


def test_episodes_of_unequal_loads_that_come_back_are_not_trusted() -> None:
    """A canary that loses its clients whenever it is overloaded has matched blocks only in between."""
    noise, state = np.random.default_rng(1), NEW_STATE
    for index in range(1, 118):
        change = dict.fromkeys(BEGUN, 0.5) | {"load": 2.0} if index % 10 < 3 else {}
        block = ClosedBlock(120.0 * index - 120, 120.0 * index, side(noise, **{"accepted_tokens": 1.2, **change}), side(noise))
        state = add_block(state, block, PLAN)
        assert evaluate_analysis(state, PLAN, 120.0 * index)[1].outcome != "Promote"


def test_crashes_roll_back_unless_the_control_crashes_too(messages: Messages) -> None:
    state, _ = run_blocks(14, accepted_tokens=1.2)
    once = add_restarts(state, {"canary-1": 3}, {})
    assert once.crashes.canary_crashes == 1, "older restarts are not counted"
    assert add_restarts(once, {"canary-1": 3}, {}) == once, "nor the same one twice"
    _, verdict = evaluate_analysis(once, PLAN, 1801.0)
    assert verdict.outcome == "Continue"
    messages.check("suspicious crash", verdict.message)
    _, verdict = evaluate_analysis(add_restarts(once, {"canary-1": 4}, {}), PLAN, 1801.0)
    assert verdict.outcome == "Rollback"
    messages.check("crashes", verdict.message)
    both = add_restarts(once, {"canary-1": 4}, {"control-1": 1, "control-2": 1})
    assert evaluate_analysis(both, PLAN, 1801.0)[1].outcome != "Rollback", "where the control crashes too, the cluster does it"


def test_requests_in_flight_at_a_crash_count_as_failed() -> None:
    state, _ = run_blocks(14, accepted_tokens=1.2)
    lost = add_restarts(state, {"a": 1}, {}).share_counts[FAILED_REQUESTS]
    assert lost.canary_events == 5.0, "as many as are on a pod"
    assert lost.canary_total == state.share_counts[FAILED_REQUESTS].canary_total + 5.0


# ---------------------------------------------------------------------------------------------------------------- dropped blocks
def test_dropped_blocks_never_promote() -> None:
    state = NEW_STATE
    for index in range(200):
        state = add_block(state, ClosedBlock(120.0 * index, 120.0 * index + 120, None, side(), {"Stale": 1}), PLAN)
    assert (state.block_count, state.dropped_block_count, state.excluded_pods) == (0, 200, {"Stale": 200})
    assert evaluate_analysis(state, PLAN, 3600.0)[1].outcome == "Continue"
    assert evaluate_analysis(state, PLAN, 14400.0)[1].outcome == "Inconclusive"


def test_too_many_dropped_blocks_are_not_trusted(messages: Messages) -> None:
    noise, state = np.random.default_rng(1), NEW_STATE
    for index in range(1, 61):
        canary = None if index % 5 == 0 else side(noise, accepted_tokens=1.2)
        dropped = {} if canary else {"Restarted": 1}
        state = add_block(state, ClosedBlock(120.0 * index - 120, 120.0 * index, canary, side(noise), dropped), PLAN)
    _, verdict = evaluate_analysis(state, PLAN, 7200.0)
    assert verdict.outcome == "Continue"
    messages.check("dropped blocks", verdict.message)
