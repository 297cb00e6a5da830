"""Constants of the decision: when a forecast is good enough to act on, when a canary is worth its cost, and when a pause ends.

The gate on a change: a replica loses its capacity for `reload_seconds`. A change that stays for `horizon_seconds` has to gain
more than reload / horizon to break even. The pessimistic gain has to be `payback_margin` times that, and the median gain at least
`min_gain`. The gain of all replicas has to pay back the trial's surge pods within `surge_payback_seconds`. The forecast needs no
more than that, because the canary of the change proves it, or is rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.engine.speculation import SpeculationSetting
from aerie.tuning.telemetry import HOUR

MAX_BACKOFF_DOUBLINGS = 12
"""Doublings of the pause after a failure. With the usual pause that is more than ten years."""


def backoff_factor(failures: int) -> int:
    """Return the factor by which consecutive failures lengthen a pause: it doubles with each failure after the first."""
    return 1 << max(0, min(failures - 1, MAX_BACKOFF_DOUBLINGS))


@dataclass(frozen=True)
class TuningPolicy:
    """Constants of the decision. Times are seconds, gains and probabilities shares of 1."""

    min_gain: float = 0.03
    """Minimum median gain of a change."""
    pessimistic_quantile: float = 0.2
    """Quantile of the gain that has to pay for the rollout, and by which candidates are ranked."""
    min_probability_better: float = 0.8
    """Minimum probability that the setting is better than the current one, for a canary to prove it."""
    min_objective_probability: float = 0.95
    """Minimum probability that the latencies meet their objectives."""
    min_exploration_objective_probability: float = 0.8
    """Minimum probability that latencies meet their objectives on the observed load, for an exploration canary. A third of the
    users of a small fleet are on it."""
    payback_margin: float = 2.0
    reload_seconds: float = 300.0
    """Time to load an engine again: a 70B model on 8 GPUs takes 215 s (vLLM issue 19824)."""
    horizon_seconds: float = 24 * HOUR
    """Time for which a setting is assumed to stay."""
    cooldown_seconds: float = 6 * HOUR
    cooldown_after_rollback_seconds: float = 24 * HOUR
    max_worst_fifth_loss: float = 0.02
    """Maximum loss of a setting against the current one in any fifth of the load. A setting that is better over the day but
    worse at noon would be noticeable every noon."""
    complexity_penalty: float = 0.01
    """Minimum advantage of a schedule or of adaptive verification over the best fixed setting."""
    min_probability_off_better: float = 0.9
    """Probability that no speculation is better, above which speculation is turned off even for a gain below `min_gain`."""
    ineffective_acceptance_length: float = 1.15
    """Acceptance length below which a drafter is ineffective: speculation is then turned off if that is likely to be better."""
    recent_gain_fraction: float = 0.5
    """Share of the gate that the gain has to reach on the load of the last hour. Otherwise a canary would not show the gain."""
    exploration_seconds: float = 1800.0
    """Time that a canary runs to measure the cost of its setting."""
    trial_seconds: float = 2 * HOUR
    """Time that canary and control of a change run until the change is proven or not."""
    surge_payback_seconds: float = 30 * 24 * HOUR
    """Time within which a setting has to pay back the surge pods of its trial."""
    min_exploration_value: float = 0.002
    """Minimum expected gain from what a canary teaches, after its cost."""
    urgent_exploration_value: float = 0.05
    """Expected gain, after its cost, above which a canary is the remedy. It then explores in spite of queued requests, of a
    high load on the other replicas, or of a recent exploration that did not show the gain."""
    min_replicas: int = 3
    """Minimum number of replicas, to spare one for a canary."""
    max_wait_increase: float = 0.01
    """Maximum share by which users may wait longer over six hours because replicas are unavailable. First the exploration
    canary and its control load in their place, then the replicas themselves load again."""
    slo_headroom: float = 0.2
    """Share of an objective that must be unused while a canary explores."""
    probe_interval_seconds: float = 24 * HOUR
    """Time after which a canary with drafts measures acceptance again while speculation is off, because nothing else measures
    it."""
    max_probe_intervals: float = 7.0
    """Maximum interval between two exploration canaries, in units of `probe_interval_seconds`.

    The result of the first exploration since the setting or acceptance changed is assumed to hold for one such interval. Each
    further one holds twice as long, because there is ever less to learn.
    """
    draws: int = 400

    def required_median_gain(self, surge_share: float = 0.0) -> float:
        """Return the minimum median gain of a change. `surge_share` as in `required_pessimistic_gain`."""
        return max(self.min_gain, self.required_pessimistic_gain(surge_share))

    def max_slowdown(self) -> float:
        """Return the maximum share by which a token may take longer while replicas load for an exploration canary."""
        return self.max_wait_increase * 6 * HOUR / (2 * self.reload_seconds)

    def required_pessimistic_gain(self, surge_share: float = 0.0) -> float:
        """Return the minimum pessimistic gain of a change. `surge_share`: surge pods of the trial as a share of the replicas."""
        return (
            self.payback_margin * self.reload_seconds / self.horizon_seconds
            + surge_share * self.trial_seconds / self.surge_payback_seconds
        )


@dataclass(frozen=True)
class LatencyObjectives:
    """Latencies that a setting must not exceed, in seconds; None: no objective."""

    time_per_output_token: float | None = None
    time_to_first_token: float | None = None
    percentile: int = 95


@dataclass(frozen=True)
class FailedTrial:
    """A setting whose trials failed. Times are seconds of Unix time."""

    setting: SpeculationSetting
    backoff_until: float
    """End of its backoff."""
    trial_started_at: float
    """Start of the last trial."""
    was_compared: bool
    """True if the trial was compared and found worse, which does not apply to other traffic. False if the canary never became
    ready."""


@dataclass(frozen=True)
class TrialHistory:
    """Earlier changes and canaries. Times are seconds of Unix time."""

    changed_at: float | None = None
    """Time of the last change of the setting."""
    rolled_back_at: float | None = None
    """Time of the last rollback of a change."""
    consecutive_failures: int = 0
    """Consecutive trials that failed without a comparison. The pause after a rollback doubles with each one after the first."""
    inconclusive_at: float | None = None
    """Time at which the last inconclusive canary ended."""
    inconclusive_count: int = 1
    """Number of recent inconclusive canaries. Each one adds one cooldown to the pause, up to the pause after a rollback."""
    trial_started_at: float | None = None
    """Start of the canary behind the later one of `rolled_back_at` and `inconclusive_at`."""
    last_drafted_at: float | None = None
    """Time at which drafts were last verified."""
    exploration_times: tuple[float, ...] = ()
    """Times of exploration canaries, the newest first."""

    def exploration_pause_reason(self, now: float, policy: TuningPolicy, *, urgent: bool, untested_direction: bool) -> str | None:
        """Return why no canary may explore yet; None if one may.

        `untested_direction`: the canary would try more draft tokens where only fewer were tried, or the reverse. The last
        exploration showed little about that direction, so the canary may run from one cooldown after it. It may not after two, so
        that such canaries do not continue forever.
        """
        if not self.exploration_times:
            return None
        last = self.exploration_times[0]
        since_change = sum(self.changed_at is None or timestamp > self.changed_at for timestamp in self.exploration_times)
        intervals = 1 if urgent else 2 ** max(since_change - 1, 0)
        pause = min(intervals, policy.max_probe_intervals) * policy.probe_interval_seconds
        if now >= last + pause or (untested_direction and policy.cooldown_seconds <= now - last < 2 * policy.cooldown_seconds):
            return None
        remaining_hours = (last + pause - now) / HOUR
        return f"the last exploration was {(now - last) / HOUR:.1f} h ago; the next is possible in {remaining_hours:.1f} h."

    def change_pause_reason(self, now: float, policy: TuningPolicy) -> str | None:
        """Return why the setting may not change yet; None if it may."""
        inconclusive_pause = min(self.inconclusive_count * policy.cooldown_seconds, policy.cooldown_after_rollback_seconds)
        for start, pause, event in (
            (
                self.rolled_back_at,
                policy.cooldown_after_rollback_seconds * backoff_factor(self.consecutive_failures),
                "a change was rolled back",
            ),
            (self.inconclusive_at, inconclusive_pause, "a trial was inconclusive"),
            (self.changed_at, policy.cooldown_seconds, "the setting was changed"),
        ):
            if start is not None and now < start + pause:
                remaining_hours = (start + pause - now) / HOUR
                return f"{event} {(now - start) / HOUR:.1f} h ago; the next change is possible in {remaining_hours:.1f} h."
        return None
