"""Events of a resource in any order: edits, manual actions, blocks, pairs, crashes of operator and evaluator, changing pods.

Safety: no users reach a canary before its shadow evaluation has a result while a stable pod can be reached, no pair counts twice,
serving pods are not deleted, no requests go to an arm without serving pods while another arm has some, no engine starts before
its preflight has passed, nothing is promoted without evidence or a manual action (unless the stable pods of a rollback do not
start again), one transition at a time, no outcome names a user who did not decide it. Liveness: left alone, a rollout ends with
the desired revision or names the reason, and then nothing is written any more.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aerie.analysis.measurement import codec
from aerie.analysis.paired.state import PairedState
from aerie.manifests import naming
from aerie.rollout.facts.pod_failures import is_pod_ready
from tests.unit.rollout.named_requests import NamedRequests
from tests.unit.rollout.world import DRAFTERS, World, equivalence_result, monitored_world, world_in_phase

GATEWAY = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
SHADOW = {"source": "Prompts", "prompts": {"configMap": "prompts"}}
NEIGHBOURS: dict[str | None, set[str | None]] = {
    None: {None, "Starting", "Promoting"},
    "Starting": {"Starting", "Evaluating", "WarmingUp", "RollingBack"},
    # With zero replicas, a canary without a verdict restarts, and the user may decide.
    "Evaluating": {"Starting", "Evaluating", "WarmingUp", "AwaitingApproval", "Ramping", "Promoting", "RollingBack"},
    "WarmingUp": {"Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting", "RollingBack"},
    "Analyzing": {"Starting", "Analyzing", "AwaitingApproval", "Held", "Ramping", "Promoting", "RollingBack"},
    "AwaitingApproval": {"AwaitingApproval", "Ramping", "Promoting", "RollingBack"},
    "Held": {"Held", "Analyzing", "Ramping", "Promoting", "RollingBack"},
    "Ramping": {"Ramping", "Promoting", "RollingBack"},
    "Promoting": {"Promoting", "RollingBack", None},
    "RollingBack": {"RollingBack", None},
}


class Rollouts(RuleBasedStateMachine):
    """The state machine of events, see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.requests = NamedRequests()
        self.unserved: set[str] = set()
        """Canaries that began while no pod served, or with zero replicas."""
        self.promoted_revisions: set[str | None] = set()
        """Revisions with a manual promotion at any reconcile: the annotation may have been removed since."""
        self.pods_at_decision: set[str] | None = None
        """Pods that served at the last complete reconcile; None if the spec has changed since."""
        self.deleted_services: set[str] = set()
        """Services that somebody deleted, until the restored ones have endpoints: the gateway has nobody to send requests to."""

    @initialize(
        phase=st.sampled_from(
            [None, "Starting", "Evaluating", "WarmingUp", "Analyzing", "Ramping", "Promoting", "Monitoring", "Verifying"]
        ),
        replicas=st.integers(1, 4),
        gateway=st.sampled_from([True, True, False]),
        reuse=st.booleans(),
        shadow=st.booleans(),
    )
    def start_in_phase(self, phase: str | None, replicas: int, gateway: bool, reuse: bool, shadow: bool) -> None:
        rollout: dict[str, Any] = {"traffic": GATEWAY} if gateway else {}
        if phase == "Evaluating" or (shadow and phase in (None, "Starting", "WarmingUp")):
            rollout["analysis"] = {"shadow": SHADOW}
        if phase in ("Monitoring", "Verifying"):
            self.world, _ = monitored_world(replicas=replicas, rollout=rollout)
            self.world.measure_alone(4 if phase == "Verifying" else 0, 2.4)
            assert self.world.status["phase"] == phase
        elif phase is not None:
            if reuse and replicas > 2:
                rollout["canary"] = {"capacity": "Reuse"}
            self.world, _ = world_in_phase(phase, replicas=replicas, rollout=rollout)
        self.world.now += timedelta(minutes=1)
        self.world.has_change_times = True

    @rule(times=st.integers(1, 6))
    def all_succeeds(self, times: int) -> None:
        for _ in range(times):
            self.reconcile()
            self.world.check()
            self.world.schedule()
            self.world.ready()
            self.world.now += timedelta(minutes=6)

    @rule(parts=st.integers(0, 8))
    def reconcile_that_may_crash(self, parts: int) -> None:
        self.reconcile(parts)

    @rule(parts=st.integers(4, 9), blocks=st.integers(1, 6), better=st.sampled_from([-0.2, 0.0, 0.2]))
    @precondition(lambda self: self.world.status.get("analysis"))
    def blocks_close(self, parts: int, blocks: int, better: float) -> None:
        for _ in range(blocks):
            self.world.measure(1, better, step=False)
            self.reconcile(parts)

    @rule(parts=st.integers(0, 9), gain=st.sampled_from([-0.3, 0.0, 0.1]), restarts=st.booleans())
    @precondition(lambda self: (self.world.status.get("canary") or {}).get("phase") == "Evaluating")
    def pairs_come(self, parts: int, gain: float, restarts: bool) -> None:
        world = self.world
        world.evaluator.gain = gain
        if restarts:
            world.evaluator.restart()
        world.now += timedelta(seconds=10)
        world.read_pairs()
        self.reconcile(parts)

    @rule(canary_differences=st.sampled_from([0, 24]))
    def answers_come(self, canary_differences: int) -> None:
        self.world.equivalence_result = equivalence_result(canary_differences)

    def reconcile(self, parts: int = 1000) -> None:
        world, before = self.world, self.world.status
        stable, canary = before.get("stable"), before.get("canary")
        ready_count = world.serving((stable or {}).get("revision", "")) if stable else 0
        self.promoted_revisions.add((world.document["metadata"].get("annotations") or {}).get("aerie.dev/promote"))
        self.pods_at_decision = self.serving() if parts == 1000 else None
        plan = world.step(parts)
        if parts == 1000 and world.document["spec"]["replicas"] and world.status["phase"] != "Paused":
            self.deleted_services -= {name for name in self.deleted_services if world.endpoints(name, world.now)}
            assert self.deleted_services.issuperset(world.unserved_services()), "requests go where nobody serves"
            self.check_isolation()
        deleted = {reference.name for reference in plan.objects_to_delete}
        assert stable is None or f"chat-{stable['revision']}" not in deleted, "the status's stable revision is never deleted"
        after = world.status
        event(f"phase {after.get('phase')}")
        if stable is None:
            return
        now = after["stable"]["revision"]
        new_canary = (after.get("canary") or {}).get("revision")
        if (
            new_canary is not None
            and (canary or {}).get("revision") != new_canary
            and (ready_count == 0 or world.document["spec"]["replicas"] == 0)
        ):
            self.unserved.add(new_canary)
        previous = before.get("previous")
        if previous is not None and now == previous["revision"]:
            assert (canary, new_canary, after["canary"]["phase"]) == (None, stable["revision"], "RollingBack")
            assert after["rolloutHistory"][0]["message"].startswith("Rolled back after promotion. ")
            return
        if now != stable["revision"]:
            is_proven = (after.get("analysis") or {}).get("verdict") == "Promote"
            is_requested = now in self.promoted_revisions
            is_empty = canary is None and world.document["spec"]["replicas"] == 0
            # A rollback whose stable pods do not start again ends with the revision that serves, once another one is desired.
            outcome = after["rolloutHistory"][0]
            is_new = outcome not in (before.get("rolloutHistory") or [])
            is_reversed = is_new and "reversalCause" in outcome and (canary or {}).get("phase") == "RollingBack"
            evidence = (is_proven, is_requested, is_empty, now in self.unserved, is_reversed)
            assert any(evidence), "promoted without evidence"
            return
        if (canary or {}).get("revision") in (new_canary, None) or new_canary is None:
            old_phase, new_phase = (canary or {}).get("phase"), (after.get("canary") or {}).get("phase")
            # Pods of an operator that was killed before it wrote the status are a canary that is rolled back.
            stray = old_phase is None and new_phase == "RollingBack" and new_canary in world.deployments()
            assert new_phase in NEIGHBOURS[old_phase] or (old_phase is None and new_phase == "Starting") or stray, (
                old_phase,
                new_phase,
            )
        else:
            raise AssertionError("one canary has taken the place of another")

    def check_isolation(self) -> None:
        """Check that users reach no canary whose shadow evaluation has no result, while a stable pod can be reached."""
        world, canary = self.world, self.world.status.get("canary")
        if canary is None or "evaluation" not in canary or "result" in canary["evaluation"]:
            return
        stable, new = world.status["stable"]["revision"], canary["revision"]
        labels = [pod["metadata"]["labels"] for pod in world.pods if is_pod_ready(pod)]
        if not any(label[naming.REVISION_LABEL] == stable for label in labels) or "chat-stable" in self.deleted_services:
            return
        selector = world.objects["Service", "chat"]["spec"]["selector"]
        reached = {label[naming.REVISION_LABEL] for label in labels if selector.items() <= label.items()}
        assert new not in reached, "users reach a canary that was not evaluated"
        assert not world.route_weights().get("chat-canary"), "the route leads to a canary that was not evaluated"
        if state := canary["evaluation"]["state"]:
            counted = PairedState.from_dict(codec.unpack(state)["state"])
            assert counted.steps.pairs <= world.evaluator.delivered, "pairs count twice"

    def serving(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.world.pods if is_pod_ready(pod)}

    @rule(path=st.sampled_from(DRAFTERS))
    def another_drafter(self, path: str) -> None:
        self.world.drafter(path)

    @rule(replicas=st.integers(0, 4))
    def another_size(self, replicas: int) -> None:
        self.world.edit(replicas=replicas)
        self.pods_at_decision = None

    @rule(
        paused=st.booleans(),
        reuse=st.booleans(),
        gateway=st.booleans(),
        delay=st.sampled_from(["0s", "10m", "3h"]),
        shadow=st.booleans(),
    )
    def another_rollout_spec(self, paused: bool, reuse: bool, gateway: bool, delay: str, shadow: bool) -> None:
        traffic = GATEWAY if gateway else {"mode": "Service"}
        capacity = "Reuse" if reuse and self.world.document["spec"]["replicas"] > 2 else "Surge"
        canary = {"capacity": capacity, "scaleDownDelay": delay}
        self.pods_at_decision = None
        analysis = {"shadow": SHADOW} if shadow else {}
        self.world.edit(rollout={"paused": paused, "canary": canary, "traffic": traffic, "analysis": analysis})

    @rule(action=st.sampled_from(["promote", "rollback", "retry"]), is_named=st.booleans())
    @precondition(lambda self: self.world.status.get("stable"))
    def manual_action(self, action: str, is_named: bool) -> None:
        world, revision = self.world, self.world.desired_revision
        naming = {"requested-by": self.requests.build(action, revision, world.now)} if is_named else {}
        world.annotate(**{action: f"{world.now.timestamp():.0f}" if action == "retry" else revision, **naming})

    @rule(minutes=st.sampled_from([-5, 10, 120, 3000]), is_named=st.booleans())
    @precondition(lambda self: (self.world.status.get("canary") or {}).get("phase") in ("Analyzing", "Held"))
    def extension_is_requested(self, minutes: int, is_named: bool) -> None:
        world = self.world
        revision, end = world.status["canary"]["revision"], world.now + timedelta(minutes=minutes)
        naming = {"requested-by": self.requests.build("extend", revision, world.now)} if is_named else {}
        world.annotate(extend=f"{revision}/{end.isoformat()}", **naming)

    @rule()
    def annotations_are_removed(self) -> None:
        self.world.document["metadata"].pop("annotations", None)

    @invariant()
    def outcomes_name_who_decided(self) -> None:
        if self.requests.check(self.world):
            event("an outcome names its user")

    @rule()
    def jobs_end(self) -> None:
        self.world.check()

    @rule(places=st.sampled_from([4, 1000]))
    def pods_come_and_go(self, places: int) -> None:
        world = self.world
        floor, before = world.document["spec"]["replicas"], world.serving()
        is_unchanged = self.serving() == self.pods_at_decision  # a pod that fails after a decision was not known to it
        surge = world.document["spec"].get("rollout", {}).get("canary", {}).get("capacity") != "Reuse"
        world.schedule(places)
        if is_unchanged and surge and (world.status.get("canary") or {}).get("phase") in ("Ramping", "Promoting"):
            assert world.serving() >= min(before, floor), "serving pods were given up"

    @rule(value=st.sampled_from(["True", "False"]))
    def pods_serve(self, value: str) -> None:
        self.world.ready(value=value)

    @rule(restarts=st.integers(1, 4))
    @precondition(lambda self: self.world.status.get("canary") or self.world.status.get("previous"))
    def the_new_revision_crashes(self, restarts: int) -> None:
        self.world.crash((self.world.status.get("canary") or self.world.status["stable"])["revision"], restarts)

    @rule(seconds=st.sampled_from([3, 60, 360, 1860]))
    def time_passes(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    @rule(data=st.data())
    @precondition(lambda self: self.world.objects)
    def a_child_is_deleted(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.objects)))
        if key[0] != "Deployment":  # its pods would be deleted with it, which is not tested here
            del self.world.objects[key]
        if key[0] == "Service":
            self.deleted_services.add(key[1])

    @invariant()
    def engines_have_passed_preflight(self) -> None:
        for item in self.world.deployments().values():
            arguments = json.dumps(item["spec"]["template"]["spec"])
            assert '"subPath": "refused"' not in arguments

    @invariant()
    def at_most_one_revision_beside_the_stable_one(self) -> None:
        status = self.world.status
        known_revisions = {(status.get(arm) or {}).get("revision") for arm in ("stable", "canary", "previous")}
        orphans = [revision for revision in self.world.deployments() if revision not in known_revisions]
        assert len(orphans) <= 2, "one that a crash kept out of the status, one to be deleted"

    @invariant()
    def at_most_two_revisions_have_pods(self) -> None:
        both = [self.world.deployments(control=control) for control in (False, True)]
        revisions = {revision for deployments in both for revision, item in deployments.items() if item["spec"]["replicas"]}
        assert len(revisions) <= 2, sorted(revisions)

    def teardown(self) -> None:
        """Left alone, with a user who promotes, the rollout ends; and then nothing is written any more."""
        world = self.world
        world.edit(rollout={**world.document["spec"].get("rollout", {}), "paused": False})
        for _ in range(60):
            self.reconcile()
            world.check()
            world.schedule()
            world.ready()
            waits = world.condition("Progressing")[1] in ("AwaitingApproval", "InconclusiveAnalysis", "ScaledToZero")
            if waits and world.status.get("canary"):
                world.annotate(promote=world.status["canary"]["revision"])
            world.now += timedelta(minutes=20)
        assert not {"canary", "previous"} & world.status.keys(), world.message("Progressing")
        plan = world.plan()
        assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ())
        assert plan.status.to_dict() == world.status
        if world.status["phase"] == "Ready":
            assert world.replicas() == {f"chat-{world.desired_revision}": world.document["spec"]["replicas"]}
            assert world.condition("Ready")[0] == "True"
        elif world.document["spec"]["drafter"]["source"]["persistentVolumeClaim"]["path"] == "refused":
            assert world.condition("PreflightPassed")[0] == "False"
        else:
            assert world.status["phase"] in ("RolledBack", "Failed")
            assert world.status["rejectedRevision"] == world.desired_revision
            stable = world.status["stable"]["revision"]
            assert world.replicas() == {f"chat-{stable}": world.document["spec"]["replicas"]}


# Shrinking is left out: it takes minutes here.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Rollouts.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, phases=_PHASES)
TestRollouts = Rollouts.TestCase
