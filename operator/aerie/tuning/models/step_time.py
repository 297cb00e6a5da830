"""Predict the duration of an engine step at a batch and number of draft tokens that did not run: a fit with its uncertainty.

    T(B, K, P) = a (1 + rho K) + v(B (K + 1)) + delta s K B + J [B (K + 1) > captured] + pi P

a: an empty step; rho a: one draft step; v: verification of n tokens, increasing and piecewise linear with slopes s_j between the
knots 0, 8, 32, 128, 512; delta s: a draft step's cost per request, relative to a verified token's; J: a step without a captured
graph; pi: a computed prompt token. A dense model has nearly equal slopes. A mixture of experts is concave, because the first
tokens activate most experts. All parameters are positive, so the fit is over their logarithms.

Telemetry at one K cannot separate a from rho, nor the slopes from delta. There the prior decides, fitted to seven published grids
of five targets (rho: log-normal, median 0.08, sigma 0.5). A canary at another K resolves it.

The fit has two stages. First, a robust fit (Huber's weights on relative errors) to the cells of all replicas estimates an effect
of each replica; that effect and the prefill are then removed. Second, the cells of one setting and batch are pooled. The
logarithms of the step times are then model + misfit + noise. The misfit is a Gaussian process over batch and K (Kennedy and
O'Hagan 2001): the form is not the truth, so a prediction near a measured point follows the measurement, and becomes less certain
away from it.

Guarantees: if the data cannot identify a step's cost, the answer is a message. Not identified, and omitted: the cost of cached
tokens (it correlates with the batch), contexts, adapters. The uncertainty of pi and of the replicas' effects is not propagated.
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
"""Ratio of the largest batch to the smallest. Below it a step's fixed cost cannot be separated from the cost of a request."""
MAX_RESIDUAL_SD = 0.08
"""Robust standard deviation of the relative residuals. Above it something else affects the step times."""
VERIFIED_TOKEN_KNOTS = (0.0, 8.0, 32.0, 128.0, 512.0)
HALF_LIFE_SLOTS = 3
"""Slots of cells, half of the history. Cells older by this much have half the weight."""
_HUBER_THRESHOLD = 1.5
_CELL_NOISE = 0.02
_WINDOW_NOISE = 0.05
_REPLICA_SPREAD = 0.02
_POOLED_NOISE = 0.006
MISFIT_SD = 0.06
"""Standard deviation of the misfit, relative. Fits of such forms to published grids miss by 2.4 to 7.8 % (median)."""
_MISFIT_OCTAVES = 1.5
_MISFIT_SHARED = 0.6
_MISFIT_TOKENS = 2.0
_SLOPE_COUNT = 5
_A, _RHO, _DELTA, _S, _JUMP, _PI = 0, 1, 2, 3, 3 + _SLOPE_COUNT, 4 + _SLOPE_COUNT
_PARAMETER_COUNT = 5 + _SLOPE_COUNT
_REFERENCE_SLOPE = _S + 2  # delta and pi are relative to this slope: 32 to 128 tokens


@dataclass(frozen=True)
class StepTimeModel:
    """A fitted step-time model, ready to predict."""

    center: FloatArray
    """Logarithms of the parameters."""
    covariance: FloatArray
    max_captured_tokens: int | None
    batches: FloatArray
    """Batches of the pooled cells; their draft tokens and logarithms of seconds follow."""
    draft_tokens: FloatArray
    log_seconds: FloatArray
    noise_variance: FloatArray
    """Variance of each `log_seconds`."""
    residual_sd: float
    """Robust standard deviation of the relative residuals of the cells."""
    window_count: int
    replica_count: int

    @property
    def floor_seconds(self) -> float:
        """Seconds of an empty step (a)."""
        return math.exp(float(self.center[_A]))

    @property
    def draft_step_share(self) -> tuple[float, float, float]:
        """A draft step relative to `floor_seconds` (rho): the 5 %, 50 % and 95 % quantiles."""
        center, sd = float(self.center[_RHO]), math.sqrt(float(self.covariance[_RHO, _RHO]))
        low, median, high = (math.exp(center + z * sd) for z in (-1.645, 0.0, 1.645))
        return low, median, high

    @property
    def verified_token_seconds(self) -> float:
        """Seconds of a verified token between 32 and 128 in a step."""
        return math.exp(float(self.center[_REFERENCE_SLOPE]))

    def draft_step_seconds(self, batches: FloatArray) -> FloatArray:
        """Return the seconds of one draft step at each batch, at the centre of the fit."""
        a, rho, delta, slope = (float(p) for p in np.exp(self.center[[_A, _RHO, _DELTA, _REFERENCE_SLOPE]]))
        seconds: FloatArray = a * rho + delta * slope * batches
        return seconds

    def central_step_seconds(self, batches: FloatArray, draft_tokens: FloatArray) -> FloatArray:
        """Return the seconds of a step without prefill at each pair of batch and draft tokens, at the centre of the fit."""
        seconds: FloatArray = _step_seconds(self.center[None], batches, draft_tokens, self.max_captured_tokens)[0]
        return seconds

    def draw_step_seconds(
        self, batches: FloatArray, draft_tokens: FloatArray, draws: int, random: np.random.Generator
    ) -> FloatArray:
        """Draw the seconds of a step without prefill, at each pair of batch and draft tokens."""
        parameters = draw_normal(self.center, self.covariance, draws, random)
        measured_covariance = _misfit_covariance(self.batches, self.draft_tokens, self.batches, self.draft_tokens) + np.diag(
            self.noise_variance
        )
        cross_covariance = _misfit_covariance(self.batches, self.draft_tokens, batches, draft_tokens)
        gain = np.linalg.solve(measured_covariance, cross_covariance)
        posterior_covariance = _misfit_covariance(batches, draft_tokens, batches, draft_tokens) - cross_covariance.T @ gain
        misfit = draw_normal(np.zeros(len(batches)), posterior_covariance, draws, random)
        residuals = self.log_seconds - np.log(
            _step_seconds(parameters, self.batches, self.draft_tokens, self.max_captured_tokens)
        )
        seconds: FloatArray = _step_seconds(parameters, batches, draft_tokens, self.max_captured_tokens) * np.exp(
            residuals @ gain + misfit
        )
        return seconds


def fit_step_time(
    cells: Mapping[StepCellKey, StepCell], max_captured_tokens: int | None = None, *, is_moe: bool | None = None
) -> StepTimeModel | Unknown:
    """Fit the model to all cells.

    `max_captured_tokens`: tokens of the largest captured graph. `is_moe`: whether the target is a mixture of experts; None if
    unknown.
    """
    columns = _CellColumns.from_cells(cells)
    if isinstance(columns, Unknown):
        return columns
    mean, precision = _prior(columns, is_moe)
    parameters, effects, weights = _fit_robustly(columns, mean, precision, max_captured_tokens)
    residuals = columns.log_seconds - np.log(
        _step_seconds(parameters[None], columns.batch, columns.draft_tokens, max_captured_tokens, columns.prefill)[0]
    )
    residual_sd = 1.4826 * float(np.median(np.abs(residuals - effects[columns.replica])))
    if residual_sd > MAX_RESIDUAL_SD:
        return Unknown(
            f"step times scatter by {100 * residual_sd:.0f} % around every cost of batch, drafts and prefill, and up to "
            f"{100 * MAX_RESIDUAL_SD:.0f} % can be modelled: contexts of very different lengths, or other work on the same "
            "GPU."
        )
    pooled = _pool_groups(columns, parameters, effects, weights)
    center, covariance = _refit_pooled(pooled, parameters, mean, precision, max_captured_tokens)
    return StepTimeModel(
        center,
        covariance,
        max_captured_tokens,
        *pooled,
        residual_sd=residual_sd,
        window_count=columns.window_count,
        replica_count=len(effects),
    )


@dataclass(frozen=True)
class _CellColumns:
    """Cells as columns."""

    replica: IndexArray
    group: IndexArray
    """Index of the setting and batch bin of each cell."""
    batch: FloatArray
    draft_tokens: FloatArray
    prefill: FloatArray
    log_seconds: FloatArray
    weight: FloatArray
    """Windows of each cell; older ones count less."""
    window_count: int
    """Number of all windows; older ones count as much as newer ones."""

    @property
    def noise_variance(self) -> FloatArray:
        """Variance of each logarithm, without the misfit."""
        variance: FloatArray = _CELL_NOISE**2 + _WINDOW_NOISE**2 / self.weight
        return variance

    @classmethod
    def from_cells(cls, cells: Mapping[StepCellKey, StepCell]) -> _CellColumns | Unknown:
        windows = sum(cell.windows for cell in cells.values())
        if windows < MIN_STEP_TIME_WINDOWS:
            return Unknown(f"{windows} windows measure the cost of a step, and {MIN_STEP_TIME_WINDOWS} are needed.")
        replicas = {name: index for index, name in enumerate(dict.fromkeys(key.replica for key in cells))}
        groups = {group: index for index, group in enumerate(dict.fromkeys((key.setting, key.batch_bin) for key in cells))}
        codes = np.array(
            [(replicas[key.replica], groups[key.setting, key.batch_bin], key.prefill_bin, key.slot) for key in cells], dtype=int
        )
        sums = np.array(
            [
                (cell.windows, cell.request_steps, cell.step_seconds, cell.batch_sum, cell.prefill_sum, cell.draft_tokens_sum)
                for cell in cells.values()
            ]
        )
        slots = codes[:, 3]
        sums = sums * (0.5 ** ((slots.max() - slots) / HALF_LIFE_SLOTS))[:, None]
        cell_codes, cell_index = np.unique(codes[:, :3], axis=0, return_inverse=True)  # over the slots
        count, steps, *means = (np.bincount(cell_index.ravel(), column, len(cell_codes)) for column in sums.T)
        seconds, batch, prefill, draft_tokens = (column / steps for column in means)
        order = np.argsort(batch)
        share = np.cumsum(count[order]) / count.sum()
        low, high = (float(batch[order][np.searchsorted(share, quantile)]) for quantile in (0.05, 0.95))
        if high < MIN_BATCH_RANGE_RATIO * low:
            return Unknown(
                f"nearly all windows had a batch between {low:.1f} and {high:.1f}: a step's fixed cost cannot be separated from "
                f"the cost of a request until the batch has varied {MIN_BATCH_RANGE_RATIO:.0f}-fold, with the load or the hour."
            )
        return cls(cell_codes[:, 0], cell_codes[:, 1], batch, draft_tokens, prefill, np.log(seconds), count * 1.0, windows)


def _tokens_by_segment(tokens: FloatArray) -> list[FloatArray]:
    """Split n verified tokens into the part between each knot and the next."""
    ends = (*VERIFIED_TOKEN_KNOTS[1:], math.inf)
    return [np.clip(tokens - low, 0.0, high - low) for low, high in zip(VERIFIED_TOKEN_KNOTS, ends, strict=True)]


def _step_terms(
    parameters: FloatArray,
    batch: FloatArray,
    draft_tokens: FloatArray,
    max_captured_tokens: int | None,
    prefill: FloatArray | float = 0.0,
) -> list[FloatArray]:
    """Return the terms of a step's seconds, one for each parameter that scales it, in the parameters' order; draws by points."""
    values = np.exp(parameters)[:, :, None]
    tokens = batch * (draft_tokens + 1)
    uncaptured = np.zeros_like(tokens) if max_captured_tokens is None else (tokens > max_captured_tokens).astype(float)
    per_request = values[:, _DELTA] * values[:, _REFERENCE_SLOPE] * draft_tokens * batch
    verify = [values[:, _S + j] * segment for j, segment in enumerate(_tokens_by_segment(tokens))]
    return [
        values[:, _A] * np.ones_like(tokens),
        values[:, _A] * values[:, _RHO] * draft_tokens,
        per_request,
        *verify,
        values[:, _JUMP] * uncaptured,
        values[:, _PI] * (prefill * np.ones_like(tokens)),
    ]


def _step_seconds(
    parameters: FloatArray,
    batch: FloatArray,
    draft_tokens: FloatArray,
    max_captured_tokens: int | None,
    prefill: FloatArray | float = 0.0,
) -> FloatArray:
    """Return the seconds of a step; draws by points."""
    seconds: FloatArray = sum(_step_terms(parameters, batch, draft_tokens, max_captured_tokens, prefill), np.zeros(1))
    return seconds


def _jacobian(
    parameters: FloatArray, points: tuple[FloatArray, FloatArray, FloatArray | float], max_captured_tokens: int | None
) -> tuple[FloatArray, FloatArray]:
    """Return the logarithm of a step's seconds at each point, and its derivatives by the logarithms of the parameters.

    A point is a batch, its draft tokens and its prefill tokens.
    """
    terms = [term[0] for term in _step_terms(parameters[None], points[0], points[1], max_captured_tokens, points[2])]
    total = np.sum(terms, axis=0)
    terms[_A] = terms[_A] + terms[_RHO]  # rho is relative to a, delta to the slope of reference
    terms[_REFERENCE_SLOPE] = terms[_REFERENCE_SLOPE] + terms[_DELTA]
    return np.log(total), np.stack(terms, axis=1) / total[:, None]


def _prior(columns: _CellColumns, is_moe: bool | None) -> tuple[FloatArray, FloatArray]:
    """Return mean and precision of the logarithms of the parameters, from independent statements on combinations of them."""
    statements: list[tuple[dict[int, float], float, float]] = [
        ({_A: 1.0}, float(columns.log_seconds.min()) - 0.2, 1.0),
        ({_RHO: 1.0}, math.log(0.08), 0.5),
        ({_DELTA: 1.0}, math.log(0.2), 1.0),
        ({_REFERENCE_SLOPE: 1.0, _A: -1.0}, math.log(0.004), 1.5),
        ({_JUMP: 1.0, _A: -1.0}, math.log(2.0), 1.0),
        ({_PI: 1.0, _REFERENCE_SLOPE: -1.0}, 0.0, 1.0),
        ({_S + 3: 1.0, _REFERENCE_SLOPE: -1.0}, 0.1, 0.4),
        ({_S + 4: 1.0, _S + 3: -1.0}, 0.2, 0.4),
    ]
    slope_drop, slope_sd = (0.0, 0.3) if is_moe is False else (0.5, 1.0)
    statements += [({_S: 1.0, _S + 1: -1.0}, slope_drop, slope_sd), ({_S + 1: 1.0, _REFERENCE_SLOPE: -1.0}, slope_drop, slope_sd)]
    precision, weighted_sum = np.zeros((_PARAMETER_COUNT, _PARAMETER_COUNT)), np.zeros(_PARAMETER_COUNT)
    for combination, value, deviation in statements:
        vector = np.zeros(_PARAMETER_COUNT)
        vector[list(combination)] = list(combination.values())
        precision += np.outer(vector, vector) / deviation**2
        weighted_sum += vector * value / deviation**2
    return np.linalg.solve(precision, weighted_sum), precision


def _fit_robustly(
    columns: _CellColumns, mean: FloatArray, precision: FloatArray, max_captured_tokens: int | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the parameters, the effect of each replica, and Huber's weight of each cell."""
    count = int(columns.replica.max()) + 1
    effects, weights, parameters = np.zeros(count), np.ones(len(columns.batch)), mean
    inverse_variance = 1.0 / (columns.noise_variance + MISFIT_SD**2)
    points = (columns.batch, columns.draft_tokens, columns.prefill)
    for _ in range(6):
        target = columns.log_seconds - effects[columns.replica]
        parameters = _gauss_newton(
            parameters, target, np.sqrt(weights * inverse_variance), points, mean, precision, max_captured_tokens
        )
        residuals = columns.log_seconds - _jacobian(parameters, points, max_captured_tokens)[0]
        precisions = weights * inverse_variance
        effects = np.bincount(columns.replica, precisions * residuals, count) / (
            np.bincount(columns.replica, precisions, count) + 1 / _REPLICA_SPREAD**2
        )
        scaled_residuals = np.abs(residuals - effects[columns.replica]) * np.sqrt(inverse_variance)
        weights = np.minimum(1.0, _HUBER_THRESHOLD / np.maximum(scaled_residuals, 1e-9))
    return parameters, effects, weights


def _gauss_newton(
    start: FloatArray,
    target: FloatArray,
    scale: FloatArray,
    points: tuple[FloatArray, FloatArray, FloatArray | float],
    mean: FloatArray,
    precision: FloatArray,
    max_captured_tokens: int | None,
) -> FloatArray:
    """Return the parameters after Gauss-Newton steps from `start`, halved where they do not improve.

    `scale`: one over the deviation of each row, or a whitening matrix.
    """

    def whiten(rows: FloatArray) -> FloatArray:
        whitened: FloatArray = scale @ rows if scale.ndim == 2 else (rows.T * scale).T
        return whitened

    def cost(values: FloatArray) -> float:
        residuals = whiten(target - _jacobian(values, points, max_captured_tokens)[0])
        return float(residuals @ residuals + (values - mean) @ precision @ (values - mean))

    parameters, best_cost = start, cost(start)
    for _ in range(25):
        model, jacobian = _jacobian(parameters, points, max_captured_tokens)
        slopes, residuals = whiten(jacobian), whiten(target - model)
        step = np.linalg.solve(slopes.T @ slopes + precision, slopes.T @ residuals + precision @ (mean - parameters))
        step = step * min(1.0, 1.5 / max(float(np.abs(step).max()), 1e-12))
        for _ in range(6):
            next_cost = cost(parameters + step)
            if next_cost < best_cost:
                break
            step = step / 2
        else:
            return parameters
        parameters, improvement, best_cost = parameters + step, best_cost - next_cost, next_cost
        if improvement < 1e-6 * (1 + best_cost):
            break
    return parameters


def _pool_groups(
    columns: _CellColumns, parameters: FloatArray, effects: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return batch, draft tokens, logarithm of seconds without prefill and replica effects, and its variance, by group."""
    group_count = int(columns.group.max()) + 1
    precisions = weights / columns.noise_variance
    total_precision = np.bincount(columns.group, precisions, group_count)
    seconds = np.exp(columns.log_seconds)
    decode = np.maximum(seconds - math.exp(float(parameters[_PI])) * columns.prefill, 0.2 * seconds)
    values = (columns.batch, columns.draft_tokens, np.log(decode) - effects[columns.replica])
    batch, draft_tokens, log_seconds = (
        np.bincount(columns.group, precisions * column, group_count) / total_precision for column in values
    )
    return batch, draft_tokens, log_seconds, _POOLED_NOISE**2 + 1 / total_precision


def _misfit_covariance(
    batch: FloatArray, draft_tokens: FloatArray, other_batch: FloatArray, other_draft_tokens: FloatArray
) -> FloatArray:
    """Return the covariance of the misfit between points."""
    octaves = np.abs(np.log2(batch)[:, None] - np.log2(other_batch)[None, :])
    tokens = np.abs(draft_tokens[:, None] - other_draft_tokens[None, :])
    correlation = _MISFIT_SHARED + (1 - _MISFIT_SHARED) * np.exp(-tokens / _MISFIT_TOKENS)
    covariance: FloatArray = MISFIT_SD**2 * correlation * np.exp(-octaves / _MISFIT_OCTAVES)
    return covariance


def _refit_pooled(
    pooled: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    start: FloatArray,
    mean: FloatArray,
    precision: FloatArray,
    max_captured_tokens: int | None,
) -> tuple[FloatArray, FloatArray]:
    """Return the parameters and their covariance, with the misfit as part of the errors."""
    batch, draft_tokens, log_seconds, noise_variance = pooled
    error_covariance = _misfit_covariance(batch, draft_tokens, batch, draft_tokens) + np.diag(noise_variance)
    whitening = np.linalg.inv(np.linalg.cholesky(error_covariance))
    points = (batch, draft_tokens, 0.0)
    center = _gauss_newton(start, log_seconds, whitening, points, mean, precision, max_captured_tokens)
    slopes = whitening @ _jacobian(center, points, max_captured_tokens)[1]
    return center, np.linalg.inv(slopes.T @ slopes + precision)
