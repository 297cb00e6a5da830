"""The step from what was observed to what is to be done, in a world that does what Kubernetes would.

The world keeps objects, and its pods start, crash and go; the operator may crash after any part of a plan. Whatever happens,
what serves is not taken away, no engine starts before its preflight has passed, and in the end the spec is what runs.
"""

from __future__ import annotations

import copy
import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aerie.api import SpeculativeDeployment
from aerie.engine.catalog import Catalog
from aerie.resources import names, preflight
from aerie.rollout.choice import choose
from aerie.rollout.decide import decide, read_wanted, refused
from aerie.rollout.observed import Observed
from aerie.rollout.plan import Plan

IMAGE = "aerie.dev/aerie:test"
START = datetime(2026, 1, 1, tzinfo=UTC)
DRAFTERS = ("eagle3", "eagle31", "refused")


class World:
    """One resource, its children and pods, and a clock."""

    def __init__(self, **spec: Any) -> None:
        self.now = START
        self.counter = itertools.count(1)
        whole = {
            "replicas": 2,
            "model": {"source": {"volumeClaim": {"claimName": "models", "path": "target"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "drafter": {"source": {"volumeClaim": {"claimName": "models", "path": "eagle3"}}},
            **spec,
        }
        self.document: dict[str, Any] = {
            "apiVersion": "aerie.dev/v1alpha1",
            "kind": "SpeculativeDeployment",
            "metadata": {"name": "chat", "namespace": "default", "uid": "u1", "generation": 1},
            "spec": whole,
        }
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.foreign: list[dict[str, Any]] = []
        self.catalog = Catalog(())

    # -- the user
    def edit(self, **spec: Any) -> None:
        self.document["spec"] |= spec
        self.document["metadata"]["generation"] += 1

    def drafter(self, path: str) -> None:
        self.edit(drafter={"source": {"volumeClaim": {"claimName": "models", "path": path}}})

    # -- the operator
    def observed(self) -> Observed:
        return Observed(
            resource=SpeculativeDeployment.from_dict(copy.deepcopy(self.document)),
            children=tuple(copy.deepcopy(list(self.objects.values()))),
            namesakes=tuple(self.foreign),
            pods=tuple(copy.deepcopy(self.pods)),
            preflight_pods=tuple(copy.deepcopy(self.checks)),
        )

    def plan(self) -> Plan:
        return decide(self.observed(), IMAGE, self.now, self.catalog)

    def step(self, parts: int = 1000) -> Plan:
        """One pass, which crashes after `parts` of its writes."""
        plan = self.plan()
        writes: list[Any] = [("apply", item) for item in plan.apply]
        writes += [("delete", reference) for reference in plan.delete]
        writes += [("status", plan.status)]
        for what, item in writes[:parts]:
            if what == "apply":
                self.apply(item)
            elif what == "delete":
                found = self.objects.get((item.kind, item.name))
                assert found is not None
                assert found["metadata"]["uid"] == item.uid
                del self.objects[item.kind, item.name]
            else:
                self.document["status"] = item.to_dict()
        return plan

    def apply(self, item: dict[str, Any]) -> None:
        key = (item["kind"], item["metadata"]["name"])
        uid = self.objects[key]["metadata"]["uid"] if key in self.objects else f"c{next(self.counter)}"
        kept = self.objects.get(key, {}).get("status")
        self.objects[key] = copy.deepcopy(item)
        self.objects[key]["metadata"]["uid"] = uid
        if kept:
            self.objects[key]["status"] = kept

    # -- the cluster
    def deployments(self) -> dict[str, dict[str, Any]]:
        return {
            item["metadata"]["labels"][names.REVISION]: item for (kind, _), item in self.objects.items() if kind == "Deployment"
        }

    def schedule(self) -> None:
        """Make the pods that there should be, and remove those that there should not."""
        kept = []
        for revision, item in self.deployments().items():
            mine = [pod for pod in self.pods if pod["metadata"]["labels"][names.REVISION] == revision]
            count = item["spec"]["replicas"]
            for _ in range(count - len(mine)):
                name = f"{item['metadata']['name']}-{next(self.counter)}"
                labels = item["spec"]["template"]["metadata"]["labels"]
                mine.append({"kind": "Pod", "metadata": {"name": name, "labels": labels}, "status": {"phase": "Pending"}})
            kept += mine[:count]
        self.pods = kept

    def ready(self, revision: str | None = None, value: str = "True") -> None:
        for pod in self.pods:
            if revision in (None, pod["metadata"]["labels"][names.REVISION]):
                pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": value}]}

    def check(self) -> None:
        """Every preflight Job that runs comes to its verdict: the drafter named `refused` is refused."""
        for (kind, name), item in self.objects.items():
            if kind != "Job" or item.get("status") or ("ConfigMap", name) not in self.objects:
                continue  # over, or its pod waits for the volume
            data = json.loads(self.objects["ConfigMap", name]["data"]["resource.json"])
            drafter = data["spec"].get("drafter") or {}
            bad = drafter.get("source", {}).get("volumeClaim", {}).get("path") == "refused"
            self.conclude(name, {"ok": not bad, "summary": "checked.", "refused": ["✗ C9 weights: torn."] if bad else []})

    def conclude(self, name: str, told: dict[str, Any]) -> None:
        job = self.objects["Job", name]
        kind = "Complete" if told["ok"] else "Failed"
        job["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": self.now.isoformat()}]}
        state = {"terminated": {"exitCode": 0 if told["ok"] else 1, "message": json.dumps(told)}}
        labels = job["spec"]["template"]["metadata"]["labels"]
        metadata = {"name": f"{name}-x", "labels": labels, "creationTimestamp": self.now.isoformat()}
        self.checks.append(
            {"kind": "Pod", "metadata": metadata, "status": {"containerStatuses": [{"name": "preflight", "state": state}]}}
        )

    def settle(self) -> None:
        """Passes, pods and Jobs, until nothing changes any more."""
        for _ in range(20):
            before = copy.deepcopy((self.document, self.objects, self.pods))
            self.step()
            self.check()
            self.schedule()
            self.ready()
            if before == (self.document, self.objects, self.pods):
                return
        raise AssertionError("it never settles")

    # -- what is asserted
    @property
    def status(self) -> dict[str, Any]:
        return dict(self.document.get("status") or {})

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(condition for condition in self.status["conditions"] if condition["type"] == kind)
        return found["status"], found["reason"]

    def message(self, kind: str) -> str:
        return str(next(condition for condition in self.status["conditions"] if condition["type"] == kind)["message"])

    @property
    def wanted(self) -> str:
        return read_wanted(choose(self.observed().resource, self.catalog).resource).revision


def serving(**spec: Any) -> World:
    world = World(**spec)
    world.settle()
    return world


# -------------------------------------------------------------------------------------------------------------------- examples
def test_the_first_revision_is_looked_at_before_a_pod_is_made() -> None:
    world = World()
    world.step()
    assert world.status["phase"] == "Preflight"
    assert world.deployments() == {}
    assert ("Job", preflight.name("chat", world.wanted)) in world.objects
    world.check()
    world.step()
    assert list(world.deployments()) == [world.wanted]
    assert world.status["phase"] == "Starting"
    assert world.status.get("stable") is None
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "Ready"
    assert world.status["stable"]["revision"] == world.wanted
    assert world.status["stable"]["drafter"] == "models/eagle3"
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status["history"][0]["result"] == "Promoted"


def test_a_refused_drafter_never_gets_a_pod_and_says_why() -> None:
    world = World(drafter={"source": {"volumeClaim": {"claimName": "models", "path": "refused"}}})
    world.settle()
    assert world.deployments() == {}
    assert world.status["phase"] == "Failed"
    assert world.condition("PreflightPassed") == ("False", "PreflightRefused")
    assert "C9 weights: torn." in world.message("PreflightPassed")
    assert "delete Job" in world.message("PreflightPassed")


def test_a_refused_change_leaves_what_serves_alone() -> None:
    world = serving()
    before = copy.deepcopy(world.deployments())
    world.drafter("refused")
    world.settle()
    assert world.deployments() == before
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("PreflightPassed") == ("False", "PreflightRefused")
    assert world.condition("Progressing")[0] == "False"


def test_a_catalog_that_grows_or_shrinks_rolls_nothing() -> None:
    row = 'targets = ["acme/big"]\nkind = "eagle3.1"\nrepo = "me/{0}"\nrevision = "{1}"'
    world = World(drafter=None, model={"source": {"huggingFace": {"repo": "acme/big", "revision": "0" * 40}}})
    world.catalog = Catalog(()).extended({"one": row.format("one", "1" * 40)})
    world.settle()
    assert world.status["stable"]["drafter"] == "me/one@11111111"
    before = set(world.deployments())
    for rows in ({"a": row.format("better", "2" * 40), "one": row.format("one", "3" * 40)}, {}):
        world.catalog = Catalog(()).extended(rows)
        assert world.plan().apply == ()
        world.edit(replicas=len(rows) + 1)
        world.settle()
        assert set(world.deployments()) == before
    world.catalog = Catalog(()).extended({"a": row.format("better", "2" * 40)})
    world.edit(model={"source": {"huggingFace": {"repo": "acme/big", "revision": "1" * 40}}})
    world.settle()
    assert world.status["stable"]["drafter"] == "me/one@11111111"


def test_a_change_starts_beside_and_replaces_when_it_serves() -> None:
    world = serving()
    old = world.wanted
    world.drafter("eagle31")
    world.step()
    world.check()
    world.step()
    assert set(world.deployments()) == {old, world.wanted}
    assert world.status["canary"]["change"] == "drafter models/eagle31"
    world.schedule()
    world.ready(old)
    world.step()
    assert set(world.deployments()) == {old, world.wanted}
    world.ready()
    world.step()
    assert world.status["stable"]["revision"] == world.wanted
    assert set(world.deployments()) == {old, world.wanted}, "the old one goes when the status that names the new one is written"
    world.step()
    assert set(world.deployments()) == {world.wanted}


def test_a_change_that_never_serves_goes_and_is_not_tried_again() -> None:
    world = serving()
    old = world.wanted
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
        world.schedule()
    world.now += timedelta(minutes=29)
    world.step()
    assert set(world.deployments()) == {old, world.wanted}
    world.now += timedelta(minutes=2)
    world.step()
    world.step()
    assert set(world.deployments()) == {old}
    assert world.status["history"][0]["result"] == "Failed"
    assert world.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    assert world.condition("Ready") == ("True", "Serving")
    world.settle()
    assert set(world.deployments()) == {old}
    world.drafter("eagle3")
    world.settle()
    assert world.status["phase"] == "Ready"


def test_a_first_revision_that_is_late_keeps_its_pods_to_be_looked_at() -> None:
    world = World()
    for _ in range(3):
        world.step()
        world.check()
        world.schedule()
    world.now += timedelta(hours=1)
    world.step()
    assert list(world.deployments()) == [world.wanted]
    assert world.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    world.ready()
    world.step()
    assert world.status["phase"] == "Ready", "late is better than never"


def test_an_error_that_is_no_verdict_is_tried_again_later() -> None:
    world = World()
    world.step()
    name = preflight.name("chat", world.wanted)
    world.conclude(name, {"ok": None, "error": "the Hub does not answer"})
    plan = world.step()
    assert plan.again is not None
    assert world.condition("PreflightPassed") == ("Unknown", "PreflightError")
    assert "the Hub does not answer" in world.message("PreflightPassed")
    assert ("Job", name) in world.objects
    world.now += timedelta(minutes=6)
    world.checks.clear()
    world.step()
    assert ("Job", name) not in world.objects
    world.settle()
    assert world.status["phase"] == "Ready"


def test_paused_changes_nothing_but_the_status() -> None:
    world = serving()
    world.edit(rollout={"paused": True}, replicas=5)
    world.drafter("eagle31")
    plan = world.step()
    assert (plan.apply, plan.delete) == ((), ())
    assert world.status["phase"] == "Paused"
    world.edit(rollout={})
    world.settle()
    assert (world.status["phase"], len(world.pods)) == ("Ready", 5)


def test_what_is_left_of_a_deleted_namesake_neither_serves_nor_stands_in_the_way() -> None:
    world = serving()
    for pod in world.pods:
        pod["metadata"]["creationTimestamp"] = (START - timedelta(hours=1)).isoformat()
    del world.document["status"]
    world.document["metadata"] |= {"uid": "u2", "creationTimestamp": START.isoformat()}
    for _ in range(3):
        plan = world.step()
        assert (plan.apply, plan.delete) == ((), ())
        assert plan.again is not None
        assert plan.again <= timedelta(seconds=10)
    assert world.status["phase"] == "Preflight", "the Job of before has looked at other files, perhaps"
    assert world.condition("Degraded") == ("False", "AsExpected")
    world.objects.clear()  # the garbage collector has come; the pods are the last to go
    for _ in range(3):
        world.step()
        world.check()
    assert list(world.deployments()) == [world.wanted]
    assert world.condition("Ready")[0] == "False"
    assert "0 of 2 pods" in world.message("Ready")
    world.pods = []
    world.settle()
    assert world.status["phase"] == "Ready"
    assert len(world.status["history"]) == 1


def test_replicas_change_at_any_time_without_a_new_revision() -> None:
    world = serving()
    before = world.wanted
    world.edit(replicas=3)
    world.step()
    assert world.deployments()[before]["spec"]["replicas"] == 3
    assert world.condition("Ready")[0] == "False"
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    world.edit(replicas=0)
    world.settle()
    assert world.condition("Ready") == ("True", "ScaledToZero")


def test_a_child_that_was_edited_or_deleted_is_put_back() -> None:
    world = serving()
    plain = copy.deepcopy(world.objects)
    world.objects["Service", "chat"]["spec"]["selector"] = {"app": "other"}
    del world.objects["PodDisruptionBudget", "chat"]
    world.step()
    for key in plain:
        world.objects[key]["metadata"]["uid"] = plain[key]["metadata"]["uid"]
    assert world.objects == plain


def test_a_name_that_is_taken_is_named_and_left_alone() -> None:
    world = World()
    owner = {"kind": "Deployment", "name": "other", "controller": True, "uid": "u9"}
    world.foreign = [{"kind": "Service", "metadata": {"name": "chat", "uid": "s", "ownerReferences": [owner]}}]
    world.settle()
    assert ("Service", "chat") not in world.objects
    assert world.condition("Degraded") == ("True", "NameTaken")
    assert world.message("Degraded").startswith("Service chat belongs to Deployment other")


def test_what_the_api_server_refuses_is_said_and_told_once() -> None:
    world = World()
    plan = refused(world.plan(), None, ["Deployment chat: spec.template.spec.nope: unknown field"], world.now)
    found = next(c for c in plan.status.conditions if c.type == "Degraded")
    assert (found.status, found.reason) == ("True", "Refused")
    assert "spec.nope" in found.message
    again = refused(world.plan(), plan.status, ["Deployment chat: spec.template.spec.nope: unknown field"], world.now)
    assert [event.reason for event in plan.events].count("Refused") == 1
    assert [event.reason for event in again.events].count("Refused") == 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"drafter": None}, "spec.drafter is missing"),
        ({"engine": {"image": "vllm/vllm-openai:latest"}}, "version"),
        ({"engine": {"image": "vllm/vllm-openai:v0.33.0", "args": ["--nnodes=2"]}}, "--nnodes"),
        (
            {"engine": {"image": "a/b:v0.33.0", "podTemplate": {"spec": {"containers": [{"name": "engine", "args": ["a"]}]}}}},
            "write spec.engine.args",
        ),
    ],
)
def test_a_spec_that_cannot_run_is_said_without_a_job(spec: dict[str, Any], said: str) -> None:
    world = World(**spec)
    world.settle()
    assert world.condition("PreflightPassed") == ("False", "InvalidSpec")
    assert said in world.message("Progressing")
    assert not [key for key in world.objects if key[0] in ("Job", "Deployment")]


def test_mode_gateway_has_a_route_and_leaving_it_removes_it() -> None:
    gateway = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}}
    world = serving(rollout=gateway)
    assert {("HTTPRoute", "chat"), ("Service", "chat-stable")} <= world.objects.keys()
    world.edit(rollout={})
    world.settle()
    assert not {("HTTPRoute", "chat"), ("Service", "chat-stable")} & world.objects.keys()


def test_without_tokens_there_is_no_drafter() -> None:
    world = serving(speculation={"tokens": 0})
    (deployment,) = world.deployments().values()
    (engine,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--speculative-config" not in engine["args"]
    assert world.status["stable"]["setting"] == {"mode": "Off", "tokens": 0}


# ---------------------------------------------------------------------------------------------------------------- all that may be
class Rollouts(RuleBasedStateMachine):
    """Users, crashes and pods in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(parts=st.integers(0, 6))
    def a_pass_that_may_crash(self, parts: int) -> None:
        served = (self.world.status.get("stable") or {}).get("revision")
        plan = self.world.step(parts)
        deleted = {reference.name for reference in plan.delete}
        assert f"chat-{served}" not in deleted, "what serves by the status that was read is never deleted"

    @rule(path=st.sampled_from(DRAFTERS))
    def another_drafter(self, path: str) -> None:
        self.world.drafter(path)

    @rule(replicas=st.integers(0, 3))
    def another_size(self, replicas: int) -> None:
        self.world.edit(replicas=replicas)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.world.edit(rollout={"paused": paused})

    @rule()
    def jobs_end(self) -> None:
        self.world.check()

    @rule()
    def pods_come_and_go(self) -> None:
        self.world.schedule()

    @rule(value=st.sampled_from(["True", "False"]))
    def pods_serve(self, value: str) -> None:
        self.world.ready(value=value)

    @rule(minutes=st.sampled_from([1, 31]))
    def time_passes(self, minutes: int) -> None:
        self.world.now += timedelta(minutes=minutes)

    @rule(data=st.data())
    @precondition(lambda self: self.world.objects)
    def somebody_deletes_a_child(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.objects)))
        if key[0] != "Deployment":  # with it go its pods, which is another story
            del self.world.objects[key]

    @invariant()
    def engines_have_passed_preflight(self) -> None:
        for item in self.world.deployments().values():
            arguments = json.dumps(item["spec"]["template"]["spec"])
            assert '"subPath": "refused"' not in arguments

    @invariant()
    def at_most_one_revision_beside_the_stable_one(self) -> None:
        status = self.world.status
        known = {(status.get(arm) or {}).get("revision") for arm in ("stable", "canary")}
        strange = [revision for revision in self.world.deployments() if revision not in known]
        assert len(strange) <= 2, "one that a crash kept out of the status, one that is about to go"

    def teardown(self) -> None:
        """Left alone, it ends with what the spec asks for, and then nothing is written any more."""
        world = self.world
        world.edit(rollout={"paused": False})
        world.settle()
        plan = world.plan()
        assert (plan.apply, plan.delete, plan.events) == ((), (), ())
        assert plan.status.to_dict() == world.status
        if world.document["spec"]["drafter"]["source"]["volumeClaim"]["path"] == "refused":
            assert world.condition("PreflightPassed")[0] == "False"
        elif not (world.status["history"] and world.status["history"][0]["result"] == "Failed"):
            assert list(world.deployments()) == [world.wanted]
            assert world.condition("Ready")[0] == "True"


Rollouts.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRollouts = Rollouts.TestCase
