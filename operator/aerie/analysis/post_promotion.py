"""Post-promotion monitoring: tests whether promoted pods give fewer tokens per step than at their revision's promotion.

The metric is tokens per step. It is followed also where the analysis did not decide by it, because its arms drafted different
numbers of tokens: the reference level is the canary's own. A drafter whose number of tokens depends on the load is not followed.

There is no second arm, so blocks are compared with a number. Pairs do not remove the effect of the traffic on acceptance here.
Nor does any number of blocks average it out, because it may last for hours. So a drop by less than the margin counts as none. A
significant drop is a suspicion and no verdict. It means that retained previous pods should get requests, so that both can be
compared in pairs as in an analysis (`verdict.check_guardrails`).

A drop to an acceptance length of 1.00 is no drift and needs no statistics: the drafter proposes noise, as it does once its
weights are lost. After `ABORT_ZERO_ACCEPTANCE_BLOCKS` consecutive such blocks `abort_message` reports it. Nor do engines that end
again and again need statistics of blocks (`crash_rate`).

The dispersion of blocks is known from those of the analysis. Their variance is a prior for the few blocks of the monitoring, and
the uncertainty of the level itself is added as a permanent difference. Not guaranteed: any rate of wrong suspicions where the
traffic changes. The cost of one is no more than that previous pods get requests for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aerie.analysis import messages
from aerie.analysis.criteria.criterion import ACCEPTANCE_LENGTH, TOKENS_PER_STEP, Criterion
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_criteria, crashes_alpha
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
"""Effective blocks at which the bound is tightest: monitoring has few."""
MAX_NOISE_ACCEPTED_PER_DRAFT = 0.005
"""Accepted tokens per draft up to which an acceptance length reads 1.00: a drafter that proposes noise is sometimes right."""
LOST_DRAFTER_WEIGHTS_MESSAGE = (
    "The drafter proposes noise, as it does once its weights are lost: after a sleep of level 2, vLLM's reload_weights loads the "
    "target's weights alone (vLLM issue 52479). Outputs stay correct, and clients get them more slowly. Restart the pods, which "
    "loads both models."
)
"""Explanation of an acceptance length of 1.00 where it was higher before."""
MIN_REGRESSION_BLOCKS = 3
"""Blocks from which on a regression may be reported."""


@dataclass(frozen=True, slots=True)
class ReferenceLevel:
    """Tokens per step that a revision was promoted with."""

    mean: float
    """Tokens per step."""
    mean_sd: float
    """Standard deviation of the mean."""
    block_variance: float
    """Variance of a block of one pod."""
    degrees_of_freedom: float
    """Degrees of freedom of `block_variance`."""


def compute_reference_level(state: AnalysisState, plan: AnalysisPlan) -> ReferenceLevel | None:
    """Return the canary's level in an analysis; None where tokens per step are not followed, or have too few blocks."""
    criterion = _find_followed_criterion(plan)
    if criterion is None or (pairs := _analysis_pairs(state, criterion, plan)) is None:
        return None
    inflation = plan.dispersion_of(criterion.name).inflation
    variance = max(0.0, pairs.canary_squares) / (pairs.count - 1)
    return ReferenceLevel(
        pairs.canary_mean,
        math.sqrt(variance * inflation / pairs.count),
        variance * plan.pod_counts[0],
        max(0.0, pairs.count / inflation - 1),
    )


def compute_reference_acceptance_length(state: AnalysisState, plan: AnalysisPlan) -> float | None:
    """Return the canary's acceptance length in an analysis, by vLLM's counters, as the status shows it for every arm.

    Return None where it is not counted, or has too few blocks.
    """
    criterion = next((criterion for criterion in build_criteria(plan) if criterion.name == ACCEPTANCE_LENGTH), None)
    pairs = None if criterion is None else _analysis_pairs(state, criterion, plan)
    return None if pairs is None else pairs.canary_mean


def add_promoted_block(state: AnalysisState, block: ClosedBlock, level: ReferenceLevel, plan: AnalysisPlan) -> AnalysisState:
    """Return the state with one more block of the promoted pods, which are the block's canary; it needs no control."""
    criterion, promoted = _find_followed_criterion(plan), block.canary
    pod_count = promoted.pod_count if promoted is not None else plan.pod_counts[0]
    state = replace(state, crashes=state.crashes.add_exposure(pod_count, 0, block.end_time - block.start_time))
    if promoted is None or criterion is None:
        return replace(state, dropped_block_count=state.dropped_block_count + 1)
    numerator, denominator = criterion.fraction(promoted.counts)
    if denominator <= 0:
        return state
    pairs = {
        criterion.name: state.paired_moments.get(criterion.name, PairedMoments()).add_pair(numerator / denominator, level.mean)
    }
    max_noise_tokens = min(MAX_NOISE_ACCEPTED_PER_DRAFT, (level.mean - 1) / 10) * promoted.counts.drafts
    has_zero_acceptance = (
        promoted.counts.drafts >= MIN_DRAFTS_FOR_ZERO_ACCEPTANCE
        and level.mean > 1
        and promoted.counts.accepted_tokens <= max_noise_tokens
    )
    return replace(
        state,
        paired_moments=pairs,
        block_count=state.block_count + 1,
        zero_acceptance_streak=state.zero_acceptance_streak + 1 if has_zero_acceptance else 0,
    )


def abort_message(state: AnalysisState, plan: AnalysisPlan) -> str:
    """Return the reason to revert the promotion immediately; empty where there is none.

    Reasons are that the promoted processes end, or that next to none of their drafted tokens is accepted any more.
    """
    if state.crashes.is_canary_worse(crashes_alpha(plan)):
        return messages.crashes_message(state.crashes)
    if state.zero_acceptance_streak < ABORT_ZERO_ACCEPTANCE_BLOCKS:
        return ""
    drop = f"Acceptance length of the promoted pods dropped to 1.00 in {state.zero_acceptance_streak} consecutive blocks."
    return f"{drop} {LOST_DRAFTER_WEIGHTS_MESSAGE}"


def regression_message(state: AnalysisState, level: ReferenceLevel, plan: AnalysisPlan, pod_count: int) -> str:
    """Return the message that this number of promoted pods is significantly below the level; empty while it is not."""
    criterion = _find_followed_criterion(plan)
    if criterion is None:
        return ""
    pairs, ratio = state.paired_moments.get(criterion.name, PairedMoments()), 1 - plan.margin
    parameters = build_regression_parameters(level, plan, pod_count)
    if pairs.count < MIN_REGRESSION_BLOCKS or mean_upper_bound(pairs, ratio, 0.0, parameters) >= 0:
        return ""
    upper_bound = pairs.canary_mean + half_width(pairs.count, pairs.score_variance(ratio), parameters)
    drop = 1 - pairs.canary_mean / level.mean
    message = (
        f"{criterion.title.capitalize()} {pairs.canary_mean:.2f} since the promotion, {drop:.0%} below the {level.mean:.2f} of "
        f"the analysis, significantly at most {upper_bound:.2f}, after {pairs.count} blocks."
    )
    return message.replace("%", " %")


def build_regression_parameters(level: ReferenceLevel, plan: AnalysisPlan, pod_count: int) -> SequenceParameters:
    """Return the parameters of the bound on the mean of the pods' blocks."""
    criterion = _find_followed_criterion(plan)
    inflation = plan.dispersion_of(criterion.name if criterion else "").inflation
    return SequenceParameters(
        REGRESSION_ALPHA,
        REGRESSION_TIGHTEST_BLOCK_COUNT,
        inflation,
        VariancePrior(level.block_variance / max(1, pod_count), level.degrees_of_freedom),
        level.mean_sd,
    )


def _find_followed_criterion(plan: AnalysisPlan) -> Criterion | None:
    """Return the criterion of tokens per step; None where the load decides them."""
    return next(
        (criterion for criterion in build_criteria(plan) if criterion.name == TOKENS_PER_STEP and plan.has_fixed_draft_length),
        None,
    )


def _analysis_pairs(state: AnalysisState, criterion: Criterion, plan: AnalysisPlan) -> PairedMoments | None:
    """Return the criterion's pairs of an analysis; None while there are too few blocks."""
    pairs = state.paired_moments.get(criterion.name, PairedMoments())
    return pairs if pairs.count >= max(2, plan.min_blocks) else None
