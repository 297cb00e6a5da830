"""Rollouts of fleets as they are: many pods that take their time, some of them dead, stuck, refused or never scheduled.

Time is virtual: it jumps to the next moment at which a pod changes or the decision wants to be made again.
"""

from __future__ import annotations

import copy
import itertools
from datetime import datetime, timedelta
from typing import Any

import pytest

from aerie.manifests import naming
from aerie.rollout.facts import pod_failures
from tests.golden import Messages
from tests.unit.rollout.world import START, World, canarying, is_pod_of, masked, monitoring, serving

MINUTE = timedelta(minutes=1)
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on ephemeral-storage."}


class Slow(World):
    """Pods load for `load` and drain for `drain`; nodes are as large as they have to be."""

    load, drain = 300.0, 30.0

    def schedule(self, places: int = 10**6) -> None:
        numbers = self.__dict__.setdefault("numbers", itertools.count(1))
        now = self.now
        self.pods = [pod for pod in self.pods if not self._gone(pod)]
        deployments = [item for (kind, _), item in self.objects.items() if kind == "Deployment"]
        for item in deployments:
            alive = [pod for pod in self.pods if is_pod_of(pod, item) and not ended(pod) and not deleted(pod)]
            for pod in sorted(alive, key=lambda pod: (pod_failures.is_pod_ready(pod), pod["metadata"]["creationTimestamp"]))[
                : max(0, len(alive) - item["spec"]["replicas"])
            ]:
                pod["metadata"]["deletionTimestamp"] = (now + timedelta(seconds=120)).isoformat()
                pod["gone"] = now + timedelta(seconds=self.drain)
            for _ in range(item["spec"]["replicas"] - len(alive)):
                if sum(not self._gone(pod) and not ended(pod) for pod in self.pods) >= places:
                    break
                labels = item["spec"]["template"]["metadata"]["labels"]
                name = f"{item['metadata']['name']}-{next(numbers):05d}"
                metadata = {"name": name, "labels": labels, "creationTimestamp": now.isoformat()}
                self.pods.append(
                    {"kind": "Pod", "metadata": metadata, "status": {"phase": "Pending"}, "ready_at": self._ready_at(name)}
                )
        keys = {
            (item["metadata"]["labels"][naming.REVISION_LABEL], item["metadata"]["labels"][naming.CONTROL_LABEL])
            for item in deployments
        }
        for pod in self.pods:
            label = pod["metadata"]["labels"]
            if (label[naming.REVISION_LABEL], label[naming.CONTROL_LABEL]) not in keys and not deleted(pod):
                pod["metadata"]["deletionTimestamp"] = (now + timedelta(seconds=120)).isoformat()
                pod["gone"] = now + timedelta(seconds=self.drain)
            if pod["ready_at"] is not None and pod["ready_at"] <= now and pod["status"]["phase"] == "Pending":
                condition = {"type": "Ready", "status": "True", "lastTransitionTime": pod["ready_at"].isoformat()}
                pod["status"] = {"phase": "Running", "conditions": [condition]}

    def _ready_at(self, name: str) -> datetime | None:  # noqa: ARG002 - those who override it look at the name
        return self.now + timedelta(seconds=self.load)

    def _gone(self, pod: dict[str, Any]) -> bool:
        gone: datetime | None = pod.get("gone")
        return gone is not None and gone <= self.now

    def go_on(self, until: str, hours: float = 48) -> None:
        """To the phase, or until time is over."""
        end = self.now + timedelta(hours=hours)
        while self.now < end:
            before = copy.deepcopy((self.document, self.objects))
            again = self.step().requeue_after
            if self.status["phase"] == until:
                return
            self.check()
            self.schedule()
            if self.status["phase"] == "Analyzing":
                self.measure(1, +0.2)
            elif before == (self.document, self.objects):
                moments = [pod[key] for pod in self.pods for key in ("ready_at", "gone") if pod.get(key) and pod[key] > self.now]
                moments += [] if again is None else [self.now + max(again, timedelta(seconds=1))]
                assert moments, f"nothing will ever happen: {self.message('Progressing')}"
                self.now = min(moments)
                self.schedule()
        raise AssertionError(f"{self.status['phase']}, not {until}: {self.message('Progressing')}")


def ended(pod: dict[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Failed")


def deleted(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def slow(replicas: int, cls: type[Slow] = Slow, **spec: Any) -> Slow:
    world = cls(replicas=replicas, **spec)
    world.go_on("Ready")
    world.drafter("eagle31")
    world.step()
    return world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "load"), [(1, 300), (3, 1200), (24, 300), (32, 300), (40, 300), (64, 120), (64, 1700), (200, 120)]
)
def test_a_faultless_rollout_of_any_size_is_promoted(replicas: int, load: float) -> None:
    class Loading(Slow):
        pass

    Loading.load = load
    world = slow(replicas, Loading)
    new = world.desired_revision
    world.go_on("Monitoring")
    assert world.status["rolloutHistory"][0]["result"] == "Promoted"
    assert world.status["stable"]["revision"] == new
    assert world.serving(new) >= replicas


@pytest.mark.slow
@pytest.mark.parametrize("capacity", ["Surge", "Reuse"])
@pytest.mark.parametrize("status", [EVICTED, None])
def test_a_dead_pod_or_the_pod_of_a_lost_node_holds_nothing_up(status: dict[str, Any] | None, capacity: str) -> None:
    world = slow(4, rollout={"canary": {"capacity": capacity}})
    gone = copy.deepcopy(world.pods[0])
    gone["metadata"]["name"] = "chat-gone"
    if status is None:
        gone["metadata"]["deletionTimestamp"] = (world.now - MINUTE).isoformat()
    else:
        gone["status"] = dict(status)
    gone["ready_at"] = None
    world.pods.append(gone)
    new = world.desired_revision
    world.go_on("Ready")
    assert world.status["stable"]["revision"] == new
    assert world.condition("Degraded") == ("False", "AsExpected"), "what is left of a dead pod is no trouble of the fleet"


def test_a_dead_pod_and_a_missed_probe_do_not_skip_the_judgement() -> None:
    world = serving()
    world.ready(value="False")
    world.pods.append({**copy.deepcopy(world.pods[0]), "status": dict(EVICTED)})
    world.drafter("eagle31")
    world.settle_until("Starting")


def test_one_crash_of_the_only_pod_does_not_skip_the_judgement() -> None:
    world = serving(replicas=1)
    world.crash(world.desired_revision, 1)
    world.drafter("eagle31")
    world.settle_until("Starting")


@pytest.mark.parametrize("ramp", [[], [60]])
@pytest.mark.parametrize("edit", ["word", "replicas", "nothing"])
def test_the_ramp_may_change_while_it_is_under_way(ramp: list[int], edit: str) -> None:
    world, _ = canarying("Ramping", replicas=4)
    rollout = world.document["spec"].get("rollout", {})
    world.edit(rollout={**rollout, "canary": {**rollout.get("canary", {}), "stepWeights": ramp}})
    new = world.desired_revision
    if edit == "word":
        world.annotate(rollback=new)
    elif edit == "replicas":
        world.edit(replicas=6)
    for _ in range(60):
        world.step()
        world.schedule()
        world.ready()
        world.now += 6 * MINUTE
    assert world.status["rolloutHistory"][0]["result"] == ("RolledBack" if edit == "word" else "Promoted")


class OneBadNode(Slow):
    """Each tenth pod of the canary never serves: it crashes."""

    bad = 1

    def _ready_at(self, name: str) -> datetime | None:
        late = [pod for pod in self.pods if pod["ready_at"] is None]
        is_canary = (self.status.get("canary") or {}).get("phase") in ("Ramping", "Promoting")
        return None if is_canary and len(late) < self.bad else super()._ready_at(name)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [20, 64])
def test_a_bad_node_does_not_take_a_fleet_back(replicas: int) -> None:
    world = slow(replicas, OneBadNode)
    new = world.desired_revision
    world.go_on("Monitoring")
    assert world.status["stable"]["revision"] == new
    assert world.serving(new) >= replicas - 1


def test_many_late_pods_take_it_back() -> None:
    class Bad(OneBadNode):
        bad = 64

    world = slow(20, Bad)
    world.go_on("RollingBack")
    assert "spec.rollout.progressDeadline" in world.status["rolloutHistory"][0]["message"]
    assert world.serving() >= 20


class Full(Slow):
    """A cluster with room for so many pods."""

    places: int = 10**6

    def schedule(self, places: int = 10**6) -> None:  # noqa: ARG002 - it has its own
        super().schedule(self.places)
        for item in [item for (kind, _), item in self.objects.items() if kind == "Deployment"]:
            mine = sum(is_pod_of(pod, item) and not deleted(pod) for pod in self.pods)
            refused = mine < item["spec"]["replicas"]
            since = self.__dict__.setdefault("since", {}).setdefault((item["metadata"]["name"], refused), self.now)
            condition = {
                "type": "ReplicaFailure",
                "status": "True" if refused else "False",
                "reason": "FailedCreate",
                "message": 'pods "chat-x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=1',
                "lastTransitionTime": since.isoformat(),
            }
            item["status"] = {"conditions": [condition]}


def test_a_quota_is_told_and_rejects_nothing(messages: Messages) -> None:
    class Quota(Full):
        places = 5

    world = slow(4, Quota)
    new = world.desired_revision
    world.go_on("Failed", hours=3)
    assert "exceeded quota: gpus" in world.message("Progressing")
    assert "rejectedRevision" not in world.status
    messages.check("waits for a quota", masked(world.message("Progressing"), NEW=new))
    began = world.now
    Quota.places = 6
    world.go_on("Monitoring")
    assert world.status["stable"]["revision"] == new
    assert world.now - began < timedelta(hours=4)


def test_pods_that_a_webhook_refuses_are_told_in_its_words() -> None:
    world = Full(replicas=2)
    world.__class__ = type("Refusing", (Full,), {"places": 0})
    for _ in range(4):
        world.step()
        world.check()
        world.schedule()
    assert world.condition("Ready") == ("False", "QuotaExceeded")
    assert "exceeded quota: gpus" in world.message("Ready")


def test_an_autoscaler_that_asks_for_more_than_there_is_takes_nothing_back() -> None:
    class Roomy(Full):
        places = 24

    world = slow(20, Roomy)
    new = world.desired_revision
    world.go_on("Promoting")
    world.edit(replicas=40)
    for _ in range(40):
        world.step()
        world.schedule()
        world.now += 10 * MINUTE
    assert world.status["phase"] == "Promoting"
    assert world.serving() >= 20
    world.edit(replicas=20)
    world.go_on("Monitoring")
    assert world.status["stable"]["revision"] == new


@pytest.mark.parametrize("drafter", ["eagle31", "refused"])
def test_a_first_revision_that_lacks_a_pod_is_not_deleted_for_an_edit(drafter: str) -> None:
    class Seven(Full):
        places = 7

    world = Seven(replicas=8)
    for _ in range(20):
        world.step()
        world.check()
        world.schedule()
        world.now += MINUTE
    assert world.serving() == 7
    assert "stable" not in world.status
    old = world.desired_revision
    world.drafter(drafter)
    for _ in range(20):
        world.step()
        world.check()
        world.schedule()
        world.now += MINUTE
        assert world.serving() >= 7
    assert world.status["stable"]["revision"] == old


def test_a_first_revision_is_stable_once_its_time_is_over_and_some_pods_serve(messages: Messages) -> None:
    class Seven(Full):
        places = 7

    world = Seven(replicas=8)
    world.go_on("Ready", hours=2)
    assert world.condition("Ready") == ("False", "QuotaExceeded")
    messages.check(
        "first revision without a pod", masked(world.status["rolloutHistory"][0]["message"], NEW=world.desired_revision)
    )


@pytest.mark.parametrize("how", ["spec", "word"])
def test_a_rollback_that_cannot_end_hears_of_another_spec(how: str) -> None:
    world, old = canarying("Promoting", replicas=4)
    mine = world.desired_revision
    for _ in range(3):
        world.schedule()
        world.ready()
        world.step()
    assert world.serving(mine) > 1
    world.annotate(rollback=mine)
    world.step()
    assert world.status["phase"] == "RollingBack"

    def look(times: int) -> None:
        for _ in range(times):
            world.schedule()
            for pod in world.pods:
                revision = pod["metadata"]["labels"][naming.REVISION_LABEL]
                if revision == old and not pod_failures.is_pod_ready(pod):
                    pod["status"] = {"phase": "Pending", "containerStatuses": [waiting("ImagePullBackOff")]}
                elif revision != old:
                    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            world.check()
            before = world.serving()
            world.step()
            assert world.serving() >= before
            world.now += 10 * MINUTE

    look(30)
    assert world.status["phase"] == "RollingBack"
    del world.document["metadata"]["annotations"]
    if how == "word":
        world.annotate(promote=mine)
    else:
        world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]})
    for _ in range(40):
        look(1)
        if world.status["stable"]["revision"] == (mine if how == "word" else world.desired_revision):
            break
        if (world.status.get("canary") or {}).get("phase") in ("WarmingUp", "Analyzing"):
            world.annotate(promote=world.desired_revision)
    assert world.status["stable"]["revision"] == (mine if how == "word" else world.desired_revision), world.message("Progressing")


def waiting(reason: str) -> dict[str, Any]:
    return {"name": "engine", "ready": False, "restartCount": 0, "image": "gone", "state": {"waiting": {"reason": reason}}}


def test_nothing_spins_while_a_trial_waits_and_the_resource_is_paused() -> None:
    from aerie.api.status import Trial
    from aerie.engine.speculation import Static
    from aerie.manifests.revision_hash import compute_revision
    from aerie.rollout.revision.desired import build_status_setting

    world = serving(replicas=2)
    resource = world.observed().resource
    trial = Trial(
        setting=build_status_setting(Static(5)),
        purpose="Improve",
        revision=compute_revision(resource, Static(5)),
        spec_revision=world.desired_revision,
        start_time=START,
    )
    world.document["status"]["speculation"]["trial"] = trial.to_dict()
    world.edit(rollout={"paused": True})
    world.now = START + timedelta(hours=2)
    world.step()
    for _ in range(5):
        again = world.step().requeue_after
        assert again is None or again >= timedelta(seconds=1)


def test_a_status_that_is_lost_is_recovered_from_the_pods_that_serve() -> None:
    world, old = canarying("Analyzing", replicas=4)
    del world.document["status"]
    for _ in range(10):
        before = world.serving(old)
        world.step()
        world.schedule()
        world.ready()
        assert world.serving(old) >= min(before, 4)
        assert f"chat-{old}" in world.replicas()
    assert world.status["stable"]["revision"] == old
    assert world.status["stable"]["drafter"] == "models/eagle3"
    assert world.status["canary"]["revision"] == world.desired_revision


def test_a_word_of_any_length_is_heard_once() -> None:
    world, _ = canarying("Analyzing")
    world.annotate(rollback=world.desired_revision)
    for _ in range(4):
        world.step()
        world.schedule()
    assert world.status["phase"] == "RolledBack"
    del world.document["metadata"]["annotations"]
    world.annotate(retry="x" * 5000)
    world.step()
    world.step()
    assert world.status["phase"] == "Starting"
    assert len(world.status["lastHandledRetry"]) == 64


def test_a_promoted_fleet_is_not_taken_back_for_one_crashing_pod() -> None:
    world, _ = monitoring(replicas=20)
    assert world.status["phase"] == "Monitoring"
    bad = next(pod for pod in world.pods if pod["metadata"]["labels"][naming.REVISION_LABEL] == world.desired_revision)
    bad["status"] = {"phase": "Running", "containerStatuses": [{"name": "engine", "ready": False, "restartCount": 9}]}
    world.step()
    assert world.status["phase"] == "Monitoring"
