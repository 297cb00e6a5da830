"""Which requests an isolated engine gets when: in the first window of a pair new ones, in the second one the same again.

    turn  T/0  (new requests, at their times)      T/1  (the same, at the same times)      T/2  (new ones) ...
          │wash-out│ requests are sent │ they end │wash-out│ they are sent │ they end │

Which drafter the engine has in a window is drawn by the operator and unknown here. So nothing that is sent depends on it.

New requests are sent for as long as most of them end in the window. A request that runs on into the next window would be drafted
by both drafters, and would be an unequal load: in a second window that of its first one, in a first window that of the pair
before. How long requests last is known from the answers: those with either drafter, because the slower one needs the time too.

Guarantees: pure, by the caller's clock. A request of the first window of a pair is returned for the second one once,
with its time in the window. Requests of a pair whose first window was not seen from its beginning are not recorded. Not
guaranteed: that a request ends in its window.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass

from aerie.evaluator.requests import ReplayRequest

FIRST_SECONDS = 2.1
"""Seconds of a window in which nothing is sent: the wash-out, of 2 s after the change. The change is seen after it was made."""
MAX_LATENESS_SECONDS = 1.0
"""Seconds between two reports of the engine's turn after which a new window may have begun too long ago to be used."""
END_SECONDS = 0.5
"""Seconds before the expected end of a window in which all requests should have ended: it began before it was seen."""
MIN_SENDING_SHARE = 0.25
"""Share of a window, without FIRST_SECONDS, in which requests are sent however long they last: for some evidence at least."""
UNMEASURED_SHARE = 0.6
"""Share of a window after which nothing is sent while the duration of requests is unknown. The operator makes windows four times
as long as the mean request of users."""
MEASURED_REQUESTS, MIN_MEASURED_REQUESTS = 64, 8
"""Number of answers of which the duration counts: the latest ones, and the least."""
ENDED_SHARE = 0.8
"""Share of the requests that have to end in the window, even if they are sent at the last moment."""
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
    is_late: bool
    """Whether it may have begun long before."""

    @property
    def begins_pair(self) -> bool:
        return self.number % 2 == 0

    def is_same(self, other: _Window) -> bool:
        return (self.trial, self.number) == (other.trial, other.number)

    def completes_pair_of(self, first: _Window) -> bool:
        return first.begins_pair and (self.trial, self.number) == (first.trial, first.number + 1)


class TurnSchedule:
    """The windows of an isolated engine, and the requests of the present pair. `window_seconds`: length of a window."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._durations: deque[float] = deque(maxlen=MEASURED_REQUESTS)
        self._window: _Window | None = None
        self._looked_at: float | None = None
        self._recorded: list[TimedRequest] = []
        self._recorded_bytes = 0

    def observe_turn(self, turn: str | None, now: float) -> tuple[TimedRequest, ...]:
        """Return the requests to repeat from now on, if this turn has just begun and is the second one of a pair.

        `turn`: as the engine reports it; None while it is not isolated, or without a window. Call this with each report: a
        window that begins between two reports further apart than MAX_LATENESS_SECONDS is left out.
        """
        is_late = self._looked_at is None or now - self._looked_at > MAX_LATENESS_SECONDS
        self._looked_at = now
        window, previous = _parse_turn(turn, now, is_late=is_late), self._window
        if window is not None and previous is not None and window.is_same(previous):
            return ()
        recorded, self._recorded, self._recorded_bytes = tuple(self._recorded), [], 0
        self._window = window
        if window is None or window.is_late or previous is None or not window.completes_pair_of(previous):
            return ()
        return recorded

    @property
    def recorded_bytes(self) -> int:
        """Size of the requests that were recorded in this window."""
        return self._recorded_bytes

    def observe_duration(self, seconds: float) -> None:
        """Take the duration of a request that was answered, with either drafter."""
        self._durations.append(seconds)

    def may_send(self, now: float) -> bool:
        """Return whether a new request may be sent now."""
        window = self._window
        if window is None or window.is_late or not window.begins_pair:
            return False
        return FIRST_SECONDS <= now - window.began_at <= self._compute_last_seconds()

    def record(self, request: ReplayRequest, now: float) -> None:
        """Record a new request that is sent now."""
        assert self._window is not None
        self._recorded.append(TimedRequest(now - self._window.began_at, request))
        self._recorded_bytes += len(request.body)

    def _compute_last_seconds(self) -> float:
        """Return the seconds of a window after which nothing is sent."""
        if len(self._durations) < MIN_MEASURED_REQUESTS:
            last = UNMEASURED_SHARE * self._window_seconds
        else:
            longest = sorted(self._durations)[math.ceil(ENDED_SHARE * len(self._durations)) - 1]
            last = self._window_seconds - END_SECONDS - longest
        return max(last, FIRST_SECONDS + MIN_SENDING_SHARE * (self._window_seconds - FIRST_SECONDS))


def _parse_turn(turn: str | None, now: float, *, is_late: bool) -> _Window | None:
    match = _TURN.fullmatch(turn or "")
    return None if match is None else _Window(match[1], int(match[2]), now, is_late)
