"""Values of the criteria as numerator and denominator, from the sums over an arm.

Guarantees: both are sums, so they add up over pods and blocks. Not guaranteed: a denominator above 0.
"""

from __future__ import annotations

from aerie.analysis.measurement.counts import EngineCounts


def tokens_per_step(counts: EngineCounts) -> tuple[float, float]:
    return counts.decode_tokens, counts.request_steps


def acceptance_length(counts: EngineCounts) -> tuple[float, float]:
    return counts.drafts + counts.accepted_tokens, counts.drafts


def time_per_output_token(counts: EngineCounts) -> tuple[float, float]:
    return counts.decode_seconds, counts.decode_tokens


def tokens_per_busy_second(counts: EngineCounts) -> tuple[float, float]:
    return counts.output_tokens, counts.busy_seconds


def slow_output_share(counts: EngineCounts) -> tuple[float, float]:
    return counts.slow_output_requests, counts.timed_requests


def time_to_first_token(counts: EngineCounts) -> tuple[float, float]:
    return counts.first_token_seconds, counts.first_tokens


def slow_first_token_share(counts: EngineCounts) -> tuple[float, float]:
    return counts.slow_first_token_requests, counts.first_tokens


def failed_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.failed_requests, counts.finished_requests


def output_length(counts: EngineCounts) -> tuple[float, float]:
    return counts.output_tokens, counts.finished_requests


def abandoned_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.abandoned_requests, counts.first_tokens


def truncated_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.truncated_requests, counts.finished_requests


def preemptions(counts: EngineCounts) -> tuple[float, float]:
    return counts.preemptions, counts.finished_requests
