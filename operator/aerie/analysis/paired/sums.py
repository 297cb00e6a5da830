"""Sums over pairs of answers: all that the confidence sequence of a ratio needs, whatever the number of pairs.

A pair is the two answers to one request, by the canary's drafter and by the control's. Its two parts are Mantel-Haenszel's, for
an amount such as verification steps and the tokens that it produced:

    a = amount_canary * tokens_control / (tokens_canary + tokens_control)
    b = amount_control * tokens_canary / (tokens_canary + tokens_control)

The sum of a over the sum of b is the canary's amount per token, relative to the control's. Sampled answers of unlike lengths do
not bias it, and long answers weigh by their tokens. Greedy answers of equal lengths give half of each amount.

Pairs of a cluster, such as a conversation or a tenant, depend on each other. Clusters are spread over buckets by a hash. Sums by
bucket give the variance between clusters in constant memory.

Guarantees: `PairSums.merge` is associative and commutative, up to rounding. Sums and dict convert into each other without loss.
Not guaranteed: that clusters of different buckets are independent; that has to follow from what names a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

Number = TypeVar("Number", int, float)

BUCKETS = 64
"""Buckets that clusters are spread over: the variance between clusters has at most 63 degrees of freedom."""
TIME_SLOT_SECONDS = 10.0
"""Seconds in which other work of a pod's processors slows down all its answers alike, so that the times of these pairs depend on
each other. On the shared processors of a virtual machine, such waves were seen to last for 5 to 15 seconds."""


def paired_score(canary_amount: float, canary_tokens: float, control_amount: float, control_tokens: float) -> tuple[float, float]:
    """Return the parts (a, b) of a pair, in the amount's unit.

    Tokens are those that the amount produced. For verification steps and seconds of generation that is the answer's tokens less
    1, because the prefill gives the first token. An arm without any gives a pair without evidence: (0, 0), if its amount is 0.

    Raise ValueError for a number that is negative or not finite, and if both arms have no tokens.
    """
    numbers = {
        "canary_amount": canary_amount,
        "canary_tokens": canary_tokens,
        "control_amount": control_amount,
        "control_tokens": control_tokens,
    }
    for name, number in numbers.items():
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name} is {number}; give a finite number of at least 0.")
    tokens = canary_tokens + control_tokens
    if tokens == 0:
        raise ValueError("canary_tokens and control_tokens are 0; skip a pair in which neither drafter was used.")
    return canary_amount * control_tokens / tokens, control_amount * canary_tokens / tokens


def time_slot_bucket(seconds: float) -> int:
    """Return the bucket of a time, in seconds of any clock: slots take turns in the buckets."""
    return int(seconds // TIME_SLOT_SECONDS) % BUCKETS


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over pairs with the parts (a, b). Tuples have an item for each bucket."""

    counts: tuple[int, ...] = (0,) * BUCKETS
    """Pairs."""
    canary: tuple[float, ...] = (0.0,) * BUCKETS
    """Sums of a."""
    control: tuple[float, ...] = (0.0,) * BUCKETS
    """Sums of b."""
    canary_squares: float = 0.0
    """Sum of a^2 over all pairs."""
    cross_products: float = 0.0
    """Sum of a * b over all pairs."""
    control_squares: float = 0.0
    """Sum of b^2 over all pairs."""

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return sum(self.counts)

    @property
    def canary_total(self) -> float:
        """Sum of a over all pairs."""
        return math.fsum(self.canary)

    @property
    def control_total(self) -> float:
        """Sum of b over all pairs."""
        return math.fsum(self.control)

    def add_pair(self, bucket: int, canary: float, control: float) -> Self:
        """Return the sums with one more pair (a, b) of a cluster in this bucket; raise ValueError for a bucket out of range."""
        if not 0 <= bucket < BUCKETS:
            raise ValueError(f"bucket is {bucket}; give a cluster's hash modulo {BUCKETS}.")
        return type(self)(
            _add_at(self.counts, bucket, 1),
            _add_at(self.canary, bucket, canary),
            _add_at(self.control, bucket, control),
            self.canary_squares + canary * canary,
            self.cross_products + canary * control,
            self.control_squares + control * control,
        )

    def merge(self, other: Self) -> Self:
        """Return the sums over the pairs of both."""
        return type(self)(
            tuple(map(int.__add__, self.counts, other.counts)),
            tuple(map(float.__add__, self.canary, other.canary)),
            tuple(map(float.__add__, self.control, other.control)),
            self.canary_squares + other.canary_squares,
            self.cross_products + other.cross_products,
            self.control_squares + other.control_squares,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the sums for JSON: the rows [bucket, pairs, a, b] of buckets that have pairs, and the sums of squares."""
        rows = zip(range(BUCKETS), self.counts, self.canary, self.control, strict=True)
        return {
            "buckets": [list(row) for row in rows if row[1]],
            "squares": [self.canary_squares, self.cross_products, self.control_squares],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the sums of a dict that `to_dict` returned."""
        rows = {row[0]: row[1:] for row in document["buckets"]}
        counts, canary, control = zip(*(rows.get(bucket, (0, 0.0, 0.0)) for bucket in range(BUCKETS)), strict=True)
        return cls(counts, tuple(map(float, canary)), tuple(map(float, control)), *map(float, document["squares"]))


def _add_at(values: tuple[Number, ...], index: int, addend: Number) -> tuple[Number, ...]:
    """Return the values with one of them increased."""
    changed = list(values)
    changed[index] += addend
    return tuple(changed)
