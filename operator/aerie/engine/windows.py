"""What a window of counters says about an engine: acceptance, batch, latency, load, each with its bias made visible.

A window is the difference of two scrapes (`samples.between`), or a sum of such over time or pods. Guarantees: where the counters
do not identify a quantity the answer is `Unknown` with the reason, and where they only bound it, `Bounds`. Not guaranteed: that a
quantity is the same for other traffic; a window tells about the requests that were in it.

Five biases of vLLM's counters, none of which a longer window cures:

* Dummy drafts. With a fixed K the scheduler pads a request that is admitted with one token left to compute, all others cached,
  and counts K drafted tokens, none accepted (`pad_spec_decode` in vllm/v1/core/sched/scheduler.py, from 0.25 on). They are not
  counted apart, but there are no more of them than requests, nor than cached prompt tokens, but for requests that come back after
  a preemption. One-token prompts, which are padded uncached, are taken not to occur.
* Cut drafts. Under a grammar or near the context's end a draft has fewer than K tokens; only the sum of drafted tokens shows it.
* Schedules. Accepted tokens are counted by position, drafts only in total: how many drafts reached a position follows when one or
  two numbers of draft tokens were in play; with more it is bounded.
* Adaptive verification trims drafts on the device, and the scheduler books what was trimmed as not accepted: all acceptance is
  then a lower bound.
* Tokens behind a stop. Accepted tokens count even where the request ended before them, so (generation - first tokens) / steps
  lies below 1 + accepted / drafts, the more the shorter the answers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from aerie.engine.histogram import Quantile
from aerie.engine.samples import Counters, Speculation
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, max_tokens

FIT_TOLERANCE = 0.01
"""Share of drafts by which the drafted tokens may miss what a schedule's tiers allow. Drafts cut short by a grammar or by the
context's end make them miss it; up to here that is taken for such, beyond it the tiers are not identified."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The window does not identify the quantity; the sentence says why."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """The quantity lies between the two, both included."""

    low: float
    high: float

    @property
    def exact(self) -> bool:
        return self.low == self.high


NOT_SPECULATING = Unknown("the engine does not speculate.")
NO_DRAFTS = Unknown("no draft was verified.")
NO_STEPS = Unknown("no request got a token after its first one.")
NO_REQUESTS = Unknown("no request got that far.")


# ----------------------------------------------------------------------------------------------------------- acceptance
def acceptance_length(window: Counters, setting: Setting) -> Bounds | Unknown:
    """Mean tokens per verification step with a draft, bonus token included: 1 + accepted / drafts, from 1 to 1 + K.

    The lower bound is vLLM's own figure. Static: between that and the one without dummy drafts. Schedule: exact, and it moves
    with the load, so never compare two. Adaptive: a lower bound.
    """
    speculation = _speculation(window, setting)
    if isinstance(speculation, Unknown):
        return speculation
    ceiling = 1.0 + max_tokens(setting)
    low = min(ceiling, 1 + speculation.accepted / speculation.drafts)
    match setting:
        case Static():
            drafts = true_drafts(window, setting)
            return Bounds(low, min(ceiling, 1 + speculation.accepted / drafts.low) if drafts.low > 0 else ceiling)
        case Adaptive():
            return Bounds(low, ceiling)
        case _:
            return Bounds(low, low)


def survival(window: Counters, setting: Setting) -> tuple[Bounds, ...] | Unknown:
    """By position, the share of drafts accepted up to and including it, of those that had a token there: S_1, S_2, ... S_K.

    It is the survival of these drafts, and no other K's: a text fixes how many tokens are written, not how many drafts it takes.
    A larger K passes easy text in fewer drafts, so its drafts begin at harder places, and on the same traffic its S_1..S_k are
    lower than those of K = k, acceptance lengths by 1 to 5 % (`aerie.tuning.acceptance`). Never compare two K by them.

    Fixed K: bounds for dummy and cut drafts. Schedule: exact with one or two numbers of draft tokens (to `FIT_TOLERANCE`), bounds
    with more; a position that no draft reached lies between 0 and 1. Adaptive: lower bounds. Where positions were reached by
    different drafts, survival may rise with depth.
    """
    speculation = _speculation(window, setting)
    if isinstance(speculation, Unknown):
        return speculation
    offered = drafts_by_position(window, setting)
    if isinstance(offered, Unknown):
        return offered
    found: list[Bounds] = []
    for count, drafts in zip(speculation.accepted_per_position, offered, strict=True):
        low = min(1.0, count / drafts.high) if drafts.high > 0 else 0.0
        known = drafts.low > 0 and not isinstance(setting, Adaptive)
        found.append(Bounds(low, min(1.0, count / drafts.low) if known else 1.0))
    return tuple(found)


def drafts_by_position(window: Counters, setting: Setting) -> tuple[Bounds, ...] | Unknown:
    """By position, how many drafts had a token there: the denominators of `survival`, with its bounds and its limits."""
    speculation = _speculation(window, setting)
    if isinstance(speculation, Unknown):
        return speculation
    counted = len(speculation.accepted_per_position)
    if counted != max_tokens(setting):
        return Unknown(f"the engine counts {counted} positions, not the {max_tokens(setting)} of the setting '{setting}'.")
    offered = _offered(window, speculation, setting)
    return offered if isinstance(offered, Unknown) else tuple(offered)


def true_drafts(window: Counters, setting: Setting) -> Bounds:
    """Drafts that a drafter made, dummy drafts taken off: exact unless K is fixed and prompts were cached."""
    drafts = window.speculation.drafts if window.speculation else 0.0
    if isinstance(setting, Schedule):  # the scheduler pads nothing then
        return Bounds(drafts, drafts)
    cached = window.prompt_tokens - window.computed_prompt_tokens
    dummies = min(window.first_tokens, cached) + window.preemptions
    return Bounds(max(0.0, drafts - dummies), drafts)


def mean_draft_length(window: Counters) -> float | Unknown:
    """Draft tokens per draft (K-bar)."""
    if window.speculation is None:
        return NOT_SPECULATING
    return _ratio(window.speculation.draft_tokens, window.speculation.drafts, NO_DRAFTS)


def coverage(window: Counters, setting: Setting) -> Bounds | Unknown:
    """Share of request-steps that had a draft; below 1 where tiers draft nothing or drafts were skipped."""
    if window.speculation is None:
        return NOT_SPECULATING
    if window.request_steps <= 0:
        return NO_STEPS
    drafts = true_drafts(window, setting)
    return Bounds(min(1.0, drafts.low / window.request_steps), min(1.0, drafts.high / window.request_steps))


def _speculation(window: Counters, setting: Setting) -> Speculation | Unknown:
    if window.speculation is None or isinstance(setting, Off):
        return NOT_SPECULATING
    return window.speculation if window.speculation.drafts > 0 else NO_DRAFTS


def _offered(window: Counters, speculation: Speculation, setting: Setting) -> list[Bounds] | Unknown:
    """By position, how many drafts had a token there."""
    if not isinstance(setting, Schedule):
        deepest = max_tokens(setting)
        drafts = true_drafts(window, setting)
        lacking = max(0.0, deepest * speculation.drafts - speculation.draft_tokens)
        # A draft that ends before a position lacks at least all tokens from there on.
        return [Bounds(max(0.0, drafts.low - lacking / (deepest - position)), drafts.high) for position in range(deepest)]
    lengths = setting.drafting
    widest = _drafts_by_length(speculation, lengths[0], lengths[-1])
    if isinstance(widest, Unknown):
        return widest
    # With more than two lengths the counts D_k that give D and L are a polytope, at whose vertices all but two of them are 0.
    vertices = [widest, *(_drafts_by_length(speculation, *pair) for pair in itertools.combinations(lengths, 2))]
    totals = [
        [sum(n for length, n in one.items() if length > position) for position in range(setting.max_tokens)]
        for one in vertices
        if not isinstance(one, Unknown)
    ]
    return [Bounds(min(column), max(column)) for column in zip(*totals, strict=True)]


def _drafts_by_length(speculation: Speculation, short: int, long: int) -> dict[int, float] | Unknown:
    """How many drafts had each of these numbers of tokens: from D1 + D2 = D and K1 D1 + K2 D2 = L."""
    total, tokens = speculation.drafts, speculation.draft_tokens
    share = 1.0 if short == long else (tokens - short * total) / ((long - short) * total)
    slack = abs(tokens / (long * total) - 1) if short == long else max(-share, share - 1, 0.0)
    if slack > FIT_TOLERANCE:
        return Unknown(
            f"{tokens:.0f} drafted tokens in {total:.0f} drafts do not come from drafts of "
            f"{short if short == long else f'{short} and {long}'}: the engine runs another setting, or grammars cut many drafts "
            "short."
        )
    many = total * min(1.0, max(0.0, share))
    return {short: total - many, long: many} if short != long else {long: total}


# ------------------------------------------------------------------------------------------------------------ step, batch
def batch(window: Counters, api_servers: int = 1) -> Bounds | Unknown:
    """Mean requests that got a token after their first one, per engine iteration and data-parallel rank (B-bar).

    Exact with one API-server process; with n of them the iterations were counted one to n times.
    """
    if api_servers < 1:
        raise ValueError(f"an engine has at least 1 API-server process, not {api_servers}.")
    mean = _ratio(window.request_steps, window.iterations, NO_STEPS)
    return mean if isinstance(mean, Unknown) else Bounds(mean, mean * api_servers)


def prefill_per_iteration(window: Counters, api_servers: int = 1) -> Bounds | Unknown:
    """Mean prompt tokens computed per engine iteration; bounded like `batch`."""
    if api_servers < 1:
        raise ValueError(f"an engine has at least 1 API-server process, not {api_servers}.")
    mean = _ratio(window.computed_prompt_tokens, window.iterations, NO_STEPS)
    return mean if isinstance(mean, Unknown) else Bounds(mean, mean * api_servers)


def step_interval(window: Counters) -> float | Unknown:
    """Seconds between the steps that a request gets tokens in, averaged over request-steps."""
    return _ratio(window.step_seconds, window.request_steps, NO_STEPS)


def tokens_per_step(window: Counters) -> float | Unknown:
    """Mean tokens that a request gets per step after its first token: what speculation gives users, by which canaries are judged.

    Steps are outputs after a request's first (observations of inter_token_latency): chunks of a prompt and dummy drafts are in
    none, and what the engine cuts off at an answer's end is in no token. Text behind a stop string is: the front end cuts that.
    """
    return _ratio(window.generation_tokens - window.first_tokens, window.request_steps, NO_STEPS)


# ---------------------------------------------------------------------------------------------------------------- latency
def time_per_output_token(window: Counters) -> float | Unknown:
    """Seconds per token after the first, averaged over tokens: a user's TPOT, whatever the number of tokens per step."""
    return _ratio(window.step_seconds, window.generation_tokens - window.first_tokens, NO_STEPS)


def time_per_output_token_quantile(window: Counters, share: float) -> Quantile | Unknown:
    """Seconds; over requests that finished. One-token requests count as 0, so a quantile can only be too low."""
    return window.time_per_output_token.quantile(share) or NO_REQUESTS


def time_to_first_token_quantile(window: Counters, share: float) -> Quantile | Unknown:
    """Seconds; over requests that got their first token."""
    return window.time_to_first_token.quantile(share) or NO_REQUESTS


def mean_time_to_first_token(window: Counters) -> float | Unknown:
    """Seconds."""
    return _ratio(window.time_to_first_token.sum, window.first_tokens, NO_REQUESTS)


def mean_queue_time(window: Counters) -> float | Unknown:
    """Seconds between a request's queueing and its first scheduling, over requests that finished."""
    return _ratio(window.queue_seconds, window.queued_requests, NO_REQUESTS)


# ------------------------------------------------------------------------------------------------------------------- load
def finished_requests(window: Counters) -> float:
    """Requests that finished, for whatever reason; those whose client went away are in none."""
    return sum(window.finished.values())


def error_share(window: Counters) -> float | Unknown:
    """Share of the finished requests that the engine gave up with an error of its own."""
    return _ratio(window.finished.get("error", 0.0), finished_requests(window), NO_REQUESTS)


def prefix_cache_hit_share(window: Counters) -> float | Unknown:
    """Share of prompt tokens looked up that were in the engine's prefix cache."""
    return _ratio(window.prefix_cache_hits, window.prefix_cache_queries, Unknown("no prompt token was looked up."))


def rate(count: float, seconds: float) -> float:
    """A count as a rate per second. Raises ValueError for a window without length."""
    if not seconds > 0:
        raise ValueError(f"a window lasts longer than {seconds} seconds.")
    return count / seconds


def _ratio(part: float, whole: float, otherwise: Unknown) -> float | Unknown:
    return part / whole if whole > 0 else otherwise
