"""Request-level traffic on the pods of a trial by turns, many runs at once: tokens and steps of each pod in each window.

The traffic is that of `_canary_model`: its rates, classes, acceptance and drift. In addition the length of answers may have a
heavier tail, and the seconds of a bin are those of the windows. A drafter that is better by delta takes 1 / (1 + delta) of the
steps for the same tokens.

Carry-over: acceptance moves in a straight line, within `carryover` seconds, from the previous drafter's level to the new one's.
With `exponential`, it moves by exp(-t / carryover), which never ends: more than a plan assumes.

These constants are assumptions. Not modelled: batches, latency, that requests end sooner with a better drafter, cached prefixes.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.analysis.switchback.design import WindowSchedule, drafter_in_window, schedule_windows
from benchmarks._canary_model import CHUNK, DAY, FIRST_CLASS, MEDIANS, SPEED, SPREAD, Bools, Floats, Traffic, _classes

MEAN_ACCEPTANCE_LENGTH = 2.46
BURN_SECONDS = 600.0
"""Seconds before a trial, so that requests are in progress."""
MAX_BIN_SECONDS = 5.0
EARLIER_HOURS = 24.0
"""Hours for which the pods have been up before a trial."""
LOADING_SECONDS = 60.0
"""Seconds after a restart for which a pod has no window."""


@dataclass(frozen=True)
class TurnsTraffic(Traffic):
    """Traffic of the pods of a trial."""

    spread: float = SPREAD
    """Sigma of the log-normal number of output tokens."""
    carryover: float = 0.0
    """Seconds until acceptance has moved to a new drafter's level."""
    exponential: bool = False
    """Whether it moves exponentially, with `carryover` as time constant."""

    @property
    def schedule(self) -> WindowSchedule:
        """The schedule that the operator would choose, from durations rounded to 5 seconds."""
        request_seconds = MEDIANS[0] * np.exp(1.2816 * self.spread) / (SPEED * MEAN_ACCEPTANCE_LENGTH)
        return schedule_windows(self.rate, 5.0 * round(request_seconds / 5.0))

    @property
    def bin_seconds(self) -> float:
        """Seconds of a bin: windows and wash-outs are multiples of it."""
        washout = self.schedule.window(0).washout_seconds
        return washout / math.ceil(washout / MAX_BIN_SECONDS)


class WindowTotals(NamedTuple):
    """Totals by run, pod and window after the wash-out."""

    tokens: Floats
    steps: Floats
    """The same with one more axis in front: by effect."""
    finished: Floats
    valid: Bools
    """Whether the window's counts are not lost."""
    restarts: npt.NDArray[np.int64]
    earlier_restarts: npt.NDArray[np.int64]
    """Restarts of all pods of a run in the day before the trial."""


def window_count(schedule: WindowSchedule, seconds: float) -> int:
    """Return the number of windows of whole pairs within a trial of this length."""
    last = schedule.window_at(seconds).number
    return last - last % 2


@cache
def canary_windows(pods: int, windows: int, begin: int, end: int) -> Bools:
    """Return where a run's pod drafts with the canary, by run, pod and window: the operator's own draws."""
    drawn = np.zeros((end - begin, pods, windows), dtype=bool)
    for run in range(begin, end):
        for pod in range(0, pods, 2):
            first = [drafter_in_window(str(run), pod, window) == "canary" for window in range(0, windows, 2)]
            drawn[run - begin, pod, 0::2] = first
            drawn[run - begin, pod, 1::2] = ~drawn[run - begin, pod, 0::2]
            if pod + 1 < pods:
                drawn[run - begin, pod + 1] = ~drawn[run - begin, pod]
    return drawn


def simulate_windows(
    traffic: TurnsTraffic, effects: tuple[float, ...], pods: int, windows: int, runs: range, seed: int
) -> WindowTotals:
    """Simulate the windows of the runs, with every effect on the same requests."""
    schedule = traffic.schedule
    seconds = schedule.window(windows - 1).end_seconds
    per_run = traffic.rate * (1 + traffic.growth) / 2 * pods * seconds
    step = max(1, int(CHUNK / max(per_run, pods * seconds / traffic.bin_seconds)))
    pieces = []
    for begin in range(runs.start, runs.stop, step):
        end = min(begin + step, runs.stop)
        random = np.random.default_rng([seed, zlib.crc32(repr((traffic, pods)).encode()), begin])
        pieces.append(_simulate(traffic, effects, canary_windows(pods, windows, begin, end), random))
    return WindowTotals(
        np.concatenate([piece.tokens for piece in pieces]),
        np.concatenate([piece.steps for piece in pieces], axis=1),
        *(np.concatenate([piece[index] for piece in pieces]) for index in (2, 3, 4, 5)),
    )


def _simulate(traffic: TurnsTraffic, effects: tuple[float, ...], canary: Bools, random: np.random.Generator) -> WindowTotals:
    runs, pods, windows = canary.shape
    schedule, seconds = traffic.schedule, traffic.bin_seconds
    edges = [schedule.window(number) for number in range(windows)]
    starts = np.array([round(window.start_seconds / seconds) for window in edges])
    counted = np.array([round((window.start_seconds + window.washout_seconds) / seconds) for window in edges])
    ends = np.array([round(window.end_seconds / seconds) for window in edges])
    burn, bins = round(BURN_SECONDS / seconds), int(ends[-1])
    shape = (runs, pods, burn + bins)
    rate, mix = _load(traffic, shape, burn, random)
    arrivals = random.poisson(rate * seconds)
    drafts, accepted, variance, finished = _serve(traffic, arrivals, mix, random)
    accepted = np.maximum(accepted + np.sqrt(variance) * random.standard_normal(shape, dtype=np.float32), 0.0)
    offsets = 1 + traffic.offset_sd * random.standard_normal((runs, pods, 1))
    tokens, steps, finished = (part[..., burn:] for part in (drafts + accepted, drafts / offsets, finished))

    def totals(values: Floats) -> Floats:
        sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
        return np.asarray(sums[..., ends] - sums[..., counted])

    level = canary.astype(np.float64)
    if traffic.carryover:
        by_bin = np.repeat(level, ends - starts, axis=-1)
        moved = _carry(by_bin, traffic.carryover / seconds, exponential=traffic.exponential)
        by_effect = [totals(steps / (1 + effect * moved)) for effect in effects]
    else:
        by_effect = [totals(steps) / (1 + effect * level) for effect in effects]
    restarts = random.poisson(
        traffic.resets_per_hour / 3600 * np.array([window.length_seconds for window in edges]), canary.shape
    )
    valid = (random.random(canary.shape) >= traffic.lost) & (restarts == 0)
    loading = random.random(canary.shape) < np.minimum(1, LOADING_SECONDS / np.array([window.length_seconds for window in edges]))
    valid[..., 1:] &= ~((restarts[..., :-1] > 0) & loading[..., 1:])
    earlier_restarts = random.poisson(traffic.resets_per_hour * EARLIER_HOURS * pods, runs)
    return WindowTotals(totals(tokens), np.stack(by_effect), totals(finished), valid, restarts, earlier_restarts)


def _carry(level: Floats, bins: float, *, exponential: bool) -> Floats:
    """Return the mean share of the canary's effect in each bin, from the drafters' sequence; before it, the stable one."""
    if exponential:
        keep, state, moved = np.exp(-1 / bins), np.zeros(level.shape[:-1]), np.empty_like(level)
        for index in range(level.shape[-1]):
            target = level[..., index]
            moved[..., index] = target + (state - target) * bins * (1 - keep)
            state = target + (state - target) * keep
        return moved
    sums = np.concatenate([np.zeros((*level.shape[:-1], 1)), np.cumsum(level, axis=-1)], axis=-1)
    # The level at a bin's edge is the mean of the drafters over the last `bins` bins; in between it is straight.
    places = np.maximum(np.arange(sums.shape[-1]) - bins, 0)
    low = np.floor(places).astype(np.intp)
    before = sums[..., low] + (places - low) * (sums[..., np.minimum(low + 1, sums.shape[-1] - 1)] - sums[..., low])
    at_edges = (sums - before) / bins
    return np.asarray((at_edges[..., 1:] + at_edges[..., :-1]) / 2)


def _load(traffic: TurnsTraffic, shape: tuple[int, int, int], burn: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the rate and the share of the first class, by run, pod and bin."""
    runs, _, bins = shape
    seconds = traffic.bin_seconds
    angle = 2 * np.pi * ((np.arange(bins) * seconds)[None, :] / DAY + random.random((runs, 1)))
    along = np.clip((np.arange(bins) - burn) / (bins - burn), 0, 1)
    rate = traffic.rate * (1 + traffic.swing * np.sin(angle)) * (1 + (traffic.growth - 1) * along)
    logit = FIRST_CLASS + traffic.mix_day * np.sin(angle + 1) + traffic.mix_trend * along
    logit += traffic.mix_shared * _ar((runs, 1, bins), 1200.0 / seconds, random)[:, 0]
    mix = logit[:, None, :] + traffic.mix_pod * _ar(shape, traffic.memory / seconds, random)
    return np.broadcast_to(rate[:, None, :], shape), 1 / (1 + np.exp(-mix))


def _ar(shape: tuple[int, int, int], memory_bins: float, random: np.random.Generator) -> Floats:
    """Draw an AR(1) series of variance 1 along the last axis."""
    keep = float(np.exp(-1 / memory_bins))
    series = np.moveaxis(random.standard_normal((shape[-1], *shape[:-1]), dtype=np.float32), 0, -1)
    by_bin = np.ascontiguousarray(np.moveaxis(series, -1, 0))
    noise = np.float32(np.sqrt(1 - keep**2))
    for index in range(1, shape[-1]):
        by_bin[index] = np.float32(keep) * by_bin[index - 1] + noise * by_bin[index]
    return np.ascontiguousarray(np.moveaxis(by_bin, 0, -1))


def _serve(
    traffic: TurnsTraffic, arrivals: npt.NDArray[np.int64], mix: Floats, random: np.random.Generator
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return steps, accepted tokens with their variance, and finished requests, by run, pod and bin.

    A request drafts evenly from its start until its tokens are written, as in `_canary_model`.
    """
    shape, bins, per_bin = arrivals.shape, arrivals.shape[-1], SPEED * traffic.bin_seconds
    means, variances = _classes(traffic.kappa)
    cells = arrivals.size
    place = np.repeat(np.arange(cells), arrivals.ravel())
    count = len(place)
    second = (random.random(count, dtype=np.float32) >= mix.ravel().astype(np.float32)[place]).astype(np.intp)
    rank = (random.random(count, dtype=np.float32) * means.shape[1]).astype(np.intp)
    start = random.random(count, dtype=np.float32).astype(np.float64)
    tokens = np.array(MEDIANS)[second] * np.exp(traffic.spread * random.standard_normal(count, dtype=np.float32))
    accepted = means[second, rank]
    end = start + tokens / ((1 + accepted) * per_bin)
    later = end.astype(np.intp)
    ending = np.flatnonzero(place % bins + later < bins)
    ended = (place + later)[ending]
    left, right = 1 - start, (1 - end + later)[ending]
    counts = []
    for weight in (None, accepted, variances[second, rank]):
        weight_end = None if weight is None else weight[ending]
        change = np.bincount(place, weight, cells) - np.bincount(ended, weight_end, cells)
        inside = np.bincount(place, left if weight is None else weight * left, cells)
        inside -= np.bincount(ended, right if weight_end is None else weight_end * right, cells)
        change = np.cumsum(change.reshape(shape), axis=-1) - change.reshape(shape)
        counts.append(np.maximum(per_bin * (change + inside.reshape(shape)), 0))
    return counts[0], counts[1], counts[2], np.bincount(ended, minlength=cells).reshape(shape).astype(np.float64)
