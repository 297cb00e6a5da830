"""How long an engine step takes at a batch and a number of drafted tokens that were not run: a fit with its uncertainty.

    T(B, K, P) = a (1 + rho K) + v(B (K + 1)) + delta s K B + J [B (K + 1) > captured] + pi P

a: a step of nothing; rho a: one draft step; v: verifying n tokens, rising and piecewise linear with slopes s_j between the knots
0, 8, 32, 128, 512; delta s: a draft step's cost per request, relative to a verified token's; J: a step without a captured graph;
pi: a computed prompt token. A dense model has nearly equal slopes; a mixture of experts is concave, because the first tokens
wake most experts. All parameters are positive, so the fit is over their logarithms.

Telemetry at one K cannot tell a from rho, nor the slopes from delta: what decides there is the prior, fitted to seven published
grids of five targets (rho: log-normal, median 0.08, sigma 0.5). A canary at another K settles it.

Two stages. First a robust fit (Huber's weights on relative errors) to the cells of all replicas, with an effect of each replica,
which removes that effect and the prefill. Then the cells of one setting and batch are pooled, and the logarithms of the step
times are taken as model + misfit + noise, the misfit a Gaussian process over batch and K (Kennedy and O'Hagan 2001): the form is
not the truth, so a prediction near what was run follows what was measured there, and away from it becomes less certain.

Guarantees: the answer is a sentence where the data cannot identify a step's cost. Not identified, and left out: the cost of
cached tokens (it goes with the batch), contexts, adapters. The uncertainty of pi and of the replicas' effects is not carried on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aerie.engine.metrics.rates import Unknown
from aerie.tuning.models.numeric import Array, draw_normal
from aerie.tuning.telemetry import Cell, Key

Indices = npt.NDArray[np.int_]

LEAST_WINDOWS = 40
LEAST_BATCH_RANGE = 2.0
"""The largest batch by the smallest; below that a step's fixed cost cannot be told from the cost of a request."""
MOST_SCATTER = 0.08
"""Robust standard deviation of the relative residuals; above it something else moves the step times."""
KNOTS = (0.0, 8.0, 32.0, 128.0, 512.0)
HALF_LIFE = 3
"""Slots of cells, half of the history: what is older by so much counts half."""
_HUBER = 1.5
_CELL_NOISE = 0.02
_WINDOW_NOISE = 0.05
_REPLICA_SPREAD = 0.02
_POOLED_NOISE = 0.006
MISFIT = 0.06
"""Standard deviation of the misfit, relative: fits of such forms to published grids miss by 2.4 to 7.8 % (median)."""
_MISFIT_OCTAVES = 1.5
_MISFIT_SHARED = 0.6
_MISFIT_TOKENS = 2.0
_RATES = 5
_A, _RHO, _DELTA, _S, _JUMP, _PI = 0, 1, 2, 3, 3 + _RATES, 4 + _RATES
_SIZE = 5 + _RATES
_REFERENCE = _S + 2  # the slope that delta and pi are relative to: 32 to 128 tokens


@dataclass(frozen=True)
class StepTime:
    """A fit, ready to predict."""

    center: Array
    """Logarithms of the parameters."""
    covariance: Array
    captured: int | None
    batches: Array
    """Of the pooled cells, and their drafted tokens and logarithms of seconds."""
    drafted: Array
    seconds: Array
    noise: Array
    """Variance of each of those."""
    scatter: float
    """Robust standard deviation of the relative residuals of the cells."""
    windows: int
    replicas: int

    @property
    def floor(self) -> float:
        """Seconds of a step of nothing (a)."""
        return math.exp(float(self.center[_A]))

    @property
    def draft_share(self) -> tuple[float, float, float]:
        """A draft step by that floor (rho): the 5 %, 50 % and 95 % points."""
        center, spread = float(self.center[_RHO]), math.sqrt(float(self.covariance[_RHO, _RHO]))
        low, middle, high = (math.exp(center + z * spread) for z in (-1.645, 0.0, 1.645))
        return low, middle, high

    @property
    def token_seconds(self) -> float:
        """Seconds of a verified token between 32 and 128 in a step."""
        return math.exp(float(self.center[_REFERENCE]))

    def draft_seconds(self, batches: Array) -> Array:
        """Seconds of one draft step at each batch, at the centre of the fit."""
        a, rho, delta, slope = (float(p) for p in np.exp(self.center[[_A, _RHO, _DELTA, _REFERENCE]]))
        found: Array = a * rho + delta * slope * batches
        return found

    def middle(self, batches: Array, drafted: Array) -> Array:
        """Seconds of a step without prefill at each pair of batch and drafted tokens, at the centre of the fit."""
        found: Array = _seconds(self.center[None], batches, drafted, self.captured)[0]
        return found

    def draws(self, batches: Array, drafted: Array, draws: int, random: np.random.Generator) -> Array:
        """Draws of the seconds of a step without prefill, at each pair of batch and drafted tokens."""
        parameters = draw_normal(self.center, self.covariance, draws, random)
        known = _covariance(self.batches, self.drafted, self.batches, self.drafted) + np.diag(self.noise)
        across = _covariance(self.batches, self.drafted, batches, drafted)
        gain = np.linalg.solve(known, across)
        own = _covariance(batches, drafted, batches, drafted) - across.T @ gain
        misfit = draw_normal(np.zeros(len(batches)), own, draws, random)
        residuals = self.seconds - np.log(_seconds(parameters, self.batches, self.drafted, self.captured))
        found: Array = _seconds(parameters, batches, drafted, self.captured) * np.exp(residuals @ gain + misfit)
        return found


def fit(cells: Mapping[Key, Cell], captured: int | None = None, *, experts: bool | None = None) -> StepTime | Unknown:
    """Fit to all cells. `captured`: tokens of the largest captured graph; `experts`: whether the target is a mixture of experts,
    None where that is not known."""
    rows = _Rows.of(cells)
    if isinstance(rows, Unknown):
        return rows
    mean, precision = _prior(rows, experts)
    parameters, effects, weights = _robust(rows, mean, precision, captured)
    residuals = rows.log_seconds - np.log(_seconds(parameters[None], rows.batch, rows.drafted, captured, rows.prefill)[0])
    scatter = 1.4826 * float(np.median(np.abs(residuals - effects[rows.replica])))
    if scatter > MOST_SCATTER:
        return Unknown(
            f"step times scatter by {100 * scatter:.0f} % around every cost of batch, drafts and prefill, and up to "
            f"{100 * MOST_SCATTER:.0f} % can be reckoned with: contexts of very different lengths, or other work on the same GPU."
        )
    pooled = _pool(rows, parameters, effects, weights)
    center, covariance = _refit(pooled, parameters, mean, precision, captured)
    return StepTime(center, covariance, captured, *pooled, scatter=scatter, windows=rows.windows, replicas=len(effects))


@dataclass(frozen=True)
class _Rows:
    """The cells as columns."""

    replica: Indices
    group: Indices
    """Cells of one setting and batch bin."""
    batch: Array
    drafted: Array
    prefill: Array
    log_seconds: Array
    weight: Array
    """Windows in each, older ones less."""
    windows: int
    """In all, old ones as much as new ones."""

    @property
    def noise(self) -> Array:
        """Variance of each logarithm, the misfit apart."""
        found: Array = _CELL_NOISE**2 + _WINDOW_NOISE**2 / self.weight
        return found

    @classmethod
    def of(cls, cells: Mapping[Key, Cell]) -> _Rows | Unknown:
        windows = sum(cell.windows for cell in cells.values())
        if windows < LEAST_WINDOWS:
            return Unknown(f"{windows} windows tell what a step costs, and {LEAST_WINDOWS} are needed.")
        replicas = {name: index for index, name in enumerate(dict.fromkeys(key.replica for key in cells))}
        groups = {group: index for index, group in enumerate(dict.fromkeys((key.setting, key.batch_bin) for key in cells))}
        codes = np.array(
            [(replicas[key.replica], groups[key.setting, key.batch_bin], key.prefill_bin, key.slot) for key in cells], dtype=int
        )
        sums = np.array(
            [(one.windows, one.request_steps, one.step_seconds, one.batch, one.prefill, one.drafted) for one in cells.values()]
        )
        slots = codes[:, 3]
        sums = sums * (0.5 ** ((slots.max() - slots) / HALF_LIFE))[:, None]
        alike, member = np.unique(codes[:, :3], axis=0, return_inverse=True)  # over the slots
        count, steps, *means = (np.bincount(member.ravel(), column, len(alike)) for column in sums.T)
        seconds, batch, prefill, drafted = (column / steps for column in means)
        order = np.argsort(batch)
        share = np.cumsum(count[order]) / count.sum()
        low, high = (float(batch[order][np.searchsorted(share, q)]) for q in (0.05, 0.95))
        if high < LEAST_BATCH_RANGE * low:
            return Unknown(
                f"nearly all windows had a batch between {low:.1f} and {high:.1f}: a step's fixed cost cannot be told from the "
                f"cost of a request before the batch has varied {LEAST_BATCH_RANGE:.0f}-fold, with the load or with the hour."
            )
        return cls(alike[:, 0], alike[:, 1], batch, drafted, prefill, np.log(seconds), count * 1.0, windows)


def _segments(tokens: Array) -> list[Array]:
    """How much of n verified tokens lies between one knot and the next."""
    ends = (*KNOTS[1:], math.inf)
    return [np.clip(tokens - low, 0.0, high - low) for low, high in zip(KNOTS, ends, strict=True)]


def _terms(parameters: Array, batch: Array, drafted: Array, captured: int | None, prefill: Array | float = 0.0) -> list[Array]:
    """The parts of a step's seconds that each parameter scales, in the parameters' order; draws by points."""
    p = np.exp(parameters)[:, :, None]
    tokens = batch * (drafted + 1)
    beyond = np.zeros_like(tokens) if captured is None else (tokens > captured).astype(float)
    per_request = p[:, _DELTA] * p[:, _REFERENCE] * drafted * batch
    verify = [p[:, _S + j] * part for j, part in enumerate(_segments(tokens))]
    return [
        p[:, _A] * np.ones_like(tokens),
        p[:, _A] * p[:, _RHO] * drafted,
        per_request,
        *verify,
        p[:, _JUMP] * beyond,
        p[:, _PI] * (prefill * np.ones_like(tokens)),
    ]


def _seconds(parameters: Array, batch: Array, drafted: Array, captured: int | None, prefill: Array | float = 0.0) -> Array:
    """Draws by points."""
    found: Array = sum(_terms(parameters, batch, drafted, captured, prefill), np.zeros(1))
    return found


def _jacobian(parameters: Array, rows: tuple[Array, Array, Array | float], captured: int | None) -> tuple[Array, Array]:
    """The logarithm of a step's seconds at each point, and its derivatives by the logarithms of the parameters."""
    terms = [term[0] for term in _terms(parameters[None], rows[0], rows[1], captured, rows[2])]
    total = np.sum(terms, axis=0)
    terms[_A] = terms[_A] + terms[_RHO]  # rho is relative to a, delta to the slope of reference
    terms[_REFERENCE] = terms[_REFERENCE] + terms[_DELTA]
    return np.log(total), np.stack(terms, axis=1) / total[:, None]


def _prior(rows: _Rows, experts: bool | None) -> tuple[Array, Array]:
    """Mean and precision of the logarithms of the parameters, as independent statements on combinations of them."""
    statements: list[tuple[dict[int, float], float, float]] = [
        ({_A: 1.0}, float(rows.log_seconds.min()) - 0.2, 1.0),
        ({_RHO: 1.0}, math.log(0.08), 0.5),
        ({_DELTA: 1.0}, math.log(0.2), 1.0),
        ({_REFERENCE: 1.0, _A: -1.0}, math.log(0.004), 1.5),
        ({_JUMP: 1.0, _A: -1.0}, math.log(2.0), 1.0),
        ({_PI: 1.0, _REFERENCE: -1.0}, 0.0, 1.0),
        ({_S + 3: 1.0, _REFERENCE: -1.0}, 0.1, 0.4),
        ({_S + 4: 1.0, _S + 3: -1.0}, 0.2, 0.4),
    ]
    step, spread = (0.0, 0.3) if experts is False else (0.5, 1.0)
    statements += [({_S: 1.0, _S + 1: -1.0}, step, spread), ({_S + 1: 1.0, _REFERENCE: -1.0}, step, spread)]
    precision, pull = np.zeros((_SIZE, _SIZE)), np.zeros(_SIZE)
    for combination, value, deviation in statements:
        vector = np.zeros(_SIZE)
        vector[list(combination)] = list(combination.values())
        precision += np.outer(vector, vector) / deviation**2
        pull += vector * value / deviation**2
    return np.linalg.solve(precision, pull), precision


def _robust(rows: _Rows, mean: Array, precision: Array, captured: int | None) -> tuple[Array, Array, Array]:
    """Parameters, effect of each replica, and Huber's weight of each cell."""
    count = int(rows.replica.max()) + 1
    effects, weights, parameters = np.zeros(count), np.ones(len(rows.batch)), mean
    inverse = 1.0 / (rows.noise + MISFIT**2)
    points = (rows.batch, rows.drafted, rows.prefill)
    for _ in range(6):
        target = rows.log_seconds - effects[rows.replica]
        parameters = _climb(parameters, target, np.sqrt(weights * inverse), points, mean, precision, captured)
        residuals = rows.log_seconds - _jacobian(parameters, points, captured)[0]
        certainty = weights * inverse
        effects = np.bincount(rows.replica, certainty * residuals, count) / (
            np.bincount(rows.replica, certainty, count) + 1 / _REPLICA_SPREAD**2
        )
        relative = np.abs(residuals - effects[rows.replica]) * np.sqrt(inverse)
        weights = np.minimum(1.0, _HUBER / np.maximum(relative, 1e-9))
    return parameters, effects, weights


def _climb(
    start: Array,
    target: Array,
    scale: Array,
    points: tuple[Array, Array, Array | float],
    mean: Array,
    precision: Array,
    captured: int | None,
) -> Array:
    """Gauss-Newton steps from `start`, halved where they do not improve. `scale`: one over the deviation of each row, or a
    whitening matrix."""

    def whiten(rows: Array) -> Array:
        found: Array = scale @ rows if scale.ndim == 2 else (rows.T * scale).T
        return found

    def cost(at: Array) -> float:
        off = whiten(target - _jacobian(at, points, captured)[0])
        return float(off @ off + (at - mean) @ precision @ (at - mean))

    parameters, best = start, cost(start)
    for _ in range(25):
        model, jacobian = _jacobian(parameters, points, captured)
        slopes, off = whiten(jacobian), whiten(target - model)
        step = np.linalg.solve(slopes.T @ slopes + precision, slopes.T @ off + precision @ (mean - parameters))
        step = step * min(1.0, 1.5 / max(float(np.abs(step).max()), 1e-12))
        for _ in range(6):
            found = cost(parameters + step)
            if found < best:
                break
            step = step / 2
        else:
            return parameters
        parameters, gained, best = parameters + step, best - found, found
        if gained < 1e-6 * (1 + best):
            break
    return parameters


def _pool(rows: _Rows, parameters: Array, effects: Array, weights: Array) -> tuple[Array, Array, Array, Array]:
    """Batch, drafted tokens, logarithm of seconds without prefill and replica effects, and its variance, by group."""
    groups = int(rows.group.max()) + 1
    certainty = weights / rows.noise
    total = np.bincount(rows.group, certainty, groups)
    seconds = np.exp(rows.log_seconds)
    decode = np.maximum(seconds - math.exp(float(parameters[_PI])) * rows.prefill, 0.2 * seconds)
    columns = (rows.batch, rows.drafted, np.log(decode) - effects[rows.replica])
    batch, drafted, logs = (np.bincount(rows.group, certainty * column, groups) / total for column in columns)
    return batch, drafted, logs, _POOLED_NOISE**2 + 1 / total


def _covariance(batch: Array, drafted: Array, other_batch: Array, other_drafted: Array) -> Array:
    """Of the misfit between points."""
    octaves = np.abs(np.log2(batch)[:, None] - np.log2(other_batch)[None, :])
    tokens = np.abs(drafted[:, None] - other_drafted[None, :])
    alike = _MISFIT_SHARED + (1 - _MISFIT_SHARED) * np.exp(-tokens / _MISFIT_TOKENS)
    found: Array = MISFIT**2 * alike * np.exp(-octaves / _MISFIT_OCTAVES)
    return found


def _refit(
    pooled: tuple[Array, Array, Array, Array], start: Array, mean: Array, precision: Array, captured: int | None
) -> tuple[Array, Array]:
    """The parameters and their covariance, with the misfit among the errors."""
    batch, drafted, seconds, noise = pooled
    errors = _covariance(batch, drafted, batch, drafted) + np.diag(noise)
    whitening = np.linalg.inv(np.linalg.cholesky(errors))
    points = (batch, drafted, 0.0)
    center = _climb(start, seconds, whitening, points, mean, precision, captured)
    slopes = whitening @ _jacobian(center, points, captured)[1]
    return center, np.linalg.inv(slopes.T @ slopes + precision)
