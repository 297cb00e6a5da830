"""A world whose stable pods serve with a drafter that was promoted in place."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import DrafterLocation, InPlaceDrafter, InPlacePhase, InPlaceRollout
from aerie.engine.drafter_endpoint.calls import compute_digest
from aerie.engine.speculation import Static
from aerie.manifests import naming, preflight_job
from aerie.manifests.expected_drafter_config_map import build_expected_drafter_config_map
from aerie.manifests.revision_hash import compute_revision
from tests.unit.rollout.world import K_OF_SPEC, START, World, serving_world

FILES = {"config.json": "0" * 64, "model.safetensors": "1" * 64}
IN_PLACE: dict[str, Any] = {"inPlace": {"mode": "Auto"}}


def served_drafter(revision: str, path: str = "eagle31") -> InPlaceDrafter:
    return InPlaceDrafter(
        revision=revision,
        drafter=f"models/{path}",
        digest=compute_digest(FILES),
        files=FILES,
        location=DrafterLocation(folder=f"/models/drafters/{path}"),
    )


def build_in_place_rollout(
    phase: InPlacePhase = "Analyzing", start_time: datetime = START, revision: str = "0123456789"
) -> InPlaceRollout:
    drafter = served_drafter(revision)
    return InPlaceRollout(
        revision=revision,
        change=f"drafter {drafter.drafter}",
        drafter=drafter.drafter,
        location=drafter.location,
        phase=phase,
        start_time=start_time,
        phase_start_time=start_time,
        seed="a",
    )


def promoted_world(path: str = "eagle31", **spec: Any) -> tuple[World, str]:
    """Return a world that was built with drafter `eagle3` and serves with another one, and the revision that built its pods.

    It has what a promotion in place leaves: the drafter in the status, its ConfigMap, and the record of its revision.
    """
    world = serving_world(**{"rollout": IN_PLACE, **spec})
    built = world.desired_revision
    world.drafter(path)
    resource = SpeculativeDeployment.from_dict(world.document)
    served = compute_revision(resource, Static(K_OF_SPEC))
    drafter = served_drafter(served, path)
    world.document["status"]["stable"] |= {"inPlace": drafter.to_dict(), "drafter": drafter.drafter}
    template = world.objects["Deployment", naming.deployment_name("chat", built, control=False)]["spec"]["template"]
    for config_map in (
        build_expected_drafter_config_map("chat", built, drafter),
        preflight_job.build_preflight_config_map(resource, served, template, {"passed": True}),
    ):
        owner = {"controller": True, "uid": "u1"}
        world.apply({**config_map, "metadata": {**config_map["metadata"], "namespace": "default", "ownerReferences": [owner]}})
    return world, built


def expected_drafters(world: World) -> dict[str, Any]:
    """Return what the plugin reads, by revision of the pods."""
    return {
        item["metadata"]["labels"][naming.REVISION_LABEL]: json.loads(item["data"][naming.EXPECTED_DRAFTER_KEY])
        for (kind, name), item in world.objects.items()
        if kind == "ConfigMap" and name.endswith("-drafter")
    }
