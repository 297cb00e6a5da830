"""The clock: it goes on evenly, whatever is done to the machine's."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any

import pytest

from aerie.controller import clock


def test_a_jump_is_told_once_and_not_followed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    start = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)

    class Machine(datetime):
        jumped = timedelta()
        passed = 0.0

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return start.astimezone(tz) + timedelta(seconds=cls.passed) + cls.jumped

    monkeypatch.setattr(clock, "datetime", Machine)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 1000.0 + Machine.passed))
    ours = clock.Clock()
    assert ours.now() == start
    for jump in (timedelta(hours=2), timedelta(hours=-2), timedelta()):
        Machine.jumped, Machine.passed = jump, Machine.passed + 10
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert ours.now() == ours.now() == start + timedelta(seconds=Machine.passed)
        assert [f"{jump.total_seconds():+.0f} s" in record.getMessage() for record in caplog.records] == [True]
    assert clock.Clock().now() == start + timedelta(seconds=Machine.passed)


@pytest.mark.parametrize(("ahead", "followed"), [(-7200, True), (7200, True), (3, False), (-3, False)])
def test_leaders_go_by_the_clock_of_the_api_server(ahead: int, followed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A leader takes over times that another one has written: a machine whose clock is off must not read them by its own."""
    ours = clock.Clock()
    machine = ours.now()
    heard = time.monotonic() - 1.0
    with caplog.at_level(logging.WARNING):
        ours.synchronize(machine - timedelta(seconds=ahead + 1), heard)
        off = (ours.now() - machine).total_seconds()
    assert round(off) == (-ahead if followed else 0)
    assert len(caplog.records) == followed
    assert all(f"{ahead:+.0f} s" in record.getMessage() for record in caplog.records)
