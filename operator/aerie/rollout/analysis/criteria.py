"""What canary and control are compared in, and how certain a verdict has to be: one table, fixed when an analysis begins.

| criterion            | rolls back when certainly            | alpha | is accepted when certainly          | load |
|----------------------|--------------------------------------|-------|-------------------------------------|------|
| tokens per step      | below the control's                  | 0.025 | above control * (1 - margin)        |      |
| time per output token| share beyond the objective more than | 0.0075| share below 1.5 * control + 0.5 pp  | yes  |
|                      | the control's + 0.25 pp              |       |                                     |      |
| ... no objective     | mean above control * 1.02            | 0.0075| mean below control * 1.05           | yes  |
| time to first token  | share: as above                      | 0.0075| share: as above                     | yes  |
| ... no objective     | mean above control * 1.10            | 0.0075| mean below control * 1.25           | yes  |
| failed requests      | more per request (e-value)           | 0.003 | share below 2 * control + 0.5 pp    |      |
| output length        | beyond control * 0.9 to 1.1          | 0.002 | -                                   |      |
| requests cut short   | share off by more than 5 pp          | 0.002 | -                                   |      |
| preemptions          | 2 * control + 0.05 per request       | 0.002 | -                                   | yes  |
| greedy answers       | another more often (`lossless`)      | 0.001 | -                                   |      |

The alphas of rolling back add up to 0.05, because any of them is enough; they are spent by the deadline. Being accepted needs no
split, because all of them are needed: each at 0.05. "Load": counted only in blocks with like loads (`demand`), and means of it as
at the control's output (`elasticity`). A drafter must not change outputs at all, so output length, requests cut short and greedy
answers are alarms, not goals.

Tokens per step are what requests got after their first token, by the steps in which they got it ((generated - first tokens) /
request steps, as `windows.tokens_per_step`). Acceptance length, 1 + accepted / drafts, is shown and not judged: vLLM books
drafted tokens as accepted behind the end of an answer too, which no request gets (vllm issue 56101: v1/core/sched/scheduler.py
counts before it trims, in 0.32.0 and 0.33.0). That adds some tenths of a percent to 4 %, the more the shorter the answers and
the better the drafter, so it flatters the better arm. Dummy drafts, which acceptance length counts, are in no request step,
and neither are chunks of a prompt. A step that computes a preempted request anew counts in both, with one token.

| where                          | in place of the first row                                                                |
|--------------------------------|------------------------------------------------------------------------------------------|
| the arms draft unlike K        | acceptance length at the positions of both: steps of more drafts give more tokens anyway |
| both verify adaptively, same K | time per output token, with its alpha; and tokens per step roll back when certainly below|
|                                | control * 0.9, alpha 0.0075, counted while as many requests are in flight on both        |
| neither may be compared        | time per output token, with its alpha                                                    |

Adaptive verification trims drafts, the more the more requests are in flight, and books them as not accepted, so acceptance
follows the load there: within the fifth that loads may differ by, by some percent. Where the arms run on unlike hardware, the
rows with "load" are left out, because the GPU may decide them; where neither tokens per step nor acceptance length may be
compared then, nothing is accepted.

Trials of a speculation setting (goal Faster) are about time, with these rows in place of the first two:

| time per output token| mean above control * 1.02            | 0.0175| mean below the control's            | yes  |
| ... share beyond the | more than the control's + 0.25 pp    | 0.0075| share below 1.5 * control + 0.5 pp  | yes  |
| objective, with one  |                                      |       |                                     |      |
| tokens per busy      | below control * 0.9                  | 0.0075| -                                   | yes  |
| second               |                                      |       |                                     |      |

One that is only to be measured (goal Explore) is never accepted, and may be slower: it is rolled back for a mean above
control * 1.5, the share and all other rows; tokens per busy second are counted, because its goal may become Faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aerie.rollout.analysis.calibration import UNCALIBRATED, Scatter
from aerie.rollout.analysis.elasticity import Curve
from aerie.rollout.analysis.readings import Counts, Kept
from aerie.rollout.analysis.sequential import Pairs, Tuning, with_deadline

TOKENS_PER_STEP = "TokensPerStep"
ACCEPTANCE_LENGTH = "AcceptanceLength"
OUTPUT_TIME = "TimePerOutputToken"
SLOW_OUTPUT = "SlowTimePerOutputToken"
GOODPUT = "TokensPerBusySecond"
FIRST_TIME = "TimeToFirstToken"
ERRORS = "FailedRequests"
OUTPUT_LENGTH = "OutputLength"
CUT = "CutRequests"
PREEMPTIONS = "Preemptions"

ACCEPT_ALPHA = 0.05
ERRORS_ALPHA = 0.003
TIGHTEST_TO_ACCEPT, TIGHTEST_TO_REJECT, TIGHTEST_OF_TRIALS = 20.0, 30.0, 20.0
"""Effective blocks at which bounds are tightest. A canary that is much better or much worse is found early with each; they are
for those that are a little better, a little worse, and for settings that are slower by a tenth."""


Goal = Literal["NonInferior", "Superior", "Faster", "Explore"]
"""What a canary has to show: the spec's NonInferior and Superior; of a trial of a setting Faster, or for Explore nothing."""


@dataclass(frozen=True, slots=True)
class Terms:
    """All that an analysis is judged by; fixed before its first block."""

    goal: Goal = "NonInferior"
    margin: float = 0.02
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
    """Why neither tokens per step nor acceptance lengths decide; empty where one of them does."""
    unequal: bool = False
    """Whether the arms draft unlike numbers of tokens, so that acceptance lengths are compared instead of tokens per step."""
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
        # Releases without the field judged by acceptance length; what they began ends so.
        return cls(**{"unequal": True, **found, **read})

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
    accept: Test | None = None
    """What has to hold to be accepted; None: nothing more than not being rolled back."""
    by_load: bool = False
    """Whether it counts only in blocks with like loads."""
    by_flight: bool = False
    """Whether the load has to be alike in requests in flight, too, and not only in those that came."""
    relative: bool = True
    """Whether scatter is in proportion to its level, as that of means is and that of small shares is not."""

    @property
    def adjusted(self) -> bool:
        """Whether the canary's value is taken to the control's output: a mean that goes with the load."""
        return self.by_load and self.relative and not self.by_flight


def criteria(terms: Terms) -> tuple[Criterion, ...]:
    """The table, for these terms."""
    compared = not terms.incomparable
    found = list(_acceptance(terms)) if compared else []
    if terms.trial:
        found = list(_speed(terms))
    else:
        found.append(_output_time(terms, 0.0075 if compared else 0.025))
        if terms.adaptive and not compared:
            tested = (_under(0.9, 0.0, 0.0075),)
            found.append(Criterion(TOKENS_PER_STEP, _PER_STEP, _tokens_per_step, tested, by_load=True, by_flight=True))
    found.append(
        Criterion(FIRST_TIME, "time to first token", _first_mean, (_above(1.10, 0.0, 0.0075),), _below(1.25, 0.0), by_load=True)
        if terms.kept.first_edge is None
        else _share(
            FIRST_TIME, f"share of requests with a first token after {_span(terms.kept.first_edge)}", _first_share, 0.0075
        )
    )
    found += [
        Criterion(ERRORS, "share of failed requests", _errors, (), _below(2.0, 0.005), relative=False),
        Criterion(OUTPUT_LENGTH, "output per request", _length, (_above(1.1, 0.0, 0.001), _under(0.9, 0.0, 0.001))),
        Criterion(
            CUT,
            "share of requests cut at their limit of tokens",
            _cut,
            (_above(1.0, 0.05, 0.001), _under(1.0, -0.05, 0.001)),
            relative=False,
        ),
        Criterion(
            PREEMPTIONS, "preemptions per request", _preemptions, (_above(2.0, 0.05, 0.002),), by_load=True, relative=False
        ),
    ]
    return tuple(_at_attempt(one, terms.attempt) for one in found if not (one.by_load and terms.unlike))


def remembered(terms: Terms) -> tuple[Criterion, ...]:
    """What stable pods are to tell of: all that is measured by these terms, by those for unlike K or by a trial's, each once."""
    found: dict[Callable[[Counts], tuple[float, float]], Criterion] = {}
    for row in (*criteria(replace(terms, goal="Faster")), *criteria(terms), *criteria(replace(terms, unequal=True))):
        found.setdefault(row.value, row)
    return tuple(found.values())


def errors_alpha(terms: Terms) -> float:
    """Alpha of rolling back for failed requests."""
    return float(ERRORS_ALPHA / 2**terms.attempt)


def tuning(test: Test, criterion: Criterion, terms: Terms, pairs: Pairs) -> Tuning:
    """The sequence that a test is made with, at the level that the control has."""
    scatter = terms.scatter(criterion.name)
    alpha = test.alpha
    if test.rejects:
        alpha = with_deadline(alpha, terms.deadline / terms.block / scatter.inflation, test.tightest)
    if not criterion.relative:
        return Tuning(alpha, test.tightest, scatter.inflation)
    level = pairs.control
    return Tuning(alpha, test.tightest, scatter.inflation, scatter.prior(level, terms.pods), scatter.offset(level, terms.pods))


# ---------------------------------------------------------------------------------------------------------------- the rows
_PER_STEP = "output per verification step"


def _acceptance(terms: Terms) -> Iterator[Criterion]:
    """What is judged of the drafts, and what is shown besides."""
    least = 1.0 if terms.goal == "Superior" else 1.0 - terms.margin
    accept = Test(1, least, 0.0, ACCEPT_ALPHA, rejects=False, tightest=TIGHTEST_TO_ACCEPT)
    worse = (_under(1.0, 0.0, 0.025),)
    if terms.unequal:
        yield Criterion(ACCEPTANCE_LENGTH, "acceptance length", _acceptance_length, worse, accept)
    else:
        yield Criterion(TOKENS_PER_STEP, _PER_STEP, _tokens_per_step, worse, accept)
        yield Criterion(ACCEPTANCE_LENGTH, "acceptance length", _acceptance_length, ())


def _output_time(terms: Terms, alpha: float) -> Criterion:
    title = "time per output token"
    if terms.incomparable and terms.goal == "Superior":
        return Criterion(OUTPUT_TIME, title, _output_mean, (_above(1.02, 0.0, alpha),), _below(1.0, 0.0), by_load=True)
    if terms.kept.output_edge is not None:
        title = f"share of requests that take more than {_span(terms.kept.output_edge)} per output token"
        return _share(OUTPUT_TIME, title, _output_share, alpha)
    return Criterion(OUTPUT_TIME, title, _output_mean, (_above(1.02, 0.0, alpha),), _below(1.05, 0.0), by_load=True)


def _speed(terms: Terms) -> Iterator[Criterion]:
    """What a trial of a setting is about."""
    faster = terms.goal == "Faster"
    slower = (replace(_above(1.02 if faster else 1.5, 0.0, 0.0175), tightest=TIGHTEST_OF_TRIALS),)
    accept = _below(1.0, 0.0) if faster else None
    yield Criterion(OUTPUT_TIME, "time per output token", _output_mean, slower, accept, by_load=True)
    if terms.kept.output_edge is not None:
        title = f"share of requests that take more than {_span(terms.kept.output_edge)} per output token"
        yield _share(SLOW_OUTPUT, title, _output_share, 0.0075)
    # Its mean step is weighed by requests: some per cent off where a step grows fast with its batch, so that 10 % are let pass.
    yield Criterion(GOODPUT, "output per busy second", _goodput, (_under(0.9, 0.0, 0.0075),) if faster else (), by_load=True)


def _share(name: str, title: str, value: Callable[[Counts], tuple[float, float]], alpha: float) -> Criterion:
    return Criterion(name, title, value, (_above(1.0, 0.0025, alpha),), _below(1.5, 0.005), by_load=True, relative=False)


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
    accept = criterion.accept and replace(criterion.accept, alpha=criterion.accept.alpha / 2**attempt)
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


def _cut(counts: Counts) -> tuple[float, float]:
    return counts.cut, counts.finished


def _preemptions(counts: Counts) -> tuple[float, float]:
    return counts.preemptions, counts.finished
