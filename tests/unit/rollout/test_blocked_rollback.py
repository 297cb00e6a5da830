"""Decisions on a blocked rollback use a field of the rollout history, not its message."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import Status
from aerie.manifests import naming
from aerie.rollout.canary.blocked_rollback import find_abandoned_revision
from tests.unit.rollout.world import World, world_in_phase

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


def blocked_rollback() -> tuple[World, str]:
    """Return a rollback whose stable pods cannot start while some canary pods serve, and its stable revision."""
    world, stable_revision = world_in_phase("Promoting", replicas=4)
    new_revision = world.desired_revision
    for _ in range(3):
        world.schedule()
        world.ready()
        world.step()
    world.annotate(rollback=new_revision)
    world.step()
    run_reconciles(world, {new_revision}, 30)
    assert world.status["phase"] == "RollingBack"
    return world, stable_revision


def run_reconciles(world: World, serving_revisions: set[str], times: int) -> None:
    """Reconcile every ten minutes until a rollback is reversed; pods of other revisions cannot pull their image."""
    reversals = [record for record in world.status["rolloutHistory"] if "reversalCause" in record]
    for _ in range(times):
        world.schedule()
        for pod in world.pods:
            waiting = {"name": "engine", "ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
            pod["status"] = {"phase": "Pending", "containerStatuses": [{**waiting, "restartCount": 0, "image": "gone"}]}
            if pod["metadata"]["labels"][naming.REVISION_LABEL] in serving_revisions:
                pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        world.step()
        if [record for record in world.status["rolloutHistory"] if "reversalCause" in record] != reversals:
            return
        world.now += 10 * MINUTE


def test_replaced_stable_revision_has_reversal_cause() -> None:
    world, stable_revision = blocked_rollback()
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]})
    run_reconciles(world, {world.status["canary"]["revision"]}, 10)
    ended = world.status["rolloutHistory"][0]
    assert (ended["revision"], ended["result"], ended["reversalCause"]) == (stable_revision, "Failed", "StableUnavailable")
    assert find_abandoned_revision(Status.from_dict(world.status)) is None


def test_revision_abandoned_for_a_third_has_reversal_cause() -> None:
    world, stable_revision = blocked_rollback()
    new_revision = world.status["canary"]["revision"]
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]})
    run_reconciles(world, set(), 10)
    ended = world.status["rolloutHistory"][0]
    assert (ended["revision"], ended["result"], ended["reversalCause"]) == (new_revision, "Failed", "Abandoned")
    assert world.status["stable"]["revision"] == stable_revision
    assert find_abandoned_revision(Status.from_dict(world.status)) == ended["revision"]


@pytest.mark.parametrize(
    ("fields", "revision"),
    [
        ({"reversalCause": "Abandoned", "message": "In other words."}, "b"),
        ({"reversalCause": "StableUnavailable", "message": "In other words."}, None),
        ({"reversalCause": "StableUnavailable", "message": ABANDONED}, None),
        ({"message": "In other words."}, None),
        ({"message": ABANDONED}, "b"),
        ({"message": REPLACED}, None),
    ],
)
def test_reversal_cause_precedes_message(fields: dict[str, Any], revision: str | None) -> None:
    assert find_abandoned_revision(Status.from_dict({"rolloutHistory": [{**ENDED, **fields}]})) == revision
