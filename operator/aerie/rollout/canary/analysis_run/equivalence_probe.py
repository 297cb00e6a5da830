"""Eligibility of the engines of a rollout for the output-equivalence probe, and the reason where they are not eligible.

Guarantee: pure. The probe runs only where the outputs should be equal: the canary differs from the stable revision only in how it
drafts.
"""

from __future__ import annotations

from typing import Any

from aerie.api.status import Arm
from aerie.manifests import naming
from aerie.manifests.pod.request_metrics import without_request_metrics
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot

_SPECULATIVE_CONFIG_FLAG = "--speculative-config"


def find_probe_skip_reason(snapshot: Snapshot, stable: Arm, canary: Arm) -> str:
    """Return why the engines are not probed, as a clause; empty where they are."""
    spec = snapshot.resource.spec
    if spec.rollout.analysis.output_equivalence == "Disabled":
        return "spec.rollout.analysis.outputEquivalence is Disabled"
    if spec.metrics.source is not None:
        return "spec.metrics.source is set, so the operator may not reach the pods"
    return explain_incomparable_answers(snapshot, stable, canary)


def explain_incomparable_answers(snapshot: Snapshot, stable: Arm, canary: Arm) -> str:
    """Return why answers of canary and stable revision may differ whatever their drafters are, as a clause; empty where they may
    not."""
    if canary.target != stable.target:
        return "the canary serves another target"
    engine_configs = [_output_relevant_config(snapshot.cluster.deployment(arm.revision)) for arm in (stable, canary)]
    if None not in engine_configs and engine_configs[0] != engine_configs[1]:
        return "the canary's engine differs in more than how it drafts"
    return ""


def _output_relevant_config(deployment: KubernetesObject | None) -> Any:
    """Return those parts of an engine's config that may change its output, except the drafter; None where nothing is known."""
    if deployment is None:
        return None
    containers = deployment["spec"]["template"]["spec"].get("containers") or []
    engine: KubernetesObject = next((container for container in containers if container["name"] == naming.ENGINE_CONTAINER), {})
    arguments = list(engine.get("args") or [])
    if _SPECULATIVE_CONFIG_FLAG in arguments:
        flag_index = arguments.index(_SPECULATIVE_CONFIG_FLAG)
        del arguments[flag_index : flag_index + 2]
    return [engine.get(field) for field in ("image", "command", "env")], without_request_metrics(arguments)
