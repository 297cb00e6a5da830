"""What a decision is made of, and what comes of it: plain data, for who asks for one and who explains it.

Guarantee: nothing here computes.
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


class TuningAction(enum.Enum):
    """What to do."""

    HOLD = "hold"
    CHANGE = "change"
    EXPLORE = "explore"
    INSUFFICIENT = "insufficient data"


@dataclass(frozen=True)
class TuningContext:
    """All that telemetry does not say."""

    engine: EngineConfig
    current_setting: SpeculationSetting
    max_speculative_tokens: int
    """The most draft tokens that may be chosen."""
    replicas: int
    now: float
    objectives: LatencyObjectives = field(default_factory=LatencyObjectives)
    history: TrialHistory = field(default_factory=TrialHistory)
    queued_requests: float = 0.0
    """Requests in the queues, all replicas together."""
    borrowed_replicas: int = 0
    """Replicas whose places a canary and its control take; 0 where there are spare GPUs for them."""
    surge_pods: int = 0
    """Pods that a canary and its control take beyond the replicas."""
    failed_trials: tuple[FailedTrial, ...] = ()
    """Settings that are not tried for some time."""
    explored_setting: SpeculationSetting | None = None
    """What a canary runs that explores at this moment: it may be kept, to prove what it runs."""

    @property
    def surge_share(self) -> float:
        """The same in shares of the replicas."""
        return self.surge_pods / max(self.replicas, 1)

    def is_in_backoff(self, setting: SpeculationSetting) -> bool:
        """Whether the setting has failed, and is not to be tried now."""
        return setting != self.explored_setting and any(one.setting == setting for one in self._trials_in_backoff)

    def has_backoff_with_tokens(self, tokens: int) -> bool:
        """Whether a setting with so many draft tokens at most has failed, and is not to be tried now."""
        return any(max_speculative_tokens(one.setting) == tokens for one in self._trials_in_backoff)

    @property
    def is_schedule_in_backoff(self) -> bool:
        """Whether a schedule never served, and none is to be tried now."""
        return any(isinstance(one.setting, Schedule) and not one.measured for one in self._trials_in_backoff)

    @property
    def _trials_in_backoff(self) -> tuple[FailedTrial, ...]:
        return tuple(one for one in self.failed_trials if self.now < one.until)


@dataclass(frozen=True)
class CandidatePrediction:
    """One candidate."""

    setting: SpeculationSetting
    gain: tuple[float, float, float, float]
    """Over the current setting: the 5 %, 20 %, 50 % and 95 % points."""
    probability_better: float
    """Probability that it is better than the current one."""
    acceptance_length: float
    """Mean acceptance length."""
    latencies: LatencyForecast
    worst_fifth_gain: float
    """The gain, half of the draws above it, in the fifth of the load where it is least."""
    worst_extrapolated_gain: float | None = None
    """The same at the least or the most load that may come (`forecast.unseen`), what is less; None where a day of it is known."""
    rejection_reason: str = ""
    """Empty for what was chosen, and for the current setting."""

    @property
    def gain_text(self) -> str:
        """The gain in words."""
        return f"{100 * self.gain[2]:+.1f} % ({100 * self.gain[0]:+.1f} to {100 * self.gain[3]:+.1f})"


@dataclass(frozen=True)
class DecisionEvidence:
    """What the forecast rests on; None where it could not be had."""

    acceptance: AcceptanceModel | None = None
    step_time: StepTimeModel | None = None
    forecast: Forecast | None = None
    change_points: ChangePoints = field(default_factory=ChangePoints)


@dataclass(frozen=True)
class TuningDecision:
    """What to do, and why."""

    action: TuningAction
    reason: str
    setting: SpeculationSetting | None = None
    """To change to, or for the canary to run."""
    predictions: tuple[CandidatePrediction, ...] = ()
    """The best first."""
    blocked_reason: str = ""
    """In one word, what keeps it from acting until somebody does something (`Advice.obstacle`)."""
    excluded_candidates: tuple[ExcludedCandidate, ...] = ()
    missing_data: tuple[str, ...] = ()
    """What the data do not identify."""
    exploration_value: float = 0.0
    """Expected gain of what the best canary would teach, and what it costs; shares of the capacity over the horizon."""
    exploration_cost: float = 0.0
    evidence: DecisionEvidence = field(default_factory=DecisionEvidence)
