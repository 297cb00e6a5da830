"""What may be chosen from, with the draws of what each would gain: the candidates of an engine on the load that was seen.

Guarantee: pure; the current setting is among them, and the best pessimistic gain comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, max_tokens
from aerie.tuning.decision.candidates import Candidates
from aerie.tuning.decision.forecast import Beyond, Forecast, Load, drafted, lately
from aerie.tuning.decision.objectives import latencies, limit, observed
from aerie.tuning.decision.policy import Policy
from aerie.tuning.decision.types import Prediction, Situation
from aerie.tuning.models.numeric import Array, quantiles
from aerie.tuning.telemetry import HOUR, Block, Telemetry


@dataclass(frozen=True)
class Options:
    """The candidates with their draws of the gain, the best first."""

    situation: Situation
    policy: Policy
    drawn: Forecast
    measured: frozenset[int]
    """Numbers of draft tokens that windows were seen of."""
    schedules: bool
    """Whether the engine runs them."""
    gains: dict[Setting, Array]
    predictions: tuple[Prediction, ...]
    lately: Load | None
    """That of the last hour."""
    stretch: float = 0.0
    """By what share a token takes longer while the replicas that are lent are out."""

    @classmethod
    def of(
        cls,
        drawn: Forecast,
        beyond: Beyond | None,
        allowed: Candidates,
        telemetry: Telemetry,
        recent: Sequence[Block],
        situation: Situation,
        policy: Policy,
    ) -> Options:
        current = situation.current
        settings: list[Setting] = [*allowed.fixed, *allowed.adaptive]
        if allowed.schedules and (schedule := drawn.schedule(situation.engine, current, policy.worst_fifth)) is not None:
            settings.append(schedule)
        settings += [one for one in (current, situation.exploring) if one is not None and one not in settings]
        had = observed(recent, current, situation.objectives.percentile)
        gains = {setting: drawn.gain(setting, current) for setting in settings}
        if allowed.schedules and isinstance(current, Static | Schedule):
            seconds = limit(drawn, current, had, situation.objectives)
            for guarded in list(_guarded(drawn, beyond, gains, situation, policy, seconds)):
                gains.setdefault(guarded, drawn.gain(guarded, current))
        outside = {} if beyond is None else {setting: float(beyond.near.by_batch(setting, current).min()) for setting in gains}
        far = None if beyond is None else beyond.far
        found: list[Prediction] = []
        for setting, gain in gains.items():
            low, pessimistic, middle, high = quantiles(gain, 0.05, policy.pessimism, 0.5, 0.95)
            better = float((gain > 0).mean())
            length = float(np.average(drawn.tokens_per_step(setting), weights=drawn.load.shares))
            seen = latencies(drawn, far, setting, current, had, situation.objectives)
            worst = drawn.worst_fifth(setting, current)
            interval = (low, pessimistic, middle, high)
            found.append(Prediction(setting, interval, better, length, seen, worst, outside.get(setting)))
        found.sort(key=lambda one: (-one.gain[1], str(one.setting)))
        measured = frozenset(
            int(drafted(key.setting, np.array([cell.batch / cell.request_steps]))[0]) for key, cell in telemetry.cells.items()
        )
        last = lately(telemetry.cells, recent, situation.now - HOUR)
        return cls(situation, policy, drawn, measured, allowed.schedules, gains, tuple(found), last)

    @property
    def pays(self) -> float:
        """The gain that the pessimistic forecast of a change has to reach."""
        return self.policy.pays(self.situation.extra_share)

    @property
    def gate(self) -> float:
        """The gain that a change is made for."""
        return self.policy.gate(self.situation.extra_share)

    @property
    def useless(self) -> bool:
        """Whether hardly a draft is accepted."""
        current = self.of_setting(self.situation.current)
        return not isinstance(current.setting, Off) and current.length < self.policy.useless_length

    def of_setting(self, setting: Setting) -> Prediction:
        return next(one for one in self.predictions if one.setting == setting)

    def bounded(self, setting: Setting) -> Setting:
        """A setting with more draft tokens at the batches that were seen, and the current one beyond them. As it is, where it
        has no more, which makes no step longer, where the engine runs no schedules, or where one has lately not served."""
        current = self.situation.current
        if not self.schedules or self.situation.schedules_fail or max_tokens(setting) <= max_tokens(current):
            return setting
        if not isinstance(setting, Static | Schedule) or not isinstance(current, Static | Schedule):
            return setting
        return self.drawn.guarded(setting, current, 1, float(self.drawn.load.batches[-1])) or setting

    def gain_lately(self, setting: Setting) -> float:
        """The gain over the current setting on the load of the last hour, half of the draws above it."""
        if self.lately is None:
            return 0.0
        gains = self.drawn.by_batch(setting, self.situation.current)
        at = np.interp(self.lately.batches, self.drawn.load.batches, gains)
        return float(np.average(at, weights=self.lately.shares))


def _guarded(
    drawn: Forecast, beyond: Beyond | None, gains: Mapping[Setting, Array], situation: Situation, policy: Policy, seconds: float
) -> Iterator[Schedule]:
    """What is better on the load that was seen, with the current setting where it might not be: beyond that load, and from the
    first batch on at which a token may take longer than so many seconds."""
    batches, current = drawn.load.batches, situation.current
    for setting, gain in gains.items():
        if setting == current or isinstance(setting, Adaptive) or float(np.median(gain)) < policy.gate(situation.extra_share):
            continue
        first, last = 1, math.inf
        if beyond is not None:
            below, above = beyond.near.by_batch(setting, current) < -policy.worst_fifth
            above |= beyond.far.keeps(setting, current, seconds).min() < policy.certainty
            first = max(1, int(batches[0])) if below else first
            last = float(batches[-1]) if above else last
        broken = np.flatnonzero(drawn.keeps(setting, current, seconds) < policy.certainty)
        if len(broken):
            last = float(batches[broken[0] - 1]) if broken[0] > 0 else 0.0
        if (first > 1 or last < math.inf) and last > first:
            found = drawn.guarded(setting, current, first, last)
            if found is not None:
                yield found
