"""The windows of many pods, added up one change at a time: the same as all of them added up at once."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.controller.sums import Sums
from aerie.engine.histogram import Histogram
from aerie.engine.samples import Counters, Speculation

CHANGES = st.lists(
    st.tuples(
        st.sampled_from([f"pod-{number}" for number in range(24)]), st.sampled_from("ab"), st.none() | st.integers(0, 10**9)
    ),
    max_size=120,
)


def window(count: int) -> Counters:
    times = Histogram((0.1, float("inf")), (float(count), float(count)), count / 8)
    return Counters(
        count, count, count, count, count, 0, {"stop": count}, count, count / 4, count, count, count / 2, times, times
    )


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_sums_are_those_of_the_latest_windows(changes: list[tuple[str, str, int | None]]) -> None:
    sums, latest = Sums(), dict[str, tuple[str, Counters]]()
    for pod, group, count in changes:
        made = None if count is None else window(count)
        sums.put(pod, group, made, 60.0)
        latest.pop(pod, None)
        if made is not None:
            latest[pod] = (group, made)
    totals = sums.totals(0.0)
    for group in "ab":
        mine = [made for of, made in latest.values() if of == group]
        if mine:
            assert totals[group] == functools.reduce(operator.add, mine)
        else:
            assert group not in totals
    assert sums.totals(61.0) == {}, "all are stale"


def test_a_pod_of_another_build_is_left_out() -> None:
    sums = Sums()
    sums.put("a", "group", window(8), 60.0)
    other = replace(window(4), speculation=Speculation(1, 1, 1, (1.0,)))
    with pytest.raises(ValueError, match="speculation"):
        sums.put("b", "group", other, 60.0)
    assert sums.totals(0.0) == {"group": window(8)}
    sums.drop("b")
    sums.put("a", "group", window(16), 60.0)
    assert sums.totals(0.0) == {"group": window(16)}


def test_a_page_costs_as_much_with_a_thousand_pods_as_with_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    def additions(pods: int) -> int:
        sums, count = Sums(), 0
        for number in range(pods):
            sums.put(f"pod-{number}", "group", window(number), 60.0)
        plain, less = Counters.__add__, Counters.__sub__

        def add(left: Counters, right: Counters) -> Counters:
            nonlocal count
            count += 1
            return plain(left, right)

        def subtract(left: Counters, right: Counters) -> Counters:
            nonlocal count
            count += 1
            return less(left, right)

        with monkeypatch.context() as patched:
            patched.setattr(Counters, "__add__", add)
            patched.setattr(Counters, "__sub__", subtract)
            for number in range(10):
                sums.put(f"pod-{number}", "group", window(7), 60.0)
                sums.totals(0.0)
        return count

    assert additions(900) <= 2 * additions(10)
