"""Collects blocks from the scraper's samples: a scrape cycle per interval over the pods of both arms, or over the stable pods
alone.

    samples of pods ─► scrape cycle, each interval ─► add_scrapes ─┬─► blocks of an analysis ─► next reconcile
                                                                   └─► blocks of stable pods ─► their calibration (calibration.py)

Guarantees: a scrape cycle uses a pod's sample once. A pod without a new sample since the last cycle counts as failed. Spec and
status alone determine what is compared, so a new leader continues where the previous one stopped, except for the open block. Not
guaranteed: that the samples of a cycle are of the same moment. They are up to an interval apart, and for each pod always by the
same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aerie.analysis.measurement.blocks import ArmName, BlockRule, ClosedBlock, OpenBlock, PodSample, add_scrapes, start_block
from aerie.analysis.measurement.counts import CounterSnapshot, SampleProjection, read_counters
from aerie.api.status import TRAFFIC_SHIFT_PHASES, Status
from aerie.engine.metrics.sample import Sample
from aerie.manifests import naming
from aerie.rollout.canary.analysis_run.run import AnalysisRun, build_block_rule

MAX_PENDING_BLOCKS = 16
"""Closed blocks that are kept until a reconcile reads them."""
_PHASES_WITHOUT_BLOCKS = ("Starting", "Evaluating", "WarmingUp", "RollingBack")


@dataclass(frozen=True)
class ComparisonConfig:
    """Definition of a comparison. A change of any field starts another comparison."""

    started_at: float
    """Time at which the current analysis run started, in seconds since the epoch."""
    arms: Mapping[str, ArmName]
    """Arms by name of the Deployment."""
    projection: SampleProjection
    rule: BlockRule
    warmup_seconds: float = 0.0
    """Seconds after its first sample for which a pod is ignored."""

    @property
    def is_stable_only(self) -> bool:
        """True when there is no canary: the stable pods are measured on their own."""
        return "canary" not in self.arms.values()


def build_comparison_config(name: str, status: Status, interval: float) -> ComparisonConfig | None:
    """Return the comparison that the status of the resource `name` calls for, or None when there is none."""
    canary, stable, analysis = status.canary, status.stable, status.analysis
    if status.previous is not None and canary is None:
        return _build_post_promotion_config(name, status, interval)
    if canary is None or stable is None or analysis is None or canary.phase in _PHASES_WITHOUT_BLOCKS:
        return None
    run = AnalysisRun.unpack(analysis.state)
    if run is None:
        return None
    has_control_pods = canary.control is not None and canary.phase not in TRAFFIC_SHIFT_PHASES
    arms: dict[str, ArmName] = {
        naming.deployment_name(name, canary.revision, control=False): "canary",
        naming.deployment_name(name, stable.revision, control=has_control_pods): "control",
    }
    if has_control_pods:
        arms[naming.deployment_name(name, stable.revision, control=False)] = "stable"
    measured = run.guard_state or run.state
    return ComparisonConfig(measured.start_time, arms, run.plan.projection, build_block_rule(run.plan, interval))


def _build_post_promotion_config(name: str, status: Status, interval: float) -> ComparisonConfig | None:
    """Return the comparison after a promotion.

    It has the stable pods alone, or the stable pods against those of the previous revision while these still receive requests.
    """
    stable, previous = status.stable, status.previous
    run = AnalysisRun.unpack(status.analysis.state) if status.analysis is not None else None
    if stable is None or previous is None or run is None or run.guard_state is None:
        return None
    arms: dict[str, ArmName] = {naming.deployment_name(name, stable.revision, control=False): "canary"}
    if previous.phase == "Verifying":
        arms[naming.deployment_name(name, previous.revision, control=False)] = "control"
    return ComparisonConfig(run.guard_state.start_time, arms, run.plan.projection, build_block_rule(run.plan, interval))


@dataclass
class BlockCollector:
    """Collector of the blocks of one resource. Times are seconds since the epoch."""

    config: ComparisonConfig
    blocks: deque[ClosedBlock] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_BLOCKS))
    _open_block: OpenBlock | None = None
    _first_sample_at: dict[str, float] = field(default_factory=dict)
    """Time of each pod's first sample."""
    _next_tick: float = 0.0
    _last_tick: float = 0.0

    def is_due(self, now: float) -> bool:
        """Return True when a scrape cycle is due."""
        return now >= self._next_tick

    def collect(self, now: float, pods: Iterable[tuple[str, str, float, Sample | None]]) -> bool:
        """Run one scrape cycle over the pods, and return True if it has closed a block.

        `pods` has for each pod its name, its Deployment, when its latest sample was taken, and that sample.
        """
        samples: dict[str, PodSample] = {}
        first_sample_at, self._first_sample_at = self._first_sample_at, {}
        for name, deployment, sampled_at, sample in pods:
            arm = self.config.arms.get(deployment)
            if arm is None:
                continue
            if sample is not None:
                self._first_sample_at[name] = first_sample_at.get(name, sampled_at)
            if now < self._first_sample_at.get(name, now) + self.config.warmup_seconds:
                continue
            samples[name] = PodSample(
                arm, _project_sample(sample, self.config.projection) if sampled_at > self._last_tick else None
            )
        interval = self.config.rule.scrape_interval_seconds
        self._next_tick = now + interval if self._open_block is None else max(self._next_tick + interval, now + interval / 2)
        self._last_tick = now
        if self._open_block is None:
            self._open_block = start_block(now, samples, self.config.rule)
            return False
        self._open_block, closed_block = add_scrapes(self._open_block, now, samples, self.config.rule)
        if closed_block is not None:
            self.blocks.append(closed_block)
        return closed_block is not None


def _project_sample(sample: Sample | None, projection: SampleProjection) -> CounterSnapshot | None:
    if sample is None:
        return None
    try:
        return read_counters(sample, projection)
    except ValueError:  # a histogram lacks the bucket edge, so the pod cannot be counted
        return None
