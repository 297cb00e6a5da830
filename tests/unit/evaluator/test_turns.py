"""Which requests an isolated engine gets in which window."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.evaluator.requests import CHAT_PATH, ReplayRequest
from aerie.evaluator.turns import END_SECONDS, ENDED_SHARE, FIRST_SECONDS, MAX_LATENESS_SECONDS, TimedRequest, TurnSchedule

LOOK_SECONDS = 0.2


class Watched:
    """A schedule whose engine is read all the time."""

    def __init__(self, window_seconds: float = 10.0) -> None:
        self.schedule, self.now, self.turn = TurnSchedule(window_seconds), 100.0, ""
        self.observe(None)

    def observe(self, turn: str | None) -> tuple[TimedRequest, ...]:
        self.turn = turn or ""
        return self.schedule.observe_turn(turn, self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, in which the engine reports the same turn."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + LOOK_SECONDS)
            assert self.schedule.observe_turn(self.turn or None, self.now) == ()

    def may_send(self) -> bool:
        return self.schedule.may_send(self.now)

    def record(self, count: int = 3) -> list[ReplayRequest]:
        """Send requests, from the first moment on, a tenth of a second apart."""
        requests = [request(number) for number in range(count)]
        self.wait(FIRST_SECONDS + 0.001)
        for item in requests:
            assert self.may_send()
            self.schedule.record(item, self.now)
            self.wait(0.1)
        return requests

    def find_last_moment(self) -> float:
        """Return the seconds from now after which nothing is sent any more, in steps."""
        began, last = self.now, 0.0
        for _ in range(1000):
            self.wait(LOOK_SECONDS / 2)
            if self.may_send():
                last = self.now - began
        return last


def request(number: int) -> ReplayRequest:
    return ReplayRequest(CHAT_PATH, str(number).encode(), number, is_greedy=True, is_plain=False, is_exact=False)


def test_the_second_window_gets_the_requests_of_the_first_one() -> None:
    watched = Watched()
    assert not watched.may_send()
    assert watched.observe("1764/0") == ()
    assert not watched.may_send()
    sent = watched.record()
    assert watched.schedule.recorded_bytes == 3
    watched.wait(4.0)
    assert not watched.may_send()
    watched.wait(3.0)
    repeated = watched.observe("1764/1")
    assert [item.request for item in repeated] == sent
    assert [item.seconds for item in repeated] == pytest.approx([FIRST_SECONDS + number / 10 for number in range(3)], abs=0.01)
    assert watched.schedule.recorded_bytes == 0
    watched.wait(FIRST_SECONDS + 0.1)
    assert not watched.may_send()
    assert watched.observe("1764/2") == ()
    watched.wait(FIRST_SECONDS + 0.1)
    assert watched.may_send()


@pytest.mark.parametrize("turn", ["1764/2", "1764/3", "1800/1", None, "other"])
def test_nothing_is_repeated_in_another_window(turn: str | None) -> None:
    watched = Watched()
    watched.observe("1764/0")
    watched.record()
    assert watched.observe(turn) == ()
    watched.wait(1.0)
    assert watched.observe("1764/1") == ()


@pytest.mark.parametrize("number", [4, 5])
def test_a_window_that_began_before_the_first_report_is_not_used(number: int) -> None:
    watched = Watched()
    watched.schedule = TurnSchedule(10.0)
    watched.observe(f"1764/{number}")
    watched.wait(FIRST_SECONDS + 0.1)
    assert not watched.may_send()
    while number < 6:
        number += 1
        assert watched.observe(f"1764/{number}") == ()
        watched.wait(FIRST_SECONDS + 0.1)
    assert watched.may_send()


def test_a_window_that_began_while_the_engine_did_not_report_is_not_used() -> None:
    watched = Watched()
    watched.observe("1764/0")
    watched.record()
    watched.now += MAX_LATENESS_SECONDS + 0.1
    assert watched.observe("1764/1") == (), "its requests would be too late"
    watched.wait(5.0)
    watched.now += MAX_LATENESS_SECONDS + 0.1
    watched.observe("1764/2")
    watched.wait(FIRST_SECONDS + 0.1)
    assert not watched.may_send()
    watched.observe("1764/3")
    watched.wait(1.0)
    watched.observe("1764/4")
    watched.wait(FIRST_SECONDS + 0.1)
    assert watched.may_send()


def test_a_gap_within_a_window_changes_nothing() -> None:
    watched = Watched()
    watched.observe("1764/0")
    watched.now += FIRST_SECONDS + 0.1
    assert watched.may_send()
    watched.schedule.record(request(0), watched.now)
    watched.observe("1764/0")
    watched.wait(1.0)
    assert len(watched.observe("1764/1")) == 1


def test_short_requests_are_sent_for_most_of_the_window() -> None:
    watched = Watched(8.0)
    watched.observe("1764/0")
    assert watched.find_last_moment() == pytest.approx(0.6 * 8.0, abs=0.1), "unmeasured"
    for _ in range(64):
        watched.schedule.observe_duration(0.4)
    watched.observe("1764/1")
    watched.wait(1.0)
    watched.observe("1764/2")
    assert watched.find_last_moment() == pytest.approx(8.0 - END_SECONDS - 0.4, abs=0.1)


@given(st.floats(8.0, 60.0), st.lists(st.floats(0.01, 200.0), min_size=8, max_size=200), st.randoms(use_true_random=False))
def test_requests_are_sent_as_long_as_most_of_them_end(
    window_seconds: float, durations: list[float], source: random.Random
) -> None:
    watched = Watched(window_seconds)
    for seconds in durations:
        watched.schedule.observe_duration(seconds)
    watched.observe("1764/0")
    last = watched.find_last_moment()
    least = FIRST_SECONDS + (window_seconds - FIRST_SECONDS) / 4
    assert last >= least - 0.11, "some are sent in every case"
    assert last <= window_seconds
    latest = durations[-64:]
    if last > least + 0.01:
        ended = sum(last + seconds <= window_seconds - END_SECONDS + 0.001 for seconds in latest)
        assert ended >= ENDED_SHARE * len(latest)
    source.shuffle(latest)
    shuffled = Watched(window_seconds)
    for seconds in latest:
        shuffled.schedule.observe_duration(seconds)
    shuffled.observe("1764/0")
    assert shuffled.find_last_moment() == pytest.approx(last, abs=0.11)
