"""All that may happen to a resource, in any order: users, people's words, figures, crashes of the operator, pods that come and
go.

Safety: what serves is not given up, nothing is sent to where nobody serves while somebody else does, no engine starts before its
preflight has passed, nothing is promoted without evidence or a person's word, one transition at a time. Liveness: left alone, it
ends with what the spec asks for or says why not, and then nothing is written any more.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aerie.rollout.facts.pod_failures import is_pod_ready
from tests.unit.rollout.world import DRAFTERS, World, canarying, equivalence_result, monitoring

GATEWAY = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
NEIGHBOURS: dict[str | None, set[str | None]] = {
    None: {None, "Starting", "Promoting"},
    "Starting": {"Starting", "WarmingUp", "RollingBack"},
    # With no pod asked for, what is not decided starts anew, and a person may decide.
    "WarmingUp": {"Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting", "RollingBack"},
    "Analyzing": {"Starting", "Analyzing", "AwaitingApproval", "Held", "Ramping", "Promoting", "RollingBack"},
    "AwaitingApproval": {"AwaitingApproval", "Ramping", "Promoting", "RollingBack"},
    "Held": {"Held", "Ramping", "Promoting", "RollingBack"},
    "Ramping": {"Ramping", "Promoting", "RollingBack"},
    "Promoting": {"Promoting", "RollingBack", None},
    "RollingBack": {"RollingBack", None},
}


class Rollouts(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.unserved: set[str] = set()
        """Canaries that began while nothing served, or while no pod was asked for."""
        self.words: set[str | None] = set()
        """Revisions that a person has said to promote when the operator looked: a word that led on may be gone by now."""
        self.seen: set[str] | None = None
        """What served when all Deployments were last decided upon; None when the spec is another one since."""

    @initialize(
        phase=st.sampled_from([None, "Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting", "Monitoring", "Verifying"]),
        replicas=st.integers(1, 4),
        gateway=st.sampled_from([True, True, False]),
        reuse=st.booleans(),
    )
    def somewhere_on_the_way(self, phase: str | None, replicas: int, gateway: bool, reuse: bool) -> None:
        rollout: dict[str, Any] = {"traffic": GATEWAY} if gateway else {}
        if phase in ("Monitoring", "Verifying"):
            self.world, _ = monitoring(replicas=replicas, rollout=rollout)
            self.world.measure_alone(4 if phase == "Verifying" else 0, 2.4)
            assert self.world.status["phase"] == phase
        elif phase is not None:
            if reuse and replicas > 2:
                rollout["canary"] = {"capacity": "Reuse"}
            self.world, _ = canarying(phase, replicas=replicas, rollout=rollout)
        self.world.now += timedelta(minutes=1)
        self.world.has_change_times = True

    @rule(times=st.integers(1, 6))
    def all_goes_well(self, times: int) -> None:
        for _ in range(times):
            self.look()
            self.world.check()
            self.world.schedule()
            self.world.ready()
            self.world.now += timedelta(minutes=6)

    @rule(parts=st.integers(0, 8))
    def a_pass_that_may_crash(self, parts: int) -> None:
        self.look(parts)

    @rule(parts=st.integers(4, 9), blocks=st.integers(1, 6), better=st.sampled_from([-0.2, 0.0, 0.2]))
    @precondition(lambda self: self.world.status.get("analysis"))
    def blocks_close(self, parts: int, blocks: int, better: float) -> None:
        for _ in range(blocks):
            self.world.measure(1, better, step=False)
            self.look(parts)

    @rule(odd=st.sampled_from([0, 24]))
    def answers_come(self, odd: int) -> None:
        self.world.equivalence_result = equivalence_result(odd)

    def look(self, parts: int = 1000) -> None:
        world, before = self.world, self.world.status
        served, canary = before.get("stable"), before.get("canary")
        alive = world.serving((served or {}).get("revision", "")) if served else 0
        self.words.add((world.document["metadata"].get("annotations") or {}).get("aerie.dev/promote"))
        self.seen = self.serving() if parts == 1000 else None
        plan = world.step(parts)
        if parts == 1000 and world.document["spec"]["replicas"] and world.status["phase"] != "Paused":
            assert not world.unserved_services(), "requests go where nobody serves"
        deleted = {reference.name for reference in plan.objects_to_delete}
        assert served is None or f"chat-{served['revision']}" not in deleted, "what serves by the status is never deleted"
        after = world.status
        event(f"phase {after.get('phase')}")
        if served is None:
            return
        now = after["stable"]["revision"]
        new = (after.get("canary") or {}).get("revision")
        if new is not None and (canary or {}).get("revision") != new and (alive == 0 or world.document["spec"]["replicas"] == 0):
            self.unserved.add(new)
        kept = before.get("previous")
        if kept is not None and now == kept["revision"]:
            assert (canary, new, after["canary"]["phase"]) == (None, served["revision"], "RollingBack")
            assert after["rolloutHistory"][0]["message"].startswith("Rolled back after promotion. ")
            return
        if now != served["revision"]:
            proven = (after.get("analysis") or {}).get("verdict") == "Promote"
            asked = now in self.words
            empty = canary is None and world.document["spec"]["replicas"] == 0
            assert proven or asked or empty or now in self.unserved, "promoted without evidence"
            return
        if (canary or {}).get("revision") in (new, None) or new is None:
            left, entered = (canary or {}).get("phase"), (after.get("canary") or {}).get("phase")
            # Pods that an operator made which was killed before it could write of them are a canary on its way out.
            stray = left is None and entered == "RollingBack" and new in world.deployments()
            assert entered in NEIGHBOURS[left] or (left is None and entered == "Starting") or stray, (left, entered)
        else:
            raise AssertionError("one canary has taken the place of another")

    def serving(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.world.pods if is_pod_ready(pod)}

    @rule(path=st.sampled_from(DRAFTERS))
    def another_drafter(self, path: str) -> None:
        self.world.drafter(path)

    @rule(replicas=st.integers(0, 4))
    def another_size(self, replicas: int) -> None:
        self.world.edit(replicas=replicas)
        self.seen = None

    @rule(paused=st.booleans(), reuse=st.booleans(), gateway=st.booleans(), delay=st.sampled_from(["0s", "10m", "3h"]))
    def other_terms(self, paused: bool, reuse: bool, gateway: bool, delay: str) -> None:
        traffic = GATEWAY if gateway else {"mode": "Service"}
        capacity = "Reuse" if reuse and self.world.document["spec"]["replicas"] > 2 else "Surge"
        canary = {"capacity": capacity, "scaleDownDelay": delay}
        self.seen = None
        self.world.edit(rollout={"paused": paused, "canary": canary, "traffic": traffic})

    @rule(word=st.sampled_from(["promote", "rollback", "retry"]))
    @precondition(lambda self: self.world.status.get("stable"))
    def a_person_says(self, word: str) -> None:
        self.world.annotate(**{word: self.world.desired_revision})

    @rule()
    def jobs_end(self) -> None:
        self.world.check()

    @rule(places=st.sampled_from([4, 1000]))
    def pods_come_and_go(self, places: int) -> None:
        world = self.world
        floor, before = world.document["spec"]["replicas"], world.serving()
        known = self.serving() == self.seen  # what fails after a decision, the decision could not know
        surge = world.document["spec"].get("rollout", {}).get("canary", {}).get("capacity") != "Reuse"
        world.schedule(places)
        if known and surge and (world.status.get("canary") or {}).get("phase") in ("Ramping", "Promoting"):
            assert world.serving() >= min(before, floor), "serving pods were given up"

    @rule(value=st.sampled_from(["True", "False"]))
    def pods_serve(self, value: str) -> None:
        self.world.ready(value=value)

    @rule(restarts=st.integers(1, 4))
    @precondition(lambda self: self.world.status.get("canary") or self.world.status.get("previous"))
    def what_is_new_crashes(self, restarts: int) -> None:
        self.world.crash((self.world.status.get("canary") or self.world.status["stable"])["revision"], restarts)

    @rule(seconds=st.sampled_from([3, 60, 360, 1860]))
    def time_passes(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

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
        known = {(status.get(arm) or {}).get("revision") for arm in ("stable", "canary", "previous")}
        strange = [revision for revision in self.world.deployments() if revision not in known]
        assert len(strange) <= 2, "one that a crash kept out of the status, one that is about to go"

    @invariant()
    def at_most_two_revisions_have_pods(self) -> None:
        both = [self.world.deployments(control=control) for control in (False, True)]
        asking = {revision for found in both for revision, item in found.items() if item["spec"]["replicas"]}
        assert len(asking) <= 2, sorted(asking)

    def teardown(self) -> None:
        """Left alone, with a person who says yes, it ends; and then nothing is written any more."""
        world = self.world
        world.edit(rollout={**world.document["spec"].get("rollout", {}), "paused": False})
        for _ in range(60):
            self.look()
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


# Without shrinking, which takes minutes here.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Rollouts.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, phases=_PHASES)
TestRollouts = Rollouts.TestCase
