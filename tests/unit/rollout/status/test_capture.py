"""The capture in a rollout: its objects, the copies of requests, and its condition."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.rollout.reconcile import build_reconcile_plan
from tests.golden import Messages
from tests.snapshots import replace_facts
from tests.unit.rollout.world import IMAGE, World, serving_world, world_in_phase

CAPTURE: dict[str, Any] = {
    "consent": {"confirmed": True, "basis": "terms of service, section 4"},
    "storage": {"persistentVolumeClaim": {"claimName": "prompts"}},
}
BUCKET: dict[str, Any] = {
    "consent": {"confirmed": True, "basis": "terms of service, section 4"},
    "storage": {"objectStore": {"bucket": "prompts", "credentialsSecretRef": {"name": "keys"}}},
    "sampling": {"rate": 0.25},
}
GATEWAY: dict[str, Any] = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}}
RECORDER = ("Deployment", "chat-recorder")


def mirrors(world: World) -> list[str]:
    """Return the Services that get copies of requests."""
    (rule,) = world.objects["HTTPRoute", "chat"]["spec"]["rules"]
    return [entry["requestMirror"]["backendRef"]["name"] for entry in rule.get("filters", [])]


def start_recorder(world: World) -> None:
    world.objects[RECORDER]["status"] = {"availableReplicas": 1}
    world.settle()


def test_resource_without_capture_has_neither_objects_nor_a_condition() -> None:
    world = serving_world(rollout=GATEWAY)
    assert RECORDER not in world.objects
    assert mirrors(world) == []
    assert "CaptureReady" not in [condition["type"] for condition in world.status["conditions"]]


def test_from_the_request_to_the_recording(messages: Messages) -> None:
    world = World(rollout=GATEWAY, capture=CAPTURE)
    world.step()
    assert RECORDER in world.objects
    world.settle()
    assert mirrors(world) == ["chat-recorder"]
    assert world.condition("CaptureReady") == ("False", "RecorderNotReady")
    messages.check("RecorderNotReady", world.message("CaptureReady"))
    start_recorder(world)
    assert world.condition("CaptureReady") == ("True", "Recording")
    messages.check("Recording", world.message("CaptureReady"))
    world.edit(capture=BUCKET)
    world.settle()
    messages.check("RecordingInABucket", world.message("CaptureReady"))


def test_copies_are_sent_after_the_service_exists() -> None:
    world = serving_world(rollout=GATEWAY)
    world.edit(capture=CAPTURE)
    world.step()
    assert ("Service", "chat-recorder") in world.objects
    assert mirrors(world) == []
    world.settle()
    assert mirrors(world) == ["chat-recorder"]


def test_without_a_gateway_nothing_is_created(messages: Messages) -> None:
    world = serving_world(capture=CAPTURE)
    assert RECORDER not in world.objects
    assert world.condition("CaptureReady") == ("False", "GatewayRequired")
    assert world.condition("Ready")[0] == "True"
    messages.check("GatewayRequired", world.message("CaptureReady"))


def test_end_of_the_capture_removes_the_recorder_and_the_copies() -> None:
    world = serving_world(rollout=GATEWAY, capture=CAPTURE)
    start_recorder(world)
    del world.document["spec"]["capture"]
    world.edit()
    world.settle()
    assert mirrors(world) == []
    assert RECORDER not in world.objects
    assert ("Service", "chat-recorder") not in world.objects
    assert "CaptureReady" not in [condition["type"] for condition in world.status["conditions"]]


def test_capture_changes_no_revision() -> None:
    world = serving_world(rollout=GATEWAY)
    before = world.desired_revision
    world.edit(capture=CAPTURE)
    world.settle()
    assert world.desired_revision == before
    assert world.status["phase"] == "Ready"


@pytest.mark.parametrize(
    "capture", [{"storage": CAPTURE["storage"]}, CAPTURE | {"consent": {"confirmed": False, "basis": "x" * 20}}]
)
def test_capture_that_cannot_be_read_records_nothing(capture: dict[str, Any]) -> None:
    """A definition of another release may accept it."""
    world = serving_world(rollout=GATEWAY, capture=CAPTURE)
    start_recorder(world)
    world.edit(capture=capture)
    world.settle()
    assert mirrors(world) == []
    assert world.condition("Degraded") == ("True", "UnreadableSpec")


def test_foreign_service_gets_no_copies(messages: Messages) -> None:
    world = World(rollout=GATEWAY, capture=CAPTURE)
    world.name_conflicts = [
        {
            "kind": "Service",
            "metadata": {"name": "chat-recorder", "ownerReferences": [{"kind": "App", "name": "a", "controller": True}]},
        }
    ]
    world.settle()
    assert mirrors(world) == []
    assert world.condition("CaptureReady") == ("False", "NameTaken")
    messages.check("NameTaken", world.message("CaptureReady"))


def test_shadow_evaluation_gets_the_copies_meanwhile(messages: Messages) -> None:
    rollout = GATEWAY | {"analysis": {"shadow": {"source": "Mirror"}}}
    world, _ = world_in_phase("Evaluating", rollout=rollout, capture=CAPTURE)
    world.objects[RECORDER]["status"] = {"availableReplicas": 1}
    world.step()
    assert mirrors(world) == ["chat-evaluator"]
    assert world.condition("CaptureReady") == ("False", "ShadowEvaluation")
    messages.check("ShadowEvaluation", world.message("CaptureReady"))
    assert RECORDER in world.objects
    world.drafter("eagle3")
    world.settle()
    assert mirrors(world) == ["chat-recorder"]
    assert world.condition("CaptureReady") == ("True", "Recording")


# -------------------------------------------------------------------------------------------------------- what is not applied
def recording_world() -> World:
    world = serving_world(rollout=GATEWAY, capture=CAPTURE)
    start_recorder(world)
    assert world.condition("CaptureReady") == ("True", "Recording")
    return world


def test_pause_alone_changes_nothing_about_the_recording() -> None:
    world = recording_world()
    world.edit(rollout=GATEWAY | {"paused": True})
    world.settle()
    assert world.condition("CaptureReady") == ("True", "Recording")


def test_paused_change_is_not_reported_as_applied(messages: Messages) -> None:
    world = recording_world()
    world.edit(rollout=GATEWAY | {"paused": True})
    redaction = {"patterns": [{"pattern": "[0-9]+"}]}
    world.edit(capture=CAPTURE | {"sampling": {"rate": 0.0001}, "retention": {"duration": "1h"}, "redaction": redaction})
    world.settle()
    assert world.condition("CaptureReady") == ("False", "NotApplied")
    messages.check("NotApplied", world.message("CaptureReady"))
    world.edit(rollout=GATEWAY)
    world.settle()
    assert world.condition("CaptureReady") == ("True", "Recording")
    assert "0.01 %" in world.message("CaptureReady")


def test_paused_capture_that_is_new_records_nothing(messages: Messages) -> None:
    world = serving_world(rollout=GATEWAY)
    world.edit(rollout=GATEWAY | {"paused": True}, capture=CAPTURE)
    world.settle()
    assert world.condition("CaptureReady") == ("False", "NotApplied")
    messages.check("NotApplied without a recorder", world.message("CaptureReady"))


def test_paused_removal_is_reported_until_it_is_applied(messages: Messages) -> None:
    world = recording_world()
    world.edit(rollout=GATEWAY | {"paused": True})
    del world.document["spec"]["capture"]
    world.edit()
    world.settle()
    assert mirrors(world) == ["chat-recorder"]
    assert world.condition("CaptureReady") == ("False", "NotRemoved")
    messages.check("NotRemoved", world.message("CaptureReady"))
    world.edit(rollout=GATEWAY)
    world.settle()
    assert "CaptureReady" not in [condition["type"] for condition in world.status["conditions"]]


@pytest.mark.parametrize("removed", [True, False])
def test_traffic_that_cannot_be_read_leaves_the_copies(removed: bool, messages: Messages) -> None:
    world = recording_world()
    if removed:
        del world.document["spec"]["capture"]
    world.edit(rollout={"traffic": GATEWAY["traffic"] | {"mode": "Both"}})
    world.settle()
    assert mirrors(world) == ["chat-recorder"]
    assert world.condition("CaptureReady") == ("False", "NotRemoved" if removed else "NotApplied")
    messages.check(f"unreadable traffic, {removed}", world.message("CaptureReady"))


def test_route_that_cannot_be_listed_is_unknown() -> None:
    world = recording_world()
    children = tuple(item for (kind, _), item in world.objects.items() if kind != "HTTPRoute")
    snapshot = replace_facts(world.observed(), children=children, unlisted_kinds={"HTTPRoute": "HTTPRoutes cannot be listed"})
    conditions = build_reconcile_plan(snapshot, IMAGE, world.now).status.conditions
    assert [(item.status, item.reason) for item in conditions if item.type == "CaptureReady"] == [("Unknown", "ListFailed")]


# ------------------------------------------------------------------------------------------------------ a gateway without mirrors
def answer(world: World, *, accepts: bool, reason: str = "UnsupportedValue", tells_generation: bool = True) -> None:
    """Set the gateway status of the live route, and reconcile."""
    route = world.objects["HTTPRoute", "chat"]
    accepted: dict[str, Any] = {
        "type": "Accepted",
        "status": "True" if accepts else "False",
        "reason": "Accepted" if accepts else reason,
        "message": "",
    }
    if tells_generation:
        route["metadata"]["generation"] = accepted["observedGeneration"] = 7 + len(mirrors(world))
    route["status"] = {"parents": [{"parentRef": {"name": "public"}, "conditions": [accepted]}]}
    world.settle()


@pytest.mark.parametrize("tells_generation", [True, False])
def test_filter_that_the_gateway_rejects_is_removed_and_stays_so(tells_generation: bool, messages: Messages) -> None:
    world = recording_world()
    answer(world, accepts=True, tells_generation=tells_generation)
    answer(world, accepts=False, tells_generation=tells_generation)
    assert mirrors(world) == []
    assert world.condition("CaptureReady") == ("False", "MirrorRejected")
    messages.check("MirrorRejected", world.message("CaptureReady"))
    answer(world, accepts=True, tells_generation=tells_generation)
    world.edit(replicas=5)
    world.settle()
    assert (mirrors(world), world.condition("CaptureReady")) == ([], ("False", "MirrorRejected"))
    assert world.condition("Degraded")[0] == "False"
    del world.document["spec"]["capture"]
    world.edit()
    world.settle()
    assert "CaptureReady" not in [condition["type"] for condition in world.status["conditions"]]
    world.edit(capture=CAPTURE)
    world.settle()
    assert mirrors(world) == ["chat-recorder"]


def test_route_that_is_rejected_without_copies_too_gets_it_again() -> None:
    world = recording_world()
    answer(world, accepts=False, reason="NoMatchingListenerHostname")
    assert world.condition("CaptureReady") == ("False", "MirrorRejected")
    answer(world, accepts=False, reason="NoMatchingListenerHostname")
    assert (mirrors(world), world.condition("CaptureReady")) == ([], ("False", "RouteNotAccepted"))
    answer(world, accepts=True)
    assert (mirrors(world), world.condition("CaptureReady")) == (["chat-recorder"], ("True", "Recording"))
