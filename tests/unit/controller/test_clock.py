"""The clock is monotonic, even if the machine's clock is changed."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any

import pytest

from aerie.controller import clock


def test_clock_jump_is_logged_once_and_not_followed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    start = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)

    class MachineClock(datetime):
        jumped = timedelta()
        passed = 0.0

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return start.astimezone(tz) + timedelta(seconds=cls.passed) + cls.jumped

    monkeypatch.setattr(clock, "datetime", MachineClock)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 1000.0 + MachineClock.passed))
    monotonic_clock = clock.Clock()
    assert monotonic_clock.now() == start
    for jump in (timedelta(hours=2), timedelta(hours=-2), timedelta()):
        MachineClock.jumped, MachineClock.passed = jump, MachineClock.passed + 10
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert monotonic_clock.now() == monotonic_clock.now() == start + timedelta(seconds=MachineClock.passed)
        assert [f"{jump.total_seconds():+.0f} s" in record.getMessage() for record in caplog.records] == [True]
    assert clock.Clock().now() == start + timedelta(seconds=MachineClock.passed)


@pytest.mark.parametrize(("seconds_ahead", "is_followed"), [(-7200, True), (7200, True), (3, False), (-3, False)])
def test_clock_follows_the_api_server_beyond_a_tolerance(
    seconds_ahead: int, is_followed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A leader reads times that another one has written: its own machine's clock must not shift them."""
    leader_clock = clock.Clock()
    machine_time = leader_clock.now()
    received_at = time.monotonic() - 1.0
    with caplog.at_level(logging.WARNING):
        leader_clock.synchronize(machine_time - timedelta(seconds=seconds_ahead + 1), received_at)
        offset = (leader_clock.now() - machine_time).total_seconds()
    assert round(offset) == (-seconds_ahead if is_followed else 0)
    assert len(caplog.records) == is_followed
    assert all(f"{seconds_ahead:+.0f} s" in record.getMessage() for record in caplog.records)
