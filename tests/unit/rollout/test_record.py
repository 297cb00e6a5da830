"""The record of a revision's pods is a ConfigMap, writable for more users than Deployments: a forged one creates no pods."""

from __future__ import annotations

import json
from typing import Any

from aerie.manifests import preflight_job
from tests.unit.rollout.world import World, world_in_phase


def forge_record(world: World, revision: str) -> dict[str, Any]:
    """Change the revision's record as a user with write access to ConfigMaps could."""
    record = world.objects["ConfigMap", preflight_job.preflight_job_name("chat", revision)]
    template = json.loads(record["data"][preflight_job.POD_TEMPLATE_KEY])
    template["spec"]["serviceAccountName"] = "admin"
    record["data"][preflight_job.POD_TEMPLATE_KEY] = json.dumps(template)
    return record


def service_accounts(world: World) -> list[str | None]:
    deployments = (item for (kind, _), item in world.objects.items() if kind == "Deployment")
    return [item["spec"]["template"]["spec"].get("serviceAccountName") for item in deployments]


def test_forged_record_of_previous_revision_changes_no_deployment() -> None:
    world, old = world_in_phase("Starting")
    forge_record(world, old)
    world.step()
    assert service_accounts(world) == [None] * 3


def test_valid_record_repairs_a_deployment() -> None:
    world, old = world_in_phase("Starting")
    for (kind, name), item in world.objects.items():
        if kind == "Deployment" and old in name:
            item["spec"]["template"]["spec"]["serviceAccountName"] = "other"
    world.step()
    live = [item["spec"]["template"]["spec"] for (kind, _), item in world.objects.items() if kind == "Deployment"]
    recorded = json.loads(
        world.objects["ConfigMap", preflight_job.preflight_job_name("chat", old)]["data"][preflight_job.POD_TEMPLATE_KEY]
    )["spec"]
    assert sum(spec["containers"] == recorded["containers"] for spec in live) == 2
