"""The Deployment of a revision's pods in one arm, and the budget of pods that a drain may evict at a time.

Guarantees: a budget's selector never changes and selects the pods of one revision alone. So no two budgets select the same pod,
which Kubernetes would evict by neither, and loading pods of one revision do not block drains of another. Control pods have no
budget, because a comparison loses only time when one is evicted. Not guaranteed: anything where the user has a budget of their
own on the same pods; `disruption.budget: None` makes room for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.manifests import naming

_PROGRESS_DEADLINE_SECONDS = 7200
"""Seconds after which Kubernetes calls a Deployment stuck. Aerie judges progress itself, by rollout.progressDeadline. A field
here that followed it would be one more change on running pods."""


def build_deployment(
    resource: SpeculativeDeployment, pod_template: dict[str, Any], revision: str, arm: str, replicas: int
) -> dict[str, Any]:
    """Return the Deployment of the revision's pods in this arm (stable, canary or control).

    Its template never changes, because a changed pod is another revision with a Deployment of its own. So Kubernetes' rolling
    update only ever replaces lost pods.
    """
    name, control = resource.metadata.name, arm == "control"
    selector_labels = naming.deployment_selector_labels(name, revision, control=control)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": naming.deployment_name(name, revision, control=control),
            "labels": {**naming.common_labels(name), **selector_labels, naming.ARM_LABEL: arm},
            "annotations": {naming.TEMPLATE_DIGEST_ANNOTATION: template_digest(pod_template)},
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": selector_labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": _PROGRESS_DEADLINE_SECONDS,
            "revisionHistoryLimit": 1,
            "template": {**pod_template, "metadata": _add_labels(pod_template.get("metadata") or {}, selector_labels)},
        },
    }


def template_digest(pod_template: Mapping[str, Any]) -> str:
    """Return the digest of a pod template, which tells the template of a Deployment from any other."""
    return hashlib.sha256(json.dumps(pod_template, sort_keys=True).encode()).hexdigest()[:32]


def _add_labels(metadata: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    return {**metadata, "labels": {**metadata.get("labels", {}), **labels}}


def build_disruption_budget(resource: SpeculativeDeployment, revision: str) -> dict[str, Any]:
    """Return the budget of the revision's pods without control pods. A percentage is rounded up: a single pod can be drained
    too."""
    name = resource.metadata.name
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": naming.deployment_name(name, revision, control=False),
            "labels": naming.common_labels(name) | {naming.REVISION_LABEL: revision},
        },
        "spec": {
            "maxUnavailable": resource.spec.rollout.disruption.max_unavailable_or_default,
            "selector": {"matchLabels": naming.deployment_selector_labels(name, revision, control=False)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
