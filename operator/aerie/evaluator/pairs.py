"""The pair of answers to a request, and what is counted of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from aerie.analysis.equivalence import find_first_difference
from aerie.analysis.paired.answers import AnswerCounts, SampledAnswer
from aerie.analysis.paired.sums import PairSums, paired_score, time_slot_bucket
from aerie.engine.completions import GreedyCompletion
from aerie.evaluator.answers import Answer
from aerie.evaluator.requests import TOP_TOKENS, ReplayRequest


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of canary and control to a request. At least one of them has a second token."""

    request: ReplayRequest
    canary: Answer
    control: Answer
    canary_seconds: float
    """Seconds of generation, by the same clock as `control_seconds`."""
    control_seconds: float
    control_repeat: GreedyCompletion | None = field(default=None, repr=False)
    """The control's second answer to the request, if it was sent again."""


def add_steps(sums: PairSums, pair: Pair) -> PairSums:
    """Return the sums with the engine steps of one more pair."""
    return _add_amounts(sums, pair, pair.canary.steps, pair.control.steps)


def add_seconds(sums: PairSums, pair: Pair) -> PairSums:
    """Return the sums with the seconds of generation of one more pair."""
    return _add_amounts(sums, pair, pair.canary_seconds, pair.control_seconds)


def add_slot_seconds(sums: PairSums, pair: Pair, time: float) -> PairSums:
    """Return the sums by time slots with the seconds of generation of one more pair, which ended at `time`."""
    return _add_amounts(sums, pair, pair.canary_seconds, pair.control_seconds, time_slot_bucket(time))


def add_answers(counts: AnswerCounts, pair: Pair) -> AnswerCounts:
    """Return the counts with the answers of one more pair; the same counts if an engine returned no log-probabilities."""
    canary, control = pair.canary.completion, pair.control.completion
    if canary is None or control is None:
        return counts
    if not pair.request.is_greedy:
        counts = counts.add_sampled_pair(_sampled_answer(pair.canary, canary), _sampled_answer(pair.control, control))
        if pair.request.is_plain:
            counts = counts.add_tokens(_unlikely_tokens(canary), _unlikely_tokens(control), is_exact=pair.request.is_exact)
        return counts
    counts = counts.add_greedy_pair(is_different=canary.tokens != control.tokens)
    if pair.control_repeat is None:
        return counts
    return counts.add_repeated_request(
        canary_differs=find_first_difference(canary, control) is not None,
        control_differs=find_first_difference(control, pair.control_repeat) is not None,
    )


def _add_amounts(sums: PairSums, pair: Pair, canary: float, control: float, bucket: int | None = None) -> PairSums:
    """Return the sums with one more pair, in the bucket of its cluster by default."""
    parts = paired_score(canary, pair.canary.drafted_tokens, control, pair.control.drafted_tokens)
    return sums.add_pair(pair.request.bucket if bucket is None else bucket, *parts)


def _sampled_answer(answer: Answer, completion: GreedyCompletion) -> SampledAnswer:
    logprobs = [row[token] for token, row in zip(completion.tokens, completion.top_logprobs, strict=True)]
    return SampledAnswer(
        token_count=len(completion.tokens),
        is_truncated=answer.finish_reason == "length",
        most_frequent_token_count=max(Counter(completion.tokens).values()),
        mean_logprob=min(0.0, math.fsum(logprobs) / len(logprobs)),
    )


def _unlikely_tokens(completion: GreedyCompletion) -> Iterator[tuple[bool, float]]:
    """Yield for each token whether it is none of the target's k likeliest, and the probability of that by the target.

    k is the largest number below TOP_TOKENS after which the probability falls. So tokens of equal probability stay together, and
    k depends on the probabilities alone. A position is left out if its TOP_TOKENS likeliest tokens have the same probability.
    """
    for token, row in zip(completion.tokens, completion.top_logprobs, strict=True):
        likeliest = sorted(row.values(), reverse=True)[:TOP_TOKENS]
        k = next((k for k in range(len(likeliest) - 1, 0, -1) if likeliest[k - 1] > likeliest[k]), 0)
        if k:
            yield row[token] < likeliest[k - 1], 1 - math.fsum(map(math.exp, likeliest[:k]))
