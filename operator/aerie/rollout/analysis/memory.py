"""What is remembered of the stable pods while nothing is rolled out, so that the next analysis knows how its criteria scatter.

The stable pods are followed with `blocks.observe` as an arm without a canary; each closed block is one more entry for each
criterion. Small, and a dict in a ConfigMap survives whatever the operator does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie.rollout.analysis.blocks import Side
from aerie.rollout.analysis.calibration import History, Scatter
from aerie.rollout.analysis.criteria import Terms, criteria

Memory = Mapping[str, History]
"""By criterion."""


def remember(memory: Memory, stable: Side, terms: Terms) -> dict[str, History]:
    """With one more block of the stable pods."""
    found = dict(memory)
    for criterion in criteria(terms):
        parts = {pod: criterion.value(counts) for pod, counts in stable.by_pod.items()}
        values = {pod: part / whole for pod, (part, whole) in parts.items() if whole > 0}
        found[criterion.name] = found.get(criterion.name, History()).add(values, criterion.relative)
    return found


def scatters(memory: Memory) -> dict[str, Scatter]:
    """What the memory tells an analysis that begins now."""
    return {name: history.scatter() for name, history in memory.items()}


def to_dict(memory: Memory) -> dict[str, Any]:
    return {name: history.to_dict() for name, history in memory.items()}


def from_dict(found: Mapping[str, Any]) -> dict[str, History]:
    return {name: History.from_dict(history) for name, history in found.items()}
