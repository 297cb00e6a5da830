"""Substitution: pods that a rollout would delete serve in place of pods that are not ready."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.golden import Messages
from tests.unit.rollout.cluster import MINUTE, ApiError, Cluster
from tests.unit.rollout.test_walk import cluster_in_phase
from tests.unit.rollout.world import World, masked


def fail_pods(cluster: Cluster, revision: str, count: int = 1000) -> None:
    """Let pods of the revision fail permanently, at most `count`."""
    for pod in [pod for pod in cluster.fleet if pod.alive and pod.revision == revision][:count]:
        pod.become("NotReady", cluster.now)
    cluster.unpullable_revisions.add(revision)
    cluster.react()


def recover_pods(cluster: Cluster) -> None:
    cluster.unpullable_revisions.clear()
    for pod in cluster.fleet:
        if pod.alive and pod.state in ("NotReady", "Imageless"):
            pod.become("Loading", cluster.now, cluster.now + MINUTE)


def weights(cluster: Cluster) -> dict[str, int]:
    rule = cluster.objects["HTTPRoute", "chat"]["spec"]["rules"][0]
    return {backend["name"]: backend["weight"] for backend in rule["backendRefs"]}


@pytest.mark.parametrize("how", ["spec", "word"])
@pytest.mark.parametrize("phase", ["WarmingUp", "Analyzing", "AwaitingApproval"])
def test_only_serving_canary_stays_until_stable_serves(phase: str, how: str) -> None:
    cluster = cluster_in_phase(phase)
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    fail_pods(cluster, old)
    if how == "spec":
        cluster.drafter("eagle32")
    else:
        cluster.annotate(rollback=new)
    cluster.advance(10 * MINUTE)
    assert (cluster.status["phase"], cluster.serving()) == ("RollingBack", 1)
    recover_pods(cluster)
    cluster.advance(10 * MINUTE)
    assert cluster.serving(old) >= 4
    assert f"chat-{new}" not in cluster.replicas()


def test_control_pods_substitute_before_canary_pods() -> None:
    cluster = cluster_in_phase("WarmingUp")
    traffic = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
    cluster.edit(rollout={**cluster.document["spec"]["rollout"], "traffic": traffic})
    cluster.advance(MINUTE)
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    for pod in [pod for pod in cluster.fleet if pod.deployment == f"chat-{old}"][:1]:
        pod.become("NotReady", cluster.now)
    cluster.react()
    cluster.annotate(rollback=new)
    cluster.advance(MINUTE)
    assert cluster.replicas() == {f"chat-{old}": 4, f"chat-{old}-control": 1, f"chat-{new}": 0}
    assert weights(cluster) == {"chat-stable": 75_000, "chat-canary": 0, "chat-control": 25_000}
    recover_pods(cluster)
    cluster.advance(3 * MINUTE)
    assert cluster.replicas() == {f"chat-{old}": 4}


def test_blocked_rollback_message_names_manual_actions(messages: Messages) -> None:
    cluster = cluster_in_phase("RollingBack")
    old = cluster.status["stable"]["revision"]
    fail_pods(cluster, old)
    cluster.advance(20 * MINUTE)
    assert "aerie.dev/promote" not in cluster.message("Progressing"), "its pods are not late yet"
    cluster.advance(timedelta(hours=1))
    new = cluster.status["canary"]["revision"]
    message = cluster.message("Progressing")
    messages.check("blocked rollback", masked(message, NEW=new, OLD=old))
    del cluster.document["metadata"]["annotations"]
    cluster.annotate(promote=new)
    cluster.advance(timedelta(hours=1))
    assert cluster.status["stable"]["revision"] == new


def test_canary_waiting_for_control_names_missing_pods(messages: Messages) -> None:
    cluster = cluster_in_phase("Starting")
    old = cluster.status["stable"]["revision"]
    fail_pods(cluster, old)
    for pod in [pod for pod in cluster.fleet if pod.deployment == f"chat-{old}"]:
        pod.become("Serving", cluster.now)
    assert cluster.advance(timedelta(hours=2), lambda: bool(cluster.status.get("rolloutHistory", [{}])[0]["result"] == "Failed"))
    messages.check("control not ready", masked(cluster.status["rolloutHistory"][0]["message"], OLD=old))


@pytest.mark.parametrize("gateway", [True, False])
def test_retained_pods_serve_while_no_promoted_pod_does(gateway: bool) -> None:
    cluster = cluster_in_phase("Monitoring")
    if gateway:
        traffic = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
        cluster.edit(rollout={**cluster.document["spec"]["rollout"], "traffic": traffic})
        cluster.reconcile()
    new = cluster.desired_revision
    assert cluster.objects["Service", "chat"]["spec"]["selector"]["aerie.dev/revision"] == new
    fail_pods(cluster, new)
    cluster.reconcile()
    assert "aerie.dev/revision" not in cluster.objects["Service", "chat"]["spec"]["selector"]
    assert not gateway or weights(cluster) == {"chat-stable": 0, "chat-previous": 100_000}
    recover_pods(cluster)
    cluster.advance(3 * MINUTE)
    assert cluster.objects["Service", "chat"]["spec"]["selector"]["aerie.dev/revision"] == new
    assert not gateway or weights(cluster) == {"chat-stable": 100_000}


def test_retained_pods_stay_while_promoted_pods_are_missing(messages: Messages) -> None:
    cluster = cluster_in_phase("Monitoring")
    new, old = cluster.desired_revision, cluster.status["previous"]["revision"]
    fail_pods(cluster, new, 2)
    cluster.advance(20 * MINUTE)
    assert cluster.status["phase"] == "Monitoring", "scaleDownDelay is over"
    assert cluster.serving(old) == 2
    messages.check("promoted pods not ready", masked(cluster.message("Progressing"), NEW=new, OLD=old))
    recover_pods(cluster)
    cluster.advance(10 * MINUTE)
    assert cluster.status["phase"] == "Ready"
    assert cluster.replicas() == {f"chat-{new}": 4}


def test_new_spec_keeps_retained_pods_that_substitute() -> None:
    cluster = cluster_in_phase("Monitoring")
    fail_pods(cluster, cluster.desired_revision, 2)
    before = cluster.serving()
    cluster.drafter("eagle32")
    cluster.advance(MINUTE)
    assert cluster.serving() >= min(before, 4)
    cluster.advance(timedelta(hours=6), lambda: bool(cluster.status["stable"]["revision"] == cluster.desired_revision))
    assert cluster.status["stable"]["revision"] == cluster.desired_revision


def test_status_lost_during_promotion_is_recovered_with_all_pods() -> None:
    cluster = cluster_in_phase("Promoting")
    cluster.advance(10 * MINUTE, lambda: cluster.serving(cluster.desired_revision) >= 3)
    new = cluster.desired_revision
    del cluster.document["status"]
    cluster.reconcile()
    assert cluster.status["stable"]["revision"] == new, "of which most pods serve"
    lowest = cluster.serving()
    cluster.on_reconcile = lambda _: None
    for _ in range(30):
        cluster.advance(MINUTE)
        lowest = min(lowest, cluster.serving())
    assert lowest >= 4
    assert cluster.replicas() == {f"chat-{new}": 4}


def test_pods_ready_without_stable_revision_are_adopted() -> None:
    cluster = Cluster(replicas=2, load=300)
    cluster.advance(MINUTE)
    first = cluster.desired_revision
    cluster.unlisted_kinds["Job"] = cluster.now + 10 * MINUTE  # nothing is deleted meanwhile
    cluster.drafter("refused")
    cluster.advance(30 * MINUTE)
    assert cluster.status["stable"]["revision"] == first
    assert cluster.serving(first) == 2


def test_unrunnable_spec_keeps_only_serving_canary() -> None:
    """Its result is Failed, like that of a reversed rollback."""
    cluster = cluster_in_phase("Promoting")
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    cluster.advance(10 * MINUTE, lambda: cluster.serving(new) >= 3)
    fail_pods(cluster, old)
    cluster.edit(drafter=None)
    cluster.advance(timedelta(hours=2))
    cluster.drafter("eagle32")
    before = cluster.serving(new)
    cluster.advance(MINUTE)
    assert cluster.serving(new) == before > 0
    assert cluster.status["stable"]["revision"] == new


def test_canary_without_creatable_control_fails_at_deadline() -> None:
    """No object has the template of the stable pods any more."""
    cluster = cluster_in_phase("Preflight")
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    for kind, name in [("ConfigMap", f"chat-{old}-preflight"), ("Deployment", f"chat-{old}")]:
        cluster.delete(kind, name)
    cluster.react()
    cluster.advance(timedelta(hours=3))
    assert cluster.status["rolloutHistory"][0]["result"] == "Failed"
    assert (cluster.status["phase"], cluster.serving(new)) == ("RollingBack", 1), "nobody else serves"
    assert f"aerie.dev/promote={new}" in cluster.message("Progressing")


@pytest.mark.parametrize("gateway", [True, False])
def test_only_serving_control_stays_after_its_canary(gateway: bool) -> None:
    """Neither the canary nor a stable pod serves, and a third spec is requested."""
    cluster = cluster_in_phase("WarmingUp")
    if gateway:
        traffic = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
        cluster.edit(rollout={**cluster.document["spec"]["rollout"], "traffic": traffic})
        cluster.advance(MINUTE)
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    for pod in [pod for pod in cluster.fleet if pod.deployment in (f"chat-{old}", f"chat-{new}")]:
        pod.become("NotReady", cluster.now)
    cluster.react()
    cluster.annotate(rollback=new)
    cluster.advance(timedelta(hours=2))
    cluster.drafter("eagle32")
    cluster.on_reconcile = lambda reconcile: serving_counts.append(sum(reconcile.serving.values()))
    serving_counts: list[int] = []
    assert cluster.advance(timedelta(hours=3), lambda: bool(cluster.status["stable"]["revision"] == cluster.desired_revision))
    assert min(serving_counts) == 1


def test_control_substitutes_for_stable_pods_during_ramp() -> None:
    cluster = cluster_in_phase("Analyzing")
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    for pod in [pod for pod in cluster.fleet if pod.deployment == f"chat-{old}"]:
        pod.become("NotReady", cluster.now)
    cluster.react()
    cluster.annotate(promote=new)
    cluster.advance(MINUTE)
    assert cluster.status["phase"] == "Ramping"
    assert (cluster.serving(old), cluster.serving(new)) == (1, 1)
    assert cluster.advance(timedelta(hours=3), lambda: bool(cluster.status["stable"]["revision"] == new))


def test_serving_pods_stay_without_written_status() -> None:
    """The stable pods have crashed, the new spec's pods serve in their place, and then another spec is requested."""
    cluster = cluster_in_phase("Preflight")
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    fail_pods(cluster, old)
    for pod in cluster.fleet:
        pod.become("Imageless", cluster.now)
    cluster.api_errors.append(ApiError("Status", 500, cluster.now + timedelta(hours=1)))
    cluster.advance(20 * MINUTE)
    assert cluster.serving(new) == 4
    cluster.drafter("eagle32")
    cluster.advance(timedelta(hours=3))
    assert cluster.serving(new) == 4 or cluster.status["stable"]["revision"] == cluster.desired_revision
    cluster.advance(timedelta(hours=6), lambda: bool(cluster.status["stable"]["revision"] == cluster.desired_revision))
    assert cluster.status["stable"]["revision"] == cluster.desired_revision


def test_lost_status_with_unlisted_kind_scales_nothing_down() -> None:
    cluster = cluster_in_phase("Promoting")
    cluster.advance(10 * MINUTE, lambda: cluster.serving(cluster.desired_revision) >= 2)
    before = cluster.replicas()
    cluster.unlisted_kinds["Service"] = cluster.now + 5 * MINUTE
    del cluster.document["status"]
    cluster.reconcile()
    cluster.reconcile()
    assert cluster.replicas() == before


def test_only_serving_control_gets_requests_during_ramp() -> None:
    cluster = cluster_in_phase("WarmingUp")
    traffic = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
    cluster.edit(rollout={**cluster.document["spec"]["rollout"], "traffic": traffic})
    cluster.advance(MINUTE)
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    for pod in [pod for pod in cluster.fleet if pod.deployment in (f"chat-{old}", f"chat-{new}")]:
        pod.become("NotReady", cluster.now)
    cluster.react()
    cluster.annotate(promote=new)
    cluster.advance(MINUTE)
    assert cluster.status["phase"] == "Ramping"
    assert weights(cluster) == {"chat-stable": 0, "chat-canary": 0, "chat-control": 100_000}


def test_first_revision_without_written_status_is_adopted() -> None:
    world = World(replicas=1)
    world.settle_until("Preflight")
    world.check()
    plan = world.plan()
    write_count = [item["kind"] for item in plan.objects_to_apply].index("Deployment") + 1
    world.step(write_count)
    world.schedule()
    world.ready()
    world.settle()
    assert world.status["phase"] == "Ready"
    assert [(record["change"], record["result"]) for record in world.status["rolloutHistory"]] == [("first revision", "Promoted")]


def test_unlisted_kind_sends_no_requests_to_empty_arm() -> None:
    cluster = cluster_in_phase("Monitoring")
    cluster.edit(rollout={**cluster.document["spec"]["rollout"], "canary": {"scaleDownDelay": "3h"}})
    new, old = cluster.status["stable"]["revision"], cluster.status["previous"]["revision"]
    cluster.unlisted_kinds["Job"] = cluster.now + timedelta(hours=1)
    fail_pods(cluster, new)
    cluster.advance(MINUTE)
    assert cluster.serving(old) > 0
    selector = cluster.objects["Service", "chat"]["spec"]["selector"]
    assert "aerie.dev/revision" not in selector, "pods of both revisions are selected"


def test_unlisted_kind_scales_no_arm_down() -> None:
    cluster = cluster_in_phase("Analyzing")
    old = cluster.status["stable"]["revision"]
    cluster.document["status"]["stable"]["replicas"] = 2
    cluster.unlisted_kinds["PodDisruptionBudget"] = cluster.now + timedelta(hours=1)
    cluster.advance(10 * MINUTE)
    assert cluster.replicas()[f"chat-{old}"] == 4


def test_orphaned_control_does_not_delay_rollout() -> None:
    """Its pod serves while the stable pods have no room."""
    cluster = cluster_in_phase("Analyzing")
    old = cluster.status["stable"]["revision"]
    control = cluster.objects["Deployment", f"chat-{old}-control"]
    for item in (control, control["spec"]["template"]):
        item["metadata"]["labels"]["aerie.dev/revision"] = "0123456789"
    cluster.document["status"].pop("canary")
    cluster.drafter("eagle32")
    cluster.advance(20 * MINUTE)
    assert (cluster.status.get("canary") or {}).get("revision") == cluster.desired_revision


def test_only_serving_rejected_canary_gets_requests() -> None:
    cluster = cluster_in_phase("Analyzing")
    old, new = cluster.status["stable"]["revision"], cluster.desired_revision
    cluster.document["status"].pop("canary")
    cluster.document["status"] |= {"rejectedRevision": new, "phase": "RolledBack"}
    fail_pods(cluster, old)
    for pod in cluster.fleet:
        if pod.revision == old:
            pod.become("Imageless", cluster.now)
    traffic = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
    cluster.edit(rollout={**cluster.document["spec"]["rollout"], "traffic": traffic})
    cluster.advance(MINUTE)
    assert cluster.serving(new) == 1
    assert weights(cluster)["chat-canary"] == 100_000


def test_unlisted_kind_lets_control_substitute_for_lost_stable_pods() -> None:
    """The status names no control any more, and its pods are still there because no arm loses any."""
    cluster = cluster_in_phase("Analyzing")
    old = cluster.status["stable"]["revision"]
    traffic = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
    cluster.edit(rollout={**cluster.document["spec"]["rollout"], "traffic": traffic})
    cluster.advance(MINUTE)
    cluster.unlisted_kinds["PodDisruptionBudget"] = cluster.now + timedelta(hours=1)
    cluster.document["status"]["canary"] |= {"phase": "RollingBack", "weight": 0}
    cluster.document["status"]["stable"]["weight"] = 100
    del cluster.document["status"]["canary"]["control"]
    for pod in cluster.fleet:
        if pod.revision == old and not pod.deployment.endswith("control"):
            pod.become("Imageless", cluster.now)
    cluster.advance(MINUTE)
    assert cluster.serving() == 2, "canary and control"
    assert weights(cluster)["chat-control"] == 100_000
