"""The Deployment of one group of pods, and the budget that keeps voluntary disruptions to one pod at a time."""

from __future__ import annotations

from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.resources import names

_LONGEST_START = 7200
"""Seconds after which Kubernetes calls a Deployment stuck. Aerie judges progress itself, by rollout.progressDeadline; a field
here that followed it would be one more thing to change on a running fleet."""


def deployment(
    resource: SpeculativeDeployment, template: dict[str, Any], revision: str, arm: str, replicas: int
) -> dict[str, Any]:
    """The Deployment of the revision's pods in this arm (stable, canary or control).

    Its template never changes, because a changed pod is another revision with a Deployment of its own; so Kubernetes' rolling
    update only ever replaces pods that are lost.
    """
    name, control = resource.metadata.name, arm == "control"
    group = names.group(name, revision, control=control)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": names.deployment(name, revision, control=control),
            "labels": {**names.common(name), **group, names.ARM: arm},
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": group},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": _LONGEST_START,
            "revisionHistoryLimit": 1,
            "template": {**template, "metadata": _with_labels(template.get("metadata") or {}, group)},
        },
    }


def _with_labels(metadata: dict[str, Any], group: dict[str, str]) -> dict[str, Any]:
    return {**metadata, "labels": {**metadata.get("labels", {}), **group}}


def disruption_budget(resource: SpeculativeDeployment) -> dict[str, Any]:
    """At most one pod of the resource, of whatever arm, is drained at a time; a single pod can be drained too."""
    name = resource.metadata.name
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": names.common(name)},
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": {names.NAME: name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
