"""Upgrades of Aerie that change the pod template: running pods stay unchanged until a user renews them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from aerie.manifests.pod import engine_pod
from aerie.manifests.revision_hash import RENEW_ANNOTATION
from tests.unit.rollout.world import World, serving_world, world_in_phase

CONTAINER = "engine"


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function after which pods get one more variable, as in a later release."""
    before = engine_pod.build_pod_template

    def template(*arguments: Any) -> dict[str, Any]:
        built = copy.deepcopy(before(*arguments))
        built["spec"]["containers"][0].setdefault("env", []).append({"name": "NEW", "value": "1"})
        return built

    return lambda: monkeypatch.setattr(engine_pod, "build_pod_template", template)


def templates(world: World) -> dict[str, Any]:
    templates_by_name = {name: item["spec"]["template"] for (kind, name), item in world.objects.items() if kind == "Deployment"}
    return copy.deepcopy(templates_by_name)


def is_new(template: dict[str, Any]) -> bool:
    return any(variable["name"] == "NEW" for variable in template["spec"]["containers"][0]["env"])


def test_upgrade_with_other_template_writes_nothing(upgrade: Any) -> None:
    world = serving_world()
    before = copy.deepcopy((world.objects, world.document))
    upgrade()
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ())
    assert plan.status.to_dict() == world.status
    world.settle()
    assert (world.objects, world.document) == before


@pytest.mark.parametrize("phase", ["Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting"])
def test_upgrade_during_rollout_writes_nothing(upgrade: Any, phase: str) -> None:
    world, _ = world_in_phase(phase, replicas=4)
    world.step()
    before = templates(world)
    upgrade()
    for _ in range(3):
        world.step()
        world.schedule()
        world.ready()
    after = templates(world)
    assert {name: after[name] for name in before if name in after} == {name: before[name] for name in before if name in after}


def test_scaling_and_repair_keep_the_old_template(upgrade: Any) -> None:
    world = serving_world()
    before = templates(world)
    upgrade()
    world.edit(replicas=5)
    world.settle()
    assert (sum(world.replicas().values()), templates(world)) == (5, before)
    (deployment,) = (item for (kind, _), item in world.objects.items() if kind == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "somebody/else:1"
    world.settle()
    assert templates(world) == before, "a manual change is reverted"


def test_lost_or_forged_record_changes_no_pod(upgrade: Any) -> None:
    world = serving_world()
    before = templates(world)
    upgrade()
    (record,) = (key for key in world.objects if key[0] == "ConfigMap")
    forged = json.loads(world.objects[record]["data"]["template.json"])
    forged["spec"]["containers"][0]["image"] = "evil/engine:1"
    world.objects[record]["data"]["template.json"] = json.dumps(forged)
    world.settle()
    assert templates(world) == before
    del world.objects[record]
    world.settle()
    assert templates(world) == before


def test_new_revision_gets_new_template_and_control_the_old(upgrade: Any) -> None:
    world = serving_world(replicas=3)
    old = world.desired_revision
    upgrade()
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    assert {revision: is_new(item["spec"]["template"]) for revision, item in world.deployments().items()} == {
        old: False,
        world.desired_revision: True,
    }
    assert not is_new(world.deployments(control=True)[old]["spec"]["template"])


def test_template_is_renewed_by_a_canary(upgrade: Any) -> None:
    world = serving_world()
    old = world.desired_revision
    upgrade()
    world.annotate(**{RENEW_ANNOTATION.removeprefix("aerie.dev/"): "2026-11"})
    assert world.desired_revision != old
    for _ in range(3):
        world.step()
        world.check()
    assert world.status["canary"]["revision"] == world.desired_revision
    assert is_new(world.deployments()[world.desired_revision]["spec"]["template"])
    assert world.status["canary"]["change"] == "engine"
