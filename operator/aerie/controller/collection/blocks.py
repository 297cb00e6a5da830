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

from aerie.analysis.measurement.blocks import Arm, Block, Open, Rule, Seen, observe, start
from aerie.analysis.measurement.counts import Kept, Reading, read
from aerie.api.status import GROWING_PHASES, Status
from aerie.engine.metrics.sample import Sample
from aerie.manifests import naming
from aerie.rollout.canary.analysis_run import Evidence, rule_of

HELD = 16
"""Closed blocks that are kept for passes that have yet to see them."""


@dataclass(frozen=True)
class Subject:
    """What is compared: it is another comparison when any of this is another."""

    began: float
    """When the evidence that is being gathered began."""
    arms: Mapping[str, Arm]
    """By name of the Deployment."""
    kept: Kept
    rule: Rule
    warmup: float = 0.0
    """Seconds after its first reading for which a pod counts for nothing."""

    @property
    def alone(self) -> bool:
        """Whether nothing is compared: the stable pods are followed for their own sake."""
        return "canary" not in self.arms.values()


def subject(name: str, status: Status, interval: float) -> Subject | None:
    """What the status of the resource `name` wants compared; None while nothing is."""
    canary, stable, analysis = status.canary, status.stable, status.analysis
    if status.previous is not None and canary is None:
        return _after(name, status, interval)
    if canary is None or stable is None or analysis is None or canary.phase in ("Starting", "WarmingUp", "RollingBack"):
        return None
    evidence = Evidence.unpack(analysis.state)
    if evidence is None:
        return None
    controlled = canary.control is not None and canary.phase not in GROWING_PHASES
    arms: dict[str, Arm] = {
        naming.deployment(name, canary.revision, control=False): "canary",
        naming.deployment(name, stable.revision, control=controlled): "control",
    }
    gathered = evidence.watched or evidence.state
    return Subject(gathered.began, arms, evidence.terms.kept, rule_of(evidence.terms, interval))


def _after(name: str, status: Status, interval: float) -> Subject | None:
    """After a promotion: the stable pods alone, or against those of the revision before while these have requests too."""
    stable, previous = status.stable, status.previous
    evidence = Evidence.unpack(status.analysis.state) if status.analysis is not None else None
    if stable is None or previous is None or evidence is None or evidence.watched is None:
        return None
    arms: dict[str, Arm] = {naming.deployment(name, stable.revision, control=False): "canary"}
    if previous.phase == "Rechecking":
        arms[naming.deployment(name, previous.revision, control=False)] = "control"
    return Subject(evidence.watched.began, arms, evidence.terms.kept, rule_of(evidence.terms, interval))


@dataclass
class Comparison:
    """Of one resource. Times are seconds since the epoch."""

    subject: Subject
    blocks: deque[Block] = field(default_factory=lambda: deque(maxlen=HELD))
    _open: Open | None = None
    _since: dict[str, float] = field(default_factory=dict)
    """When each pod was read first."""
    _due: float = 0.0
    _last: float = 0.0

    def wants(self, now: float) -> bool:
        """Whether a round is due."""
        return now >= self._due

    def round(self, now: float, pods: Iterable[tuple[str, str, float, Sample | None]]) -> bool:
        """One round over the pods (name, Deployment, when it was read, what was read); whether it has closed a block."""
        seen: dict[str, Seen] = {}
        since, self._since = self._since, {}
        for name, group, at, sample in pods:
            arm = self.subject.arms.get(group)
            if arm is None:
                continue
            if sample is not None:
                self._since[name] = since.get(name, at)
            if now < self._since.get(name, now) + self.subject.warmup:
                continue
            seen[name] = Seen(arm, _reading(sample, self.subject.kept) if at > self._last else None)
        interval = self.subject.rule.interval
        self._due = now + interval if self._open is None else max(self._due + interval, now + interval / 2)
        self._last = now
        if self._open is None:
            self._open = start(now, seen, self.subject.rule)
            return False
        self._open, closed = observe(self._open, now, seen, self.subject.rule)
        if closed is not None:
            self.blocks.append(closed)
        return closed is not None


def _reading(sample: Sample | None, kept: Kept) -> Reading | None:
    if sample is None:
        return None
    try:
        return read(sample, kept)
    except ValueError:  # a histogram without the edge: the pod cannot be counted
        return None
