"""The benchmark of decisions uses the operator's rule, on counters like an engine's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP
from aerie.analysis.criteria.history_fit import assess_history, with_passed_analysis, with_tested_history
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.measurement.blocks import ArmName, BlockRule, ClosedBlock, OpenBlock, PodSample, add_scrapes, start_block
from aerie.analysis.measurement.counts import CounterSnapshot, EngineCounts
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, Dispersion
from aerie.analysis.verdict import is_mean_test_met
from aerie_lab.engine.fleet import SimulatedFleet, SimulatedPod
from aerie_lab.engine.load_generation.workload import LengthDistribution, PoissonArrivals, TrafficClass
from aerie_lab.engine.performance_model.acceptance import Acceptance
from aerie_lab.engine.performance_model.request import EngineSettings
from aerie_lab.engine.performance_model.step import StepTimeFormula
from benchmarks import _canary_model as model
from benchmarks import _canary_rules as rules
from benchmarks import canary
from benchmarks._canary_blocks import close
from benchmarks._canary_scenarios import EFFECTS, RULES, SCENARIOS, run

pytestmark = pytest.mark.slow

HOURS = 2 * 3600.0


def close_with_operator(counters: model.Counters, index: int, canaries: int, controls: int, rule: BlockRule) -> list[ClosedBlock]:
    """Close the blocks of one run with the operator's own function."""
    pods, compared = counters.drafts.shape[1], canaries + controls
    arms: list[ArmName] = ["canary" if pod < canaries else "control" if pod < compared else "stable" for pod in range(pods)]
    closed_blocks: list[ClosedBlock] = []
    block: OpenBlock | None = None
    for scrape in range(counters.drafts.shape[2]):
        samples = {}
        for pod, arm in enumerate(arms):
            position = (index, pod, scrape)
            counts = EngineCounts(
                drafts=float(counters.drafts[position]),
                accepted_tokens=float(counters.accepted[position]),
                decode_tokens=float(counters.drafts[position] + counters.accepted[position]),
                request_steps=float(counters.drafts[position]),
                finished_requests=float(counters.finished[position]),
                first_tokens=float(counters.begun[position]),
            )
            started = float(counters.restarts[position])
            samples[str(pod)] = PodSample(arm, CounterSnapshot(counts, None, started, 1) if counters.scraped[position] else None)
        now = scrape * model.SCRAPE
        if block is None:
            block = start_block(now, samples, rule)
            continue
        block, closed = add_scrapes(block, now, samples, rule)
        if closed:
            closed_blocks.append(closed)
    return closed_blocks


@pytest.mark.parametrize(
    ("traffic", "canaries", "controls", "pods", "hardware_mismatch"),
    [
        (model.Traffic(mix_pod=0.7, memory=3600.0), 1, 3, 4, ""),
        (model.Traffic(rate=0.2), 1, 1, 4, ""),
        (model.Traffic(lost=0.3, resets_per_hour=2.0), 2, 2, 4, ""),
        (model.Traffic(), 1, 1, 2, "other nodes"),
    ],
    ids=["plain", "low", "disturbed", "no stable pods"],
)
def test_blocks_and_verdicts_are_the_operators(
    traffic: model.Traffic, canaries: int, controls: int, pods: int, hardware_mismatch: str
) -> None:
    runs, rule, better = 4, BlockRule(), 0.02
    counters = model.simulate(traffic, runs, pods, HOURS, np.random.default_rng(5))
    blocks = close(counters, canaries, controls, rule)
    plan = AnalysisPlan(pod_counts=(canaries, controls), hardware_mismatch=hardware_mismatch)
    dispersions = [
        UNCALIBRATED_DISPERSION,
        *(Dispersion(1.0 + 0.4 * index, 0.002, 20.0, 0.002 * index, 2.0 * index, 24) for index in range(1, runs)),
    ]
    by_direction = {
        rolls_back: rules.sequence_parameters(blocks.peers, dispersions, plan, rolls_back=rolls_back)
        for rolls_back in (False, True)
    }
    criterion = next(row for row in build_criteria(plan) if row.name == TOKENS_PER_STEP)
    tests = [*criterion.rollback_tests, *criterion.promote_tests]
    vectorised = [
        rules.significant_blocks(test, blocks.canary * (1 + better), blocks, by_direction[test.rolls_back], plan)
        for test in tests
    ]
    passed_parameters = rules.passed_parameters(by_direction[True].misfits, dispersions, plan)
    (rollback_test,) = criterion.rollback_tests
    after_passing = rules.significant_blocks(rollback_test, blocks.canary * (1 + better), blocks, passed_parameters, plan)
    for index in range(runs):
        run_plan = replace(plan, dispersions={TOKENS_PER_STEP: dispersions[index]})
        state, column, answers, passed_answers = AnalysisState(0.0), 0, [], []
        for block in close_with_operator(counters, index, canaries, controls, rule):
            if block.canary and block.control:
                assert blocks.ended[index, column] == block.end_time
                assert blocks.dropped[index, column] == state.dropped_block_count
                lengths = [1 + side.counts.accepted_tokens / side.counts.drafts for side in (block.canary, block.control)]
                assert [blocks.canary[index, column], blocks.control[index, column]] == pytest.approx(lengths, rel=1e-9)
                sides = [(side.arrived_requests, side.pod_count) for side in (block.canary, block.control)]
                counts = [
                    getattr(blocks, f"{arm}_{what}")[index, column] for arm in ("canary", "control") for what in ("begun", "pods")
                ]
                assert counts == [number for side in sides for number in side]
                column += 1
            state = add_block(state, _improve(block, better), run_plan)
            if block.canary and block.control:
                assert by_direction[False].misfits[index, column - 1] == (assess_history(run_plan, state.peers) == "DoesNotFit")
                plans, pairs = with_tested_history(run_plan, state.peers), state.paired_moments[TOKENS_PER_STEP]
                answers.append([is_mean_test_met(test, criterion, pairs, plans.of(test)) for test in tests])
                passed_plan, passed_criteria = with_passed_analysis(run_plan, state.peers)
                passed = next(row for row in passed_criteria if row.name == TOKENS_PER_STEP)
                passed_answers.append(is_mean_test_met(passed.rollback_tests[0], passed, pairs, passed_plan))
        assert np.isnan(blocks.canary[index, column:]).all()
        assert column > 20
        assert passed_answers == after_passing[index, :column].tolist()
        assert answers == np.stack([answers_of_test[index, :column] for answers_of_test in vectorised], axis=1).tolist()


def _improve(block: ClosedBlock, better: float) -> ClosedBlock:
    """Return the block with the canary's acceptance length increased by the fraction `better`."""
    if block.canary is None:
        return block
    counts = block.canary.counts
    tokens = (1 + better) * counts.decode_tokens
    changed = EngineCounts(drafts=counts.drafts, decode_tokens=tokens, request_steps=counts.request_steps)
    side = type(block.canary)(block.canary.pod_count, changed, block.canary.mean_load)
    return replace(block, canary=side)


def test_model_counters_match_the_simulator() -> None:
    """Requests of a class are alike, as in the simulator: mean, traffic and dispersion of blocks agree."""
    pods, seconds, per_block = 4, 1560.0, 4
    kinds = [
        TrafficClass(
            str(alpha), Acceptance((alpha,)), LengthDistribution(10), LengthDistribution(median, model.SPREAD, 1, 100_000), share
        )
        for alpha, median, share in zip(model.MEANS, model.MEDIANS, (1.0, 2.0), strict=True)
    ]
    settings = EngineSettings(num_speculative_tokens=model.K, max_model_len=300_000)
    engines = [
        SimulatedPod(f"pod-{index}", settings, StepTimeFormula(base_seconds=1 / model.SPEED, seconds_per_token=0.0))
        for index in range(pods)
    ]
    fleet = SimulatedFleet(engines, kinds, PoissonArrivals(float(pods)), routing="random", seed=3)
    totals_by_pod: dict[str, list[tuple[float, float]]] = {pod.name: [(0.0, 0.0)] for pod in engines}
    for scrape in fleet.run(seconds):
        if scrape.counters is not None:
            now = (scrape.counters.spec_decode_num_drafts, scrape.counters.spec_decode_num_accepted_tokens)
            totals_by_pod[scrape.pod].append((float(now[0]), float(now[1])))
    scrapes = min(len(totals) for totals in totals_by_pod.values()) // per_block * per_block
    cumulated = np.array([totals[:scrapes] for totals in totals_by_pod.values()])[:, ::per_block]
    simulator_windows = np.diff(cumulated, axis=1)
    traffic = model.Traffic(swing=0.0, mix_day=0.0, mix_shared=0.0, mix_pod=0.0, kappa=1e5)
    counters = model.simulate(traffic, 20, pods, seconds, np.random.default_rng(7))
    model_windows = np.diff(np.stack([counters.drafts, counters.accepted], axis=-1)[:, :, ::per_block], axis=2)

    def length(windows: model.Floats) -> float:
        return float(1 + windows[..., 1].sum() / windows[..., 0].sum())

    def spread(windows: model.Floats) -> float:
        arms = [1 + arm[..., 1].sum(axis=0) / arm[..., 0].sum(axis=0) for arm in (windows[:1], windows[1:])]
        return float(np.std(arms[0] / arms[1]))

    assert length(simulator_windows) == pytest.approx(length(model_windows), rel=0.02)
    assert simulator_windows[..., 0].mean() == pytest.approx(model_windows[..., 0].mean(), rel=0.08)
    assert spread(simulator_windows) == pytest.approx(np.mean([spread(run) for run in model_windows]), rel=0.3)


def test_requests_have_tokens_and_drafts_follow() -> None:
    """Requests that accept less make more of the drafts: the acceptance length is the harmonic mean."""
    traffic = model.Traffic(rate=5.0, swing=0.0, mix_day=0.0, mix_shared=0.0, mix_pod=0.0, kappa=2.5)
    counters = model.simulate(traffic, 10, 2, HOURS, np.random.default_rng(9))
    drafts, accepted, finished = (float(each[..., -1].sum()) for each in (counters.drafts, counters.accepted, counters.finished))
    first = 1 / (1 + np.exp(-model.FIRST_CLASS))
    weights = np.array([first, 1 - first]) * model.MEDIANS
    inverse = (1 / (1 + model._classes(2.5)[0])).mean(axis=1)
    assert 1 + accepted / drafts == pytest.approx(weights.sum() / (weights @ inverse), rel=0.01)
    mean = model.MEDIANS[0] * np.exp(model.SPREAD**2 / 2)
    assert (drafts + accepted) / finished == pytest.approx(mean, rel=0.02)


def test_a_better_drafter_takes_fewer_drafts_for_the_same_tokens() -> None:
    traffic, better = model.Traffic(), np.full((3, 2, 1), 1.05)
    before = model.simulate(traffic, 3, 2, HOURS, np.random.default_rng(4))
    after = model.simulate(traffic, 3, 2, HOURS, np.random.default_rng(4), better)
    assert after.drafts + after.accepted == pytest.approx(before.drafts + before.accepted)
    assert after.drafts == pytest.approx(before.drafts / 1.05)


def test_argo_counts_measurements_of_every_outcome() -> None:
    """`count` ends a metric whatever the outcomes; only more failures than the limit, within these, abort."""
    good, bad = 1.0, 0.5
    checks = [
        [good] * 7 + [bad] * 3 + [bad] * 5,  # three failures of ten: what comes later is not measured
        [bad] * 3 + [good] * 12,
        [good] * 6 + [bad] * 4 + [good] * 5,
        [bad] * 4 + [good] * 11,
        [np.nan] * 15,
    ]
    decisions = rules.argo(np.array(checks), np.ones((5, 15)))
    assert decisions.promoted.tolist() == [True, True, False, False, False]
    assert decisions.promote[:2].tolist() == [10, 10]
    assert decisions.rollback[2:].tolist() == [10, 4, 4]
    example_decisions = rules.argo_example(np.array(checks), np.ones((5, 15)))
    assert (example_decisions.promoted.tolist(), example_decisions.promote[0]) == ([True, True, True, False, False], 5)
    assert rules.by_argo(np.array(checks), np.ones((5, 15)), count=10, failure_limit=0).promoted.tolist() == [False] * 5


def test_flagger_counts_passed_checks_and_never_forgets_failed_ones() -> None:
    checks = np.array([[0.5] * 4 + [1.0] * 10, [1.0, 0.5] * 7, [np.nan] * 14])
    decisions = rules.flagger(checks, np.ones((3, 14)))
    assert (decisions.promote[0], decisions.rollback[1], decisions.rollback[2]) == (14, 10, 5)
    assert rules.flagger_example(checks, np.ones((3, 14))).promote[:2].tolist() == [9, 9]


def test_the_pages_are_written_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = run("base", 20)
    monkeypatch.setattr(canary, "_cells_by_scenario", dict.fromkeys(SCENARIOS, cells))
    canary.document(tmp_path)
    page, scenarios_page = ((tmp_path / f"{name}.md").read_text() for name in ("canary-decisions", "canary-decisions-scenarios"))
    # One row is in the table of settings, and one in that of the base scenario.
    assert page.count("| Argo Rollouts, its docs' five |") == 2
    assert scenarios_page.count("| Argo Rollouts, its docs' five |") == len(SCENARIOS) - 1
    for scenario in SCENARIOS.values():
        assert f"\n| {scenario.title} | " in page
        assert (f"### {scenario.title}\n" in page) != (f"### {scenario.title}\n" in scenarios_page)
    assert "{" not in page + scenarios_page


def test_a_small_run_has_plausible_cells() -> None:
    cells = run("base", 20)
    assert set(cells) == {(rule, effect) for rule in RULES for effect in EFFECTS}
    assert cells["ours", 0.20]["promote_pct"] == 100
    assert cells["ours", 0.0]["latency_blocks_pct"] > 98
    assert cells["ours", 0.0]["unequal_latency_blocks_pct"] < 10
    assert cells["ours", -0.03]["promote_pct"] < cells["flagger", 0.0]["rollback_pct"]


def test_selected_cells_are_named_and_make_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELLS", "base,steady")
    with pytest.raises(SystemExit, match="CELLS has no scenario steady: use some of base, "):
        canary.measure()
    monkeypatch.setattr(canary, "_cells_by_scenario", {"base": {}})
    with pytest.raises(SystemExit, match=r"the page needs all scenarios, and .*sticky.* did not run: leave CELLS out"):
        canary.document(tmp_path)


def test_canary_that_has_passed_is_followed_from_the_next_block_on() -> None:
    values = np.arange(1.0, 7.0)[None, :].repeat(3, axis=0)
    moved = rules._shift_blocks(values, np.array([1, 5, 6]))
    assert moved[0, :5].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert [np.isnan(row).sum() for row in moved] == [1, 5, 6]
