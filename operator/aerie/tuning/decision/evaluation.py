"""What may be chosen from, with the draws of what each would gain: the candidates of an engine on the load that was seen.

Guarantee: pure; the current setting is among them, and the best pessimistic gain comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.decision.candidates import Candidates
from aerie.tuning.decision.forecast import (
    Forecast,
    LoadDistribution,
    LoadExtrapolation,
    draft_tokens_by_batch,
    estimate_recent_load,
)
from aerie.tuning.decision.objectives import forecast_latencies, max_token_seconds, measure_latencies
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
    """Numbers of draft tokens that windows were seen of."""
    supports_schedules: bool
    """Whether the engine runs them."""
    gains: dict[SpeculationSetting, FloatArray]
    predictions: tuple[CandidatePrediction, ...]
    recent_load: LoadDistribution | None
    """That of the last hour."""
    slowdown: float = 0.0
    """By what share a token takes longer while the replicas that are lent are out."""

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
        current = context.current_setting
        settings: list[SpeculationSetting] = [*candidates.fixed_settings, *candidates.adaptive_settings]
        if (
            candidates.supports_schedules
            and (schedule := forecast.build_schedule(context.engine, current, policy.worst_fifth)) is not None
        ):
            settings.append(schedule)
        settings += [one for one in (current, context.explored_setting) if one is not None and one not in settings]
        had = measure_latencies(recent_blocks, current, context.objectives.percentile)
        gains = {setting: forecast.gain(setting, current) for setting in settings}
        if candidates.supports_schedules and isinstance(current, Static | Schedule):
            seconds = max_token_seconds(forecast, current, had, context.objectives)
            for guarded in list(_build_guarded_schedules(forecast, extrapolation, gains, context, policy, seconds)):
                gains.setdefault(guarded, forecast.gain(guarded, current))
        outside = (
            {}
            if extrapolation is None
            else {setting: float(extrapolation.range_forecast.gain_by_batch(setting, current).min()) for setting in gains}
        )
        far = None if extrapolation is None else extrapolation.headroom_forecast
        found: list[CandidatePrediction] = []
        for setting, gain in gains.items():
            low, pessimistic, middle, high = quantiles(gain, 0.05, policy.pessimism, 0.5, 0.95)
            better = float((gain > 0).mean())
            length = float(np.average(forecast.tokens_per_step(setting), weights=forecast.load.shares))
            seen = forecast_latencies(forecast, far, setting, current, had, context.objectives)
            worst = forecast.worst_fifth_gain(setting, current)
            interval = (low, pessimistic, middle, high)
            found.append(CandidatePrediction(setting, interval, better, length, seen, worst, outside.get(setting)))
        found.sort(key=lambda one: (-one.gain[1], str(one.setting)))
        measured = frozenset(
            int(draft_tokens_by_batch(key.setting, np.array([cell.batch / cell.request_steps]))[0])
            for key, cell in telemetry.cells.items()
        )
        last = estimate_recent_load(telemetry.cells, recent_blocks, context.now - HOUR)
        return cls(context, policy, forecast, measured, candidates.supports_schedules, gains, tuple(found), last)

    @property
    def required_pessimistic_gain(self) -> float:
        """The gain that the pessimistic forecast of a change has to reach."""
        return self.policy.required_pessimistic_gain(self.context.surge_share)

    @property
    def required_median_gain(self) -> float:
        """The gain that a change is made for."""
        return self.policy.required_median_gain(self.context.surge_share)

    @property
    def is_drafter_ineffective(self) -> bool:
        """Whether hardly a draft is accepted."""
        current = self.prediction_for(self.context.current_setting)
        return not isinstance(current.setting, Off) and current.acceptance_length < self.policy.useless_length

    def prediction_for(self, setting: SpeculationSetting) -> CandidatePrediction:
        return next(one for one in self.predictions if one.setting == setting)

    def bound_to_observed_load(self, setting: SpeculationSetting) -> SpeculationSetting:
        """A setting with more draft tokens at the batches that were seen, and the current one beyond them. As it is, where it
        has no more, which makes no step longer, where the engine runs no schedules, or where one has lately not served."""
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
        """The gain over the current setting on the load of the last hour, half of the draws above it."""
        if self.recent_load is None:
            return 0.0
        gains = self.forecast.gain_by_batch(setting, self.context.current_setting)
        at = np.interp(self.recent_load.batches, self.forecast.load.batches, gains)
        return float(np.average(at, weights=self.recent_load.shares))


def _build_guarded_schedules(
    drawn: Forecast,
    beyond: LoadExtrapolation | None,
    gains: Mapping[SpeculationSetting, FloatArray],
    situation: TuningContext,
    policy: TuningPolicy,
    seconds: float,
) -> Iterator[Schedule]:
    """What is better on the load that was seen, with the current setting where it might not be: beyond that load, and from the
    first batch on at which a token may take longer than so many seconds."""
    batches, current = drawn.load.batches, situation.current_setting
    for setting, gain in gains.items():
        if (
            setting == current
            or isinstance(setting, Adaptive)
            or float(np.median(gain)) < policy.required_median_gain(situation.surge_share)
        ):
            continue
        first, last = 1, math.inf
        if beyond is not None:
            below, above = beyond.range_forecast.gain_by_batch(setting, current) < -policy.worst_fifth
            above |= beyond.headroom_forecast.probability_within_by_batch(setting, current, seconds).min() < policy.certainty
            first = max(1, int(batches[0])) if below else first
            last = float(batches[-1]) if above else last
        broken = np.flatnonzero(drawn.probability_within_by_batch(setting, current, seconds) < policy.certainty)
        if len(broken):
            last = float(batches[broken[0] - 1]) if broken[0] > 0 else 0.0
        if (first > 1 or last < math.inf) and last > first:
            found = drawn.build_guarded_schedule(setting, current, first, last)
            if found is not None:
                yield found
