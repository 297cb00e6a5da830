"""Whether promoted pods give fewer tokens per step than when their revision was accepted: a fall below that level.

What is followed are tokens per step, also where the analysis was not judged by them because its arms drafted unlike numbers of
tokens: the level is the canary's own. A drafter whose numbers of tokens go with the load is not followed.

There is no arm beside them to compare with: blocks are compared with a number. What the traffic itself does to acceptance is not
taken off by pairs then, and no count of blocks averages it out, because it may last for hours. So a fall by less than the margin
is none, and a certain one is a suspicion and no verdict: it says that old pods should get requests, and be compared with in pairs
as ever (`judgement.watch`).

A fall to an acceptance length of 1.00 is no drift and needs no statistics: the drafter proposes noise, as it does once its
weights are lost, and after `SILENT` such blocks in a row that is said (`stop`). Nor do engines that end again and
again (`crashes`).

How blocks scatter is known from those of the analysis: their variance is a prior for the few blocks of a watch, and how uncertain
the level itself is joins as a lasting difference. Not guaranteed: any rate of wrong suspicions where the traffic changes; one
costs no more than that old pods get requests for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aerie.analysis import messages
from aerie.analysis.criteria import ACCEPTANCE_LENGTH, TOKENS_PER_STEP, AnalysisPlan, Criterion, build_criteria, crashes_alpha
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.state import MIN_DRAFTS_FOR_ZERO_ACCEPTANCE, AnalysisState
from aerie.analysis.statistics.confidence_sequence import (
    PairedMoments,
    SequenceParameters,
    VariancePrior,
    half_width,
    mean_upper_bound,
)
from aerie.analysis.verdict import ABORT_ZERO_ACCEPTANCE_BLOCKS

REGRESSION_ALPHA = 0.05
REGRESSION_TIGHTEST_BLOCK_COUNT = 5.0
"""Effective blocks at which the bound is tightest: a watch has few."""
MAX_NOISE_ACCEPTED_PER_DRAFT = 0.005
"""Accepted tokens per draft up to which an acceptance length reads 1.00: a drafter that proposes noise is right now and then."""
LOST_DRAFTER_WEIGHTS_MESSAGE = (
    "Its drafter proposes noise. So it does when its weights are lost: after a sleep of level 2, vLLM's reload_weights loads the "
    "target's weights alone (vLLM issue 52479). Answers stay right and come slower; restart the pods, which loads both."
)
"""What an acceptance length of 1.00 means where it was higher before."""
MIN_REGRESSION_BLOCKS = 3
"""Blocks before which nothing is said."""


@dataclass(frozen=True, slots=True)
class ReferenceLevel:
    """The tokens per step that a revision was accepted with."""

    mean: float
    mean_sd: float
    """Standard deviation of the mean."""
    block_variance: float
    """Of a block of one pod."""
    degrees_of_freedom: float
    """Degrees of freedom of the variance."""


def compute_reference_level(state: AnalysisState, plan: AnalysisPlan) -> ReferenceLevel | None:
    """The canary's level in an analysis; None where neither decides, or it has too few blocks."""
    criterion = _find_followed_criterion(plan)
    if criterion is None or (pairs := _analysis_pairs(state, criterion, plan)) is None:
        return None
    inflation = plan.dispersion_of(criterion.name).inflation
    variance = max(0.0, pairs.canary_squares) / (pairs.count - 1)
    return ReferenceLevel(
        pairs.canary,
        math.sqrt(variance * inflation / pairs.count),
        variance * plan.pods[0],
        max(0.0, pairs.count / inflation - 1),
    )


def compute_reference_acceptance_length(state: AnalysisState, plan: AnalysisPlan) -> float | None:
    """The canary's acceptance length in an analysis, by vLLM's counters, as the status shows it of every arm; None as above."""
    row = next((one for one in build_criteria(plan) if one.name == ACCEPTANCE_LENGTH), None)
    pairs = None if row is None else _analysis_pairs(state, row, plan)
    return None if pairs is None else pairs.canary


def add_promoted_block(state: AnalysisState, block: ClosedBlock, level: ReferenceLevel, plan: AnalysisPlan) -> AnalysisState:
    """The state with one more block of the promoted pods, the block's canary; that it has no control is no fault here."""
    criterion, side = _find_followed_criterion(plan), block.canary
    followed = side.pod_count if side is not None else plan.pods[0]
    state = replace(state, crashes=state.crashes.add_exposure(followed, 0, block.end_time - block.start_time))
    if side is None or criterion is None:
        return replace(state, dropped=state.dropped + 1)
    part, whole = criterion.fraction(side.counts)
    if whole <= 0:
        return state
    pairs = {criterion.name: state.pairs.get(criterion.name, PairedMoments()).add_pair(part / whole, level.mean)}
    most = min(MAX_NOISE_ACCEPTED_PER_DRAFT, (level.mean - 1) / 10) * side.counts.drafts
    silent = side.counts.drafts >= MIN_DRAFTS_FOR_ZERO_ACCEPTANCE and level.mean > 1 and side.counts.accepted <= most
    return replace(state, pairs=pairs, blocks=state.blocks + 1, silent=state.silent + 1 if silent else 0)


def abort_message(state: AnalysisState, plan: AnalysisPlan) -> str:
    """Why the promotion is taken back at once: its processes end, or next to none of its drafted tokens is accepted any more.
    Empty where neither."""
    if state.crashes.is_canary_worse(crashes_alpha(plan)):
        return messages.crashes_message(state.crashes)
    if state.silent < ABORT_ZERO_ACCEPTANCE_BLOCKS:
        return ""
    return f"Acceptance length of the promoted pods has fallen to 1.00, in {state.silent} blocks in a row. {LOST_DRAFTER_WEIGHTS_MESSAGE}"


def regression_message(state: AnalysisState, level: ReferenceLevel, plan: AnalysisPlan, pod_count: int) -> str:
    """That so many promoted pods are certainly below the level; empty while they are not."""
    criterion = _find_followed_criterion(plan)
    if criterion is None:
        return ""
    pairs, ratio = state.pairs.get(criterion.name, PairedMoments()), 1 - plan.margin
    tuned = build_regression_parameters(level, plan, pod_count)
    if pairs.count < MIN_REGRESSION_BLOCKS or mean_upper_bound(pairs, ratio, 0.0, tuned) >= 0:
        return ""
    most = pairs.canary + half_width(pairs.count, pairs.score_variance(ratio), tuned)
    said = (
        f"{criterion.title.capitalize()} is {pairs.canary:.2f} since the promotion, {1 - pairs.canary / level.mean:.0%} below "
        f"the {level.mean:.2f} of the acceptance and certainly at most {most:.2f}, after {pairs.count} blocks."
    )
    return said.replace("%", " %")


def build_regression_parameters(level: ReferenceLevel, plan: AnalysisPlan, pod_count: int) -> SequenceParameters:
    """Of the bound on the mean of the pods' blocks."""
    criterion = _find_followed_criterion(plan)
    inflation = plan.dispersion_of(criterion.name if criterion else "").inflation
    return SequenceParameters(
        REGRESSION_ALPHA,
        REGRESSION_TIGHTEST_BLOCK_COUNT,
        inflation,
        VariancePrior(level.block_variance / max(1, pod_count), level.degrees_of_freedom),
        level.mean_sd,
    )


def _find_followed_criterion(terms: AnalysisPlan) -> Criterion | None:
    """That of tokens per step, where the load does not decide them."""
    return next((one for one in build_criteria(terms) if one.name == TOKENS_PER_STEP and terms.steady), None)


def _analysis_pairs(state: AnalysisState, criterion: Criterion, terms: AnalysisPlan) -> PairedMoments | None:
    """What an analysis counted of it; None while that is too little."""
    pairs = state.pairs.get(criterion.name, PairedMoments())
    return pairs if pairs.count >= max(2, terms.min_blocks) else None
