"""Builds snapshots from single facts, so that a test names the facts it is about, and not where a snapshot keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.rollout.facts.snapshot import ClusterState, EngineState, KubernetesObject, OperatorState, Snapshot


def build_snapshot(resource: SpeculativeDeployment, children: Sequence[KubernetesObject] = (), **facts: Any) -> Snapshot:
    """Return a snapshot of the resource. `facts`: fields of the snapshot's parts by name, such as `pods`."""
    cluster = ClusterState(resource.metadata.name, tuple(children))
    return replace_facts(Snapshot(resource, cluster), **facts)


def replace_facts(snapshot: Snapshot, **facts: Any) -> Snapshot:
    """Return the snapshot with other facts. Raises TypeError where no part has a field of that name."""
    parts = {}
    for part, kind in (("cluster", ClusterState), ("engines", EngineState), ("operator", OperatorState)):
        part_facts = {field.name: facts.pop(field.name) for field in fields(kind) if field.name in facts}
        if part_facts:
            parts[part] = replace(getattr(snapshot, part), **part_facts)
    return replace(snapshot, **parts, **facts)
