"""PodDisruptionBudgets: one for the pods of each revision, and never two for a pod during a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.manifests import deployment, naming
from tests.unit.rollout.world import World, monitored_world, serving_world, world_in_phase


def budgets(world: World) -> dict[str, Mapping[str, str]]:
    """Return the selector of each budget, by name."""
    return {
        name: item["spec"]["selector"]["matchLabels"]
        for (kind, name), item in world.objects.items()
        if kind == "PodDisruptionBudget"
    }


def budgets_of(world: World, pod: dict[str, Any]) -> list[str]:
    labels = pod["metadata"]["labels"]
    return [name for name, selector in budgets(world).items() if selector.items() <= labels.items()]


def check_budgets(world: World) -> None:
    """Check that no pod has two budgets, a control pod has none, and stable and canary pods have their own."""
    revisions = {arm["revision"] for arm in (world.status["stable"], world.status.get("canary")) if arm}
    for pod in world.pods:
        labels = pod["metadata"]["labels"]
        revision, control = labels[naming.REVISION_LABEL], labels[naming.CONTROL_LABEL] == "true"
        assert len(budgets_of(world, pod)) <= 1
        if control:
            assert not budgets_of(world, pod)
        elif revision in revisions:
            assert budgets_of(world, pod) == [f"chat-{revision}"]


def max_unavailable(**rollout: Any) -> object:
    document = {**World().document, "spec": {**World().document["spec"], "rollout": rollout}}
    return deployment.build_disruption_budget(SpeculativeDeployment.from_dict(document), "r1")["spec"]["maxUnavailable"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "10%"), (1, 1), ("1", 1), (1000, 1000), ("25%", "25%"), ("100%", "100%")],
)
def test_max_unavailable_is_configurable(value: object, expected: object) -> None:
    assert max_unavailable(**({} if value is None else {"disruption": {"maxUnavailable": value}})) == expected


@pytest.mark.parametrize("value", [0, -1, 1001, "0%", "101%", "10 %", "a few", "", True, 1.5])
def test_invalid_max_unavailable_is_rejected(value: object) -> None:
    with pytest.raises(ResourceError, match=r"spec\.rollout\.disruption\.maxUnavailable"):
        max_unavailable(disruption={"maxUnavailable": value})


@pytest.mark.parametrize("capacity", ["Surge", "Reuse"])
@pytest.mark.parametrize("ramp", [[], [25, 50]])
def test_no_pod_has_two_budgets_during_rollout(capacity: str, ramp: list[int]) -> None:
    world, old = monitored_world(replicas=6, rollout={"canary": {"capacity": capacity, "stepWeights": ramp}})
    check_budgets(world)
    world.settle()
    check_budgets(world)
    world.now += timedelta(minutes=11)
    world.settle()
    assert list(budgets(world)) == [f"chat-{world.desired_revision}"], f"the budget of {old} is deleted"


@pytest.mark.parametrize("phase", ["Starting", "WarmingUp", "Analyzing", "Promoting"])
def test_loading_canary_is_outside_stable_budget(phase: str) -> None:
    world, old = world_in_phase(phase, replicas=4)
    check_budgets(world)
    world.schedule()  # its pods are Pending
    check_budgets(world)
    selectors = budgets(world)
    assert set(selectors) == {f"chat-{old}", f"chat-{world.desired_revision}"}
    assert selectors[f"chat-{old}"] == naming.deployment_selector_labels("chat", old, control=False)


def test_promotion_keeps_budgets_of_serving_pods() -> None:
    world, _ = world_in_phase("Promoting", replicas=4, rollout={"canary": {"scaleDownDelay": "10m"}})
    name = f"chat-{world.desired_revision}"
    before = budgets(world)[name]
    while world.status["phase"] == "Promoting":
        world.schedule()
        world.ready()
        world.step()
        assert budgets(world)[name] == before
        check_budgets(world)


def test_disabled_budgets_are_not_created_and_deleted() -> None:
    world = serving_world()
    assert budgets(world)
    world.edit(rollout={"disruption": {"budget": "None"}})
    world.settle()
    assert not budgets(world)
    world.edit(rollout={})
    world.settle()
    assert list(budgets(world)) == [f"chat-{world.desired_revision}"]
