"""Reasons why a change is rolled out by pods instead of in place: each with its field, its value and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aerie.api.status import DrafterLocation
from aerie.engine.drafter_endpoint.calls import DrafterSource
from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.engine.drafter_endpoint.state import DrafterState, PreparedDrafter, Problem
from aerie.manifests import preflight_job
from aerie.rollout.facts.drafters import DrafterObservation
from aerie.rollout.in_place.eligibility import find_in_place_obstacle
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie.rollout.revision.drafter_change import find_running_drafter, is_of_drafter_alone
from aerie.rollout.revision.preflight_result import read_preflight_result
from aerie.rollout.trials.effective_setting import resolve_effective_setting
from tests.golden import Messages
from tests.unit.rollout.in_place_world import IN_PLACE, promoted_world
from tests.unit.rollout.world import World, masked, serving_world

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
ON_HUB = {"source": {"huggingFace": {"repo": "me/eagle3", "revision": COMMIT}}}


def state(**fields: Any) -> DrafterState:
    empty: dict[str, Any] = dict.fromkeys(DrafterState.__dataclass_fields__)
    return DrafterState(**{**empty, "process_id": "0" * 32, "windows": (), **fields})


def prepared(path: str, problem: Problem | None) -> PreparedDrafter:
    source = DrafterSource(folder=f"/models/drafters/{path}")
    return PreparedDrafter(source, "Failed" if problem else "Running", 1.0, None, "", None, problem)


def obstacle(
    world: World, observation: DrafterObservation | None = None, record: dict[str, Any] | None = None
) -> tuple[str | None, bool]:
    """Return the obstacle, and whether the change is of the drafter alone. `observation`: of the first pod by name."""
    observed = world.observed()
    if observation is not None:
        pod = min(pod["metadata"]["name"] for pod in observed.cluster.pods)
        observed = replace(observed, engines=replace(observed.engines, drafters={pod: observation}))
    setting = resolve_effective_setting(observed, world.now)
    desired = resolve_desired_revision(observed.resource, "", setting.setting, setting.trial)
    result = replace(read_preflight_result(observed, desired.revision, world.now), record=record)
    assert observed.resource.status is not None
    stable = observed.resource.status.stable
    assert stable is not None
    text = find_in_place_obstacle(observed, desired, stable, result)
    return text and masked(text, STABLE=stable.revision), is_of_drafter_alone(observed, desired, stable)


def with_drafter(drafter: dict[str, Any]) -> Callable[[World], None]:
    return lambda world: world.edit(drafter=drafter)


def on_claim(claim: str = "models", path: str = "eagle31") -> dict[str, Any]:
    return {"source": {"persistentVolumeClaim": {"claimName": claim, "path": path}}}


def drop_record(world: World) -> None:
    world.drafter("eagle31")
    observed = world.observed()
    assert observed.resource.status is not None
    assert observed.resource.status.stable is not None
    del world.objects["ConfigMap", preflight_job.preflight_job_name("chat", observed.resource.status.stable.revision)]


def edit_record(world: World) -> None:
    """Write another drafter into the record, as a user with write access to ConfigMaps could."""
    world.drafter("eagle31")
    for (kind, name), item in world.objects.items():
        if kind == "ConfigMap" and name.endswith("-preflight"):
            document = json.loads(item["data"]["resource.json"])
            document["spec"]["drafter"] = on_claim(path="other")
            item["data"]["resource.json"] = json.dumps(document)


def edit_with_drafter(**spec: Any) -> Callable[[World], None]:
    return lambda world: world.edit(drafter=on_claim(), **spec)


def not_ready(world: World) -> None:
    world.drafter("eagle31")
    world.ready(value="False")


def without_plugin(world: World) -> None:
    world.drafter("eagle31")
    for (kind, _), item in world.objects.items():
        if kind == "Deployment":
            item["spec"]["template"]["spec"]["volumes"] = []


EDITS: dict[str, tuple[Callable[[World], None], bool]] = {
    "mode Off": (edit_with_drafter(rollout={"inPlace": {"mode": "Off"}}), True),
    "K too": (edit_with_drafter(speculation={"numSpeculativeTokens": 5}), False),
    "draft sampling too": (edit_with_drafter(speculation={"draftSampling": "Probabilistic"}), False),
    "engine and target too": (
        edit_with_drafter(
            engine={"image": "vllm/vllm-openai:v0.32.0"},
            model={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}},
        ),
        False,
    ),
    "no record": (drop_record, False),
    "edited record": (edit_record, False),
    "no ready pod": (not_ready, True),
    "pods without the plugin": (without_plugin, True),
    "other claim": (with_drafter(on_claim("archive")), True),
    "image": (with_drafter({"source": {"image": {"reference": f"models.example/a@sha256:{'0' * 64}"}}}), True),
    "inside the target": (with_drafter(on_claim(path="target")), True),
}


@pytest.mark.parametrize("name", EDITS)
def test_reason_of_a_spec(name: str, messages: Messages) -> None:
    world = serving_world(rollout=IN_PLACE)
    edit, is_alone = EDITS[name]
    edit(world)
    text, alone = obstacle(world)
    assert text is not None
    assert alone is is_alone
    messages.check(name, text)


OBSERVATIONS: dict[str, DrafterObservation] = {
    "unfit": DrafterObservation(state(unfit=Problem("TiedWeights", "two modules of the drafter have one parameter."))),
    "no endpoint": DrafterObservation(problem=EndpointProblem("NoEndpoint", "the pod has no drafter endpoint.", 404)),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_reason_of_a_pod(name: str, messages: Messages) -> None:
    world = serving_world(rollout=IN_PLACE)
    world.drafter("eagle31")
    text, _ = obstacle(world, OBSERVATIONS[name])
    assert text is not None
    messages.check(f"pod: {name}", text)


@pytest.mark.parametrize(
    "observation",
    [
        None,
        DrafterObservation(),
        DrafterObservation(problem=EndpointProblem("Timeout", "no answer."), failed_reads=3),
        DrafterObservation(state(prepared=prepared("eagle31", None))),
        DrafterObservation(state(prepared=prepared("eagle31", Problem("Config", "it was rejected an hour ago.")))),
    ],
)
def test_no_reason(observation: DrafterObservation | None) -> None:
    world = serving_world(rollout=IN_PLACE)
    world.drafter("eagle31")
    assert obstacle(world, observation) == (None, True)
    assert obstacle(world, observation, {"passed": None, "mode": "Off"}) == (None, True), "pods check the drafter too"


def test_preflight_counts_for_the_pods_that_it_compared_with(messages: Messages) -> None:
    world = serving_world(rollout=IN_PLACE)
    stable = world.desired_revision
    world.drafter("eagle31")
    problems = ["config.json has hidden_size 64, not 32: roll it out by pods."]
    text, alone = obstacle(world, record={"inPlaceRunning": stable, "inPlaceProblems": problems})
    assert alone
    messages.check("preflight", text or "")
    assert obstacle(world, record={"inPlaceRunning": stable, "inPlaceProblems": []}) == (None, True)
    assert obstacle(world, record={"inPlaceRunning": "other", "inPlaceProblems": problems}) == (None, True)


def test_an_obstacle_of_the_plugin_is_named(messages: Messages) -> None:
    engine = {"image": "vllm/vllm-openai:v0.33.0", "args": ["--pipeline-parallel-size=2"]}
    world = serving_world(rollout=IN_PLACE, engine=engine)
    world.drafter("eagle31")
    text, _ = obstacle(world)
    messages.check("plugin", text or "")


@pytest.mark.parametrize("mode", ["Off", "Auto", "Required"])
def test_a_return_to_the_drafter_of_the_pods_is_in_place_in_every_mode(mode: str) -> None:
    world, built = promoted_world()
    world.edit(rollout={"inPlace": {"mode": mode}})
    world.drafter("eagle3")
    assert world.desired_revision == built
    assert obstacle(world) == (None, True)
    world.ready(value="False")
    assert obstacle(world) == (None, True)


def test_a_third_drafter_is_compared_with_the_served_revision_and_read_by_the_pods() -> None:
    world, built = promoted_world()
    world.drafter("weak")
    assert obstacle(world) == (None, True)
    observed = world.observed()
    running = find_running_drafter(observed, resolve_desired_revision(observed.resource))
    assert running is not None
    assert running.revision == built, "the drafter of the engines' arguments is the measure"
    assert running.promoted == "", "it is on the claim"
    assert running.resource.spec.drafter == serving_world().observed().resource.spec.drafter
    world.drafter("eagle3")
    observed = world.observed()
    assert find_running_drafter(observed, resolve_desired_revision(observed.resource)) is None, "nothing to compare"


def test_preflight_knows_a_promoted_drafter_of_the_hub() -> None:
    world, built = promoted_world()
    world.drafter("weak")
    observed = world.observed()
    desired, status = resolve_desired_revision(observed.resource), observed.resource.status
    assert status is not None
    assert status.stable is not None
    assert status.stable.in_place is not None
    location = DrafterLocation(repository="me/better", commit="1" * 40)
    in_place = status.stable.in_place.model_copy(update={"location": location})
    stable = status.stable.model_copy(update={"in_place": in_place})
    resource = observed.resource.model_copy(update={"status": status.model_copy(update={"stable": stable})})
    running = find_running_drafter(replace(observed, resource=resource), desired)
    assert running is not None
    assert (running.revision, running.promoted) == (built, "me/better@" + "1" * 40)


def test_pods_with_a_claim_can_change_to_a_drafter_of_the_hub() -> None:
    world = serving_world(rollout=IN_PLACE)
    with_drafter(ON_HUB)(world)
    assert obstacle(world) == (None, True)
    observed = world.observed()
    running = find_running_drafter(observed, resolve_desired_revision(observed.resource))
    assert running is not None, "preflight compares the two"


def test_pods_with_a_drafter_of_the_hub_cannot_change_to_a_claim(messages: Messages) -> None:
    world = serving_world(rollout=IN_PLACE, drafter=ON_HUB)
    with_drafter(on_claim())(world)
    text, alone = obstacle(world)
    assert alone
    messages.check("Hub to claim", text or "")


@pytest.mark.parametrize("name", [name for name in EDITS if name not in ("no ready pod", "pods without the plugin")])
def test_preflight_compares_only_what_may_go_in_place(name: str) -> None:
    world = serving_world(rollout=IN_PLACE)
    EDITS[name][0](world)
    observed = world.observed()
    assert find_running_drafter(observed, resolve_desired_revision(observed.resource)) is None
