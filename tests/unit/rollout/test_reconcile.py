"""The plan without a comparison: first revisions, rejections, repairs.

Canaries are tested in test_transition.py, random events of a resource in test_rollouts.py.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests import preflight_job
from aerie.rollout.reconcile import with_apply_errors
from tests.golden import Messages
from tests.unit.rollout.world import START, World, masked, serving_world


def test_first_revision_gets_preflight_before_pods() -> None:
    world = World()
    world.step()
    assert world.status["phase"] == "Preflight"
    assert world.deployments() == {}
    assert ("Job", preflight_job.preflight_job_name("chat", world.desired_revision)) in world.objects
    world.check()
    world.step()
    assert list(world.deployments()) == [world.desired_revision]
    assert world.status["phase"] == "Starting"
    assert world.status.get("stable") is None
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "Ready"
    assert world.status["stable"]["revision"] == world.desired_revision
    assert world.status["stable"]["drafter"] == "models/eagle3"
    assert world.condition("Ready") == ("True", "AllPodsReady")
    assert world.status["rolloutHistory"][0]["result"] == "Promoted"


def test_rejected_drafter_gets_no_pod_and_a_reason() -> None:
    world = World(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "refused"}}})
    world.settle()
    assert world.deployments() == {}
    assert world.status["phase"] == "Failed"
    assert world.condition("PreflightPassed") == ("False", "PreflightFailed")
    assert "C9 weights: torn." in world.message("PreflightPassed")
    assert "delete Job" in world.message("PreflightPassed")


def test_rejected_change_keeps_serving_pods() -> None:
    world = serving_world()
    before = copy.deepcopy(world.deployments())
    world.drafter("refused")
    world.settle()
    assert world.deployments() == before
    assert world.condition("Ready") == ("True", "AllPodsReady")
    assert world.condition("PreflightPassed") == ("False", "PreflightFailed")
    assert world.condition("Progressing")[0] == "False"


def test_catalog_change_rolls_out_nothing() -> None:
    row = 'targets = ["acme/big"]\nkind = "eagle3.1"\nrepo = "me/{0}"\nrevision = "{1}"'
    world = World(drafter=None, model={"source": {"huggingFace": {"repo": "acme/big", "revision": "0" * 40}}})
    world.catalog = DrafterCatalog(()).with_user_entries({"one": row.format("one", "1" * 40)})
    world.settle()
    assert world.status["stable"]["drafter"] == "me/one@11111111"
    before = set(world.deployments())
    for rows in ({"a": row.format("better", "2" * 40), "one": row.format("one", "3" * 40)}, {}):
        world.catalog = DrafterCatalog(()).with_user_entries(rows)
        assert world.plan().objects_to_apply == ()
        world.edit(replicas=len(rows) + 1)
        world.settle()
        assert set(world.deployments()) == before
    world.catalog = DrafterCatalog(()).with_user_entries({"a": row.format("better", "2" * 40)})
    world.edit(model={"source": {"huggingFace": {"repo": "acme/big", "revision": "1" * 40}}})
    world.settle()
    assert world.status["stable"]["drafter"] == "me/one@11111111"


def test_late_first_revision_keeps_its_pods() -> None:
    world = World()
    for _ in range(3):
        world.step()
        world.check()
        world.schedule()
    world.now += timedelta(hours=1)
    world.step()
    assert list(world.deployments()) == [world.desired_revision]
    assert world.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    world.ready()
    world.step()
    assert world.status["phase"] == "Ready", "late pods count"


def test_preflight_error_without_result_is_retried() -> None:
    world = World()
    world.step()
    name = preflight_job.preflight_job_name("chat", world.desired_revision)
    world.conclude(name, {"passed": None, "error": "the Hub does not answer"})
    plan = world.step()
    assert plan.requeue_after is not None
    assert world.condition("PreflightPassed") == ("Unknown", "PreflightError")
    assert "the Hub does not answer" in world.message("PreflightPassed")
    assert ("Job", name) in world.objects
    world.now += timedelta(minutes=6)
    world.checks.clear()
    world.step()
    assert ("Job", name) not in world.objects
    world.settle()
    assert world.status["phase"] == "Ready"


def test_paused_changes_only_the_status() -> None:
    world = serving_world()
    world.edit(rollout={"paused": True}, replicas=5)
    plan = world.step()
    assert (plan.objects_to_apply, plan.objects_to_delete) == ((), ())
    assert world.status["phase"] == "Paused"
    world.edit(rollout={})
    world.settle()
    assert (world.status["phase"], len(world.pods)) == ("Ready", 5)


def test_orphans_of_deleted_resource_neither_serve_nor_block(messages: Messages) -> None:
    world = serving_world()
    for pod in world.pods:
        pod["metadata"]["creationTimestamp"] = (START - timedelta(hours=1)).isoformat()
    del world.document["status"]
    world.document["metadata"] |= {"uid": "u2", "creationTimestamp": START.isoformat()}
    for _ in range(3):
        plan = world.step()
        assert (plan.objects_to_apply, plan.objects_to_delete) == ((), ())
        assert plan.requeue_after is not None
        assert plan.requeue_after <= timedelta(seconds=10)
    assert world.status["phase"] == "Preflight", "the previous Job may have checked other files"
    assert world.condition("Degraded") == ("False", "AsExpected")
    world.objects.clear()  # the garbage collector has run; pods are deleted last
    for _ in range(3):
        world.step()
        world.check()
    assert list(world.deployments()) == [world.desired_revision]
    assert world.condition("Ready")[0] == "False"
    messages.check("no pod ready", masked(world.message("Ready"), NEW=world.desired_revision))
    world.pods = []
    world.settle()
    assert world.status["phase"] == "Ready"
    assert len(world.status["rolloutHistory"]) == 1


def test_replicas_change_at_any_time_without_a_new_revision() -> None:
    world = serving_world()
    before = world.desired_revision
    world.edit(replicas=3)
    world.step()
    assert world.deployments()[before]["spec"]["replicas"] == 3
    assert world.condition("Ready")[0] == "False"
    world.settle()
    assert world.condition("Ready") == ("True", "AllPodsReady")
    world.edit(replicas=0)
    world.settle()
    assert world.condition("Ready") == ("True", "ScaledToZero")


def test_edited_or_deleted_child_is_restored() -> None:
    world = serving_world()
    before = copy.deepcopy(world.objects)
    world.objects["Service", "chat"]["spec"]["selector"] = {"app": "other"}
    del world.objects["PodDisruptionBudget", f"chat-{world.desired_revision}"]
    world.step()
    for key in before:
        world.objects[key]["metadata"]["uid"] = before[key]["metadata"]["uid"]
    assert world.objects == before


def test_name_conflict_is_reported_and_left_alone(messages: Messages) -> None:
    world = World()
    owner = {"kind": "Deployment", "name": "other", "controller": True, "uid": "u9"}
    world.name_conflicts = [{"kind": "Service", "metadata": {"name": "chat", "uid": "s", "ownerReferences": [owner]}}]
    world.settle()
    assert ("Service", "chat") not in world.objects
    assert world.condition("Degraded") == ("True", "NameTaken")
    messages.check("name conflict", world.message("Degraded"))


def test_api_rejection_is_reported_with_one_event(messages: Messages) -> None:
    world = World()
    plan = with_apply_errors(world.plan(), None, ["Deployment chat: spec.template.spec.nope: unknown field"], world.now)
    condition = next(condition for condition in plan.status.conditions if condition.type == "Degraded")
    assert (condition.status, condition.reason) == ("True", "ApplyFailed")
    messages.check("apply error", condition.message)
    second = with_apply_errors(world.plan(), plan.status, ["Deployment chat: spec.template.spec.nope: unknown field"], world.now)
    assert [event.reason for event in plan.events].count("ApplyFailed") == 1
    assert [event.reason for event in second.events].count("ApplyFailed") == 0


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"drafter": None}, "spec.drafter is missing"),
        ({"engine": {"image": "vllm/vllm-openai:latest"}}, "version"),
        ({"engine": {"image": "vllm/vllm-openai:v0.33.0", "args": ["--nnodes=2"]}}, "--nnodes"),
        (
            {
                "engine": {
                    "image": "a/b:v0.33.0",
                    "version": "0.33.0",
                    "podTemplate": {"spec": {"containers": [{"name": "engine", "args": ["a"]}]}},
                }
            },
            "write spec.engine.args",
        ),
    ],
)
def test_unrunnable_spec_is_reported_without_job(spec: dict[str, Any], text: str) -> None:
    world = World(**spec)
    world.settle()
    assert world.condition("PreflightPassed") == ("False", "InvalidSpec")
    assert text in world.message("Progressing")
    assert not [key for key in world.objects if key[0] in ("Job", "Deployment")]


def test_leaving_mode_gateway_deletes_the_route() -> None:
    gateway = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}}
    world = serving_world(rollout=gateway)
    assert {("HTTPRoute", "chat"), ("Service", "chat-stable")} <= world.objects.keys()
    world.edit(rollout={})
    world.settle()
    assert not {("HTTPRoute", "chat"), ("Service", "chat-stable")} & world.objects.keys()


def test_without_tokens_there_is_no_drafter() -> None:
    world = serving_world(speculation={"numSpeculativeTokens": 0})
    (deployment,) = world.deployments().values()
    (engine,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--speculative-config" not in engine["args"]
    assert world.status["stable"]["setting"] == {"mode": "Off", "numSpeculativeTokens": 0}


def test_invalid_metrics_source_condition_survives_restart() -> None:
    world = serving_world(metrics={"source": {"prometheus": {"address": "http://prometheus:9090"}}})
    assert world.condition("Degraded") == ("False", "AsExpected")
    world.metrics_source_error = "http://prometheus:9090 cannot be reached"
    plan = world.step()
    assert [(event.type, event.reason, event.message) for event in plan.events] == [
        ("Warning", "MetricsUnavailable", "http://prometheus:9090 cannot be reached")
    ]
    assert world.condition("Degraded") == ("True", "MetricsUnavailable")
    assert world.condition("Ready") == ("True", "AllPodsReady")
    before = copy.deepcopy(world.status)
    world.metrics_source_error = None  # another operator, which has not read the source yet
    assert world.step().events == ()
    assert world.status == before
    world.metrics_source_error = ""
    world.step()
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_removed_metrics_source_ends_its_condition() -> None:
    world = serving_world(metrics={"source": {"prometheus": {"address": "http://prometheus:9090"}}})
    world.metrics_source_error = "http://prometheus:9090 cannot be reached"
    world.step()
    world.edit(metrics={})
    world.metrics_source_error = None
    world.step()
    assert world.condition("Degraded") == ("False", "AsExpected")
    assert world.status["phase"] == "Ready", "the metrics source is not part of a revision"
