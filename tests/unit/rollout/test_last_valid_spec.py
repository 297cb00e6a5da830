"""Specs that the API server accepted and this operator cannot read: the fleet is maintained, with a condition."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from aerie.api import ResourceError
from aerie.manifests import naming, preflight_job
from tests.golden import Messages
from tests.unit.rollout.world import World, monitored_world, serving_world, world_in_phase

GATEWAY = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "front"}]}}
INVALID_RESOURCES = {"limits": {"nvidia.com/gpu": "-x"}}
UNREADABLE = ("True", "UnreadableSpec")
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("spec.replicas", {"replicas": 5000}),
    ("spec.replicas", {"replicas": -1}),
    (
        "spec.model.servedName",
        {"model": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "target"}}, "servedName": ""}},
    ),
    ("spec.engine.resources", {"engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": INVALID_RESOURCES}}),
    ("spec.engine.image", {"engine": {}}),
    (
        "spec.drafter.method",
        {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}, "method": "x"}},
    ),
    ("spec.speculation.numSpeculativeTokens", {"speculation": {"numSpeculativeTokens": -1}}),
    ("spec.rollout.canary.capacity", {"rollout": {"canary": {"capacity": "Novel"}}}),
    ("spec.rollout.progressDeadline", {"rollout": {"progressDeadline": "0s"}}),
    ("spec.rollout.disruption.budget", {"rollout": {"disruption": {"budget": "Novel"}}}),
    ("spec.metrics.scrapeInterval", {"metrics": {"scrapeInterval": "0s"}}),
]


def delete_objects(world: World, *kinds: str) -> set[tuple[str, str]]:
    """Delete the objects of these kinds, and the pods of the Deployments among them; return their keys."""
    deleted = {key for key in world.objects if key[0] in kinds}
    for key in deleted:
        item = world.objects.pop(key)
        if item["kind"] == "Deployment":
            selector = item["spec"]["selector"]["matchLabels"].items()
            world.pods = [pod for pod in world.pods if not selector <= pod["metadata"]["labels"].items()]
    return deleted


@pytest.mark.parametrize("replicas", [1, 40, 1000])
@pytest.mark.parametrize(("field", "change"), FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_spec_repairs_objects_and_names_field(field: str, change: dict[str, Any], replicas: int) -> None:
    world = serving_world(replicas=replicas)
    before, revision = copy.deepcopy(world.objects), world.desired_revision
    world.edit(**change)
    deleted = delete_objects(world, "Deployment", "Service", "PodDisruptionBudget")
    assert len(deleted) == 3
    not_restored = {("PodDisruptionBudget", f"chat-{revision}")} if "disruption" in field else set()
    world.settle()
    assert deleted - world.objects.keys() == not_restored
    for key in deleted - not_restored:
        assert world.objects[key]["spec"] == before[key]["spec"]
    assert world.serving(revision) == replicas
    assert world.condition("Degraded") == UNREADABLE
    assert field in world.message("Degraded")
    assert "correct" in world.message("Degraded")
    assert world.condition("Progressing") == ("False", "UnreadableSpec")
    assert world.condition("Ready") == ("True", "AllPodsReady")
    assert world.status["stable"]["revision"] == revision
    assert world.status["observedGeneration"] == world.document["metadata"]["generation"]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (40, 12), (1000, 400), (12, 1000)])
def test_invalid_spec_still_follows_replicas(before: int, after: int) -> None:
    world = serving_world(replicas=before)
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "resources": INVALID_RESOURCES})
    world.settle()
    world.edit(replicas=after)
    world.settle()
    assert sum(world.replicas().values()) == world.serving() == world.status["replicas"] == after
    assert world.condition("Degraded") == UNREADABLE


def test_unreadable_replicas_stay_unchanged(messages: Messages) -> None:
    world = serving_world(replicas=7)
    world.edit(replicas=5000)
    world.settle()
    assert sum(world.replicas().values()) == 7
    messages.check("replicas that cannot be read", world.message("Degraded"))


@pytest.mark.parametrize(
    ("phase", "replicas"),
    [("Starting", 1), ("Starting", 40), ("Starting", 1000), ("Analyzing", 4), ("Ramping", 4), ("Ramping", 40)],
)
@pytest.mark.parametrize(
    "change",
    [{"engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": INVALID_RESOURCES}}, {"metrics": {"scrapeInterval": "0s"}}],
)
def test_invalid_field_holds_rollout_until_corrected(phase: str, change: dict[str, Any], replicas: int) -> None:
    world, old = world_in_phase(phase, replicas=replicas)
    for _ in range(3):  # objects of the previous phase are deleted
        world.step()
    valid_spec, pods = copy.deepcopy(world.document["spec"]), world.replicas()
    canary = world.status["canary"]
    world.edit(**change)
    world.settle()
    assert world.replicas() == pods
    assert world.status["stable"]["revision"] == old
    assert (world.status["canary"]["phase"], world.status["canary"]["revision"]) == (phase, canary["revision"])
    delete_objects(world, "Deployment", "Service", "PodDisruptionBudget")
    world.settle()
    assert world.replicas() == pods
    assert world.condition("Degraded") == UNREADABLE
    world.document["spec"] = valid_spec
    world.edit()
    world.step()
    assert world.condition("Degraded")[0] == "False"
    assert world.status["canary"]["revision"] == canary["revision"]
    assert world.status["stable"]["revision"] == old


def test_invalid_spec_keeps_retained_pods() -> None:
    world, old = monitored_world()
    pods = world.replicas()
    world.edit(speculation={"numSpeculativeTokens": -1})
    world.settle()
    assert world.replicas() == pods
    assert world.status["previous"]["revision"] == old


def test_rejected_revision_stays_rejected_after_correction() -> None:
    world, old = world_in_phase("Analyzing")
    world.annotate(rollback=world.desired_revision)
    world.settle()
    rejected = world.status["rejectedRevision"]
    valid_spec = copy.deepcopy(world.document["spec"])
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "resources": INVALID_RESOURCES})
    world.settle()
    assert (world.status["rejectedRevision"], world.status["stable"]["revision"]) == (rejected, old)
    world.document["spec"] = valid_spec
    world.edit()
    world.settle()
    assert world.status["phase"] == "RolledBack"


def test_unreadable_traffic_keeps_route_and_services() -> None:
    world = serving_world(rollout={"traffic": GATEWAY})
    before = copy.deepcopy(world.objects)
    assert ("HTTPRoute", "chat") in before
    world.edit(rollout={"traffic": {"mode": "Mesh"}, "disruption": {"maxUnavailable": 1}})
    delete_objects(world, "Deployment", "PodDisruptionBudget")
    del world.objects["Service", "chat"]
    world.settle()
    assert world.objects.keys() == before.keys()
    for key in (("HTTPRoute", "chat"), ("Service", "chat-stable"), ("Service", "chat")):
        assert world.objects[key]["spec"] == before[key]["spec"]
    [budget] = [item for (kind, _), item in world.objects.items() if kind == "PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == 1, "readable fields of the rollout apply"
    assert "HTTPRoute" in world.message("Degraded")


def test_readable_traffic_repairs_route() -> None:
    world = serving_world(rollout={"traffic": GATEWAY})
    before = copy.deepcopy(world.objects)
    world.edit(speculation={"numSpeculativeTokens": -1})
    delete_objects(world, "HTTPRoute", "Service")
    world.settle()
    assert {key: item["spec"] for key, item in world.objects.items() if "spec" in item} == {
        key: item["spec"] for key, item in before.items() if "spec" in item
    }


def test_paused_invalid_spec_changes_nothing() -> None:
    world = serving_world()
    world.edit(speculation={"numSpeculativeTokens": -1}, rollout={"paused": True})
    delete_objects(world, "Service")
    world.step()
    assert ("Service", "chat") not in world.objects
    assert world.condition("Degraded") == UNREADABLE


@pytest.mark.parametrize("change", [{"engine": {"image": 1}}, {"speculation": {"numSpeculativeTokens": -1}}])
def test_missing_record_gives_no_substitute_spec(change: dict[str, Any]) -> None:
    world = World(**change)
    with pytest.raises(ResourceError, match=r"^spec\."):
        world.step()


def test_status_of_another_release_is_ignored() -> None:
    world = serving_world()
    world.edit(speculation={"numSpeculativeTokens": -1})
    world.document["status"]["phase"] = "Charming"
    with pytest.raises(ResourceError, match=r"status\.phase"):
        world.step()


def test_forged_record_creates_no_pods() -> None:
    """ConfigMaps are writable for more users than Deployments."""
    world = serving_world()
    record = world.objects["ConfigMap", preflight_job.preflight_job_name("chat", world.desired_revision)]
    record["data"][preflight_job.RESOURCE_KEY] = record["data"][preflight_job.RESOURCE_KEY].replace("v0.33.0", "v0.32.0")
    before = copy.deepcopy(world.deployments())
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "resources": INVALID_RESOURCES})
    world.settle()
    assert {name: item["spec"] for name, item in world.deployments().items()} == {
        name: item["spec"] for name, item in before.items()
    }
    assert world.deployments().keys() == before.keys()
    assert all(pod["metadata"]["labels"][naming.REVISION_LABEL] in before for pod in world.pods)


@pytest.mark.parametrize("text", ["[]", "null", "1", "{", '{"spec": []}', '{"spec": {"engine": 1}}', ""])
def test_unreadable_record_is_none(text: str) -> None:
    world = serving_world()
    world.objects["ConfigMap", preflight_job.preflight_job_name("chat", world.desired_revision)]["data"][
        preflight_job.RESOURCE_KEY
    ] = text
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "resources": INVALID_RESOURCES})
    with pytest.raises(ResourceError, match=r"^spec\.engine\.resources"):
        world.step()


def test_invalid_spec_holds_starting_first_revision() -> None:
    world = World()
    world.step()
    world.check()
    world.step()
    world.schedule()
    assert world.status["phase"] == "Starting"
    pods = world.replicas()
    world.edit(metrics={"scrapeInterval": "0s"})
    world.settle()
    assert world.replicas() == pods
    assert world.condition("Degraded") == UNREADABLE
