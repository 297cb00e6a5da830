"""Closed blocks of two arms, for many runs at once; and values minute by minute, for rules that compare minutes.

`close` is `aerie.analysis.measurement.blocks.observe` done on arrays: the same rule, the same windows, the same excluded pods
(tests/unit/analysis/test_benchmark.py compares them run by run).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.analysis.measurement.blocks import BlockRule
from aerie.analysis.state import MIN_PEER_SHARE
from benchmarks._canary_model import SCRAPE, Counters, Floats


class Blocks(NamedTuple):
    """Counted blocks by run, starting in the first column; NaN where a run has no more."""

    canary: Floats
    """Acceptance lengths."""
    control: Floats
    ended: Floats
    """Seconds."""
    dropped: Floats
    """Blocks dropped until then."""
    canary_begun: Floats
    control_begun: Floats
    canary_pods: Floats
    control_pods: Floats
    """Pods with a complete window."""
    peers: Floats
    """Acceptance lengths by run, block and pod, of the equal pods that are compared with one another: the other stable pods where
    the control has pods of its own, else the control's; NaN where a pod has no complete window."""


def close(counters: Counters, canaries: int, controls: int, rule: BlockRule) -> Blocks:
    """Close the blocks of every run. The first pods are the canary's, the next the control's, and others are stable pods beside
    a control of its own."""
    runs, pods, scrapes = counters.drafts.shape
    arms = (slice(0, canaries), slice(canaries, canaries + controls))
    peers = slice(canaries + controls, pods) if canaries + controls < pods else arms[1]
    totals = np.stack([counters.drafts, counters.accepted, counters.finished, counters.restarts, counters.begun])
    first, last = totals[..., 0].copy(), totals[..., 0].copy()
    first_at = np.where(counters.scraped[..., 0], 0, -1)  # scrape by which the window begins; -1: none yet
    last_at = first_at.copy()
    began = np.zeros(runs, dtype=np.int64)
    dropped = np.zeros(runs)
    counted = np.zeros(runs, dtype=np.int64)
    max_blocks = int(scrapes * SCRAPE / rule.block_seconds) + 1
    shapes = [(runs, max_blocks, *([peers.stop - peers.start] if name == "peers" else [])) for name in Blocks._fields]
    blocks = Blocks(*(np.full(shape, np.nan) for shape in shapes))
    late, length = (
        round(rule.max_scrape_age_seconds // rule.scrape_interval_seconds),
        round(rule.block_seconds / rule.scrape_interval_seconds),
    )
    for now in range(1, scrapes):
        scraped = counters.scraped[..., now]
        last = np.where(scraped, totals[..., now], last)
        begins = scraped & (first_at < 0)
        first = np.where(begins, last, first)
        first_at = np.where(begins, now, first_at)
        last_at = np.where(scraped, now, last_at)
        due = now - began >= length
        if not due.any():
            continue
        whole = (first_at >= 0) & (first_at <= (began + late)[:, None]) & (last[3] == first[3])
        valid = whole & (now - last_at <= late)
        windows = np.where(valid, last - first, 0.0)
        sums = [windows[:, :, arm].sum(axis=2) for arm in arms]
        some = [valid[:, arm].any(axis=1) for arm in arms]
        for arm, has, (drafts, _, finished, _, _) in zip(arms, some, sums, strict=True):
            waits = ~has & whole[:, arm].any(axis=1) & (now - began < 2 * length)
            few = has & ((drafts < rule.min_drafts) | (finished < rule.min_finished_requests))
            due &= ~waits & ~few
        counts = due & some[0] & some[1]
        dropped[due & ~counts] += 1
        rows, column = np.flatnonzero(counts), counted[counts]
        for name, values, arm in zip(("canary", "control"), sums, arms, strict=True):
            getattr(blocks, name)[rows, column] = 1 + values[1, rows] / values[0, rows]
            getattr(blocks, f"{name}_begun")[rows, column] = values[4, rows]
            getattr(blocks, f"{name}_pods")[rows, column] = valid[rows, arm].sum(axis=1)
        drafts, accepted = windows[:2, rows, peers]
        least = MIN_PEER_SHARE * drafts.sum(axis=1) / np.maximum(1, valid[rows, peers].sum(axis=1))
        enough = (drafts > 0) & (drafts >= least[:, None])
        blocks.peers[rows, column] = np.where(enough, 1 + accepted / np.where(enough, drafts, 1.0), np.nan)
        blocks.ended[rows, column] = now * SCRAPE
        blocks.dropped[rows, column] = dropped[rows]
        counted[rows] += 1
        fresh = now - last_at <= late
        first = np.where(due[:, None], last, first)
        first_at = np.where(due[:, None], np.where(fresh, last_at, -1), first_at)
        began[due] = now
    return blocks


def per_scrapes(drafts: Floats, accepted: Floats, canaries: int, scrapes: int) -> tuple[Floats, Floats]:
    """Return the acceptance lengths of both arms every `scrapes` scrapes, from counters without restarts and lost scrapes."""
    lengths = []
    for arm in (slice(0, canaries), slice(canaries, None)):
        base, accepted_tokens = (np.diff(part[:, arm, ::scrapes], axis=-1).sum(axis=1) for part in (drafts, accepted))
        lengths.append(_length(base, accepted_tokens))
    return lengths[0], lengths[1]


def pods_per_block(counters: Counters, scrapes: int) -> npt.NDArray[np.float64]:
    """Return acceptance lengths by run, block and pod."""
    drafts, accepted = (np.diff(part[..., ::scrapes], axis=-1) for part in (counters.drafts, counters.accepted))
    return np.asarray(np.swapaxes(_length(drafts, accepted), 1, 2))


def _length(drafts: Floats, accepted: Floats) -> Floats:
    """Return acceptance lengths; NaN without drafts. The model's drafts are not integers: less than 0.5 counts as none."""
    return np.where(drafts >= 0.5, 1 + accepted / np.maximum(drafts, 0.5), np.nan)
