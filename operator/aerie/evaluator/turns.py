"""Which requests an isolated engine gets when: in the first window of a pair new ones, in the second one the same again.

    turn  T/0  (new requests, at their times)      T/1  (the same, at the same times)      T/2  (new ones) ...
          │wash-out│ requests are sent │ they end │wash-out│ they are sent │ they end │

Which drafter the engine has in a window is drawn by the operator and unknown here. So nothing that is sent depends on it.

Guarantees: pure, by the caller's clock. A request of the first window of a pair is returned for the second one once,
with its time in the window. Requests of a pair whose first window was not seen from its beginning are not recorded. Not
guaranteed: that a request ends in its window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aerie.evaluator.requests import ReplayRequest

FIRST_SECONDS = 2.5
"""Seconds of a window in which nothing is sent: the change of the drafter and the wash-out, of 2 s after the change."""
SENDING_SHARE = 0.6
"""Share of a window after which nothing is sent, so that most requests end in it."""
_TURN = re.compile(r"(\d{1,12})/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, and its time in a window."""

    seconds: float
    """Seconds from the beginning of the window."""
    request: ReplayRequest


@dataclass(frozen=True, slots=True)
class _Window:
    trial: str
    number: int
    began_at: float
    """Time of the caller's clock at which it was seen first."""

    @property
    def begins_pair(self) -> bool:
        return self.number % 2 == 0


class TurnSchedule:
    """The windows of an isolated engine, and the requests of the present pair. `window_seconds`: length of a window."""

    def __init__(self, window_seconds: float) -> None:
        self._last_seconds = max(FIRST_SECONDS, SENDING_SHARE * window_seconds)
        self._window: _Window | None = None
        self._recorded: list[TimedRequest] = []

    def observe_turn(self, turn: str | None, now: float, is_first_look: bool = False) -> tuple[TimedRequest, ...]:
        """Return the requests to repeat from now on, if this turn has just begun and is the second one of a pair.

        `turn`: as the engine reports it; None while it is not isolated, or without a window. `is_first_look`: whether the
        engine was not read before, so that the window may have begun long ago.
        """
        window = _parse_turn(turn, now)
        previous = self._window
        if window is not None and previous is not None and (window.trial, window.number) == (previous.trial, previous.number):
            return ()
        recorded, self._recorded = tuple(self._recorded), []
        self._window = None if is_first_look and window is not None and window.begins_pair else window
        if window is None or previous is None or window.begins_pair:
            return ()
        follows = (window.trial, window.number) == (previous.trial, previous.number + 1)
        return recorded if follows else ()

    @property
    def recorded_count(self) -> int:
        """Number of requests that were recorded in this window."""
        return len(self._recorded)

    def may_send(self, now: float) -> bool:
        """Return whether a new request may be sent now."""
        window = self._window
        return window is not None and window.begins_pair and FIRST_SECONDS <= now - window.began_at <= self._last_seconds

    def record(self, request: ReplayRequest, now: float) -> None:
        """Record a new request that is sent now."""
        assert self._window is not None
        self._recorded.append(TimedRequest(now - self._window.began_at, request))


def _parse_turn(turn: str | None, now: float) -> _Window | None:
    match = _TURN.fullmatch(turn or "")
    return None if match is None else _Window(match[1], int(match[2]), now)
