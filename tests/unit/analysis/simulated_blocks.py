"""Counts of an arm in a block, and analyses of many such blocks.

Guarantees: all counts follow from the seed and from the changes that a test names.
Not guaranteed: the dispersion of real traffic. The plan's dispersions are those of calm traffic.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from aerie.analysis.criteria.history_fit import MIN_COMPARED_BLOCKS
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.state import AnalysisState, add_block
from aerie.analysis.statistics.calibration import Dispersion
from aerie.analysis.statistics.peer_dispersion import PeerDeviations
from aerie.analysis.verdict import Verdict, evaluate_analysis

CALM = Dispersion(
    inflation=1.0, variance=0.0001, degrees_of_freedom=20.0, pod_effect_sd=0.0, pod_effect_degrees_of_freedom=7.0, batch_count=24
)
NAMES = [criterion.name for criterion in build_criteria(AnalysisPlan())]
PLAN = AnalysisPlan(pod_counts=(1, 1), dispersions=dict.fromkeys(NAMES, CALM))
ADAPTIVE = replace(PLAN, drafts_not_comparable_reason="both arms verify adaptively, ....", both_adaptive=True)


def side(noise: np.random.Generator | None = None, **change: float) -> ArmCounts:
    """Make the counts of an arm in one block; `change` multiplies a count, or sets it if it is 0.

    Requests get the tokens that the counters count as accepted, unless `request_steps` is given.
    """
    base = EngineCounts(
        drafts=40_000.0,
        accepted_tokens=60_000.0,
        draft_tokens=120_000.0,
        decode_tokens=100_000.0,
        decode_seconds=2_000.0,
        output_tokens=100_240.0,
        finished_requests=240.0,
        truncated_requests=60.0,
        first_tokens=240.0,
        first_token_seconds=48.0,
        timed_requests=240.0,
        slow_first_token_requests=6.0,
        slow_output_requests=6.0,
    )
    load = change.pop("load", 5.0)
    names = {name: getattr(base, name) * factor if getattr(base, name) else factor for name, factor in change.items()}
    if noise:
        names["accepted_tokens"] = names.get("accepted_tokens", base.accepted_tokens) * float(noise.normal(1, 0.01))
        names["decode_seconds"] = names.get("decode_seconds", base.decode_seconds) * float(noise.normal(1, 0.01))
    counts = replace(base, **names)
    steps = (
        40_000.0 * change["request_steps"]
        if "request_steps" in change
        else 100_000.0 * counts.drafts / (counts.drafts + counts.accepted_tokens)
    )
    return ArmCounts(1, replace(counts, request_steps=steps * counts.decode_tokens / 100_000.0), load)


def stable_pods(index: int) -> ArmCounts:
    """Make the counts of three stable pods in this block: they differ by half a percent, and are alike on average."""
    swings = [((index + pod) % 3 - 1) / 200 for pod in range(3)]
    pods = {f"stable-{pod}": side(None, request_steps=1 + swing).counts for pod, swing in enumerate(swings)}
    return ArmCounts(3, sum(pods.values(), EngineCounts()), 5.0, pods)


def compare_stable_pods(blocks: int) -> PeerDeviations:
    """Return the deviations of the stable pods after so many blocks: as calm traffic has them."""
    peers = PeerDeviations()
    for index in range(blocks):
        pods = stable_pods(index).counts_by_pod.items()
        peers = peers.add_block({name: counts.decode_tokens / counts.request_steps for name, counts in pods})
    return peers


NEW_STATE = AnalysisState(0.0, peers=compare_stable_pods(MIN_COMPARED_BLOCKS))
"""State of an analysis that begins, with stable pods that were compared long enough to show that the calibration fits."""


def run_blocks(blocks: int, plan: AnalysisPlan = PLAN, seed: int = 1, **change: float) -> tuple[AnalysisState, Verdict]:
    """Return the state and the verdict after `blocks` blocks, or at the first one that ends the analysis."""
    noise, state, verdict = np.random.default_rng(seed), NEW_STATE, None
    for index in range(1, blocks + 1):
        block = ClosedBlock(120.0 * (index - 1), 120.0 * index, side(noise, **change), side(noise), stable=stable_pods(index))
        state = add_block(state, block, plan)
        state, verdict = evaluate_analysis(state, plan, 120.0 * index)
        state = AnalysisState.from_dict(json.loads(json.dumps(state.to_dict())))  # as after a crash
        if verdict.outcome != "Continue":
            break
    assert verdict is not None
    return state, verdict
