"""Blocks from what the scraper reads: once per interval, a round over the pods of both arms, or over the stable pods alone.

    readings of pods ─► round, each interval ─► blocks.observe ─┬─► blocks of an analysis ─► next pass
                                                                └─► blocks of stable pods ─► their history (histories.py)

Guarantees: a round shows a pod's reading once; one that did not come since the last round counts as failed. What is compared is
told by spec and status alone, so a new leader goes on where the old one stood, but for the block that was open. Not guaranteed:
that the readings of a round are of one moment; they are up to an interval apart, and for each pod always by the same.
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
from aerie.rollout.canary.analysis_run import AnalysisRun, build_block_rule

MAX_PENDING_BLOCKS = 16
"""Closed blocks that are kept for passes that have yet to see them."""


@dataclass(frozen=True)
class ComparisonConfig:
    """What is compared: it is another comparison when any of this is another."""

    started_at: float
    """When the evidence that is being gathered began."""
    arms: Mapping[str, ArmName]
    """By name of the Deployment."""
    projection: SampleProjection
    rule: BlockRule
    warmup_seconds: float = 0.0
    """Seconds after its first reading for which a pod counts for nothing."""

    @property
    def is_stable_only(self) -> bool:
        """Whether nothing is compared: the stable pods are followed for their own sake."""
        return "canary" not in self.arms.values()


def build_comparison_config(name: str, status: Status, interval: float) -> ComparisonConfig | None:
    """What the status of the resource `name` wants compared; None while nothing is."""
    canary, stable, analysis = status.canary, status.stable, status.analysis
    if status.previous is not None and canary is None:
        return _build_post_promotion_config(name, status, interval)
    if canary is None or stable is None or analysis is None or canary.phase in ("Starting", "WarmingUp", "RollingBack"):
        return None
    evidence = AnalysisRun.unpack(analysis.state)
    if evidence is None:
        return None
    controlled = canary.control is not None and canary.phase not in TRAFFIC_SHIFT_PHASES
    arms: dict[str, ArmName] = {
        naming.deployment_name(name, canary.revision, control=False): "canary",
        naming.deployment_name(name, stable.revision, control=controlled): "control",
    }
    gathered = evidence.guard_state or evidence.state
    return ComparisonConfig(gathered.began, arms, evidence.plan.kept, build_block_rule(evidence.plan, interval))


def _build_post_promotion_config(name: str, status: Status, interval: float) -> ComparisonConfig | None:
    """After a promotion: the stable pods alone, or against those of the revision before while these have requests too."""
    stable, previous = status.stable, status.previous
    evidence = AnalysisRun.unpack(status.analysis.state) if status.analysis is not None else None
    if stable is None or previous is None or evidence is None or evidence.guard_state is None:
        return None
    arms: dict[str, ArmName] = {naming.deployment_name(name, stable.revision, control=False): "canary"}
    if previous.phase == "Rechecking":
        arms[naming.deployment_name(name, previous.revision, control=False)] = "control"
    return ComparisonConfig(evidence.guard_state.began, arms, evidence.plan.kept, build_block_rule(evidence.plan, interval))


@dataclass
class BlockCollector:
    """Of one resource. Times are seconds since the epoch."""

    config: ComparisonConfig
    blocks: deque[ClosedBlock] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_BLOCKS))
    _open_block: OpenBlock | None = None
    _first_sample_at: dict[str, float] = field(default_factory=dict)
    """When each pod was read first."""
    _next_tick: float = 0.0
    _last_tick: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a round is due."""
        return now >= self._next_tick

    def collect(self, now: float, pods: Iterable[tuple[str, str, float, Sample | None]]) -> bool:
        """One round over the pods (name, Deployment, when it was read, what was read); whether it has closed a block."""
        seen: dict[str, PodSample] = {}
        since, self._first_sample_at = self._first_sample_at, {}
        for name, group, at, sample in pods:
            arm = self.config.arms.get(group)
            if arm is None:
                continue
            if sample is not None:
                self._first_sample_at[name] = since.get(name, at)
            if now < self._first_sample_at.get(name, now) + self.config.warmup_seconds:
                continue
            seen[name] = PodSample(arm, _project_sample(sample, self.config.projection) if at > self._last_tick else None)
        interval = self.config.rule.scrape_interval_seconds
        self._next_tick = now + interval if self._open_block is None else max(self._next_tick + interval, now + interval / 2)
        self._last_tick = now
        if self._open_block is None:
            self._open_block = start_block(now, seen, self.config.rule)
            return False
        self._open_block, closed = add_scrapes(self._open_block, now, seen, self.config.rule)
        if closed is not None:
            self.blocks.append(closed)
        return closed is not None


def _project_sample(sample: Sample | None, projection: SampleProjection) -> CounterSnapshot | None:
    if sample is None:
        return None
    try:
        return read_counters(sample, projection)
    except ValueError:  # a histogram without the edge: the pod cannot be counted
        return None
