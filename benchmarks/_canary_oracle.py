"""The least time in which a rule between pods can keep its error rates: a sequential test that knows every traffic model.

A drafter that is better by 3 %, on traffic that the calibration fits, has to be distinguished from a drafter that is worse by
the margin of 2 %, on the same traffic or after a change of routing. The oracle knows the autocovariance of each traffic and both
effects. It promotes at the first block at which the likelihood of the former is e^limit times that of each of the latter. No rule
of the operator knows as much, so none is expected to be faster at equal error rates.

The data of a run are the same as the operator's: tokens per step of the canary and of three stable pods, by block, as three
contrasts of unit variance. Guarantees: autocovariances are of the first half of the runs, rates of the second. Not guaranteed:
that it is the optimum among all tests; blocks are taken to be Gaussian. Run it by `python -m benchmarks._canary_oracle RUNS`.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks._canary_blocks import Blocks, close
from benchmarks._canary_model import Floats, simulate
from benchmarks._canary_scenarios import CHUNK, HORIZON, RULE, SCENARIOS

FITTING, CHANGED = "base", ("unlike_sticky", "unlike_sticky60")
BETTER, WORSE = 0.03, -0.02
LIMITS = (2.5, 2.8, 3.1, 3.5, 4.0)
MIN_BLOCKS = 5
LAST_BLOCK = 118
"""Blocks of a run; the last ones may be missing."""
MAX_LAG = 100
EFFECT_SCALE = float(np.sqrt(4 / 3))
"""Standard deviation of the difference of one pod and the mean of three, in that of a pod."""


def contrasts(blocks: Blocks) -> Floats:
    """Return canary against stable pods and these against one another, by contrast, run and block, relative to the level."""
    peers, canary = blocks.peers[:, :LAST_BLOCK], blocks.canary[:, :LAST_BLOCK]
    complete = ~np.isnan(peers).any(axis=(1, 2)) & ~np.isnan(canary).any(axis=1)
    peers, canary = peers[complete], canary[complete]
    mean = peers.mean(axis=2)
    first, second, third = (peers[:, :, pod] for pod in range(3))
    rows = [(canary - mean) / EFFECT_SCALE, (first - second) / np.sqrt(2), (first + second - 2 * third) / np.sqrt(6)]
    return np.asarray(np.stack(rows) / mean.mean(axis=1)[:, None])


def covariance_root(rows: Floats) -> Floats:
    """Return the Cholesky root of the blocks' covariance, from the autocovariance of all contrasts."""
    lags = np.array(
        [np.mean(rows[..., : LAST_BLOCK - lag] * rows[..., lag:]) if lag < MAX_LAG else 0.0 for lag in range(LAST_BLOCK)]
    )
    matrix = lags[np.abs(np.subtract.outer(np.arange(LAST_BLOCK), np.arange(LAST_BLOCK)))]
    floor = max(0.0, 1e-6 - float(np.linalg.eigvalsh(matrix).min()))
    return np.asarray(np.linalg.cholesky(matrix + floor * np.eye(LAST_BLOCK)))


def log_likelihood(rows: Floats, root: Floats, effect: float) -> Floats:
    """Return the log-likelihood after each block, by run, where the canary has this effect."""
    means = np.array([effect / EFFECT_SCALE, 0.0, 0.0])[:, None, None]
    residuals = np.linalg.solve(root, np.swapaxes(rows - means, 1, 2))
    terms = -0.5 * residuals**2 - np.log(np.diag(root))[:, None]
    return np.asarray(np.cumsum(terms.sum(axis=0), axis=0).T)


def main(runs: int, seed: int = 1) -> None:
    """Print the oracle's median time and its wrong promotions, by limit."""
    random = np.random.default_rng(seed)
    data = {}
    for name in (FITTING, *CHANGED):
        parts = [
            contrasts(close(simulate(SCENARIOS[name].traffic, min(CHUNK, runs - begin), 4, HORIZON, random), 1, 3, RULE))
            for begin in range(0, runs, CHUNK)
        ]
        data[name] = np.concatenate(parts, axis=1)
    roots = {name: covariance_root(rows[:, : rows.shape[1] // 2]) for name, rows in data.items()}
    evidence = {}
    for name, effect in ((FITTING, BETTER), *((name, WORSE) for name in data)):
        rows = data[name][:, data[name].shape[1] // 2 :].copy()
        rows[0] += effect / EFFECT_SCALE
        worse = np.maximum.reduce([log_likelihood(rows, root, WORSE) for root in roots.values()])
        evidence[name, effect] = (log_likelihood(rows, roots[FITTING], BETTER) - worse)[:, MIN_BLOCKS - 1 :]
    counts = {name: len(values) for (name, _), values in evidence.items()}
    print(f"runs: {counts}; minutes: median of all runs, {BETTER:+.0%}; promoted by mistake: {WORSE:+.0%}, percent")
    for limit in LIMITS:
        promoted = {cell: values >= limit for cell, values in evidence.items()}
        hits = promoted[FITTING, BETTER]
        first = np.where(hits.any(axis=1), hits.argmax(axis=1) + MIN_BLOCKS, np.inf)
        wrong = {name: f"{100 * promoted[name, WORSE].any(axis=1).mean():.2f}" for name in data}
        print(f"limit {limit}: {np.median(first) * RULE.block_seconds / 60:.0f} minutes, {wrong}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
