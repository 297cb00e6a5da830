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
from aerie.tuning.models.numeric import FloatArray, draw_normal
from aerie.tuning.telemetry import StepCell, StepCellKey

IndexArray = npt.NDArray[np.int_]

MIN_STEP_TIME_WINDOWS = 40
MIN_BATCH_RANGE_RATIO = 2.0
"""The largest batch by the smallest; below that a step's fixed cost cannot be told from the cost of a request."""
MAX_RESIDUAL_SD = 0.08
"""Robust standard deviation of the relative residuals; above it something else moves the step times."""
VERIFIED_TOKEN_KNOTS = (0.0, 8.0, 32.0, 128.0, 512.0)
HALF_LIFE_SLOTS = 3
"""Slots of cells, half of the history: what is older by so much counts half."""
_HUBER_THRESHOLD = 1.5
_CELL_NOISE = 0.02
_WINDOW_NOISE = 0.05
_REPLICA_SPREAD = 0.02
_POOLED_NOISE = 0.006
MISFIT_SD = 0.06
"""Standard deviation of the misfit, relative: fits of such forms to published grids miss by 2.4 to 7.8 % (median)."""
_MISFIT_OCTAVES = 1.5
_MISFIT_SHARED = 0.6
_MISFIT_TOKENS = 2.0
_SLOPE_COUNT = 5
_A, _RHO, _DELTA, _S, _JUMP, _PI = 0, 1, 2, 3, 3 + _SLOPE_COUNT, 4 + _SLOPE_COUNT
_PARAMETER_COUNT = 5 + _SLOPE_COUNT
_REFERENCE_SLOPE = _S + 2  # the slope that delta and pi are relative to: 32 to 128 tokens


@dataclass(frozen=True)
class StepTimeModel:
    """A fit, ready to predict."""

    center: FloatArray
    """Logarithms of the parameters."""
    covariance: FloatArray
    max_captured_tokens: int | None
    batches: FloatArray
    """Of the pooled cells, and their drafted tokens and logarithms of seconds."""
    draft_tokens: FloatArray
    log_seconds: FloatArray
    noise_variance: FloatArray
    """Variance of each of those."""
    residual_sd: float
    """Robust standard deviation of the relative residuals of the cells."""
    window_count: int
    replica_count: int

    @property
    def floor_seconds(self) -> float:
        """Seconds of a step of nothing (a)."""
        return math.exp(float(self.center[_A]))

    @property
    def draft_step_share(self) -> tuple[float, float, float]:
        """A draft step by that floor (rho): the 5 %, 50 % and 95 % points."""
        center, spread = float(self.center[_RHO]), math.sqrt(float(self.covariance[_RHO, _RHO]))
        low, middle, high = (math.exp(center + z * spread) for z in (-1.645, 0.0, 1.645))
        return low, middle, high

    @property
    def verified_token_seconds(self) -> float:
        """Seconds of a verified token between 32 and 128 in a step."""
        return math.exp(float(self.center[_REFERENCE_SLOPE]))

    def draft_step_seconds(self, batches: FloatArray) -> FloatArray:
        """Seconds of one draft step at each batch, at the centre of the fit."""
        a, rho, delta, slope = (float(p) for p in np.exp(self.center[[_A, _RHO, _DELTA, _REFERENCE_SLOPE]]))
        found: FloatArray = a * rho + delta * slope * batches
        return found

    def central_step_seconds(self, batches: FloatArray, draft_tokens: FloatArray) -> FloatArray:
        """Seconds of a step without prefill at each pair of batch and drafted tokens, at the centre of the fit."""
        found: FloatArray = _step_seconds(self.center[None], batches, draft_tokens, self.max_captured_tokens)[0]
        return found

    def draw_step_seconds(
        self, batches: FloatArray, draft_tokens: FloatArray, draws: int, random: np.random.Generator
    ) -> FloatArray:
        """Draws of the seconds of a step without prefill, at each pair of batch and drafted tokens."""
        parameters = draw_normal(self.center, self.covariance, draws, random)
        known = _misfit_covariance(self.batches, self.draft_tokens, self.batches, self.draft_tokens) + np.diag(
            self.noise_variance
        )
        across = _misfit_covariance(self.batches, self.draft_tokens, batches, draft_tokens)
        gain = np.linalg.solve(known, across)
        own = _misfit_covariance(batches, draft_tokens, batches, draft_tokens) - across.T @ gain
        misfit = draw_normal(np.zeros(len(batches)), own, draws, random)
        residuals = self.log_seconds - np.log(
            _step_seconds(parameters, self.batches, self.draft_tokens, self.max_captured_tokens)
        )
        found: FloatArray = _step_seconds(parameters, batches, draft_tokens, self.max_captured_tokens) * np.exp(
            residuals @ gain + misfit
        )
        return found


def fit_step_time(
    cells: Mapping[StepCellKey, StepCell], max_captured_tokens: int | None = None, *, is_moe: bool | None = None
) -> StepTimeModel | Unknown:
    """Fit to all cells. `captured`: tokens of the largest captured graph; `experts`: whether the target is a mixture of experts,
    None where that is not known."""
    rows = _CellColumns.from_cells(cells)
    if isinstance(rows, Unknown):
        return rows
    mean, precision = _prior(rows, is_moe)
    parameters, effects, weights = _fit_robustly(rows, mean, precision, max_captured_tokens)
    residuals = rows.log_seconds - np.log(
        _step_seconds(parameters[None], rows.batch, rows.draft_tokens, max_captured_tokens, rows.prefill)[0]
    )
    scatter = 1.4826 * float(np.median(np.abs(residuals - effects[rows.replica])))
    if scatter > MAX_RESIDUAL_SD:
        return Unknown(
            f"step times scatter by {100 * scatter:.0f} % around every cost of batch, drafts and prefill, and up to "
            f"{100 * MAX_RESIDUAL_SD:.0f} % can be reckoned with: contexts of very different lengths, or other work on the same GPU."
        )
    pooled = _pool_groups(rows, parameters, effects, weights)
    center, covariance = _refit_pooled(pooled, parameters, mean, precision, max_captured_tokens)
    return StepTimeModel(
        center,
        covariance,
        max_captured_tokens,
        *pooled,
        residual_sd=scatter,
        window_count=rows.window_count,
        replica_count=len(effects),
    )


@dataclass(frozen=True)
class _CellColumns:
    """The cells as columns."""

    replica: IndexArray
    group: IndexArray
    """Cells of one setting and batch bin."""
    batch: FloatArray
    draft_tokens: FloatArray
    prefill: FloatArray
    log_seconds: FloatArray
    weight: FloatArray
    """Windows in each, older ones less."""
    window_count: int
    """In all, old ones as much as new ones."""

    @property
    def noise_variance(self) -> FloatArray:
        """Variance of each logarithm, the misfit apart."""
        found: FloatArray = _CELL_NOISE**2 + _WINDOW_NOISE**2 / self.weight
        return found

    @classmethod
    def from_cells(cls, cells: Mapping[StepCellKey, StepCell]) -> _CellColumns | Unknown:
        windows = sum(cell.windows for cell in cells.values())
        if windows < MIN_STEP_TIME_WINDOWS:
            return Unknown(f"{windows} windows tell what a step costs, and {MIN_STEP_TIME_WINDOWS} are needed.")
        replicas = {name: index for index, name in enumerate(dict.fromkeys(key.replica for key in cells))}
        groups = {group: index for index, group in enumerate(dict.fromkeys((key.setting, key.batch_bin) for key in cells))}
        codes = np.array(
            [(replicas[key.replica], groups[key.setting, key.batch_bin], key.prefill_bin, key.slot) for key in cells], dtype=int
        )
        sums = np.array(
            [(one.windows, one.request_steps, one.step_seconds, one.batch, one.prefill, one.drafted) for one in cells.values()]
        )
        slots = codes[:, 3]
        sums = sums * (0.5 ** ((slots.max() - slots) / HALF_LIFE_SLOTS))[:, None]
        alike, member = np.unique(codes[:, :3], axis=0, return_inverse=True)  # over the slots
        count, steps, *means = (np.bincount(member.ravel(), column, len(alike)) for column in sums.T)
        seconds, batch, prefill, drafted = (column / steps for column in means)
        order = np.argsort(batch)
        share = np.cumsum(count[order]) / count.sum()
        low, high = (float(batch[order][np.searchsorted(share, q)]) for q in (0.05, 0.95))
        if high < MIN_BATCH_RANGE_RATIO * low:
            return Unknown(
                f"nearly all windows had a batch between {low:.1f} and {high:.1f}: a step's fixed cost cannot be told from the "
                f"cost of a request before the batch has varied {MIN_BATCH_RANGE_RATIO:.0f}-fold, with the load or with the hour."
            )
        return cls(alike[:, 0], alike[:, 1], batch, drafted, prefill, np.log(seconds), count * 1.0, windows)


def _tokens_by_segment(tokens: FloatArray) -> list[FloatArray]:
    """How much of n verified tokens lies between one knot and the next."""
    ends = (*VERIFIED_TOKEN_KNOTS[1:], math.inf)
    return [np.clip(tokens - low, 0.0, high - low) for low, high in zip(VERIFIED_TOKEN_KNOTS, ends, strict=True)]


def _step_terms(
    parameters: FloatArray, batch: FloatArray, drafted: FloatArray, captured: int | None, prefill: FloatArray | float = 0.0
) -> list[FloatArray]:
    """The parts of a step's seconds that each parameter scales, in the parameters' order; draws by points."""
    p = np.exp(parameters)[:, :, None]
    tokens = batch * (drafted + 1)
    beyond = np.zeros_like(tokens) if captured is None else (tokens > captured).astype(float)
    per_request = p[:, _DELTA] * p[:, _REFERENCE_SLOPE] * drafted * batch
    verify = [p[:, _S + j] * part for j, part in enumerate(_tokens_by_segment(tokens))]
    return [
        p[:, _A] * np.ones_like(tokens),
        p[:, _A] * p[:, _RHO] * drafted,
        per_request,
        *verify,
        p[:, _JUMP] * beyond,
        p[:, _PI] * (prefill * np.ones_like(tokens)),
    ]


def _step_seconds(
    parameters: FloatArray, batch: FloatArray, drafted: FloatArray, captured: int | None, prefill: FloatArray | float = 0.0
) -> FloatArray:
    """Draws by points."""
    found: FloatArray = sum(_step_terms(parameters, batch, drafted, captured, prefill), np.zeros(1))
    return found


def _jacobian(
    parameters: FloatArray, rows: tuple[FloatArray, FloatArray, FloatArray | float], captured: int | None
) -> tuple[FloatArray, FloatArray]:
    """The logarithm of a step's seconds at each point, and its derivatives by the logarithms of the parameters."""
    terms = [term[0] for term in _step_terms(parameters[None], rows[0], rows[1], captured, rows[2])]
    total = np.sum(terms, axis=0)
    terms[_A] = terms[_A] + terms[_RHO]  # rho is relative to a, delta to the slope of reference
    terms[_REFERENCE_SLOPE] = terms[_REFERENCE_SLOPE] + terms[_DELTA]
    return np.log(total), np.stack(terms, axis=1) / total[:, None]


def _prior(rows: _CellColumns, experts: bool | None) -> tuple[FloatArray, FloatArray]:
    """Mean and precision of the logarithms of the parameters, as independent statements on combinations of them."""
    statements: list[tuple[dict[int, float], float, float]] = [
        ({_A: 1.0}, float(rows.log_seconds.min()) - 0.2, 1.0),
        ({_RHO: 1.0}, math.log(0.08), 0.5),
        ({_DELTA: 1.0}, math.log(0.2), 1.0),
        ({_REFERENCE_SLOPE: 1.0, _A: -1.0}, math.log(0.004), 1.5),
        ({_JUMP: 1.0, _A: -1.0}, math.log(2.0), 1.0),
        ({_PI: 1.0, _REFERENCE_SLOPE: -1.0}, 0.0, 1.0),
        ({_S + 3: 1.0, _REFERENCE_SLOPE: -1.0}, 0.1, 0.4),
        ({_S + 4: 1.0, _S + 3: -1.0}, 0.2, 0.4),
    ]
    step, spread = (0.0, 0.3) if experts is False else (0.5, 1.0)
    statements += [({_S: 1.0, _S + 1: -1.0}, step, spread), ({_S + 1: 1.0, _REFERENCE_SLOPE: -1.0}, step, spread)]
    precision, pull = np.zeros((_PARAMETER_COUNT, _PARAMETER_COUNT)), np.zeros(_PARAMETER_COUNT)
    for combination, value, deviation in statements:
        vector = np.zeros(_PARAMETER_COUNT)
        vector[list(combination)] = list(combination.values())
        precision += np.outer(vector, vector) / deviation**2
        pull += vector * value / deviation**2
    return np.linalg.solve(precision, pull), precision


def _fit_robustly(
    rows: _CellColumns, mean: FloatArray, precision: FloatArray, captured: int | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Parameters, effect of each replica, and Huber's weight of each cell."""
    count = int(rows.replica.max()) + 1
    effects, weights, parameters = np.zeros(count), np.ones(len(rows.batch)), mean
    inverse = 1.0 / (rows.noise_variance + MISFIT_SD**2)
    points = (rows.batch, rows.draft_tokens, rows.prefill)
    for _ in range(6):
        target = rows.log_seconds - effects[rows.replica]
        parameters = _gauss_newton(parameters, target, np.sqrt(weights * inverse), points, mean, precision, captured)
        residuals = rows.log_seconds - _jacobian(parameters, points, captured)[0]
        certainty = weights * inverse
        effects = np.bincount(rows.replica, certainty * residuals, count) / (
            np.bincount(rows.replica, certainty, count) + 1 / _REPLICA_SPREAD**2
        )
        relative = np.abs(residuals - effects[rows.replica]) * np.sqrt(inverse)
        weights = np.minimum(1.0, _HUBER_THRESHOLD / np.maximum(relative, 1e-9))
    return parameters, effects, weights


def _gauss_newton(
    start: FloatArray,
    target: FloatArray,
    scale: FloatArray,
    points: tuple[FloatArray, FloatArray, FloatArray | float],
    mean: FloatArray,
    precision: FloatArray,
    captured: int | None,
) -> FloatArray:
    """Gauss-Newton steps from `start`, halved where they do not improve. `scale`: one over the deviation of each row, or a
    whitening matrix."""

    def whiten(rows: FloatArray) -> FloatArray:
        found: FloatArray = scale @ rows if scale.ndim == 2 else (rows.T * scale).T
        return found

    def cost(at: FloatArray) -> float:
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


def _pool_groups(
    rows: _CellColumns, parameters: FloatArray, effects: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Batch, drafted tokens, logarithm of seconds without prefill and replica effects, and its variance, by group."""
    groups = int(rows.group.max()) + 1
    certainty = weights / rows.noise_variance
    total = np.bincount(rows.group, certainty, groups)
    seconds = np.exp(rows.log_seconds)
    decode = np.maximum(seconds - math.exp(float(parameters[_PI])) * rows.prefill, 0.2 * seconds)
    columns = (rows.batch, rows.draft_tokens, np.log(decode) - effects[rows.replica])
    batch, drafted, logs = (np.bincount(rows.group, certainty * column, groups) / total for column in columns)
    return batch, drafted, logs, _POOLED_NOISE**2 + 1 / total


def _misfit_covariance(batch: FloatArray, drafted: FloatArray, other_batch: FloatArray, other_drafted: FloatArray) -> FloatArray:
    """Of the misfit between points."""
    octaves = np.abs(np.log2(batch)[:, None] - np.log2(other_batch)[None, :])
    tokens = np.abs(drafted[:, None] - other_drafted[None, :])
    alike = _MISFIT_SHARED + (1 - _MISFIT_SHARED) * np.exp(-tokens / _MISFIT_TOKENS)
    found: FloatArray = MISFIT_SD**2 * alike * np.exp(-octaves / _MISFIT_OCTAVES)
    return found


def _refit_pooled(
    pooled: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    start: FloatArray,
    mean: FloatArray,
    precision: FloatArray,
    captured: int | None,
) -> tuple[FloatArray, FloatArray]:
    """The parameters and their covariance, with the misfit among the errors."""
    batch, drafted, seconds, noise = pooled
    errors = _misfit_covariance(batch, drafted, batch, drafted) + np.diag(noise)
    whitening = np.linalg.inv(np.linalg.cholesky(errors))
    points = (batch, drafted, 0.0)
    center = _gauss_newton(start, seconds, whitening, points, mean, precision, captured)
    slopes = whitening @ _jacobian(center, points, captured)[1]
    return center, np.linalg.inv(slopes.T @ slopes + precision)
