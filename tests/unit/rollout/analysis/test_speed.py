"""Trials of a speculation setting: what is faster, what only seems so, and what is only to be measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aerie.rollout.analysis import lossless
from aerie.rollout.analysis.blocks import Block, Side
from aerie.rollout.analysis.counting import State, count
from aerie.rollout.analysis.criteria import GOODPUT, OUTPUT_TIME, SLOW_OUTPUT, Goal, Terms, criteria, errors_alpha
from aerie.rollout.analysis.judgement import Judgement, judge
from aerie.rollout.analysis.readings import Counts, Kept
from tests.unit.rollout.analysis.test_judgement import CALM, side

TRIAL = "it is a trial of another setting, and what counts is time."
NAMES = (OUTPUT_TIME, SLOW_OUTPUT, GOODPUT, "TimeToFirstToken", "FailedRequests", "OutputLength", "CutRequests", "Preemptions")


def terms(goal: Goal, edge: float | None = None) -> Terms:
    return Terms(goal=goal, incomparable=TRIAL, kept=Kept(3, edge), scatters=dict.fromkeys(NAMES, CALM))


def arm(noise: np.random.Generator, slower: float, steps: float) -> Side:
    """Tokens take so much longer each, and so many times as many steps of the engine are made for them."""
    return side(noise, decode_seconds=slower, request_steps=40_000.0, iterations=8_000.0 * steps)


def after(blocks: int, given: Terms, slower: float = 1.0, steps: float = 1.0) -> tuple[State, Judgement]:
    """The judgement after so many blocks, or at the first verdict."""
    noise, state = np.random.default_rng(1), State(0.0)
    judgement = Judgement("Continue", "", ())
    for index in range(1, blocks + 1):
        canary, control = arm(noise, slower, steps), arm(noise, 1.0, 1.0)
        state = count(state, Block(120.0 * (index - 1), 120.0 * index, canary, control), given)
        state, judgement = judge(state, given, 120.0 * index)
        if judgement.verdict != "Continue":
            break
    return state, judgement


def test_busy_time_is_that_of_the_steps() -> None:
    counts = Counts(decode_seconds=80.0, request_steps=4_000.0, iterations=500.0)
    assert counts.busy_seconds == pytest.approx(10.0)
    assert Counts().busy_seconds == 0.0


@pytest.mark.parametrize("goal", ["Faster", "Explore"])
@pytest.mark.parametrize("edge", [None, 0.05])
def test_alphas_of_a_trial_add_up_to_no_more_than_those_of_other_rollouts(goal: Goal, edge: float | None) -> None:
    given = terms(goal, edge)
    spent = math.fsum(test.alpha for one in criteria(given) for test in one.reject) + errors_alpha(given) + lossless.ALPHA
    assert spent <= 0.05 + 1e-12


def test_names_differ_also_with_an_objective() -> None:
    names = [one.name for one in criteria(terms("Faster", 0.05))]
    assert names[:3] == [OUTPUT_TIME, SLOW_OUTPUT, GOODPUT]
    assert len(set(names)) == len(names)


def test_a_faster_setting_is_accepted() -> None:
    _, judgement = after(60, terms("Faster"), slower=0.9, steps=0.9)
    assert judgement.verdict == "Promote"
    assert judgement.reason.startswith("Time per output token is ")
    assert judgement.reason.endswith(f"Drafts are not compared: {TRIAL}")


def test_one_that_is_no_faster_never_is() -> None:
    _, judgement = after(120, terms("Faster"))
    assert judgement.verdict == "Inconclusive"


def test_a_slower_one_is_rolled_back() -> None:
    _, judgement = after(60, terms("Faster"), slower=1.1)
    assert judgement.verdict == "Rollback"


def test_one_that_is_faster_for_each_and_keeps_the_engine_busier_is_rolled_back() -> None:
    state, judgement = after(60, terms("Faster"), slower=0.9, steps=1.3)
    assert judgement.verdict == "Rollback"
    assert judgement.reason.startswith("Output per busy second is ")
    (goodput,) = (one for one in judgement.comparisons if one.metric == GOODPUT)
    assert goodput.estimate == pytest.approx(1 / (0.9 * 1.3) - 1, abs=0.02)
    assert state.blocks < 60


def test_one_that_is_to_be_measured_is_neither_accepted_nor_held_for_being_slower() -> None:
    for slower in (0.8, 1.2):
        state, judgement = after(60, terms("Explore"), slower=slower)
        assert (judgement.verdict, state.blocks) == ("Continue", 60)
        assert judgement.reason.startswith("It is to be measured and given up. After 60 blocks time per output token is ")
    _, judgement = after(60, terms("Explore"), slower=2.0)
    assert judgement.verdict == "Rollback"
    _, judgement = after(1, replace(terms("Explore"), deadline=60.0))
    assert judgement.verdict == "Inconclusive"
