"""Input and result of a decision: plain data, for the callers that request a decision and for the explanation.

Guarantee: nothing here computes more than a lookup.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from aerie.engine.speculation import Schedule, SpeculationSetting, max_speculative_tokens
from aerie.tuning.decision.candidates import EngineConfig, ExcludedCandidate
from aerie.tuning.decision.forecast import Forecast
from aerie.tuning.decision.objectives import LatencyForecast
from aerie.tuning.decision.policy import FailedTrial, LatencyObjectives, TrialHistory
from aerie.tuning.models.acceptance import AcceptanceModel
from aerie.tuning.models.change_points import ChangePoints
from aerie.tuning.models.step_time import StepTimeModel
from aerie.tuning.recommendation import BlockedReason


class TuningAction(enum.Enum):
    """Action that a decision recommends."""

    HOLD = "hold"
    CHANGE = "change"
    EXPLORE = "explore"
    INSUFFICIENT = "insufficient data"


@dataclass(frozen=True)
class TuningContext:
    """Everything about the resource that its telemetry does not contain."""

    engine: EngineConfig
    current_setting: SpeculationSetting
    max_speculative_tokens: int
    """Maximum number of draft tokens of a candidate."""
    replicas: int
    now: float
    objectives: LatencyObjectives = field(default_factory=LatencyObjectives)
    history: TrialHistory = field(default_factory=TrialHistory)
    queued_requests: float = 0.0
    """Requests in the queues of all replicas."""
    borrowed_replicas: int = 0
    """Replicas whose capacity a canary and its control borrow; 0 if spare GPUs run them."""
    surge_pods: int = 0
    """Pods that a canary and its control take beyond the replicas."""
    failed_trials: tuple[FailedTrial, ...] = ()
    """Settings whose trials failed, with the end of their backoff."""
    explored_setting: SpeculationSetting | None = None
    """Setting of the running exploration canary, which may be retained to prove that setting. None if no canary explores."""

    @property
    def surge_share(self) -> float:
        """Surge pods of a canary and its control as a share of the replicas."""
        return self.surge_pods / max(self.replicas, 1)

    def is_in_backoff(self, setting: SpeculationSetting) -> bool:
        """Return whether trials of the setting failed and it must not be tried yet."""
        return setting != self.explored_setting and any(trial.setting == setting for trial in self._trials_in_backoff)

    def has_backoff_with_tokens(self, tokens: int) -> bool:
        """Return whether a setting with this maximum of draft tokens failed and must not be tried yet."""
        return any(max_speculative_tokens(trial.setting) == tokens for trial in self._trials_in_backoff)

    @property
    def is_schedule_in_backoff(self) -> bool:
        """True if a schedule never became ready and no schedule may be tried yet."""
        return any(isinstance(trial.setting, Schedule) and not trial.was_compared for trial in self._trials_in_backoff)

    @property
    def _trials_in_backoff(self) -> tuple[FailedTrial, ...]:
        return tuple(trial for trial in self.failed_trials if self.now < trial.backoff_until)


@dataclass(frozen=True)
class CandidatePrediction:
    """Forecast of one candidate."""

    setting: SpeculationSetting
    gain: tuple[float, float, float, float]
    """Gain over the current setting: the 5 %, 20 %, 50 % and 95 % quantiles."""
    probability_better: float
    """Probability that it is better than the current setting."""
    acceptance_length: float
    """Mean acceptance length."""
    latencies: LatencyForecast
    worst_fifth_gain: float
    """Median gain in the fifth of the load where it is lowest."""
    worst_extrapolated_gain: float | None = None
    """Lower of the median gains at the lowest and at the highest load that may occur (`forecast.extrapolate_load`). None if a
    day of load is known."""
    rejection_reason: str = ""
    """Reason why it was not chosen; empty for the chosen and for the current setting."""

    @property
    def gain_text(self) -> str:
        """Median gain and its 90 % interval, as text."""
        return f"{100 * self.gain[2]:+.1f} % ({100 * self.gain[0]:+.1f} to {100 * self.gain[3]:+.1f})"


@dataclass(frozen=True)
class DecisionEvidence:
    """Models behind the forecast; None where the data do not identify a model."""

    acceptance: AcceptanceModel | None = None
    step_time: StepTimeModel | None = None
    forecast: Forecast | None = None
    change_points: ChangePoints = field(default_factory=ChangePoints)


@dataclass(frozen=True)
class TuningDecision:
    """Recommended action and its reason."""

    action: TuningAction
    reason: str
    setting: SpeculationSetting | None = None
    """Setting to change to, or for the canary to run."""
    predictions: tuple[CandidatePrediction, ...] = ()
    """Forecasts of the candidates, the best first."""
    blocked_reason: BlockedReason = ""
    """Reason in one word why the tuner cannot act until a user changes something (`Recommendation.blocked_reason`)."""
    excluded_candidates: tuple[ExcludedCandidate, ...] = ()
    missing_data: tuple[str, ...] = ()
    """Quantities that the data do not identify, as sentences."""
    exploration_value: float = 0.0
    """Expected gain from what the best canary would teach, and below it the canary's cost; shares of the capacity over the
    horizon."""
    exploration_cost: float = 0.0
    evidence: DecisionEvidence = field(default_factory=DecisionEvidence)
