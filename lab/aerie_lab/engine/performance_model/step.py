"""Duration of one engine step, as a pure function of its content.

    T(B, K, C, P) = fixed(B, K) + seconds_per_cached_token * C + seconds_per_prompt_token * P

B decode requests, K draft tokens each, C tokens of the batch in the KV cache, P prompt tokens computed in the step.
`fixed` is either a formula (StepTimeFormula) or a lookup in a published grid (StepTimeGrid), so that a tuner is not evaluated
with the model that it fits. Times are seconds. Not modelled: the host's own jitter beyond a log-normal factor, the network,
compilation.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any, Protocol

from aerie_lab.errors import StateError


class StepTime(Protocol):
    """A profile of step times."""

    @property
    def seconds_per_cached_token(self) -> float:
        """Seconds per token of the batch in the KV cache: attention reads them all in every step."""
        ...

    @property
    def seconds_per_prompt_token(self) -> float:
        """Seconds per prompt token computed."""
        ...

    @property
    def log_sd(self) -> float:
        """Standard deviation of the logarithm of a step's time; 0: none."""
        ...

    def fixed_seconds(self, batch: int, draft_tokens: int) -> float:
        """Return the seconds of a step in which `batch` requests verify `draft_tokens` each, without cache and prefill."""
        ...


@dataclass(frozen=True)
class StepTimeFormula:
    """Step time as a formula. With n = B * (K + 1) verified tokens

    fixed(B, K) = base_seconds + verify(n) + K * (seconds_per_draft_token + seconds_per_request_draft_token * B).

    verify(n) is `seconds_per_token` per verified token below the knee, and `seconds_per_token_above_knee` beyond it. A mixture of
    experts is concave: more tokens activate more experts until all are active. A dense model is linear until compute binds.
    Below the largest captured CUDA graph n is padded to the next captured size; above it a step pays `no_graph_seconds`.
    Form and magnitudes: fits to the published grids of step_time_grids.json, within 2-8 % (median) of them.
    """

    base_seconds: float
    seconds_per_token: float
    seconds_per_draft_token: float = 0.0
    seconds_per_request_draft_token: float = 0.0
    knee_tokens: float | None = None
    seconds_per_token_above_knee: float = 0.0
    captured_sizes: tuple[int, ...] = ()
    """Captured sizes in tokens, ascending; empty: no graphs, no padding, no cliff."""
    no_graph_seconds: float = 0.0
    seconds_per_cached_token: float = 0.0
    seconds_per_prompt_token: float = 0.0
    log_sd: float = 0.0

    def fixed_seconds(self, batch: int, draft_tokens: int) -> float:
        tokens, jump = batch * (draft_tokens + 1), 0.0
        if self.captured_sizes and tokens:
            if tokens > self.captured_sizes[-1]:
                jump = self.no_graph_seconds
            else:
                tokens = self.captured_sizes[bisect.bisect_left(self.captured_sizes, tokens)]
        if self.knee_tokens is None or tokens <= self.knee_tokens:
            verify = self.seconds_per_token * tokens
        else:
            verify = self.seconds_per_token * self.knee_tokens + self.seconds_per_token_above_knee * (tokens - self.knee_tokens)
        return (
            self.base_seconds
            + verify
            + draft_tokens * (self.seconds_per_draft_token + self.seconds_per_request_draft_token * batch)
            + jump
        )


@dataclass(frozen=True)
class StepTimeGrid:
    """A published grid of throughputs as step times: T(B, K) = B * AL(K) / throughput(B, K), bilinear in B and K.

    Outside the grid the last segment is carried on, and never falls: a larger batch or a longer draft takes no less time.
    Below the first batch the first segment is carried towards 0 requests (a step of prefill alone) and never rises.
    A cell that is not usable is left out, so that its neighbours in B are joined.
    """

    name: str
    step_seconds_by_k: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]]
    """Per K: the batches, and the seconds of a step with each."""
    acceptance_lengths: Mapping[int, float]
    """Per K: the acceptance length that was published with the grid, bonus token included."""
    seconds_per_cached_token: float = 0.0
    seconds_per_prompt_token: float = 0.0
    log_sd: float = 0.0
    _cache: dict[tuple[int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def fixed_seconds(self, batch: int, draft_tokens: int) -> float:
        if (seconds := self._cache.get((batch, draft_tokens))) is None:
            seconds = self._cache[batch, draft_tokens] = self._interpolate(batch, draft_tokens)
        return seconds

    def _interpolate(self, batch: int, draft_tokens: int) -> float:
        ks = tuple(self.step_seconds_by_k)
        times = {k: _interpolate_linearly(*self.step_seconds_by_k[k], batch) for k in self._neighbours(draft_tokens)}
        if len(times) == 1:
            return next(iter(times.values()))
        (low, at_low), (high, at_high) = sorted(times.items())
        slope = (at_high - at_low) / (high - low)
        if draft_tokens > ks[-1]:
            slope = max(slope, 0.0)
            return at_high + slope * (draft_tokens - high)
        return at_low + slope * (draft_tokens - low)

    def _neighbours(self, draft_tokens: int) -> tuple[int, ...]:
        ks = tuple(self.step_seconds_by_k)
        if draft_tokens in self.step_seconds_by_k:
            return (draft_tokens,)
        right = min(bisect.bisect_left(ks, draft_tokens), len(ks) - 1)
        return ks[right - 1], ks[right]


@dataclass(frozen=True)
class ScaledStepTime:
    """Another profile, `factor` times as slow."""

    inner: StepTime
    factor: float

    @cached_property
    def seconds_per_cached_token(self) -> float:
        return self.inner.seconds_per_cached_token * self.factor

    @cached_property
    def seconds_per_prompt_token(self) -> float:
        return self.inner.seconds_per_prompt_token * self.factor

    @cached_property
    def log_sd(self) -> float:
        return self.inner.log_sd

    def fixed_seconds(self, batch: int, draft_tokens: int) -> float:
        return self.inner.fixed_seconds(batch, draft_tokens) * self.factor


def _interpolate_linearly(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """Interpolate linearly; extrapolate as StepTimeGrid describes."""
    right = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
    if x > xs[-1]:
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    if x < xs[0]:
        return max(ys[0] - max(slope, 0.0) * (xs[0] - x), 0.0)
    return ys[right - 1] + slope * (x - xs[right - 1])


@cache
def _load_published_grids() -> dict[str, Any]:
    text = resources.files("aerie_lab.engine.performance_model").joinpath("step_time_grids.json").read_text()
    return {grid["name"]: grid for grid in json.loads(text)["grids"]}


def list_grid_names() -> list[str]:
    """Return the published grids by name."""
    return list(_load_published_grids())


def load_grid(
    name: str, *, seconds_per_cached_token: float = 0.0, seconds_per_prompt_token: float = 0.0, log_sd: float = 0.0
) -> StepTimeGrid:
    """Return the published grid `name`. It has no cost of cache and prefill: the caller assumes them.

    Raises StateError when there is none of that name.
    """
    if name not in _load_published_grids():
        raise StateError(f"step-time grid '{name}' is unknown: one of {', '.join(list_grid_names())}.")
    return build_grid(
        name,
        _load_published_grids()[name],
        seconds_per_cached_token=seconds_per_cached_token,
        seconds_per_prompt_token=seconds_per_prompt_token,
        log_sd=log_sd,
    )


def build_grid(
    name: str,
    data: Mapping[str, Any],
    *,
    seconds_per_cached_token: float = 0.0,
    seconds_per_prompt_token: float = 0.0,
    log_sd: float = 0.0,
) -> StepTimeGrid:
    """Return a grid in the form of step_time_grids.json: `batch`, `acceptance_length` by K, and `throughput` by K and batch."""
    lengths = {int(k): float(length) for k, length in data["acceptance_length"].items()}
    columns = {}
    for key, throughputs in data["throughput"].items():
        cells = [(b, b * lengths[int(key)] / t) for b, t in zip(data["batch"], throughputs, strict=True) if t is not None]
        columns[int(key)] = (tuple(b for b, _ in cells), tuple(seconds for _, seconds in cells))
    return StepTimeGrid(
        name,
        dict(sorted(columns.items())),
        lengths,
        seconds_per_cached_token=seconds_per_cached_token,
        seconds_per_prompt_token=seconds_per_prompt_token,
        log_sd=log_sd,
    )


_MS, _US = 1e-3, 1e-6
STEP_TIME_FORMULAS: dict[str, StepTimeFormula] = {
    # Fits to the grid of the same name; cache and prefill are assumptions, for no public grid varies them.
    "dense-32b": StepTimeFormula(
        7.8 * _MS,
        23.5 * _US,
        0.32 * _MS,
        13 * _US,
        seconds_per_cached_token=0.02 * _US,
        seconds_per_prompt_token=30 * _US,
        log_sd=0.03,
    ),
    "dense-8b": StepTimeFormula(
        7.1 * _MS, 16 * _US, 0.64 * _MS, seconds_per_cached_token=0.02 * _US, seconds_per_prompt_token=20 * _US, log_sd=0.03
    ),
    "moe-30b-a3b": StepTimeFormula(
        3.1 * _MS,
        291 * _US,
        0.34 * _MS,
        knee_tokens=16,
        seconds_per_token_above_knee=20 * _US,
        seconds_per_cached_token=0.01 * _US,
        seconds_per_prompt_token=15 * _US,
        log_sd=0.03,
    ),
}
"""Formulas by name: dense targets on GB200 and H100, and a mixture of experts."""
