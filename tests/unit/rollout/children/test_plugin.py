"""The plugin's ConfigMap: there before the pods that mount it, and for as long as pods may start from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aerie.manifests import plugin_config_map
from tests.unit.rollout.world import World, serving_world

DEFAULT: dict[str, Any] = {"inPlace": {}}


def plugins(world: World) -> list[str]:
    """Return the names of the ConfigMaps with a plugin."""
    return sorted(
        name for kind, name in world.objects if kind == "ConfigMap" and plugin_config_map.is_plugin_config_map("chat", name)
    )


def mounted(world: World) -> list[str | None]:
    """Return the ConfigMap that each Deployment mounts."""
    return [
        plugin_config_map.find_plugin_config_map(item["spec"]["template"])
        for (kind, _), item in sorted(world.objects.items())
        if kind == "Deployment"
    ]


def describe_conditions(world: World) -> list[tuple[str, ...]]:
    return [(item["type"], item["status"], item["reason"], item["message"]) for item in world.document["status"]["conditions"]]


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function after which the plugin is that of a later release."""
    later = replace(plugin_config_map.load_plugin(), digest="0123456789")
    return lambda: monkeypatch.setattr(plugin_config_map, "load_plugin", lambda: later)


def start_canary(world: World) -> None:
    """Change more than the drafter, which would be changed in place."""
    world.edit(speculation={"numSpeculativeTokens": 5})
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()


def test_plugin_is_applied_before_the_pods_and_once() -> None:
    world = World(rollout=DEFAULT)
    world.step()
    assert plugins(world) == [], "preflight needs none"
    world.check()
    names = [(item["kind"], item["metadata"]["name"]) for item in world.plan().objects_to_apply]
    positions = {kind: index for index, (kind, name) in enumerate(names) if kind == "Deployment" or "plugin" in name}
    assert positions["ConfigMap"] < positions["Deployment"]
    world.settle()
    assert mounted(world) == plugins(world) == [plugin_config_map.plugin_config_map_name("chat")]
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete) == ((), ())
    del world.objects["ConfigMap", plugins(world)[0]]
    world.settle()
    assert mounted(world) == plugins(world), "new pods of the same revision need it"


def test_no_plugin_in_mode_off_and_none_for_running_pods() -> None:
    """Also the upgrade to a release in which Auto is the default: nothing is written, whatever was built before."""
    world = serving_world()
    conditions = describe_conditions(world)
    before = {key: item["spec"]["template"] for key, item in world.objects.items() if key[0] == "Deployment"}
    world.edit(rollout=DEFAULT)
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete) == ((), ())
    world.settle()
    assert {key: item["spec"]["template"] for key, item in world.objects.items() if key[0] == "Deployment"} == before
    assert plugins(world) == []
    assert describe_conditions(world) == conditions, "no warning, as long as the drafter stays"
    start_canary(world)
    assert plugins(world) == [plugin_config_map.plugin_config_map_name("chat")]
    assert None in mounted(world), "pods of the stable revision stay without it"


def test_plugin_stays_while_pods_mount_it(upgrade: Any) -> None:
    world = World(rollout=DEFAULT)
    world.settle()
    (old,) = plugins(world)
    upgrade()
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete) == ((), ())
    start_canary(world)
    new = plugin_config_map.plugin_config_map_name("chat")
    assert plugins(world) == sorted([old, new])
    assert set(mounted(world)) == {old, new}, "the control has that of the stable revision"
    world.edit(speculation={"numSpeculativeTokens": 3})
    world.drafter("eagle3")
    world.settle()
    assert mounted(world) == plugins(world) == [old]
