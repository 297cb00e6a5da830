"""Whether a history holds in an analysis, and the bounds that follow from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP
from aerie.analysis.criteria.history_fit import HistoryFit, assess_history, with_tested_history
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.sequence_parameters import build_sequence_parameters
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION
from aerie.analysis.statistics.confidence_sequence import PairedMoments
from aerie.analysis.statistics.peer_dispersion import MIN_COMPARED_BLOCKS, MIN_TESTED_BLOCKS, PeerDeviations
from aerie.analysis.verdict import check_guardrails, evaluate_analysis
from tests.unit.analysis.simulated_blocks import CALM, PLAN, run_blocks

FRESH = replace(PLAN, dispersions={})


def make_peers(blocks: int, apart: float = 0.0) -> PeerDeviations:
    """Make the deviations of three pods that differ permanently by `apart`, and otherwise by chance as `CALM` has it."""
    random, peers = np.random.default_rng(3), PeerDeviations()
    for noise in (0.005 * random.standard_normal((blocks, 3))).tolist():
        peers = peers.add_block({str(pod): 2.0 * (1 + (pod - 1) * apart + noise[pod]) for pod in range(3)})
    return peers


@pytest.mark.parametrize(
    ("plan", "peers", "fit"),
    [
        (FRESH, PeerDeviations(), "Absent"),
        (FRESH, make_peers(30), "Absent"),
        (PLAN, make_peers(MIN_TESTED_BLOCKS - 1, apart=0.5), "Untested"),
        (PLAN, make_peers(MIN_TESTED_BLOCKS, apart=0.5), "DoesNotFit"),
        (PLAN, make_peers(MIN_COMPARED_BLOCKS - 1), "Untested"),
        (PLAN, make_peers(MIN_COMPARED_BLOCKS), "Fits"),
        (PLAN, make_peers(MIN_COMPARED_BLOCKS, apart=0.03), "DoesNotFit"),
    ],
)
def test_history_is_tested_by_todays_pods(plan: AnalysisPlan, peers: PeerDeviations, fit: HistoryFit) -> None:
    assert assess_history(plan, peers) == fit


def bound(plan: AnalysisPlan, peers: PeerDeviations) -> float:
    """Return the bound of lasting differences of a promote test, at level 1."""
    criterion = next(criterion for criterion in build_criteria(plan) if criterion.name == TOKENS_PER_STEP)
    pairs = PairedMoments(20, 1.0, 1.0)
    return build_sequence_parameters(
        criterion.promote_tests[0], criterion, with_tested_history(plan, peers), pairs
    ).pod_effect_bound


def test_bounds_are_the_wider_the_less_is_known() -> None:
    fitting = bound(PLAN, make_peers(30))
    untested, absent = bound(PLAN, make_peers(5)), bound(FRESH, make_peers(5))
    alike, apart = bound(FRESH, make_peers(30)), bound(PLAN, make_peers(30, apart=0.03))
    assert fitting < 0.01 < alike < untested == absent < apart
    unlike = replace(PLAN, hardware_mismatch="canary pods run on A, control pods on B")
    assert bound(unlike, make_peers(30)) == untested, "stable pods say nothing of another node"


def test_other_criteria_keep_their_dispersion() -> None:
    tested = with_tested_history(PLAN, make_peers(30, apart=0.03)).dispersions
    assert tested[TOKENS_PER_STEP].inflation == UNCALIBRATED_DISPERSION.inflation
    assert {name: dispersion for name, dispersion in tested.items() if name != TOKENS_PER_STEP} == {
        name: CALM for name in PLAN.dispersions if name != TOKENS_PER_STEP
    }
    assert with_tested_history(PLAN, make_peers(30)) == PLAN


def test_the_message_says_that_the_history_does_not_fit() -> None:
    _, verdict = run_blocks(20)
    assert "HistoryDoesNotFit" not in verdict.message
    state, _ = run_blocks(20)
    apart = replace(state, outcome="Continue", message="", peers=make_peers(30, apart=0.03))
    for evaluate in (evaluate_analysis, check_guardrails):
        assert "HistoryDoesNotFit: the stable pods differ more" in evaluate(apart, PLAN, 600.0)[1].message
    incomparable = replace(PLAN, drafts_not_comparable_reason="another target.")
    assert "HistoryDoesNotFit" not in evaluate_analysis(apart, incomparable, 600.0)[1].message
