"""Placement: control pods prefer the GPU product of the canary's, and all other pod templates stay unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from aerie.manifests.naming import CONTROL_LABEL, NAME_LABEL, REVISION_LABEL
from aerie.manifests.pod import placement
from aerie.rollout.revision import pod_template
from tests.unit.rollout.world import World, world_in_phase

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
TERM = {"weight": 1, "podAffinityTerm": {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}}
OWN: dict[str, Any] = {
    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
    "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}], PREFERRED: [TERM]},
    "podAntiAffinity": {PREFERRED: [TERM]},
}


def with_affinity(affinity: Any) -> dict[str, Any]:
    return {"engine": {"image": "vllm/vllm-openai:v0.33.0", "podTemplate": {"spec": {"affinity": affinity}}}}


def affinity(deployment: dict[str, Any]) -> Any:
    return deployment["spec"]["template"]["spec"].get("affinity")


def control_deployment(world: World, revision: str) -> dict[str, Any]:
    return world.deployments(control=True)[revision]


def affinity_terms(revision: str) -> list[dict[str, Any]]:
    selector = {
        "matchLabels": {NAME_LABEL: "chat", CONTROL_LABEL: "false"},
        "matchExpressions": [{"key": REVISION_LABEL, "operator": "NotIn", "values": [revision]}],
    }
    weights = {
        "nvidia.com/gpu.product": 100,
        "amd.com/gpu.product-name": 50,
        "cloud.google.com/gke-accelerator": 25,
        "node.kubernetes.io/instance-type": 12,
    }
    return [
        {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": label}}
        for label, weight in weights.items()
    ]


def test_only_control_pods_prefer_the_canary_gpu_product() -> None:
    world, old = world_in_phase("Starting")
    assert affinity(control_deployment(world, old)) == {"podAffinity": {PREFERRED: affinity_terms(old)}}
    assert [affinity(deployment) for deployment in world.deployments().values()] == [None, None]


def test_user_affinity_is_kept_first() -> None:
    world, old = world_in_phase("Starting", **with_affinity(OWN))
    expected = copy.deepcopy(OWN)
    expected["podAffinity"][PREFERRED] += affinity_terms(old)
    assert affinity(control_deployment(world, old)) == expected
    assert [affinity(deployment) for deployment in world.deployments().values()] == [OWN, OWN]


@pytest.mark.parametrize(
    "empty", [{}, {"podAffinity": None}, {"podAffinity": {PREFERRED: None}}, {"podAffinity": {PREFERRED: []}}]
)
def test_empty_affinity_is_omitted(empty: Any) -> None:
    world, old = world_in_phase("Starting", **with_affinity(empty))
    assert affinity(control_deployment(world, old))["podAffinity"] == {PREFERRED: affinity_terms(old)}


def test_promoted_pods_and_record_have_no_preference() -> None:
    world, _ = world_in_phase("Analyzing")
    new = world.desired_revision
    before = world.deployments()[new]["spec"]["template"]
    for _ in range(60):
        world.measure(1, +0.2)
        world.schedule()
        world.ready()
        if world.status["phase"] == "Ready":
            break
    world.settle()
    assert set(world.replicas()) == {f"chat-{new}"}
    assert world.deployments()[new]["spec"]["template"] == before
    assert "podAffinity" not in str(world.objects)


def test_control_pods_of_next_canary_are_equal() -> None:
    """Control pods may still exist, and another template would recreate each of them."""
    world, old = world_in_phase("Analyzing")
    first, before = world.desired_revision, copy.deepcopy(control_deployment(world, old)["spec"]["template"])
    world.edit(speculation={"numSpeculativeTokens": 4})
    world.settle_until("Starting")
    world.step()
    assert world.status["canary"]["revision"] == world.desired_revision != first
    assert control_deployment(world, old)["spec"]["template"] == before


# ------------------------------------------------------------------------------------------------- upgrades and lost records
@pytest.mark.parametrize("spec", [{}, with_affinity(OWN)], ids=["no affinity", "the user's"])
def test_upgrade_keeps_running_control_pods(monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(placement, "prefer_canary_gpu_product", lambda template, *_: template)
        world, old = world_in_phase("Analyzing", **spec)
    deployments = copy.deepcopy(world.deployments(control=True) | {"stable": world.deployments()[old]})
    plan = world.step()
    assert plan.objects_to_apply == ()
    assert world.deployments(control=True) | {"stable": world.deployments()[old]} == deployments


def test_lost_record_keeps_control_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template of the stable revision is then its Deployment's, with the API server's defaults."""
    world, old = world_in_phase("Analyzing")
    before = affinity(control_deployment(world, old))
    resolve = pod_template.resolve_pod_template

    def defaulted(*arguments: Any) -> dict[str, Any] | None:
        template = copy.deepcopy(resolve(*arguments))
        return template and {**template, "spec": {**template["spec"], "schedulerName": "default-scheduler"}}

    monkeypatch.setattr("aerie.rollout.children.desired.resolve_pod_template", defaulted)
    world.step()
    assert control_deployment(world, old)["spec"]["template"]["spec"]["schedulerName"] == "default-scheduler"
    assert affinity(control_deployment(world, old)) == before


def test_manual_affinity_change_is_reverted() -> None:
    world, old = world_in_phase("Analyzing")
    before = copy.deepcopy(control_deployment(world, old)["spec"])
    control_deployment(world, old)["spec"]["template"]["spec"]["affinity"] = {}
    world.step()
    assert control_deployment(world, old)["spec"] == before


def test_user_template_is_not_changed() -> None:
    template: dict[str, Any] = {"spec": {"affinity": copy.deepcopy(OWN)}}
    placement.prefer_canary_gpu_product(template, "chat", "abc")
    assert template == {"spec": {"affinity": OWN}}
