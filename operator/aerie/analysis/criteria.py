"""What canary and control are compared in, and how certain a verdict has to be: one table, fixed when an analysis begins.

| criterion              | rolls back when certainly           | alpha  | is accepted when certainly          | load | pods  |
|------------------------|-------------------------------------|--------|-------------------------------------|------|-------|
| tokens per step        | below the control's                 | 0.0125 | above control * (1 - margin)        |      | 0.3 % |
| time per output token  | mean above control * 1.02           | 0.005  | below control * 1.025 as measured,  | yes  | 1.75 %|
|                        |                                     |        | and * 1.04 whatever the pods are    |      |       |
| ... objective, if any  | share beyond it more than control's | 0.0025 | share below 1 - percentile, or      | yes  |       |
|                        | + 0.25 pp (the mean then 0.0025)    |        | below 1.1 * the control's           |      |       |
| time to first token    | mean above control * 1.10           | 0.005  | mean below control * 1.25           | yes  | 1.75 %|
| ... objective, if any  | as above                            | 0.0025 | as above                            | yes  |       |
| failed requests        | more per request (e-value)          | 0.003  | share below 2 * control + 0.5 pp    |      |       |
| ended processes        | more per pod-hour (`crashes`)       | 0.002  | not suspicious                      |      |       |
| requests given up      | share above control + 5 pp          | 0.001  | share below 2 * control + 5 pp      |      |       |
| output length          | beyond control * 0.9 to 1.1         | 0.001  | -                                   |      |       |
| requests cut short     | share off by more than 5 pp         | 0.001  | -                                   |      |       |
| preemptions            | 2 * control + 0.05 per request      | 0.001  | -                                   | yes  |       |
| greedy answers         | another more often (`lossless`)     | 0.001  | -                                   |      |       |

The alphas of rolling back add up to 0.035, because any of them is enough; they are spent by the deadline. Being accepted needs
no split, because all of them are needed: each at 0.05. "Load": counted only in blocks with like loads (`demand`), and means of
it as at the control's output (`elasticity`); nothing is accepted while many blocks, or the latest, are left out for that
(`judgement`), because who is overloaded is left out too. "Pods": by how much two pods of one GPU model are taken to differ for
good while no history tells (standard deviation, worth 3 degrees of freedom); with one, what its pods told and 1 degree of
freedom at 1 %. Of tokens per step it is only beside what a history tells, with 2 degrees: drafter and target make them,
whatever the GPU. In time, accepting keeps clear of 99 % of what such pods differ by, and rolling back of 99.75 %. Shares are
accepted by exact bounds of counts (`shares`), because where nothing has happened yet a sample variance is 0. A drafter must not
change outputs at all, so output length, requests cut short and greedy answers are alarms, not goals.

Tokens per step are a means; what users feel is the time per output token. So the two are judged together. While the time is
certainly below the control's (alpha 0.025), a drafter is not rolled back for its tokens per step, and need not be as good in
them to be accepted: a lighter drafter may get fewer tokens a step and be faster. And no gain in tokens per step accepts a canary
whose time per output token is not certainly good enough. An objective is a guard more: the mean rolls back as ever. Accepting
asks for certainty of the objective then, and of the mean for no more than that it is not probably worse: its estimate below the
limit. Where requests are few and uneven, the one is certain hours before the other.

A margin is for what cannot be told apart, and no allowance: a canary that is certainly below its control goes back though it is
within the margin, unless it is faster.

Tokens per step are what requests got after their first token, by the steps in which they got it ((generated - first tokens) /
request steps, as `windows.tokens_per_step`). Acceptance length, 1 + accepted / drafts, is shown and not judged: vLLM books
drafted tokens as accepted behind the end of an answer too, which no request gets (vllm issue 56101: v1/core/sched/scheduler.py
counts before it trims, in 0.32.0 and 0.33.0). That adds some tenths of a percent to 4 %, the more the shorter the answers and
the better the drafter, so it flatters the better arm. Dummy drafts, which acceptance length counts, are in no request step,
and neither are chunks of a prompt. A step that computes a preempted request anew counts in both, with one token.

| where                          | in place of the first row                                                                |
|--------------------------------|------------------------------------------------------------------------------------------|
| the arms draft unlike K        | time per output token, with its alpha: a text fixes its tokens, not its drafts, so that  |
|                                | drafts of a larger K begin at harder places, and one drafter shows 2 to 6 % less there   |
| both verify adaptively, same K | time per output token, with its alpha; and tokens per step roll back when certainly below|
|                                | control * 0.9, alpha 0.005, counted while as many requests are in flight on both        |
| neither may be compared        | time per output token, with its alpha                                                    |

Adaptive verification trims drafts, the more the more requests are in flight, and books them as not accepted, so acceptance
follows the load there: within the fifth that loads may differ by, by some percent. Where the arms run on unlike hardware, the
rows with "load" are left out, because the GPU may decide them; where tokens per step may not be compared then, nothing is
accepted.

Trials of a speculation setting (goal Faster) are about time, with these rows in place of the first three:

| time per output token  | mean above control * 1.02           | 0.0175 | mean below the control's            | yes  |       |
| ... objective, if any  | as above                            | 0.0025 | as above                            | yes  |       |
| tokens per busy second | below control * 0.9                 | 0.0075 | -                                   | yes  |       |

One that is only to be measured (goal Explore) is never accepted, and may be slower: it is rolled back for a mean above
control * 1.5, the share and all other rows; tokens per busy second are counted, because its goal may become Faster. What a trial
has to show is a difference of its own pods, so the prior on pods is not held against it: trials repeat, and a setting is chosen
anew every few hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, Dispersion, PodEffect
from aerie.analysis.statistics.confidence_sequence import PairedMoments, SequenceParameters, alpha_with_deadline
from aerie.analysis.statistics.load_adjustment import LoadCurve

TOKENS_PER_STEP = "TokensPerStep"
ACCEPTANCE_LENGTH = "AcceptanceLength"
TIME_PER_OUTPUT_TOKEN = "TimePerOutputToken"
SLOW_TIME_PER_OUTPUT_TOKEN = "SlowTimePerOutputToken"
TOKENS_PER_BUSY_SECOND = "TokensPerBusySecond"
TIME_TO_FIRST_TOKEN = "TimeToFirstToken"
SLOW_TIME_TO_FIRST_TOKEN = "SlowTimeToFirstToken"
FAILED_REQUESTS = "FailedRequests"
OUTPUT_LENGTH = "OutputLength"
TRUNCATED_REQUESTS = "CutRequests"
PREEMPTIONS = "Preemptions"
ABANDONED_REQUESTS = "GivenUpRequests"

PROMOTE_ALPHA = 0.05
FASTER_ALPHA = 0.025
"""Of being certainly faster, which stands in for tokens per step: half of what accepts, because there are two ways then."""
FAILED_REQUESTS_ALPHA = 0.003
CRASHES_ALPHA = 0.002
MAX_TIME_RATIO_MEASURED_PODS, MAX_TIME_RATIO_ANY_PODS = 1.025, 1.04
"""Up to what of the control's time per output token a canary is accepted: as these pods have it, and for a fleet of others."""
UNCALIBRATED_POD_EFFECT, CALIBRATED_POD_EFFECT = PodEffect(0.0175, 3.0), PodEffect(0.01, 1.0)
"""By how much the times of two pods of one GPU model differ for good (clocks, power caps, cooling): while no history tells, and
beside one, so that two or three pods that happen to be alike do not prove that all are. An assumption: 2 to 5 % are reported."""
TOKENS_PER_STEP_POD_EFFECT_SHARE, PROMOTE_POD_EFFECT_SHARE, ROLLBACK_POD_EFFECT_SHARE = 0.975, 0.99, 0.9975
"""Of what pods differ by for good, the share that a bound keeps clear of: of tokens per step, and of time."""
CALIBRATED_TOKENS_PER_STEP_POD_EFFECT = PodEffect(0.003, 2.0)
"""The same of tokens per step, beside a history."""
PROMOTE_TIGHTEST_BLOCK_COUNT, ROLLBACK_TIGHTEST_BLOCK_COUNT, TRIAL_TIGHTEST_BLOCK_COUNT = 20.0, 30.0, 20.0
"""Effective blocks at which bounds are tightest. A canary that is much better or much worse is found early with each; they are
for those that are a little better, a little worse, and for settings that are slower by a tenth."""


DEFAULT_SHARE_OVER_OBJECTIVE = 0.05
"""Share of the requests that the objective's default percentile leaves."""

AnalysisGoal = Literal["NonInferior", "Superior", "Faster", "Explore"]
"""What a canary has to show: the spec's NonInferior and Superior; of a trial of a setting Faster, or for Explore nothing."""


@dataclass(frozen=True, slots=True)
class AnalysisPlan:
    """All that an analysis is judged by; fixed before its first block."""

    goal: AnalysisGoal = "NonInferior"
    margin: float = 0.02
    failure_margin: float = 0.005
    min_blocks: int = 5
    soak: float = 1800.0
    """Seconds under analysis before it may be accepted."""
    deadline: float = 14400.0
    """Seconds under analysis until it is inconclusive."""
    block: float = 120.0
    """Seconds of a block."""
    pods: tuple[int, int] = (1, 1)
    """Pods of canary and control."""
    kept: SampleProjection = field(default_factory=lambda: SampleProjection(positions=1))
    incomparable: str = ""
    """Why tokens per step do not decide; empty where they do."""
    steady: bool = True
    """Whether the canary drafts the same number of tokens at any load, so that its tokens per step can be shown and followed even
    where they do not decide."""
    beyond: float = DEFAULT_SHARE_OVER_OBJECTIVE
    """Share of the requests that may be beyond an objective: what its percentile leaves."""
    adaptive: bool = False
    """Whether both verify adaptively up to the same number of tokens."""
    unlike: str = ""
    """On what unlike hardware the arms run, as a clause: nothing that takes time is compared then. Empty where it is alike, or
    nothing tells. Alone of all terms it changes during an analysis, with the pods."""
    unasked: str = ""
    """Why greedy answers are not asked for, as a clause; empty where they are."""
    attempt: int = 0
    """How many analyses of this revision were inconclusive lately: each halves the alphas, or trying again would get there."""
    scatters: Mapping[str, Dispersion] = field(default_factory=dict)
    """By criterion, how blocks of equal arms scatter."""
    curves: Mapping[str, LoadCurve] = field(default_factory=dict)
    """By criterion, how it goes with a pod's output."""

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        found["kept"] = {name: getattr(self.kept, name) for name in SampleProjection.__slots__}
        found["pods"] = list(self.pods)
        found["scatters"] = {name: scatter.to_dict() for name, scatter in self.scatters.items()}
        found["curves"] = {name: curve.to_list() for name, curve in self.curves.items()}
        return found

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> AnalysisPlan:
        scatters = {name: Dispersion.from_dict(scatter) for name, scatter in document["scatters"].items()}
        curves = {name: LoadCurve(*values) for name, values in document["curves"].items()}
        read = {
            "kept": SampleProjection(**document["kept"]),
            "pods": tuple(document["pods"]),
            "scatters": scatters,
            "curves": curves,
        }
        return cls(**{**document, **read})

    @property
    def is_trial(self) -> bool:
        """Whether it is about a setting, and thus about time."""
        return self.goal in ("Faster", "Explore")

    def dispersion_of(self, criterion: str) -> Dispersion:
        return self.scatters.get(criterion, UNCALIBRATED_DISPERSION)


@dataclass(frozen=True, slots=True)
class CriterionTest:
    """Whether canary - ratio * control - offset is certainly above 0 (sign 1) or below it (sign -1)."""

    __test__ = False  # not one of pytest's

    sign: Literal[1, -1]
    ratio: float
    offset: float
    alpha: float
    rolls_back: bool = True
    """Whether it rolls back, with an alpha that is spent by the deadline; else it accepts, with one that would hold for ever."""
    tightest_block_count: float = ROLLBACK_TIGHTEST_BLOCK_COUNT
    """Effective blocks after which its bound is tightest."""
    alternative_ratio: float = 0.0
    """Of a share: that it holds as well when the canary's is below so many times the control's; 0: it does not."""
    estimate_suffices: bool = False
    """Whether it asks for no certainty: that the estimate itself is so is enough."""
    measured_pods_only: bool = False
    """Whether it is about these very pods, and not about what others of their kind would show."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """One comparison."""

    name: str
    title: str
    """As in "the ... is"."""
    fraction: Callable[[EngineCounts], tuple[float, float]]
    """Numerator and denominator, of sums over an arm."""
    rollback_tests: tuple[CriterionTest, ...]
    """Any of them rolls back."""
    promote_tests: tuple[CriterionTest, ...] = ()
    """What has to hold to be accepted, all of it; nothing: no more than not being rolled back."""
    needs_load_match: bool = False
    """Whether it counts only in blocks with like loads."""
    needs_in_flight_match: bool = False
    """Whether the load has to be alike in requests in flight, too, and not only in those that came."""
    relative: bool = True
    """Whether scatter is in proportion to its level, as that of means is. Of the others, which are shares of counts, what
    accepts is exact (`shares`)."""

    @property
    def is_load_adjusted(self) -> bool:
        """Whether the canary's value is taken to the control's output: a mean that goes with the load."""
        return self.needs_load_match and self.relative and not self.needs_in_flight_match


def build_criteria(plan: AnalysisPlan) -> tuple[Criterion, ...]:
    """The table, for these terms."""
    return tuple(
        _with_attempt_alphas(row, plan.attempt) for row in _build_all_criteria(plan) if not (row.needs_load_match and plan.unlike)
    )


def _build_all_criteria(terms: AnalysisPlan) -> Iterator[Criterion]:
    compared, kept = not terms.incomparable, terms.kept
    if terms.is_trial:
        yield from _build_trial_criteria(terms)
    else:
        if compared:
            yield _build_tokens_per_step_criterion(terms)
        alpha = 0.005 if compared else 0.0125
        yield _build_output_time_criterion(terms, alpha if kept.output_edge is None else alpha - OBJECTIVE_ALPHA)
        if kept.output_edge is not None:
            yield _build_objective_criterion(
                SLOW_TIME_PER_OUTPUT_TOKEN,
                f"that take more than {_format_seconds(kept.output_edge)} per output token",
                _slow_output_share,
                terms,
            )
        if terms.adaptive and not compared:
            tested = (_rollback_if_below(0.9, 0.0, 0.005),)
            yield Criterion(
                TOKENS_PER_STEP,
                _TOKENS_PER_STEP_TITLE,
                _tokens_per_step,
                tested,
                needs_load_match=True,
                needs_in_flight_match=True,
            )
    worse = (_rollback_if_above(1.10, 0.0, 0.005 if kept.first_edge is None else 0.005 - OBJECTIVE_ALPHA),)
    later = replace(_promote_if_below(1.25, 0.0), estimate_suffices=kept.first_edge is not None)
    yield Criterion(TIME_TO_FIRST_TOKEN, "time to first token", _time_to_first_token, worse, (later,), needs_load_match=True)
    if kept.first_edge is not None:
        yield _build_objective_criterion(
            SLOW_TIME_TO_FIRST_TOKEN,
            f"with a first token after {_format_seconds(kept.first_edge)}",
            _slow_first_token_share,
            terms,
        )
    yield Criterion(
        FAILED_REQUESTS,
        "share of failed requests",
        _failed_requests,
        (),
        (_promote_if_below(2.0, terms.failure_margin),),
        relative=False,
    )
    given_up = (_rollback_if_above(1.0, 0.05, 0.001),)
    yield Criterion(
        ABANDONED_REQUESTS,
        "share of requests given up by their clients",
        _abandoned_requests,
        given_up,
        (_promote_if_below(2.0, 0.05),),
        relative=False,
    )
    yield Criterion(
        OUTPUT_LENGTH,
        "output per request",
        _output_length,
        (_rollback_if_above(1.1, 0.0, 0.0005), _rollback_if_below(0.9, 0.0, 0.0005)),
    )
    yield Criterion(
        TRUNCATED_REQUESTS,
        "share of requests cut at their limit of tokens",
        _truncated_requests,
        (_rollback_if_above(1.0, 0.05, 0.0005), _rollback_if_below(1.0, -0.05, 0.0005)),
        relative=False,
    )
    yield Criterion(
        PREEMPTIONS,
        "preemptions per request",
        _preemptions,
        (_rollback_if_above(2.0, 0.05, 0.001),),
        needs_load_match=True,
        relative=False,
    )
    if terms.steady and not terms.is_trial:  # shown, not judged
        if not compared:
            yield Criterion(TOKENS_PER_STEP, _TOKENS_PER_STEP_TITLE, _tokens_per_step, ())
        yield Criterion(ACCEPTANCE_LENGTH, "acceptance length", _acceptance_length, ())


def build_calibration_criteria(plan: AnalysisPlan) -> tuple[Criterion, ...]:
    """What stable pods are to tell of: all that is measured by these terms or by a trial's, each once."""
    found: dict[Callable[[EngineCounts], tuple[float, float]], Criterion] = {}
    for row in (*build_criteria(replace(plan, goal="Faster")), *build_criteria(plan)):
        found.setdefault(row.fraction, row)
    return tuple(found.values())


def build_faster_test(plan: AnalysisPlan) -> tuple[Criterion, CriterionTest] | None:
    """The row and the test by which a canary is certainly faster than its control; None where time does not tell."""
    row = next((row for row in build_criteria(plan) if row.name == TIME_PER_OUTPUT_TOKEN), None)
    alpha = FASTER_ALPHA / 2**plan.attempt
    return (
        None
        if row is None
        else (row, CriterionTest(-1, 1.0, 0.0, alpha, rolls_back=False, tightest_block_count=PROMOTE_TIGHTEST_BLOCK_COUNT))
    )


def failed_requests_alpha(plan: AnalysisPlan) -> float:
    """Alpha of rolling back for failed requests."""
    return float(FAILED_REQUESTS_ALPHA / 2**plan.attempt)


def crashes_alpha(plan: AnalysisPlan) -> float:
    """Alpha of rolling back for processes that have ended."""
    return float(CRASHES_ALPHA / 2**plan.attempt)


def build_sequence_parameters(
    test: CriterionTest, criterion: Criterion, plan: AnalysisPlan, pairs: PairedMoments
) -> SequenceParameters:
    """The sequence that a test is made with, at the level that the control has."""
    scatter = plan.dispersion_of(criterion.name)
    alpha = test.alpha
    if test.rolls_back:
        alpha = alpha_with_deadline(alpha, plan.deadline / plan.block / scatter.inflation, test.tightest_block_count)
    if not criterion.relative:
        return SequenceParameters(alpha, test.tightest_block_count, scatter.inflation)
    level = pairs.control
    offsets = (
        NO_POD_EFFECT
        if test.measured_pods_only
        else scatter.pod_effect(_pod_effect_prior(criterion, scatter, plan), level, plan.pods)
    )
    prior = scatter.variance_prior(level, plan.pods)
    share = TOKENS_PER_STEP_POD_EFFECT_SHARE
    if criterion.is_load_adjusted and not plan.is_trial:
        share = ROLLBACK_POD_EFFECT_SHARE if test.rolls_back else PROMOTE_POD_EFFECT_SHARE
    return SequenceParameters(
        alpha, test.tightest_block_count, scatter.inflation, prior, offsets.sd, offsets.degrees_of_freedom, share
    )


def _pod_effect_prior(criterion: Criterion, scatter: Dispersion, terms: AnalysisPlan) -> PodEffect:
    """By how much pods are taken to differ for good in this, beside what they have told."""
    if not criterion.is_load_adjusted:
        return CALIBRATED_TOKENS_PER_STEP_POD_EFFECT if scatter.batches else PodEffect(0.0, 0.0)
    if terms.is_trial:
        return PodEffect(0.0, 0.0)
    return CALIBRATED_POD_EFFECT if scatter.batches else UNCALIBRATED_POD_EFFECT


# ---------------------------------------------------------------------------------------------------------------- the rows
_TOKENS_PER_STEP_TITLE, _TIME_PER_OUTPUT_TOKEN_TITLE = "output per verification step", "time per output token"
OBJECTIVE_ALPHA = 0.0025
"""Of rolling back for an objective; taken from that of the mean beside it."""
MAX_RATIO_WHERE_CONTROL_MISSES_OBJECTIVE = 1.1
"""Times the control's share beyond an objective that is let pass where the control itself does not keep it."""
NO_POD_EFFECT = PodEffect(0.0, math.inf)


def _build_tokens_per_step_criterion(terms: AnalysisPlan) -> Criterion:
    """What is judged of the drafts."""
    least = 1.0 if terms.goal == "Superior" else 1.0 - terms.margin
    accept = CriterionTest(1, least, 0.0, PROMOTE_ALPHA, rolls_back=False, tightest_block_count=PROMOTE_TIGHTEST_BLOCK_COUNT)
    return Criterion(
        TOKENS_PER_STEP, _TOKENS_PER_STEP_TITLE, _tokens_per_step, (_rollback_if_below(1.0, 0.0, 0.0125),), (accept,)
    )


def _build_output_time_criterion(terms: AnalysisPlan, alpha: float) -> Criterion:
    accept: tuple[CriterionTest, ...] = (
        replace(_promote_if_below(MAX_TIME_RATIO_MEASURED_PODS, 0.0), measured_pods_only=True),
        _promote_if_below(MAX_TIME_RATIO_ANY_PODS, 0.0),
    )
    if terms.incomparable and terms.goal == "Superior":
        accept = (_promote_if_below(1.0, 0.0),)
    elif terms.kept.output_edge is not None and not terms.incomparable:
        accept = (replace(_promote_if_below(MAX_TIME_RATIO_MEASURED_PODS, 0.0), estimate_suffices=True),)
    return Criterion(
        TIME_PER_OUTPUT_TOKEN,
        _TIME_PER_OUTPUT_TOKEN_TITLE,
        _time_per_output_token,
        (_rollback_if_above(1.02, 0.0, alpha),),
        accept,
        needs_load_match=True,
    )


def _build_trial_criteria(terms: AnalysisPlan) -> Iterator[Criterion]:
    """What a trial of a setting is about."""
    faster = terms.goal == "Faster"
    slower = (replace(_rollback_if_above(1.02 if faster else 1.5, 0.0, 0.0175), tightest_block_count=TRIAL_TIGHTEST_BLOCK_COUNT),)
    accept = (_promote_if_below(1.0, 0.0),) if faster else ()
    yield Criterion(
        TIME_PER_OUTPUT_TOKEN, _TIME_PER_OUTPUT_TOKEN_TITLE, _time_per_output_token, slower, accept, needs_load_match=True
    )
    if terms.kept.output_edge is not None:
        title = f"that take more than {_format_seconds(terms.kept.output_edge)} per output token"
        yield _build_objective_criterion(SLOW_TIME_PER_OUTPUT_TOKEN, title, _slow_output_share, terms)
    # Its mean step is weighed by requests: some per cent off where a step grows fast with its batch, so that 10 % are let pass.
    yield Criterion(
        TOKENS_PER_BUSY_SECOND,
        "output per busy second",
        _tokens_per_busy_second,
        (_rollback_if_below(0.9, 0.0, 0.0075),) if faster else (),
        needs_load_match=True,
    )


def _build_objective_criterion(
    name: str, which: str, value: Callable[[EngineCounts], tuple[float, float]], terms: AnalysisPlan
) -> Criterion:
    """The share of requests beyond an objective."""
    accept = (replace(_promote_if_below(0.0, terms.beyond), alternative_ratio=MAX_RATIO_WHERE_CONTROL_MISSES_OBJECTIVE),)
    worse = (_rollback_if_above(1.0, 0.0025, OBJECTIVE_ALPHA),)
    return Criterion(name, f"share of requests {which}", value, worse, accept, needs_load_match=True, relative=False)


def _rollback_if_above(ratio: float, offset: float, alpha: float) -> CriterionTest:
    return CriterionTest(1, ratio, offset, alpha)


def _rollback_if_below(ratio: float, offset: float, alpha: float) -> CriterionTest:
    return CriterionTest(-1, ratio, offset, alpha)


def _promote_if_below(ratio: float, offset: float) -> CriterionTest:
    return CriterionTest(-1, ratio, offset, PROMOTE_ALPHA, rolls_back=False, tightest_block_count=PROMOTE_TIGHTEST_BLOCK_COUNT)


def _with_attempt_alphas(criterion: Criterion, attempt: int) -> Criterion:
    if not attempt:
        return criterion
    halved = tuple(replace(test, alpha=test.alpha / 2**attempt) for test in criterion.rollback_tests)
    accept = tuple(replace(test, alpha=test.alpha / 2**attempt) for test in criterion.promote_tests)
    return replace(criterion, rollback_tests=halved, promote_tests=accept)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _tokens_per_step(counts: EngineCounts) -> tuple[float, float]:
    return counts.decode_tokens, counts.request_steps


def _acceptance_length(counts: EngineCounts) -> tuple[float, float]:
    return counts.drafts + counts.accepted, counts.drafts


def _time_per_output_token(counts: EngineCounts) -> tuple[float, float]:
    return counts.decode_seconds, counts.decode_tokens


def _tokens_per_busy_second(counts: EngineCounts) -> tuple[float, float]:
    return counts.output_tokens, counts.busy_seconds


def _slow_output_share(counts: EngineCounts) -> tuple[float, float]:
    return counts.slow_output, counts.timed


def _time_to_first_token(counts: EngineCounts) -> tuple[float, float]:
    return counts.first_seconds, counts.first_tokens


def _slow_first_token_share(counts: EngineCounts) -> tuple[float, float]:
    return counts.slow_first, counts.first_tokens


def _failed_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.errors, counts.finished


def _output_length(counts: EngineCounts) -> tuple[float, float]:
    return counts.output_tokens, counts.finished


def _abandoned_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.given_up, counts.first_tokens


def _truncated_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.cut, counts.finished


def _preemptions(counts: EngineCounts) -> tuple[float, float]:
    return counts.preemptions, counts.finished
