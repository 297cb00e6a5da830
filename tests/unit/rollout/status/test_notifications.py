"""Notifications of a status: one per event, with stable ids."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm, InPlacePhase, Status
from aerie.rollout.status.notifications import Notification, build_notifications, describe_client_effect
from tests.golden import Messages
from tests.unit.rollout.in_place_world import build_in_place_rollout
from tests.unit.rollout.world import World, masked, serving_world, world_in_phase


def notifications(world: World) -> list[Notification]:
    resource = SpeculativeDeployment.from_dict(world.document)
    assert resource.status is not None
    return list(build_notifications(resource, resource.status))


def event_types(world: World) -> list[str]:
    return [notification.event_type for notification in notifications(world)]


def test_promotion_sends_notifications_in_order() -> None:
    world, _ = world_in_phase("Starting")
    assert event_types(world) == ["promoted", "started"]
    started = notifications(world)[-1]
    world, _ = world_in_phase("Ramping")
    assert event_types(world) == ["promoted", "started"]
    assert notifications(world)[-1].id == started.id, "the same notification"
    for _ in range(20):
        world.schedule()
        world.ready()
        world.now += timedelta(minutes=5)
        world.step()
    first, last = notifications(world)
    assert (first.event_type, last.event_type) == ("promoted", "promoted")
    assert last.id.rpartition("/")[0] == started.id.rpartition("/")[0], "the same rollout"
    assert last.data["comparisons"][0]["metric"] == "TokensPerStep"
    assert (last.data["drafter"], last.data["replacedDrafter"]) == ("models/eagle31", "models/eagle3")


def test_waiting_for_user_sends_notification(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing")
    world.now += timedelta(hours=4)
    world.step()
    assert event_types(world) == ["promoted", "started", "inconclusive"]
    messages.check("inconclusive", masked(notifications(world)[-1].data["message"], NEW=world.desired_revision))
    world, _ = world_in_phase("Analyzing", rollout={"canary": {"approval": "Manual"}})
    world.measure(20, +0.2)
    assert event_types(world) == ["promoted", "started", "approval-required"]


def test_rollout_in_place_sends_notifications() -> None:
    world = serving_world()
    phases: dict[InPlacePhase, list[str]] = {
        "Staging": ["started"],
        "Analyzing": ["started"],
        "AwaitingApproval": ["started", "approval-required"],
        "Held": ["started", "inconclusive"],
        "Promoting": ["started"],
        "RollingBack": [],
    }
    for phase, expected in phases.items():
        world.document["status"] |= {"phase": phase, "inPlaceRollout": build_in_place_rollout(phase).to_dict()}
        assert event_types(world) == ["promoted", *expected]
    world.document["status"]["inPlaceRollout"] = build_in_place_rollout("Analyzing").to_dict()
    started = notifications(world)[-1]
    assert (started.data["drafter"], started.data["replacedDrafter"]) == ("models/eagle31", "models/eagle3")


def test_retried_revision_is_another_rollout() -> None:
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.desired_revision)
    world.settle()
    assert event_types(world) == ["promoted", "rolled-back"]
    world.annotate(rollback="", retry="1")
    world.now += timedelta(minutes=1)
    world.settle_until("Starting")
    ids = [notification.id for notification in notifications(world)]
    assert event_types(world) == ["promoted", "rolled-back", "started"]
    assert len(set(ids)) == 3
    assert ids[1].split("/")[:2] == ids[2].split("/")[:2]
    assert ids[1].split("/")[2] != ids[2].split("/")[2]


def test_rejection_is_notified_once_per_spec() -> None:
    world = serving_world()
    world.drafter("refused")
    world.settle()
    assert event_types(world) == ["promoted", "failed"]
    rejection = notifications(world)[-1]
    assert "torn" in rejection.data["message"]
    world.now += timedelta(hours=1)
    world.settle()
    assert notifications(world)[-1] == rejection


def test_failed_first_revision_is_notified() -> None:
    world = World()
    world.settle_until("Starting")
    assert event_types(world) == ["started"]
    world.now += timedelta(minutes=30)
    world.step()
    assert event_types(world) == ["started", "failed"]


def test_notification_is_a_cloud_event() -> None:
    world, _ = world_in_phase("Starting")
    event: dict[str, Any] = json.loads(json.dumps(notifications(world)[-1].to_cloud_event("prod")))
    data = event.pop("data")
    assert event == {
        "specversion": "1.0",
        "id": notifications(world)[-1].id,
        "source": "prod",
        "type": "dev.aerie.rollout.started",
        "subject": "default/chat",
        "time": data["startTime"],
        "datacontenttype": "application/json",
    }
    assert data == {
        "namespace": "default",
        "name": "chat",
        "uid": "u1",
        "phase": "started",
        "revision": world.desired_revision,
        "change": "drafter models/eagle31",
        "drafter": "models/eagle31",
        "replacedDrafter": "models/eagle3",
        "startTime": event["time"],
        "clientEffect": describe_client_effect("started", Status(stable=Arm(revision="s"))),
    }


def test_acceptance_regression_is_notified_once_per_beginning() -> None:
    world, _ = world_in_phase("Starting")
    degraded = next(item for item in world.document["status"]["conditions"] if item["type"] == "Degraded")
    degraded |= {"status": "True", "reason": "AcceptanceRegression", "message": "Acceptance length dropped to 1.20."}
    *_, regression = notifications(world)
    assert regression.event_type == "acceptance-regression"
    assert regression.data["message"] == "Acceptance length dropped to 1.20."
    degraded |= {"reason": "DraftsRejected", "message": "Acceptance length is 1.00."}
    assert notifications(world)[-1].id == regression.id
    degraded["lastTransitionTime"] = "2030-01-01T00:00:00Z"
    assert notifications(world)[-1].id != regression.id
    degraded["reason"] = "NameTaken"
    assert "acceptance-regression" not in event_types(world)
