"""Request-level traffic on simulated pods in virtual time, many runs at once: the counters that a scraper would have read.

The model. Requests come by Poisson at a rate that swings by 50 % over a day. Each is of one of two classes; its chance to be
accepted per drafted token is Beta with mean 0.8 or 0.6 (kappa 8), the number of its output tokens log-normal (median 450,
sigma 1.1). A text fixes its tokens: how many drafts they take follows from what the request accepts, at 50 drafts a second. The
share of the first class drifts: over the day, together on all pods (AR(1), 20 minutes) and on each pod for itself (AR(1), 5
minutes; 15 with sticky tenants). K = 3. A drafter that is better by delta takes 1 / (1 + delta) of the drafts for the same
tokens in the same time, so it has all acceptance lengths times 1 + delta, and the boundary of a margin is met exactly, at every
moment.

These constants are assumptions. With them two-minute blocks of one pod against three have a dispersion of 5.4 % with an inflation
of 1.75 over a day (5.0 % and 1.25 with random routing). Not modelled: batches and latency, that requests end sooner with a better
drafter, acceptance that moves within a request, a limit of 4 for a single request's acceptance length after delta.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]

SCRAPE = 15.0
DAY = 86400.0
K = 3
SPEED = 50.0  # drafts per second of one request
MEDIANS, SPREAD = (450.0, 450.0), 1.1  # output tokens, by class
MEANS = (0.8, 0.6)
FIRST_CLASS = -0.69  # logit of the first class's mean share, 1/3
CHUNK = 500_000  # requests at once: what stays in a processor's cache is several times as quick


@dataclass(frozen=True)
class Traffic:
    """Traffic of one scenario's pods."""

    rate: float = 1.0
    """Requests per second and pod."""
    swing: float = 0.5
    """Amplitude of the rate over the day."""
    mix_day: float = 0.3
    """Amplitude of the first class's logit over the day."""
    mix_shared: float = 0.3
    """Standard deviation of its drift on all pods together; 20 minutes of memory."""
    mix_pod: float = 0.28
    """Standard deviation of its drift on each pod."""
    memory: float = 300.0
    """Seconds of memory of that."""
    offset_sd: float = 0.0
    """Standard deviation of the pods' lasting factors on acceptance length."""
    growth: float = 1.0
    """Factor on the rate from begin to end."""
    mix_trend: float = 0.0
    """Change of the first class's logit from begin to end."""
    resets_per_hour: float = 0.0
    """Restarts of each pod; its next two scrapes fail."""
    lost: float = 0.0
    """Chance that a scrape is lost."""
    kappa: float = 8.0
    """Concentration of the acceptance of a class: a + b of its Beta distribution."""
    spread: float = SPREAD
    """Standard deviation of the logarithm of a request's output tokens."""


class Counters(NamedTuple):
    """Cumulative counters by run, pod and scrape; the first scrape is at 0."""

    drafts: Floats
    accepted: Floats
    finished: Floats
    begun: Floats
    scraped: Bools
    """Whether the scrape succeeded."""
    restarts: npt.NDArray[np.int64]
    """Restarts of the pod until then; each resets its counters."""
    all_drafts: Floats
    """The same without restarts."""
    all_accepted: Floats


@cache
def _classes(kappa: float, points: int = 4096) -> tuple[Floats, Floats]:
    """Return the mean and variance of a draft's accepted tokens, by class, at evenly spaced ranks of its Beta distribution."""
    grid = (np.arange(200_000) + 0.5) / 200_000
    ranks = (np.arange(points) + 0.5) / points
    rows = []
    for mean in MEANS:
        logs = (mean * kappa - 1) * np.log(grid) + ((1 - mean) * kappa - 1) * np.log1p(-grid)
        mass = np.cumsum(np.exp(logs - logs.max()))
        rows.append(np.interp(ranks, mass / mass[-1], grid))
    alpha = np.stack(rows)
    accepted = alpha + alpha**2 + alpha**3
    return accepted, alpha + 3 * alpha**2 + 5 * alpha**3 - accepted**2


def simulate(
    traffic: Traffic, runs: int, pods: int, seconds: float, random: np.random.Generator, factors: Floats | None = None
) -> Counters:
    """Simulate the counters of `pods` equal pods in `runs` runs. `factors` (runs, pods, scrapes or 1) multiply acceptance
    lengths: the same tokens in fewer drafts."""
    pieces = []
    per_run = traffic.rate * (1 + traffic.growth) / 2 * pods * seconds
    step = max(1, int(CHUNK / per_run))
    for begin in range(0, runs, step):
        some = slice(begin, min(begin + step, runs))
        pieces.append(_simulate(traffic, some.stop - begin, pods, seconds, random, None if factors is None else factors[some]))
    return Counters(*(np.concatenate(parts) for parts in zip(*pieces, strict=True)))


def _simulate(
    traffic: Traffic, runs: int, pods: int, seconds: float, random: np.random.Generator, factors: Floats | None
) -> Counters:
    burn = 40  # scrapes before 0, so that requests are in progress
    bins = round(seconds / SCRAPE)
    shape = (runs, pods, burn + bins)
    rate, mix = _load(traffic, shape, burn, random)
    arrivals = random.poisson(rate * SCRAPE)
    drafts, accepted, variance, finished = _served(arrivals, mix, traffic, random)
    accepted += np.sqrt(variance) * random.standard_normal(shape, dtype=np.float32)
    drafts, accepted, finished, begun = (part[..., burn:] for part in (drafts, accepted, finished, arrivals.astype(np.float64)))
    if factors is not None:
        tokens, drafts = drafts + accepted, drafts / factors
        accepted = tokens - drafts
    zero = np.zeros((runs, pods, 1))
    parts = (drafts, np.maximum(accepted, 0), finished, begun)
    totals = [np.concatenate([zero, np.cumsum(part, axis=-1)], axis=-1) for part in parts]
    return _scraped(traffic, totals, random)


def _load(traffic: Traffic, shape: tuple[int, int, int], burn: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the rate and the share of the first class, by run, pod and scrape interval."""
    runs, _, bins = shape
    angle = 2 * np.pi * ((np.arange(bins) * SCRAPE)[None, :] / DAY + random.random((runs, 1)))
    along = np.clip((np.arange(bins) - burn) / (bins - burn), 0, 1)
    rate = traffic.rate * (1 + traffic.swing * np.sin(angle)) * (1 + (traffic.growth - 1) * along)
    logit = FIRST_CLASS + traffic.mix_day * np.sin(angle + 1) + traffic.mix_trend * along
    logit += traffic.mix_shared * _ar((runs, 1, bins), 1200.0, random)[:, 0]
    mix = logit[:, None, :] + (traffic.mix_pod * _ar(shape, traffic.memory, random) if traffic.mix_pod else 0.0)
    return np.broadcast_to(rate[:, None, :], shape), np.broadcast_to(1 / (1 + np.exp(-mix)), shape)


def _ar(shape: tuple[int, int, int], memory: float, random: np.random.Generator) -> Floats:
    """Draw an AR(1) series of variance 1 along the last axis."""
    keep = np.exp(-SCRAPE / memory)
    series = random.standard_normal(shape)
    for index in range(1, shape[-1]):
        series[..., index] = keep * series[..., index - 1] + np.sqrt(1 - keep**2) * series[..., index]
    return series


def _served(
    arrivals: npt.NDArray[np.int64], mix: Floats, traffic: Traffic, random: np.random.Generator
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return drafts, accepted tokens with their variance, and finished requests, by run, pod and scrape interval.

    A request drafts evenly from its start until its tokens are written, so the count of an interval is linear in both times: each
    start and each end adds its rate from there on, and the part of its own interval.
    """
    shape, bins = arrivals.shape, arrivals.shape[-1]
    means, variances = _classes(traffic.kappa)
    cells = arrivals.size
    place = np.repeat(np.arange(cells), arrivals.ravel())
    count = len(place)
    second = (random.random(count, dtype=np.float32) >= mix.ravel().astype(np.float32)[place]).astype(np.intp)
    rank = (random.random(count, dtype=np.float32) * means.shape[1]).astype(np.intp)
    start = random.random(count, dtype=np.float32).astype(np.float64)  # in intervals, from that of `place` on
    tokens = np.array(MEDIANS)[second] * np.exp(traffic.spread * random.standard_normal(count, dtype=np.float32))
    each = means[second, rank]
    end = start + tokens / ((1 + each) * SPEED * SCRAPE)
    later = end.astype(np.intp)
    ending = np.flatnonzero(place % bins + later < bins)
    ended = (place + later)[ending]
    left, right = 1 - start, (1 - end + later)[ending]
    counts = []
    for weight in (None, each, variances[second, rank]):
        weight_end = None if weight is None else weight[ending]
        change = np.bincount(place, weight, cells) - np.bincount(ended, weight_end, cells)
        inside = np.bincount(place, left if weight is None else weight * left, cells)
        inside -= np.bincount(ended, right if weight_end is None else weight_end * right, cells)
        change = np.cumsum(change.reshape(shape), axis=-1) - change.reshape(shape)
        counts.append(np.maximum(SPEED * SCRAPE * (change + inside.reshape(shape)), 0))
    return counts[0], counts[1], counts[2], np.bincount(ended, minlength=cells).reshape(shape).astype(np.float64)


def _scraped(traffic: Traffic, totals: list[Floats], random: np.random.Generator) -> Counters:
    """Return the counters as scraped: without lost scrapes, and reset by restarts."""
    shape = totals[0].shape
    scraped = random.random(shape) >= traffic.lost
    restarts = np.zeros(shape, dtype=np.int64)
    undisturbed = totals
    if traffic.resets_per_hour:
        restarted = random.random(shape) < traffic.resets_per_hour * SCRAPE / 3600
        restarted[..., 0] = False
        restarts = np.cumsum(restarted, axis=-1)
        scraped &= ~(restarted | np.roll(restarted, 1, axis=-1))
        totals = [total - np.maximum.accumulate(np.where(restarted, total, 0), axis=-1) for total in totals]
    drafts, accepted, finished, begun_requests = totals
    return Counters(drafts, accepted, finished, begun_requests, scraped, restarts, undisturbed[0], undisturbed[1])
