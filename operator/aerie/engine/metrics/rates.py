"""Quantities of an engine that a window of counters identifies: acceptance, batch, steps and errors, each with its bias made
explicit.

A window is the difference of two scrapes (`sample.diff_samples`), or a sum of windows over time or pods. Guarantees: if the
counters do not identify a quantity, the result is `Unknown` with the reason. If they only bound it, the result is `Bounds`. Not
guaranteed: that a quantity is the same for other traffic. A window describes only the requests in it.

vLLM's counters have five biases, and a longer window removes none of them:

* Dummy drafts. With a fixed K the scheduler pads a request that is admitted with one token left to compute, all others cached. It
  counts K draft tokens, none accepted (`pad_spec_decode` in vllm/v1/core/sched/scheduler.py, from 0.25 on). They have no counter
  of their own. There are at most as many as requests, and as cached prompt tokens, apart from requests that return after a
  preemption. One-token prompts, which are padded uncached, are assumed not to occur.
* Cut drafts. Under a grammar or near the context's end a draft has fewer than K tokens. Only the sum of draft tokens shows it.
* Schedules. Accepted tokens are counted by position, drafts only in total. The number of drafts that reached a position is exact
  with one or two numbers of draft tokens; with more it is bounded.
* Adaptive verification trims drafts on the device, and the scheduler counts trimmed tokens as not accepted. All acceptance is
  then a lower bound.
* Tokens behind a stop. Accepted tokens count even if the request ended before them. So (generation - first tokens) / steps is
  below 1 + accepted / drafts; the shorter the answers, the larger the difference.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from aerie.engine.metrics.sample import Counters, SpeculationCounters
from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, Static, max_speculative_tokens

SCHEDULE_FIT_TOLERANCE = 0.01
"""Share of drafts by which the draft tokens may differ from what a schedule's tiers allow. Drafts cut short by a grammar or by
the context's end explain a difference up to this share. Beyond it the tiers are not identified."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A quantity that the window does not identify; the message states why."""

    message: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """Interval that contains the quantity, both ends included."""

    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """True if both ends are equal."""
        return self.low == self.high


NOT_SPECULATING = Unknown("the engine does not speculate.")
NO_DRAFTS = Unknown("no draft was verified.")
NO_STEPS = Unknown("no request got a token after its first one.")
NO_REQUESTS = Unknown("no request got that far.")


# ----------------------------------------------------------------------------------------------------------- acceptance
def acceptance_length(window: Counters, setting: SpeculationSetting) -> Bounds | Unknown:
    """Return the mean tokens per verification step with a draft, bonus token included: 1 + accepted / drafts, from 1 to 1 + K.

    The lower bound is vLLM's own value. Static: the upper bound excludes dummy drafts. Schedule: exact, but it varies with the
    load, so never compare two. Adaptive: only a lower bound.
    """
    speculation = _speculation_counters(window, setting)
    if isinstance(speculation, Unknown):
        return speculation
    ceiling = 1.0 + max_speculative_tokens(setting)
    low = min(ceiling, 1 + speculation.accepted / speculation.drafts)
    match setting:
        case Static():
            drafts = true_drafts(window, setting)
            return Bounds(low, min(ceiling, 1 + speculation.accepted / drafts.low) if drafts.low > 0 else ceiling)
        case Adaptive():
            return Bounds(low, ceiling)
        case _:
            return Bounds(low, low)


def survival_by_position(window: Counters, setting: SpeculationSetting) -> tuple[Bounds, ...] | Unknown:
    """Return, by position, the share of drafts accepted up to and including it, of those with a token there: S_1, S_2, ... S_K.

    It is the survival of these drafts, and not of another K. A text fixes how many tokens are written, not how many drafts it
    takes. A larger K passes easy text in fewer drafts, so its drafts begin at harder positions of the text. On the same traffic
    its S_1..S_k are then lower than those of K = k, acceptance lengths by 1 to 5 % (`aerie.tuning.models.acceptance`). Never
    compare two K by them.

    Fixed K: bounds for dummy and cut drafts. Schedule: exact with one or two numbers of draft tokens (to
    `SCHEDULE_FIT_TOLERANCE`), bounds with more; a position that no draft reached lies between 0 and 1. Adaptive: lower bounds. If
    different drafts reached the positions, survival may increase with depth.
    """
    speculation = _speculation_counters(window, setting)
    if isinstance(speculation, Unknown):
        return speculation
    offered = drafts_by_position(window, setting)
    if isinstance(offered, Unknown):
        return offered
    survival: list[Bounds] = []
    for count, drafts in zip(speculation.accepted_per_position, offered, strict=True):
        low = min(1.0, count / drafts.high) if drafts.high > 0 else 0.0
        is_bounded = drafts.low > 0 and not isinstance(setting, Adaptive)
        survival.append(Bounds(low, min(1.0, count / drafts.low) if is_bounded else 1.0))
    return tuple(survival)


def drafts_by_position(window: Counters, setting: SpeculationSetting) -> tuple[Bounds, ...] | Unknown:
    """Return, by position, how many drafts had a token there: the denominators of `survival_by_position`, with its bounds and
    its limits."""
    speculation = _speculation_counters(window, setting)
    if isinstance(speculation, Unknown):
        return speculation
    position_count = len(speculation.accepted_per_position)
    if position_count != max_speculative_tokens(setting):
        return Unknown(
            f"the engine counts {position_count} positions, not the {max_speculative_tokens(setting)} of the setting '{setting}'."
        )
    offered = _bound_offered_drafts(window, speculation, setting)
    return offered if isinstance(offered, Unknown) else tuple(offered)


def true_drafts(window: Counters, setting: SpeculationSetting) -> Bounds:
    """Return the drafts that a drafter made, without dummy drafts: exact unless K is fixed and prompts were cached."""
    drafts = window.speculation.drafts if window.speculation else 0.0
    if isinstance(setting, Schedule):  # the scheduler pads no drafts of a schedule
        return Bounds(drafts, drafts)
    cached = window.prompt_tokens - window.computed_prompt_tokens
    dummies = min(window.first_tokens, cached) + window.preemptions
    return Bounds(max(0.0, drafts - dummies), drafts)


def mean_draft_length(window: Counters) -> float | Unknown:
    """Return the mean draft tokens per draft (K-bar)."""
    if window.speculation is None:
        return NOT_SPECULATING
    return _ratio(window.speculation.draft_tokens, window.speculation.drafts, NO_DRAFTS)


def _speculation_counters(window: Counters, setting: SpeculationSetting) -> SpeculationCounters | Unknown:
    if window.speculation is None or isinstance(setting, Off):
        return NOT_SPECULATING
    return window.speculation if window.speculation.drafts > 0 else NO_DRAFTS


def _bound_offered_drafts(
    window: Counters, speculation: SpeculationCounters, setting: SpeculationSetting
) -> list[Bounds] | Unknown:
    """Return, by position, how many drafts had a token there."""
    if not isinstance(setting, Schedule):
        max_k = max_speculative_tokens(setting)
        drafts = true_drafts(window, setting)
        missing_tokens = max(0.0, max_k * speculation.drafts - speculation.draft_tokens)
        # A draft that ends before a position is missing at least all tokens from there on.
        return [Bounds(max(0.0, drafts.low - missing_tokens / (max_k - position)), drafts.high) for position in range(max_k)]
    lengths = setting.nonzero_token_counts
    widest_counts = _drafts_by_length(speculation, lengths[0], lengths[-1])
    if isinstance(widest_counts, Unknown):
        return widest_counts
    # With more than two lengths the counts D_k that give D and L are a polytope, at whose vertices all but two of them are 0.
    vertices = [
        widest_counts,
        *(_drafts_by_length(speculation, *length_pair) for length_pair in itertools.combinations(lengths, 2)),
    ]
    totals = [
        [sum(count for length, count in vertex.items() if length > position) for position in range(setting.max_tokens)]
        for vertex in vertices
        if not isinstance(vertex, Unknown)
    ]
    return [Bounds(min(column), max(column)) for column in zip(*totals, strict=True)]


def _drafts_by_length(speculation: SpeculationCounters, short: int, long: int) -> dict[int, float] | Unknown:
    """Return how many drafts had each of the two numbers of tokens: from D1 + D2 = D and K1 D1 + K2 D2 = L."""
    total, tokens = speculation.drafts, speculation.draft_tokens
    share = 1.0 if short == long else (tokens - short * total) / ((long - short) * total)
    slack = abs(tokens / (long * total) - 1) if short == long else max(-share, share - 1, 0.0)
    if slack > SCHEDULE_FIT_TOLERANCE:
        return Unknown(
            f"{tokens:.0f} drafted tokens in {total:.0f} drafts do not come from drafts of "
            f"{short if short == long else f'{short} and {long}'}: the engine runs another setting, or grammars cut many drafts "
            "short."
        )
    long_drafts = total * min(1.0, max(0.0, share))
    return {short: total - long_drafts, long: long_drafts} if short != long else {long: total}


# ------------------------------------------------------------------------------------------------------------ step, batch
def mean_batch(window: Counters, api_servers: int = 1) -> Bounds | Unknown:
    """Return the mean requests that got a token after their first one, per engine iteration and data-parallel rank (B-bar).

    It is exact with one API-server process. With n processes the iterations were counted one to n times.
    """
    if api_servers < 1:
        raise ValueError(f"an engine has at least 1 API-server process, not {api_servers}.")
    mean = _ratio(window.request_steps, window.iterations, NO_STEPS)
    return mean if isinstance(mean, Unknown) else Bounds(mean, mean * api_servers)


def mean_step_interval(window: Counters) -> float | Unknown:
    """Return the mean seconds between the steps in which a request gets tokens, averaged over request-steps."""
    return _ratio(window.step_seconds, window.request_steps, NO_STEPS)


def tokens_per_step(window: Counters) -> float | Unknown:
    """Return the mean tokens that a request gets per step after its first token: the benefit of speculation, by which canaries
    are judged.

    Steps are outputs after a request's first (observations of inter_token_latency): they include neither chunks of a prompt nor
    dummy drafts. Tokens exclude those that the engine cuts off at an answer's end. They include text behind a stop string, which
    the front end cuts off.
    """
    return _ratio(window.generation_tokens - window.first_tokens, window.request_steps, NO_STEPS)


# ------------------------------------------------------------------------------------------------------------------- requests
def finished_requests(window: Counters) -> float:
    """Return the number of finished requests, whatever the reason. Requests whose client disconnected are not counted."""
    return sum(window.finished.values())


def error_share(window: Counters) -> float | Unknown:
    """Return the share of the finished requests that the engine aborted with an error of its own."""
    return _ratio(window.finished.get("error", 0.0), finished_requests(window), NO_REQUESTS)


def _ratio(part: float, whole: float, unknown: Unknown) -> float | Unknown:
    return part / whole if whole > 0 else unknown
