"""An event loop in virtual time: its clock stands still while something runs, and jumps to the next timer when nothing does. And
long timeouts where time is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aerie.controller.scraping import http_client, http_fetch

Run = Callable[[Coroutine[Any, Any, None]], None]


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers = [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, min(timer.when() for timer in timers))
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def run() -> Run:
    """Runs a coroutine to its end in virtual time."""
    return run_virtually


@pytest.fixture
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long timeouts for tests with real sockets in real time, which a busy machine may delay."""
    monkeypatch.setattr(http_fetch, "HTTP_RESPONSE_TIMEOUT_SECONDS", 120.0)
    monkeypatch.setattr(http_client, "CONNECT_TIMEOUT_SECONDS", 120.0)


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)
