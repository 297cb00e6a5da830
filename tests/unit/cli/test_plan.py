"""What `kubectl aerie plan` says of an apply, and that the operator then does it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.cli.plan import capacity
from aerie.cli.plan.capacity import PodGpus
from aerie.cli.plan.change import ChangeKind, PlannedChange, plan_change
from aerie.cli.plan.consequences import describe_reversal, describe_users
from aerie.cli.plan.document import build_plan_document
from aerie.cli.plan.preflight_summary import PreflightSummary
from aerie.cli.plan.rollout_plan import Forecast, ForecastRow, RolloutPlan
from aerie.cli.plan.screen import render_diff, render_next, render_plan
from aerie.cli.plan.template_diff import build_template_diff
from aerie.rollout.facts.snapshot import ClusterState
from tests.golden import Messages
from tests.unit.rollout.cluster_state import copied
from tests.unit.rollout.in_place_world import IN_PLACE, promoted_world
from tests.unit.rollout.world import World, masked, monitored_world, serving_world, world_in_phase

GPUS = {"engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": "2"}}}}


# -- states and edits
def rejected_world() -> World:
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.status["canary"]["revision"])
    world.settle()
    assert world.status["phase"] == "RolledBack"
    world.drafter("eagle3")
    world.settle()
    return world


def starting_world() -> World:
    world = World()
    world.settle_until("Starting")
    return world


def world_rolling_out_in_place() -> World:
    world = serving_world(rollout=IN_PLACE)
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    assert world.status["inPlaceRollout"]["phase"] == "Staging"
    return world


STATES: dict[str, Callable[[], World]] = {
    "ready": serving_world,
    "ready, in place": lambda: serving_world(rollout=IN_PLACE),
    "promoted in place": lambda: promoted_world()[0],
    "rolling out in place": world_rolling_out_in_place,
    "first revision starts": starting_world,
    "canary starts": lambda: world_in_phase("Starting")[0],
    "canary is analyzed": lambda: world_in_phase("Analyzing")[0],
    "ramp": lambda: world_in_phase("Ramping", replicas=4)[0],
    "monitored": lambda: monitored_world()[0],
    "rejected before": rejected_world,
}
EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "drafter eagle31": {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle31"}}}},
    "drafter eagle3": {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}}},
    "drafter other": {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}}},
    "K 5": {"speculation": {"numSpeculativeTokens": 5}},
    "more pods": {"replicas": 5},
    "image": {"engine": {"image": "vllm/vllm-openai:v0.32.0"}},
    "unknown release": {"engine": {"image": "vllm/vllm-openai:latest"}},
    "margin": {"rollout": {"analysis": {"margin": 0.05}}},
    "no budgets": {"rollout": {"disruption": {"budget": "None"}}},
    "in place": {"rollout": {"inPlace": {"mode": "Auto"}}},
}


@cache
def _state(name: str) -> World:
    return STATES[name]()


def state(name: str) -> World:
    return copy.deepcopy(_state(name))


def plan_edit(world: World, **spec: Any) -> PlannedChange:
    """Return what an apply of this edit would do; the world has it then."""
    live = copied(world.document)
    if spec:
        world.edit(**spec)
    return plan_change(copied(world.document), world.observed().cluster, live, world.now, world.catalog)


# -- the operator does what was planned
def carry_out(world: World, before: Status, revision: str) -> ChangeKind | None:
    """Reconcile until the operator starts this revision, and return how; None if it comes to rest without."""
    started = (arm.revision for arm in (before.canary, before.in_place_rollout) if arm is not None)
    is_new = revision not in started
    for number in range(40):
        earlier = copied((world.document, world.objects, world.pods))
        status = world.step().status
        if is_new and status.canary is not None and status.canary.revision == revision:
            return "Canary" if status.stable is not None else "FirstRevision"
        if is_new and status.in_place_rollout is not None and status.in_place_rollout.revision == revision:
            return "InPlace"
        world.check()
        if number > 3:  # first what is known now, then pods that start and end
            world.schedule()
            world.ready()
            if earlier == (world.document, world.objects, world.pods):
                return None
        world.now += timedelta(seconds=10)
    raise AssertionError(f"it never rests: {world.status['phase']}, {world.message('Progressing')}")


@pytest.mark.parametrize("name", STATES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(edits=st.lists(st.sampled_from(sorted(EDITS)), min_size=1, max_size=2, unique=True))
def test_the_operator_starts_what_was_planned(name: str, edits: list[str]) -> None:
    world = state(name)
    before = Status.from_dict(world.status)
    deployments = set(world.deployments())
    spec: dict[str, Any] = {}
    for edit in edits:
        spec |= EDITS[edit]
    if "rollout" in spec:
        spec["rollout"] = world.document["spec"]["rollout"] | spec["rollout"]
    change = plan_edit(world, **spec)
    assert change.desired.revision == world.desired_revision
    replicas, budgets = world.replicas(), {key for key in world.objects if key[0] == "PodDisruptionBudget"}
    kind = carry_out(world, before, change.desired.revision)
    if change.kind in ("Canary", "InPlace", "FirstRevision"):
        assert kind == change.kind
        arm = world.status.get("canary") or world.status["inPlaceRollout"]
        assert arm["change"] == change.description
        if kind == "Canary" and world.status["canary"]["phase"] == "Starting":
            need = capacity.count_pods(change)
            written = world.deployments()[change.desired.revision]["spec"]["replicas"]
            controls = sum(item["spec"]["replicas"] for item in world.deployments(control=True).values())
            assert (written, controls) == (need.canary, need.control)
        return
    assert kind is None
    if change.kind in ("Impossible", "Rejected"):
        assert change.desired.revision not in set(world.deployments()) - deployments
    if change.kind in ("Unchanged", "Settings") and not (change.superseded or before.canary or before.previous):
        assert world.replicas() == replicas
        assert {key for key in world.objects if key[0] == "PodDisruptionBudget"} == budgets
    if change.kind == "Scaling":
        assert change.objects
        assert world.replicas() != replicas
    if change.kind not in ("Impossible", "Rejected", "Continues"):
        assert change.status.stable is not None
        assert world.status["stable"]["revision"] == change.status.stable.revision


@pytest.mark.parametrize(
    ("name", "edit", "kind"),
    [
        ("ready", "nothing", "Unchanged"),
        ("ready", "margin", "Settings"),
        ("ready", "no budgets", "Network"),
        ("ready", "more pods", "Scaling"),
        ("ready", "drafter eagle31", "Canary"),
        ("ready", "unknown release", "Impossible"),
        ("ready, in place", "drafter eagle31", "InPlace"),
        ("ready, in place", "image", "Canary"),
        ("promoted in place", "drafter eagle3", "InPlace"),
        ("first revision starts", "drafter eagle31", "FirstRevision"),
        ("canary is analyzed", "nothing", "Continues"),
        ("canary is analyzed", "drafter eagle3", "Withdrawn"),
        ("canary is analyzed", "drafter other", "Canary"),
        ("monitored", "drafter eagle3", "Reverted"),
        ("monitored", "drafter other", "Canary"),
        ("rejected before", "drafter eagle3", "Unchanged"),
    ],
)
def test_kinds(name: str, edit: str, kind: ChangeKind) -> None:
    change = plan_edit(state(name), **EDITS[edit])
    assert change.kind == kind, change.message
    in_progress = name in ("canary is analyzed", "first revision starts") and edit != "nothing"
    assert (change.superseded is not None) == in_progress


def test_a_rejected_revision_is_not_tried_again() -> None:
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.status["canary"]["revision"])
    world.settle()
    change = plan_edit(world, replicas=3)
    assert change.kind == "Rejected"
    assert build(change).exit_status == 1
    assert build(change).next_commands == ("kubectl aerie retry chat -n default --context=eu",)


def test_without_preflight_a_canary_may_follow_instead_of_a_change_in_place() -> None:
    change = plan_edit(state("ready, in place"), **EDITS["drafter eagle31"])
    assert "a canary with new pods follows instead" in build(change, preflight=PreflightSummary("NotChecked", "No.")).headline
    assert "canary" not in build(change).headline


def test_a_pause_hides_no_change() -> None:
    world = state("ready")
    change = plan_edit(world, **EDITS["drafter eagle31"], rollout={"paused": True})
    assert change.is_paused
    assert change.kind == "Canary"
    assert carry_out(world, Status.from_dict(world.status), change.desired.revision) is None
    world.edit(rollout={"paused": False})
    assert carry_out(world, Status.from_dict(world.status), change.desired.revision) == "Canary"


def test_a_new_resource_has_a_first_revision() -> None:
    world = World()
    change = plan_change(world.document, ClusterState("chat"), None, world.now, world.catalog)
    assert change.kind == "FirstRevision"
    assert capacity.count_pods(change).extra == 2


# -- room
def node(name: str, gpus: int = 8, taint: str = "", *, cordoned: bool = False, **labels: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"unschedulable": True} if cordoned else {}
    if taint:
        spec["taints"] = [{"key": taint, "effect": "NoSchedule"}]
    labels = {"nvidia.com/gpu.product": "H100", **labels}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


def pod(on: str | None, gpus: int) -> dict[str, Any]:
    spec = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
    return {"metadata": {"name": "x"}, "spec": spec | ({"nodeName": on} if on else {})}


def template(**spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}], **spec}}


def room_of(pod_template: dict[str, Any], *nodes: dict[str, Any], pods: tuple[dict[str, Any], ...] = ()) -> Any:
    return capacity.compute_room(pod_template, capacity.read_pod_gpus(pod_template), nodes, pods)


def test_room_is_counted_by_node() -> None:
    room = room_of(
        template(), node("a"), node("b", 3), node("c", 8, "gpu"), node("d", cordoned=True), pods=(pod("a", 5), pod(None, 1))
    )
    assert [(each.name, each.free, each.pods) for each in room.nodes] == [("a", 3, 1), ("b", 3, 1)]
    assert (room.excluded, room.pending, room.pods) == (2, 1, 2)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({}, ["a", "b"]),
        ({"nodeSelector": {"zone": "1"}}, ["a"]),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, ["a", "b", "c"]),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": "3"}}, ["c"]),
        *(
            (
                {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}},
                names,
            )
            for terms, names in (
                ([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["2", "3"]}]}], ["b"]),
                ([{"matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["1"]}]}], ["b"]),
                ([{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["1"]}]}, {}], ["b"]),
                ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}], ["a"]),
                ([{"matchExpressions": [{"key": "other", "operator": "DoesNotExist"}]}], ["a", "b"]),
            )
        ),
    ],
)
def test_nodes_admit_pods(spec: dict[str, Any], names: list[str]) -> None:
    nodes = (node("a", zone="1"), node("b", zone="2"), node("c", taint="gpu", zone="3"))
    assert sorted(each.name for each in room_of(template(**spec), *nodes).nodes) == names


def test_gpus_of_a_pod() -> None:
    assert capacity.read_pod_gpus({"spec": {"containers": [{}]}}) == PodGpus()
    assert capacity.read_pod_gpus(template()) == PodGpus("nvidia.com/gpu", 2)
    mig = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/mig-3g.40gb": "1"}}}]}}
    assert capacity.read_pod_gpus(mig) == PodGpus("nvidia.com/mig-3g.40gb", 1)
    init = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    assert capacity.read_pod_gpus(template(initContainers=[init])).count == 4
    assert capacity.read_pod_gpus(template(initContainers=[{**init, "restartPolicy": "Always"}])).count == 6
    assert capacity.read_pod_gpus(template(resourceClaims=[{"name": "gpu"}])).count is None
    both = template(initContainers=[{"resources": {"limits": {"amd.com/gpu": "1"}}}])
    assert "several kinds" in capacity.read_pod_gpus(both).problem


# -- the diff
def test_the_diff_shows_no_secret() -> None:
    before, after = (
        {
            "spec": {
                "containers": [
                    {
                        "args": ["--max-model-len=8192", f"--api-key={key}", "--ssl-password", key],
                        "env": [{"name": "HF_TOKEN", "value": key}, {"name": "NCCL_DEBUG", "value": key[-1]}],
                    }
                ]
            }
        }
        for key in ("sesame-1", "sesame-2")
    )
    diff = build_template_diff(before, after, ("old", "new"))
    assert "sesame" not in diff
    assert sum(line.startswith("+") for line in diff.splitlines()) == 1 + 4
    assert "+      value: '2'" in diff
    assert "--max-model-len" in build_template_diff(None, after, ("none", "new"))
    assert "sesame" not in build_template_diff(None, after, ("none", "new"))
    assert build_template_diff(before, before, ("old", "old")) == ""


# -- screens
def build(change: PlannedChange, **fields: Any) -> RolloutPlan:
    before, after = change.read_templates()
    need, gpus = capacity.count_pods(change), capacity.read_pod_gpus(after)
    preflight = PreflightSummary("Passed", "Preflight passed: 31 passed.", passed=31)
    plan = RolloutPlan(
        *("default", "chat", "chat.yaml", ("--context=eu",)),
        change=change,
        preflight=preflight,
        need=need,
        gpus=gpus,
        room=None,
        room_problem="",
        forecast=Forecast("Set --requests-per-second of one pod for the time until the verdict, and its chances."),
        users=tuple(describe_users(change)),
        reversal=describe_reversal(change),
        diff=build_template_diff(before, after, ("old", "new")) if fields.pop("diff", False) else None,
    )
    return replace(plan, **fields)


def plans() -> dict[str, RolloutPlan]:
    rows = (ForecastRow(0.03, 1440, 1.0, 0.0), ForecastRow(0, 10416, 0.893, 0.007), ForecastRow(-0.03, None, 0.0, 0.0))
    forecast = Forecast("Until the verdict, by tokens per step; more: aerie forecast -f chat.yaml", rows)
    world = serving_world(**GPUS)
    canary = plan_edit(world, **EDITS["drafter eagle31"])
    pod_template = canary.read_templates()[1] or {}
    gpus = capacity.read_pod_gpus(pod_template)
    rooms = [
        capacity.compute_room(pod_template, gpus, nodes, [pod("gpu-1", 4), pod(None, 1)])
        for nodes in ([node("gpu-1"), node("gpu-2")], [node("gpu-1", 6), node("gpu-2", taint="other")])
    ]
    rejected, _ = world_in_phase("Analyzing")
    rejected.annotate(rollback=rejected.status["canary"]["revision"])
    rejected.settle()
    failed = PreflightSummary("Failed", "Preflight failed: 1 error, 30 passed.")
    return {
        "canary, room": build(canary, room=rooms[0], forecast=forecast, diff=True),
        "canary, no room": build(canary, room=rooms[1]),
        "canary, nodes unknown": build(canary, room_problem="nodes is forbidden: ask for the right to list nodes and pods."),
        "in place": build(plan_edit(state("ready, in place"), **EDITS["drafter eagle31"]), forecast=forecast),
        "in place is not possible": build(plan_edit(state("ready, in place"), **EDITS["drafter eagle31"], **EDITS["K 5"])),
        "superseding": build(plan_edit(state("canary is analyzed"), **EDITS["drafter other"])),
        "scaling": build(plan_edit(state("ready"), replicas=5)),
        "nothing": build(plan_edit(state("ready"))),
        "paused": build(plan_edit(state("ready"), **EDITS["drafter eagle31"], rollout={"paused": True})),
        "rejected before": build(plan_edit(rejected, replicas=3)),
        "preflight fails": build(canary, preflight=failed),
        "impossible": build(plan_edit(state("ready"), **EDITS["unknown release"])),
        "reuse": build(plan_edit(state("ready"), replicas=4, **EDITS["K 5"], rollout={"canary": {"capacity": "Reuse"}})),
        "reverted": build(plan_edit(state("monitored"), **EDITS["drafter eagle3"])),
    }


@pytest.mark.parametrize("width", [80, 130])
def test_screens_fit_the_terminal(width: int, messages: Messages) -> None:
    for name, plan in plans().items():
        console = Console(width=width, highlight=False, color_system=None)
        with console.capture() as capture:
            console.print(render_plan(plan))
        text = "\n".join(line.rstrip() for line in capture.get().splitlines())
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= 36
        text += f"\n{render_next(plan)}"
        if plan.diff is not None:
            text += f"\n\n{render_diff(plan.diff)}"
        messages.check(f"{name}, {width} columns", masked(text))


def test_documents_have_the_documented_fields() -> None:
    documents = {name: build_plan_document(plan) for name, plan in plans().items()}
    assert len({tuple(document) for document in documents.values()}) == 1
    canary = documents["canary, room"]
    assert (canary["verdict"], canary["change"]["kind"], canary["pods"]["extra"], canary["pods"]["gpusPerPod"]) == (
        "Apply",
        "Canary",
        2,
        2,
    )
    assert canary["pods"]["fit"] is True
    assert documents["canary, no room"]["pods"]["fit"] is False
    assert documents["canary, nodes unknown"]["pods"]["fit"] is None
    assert [row["effectPercent"] for row in canary["forecast"]] == [3, 0, -3]
    assert documents["nothing"]["verdict"] == "Nothing"
    assert documents["preflight fails"]["verdict"] == "Rejected"
    assert SpeculativeDeployment.from_dict(state("ready").document).metadata.name == canary["name"]
