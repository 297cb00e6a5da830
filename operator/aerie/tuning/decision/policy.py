"""When a forecast is good enough to act on, and when a canary is worth its cost: the constants, and what may be done.

The gate on a change: with the capacity of a replica lost for `reload`, a change that is kept for `horizon` has to gain more than
reload / horizon to break even; `margin` times that is asked of the pessimistic gain, and of the middle one never less than
`least_gain`. Pods beyond the replicas that the trial takes are paid back by the gain of all replicas within `payback`. More is
not asked of a forecast, since the canary of the change proves it, and takes it back otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.engine.speculation import SpeculationSetting
from aerie.tuning.telemetry import HOUR

MAX_BACKOFF_DOUBLINGS = 12
"""Of the pause after a failure: with the usual one that is more than ten years."""


def backoff_factor(failures: int) -> int:
    """By what factor a pause is longer after so many failures in a row: it doubles with each one after the first."""
    return 1 << max(0, min(failures - 1, MAX_BACKOFF_DOUBLINGS))


@dataclass(frozen=True)
class TuningPolicy:
    """Constants of the decision. Times are seconds, gains and probabilities shares of 1."""

    least_gain: float = 0.03
    """The least gain that a change is made for."""
    pessimism: float = 0.2
    """Quantile of the gain that has to pay for the roll, and that candidates are ranked by."""
    better: float = 0.8
    """Probability that the setting is better than the current one, from which on a canary is to prove it."""
    certainty: float = 0.95
    """Probability that the latencies hold."""
    explores: float = 0.8
    """The same on the load that was seen, for a canary that explores: a third of the users of a small fleet are on it."""
    margin: float = 2.0
    reload: float = 300.0
    """To load an engine again: a 70B model on 8 GPUs takes 215 s (vLLM issue 19824)."""
    horizon: float = 24 * HOUR
    """How long a setting is taken to be kept."""
    cooldown: float = 6 * HOUR
    cooldown_after_rollback: float = 24 * HOUR
    worst_fifth: float = 0.02
    """The most that a setting may lose against the current one in any fifth of the load: what is better over the day but worse at
    noon would be felt every noon."""
    simpler: float = 0.01
    """A schedule or adaptive verification has to be better than the best fixed setting by this much."""
    off_certainty: float = 0.9
    """Probability that no speculation is better, above which it is turned off even for a gain below `least_gain`."""
    useless_length: float = 1.15
    """Acceptance length below which a drafter is of no use: no speculation is then chosen if it is likely to be better."""
    shown: float = 0.5
    """Share of the gate that the gain has to be on the load of the last hour, or a canary would not show it."""
    canary: float = 1800.0
    """How long a canary runs to teach what its setting costs."""
    trial: float = 2 * HOUR
    """How long canary and control of a change are there, until it is proven or not."""
    payback: float = 30 * 24 * HOUR
    """Within so long a setting has to pay back the pods beyond the replicas that its trial takes."""
    least_value: float = 0.002
    """Expected gain of what a canary teaches, after its cost, below which none is run."""
    urgent: float = 0.05
    """The same from which a canary explores though requests wait, or the others can hardly bear their load, or one has explored
    lately and did not show it: it is the way out."""
    least_replicas: int = 3
    """To spare one for it."""
    felt: float = 0.01
    """The most by which users may wait longer over six hours, because replicas are out while a canary that explores and its
    control load in their place, and they afterwards."""
    slo_headroom: float = 0.2
    """Share of an objective that has to be free while a canary explores."""
    probe: float = 24 * HOUR
    """While speculation is off nothing tells acceptance: after so long a canary with drafts asks again."""
    explored: float = 7.0
    """Times `probe` after which a canary explores again at the latest. What the first one has shown since the setting or
    acceptance changed is taken to hold for once `probe`, each further one for twice as long: there is ever less to be learnt."""
    draws: int = 400

    def required_median_gain(self, surge_share: float = 0.0) -> float:
        """The gain that a change is made for, half of the draws above it. `extra` as in `pays`."""
        return max(self.least_gain, self.required_pessimistic_gain(surge_share))

    def max_slowdown(self) -> float:
        """By what share a token may take longer while replicas load for a canary that explores."""
        return self.felt * 6 * HOUR / (2 * self.reload)

    def required_pessimistic_gain(self, surge_share: float = 0.0) -> float:
        """The gain that the pessimistic forecast has to reach. `extra`: pods that the trial takes beyond the replicas, in shares
        of these."""
        return self.margin * self.reload / self.horizon + surge_share * self.trial / self.payback


@dataclass(frozen=True)
class LatencyObjectives:
    """Latencies that a setting must keep. Seconds; None: not looked at."""

    time_per_output_token: float | None = None
    time_to_first_token: float | None = None
    percentile: int = 95


@dataclass(frozen=True)
class FailedTrial:
    """A setting whose trials have failed. Seconds of Unix time."""

    setting: SpeculationSetting
    until: float
    """When its pause is over."""
    began: float
    """When the last trial began."""
    measured: bool
    """Whether it was compared and found worse, which says nothing of other traffic; else it never served."""


@dataclass(frozen=True)
class TrialHistory:
    """What was done before. Seconds of Unix time."""

    changed: float | None = None
    """When the setting was last changed."""
    rolled_back: float | None = None
    """When a change was last taken back."""
    failed: int = 0
    """Trials in a row that failed without being measured: the pause after a rollback doubles with each after the first."""
    undecided: float | None = None
    """When a canary was last given up that could not be proven nor refuted."""
    undecided_times: int = 1
    """How often lately: each time the pause is one cooldown longer, up to that after a rollback."""
    tried: float | None = None
    """When the canary began of which the later one of these two tells."""
    speculated: float | None = None
    """When drafts were last verified."""
    explored: tuple[float, ...] = ()
    """When canaries explored, the newest first."""

    def exploration_pause_reason(self, now: float, policy: TuningPolicy, *, urgent: bool, untested_direction: bool) -> str | None:
        """Why no canary may explore yet. `other_side`: it would try more where only fewer drafts were tried, or the reverse. The
        last one told little of that, so it may come from one cooldown after it; until two, so that it does not go on for ever."""
        if not self.explored:
            return None
        last, here = self.explored[0], sum(self.changed is None or one > self.changed for one in self.explored)
        doubled = 1 if urgent else 2 ** max(here - 1, 0)
        pause = min(doubled, policy.explored) * policy.probe
        if now >= last + pause or (untested_direction and policy.cooldown <= now - last < 2 * policy.cooldown):
            return None
        return f"one explored {(now - last) / HOUR:.1f} h ago: the next may in {(last + pause - now) / HOUR:.1f} h."

    def change_pause_reason(self, now: float, policy: TuningPolicy) -> str | None:
        """Why nothing may be changed yet."""
        undecided = min(self.undecided_times * policy.cooldown, policy.cooldown_after_rollback)
        for since, pause, what in (
            (self.rolled_back, policy.cooldown_after_rollback * backoff_factor(self.failed), "a change was taken back"),
            (self.undecided, undecided, "a canary ended undecided"),
            (self.changed, policy.cooldown, "the setting was changed"),
        ):
            if since is not None and now < since + pause:
                left = (since + pause - now) / HOUR
                return f"{what} {(now - since) / HOUR:.1f} h ago: the next change may come in {left:.1f} h."
        return None
