"""What a decision is made of, and what comes of it: plain data, for who asks for one and who explains it.

Guarantee: nothing here computes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from aerie.engine.speculation import Schedule, Setting, max_tokens
from aerie.tuning.decision.candidates import Engine, LeftOut
from aerie.tuning.decision.forecast import Forecast
from aerie.tuning.decision.objectives import Latencies
from aerie.tuning.decision.policy import Failed, History, Objectives
from aerie.tuning.models.acceptance import Acceptance
from aerie.tuning.models.change_points import Regimes
from aerie.tuning.models.step_time import StepTime


class Action(enum.Enum):
    """What to do."""

    HOLD = "hold"
    CHANGE = "change"
    EXPLORE = "explore"
    INSUFFICIENT = "insufficient data"


@dataclass(frozen=True)
class Situation:
    """All that telemetry does not say."""

    engine: Engine
    current: Setting
    most: int
    """The most draft tokens that may be chosen."""
    replicas: int
    now: float
    objectives: Objectives = field(default_factory=Objectives)
    history: History = field(default_factory=History)
    waiting: float = 0.0
    """Requests in the queues, all replicas together."""
    lent: int = 0
    """Replicas whose places a canary and its control take; 0 where there are spare GPUs for them."""
    extra: int = 0
    """Pods that a canary and its control take beyond the replicas."""
    failed: tuple[Failed, ...] = ()
    """Settings that are not tried for some time."""
    exploring: Setting | None = None
    """What a canary runs that explores at this moment: it may be kept, to prove what it runs."""

    @property
    def extra_share(self) -> float:
        """The same in shares of the replicas."""
        return self.extra / max(self.replicas, 1)

    def bars(self, setting: Setting) -> bool:
        """Whether the setting has failed, and is not to be tried now."""
        return setting != self.exploring and any(one.setting == setting for one in self._barred)

    def has_failed_with(self, tokens: int) -> bool:
        """Whether a setting with so many draft tokens at most has failed, and is not to be tried now."""
        return any(max_tokens(one.setting) == tokens for one in self._barred)

    @property
    def schedules_fail(self) -> bool:
        """Whether a schedule never served, and none is to be tried now."""
        return any(isinstance(one.setting, Schedule) and not one.measured for one in self._barred)

    @property
    def _barred(self) -> tuple[Failed, ...]:
        return tuple(one for one in self.failed if self.now < one.until)


@dataclass(frozen=True)
class Prediction:
    """One candidate."""

    setting: Setting
    gain: tuple[float, float, float, float]
    """Over the current setting: the 5 %, 20 %, 50 % and 95 % points."""
    better: float
    """Probability that it is better than the current one."""
    length: float
    """Mean acceptance length."""
    latencies: Latencies
    worst_fifth: float
    """The gain, half of the draws above it, in the fifth of the load where it is least."""
    unseen: float | None = None
    """The same at the least or the most load that may come (`forecast.unseen`), what is less; None where a day of it is known."""
    why_not: str = ""
    """Empty for what was chosen, and for the current setting."""

    @property
    def percents(self) -> str:
        """The gain in words."""
        return f"{100 * self.gain[2]:+.1f} % ({100 * self.gain[0]:+.1f} to {100 * self.gain[3]:+.1f})"


@dataclass(frozen=True)
class Evidence:
    """What the forecast rests on; None where it could not be had."""

    acceptance: Acceptance | None = None
    step_time: StepTime | None = None
    forecast: Forecast | None = None
    regimes: Regimes = field(default_factory=Regimes)


@dataclass(frozen=True)
class Decision:
    """What to do, and why."""

    action: Action
    reason: str
    setting: Setting | None = None
    """To change to, or for the canary to run."""
    predictions: tuple[Prediction, ...] = ()
    """The best first."""
    obstacle: str = ""
    """In one word, what keeps it from acting until somebody does something (`Advice.obstacle`)."""
    left_out: tuple[LeftOut, ...] = ()
    missing: tuple[str, ...] = ()
    """What the data do not identify."""
    value: float = 0.0
    """Expected gain of what the best canary would teach, and what it costs; shares of the capacity over the horizon."""
    cost: float = 0.0
    evidence: Evidence = field(default_factory=Evidence)
