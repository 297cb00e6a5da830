"""Whether the engines of a rollout are asked for greedy answers, and why not.

Guarantee: pure. They are asked only where the answers should be equal: the canary drafts otherwise, and is else the same.
"""

from __future__ import annotations

from typing import Any

from aerie.api.status import Arm
from aerie.manifests import naming
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot

_SPECULATIVE_CONFIG_FLAG = "--speculative-config"


def find_probe_skip_reason(snapshot: Snapshot, stable: Arm, canary: Arm) -> str:
    """Why the engines are not asked, as a clause; empty where they are."""
    spec = snapshot.resource.spec
    if spec.rollout.analysis.greedy_answers == "Skip":
        return "spec.rollout.analysis.greedyAnswers is Skip"
    if spec.metrics.source is not None:
        return "spec.metrics.source is given, so pods may be out of the operator's reach"
    if canary.target != stable.target:
        return "the canary serves another target"
    engines = [_output_relevant_config(snapshot.deployment(arm.revision)) for arm in (stable, canary)]
    if None not in engines and engines[0] != engines[1]:
        return "more is new in the canary's engine than how it drafts"
    return ""


def _output_relevant_config(deployment: KubernetesObject | None) -> Any:
    """What of an engine may change its answers, but for the drafter; None when nothing is known."""
    if deployment is None:
        return None
    containers = deployment["spec"]["template"]["spec"].get("containers") or []
    engine: KubernetesObject = next((one for one in containers if one["name"] == naming.ENGINE_CONTAINER), {})
    arguments = list(engine.get("args") or [])
    if _SPECULATIVE_CONFIG_FLAG in arguments:
        at = arguments.index(_SPECULATIVE_CONFIG_FLAG)
        del arguments[at : at + 2]
    return [engine.get(part) for part in ("image", "command", "env")], arguments
