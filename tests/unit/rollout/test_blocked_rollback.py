"""What is decided of a rollback that could not end rests on a field of the history, and not on the sentence beside it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import Status
from aerie.manifests import naming
from aerie.rollout.canary.blocked_rollback import find_abandoned_revision
from tests.unit.rollout.world import World, canarying

MINUTE = timedelta(minutes=1)
ENDED: dict[str, Any] = {
    "revision": "b",
    "change": "engine",
    "result": "Failed",
    "startTime": "2026-01-01T00:00:00Z",
    "completionTime": "2026-01-01T01:00:00Z",
}
ABANDONED = (
    "Its pods have not been ready again for spec.rollout.progressDeadline, and revision b cannot replace a: revision c follows."
)
REPLACED = (
    "Its pods have not been ready again for spec.rollout.progressDeadline. Revision a, with 2 ready pods, becomes the stable one."
)


def stuck() -> tuple[World, str]:
    """A rollback whose stable pods cannot start, while some of the canary's serve, and that stable revision."""
    world, old = canarying("Promoting", replicas=4)
    mine = world.desired_revision
    for _ in range(3):
        world.schedule()
        world.ready()
        world.step()
    world.annotate(rollback=mine)
    world.step()
    go_on(world, {mine}, 30)
    assert world.status["phase"] == "RollingBack"
    return world, old


def go_on(world: World, serve: set[str], looks: int) -> None:
    """So many looks, one in ten minutes; pods of all other revisions have no image. Until a rollback is turned round."""
    turned = [one for one in world.status["rolloutHistory"] if "reversalCause" in one]
    for _ in range(looks):
        world.schedule()
        for pod in world.pods:
            waiting = {"name": "engine", "ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
            pod["status"] = {"phase": "Pending", "containerStatuses": [{**waiting, "restartCount": 0, "image": "gone"}]}
            if pod["metadata"]["labels"][naming.REVISION_LABEL] in serve:
                pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        world.step()
        if [one for one in world.status["rolloutHistory"] if "reversalCause" in one] != turned:
            return
        world.now += 10 * MINUTE


def test_a_revision_that_serves_in_place_of_the_stable_one_is_recorded_as_such() -> None:
    world, old = stuck()
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]})
    go_on(world, {world.status["canary"]["revision"]}, 10)
    ended = world.status["rolloutHistory"][0]
    assert (ended["revision"], ended["result"], ended["reversalCause"]) == (old, "Failed", "StableUnavailable")
    assert find_abandoned_revision(Status.from_dict(world.status)) is None


def test_a_revision_that_is_given_up_for_a_third_one_is_recorded_as_such() -> None:
    world, old = stuck()
    mine = world.status["canary"]["revision"]
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]})
    go_on(world, set(), 10)
    ended = world.status["rolloutHistory"][0]
    assert (ended["revision"], ended["result"], ended["reversalCause"]) == (mine, "Failed", "Abandoned")
    assert world.status["stable"]["revision"] == old
    assert find_abandoned_revision(Status.from_dict(world.status)) == ended["revision"]


@pytest.mark.parametrize(
    ("told", "revision"),
    [
        ({"reversalCause": "Abandoned", "message": "In other words."}, "b"),
        ({"reversalCause": "StableUnavailable", "message": "In other words."}, None),
        ({"reversalCause": "StableUnavailable", "message": ABANDONED}, None),
        ({"message": "In other words."}, None),
        ({"message": ABANDONED}, "b"),
        ({"message": REPLACED}, None),
    ],
)
def test_the_field_counts_and_without_it_the_message(told: dict[str, Any], revision: str | None) -> None:
    assert find_abandoned_revision(Status.from_dict({"rolloutHistory": [{**ENDED, **told}]})) == revision
