"""Which requests an isolated engine gets in which window."""

from __future__ import annotations

import pytest

from aerie.evaluator.requests import CHAT_PATH, ReplayRequest
from aerie.evaluator.turns import FIRST_SECONDS, TurnSchedule


def request(number: int) -> ReplayRequest:
    return ReplayRequest(CHAT_PATH, str(number).encode(), number, is_greedy=True, is_plain=False)


def record(schedule: TurnSchedule, start: float, count: int = 3) -> list[ReplayRequest]:
    requests = [request(number) for number in range(count)]
    for number, item in enumerate(requests):
        now = start + FIRST_SECONDS + number / 10
        assert schedule.may_send(now)
        schedule.record(item, now)
    return requests


def test_the_second_window_gets_the_requests_of_the_first_one() -> None:
    schedule = TurnSchedule(10.0)
    assert schedule.observe_turn(None, 0.0, is_first_look=True) == ()
    assert not schedule.may_send(1.0)
    assert schedule.observe_turn("1764/0", 5.0) == ()
    assert not schedule.may_send(5.0 + FIRST_SECONDS - 0.1)
    sent = record(schedule, 5.0)
    assert schedule.observe_turn("1764/0", 9.0) == ()
    assert not schedule.may_send(5.0 + 6.1)
    repeated = schedule.observe_turn("1764/1", 15.0)
    assert [item.request for item in repeated] == sent
    assert [item.seconds for item in repeated] == pytest.approx([FIRST_SECONDS, FIRST_SECONDS + 0.1, FIRST_SECONDS + 0.2])
    assert schedule.observe_turn("1764/1", 16.0) == ()
    assert not schedule.may_send(15.0 + FIRST_SECONDS)
    assert schedule.observe_turn("1764/2", 25.0) == ()
    assert schedule.may_send(25.0 + FIRST_SECONDS)


@pytest.mark.parametrize("turn", ["1764/2", "1764/3", "1800/1", None, "other"])
def test_nothing_is_repeated_in_another_window(turn: str | None) -> None:
    schedule = TurnSchedule(10.0)
    schedule.observe_turn(None, 0.0, is_first_look=True)
    schedule.observe_turn("1764/0", 5.0)
    record(schedule, 5.0)
    assert schedule.observe_turn(turn, 15.0) == ()
    assert schedule.observe_turn("1764/1", 25.0) == ()


def test_a_window_that_began_before_the_first_look_is_not_used() -> None:
    schedule = TurnSchedule(10.0)
    schedule.observe_turn("1764/4", 100.0, is_first_look=True)
    assert not schedule.may_send(100.0 + FIRST_SECONDS)
    assert schedule.observe_turn("1764/5", 105.0) == ()
    schedule.observe_turn("1764/6", 115.0)
    assert schedule.may_send(115.0 + FIRST_SECONDS)
