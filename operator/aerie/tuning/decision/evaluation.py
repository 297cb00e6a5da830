"""Evaluate the candidates of an engine on the observed load, with draws of each candidate's gain.

Guarantee: pure. The current setting is one of them, and the best pessimistic gain comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.decision.candidates import Candidates
from aerie.tuning.decision.forecast import Forecast, LoadExtrapolation, draft_tokens_by_batch
from aerie.tuning.decision.load_distribution import LoadDistribution, estimate_recent_load
from aerie.tuning.decision.objectives import ObservedLatencies, forecast_latencies, max_token_seconds, measure_latencies
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.decision.types import CandidatePrediction, TuningContext
from aerie.tuning.models.numeric import FloatArray, quantiles
from aerie.tuning.telemetry import HOUR, TelemetryBlock, TuningTelemetry


@dataclass(frozen=True)
class CandidateEvaluation:
    """The candidates with their draws of the gain, the best first."""

    context: TuningContext
    policy: TuningPolicy
    forecast: Forecast
    measured_token_counts: frozenset[int]
    """Numbers of draft tokens for which windows exist."""
    supports_schedules: bool
    """True if the engine runs schedules."""
    gains: dict[SpeculationSetting, FloatArray]
    predictions: tuple[CandidatePrediction, ...]
    recent_load: LoadDistribution | None
    """Load of the last hour; None if no block is that recent."""
    slowdown: float = 0.0
    """Share by which a token takes longer while the borrowed replicas are unavailable."""

    @classmethod
    def evaluate(
        cls,
        forecast: Forecast,
        extrapolation: LoadExtrapolation | None,
        candidates: Candidates,
        telemetry: TuningTelemetry,
        recent_blocks: Sequence[TelemetryBlock],
        context: TuningContext,
        policy: TuningPolicy,
    ) -> CandidateEvaluation:
        """Evaluate the candidates on the forecasts, with the latencies of the recent blocks."""
        current = context.current_setting
        settings: list[SpeculationSetting] = [*candidates.fixed_settings, *candidates.adaptive_settings]
        if (
            candidates.supports_schedules
            and (schedule := forecast.build_schedule(context.engine, current, policy.max_worst_fifth_loss)) is not None
        ):
            settings.append(schedule)
        settings += [
            setting for setting in (current, context.explored_setting) if setting is not None and setting not in settings
        ]
        latencies = measure_latencies(recent_blocks, current, context.objectives.percentile)
        gains = {setting: forecast.gain(setting, current) for setting in settings}
        if candidates.supports_schedules and isinstance(current, Static | Schedule):
            max_seconds = max_token_seconds(forecast, current, latencies, context.objectives)
            for guarded in list(_build_guarded_schedules(forecast, extrapolation, gains, context, policy, max_seconds)):
                gains.setdefault(guarded, forecast.gain(guarded, current))
        predictions = [
            _predict_candidate(forecast, extrapolation, setting, gain, latencies, context, policy)
            for setting, gain in gains.items()
        ]
        predictions.sort(key=lambda prediction: (-prediction.gain[1], str(prediction.setting)))
        measured = frozenset(
            int(draft_tokens_by_batch(key.setting, np.array([cell.batch_sum / cell.request_steps]))[0])
            for key, cell in telemetry.cells.items()
        )
        recent_load = estimate_recent_load(telemetry.cells, recent_blocks, context.now - HOUR)
        return cls(context, policy, forecast, measured, candidates.supports_schedules, gains, tuple(predictions), recent_load)

    @property
    def required_pessimistic_gain(self) -> float:
        """Minimum pessimistic gain of a change."""
        return self.policy.required_pessimistic_gain(self.context.surge_share)

    @property
    def required_median_gain(self) -> float:
        """Minimum median gain of a change."""
        return self.policy.required_median_gain(self.context.surge_share)

    @property
    def is_drafter_ineffective(self) -> bool:
        """True if hardly any draft token is accepted."""
        current = self.prediction_for(self.context.current_setting)
        return not isinstance(current.setting, Off) and current.acceptance_length < self.policy.ineffective_acceptance_length

    def prediction_for(self, setting: SpeculationSetting) -> CandidatePrediction:
        """Return the prediction of a setting; the setting has to be a candidate."""
        return next(prediction for prediction in self.predictions if prediction.setting == setting)

    def bound_to_observed_load(self, setting: SpeculationSetting) -> SpeculationSetting:
        """Limit a setting with more draft tokens to the observed batches, with the current setting beyond them.

        The setting is returned unchanged in three cases: it drafts no more tokens, which makes no step longer; the engine runs no
        schedules; or a schedule recently failed to become ready.
        """
        current = self.context.current_setting
        if (
            not self.supports_schedules
            or self.context.is_schedule_in_backoff
            or max_speculative_tokens(setting) <= max_speculative_tokens(current)
        ):
            return setting
        if not isinstance(setting, Static | Schedule) or not isinstance(current, Static | Schedule):
            return setting
        return self.forecast.build_guarded_schedule(setting, current, 1, float(self.forecast.load.batches[-1])) or setting

    def recent_gain(self, setting: SpeculationSetting) -> float:
        """Return the median gain over the current setting on the load of the last hour."""
        if self.recent_load is None:
            return 0.0
        gains = self.forecast.gain_by_batch(setting, self.context.current_setting)
        recent_gains = np.interp(self.recent_load.batches, self.forecast.load.batches, gains)
        return float(np.average(recent_gains, weights=self.recent_load.shares))


def _predict_candidate(
    forecast: Forecast,
    extrapolation: LoadExtrapolation | None,
    setting: SpeculationSetting,
    gain: FloatArray,
    observed_latencies: ObservedLatencies,
    context: TuningContext,
    policy: TuningPolicy,
) -> CandidatePrediction:
    """Return the forecast of one candidate from its draws of the gain."""
    current = context.current_setting
    low, pessimistic, median, high = quantiles(gain, 0.05, policy.pessimistic_quantile, 0.5, 0.95)
    headroom_forecast = None if extrapolation is None else extrapolation.headroom_forecast
    return CandidatePrediction(
        setting=setting,
        gain=(low, pessimistic, median, high),
        probability_better=float((gain > 0).mean()),
        acceptance_length=float(np.average(forecast.tokens_per_step(setting), weights=forecast.load.shares)),
        latencies=forecast_latencies(forecast, headroom_forecast, setting, current, observed_latencies, context.objectives),
        worst_fifth_gain=forecast.worst_fifth_gain(setting, current),
        worst_extrapolated_gain=(
            None if extrapolation is None else float(extrapolation.range_forecast.gain_by_batch(setting, current).min())
        ),
    )


def _build_guarded_schedules(
    forecast: Forecast,
    extrapolation: LoadExtrapolation | None,
    gains: Mapping[SpeculationSetting, FloatArray],
    context: TuningContext,
    policy: TuningPolicy,
    max_seconds: float,
) -> Iterator[Schedule]:
    """Yield schedules of better settings, with the current setting where they might be worse.

    They keep the current setting outside the observed load, and from the first batch at which a token may take longer than
    `seconds`.
    """
    batches, current = forecast.load.batches, context.current_setting
    for setting, gain in gains.items():
        if (
            setting == current
            or isinstance(setting, Adaptive)
            or float(np.median(gain)) < policy.required_median_gain(context.surge_share)
        ):
            continue
        first, last = 1, math.inf
        if extrapolation is not None:
            is_worse_below, is_worse_above = (
                extrapolation.range_forecast.gain_by_batch(setting, current) < -policy.max_worst_fifth_loss
            )
            is_worse_above |= (
                extrapolation.headroom_forecast.probability_within_by_batch(setting, current, max_seconds).min()
                < policy.min_objective_probability
            )
            first = max(1, int(batches[0])) if is_worse_below else first
            last = float(batches[-1]) if is_worse_above else last
        slow_indices = np.flatnonzero(
            forecast.probability_within_by_batch(setting, current, max_seconds) < policy.min_objective_probability
        )
        if len(slow_indices):
            last = float(batches[slow_indices[0] - 1]) if slow_indices[0] > 0 else 0.0
        if (first > 1 or last < math.inf) and last > first:
            schedule = forecast.build_guarded_schedule(setting, current, first, last)
            if schedule is not None:
                yield schedule
