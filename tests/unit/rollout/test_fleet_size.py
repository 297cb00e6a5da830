"""Rollouts of realistic fleets: many pods that start slowly, some of them dead, stuck, rejected or never scheduled.

Time is virtual: it jumps to the next change of a pod or to the next requested reconcile.
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
from tests.nightly import at_night
from tests.unit.rollout.cluster_state import is_pod_of
from tests.unit.rollout.world import START, World, masked, monitored_world, serving_world, world_in_phase

pytestmark = pytest.mark.slow

MINUTE = timedelta(minutes=1)
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on ephemeral-storage."}


class SlowWorld(World):
    """A world whose pods load for `load` and drain for `drain`, with room for all of them."""

    load, drain = 300.0, 30.0

    def schedule(self, places: int = 10**6) -> None:
        numbers = self.__dict__.setdefault("numbers", itertools.count(1))
        now = self.now
        self.pods = [pod for pod in self.pods if not self._gone(pod)]
        deployments = [item for (kind, _), item in self.objects.items() if kind == "Deployment"]
        for item in deployments:
            alive = [pod for pod in self.pods if is_pod_of(pod, item) and not is_failed(pod) and not is_deleted(pod)]
            for pod in sorted(alive, key=lambda pod: (pod_failures.is_pod_ready(pod), pod["metadata"]["creationTimestamp"]))[
                : max(0, len(alive) - item["spec"]["replicas"])
            ]:
                pod["metadata"]["deletionTimestamp"] = (now + timedelta(seconds=120)).isoformat()
                pod["gone"] = now + timedelta(seconds=self.drain)
            for _ in range(item["spec"]["replicas"] - len(alive)):
                if sum(not self._gone(pod) and not is_failed(pod) for pod in self.pods) >= places:
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
            if (label[naming.REVISION_LABEL], label[naming.CONTROL_LABEL]) not in keys and not is_deleted(pod):
                pod["metadata"]["deletionTimestamp"] = (now + timedelta(seconds=120)).isoformat()
                pod["gone"] = now + timedelta(seconds=self.drain)
            if pod["ready_at"] is not None and pod["ready_at"] <= now and pod["status"]["phase"] == "Pending":
                condition = {"type": "Ready", "status": "True", "lastTransitionTime": pod["ready_at"].isoformat()}
                pod["status"] = {"phase": "Running", "conditions": [condition]}

    def _ready_at(self, name: str) -> datetime | None:  # noqa: ARG002 - overrides use the name
        return self.now + timedelta(seconds=self.load)

    def _gone(self, pod: dict[str, Any]) -> bool:
        removed_at: datetime | None = pod.get("gone")
        return removed_at is not None and removed_at <= self.now

    def run_until(self, until: str, hours: float = 48) -> None:
        """Run until the phase is reached; fail when the hours have passed."""
        end = self.now + timedelta(hours=hours)
        while self.now < end:
            before = copy.deepcopy((self.document, self.objects))
            requeue_after = self.step().requeue_after
            if self.status["phase"] == until:
                return
            self.check()
            self.schedule()
            if self.status["phase"] == "Analyzing":
                self.measure(1, +0.2)
            elif before == (self.document, self.objects):
                event_times = [
                    pod[key] for pod in self.pods for key in ("ready_at", "gone") if pod.get(key) and pod[key] > self.now
                ]
                event_times += [] if requeue_after is None else [self.now + max(requeue_after, timedelta(seconds=1))]
                assert event_times, f"nothing will ever happen: {self.message('Progressing')}"
                self.now = min(event_times)
                self.schedule()
        raise AssertionError(f"{self.status['phase']}, not {until}: {self.message('Progressing')}")


def is_failed(pod: dict[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Failed")


def is_deleted(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def slow_world(replicas: int, cls: type[SlowWorld] = SlowWorld, **spec: Any) -> SlowWorld:
    world = cls(replicas=replicas, **spec)
    world.run_until("Ready")
    world.drafter("eagle31")
    world.step()
    return world


@pytest.mark.parametrize(
    ("replicas", "load"),
    [(1, 300), (3, 1200), (24, 300), (32, 300), (40, 300), at_night((64, 120)), (64, 1700), at_night((200, 120))],
)
def test_healthy_rollout_of_any_size_is_promoted(replicas: int, load: float) -> None:
    class Loading(SlowWorld):
        pass

    Loading.load = load
    world = slow_world(replicas, Loading)
    new = world.desired_revision
    world.run_until("Monitoring")
    assert world.status["rolloutHistory"][0]["result"] == "Promoted"
    assert world.status["stable"]["revision"] == new
    assert world.serving(new) >= replicas


@pytest.mark.parametrize("capacity", ["Surge", "Reuse"])
@pytest.mark.parametrize("status", [EVICTED, None])
def test_dead_pod_or_lost_node_delays_nothing(status: dict[str, Any] | None, capacity: str) -> None:
    world = slow_world(4, rollout={"canary": {"capacity": capacity}})
    dead_pod = copy.deepcopy(world.pods[0])
    dead_pod["metadata"]["name"] = "chat-gone"
    if status is None:
        dead_pod["metadata"]["deletionTimestamp"] = (world.now - MINUTE).isoformat()
    else:
        dead_pod["status"] = dict(status)
    dead_pod["ready_at"] = None
    world.pods.append(dead_pod)
    new = world.desired_revision
    world.run_until("Ready")
    assert world.status["stable"]["revision"] == new
    assert world.condition("Degraded") == ("False", "AsExpected"), "a dead pod is no failure of the fleet"


def test_dead_pod_and_missed_probe_do_not_skip_analysis() -> None:
    world = serving_world()
    world.ready(value="False")
    world.pods.append({**copy.deepcopy(world.pods[0]), "status": dict(EVICTED)})
    world.drafter("eagle31")
    world.settle_until("Starting")


def test_one_crash_of_the_only_pod_does_not_skip_analysis() -> None:
    world = serving_world(replicas=1)
    world.crash(world.desired_revision, 1)
    world.drafter("eagle31")
    world.settle_until("Starting")


@pytest.mark.parametrize("ramp", [[], [60]])
@pytest.mark.parametrize("edit", ["word", "replicas", "nothing"])
def test_ramp_may_change_during_ramp(ramp: list[int], edit: str) -> None:
    world, _ = world_in_phase("Ramping", replicas=4)
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


class FailingCanaryPods(SlowWorld):
    """A world in which the first `bad` pods of the canary never serve."""

    bad = 1

    def _ready_at(self, name: str) -> datetime | None:
        late = [pod for pod in self.pods if pod["ready_at"] is None]
        is_canary = (self.status.get("canary") or {}).get("phase") in ("Ramping", "Promoting")
        return None if is_canary and len(late) < self.bad else super()._ready_at(name)


@pytest.mark.parametrize("replicas", [20, 64])
def test_bad_node_does_not_roll_back_fleet(replicas: int) -> None:
    world = slow_world(replicas, FailingCanaryPods)
    new = world.desired_revision
    world.run_until("Monitoring")
    assert world.status["stable"]["revision"] == new
    assert world.serving(new) >= replicas - 1


def test_many_late_pods_roll_back() -> None:
    class Bad(FailingCanaryPods):
        bad = 64

    world = slow_world(20, Bad)
    world.run_until("RollingBack")
    assert "spec.rollout.progressDeadline" in world.status["rolloutHistory"][0]["message"]
    assert world.serving() >= 20


class LimitedCluster(SlowWorld):
    """A cluster with room for `places` pods."""

    places: int = 10**6

    def schedule(self, places: int = 10**6) -> None:  # noqa: ARG002 - this class has its own
        super().schedule(self.places)
        for item in [item for (kind, _), item in self.objects.items() if kind == "Deployment"]:
            own_count = sum(is_pod_of(pod, item) and not is_deleted(pod) for pod in self.pods)
            is_rejected = own_count < item["spec"]["replicas"]
            since = self.__dict__.setdefault("since", {}).setdefault((item["metadata"]["name"], is_rejected), self.now)
            condition = {
                "type": "ReplicaFailure",
                "status": "True" if is_rejected else "False",
                "reason": "FailedCreate",
                "message": 'pods "chat-x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=1',
                "lastTransitionTime": since.isoformat(),
            }
            item["status"] = {"conditions": [condition]}


def test_quota_is_reported_and_rejects_no_revision(messages: Messages) -> None:
    class Quota(LimitedCluster):
        places = 5

    world = slow_world(4, Quota)
    new = world.desired_revision
    world.run_until("Failed", hours=3)
    assert "exceeded quota: gpus" in world.message("Progressing")
    assert "rejectedRevision" not in world.status
    messages.check("waits for a quota", masked(world.message("Progressing"), NEW=new))
    began = world.now
    Quota.places = 6
    world.run_until("Monitoring")
    assert world.status["stable"]["revision"] == new
    assert world.now - began < timedelta(hours=4)


def test_pod_rejection_by_webhook_is_reported() -> None:
    world = LimitedCluster(replicas=2)
    world.__class__ = type("RejectingCluster", (LimitedCluster,), {"places": 0})
    for _ in range(4):
        world.step()
        world.check()
        world.schedule()
    assert world.condition("Ready") == ("False", "QuotaExceeded")
    assert "exceeded quota: gpus" in world.message("Ready")


def test_autoscaling_beyond_capacity_does_not_roll_back() -> None:
    class Roomy(LimitedCluster):
        places = 24

    world = slow_world(20, Roomy)
    new = world.desired_revision
    world.run_until("Promoting")
    world.edit(replicas=40)
    for _ in range(40):
        world.step()
        world.schedule()
        world.now += 10 * MINUTE
    assert world.status["phase"] == "Promoting"
    assert world.serving() >= 20
    world.edit(replicas=20)
    world.run_until("Monitoring")
    assert world.status["stable"]["revision"] == new


@pytest.mark.parametrize("drafter", ["eagle31", "refused"])
def test_incomplete_first_revision_survives_edit(drafter: str) -> None:
    class Seven(LimitedCluster):
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


def test_partially_ready_first_revision_is_stable_at_deadline(messages: Messages) -> None:
    class Seven(LimitedCluster):
        places = 7

    world = Seven(replicas=8)
    world.run_until("Ready", hours=2)
    assert world.condition("Ready") == ("False", "QuotaExceeded")
    messages.check(
        "first revision without a pod", masked(world.status["rolloutHistory"][0]["message"], NEW=world.desired_revision)
    )


@pytest.mark.parametrize("how", ["spec", "word"])
def test_blocked_rollback_follows_new_spec_or_promotion(how: str) -> None:
    world, stable_revision = world_in_phase("Promoting", replicas=4)
    new_revision = world.desired_revision
    for _ in range(3):
        world.schedule()
        world.ready()
        world.step()
    assert world.serving(new_revision) > 1
    world.annotate(rollback=new_revision)
    world.step()
    assert world.status["phase"] == "RollingBack"

    def reconcile_times(times: int) -> None:
        for _ in range(times):
            world.schedule()
            for pod in world.pods:
                revision = pod["metadata"]["labels"][naming.REVISION_LABEL]
                if revision == stable_revision and not pod_failures.is_pod_ready(pod):
                    pod["status"] = {"phase": "Pending", "containerStatuses": [waiting("ImagePullBackOff")]}
                elif revision != stable_revision:
                    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            world.check()
            before = world.serving()
            world.step()
            assert world.serving() >= before
            world.now += 10 * MINUTE

    reconcile_times(30)
    assert world.status["phase"] == "RollingBack"
    del world.document["metadata"]["annotations"]
    if how == "word":
        world.annotate(promote=new_revision)
    else:
        world.edit(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]})
    for _ in range(40):
        reconcile_times(1)
        if world.status["stable"]["revision"] == (new_revision if how == "word" else world.desired_revision):
            break
        if (world.status.get("canary") or {}).get("phase") in ("WarmingUp", "Analyzing"):
            world.annotate(promote=world.desired_revision)
    assert world.status["stable"]["revision"] == (new_revision if how == "word" else world.desired_revision), world.message(
        "Progressing"
    )


def waiting(reason: str) -> dict[str, Any]:
    return {"name": "engine", "ready": False, "restartCount": 0, "image": "gone", "state": {"waiting": {"reason": reason}}}


def test_waiting_trial_of_paused_resource_does_not_spin() -> None:
    from aerie.api.status import Trial
    from aerie.engine.speculation import Static
    from aerie.manifests.revision_hash import compute_revision
    from aerie.rollout.revision.desired import build_status_setting

    world = serving_world(replicas=2)
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
        requeue_after = world.step().requeue_after
        assert requeue_after is None or requeue_after >= timedelta(seconds=1)


def test_lost_status_is_recovered_from_serving_pods() -> None:
    world, old = world_in_phase("Analyzing", replicas=4)
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


def test_retry_annotation_of_any_length_is_handled_once() -> None:
    world, _ = world_in_phase("Analyzing")
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


def test_one_crashing_promoted_pod_does_not_roll_back() -> None:
    world, _ = monitored_world(replicas=20)
    assert world.status["phase"] == "Monitoring"
    bad = next(pod for pod in world.pods if pod["metadata"]["labels"][naming.REVISION_LABEL] == world.desired_revision)
    bad["status"] = {"phase": "Running", "containerStatuses": [{"name": "engine", "ready": False, "restartCount": 9}]}
    world.step()
    assert world.status["phase"] == "Monitoring"
