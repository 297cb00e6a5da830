"""Whether a history holds in an analysis, and the bounds that follow from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP
from aerie.analysis.criteria.history_fit import (
    EARLY_POD_EFFECT_FACTOR,
    MIN_COMPARED_BLOCKS,
    MIN_SUPPORTED_BLOCKS,
    UNKNOWN_ROLLBACK_DISPERSION,
    HistoryFit,
    assess_history,
    with_passed_analysis,
    with_tested_history,
)
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.sequence_parameters import build_sequence_parameters
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION
from aerie.analysis.statistics.confidence_sequence import PairedMoments
from aerie.analysis.statistics.peer_dispersion import MIN_TESTED_BLOCKS, PeerDeviations
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


def bound(plan: AnalysisPlan, peers: PeerDeviations, *, rolls_back: bool = False) -> float:
    """Return the bound of lasting differences of a test, at level 1."""
    criterion = next(criterion for criterion in build_criteria(plan) if criterion.name == TOKENS_PER_STEP)
    pairs = PairedMoments(20, 1.0, 1.0)
    (test,) = criterion.rollback_tests if rolls_back else criterion.promote_tests
    return build_sequence_parameters(test, criterion, with_tested_history(plan, peers).of(test), pairs).pod_effect_bound


def test_bounds_are_the_wider_the_less_is_known() -> None:
    fitting = bound(PLAN, make_peers(30))
    untested, absent = bound(PLAN, make_peers(5)), bound(FRESH, make_peers(5))
    alike, apart = bound(FRESH, make_peers(30)), bound(PLAN, make_peers(30, apart=0.03))
    assert fitting < 0.01 < alike < untested == absent < apart
    unlike = replace(PLAN, hardware_mismatch="canary pods run on A, control pods on B")
    assert bound(unlike, make_peers(30)) == untested, "stable pods say nothing of another node"


def test_rollbacks_do_not_wait_for_what_promotions_wait_for() -> None:
    """A much worse canary serves users meanwhile, so the whole uncertainty of a missing history is never assumed beside one."""
    supported, early = (bound(PLAN, make_peers(blocks), rolls_back=True) for blocks in (MIN_SUPPORTED_BLOCKS, MIN_TESTED_BLOCKS))
    assert supported == bound(PLAN, make_peers(MIN_SUPPORTED_BLOCKS))
    assert early == pytest.approx(EARLY_POD_EFFECT_FACTOR * supported)
    assert early == bound(PLAN, PeerDeviations(), rolls_back=True) < bound(PLAN, PeerDeviations())
    unlike_pods = replace(CALM, pod_effect_sd=0.02)
    wide = replace(PLAN, dispersions={**PLAN.dispersions, TOKENS_PER_STEP: unlike_pods})
    assert bound(wide, PeerDeviations(), rolls_back=True) == pytest.approx(bound(FRESH, PeerDeviations(), rolls_back=True))
    apart, unknown = (bound(FRESH, make_peers(blocks), rolls_back=True) for blocks in (MIN_TESTED_BLOCKS, 0))
    assert apart < unknown == bound(FRESH, PeerDeviations())
    unlike = replace(PLAN, hardware_mismatch="canary pods run on A, control pods on B")
    assert bound(unlike, make_peers(MIN_SUPPORTED_BLOCKS), rolls_back=True) == unknown


def test_history_without_degrees_of_freedom_has_an_unknown_pod_effect() -> None:
    history = replace(CALM, pod_effect_degrees_of_freedom=0.0)
    plan = replace(PLAN, dispersions={**PLAN.dispersions, TOKENS_PER_STEP: history})
    for blocks in (0, MIN_SUPPORTED_BLOCKS):
        assert bound(plan, make_peers(blocks), rolls_back=True) == bound(FRESH, PeerDeviations(), rolls_back=True)


@pytest.mark.parametrize(("plan", "apart"), [(FRESH, 0.0), (PLAN, 0.1)])
def test_without_a_history_that_fits_a_variance_is_assumed_for_rollbacks_only(plan: AnalysisPlan, apart: float) -> None:
    plans = with_tested_history(plan, make_peers(MIN_TESTED_BLOCKS, apart))
    promote, rollback = (each.dispersion_of(TOKENS_PER_STEP) for each in plans)
    unknown = replace(
        UNKNOWN_ROLLBACK_DISPERSION,
        pod_effect_sd=rollback.pod_effect_sd,
        pod_effect_degrees_of_freedom=rollback.pod_effect_degrees_of_freedom,
    )
    assert promote == UNCALIBRATED_DISPERSION
    assert rollback == unknown
    assert rollback.pod_effect_degrees_of_freedom == 2.0


@pytest.mark.parametrize(
    ("plan", "peers", "holds"),
    [(PLAN, PeerDeviations(), True), (PLAN, make_peers(5, apart=0.1), False), (FRESH, make_peers(30), False)],
)
def test_after_a_passed_analysis_the_history_holds_or_the_measured_pods_alone_are_compared(
    plan: AnalysisPlan, peers: PeerDeviations, holds: bool
) -> None:
    passed_plan, criteria = with_passed_analysis(plan, peers)
    assert passed_plan.dispersion_of(TOKENS_PER_STEP) == (CALM if holds else UNKNOWN_ROLLBACK_DISPERSION)
    changed = [criterion for criterion in criteria if criterion not in build_criteria(plan)]
    assert [criterion.name for criterion in changed] == ([] if holds else [TOKENS_PER_STEP])
    assert all(test.measured_pods_only for criterion in changed for test in criterion.rollback_tests)
    for criterion in criteria:
        if criterion.name != TOKENS_PER_STEP:
            assert passed_plan.dispersion_of(criterion.name) == plan.dispersion_of(criterion.name)


def test_other_criteria_keep_their_dispersion() -> None:
    for plan in with_tested_history(PLAN, make_peers(30, apart=0.03)):
        tested = plan.dispersions
        assert tested[TOKENS_PER_STEP].inflation == UNCALIBRATED_DISPERSION.inflation
        assert {name: dispersion for name, dispersion in tested.items() if name != TOKENS_PER_STEP} == {
            name: CALM for name in PLAN.dispersions if name != TOKENS_PER_STEP
        }
    assert with_tested_history(PLAN, make_peers(MIN_SUPPORTED_BLOCKS)) == (PLAN, PLAN)


def test_the_message_says_that_the_history_does_not_fit() -> None:
    _, verdict = run_blocks(20)
    assert "HistoryDoesNotFit" not in verdict.message
    state, _ = run_blocks(20)
    apart = replace(state, outcome="Continue", message="", peers=make_peers(30, apart=0.03))
    for evaluate in (evaluate_analysis, check_guardrails):
        assert "HistoryDoesNotFit: the stable pods differ more" in evaluate(apart, PLAN, 600.0)[1].message
    incomparable = replace(PLAN, drafts_not_comparable_reason="another target.")
    assert "HistoryDoesNotFit" not in evaluate_analysis(apart, incomparable, 600.0)[1].message
