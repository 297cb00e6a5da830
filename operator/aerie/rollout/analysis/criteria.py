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

from aerie.rollout.analysis.calibration import UNCALIBRATED, Offsets, Scatter
from aerie.rollout.analysis.elasticity import Curve
from aerie.rollout.analysis.readings import Counts, Kept
from aerie.rollout.analysis.sequential import Pairs, Tuning, with_deadline

TOKENS_PER_STEP = "TokensPerStep"
ACCEPTANCE_LENGTH = "AcceptanceLength"
OUTPUT_TIME = "TimePerOutputToken"
SLOW_OUTPUT = "SlowTimePerOutputToken"
GOODPUT = "TokensPerBusySecond"
FIRST_TIME = "TimeToFirstToken"
SLOW_FIRST = "SlowTimeToFirstToken"
ERRORS = "FailedRequests"
OUTPUT_LENGTH = "OutputLength"
CUT = "CutRequests"
PREEMPTIONS = "Preemptions"
GIVEN_UP = "GivenUpRequests"

ACCEPT_ALPHA = 0.05
FASTER_ALPHA = 0.025
"""Of being certainly faster, which stands in for tokens per step: half of what accepts, because there are two ways then."""
ERRORS_ALPHA = 0.003
CRASHES_ALPHA = 0.002
SLOWER_AT_MOST, SLOWER_AT_MOST_BY_PODS = 1.025, 1.04
"""Up to what of the control's time per output token a canary is accepted: as these pods have it, and for a fleet of others."""
UNKNOWN_PODS, KNOWN_PODS = Offsets(0.0175, 3.0), Offsets(0.01, 1.0)
"""By how much the times of two pods of one GPU model differ for good (clocks, power caps, cooling): while no history tells, and
beside one, so that two or three pods that happen to be alike do not prove that all are. An assumption: 2 to 5 % are reported."""
PODS_IN_DRAFTS, PODS_TO_ACCEPT, PODS_TO_REJECT = 0.975, 0.99, 0.9975
"""Of what pods differ by for good, the share that a bound keeps clear of: of tokens per step, and of time."""
KNOWN_IN_DRAFTS = Offsets(0.003, 2.0)
"""The same of tokens per step, beside a history."""
TIGHTEST_TO_ACCEPT, TIGHTEST_TO_REJECT, TIGHTEST_OF_TRIALS = 20.0, 30.0, 20.0
"""Effective blocks at which bounds are tightest. A canary that is much better or much worse is found early with each; they are
for those that are a little better, a little worse, and for settings that are slower by a tenth."""


BEYOND = 0.05
"""Share of the requests that the objective's default percentile leaves."""

Goal = Literal["NonInferior", "Superior", "Faster", "Explore"]
"""What a canary has to show: the spec's NonInferior and Superior; of a trial of a setting Faster, or for Explore nothing."""


@dataclass(frozen=True, slots=True)
class Terms:
    """All that an analysis is judged by; fixed before its first block."""

    goal: Goal = "NonInferior"
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
    kept: Kept = field(default_factory=lambda: Kept(positions=1))
    incomparable: str = ""
    """Why tokens per step do not decide; empty where they do."""
    steady: bool = True
    """Whether the canary drafts the same number of tokens at any load, so that its tokens per step can be shown and followed even
    where they do not decide."""
    beyond: float = BEYOND
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
    scatters: Mapping[str, Scatter] = field(default_factory=dict)
    """By criterion, how blocks of equal arms scatter."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """By criterion, how it goes with a pod's output."""

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        found["kept"] = {name: getattr(self.kept, name) for name in Kept.__slots__}
        found["pods"] = list(self.pods)
        found["scatters"] = {name: scatter.to_dict() for name, scatter in self.scatters.items()}
        found["curves"] = {name: curve.to_list() for name, curve in self.curves.items()}
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Terms:
        scatters = {name: Scatter.from_dict(scatter) for name, scatter in found["scatters"].items()}
        curves = {name: Curve(*values) for name, values in found["curves"].items()}
        read = {"kept": Kept(**found["kept"]), "pods": tuple(found["pods"]), "scatters": scatters, "curves": curves}
        return cls(**{**found, **read})

    @property
    def trial(self) -> bool:
        """Whether it is about a setting, and thus about time."""
        return self.goal in ("Faster", "Explore")

    def scatter(self, criterion: str) -> Scatter:
        return self.scatters.get(criterion, UNCALIBRATED)


@dataclass(frozen=True, slots=True)
class Test:
    """Whether canary - ratio * control - offset is certainly above 0 (sign 1) or below it (sign -1)."""

    __test__ = False  # not one of pytest's

    sign: Literal[1, -1]
    ratio: float
    offset: float
    alpha: float
    rejects: bool = True
    """Whether it rolls back, with an alpha that is spent by the deadline; else it accepts, with one that would hold for ever."""
    tightest: float = TIGHTEST_TO_REJECT
    """Effective blocks after which its bound is tightest."""
    or_ratio: float = 0.0
    """Of a share: that it holds as well when the canary's is below so many times the control's; 0: it does not."""
    estimated: bool = False
    """Whether it asks for no certainty: that the estimate itself is so is enough."""
    as_measured: bool = False
    """Whether it is about these very pods, and not about what others of their kind would show."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """One comparison."""

    name: str
    title: str
    """As in "the ... is"."""
    value: Callable[[Counts], tuple[float, float]]
    """Numerator and denominator, of sums over an arm."""
    reject: tuple[Test, ...]
    """Any of them rolls back."""
    accept: tuple[Test, ...] = ()
    """What has to hold to be accepted, all of it; nothing: no more than not being rolled back."""
    by_load: bool = False
    """Whether it counts only in blocks with like loads."""
    by_flight: bool = False
    """Whether the load has to be alike in requests in flight, too, and not only in those that came."""
    relative: bool = True
    """Whether scatter is in proportion to its level, as that of means is. Of the others, which are shares of counts, what
    accepts is exact (`shares`)."""

    @property
    def adjusted(self) -> bool:
        """Whether the canary's value is taken to the control's output: a mean that goes with the load."""
        return self.by_load and self.relative and not self.by_flight


def criteria(terms: Terms) -> tuple[Criterion, ...]:
    """The table, for these terms."""
    return tuple(_at_attempt(row, terms.attempt) for row in _rows(terms) if not (row.by_load and terms.unlike))


def _rows(terms: Terms) -> Iterator[Criterion]:
    compared, kept = not terms.incomparable, terms.kept
    if terms.trial:
        yield from _speed(terms)
    else:
        if compared:
            yield _drafts(terms)
        alpha = 0.005 if compared else 0.0125
        yield _output_time(terms, alpha if kept.output_edge is None else alpha - SHARE_ALPHA)
        if kept.output_edge is not None:
            yield _beyond(SLOW_OUTPUT, f"that take more than {_span(kept.output_edge)} per output token", _output_share, terms)
        if terms.adaptive and not compared:
            tested = (_under(0.9, 0.0, 0.005),)
            yield Criterion(TOKENS_PER_STEP, _PER_STEP, _tokens_per_step, tested, by_load=True, by_flight=True)
    worse = (_above(1.10, 0.0, 0.005 if kept.first_edge is None else 0.005 - SHARE_ALPHA),)
    later = replace(_below(1.25, 0.0), estimated=kept.first_edge is not None)
    yield Criterion(FIRST_TIME, "time to first token", _first_mean, worse, (later,), by_load=True)
    if kept.first_edge is not None:
        yield _beyond(SLOW_FIRST, f"with a first token after {_span(kept.first_edge)}", _first_share, terms)
    yield Criterion(ERRORS, "share of failed requests", _errors, (), (_below(2.0, terms.failure_margin),), relative=False)
    given_up = (_above(1.0, 0.05, 0.001),)
    yield Criterion(
        GIVEN_UP, "share of requests given up by their clients", _given_up, given_up, (_below(2.0, 0.05),), relative=False
    )
    yield Criterion(OUTPUT_LENGTH, "output per request", _length, (_above(1.1, 0.0, 0.0005), _under(0.9, 0.0, 0.0005)))
    yield Criterion(
        CUT,
        "share of requests cut at their limit of tokens",
        _cut,
        (_above(1.0, 0.05, 0.0005), _under(1.0, -0.05, 0.0005)),
        relative=False,
    )
    yield Criterion(
        PREEMPTIONS, "preemptions per request", _preemptions, (_above(2.0, 0.05, 0.001),), by_load=True, relative=False
    )
    if terms.steady and not terms.trial:  # shown, not judged
        if not compared:
            yield Criterion(TOKENS_PER_STEP, _PER_STEP, _tokens_per_step, ())
        yield Criterion(ACCEPTANCE_LENGTH, "acceptance length", _acceptance_length, ())


def remembered(terms: Terms) -> tuple[Criterion, ...]:
    """What stable pods are to tell of: all that is measured by these terms or by a trial's, each once."""
    found: dict[Callable[[Counts], tuple[float, float]], Criterion] = {}
    for row in (*criteria(replace(terms, goal="Faster")), *criteria(terms)):
        found.setdefault(row.value, row)
    return tuple(found.values())


def faster(terms: Terms) -> tuple[Criterion, Test] | None:
    """The row and the test by which a canary is certainly faster than its control; None where time does not tell."""
    row = next((row for row in criteria(terms) if row.name == OUTPUT_TIME), None)
    alpha = FASTER_ALPHA / 2**terms.attempt
    return None if row is None else (row, Test(-1, 1.0, 0.0, alpha, rejects=False, tightest=TIGHTEST_TO_ACCEPT))


def errors_alpha(terms: Terms) -> float:
    """Alpha of rolling back for failed requests."""
    return float(ERRORS_ALPHA / 2**terms.attempt)


def crashes_alpha(terms: Terms) -> float:
    """Alpha of rolling back for processes that have ended."""
    return float(CRASHES_ALPHA / 2**terms.attempt)


def tuning(test: Test, criterion: Criterion, terms: Terms, pairs: Pairs) -> Tuning:
    """The sequence that a test is made with, at the level that the control has."""
    scatter = terms.scatter(criterion.name)
    alpha = test.alpha
    if test.rejects:
        alpha = with_deadline(alpha, terms.deadline / terms.block / scatter.inflation, test.tightest)
    if not criterion.relative:
        return Tuning(alpha, test.tightest, scatter.inflation)
    level = pairs.control
    offsets = NO_OFFSETS if test.as_measured else scatter.offset(_pods_prior(criterion, scatter, terms), level, terms.pods)
    prior = scatter.prior(level, terms.pods)
    share = PODS_IN_DRAFTS
    if criterion.adjusted and not terms.trial:
        share = PODS_TO_REJECT if test.rejects else PODS_TO_ACCEPT
    return Tuning(alpha, test.tightest, scatter.inflation, prior, offsets.sd, offsets.freedom, share)


def _pods_prior(criterion: Criterion, scatter: Scatter, terms: Terms) -> Offsets:
    """By how much pods are taken to differ for good in this, beside what they have told."""
    if not criterion.adjusted:
        return KNOWN_IN_DRAFTS if scatter.batches else Offsets(0.0, 0.0)
    if terms.trial:
        return Offsets(0.0, 0.0)
    return KNOWN_PODS if scatter.batches else UNKNOWN_PODS


# ---------------------------------------------------------------------------------------------------------------- the rows
_PER_STEP, _OUTPUT_TIME = "output per verification step", "time per output token"
SHARE_ALPHA = 0.0025
"""Of rolling back for an objective; taken from that of the mean beside it."""
BROKEN_ALREADY = 1.1
"""Times the control's share beyond an objective that is let pass where the control itself does not keep it."""
NO_OFFSETS = Offsets(0.0, math.inf)


def _drafts(terms: Terms) -> Criterion:
    """What is judged of the drafts."""
    least = 1.0 if terms.goal == "Superior" else 1.0 - terms.margin
    accept = Test(1, least, 0.0, ACCEPT_ALPHA, rejects=False, tightest=TIGHTEST_TO_ACCEPT)
    return Criterion(TOKENS_PER_STEP, _PER_STEP, _tokens_per_step, (_under(1.0, 0.0, 0.0125),), (accept,))


def _output_time(terms: Terms, alpha: float) -> Criterion:
    accept: tuple[Test, ...] = (replace(_below(SLOWER_AT_MOST, 0.0), as_measured=True), _below(SLOWER_AT_MOST_BY_PODS, 0.0))
    if terms.incomparable and terms.goal == "Superior":
        accept = (_below(1.0, 0.0),)
    elif terms.kept.output_edge is not None and not terms.incomparable:
        accept = (replace(_below(SLOWER_AT_MOST, 0.0), estimated=True),)
    return Criterion(OUTPUT_TIME, _OUTPUT_TIME, _output_mean, (_above(1.02, 0.0, alpha),), accept, by_load=True)


def _speed(terms: Terms) -> Iterator[Criterion]:
    """What a trial of a setting is about."""
    faster = terms.goal == "Faster"
    slower = (replace(_above(1.02 if faster else 1.5, 0.0, 0.0175), tightest=TIGHTEST_OF_TRIALS),)
    accept = (_below(1.0, 0.0),) if faster else ()
    yield Criterion(OUTPUT_TIME, _OUTPUT_TIME, _output_mean, slower, accept, by_load=True)
    if terms.kept.output_edge is not None:
        title = f"that take more than {_span(terms.kept.output_edge)} per output token"
        yield _beyond(SLOW_OUTPUT, title, _output_share, terms)
    # Its mean step is weighed by requests: some per cent off where a step grows fast with its batch, so that 10 % are let pass.
    yield Criterion(GOODPUT, "output per busy second", _goodput, (_under(0.9, 0.0, 0.0075),) if faster else (), by_load=True)


def _beyond(name: str, which: str, value: Callable[[Counts], tuple[float, float]], terms: Terms) -> Criterion:
    """The share of requests beyond an objective."""
    accept = (replace(_below(0.0, terms.beyond), or_ratio=BROKEN_ALREADY),)
    worse = (_above(1.0, 0.0025, SHARE_ALPHA),)
    return Criterion(name, f"share of requests {which}", value, worse, accept, by_load=True, relative=False)


def _above(ratio: float, offset: float, alpha: float) -> Test:
    return Test(1, ratio, offset, alpha)


def _under(ratio: float, offset: float, alpha: float) -> Test:
    return Test(-1, ratio, offset, alpha)


def _below(ratio: float, offset: float) -> Test:
    return Test(-1, ratio, offset, ACCEPT_ALPHA, rejects=False, tightest=TIGHTEST_TO_ACCEPT)


def _at_attempt(criterion: Criterion, attempt: int) -> Criterion:
    if not attempt:
        return criterion
    halved = tuple(replace(test, alpha=test.alpha / 2**attempt) for test in criterion.reject)
    accept = tuple(replace(test, alpha=test.alpha / 2**attempt) for test in criterion.accept)
    return replace(criterion, reject=halved, accept=accept)


def _span(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _tokens_per_step(counts: Counts) -> tuple[float, float]:
    return counts.decode_tokens, counts.request_steps


def _acceptance_length(counts: Counts) -> tuple[float, float]:
    return counts.drafts + counts.accepted, counts.drafts


def _output_mean(counts: Counts) -> tuple[float, float]:
    return counts.decode_seconds, counts.decode_tokens


def _goodput(counts: Counts) -> tuple[float, float]:
    return counts.output_tokens, counts.busy_seconds


def _output_share(counts: Counts) -> tuple[float, float]:
    return counts.slow_output, counts.timed


def _first_mean(counts: Counts) -> tuple[float, float]:
    return counts.first_seconds, counts.first_tokens


def _first_share(counts: Counts) -> tuple[float, float]:
    return counts.slow_first, counts.first_tokens


def _errors(counts: Counts) -> tuple[float, float]:
    return counts.errors, counts.finished


def _length(counts: Counts) -> tuple[float, float]:
    return counts.output_tokens, counts.finished


def _given_up(counts: Counts) -> tuple[float, float]:
    return counts.given_up, counts.first_tokens


def _cut(counts: Counts) -> tuple[float, float]:
    return counts.cut, counts.finished


def _preemptions(counts: Counts) -> tuple[float, float]:
    return counts.preemptions, counts.finished
