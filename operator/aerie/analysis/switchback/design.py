"""Draws which drafter each pod of a trial uses in each window, and sets how long windows last.

    pair           0           1           2        Two adjacent windows are a pair: one with each drafter, in random order.
    window       0   1       2   3       4   5      Pods 2m and 2m + 1 are partners: they have opposite orders, by one coin
    pod 0        S   C       C   S       C   S      for both. So half of the pods use each drafter at every moment, and what
    pod 1        C   S       S   C       S   C      all pods have in common (the load, the hour) cancels within a partnership.

Windows begin short, so that a harmful drafter is detected after a few of them, and stay short for minutes, so that there are many
pairs where an engine's times are noisy. Then they become longer in stages, because only long windows exclude a carry-over
(`carryover`). The first part of each window, its wash-out, does not count.

Guarantees: an order is a pure function of seed, pod index and pair, so a restarted operator continues without stored draws. The
orders of a pod are independent fair coins, whichever other pods join, leave or restart. Without gaps in the indexes, the numbers
of pods on each drafter differ by at most one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Drafter = Literal["stable", "canary"]

MIN_STAGE_PAIRS, MIN_STAGE_SECONDS = 8, 384.0
"""Least number of pairs of a stage, which has windows of one length, and its least duration. The next stage has windows of twice
the length. The noise of an engine's times does not decrease with the length of windows: on a CPU, the ratio of a step's times in
adjacent windows had a standard deviation of 10 % for windows of 3 s, and of 12 % for those of 16 s."""
REQUESTS_PER_WINDOW = 12.0
"""Requests of a pod in the shortest windows."""
MIN_WINDOW_SECONDS, MAX_FIRST_WINDOW_SECONDS = 4.0, 120.0
"""Bounds of the shortest windows: the pauses of the changes stay about a percent of the time, and pairs come within minutes."""
MIN_CARRYOVER_SECONDS, MAX_CARRYOVER_SECONDS = 30.0, 120.0
"""Bounds of the time for which a drafter is assumed to affect the next one."""
WINDOW_CARRYOVER_RATIO = 2.0
"""Length of the longest windows, as a multiple of that time. Requests that run across a change are served by both drafters, so
their differences cancel: longer windows lose more of that than they gain by a smaller carry-over."""
WASHOUT_SHARE = 1 / 3
"""Share of a window that is wash-out."""


@dataclass(frozen=True, slots=True)
class Window:
    """One window: its place in the trial, the same for all pods."""

    number: int
    start_seconds: float
    """Seconds from the start of the trial to the change of the drafter."""
    length_seconds: float
    washout_seconds: float
    """Seconds after the start that do not count."""

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.length_seconds

    @property
    def counted_seconds(self) -> float:
        return self.length_seconds - self.washout_seconds


@dataclass(frozen=True, slots=True)
class WindowSchedule:
    """Lengths of the windows of a trial; fixed when it begins."""

    first_window_seconds: float
    """Length of the shortest windows."""
    carryover_seconds: float
    """Seconds for which a drafter is assumed to affect the next one."""

    @property
    def longest_window_seconds(self) -> float:
        return max(self.first_window_seconds, WINDOW_CARRYOVER_RATIO * self.carryover_seconds)

    def window(self, number: int) -> Window:
        """Return a window by its number, from 0 on."""
        pair = number // 2
        first_pair, start, length = max(stage for stage in self._stages() if stage[0] <= pair)
        start += (2 * (pair - first_pair) + number % 2) * length
        return Window(number, start, length, min(length * WASHOUT_SHARE, self.carryover_seconds))

    def window_at(self, seconds: float) -> Window:
        """Return the window at a time, in seconds from the start of the trial. Raise ValueError for a time before it."""
        if seconds < 0:
            raise ValueError(f"{seconds} s lies before the trial: pass the seconds since its start.")
        first_pair, start, length = max(stage for stage in self._stages() if stage[1] <= seconds)
        window = self.window(2 * first_pair + int((seconds - start) / length))
        if seconds >= window.end_seconds:  # the division was rounded down
            return self.window(window.number + 1)
        return self.window(window.number - 1) if seconds < window.start_seconds else window

    def _stages(self) -> Iterator[tuple[int, float, float]]:
        """Yield the first pair of each stage, its start and the length of its windows in seconds. The last stage has no end."""
        first_pair, start, length = 0, 0.0, self.first_window_seconds
        while length < self.longest_window_seconds:
            yield first_pair, start, length
            pairs = max(MIN_STAGE_PAIRS, math.ceil(MIN_STAGE_SECONDS / (2 * length)))
            first_pair, start = first_pair + pairs, start + 2 * pairs * length
            length = min(2 * length, self.longest_window_seconds)
        yield first_pair, start, length


def schedule_windows(requests_per_second: float, request_seconds: float) -> WindowSchedule:
    """Return the schedule for pods with this rate of requests each, and this 90th percentile of the requests' durations.

    The shortest windows hold REQUESTS_PER_WINDOW requests and are no shorter than most requests. A drafter is assumed to affect
    the next one as long as most of its requests run: they keep its keys and values. Both are bounded.
    """
    shortest = max(REQUESTS_PER_WINDOW / max(requests_per_second, 1e-9), request_seconds)
    return WindowSchedule(
        min(max(shortest, MIN_WINDOW_SECONDS), MAX_FIRST_WINDOW_SECONDS),
        min(max(request_seconds, MIN_CARRYOVER_SECONDS), MAX_CARRYOVER_SECONDS),
    )


def drafter_in_window(seed: str, pod_index: int, window_number: int) -> Drafter:
    """Return the drafter of a pod in a window."""
    return "canary" if _begins_with_canary(seed, pod_index, window_number // 2) == (window_number % 2 == 0) else "stable"


def begins_with_repeat(seed: str, pod_index: int, pair_number: int) -> bool:
    """Return whether a pair's first window has the drafter that the pod had before: in the first pair, the stable one."""
    previous = drafter_in_window(seed, pod_index, 2 * pair_number - 1) if pair_number else "stable"
    return drafter_in_window(seed, pod_index, 2 * pair_number) == previous


def partnership(pod_index: int) -> int:
    """Return the partnership of a pod: pods of one partnership have opposite orders."""
    return pod_index // 2


def _begins_with_canary(seed: str, pod_index: int, pair_number: int) -> bool:
    """Return the coin of a pair: fair, and independent of those of other pairs and partnerships."""
    coin = hashlib.blake2b(f"{seed}/{pair_number}/{partnership(pod_index)}".encode(), digest_size=1).digest()[0] & 1
    return bool(coin) != bool(pod_index % 2)
