"""Sums over pairs: they equal direct sums, in any order of adding and merging, and survive JSON."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.paired.sums import BUCKETS, PairSums, paired_score

PART = st.integers(0, 10**6).map(lambda sixteenths: sixteenths / 16)
"""Parts of which sums and squares are exact."""
PAIRS = st.lists(st.tuples(st.integers(0, BUCKETS - 1), PART, PART), max_size=40)


def sum_pairs(pairs: list[tuple[int, float, float]]) -> PairSums:
    sums = PairSums()
    for pair in pairs:
        sums = sums.add_pair(*pair)
    return sums


@given(PAIRS)
def test_sums_equal_direct_sums(pairs: list[tuple[int, float, float]]) -> None:
    sums = sum_pairs(pairs)
    assert sums.pairs == len(pairs)
    for bucket in range(BUCKETS):
        members = [pair for pair in pairs if pair[0] == bucket]
        assert sums.counts[bucket] == len(members)
        assert sums.canary[bucket] == sum(a for _, a, _ in members)
        assert sums.control[bucket] == sum(b for _, _, b in members)
    assert (sums.canary_total, sums.control_total) == (sum(a for _, a, _ in pairs), sum(b for *_, b in pairs))
    assert sums.canary_squares == sum(a * a for _, a, _ in pairs)
    assert sums.cross_products == sum(a * b for _, a, b in pairs)
    assert sums.control_squares == sum(b * b for *_, b in pairs)


@given(PAIRS, PAIRS, PAIRS)
def test_merging_is_associative_and_commutative_and_equals_adding(
    first: list[tuple[int, float, float]], second: list[tuple[int, float, float]], third: list[tuple[int, float, float]]
) -> None:
    left, middle, right = sum_pairs(first), sum_pairs(second), sum_pairs(third)
    assert left.merge(middle).merge(right) == left.merge(middle.merge(right)) == sum_pairs(first + second + third)
    assert left.merge(middle) == middle.merge(left)
    assert left.merge(PairSums()) == left


@given(PAIRS)
def test_sums_survive_json(pairs: list[tuple[int, float, float]]) -> None:
    sums = sum_pairs(pairs)
    restored = PairSums.from_dict(json.loads(json.dumps(sums.to_dict())))
    assert restored == sums
    assert list(map(type, astuple(restored))) == list(map(type, astuple(sums)))


def test_the_dict_of_a_small_batch_is_small() -> None:
    assert sum_pairs([(3, 1.5, 2.0), (3, 1.0, 1.0)]).to_dict() == {"buckets": [[3, 2, 2.5, 3.0]], "squares": [3.25, 4.0, 5.0]}


def test_parts_of_equal_lengths_are_half_of_each_amount() -> None:
    assert paired_score(20, 40, 25, 40) == (10, 12.5)


def test_unlike_lengths_do_not_change_the_ratio() -> None:
    """Both arms take half a step per token; only the lengths of the answers differ."""
    canary, control = paired_score(20, 40, 5, 10)
    assert canary == control == 4


def test_a_pair_with_an_answer_of_a_single_token_is_no_evidence() -> None:
    assert paired_score(0, 0, 5, 10) == (0, 0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1, 1, -2, 1), "control_amount is -2; give a finite number of at least 0"),
        ((1, float("nan"), 1, 1), "canary_tokens is nan; give a finite number"),
        ((0, 0, 0, 0), "canary_tokens and control_tokens are 0; skip a pair"),
    ],
)
def test_bad_numbers_are_refused(numbers: tuple[float, float, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_score(*numbers)


@pytest.mark.parametrize("bucket", [-1, BUCKETS])
def test_a_bucket_out_of_range_is_refused(bucket: int) -> None:
    with pytest.raises(ValueError, match=f"bucket is {bucket}; give a cluster's hash modulo 64"):
        PairSums().add_pair(bucket, 1.0, 1.0)
