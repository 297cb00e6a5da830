"""Reads the counts of an engine's answer.

vLLM calls `metrics.speculative_decoding` experimental. Only `acceptance_histogram` and `num_spec_steps` are read of it: index j
of the histogram counts the verification steps that accepted j draft tokens.

Two facts of vLLM 0.32 and 0.33 matter. A last step that accepts tokens past the end of the answer counts them all
(v1/core/sched/scheduler.py, vllm issue 56101), so an answer's tokens are those of `usage`. And an answer that ends at a stop
string has no counts, because its end is noticed outside of the scheduler (v1/engine/output_processor.py).

Guarantees: an answer with malformed counts is one without counts. No error quotes an answer. Not guaranteed: the number of steps
without a draft, which vLLM does not count; as many are added as the tokens prove.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeGuard

from aerie.engine.completions import GreedyCompletion

_FINISH_REASONS = frozenset(("stop", "length", "tool_calls", "repetition"))
_COUNT_LIMIT = 2**40
"""Limit of integers, far above any count: sums of counts stay exact as floats."""


class AnswerProblem(Enum):
    """Reason why an engine's response has no counts."""

    REJECTED = auto()
    """The engine rejects the request: a status of 400 to 499."""
    UNAVAILABLE = auto()
    """The engine is paused, ends, or has too many requests: status 429 or 503, or an answer that it has cut off."""
    FAILED = auto()
    """No whole answer."""
    WITHOUT_METRICS = auto()
    """A whole answer without counts of speculation."""
    STOP_STRING = auto()
    """A whole answer that ended at a stop string, without counts of speculation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Counts of an answer."""

    tokens: int
    """Generated tokens; at least 1."""
    steps: int
    """Engine steps after the prefill."""
    histogram: tuple[int, ...]
    """Verification steps by the number of accepted draft tokens."""
    finish_reason: str
    """`stop`, `length`, `tool_calls`, `repetition` or `other`."""
    engine_seconds: float | None = None
    """Seconds from the first to the last token by the engine's clock; None without `--enable-per-request-metrics`."""
    completion: GreedyCompletion | None = field(default=None, repr=False)
    """The generated tokens and the likeliest ones, to compare with the other answer and then to forget; None without them."""

    @property
    def drafted_tokens(self) -> int:
        """Tokens that the steps produced: all but the first, which comes from the prefill."""
        return self.tokens - 1


def parse_answer(body: bytes) -> Answer | AnswerProblem:
    """Return the counts of the body of a response with status 200, or why there are none."""
    try:
        document = json.loads(body)
        (choice,) = document["choices"]
        tokens = document["usage"]["completion_tokens"]
        finish_reason = choice["finish_reason"]
        metrics = document.get("metrics") or {}
        speculation = metrics.get("speculative_decoding")
        stop_reason = choice.get("stop_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return AnswerProblem.FAILED
    if finish_reason == "abort":
        return AnswerProblem.UNAVAILABLE
    if not _is_count(tokens) or tokens < 1 or not isinstance(finish_reason, str) or finish_reason == "error":
        return AnswerProblem.FAILED
    if speculation is None and isinstance(stop_reason, str):
        return AnswerProblem.STOP_STRING
    histogram = _parse_histogram(speculation)
    if histogram is None:
        return AnswerProblem.WITHOUT_METRICS
    booked = sum((accepted + 1) * count for accepted, count in enumerate(histogram))
    return Answer(
        tokens,
        sum(histogram) + max(0, tokens - 1 - booked),
        histogram,
        finish_reason if finish_reason in _FINISH_REASONS else "other",
        _parse_seconds(metrics.get("generation_time_ms")),
        _parse_completion(choice.get("logprobs")),
    )


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _COUNT_LIMIT


def _parse_histogram(speculation: object) -> tuple[int, ...] | None:
    if not isinstance(speculation, Mapping):
        return None
    histogram, steps = speculation.get("acceptance_histogram"), speculation.get("num_spec_steps")
    if not isinstance(histogram, Sequence) or not all(map(_is_count, histogram)) or sum(histogram) != steps:
        return None
    return tuple(histogram)


def _parse_seconds(milliseconds: object) -> float | None:
    return milliseconds / 1000 if _is_number(milliseconds) and milliseconds >= 0 else None


def _parse_completion(logprobs: object) -> GreedyCompletion | None:
    """Return the tokens with their log-probabilities, in the form of either endpoint."""
    try:
        rows = list(_iter_rows(logprobs))
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    if not rows or not all(_is_number(value) for _, row in rows for value in row.values()):
        return None
    return GreedyCompletion(tuple(token for token, _ in rows), tuple(row for _, row in rows))


def _iter_rows(logprobs: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each token with the log-probabilities of the likeliest ones and its own."""
    if "content" in logprobs:
        for row in logprobs["content"]:
            token = str(row["token"])
            yield token, {str(top["token"]): top["logprob"] for top in row["top_logprobs"]} | {token: row["logprob"]}
    else:
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            yield str(token), {**top, str(token): logprob}


def _is_number(value: object) -> TypeGuard[float]:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < _COUNT_LIMIT)
