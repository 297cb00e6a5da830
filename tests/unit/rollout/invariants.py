"""Invariants of every reconcile of a rollout, whatever happens in the cluster, and of the end of a rollout that is left alone.

    each reconcile     no_exception (walk.py), no_weight_without_a_pod, no_serving_pod_removed,
                       arms_are_of_different_revisions, isolated_canary_is_not_reached, no_rollback_for_gpu_time, no_spin,
                       bounded_reconciles
    a rollout's end    ended_or_waits_for_user, new_spec_gets_pods, healthy_spec_is_promoted, all_replicas_serve,
                       no_writes_at_rest

Each function returns a sentence on the violation, or an empty string. The functions use the spec, the objects and the pods
alone, never the code under test. A paused resource is not decided on, so its desired revision is not checked. Events in the
cluster (a pod that fails, an eviction) are no decisions of the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from aerie.rollout.canary.blocked_rollback import find_reversal_cause
from tests.unit.rollout.cluster import Cluster, Reconcile

SETTLING_TIME = timedelta(hours=72)
"""Time after which every rollout that ends without a user has ended."""
WRITES_IN_A_ROW = 12
IDLE_IN_A_ROW = 40
"""Reconciles at intervals of less than five seconds that find nothing to do: a gateway's timeout is 30 seconds."""
_FINAL = frozenset({"Ready", "RolledBack", "Failed"})
_ROOM = ("insufficient nvidia.com/gpu", "exceeded quota")


def no_weight_without_a_pod(reconcile: Reconcile) -> str:
    """No arm without a serving pod gets requests while pods of another arm serve: by the route's weights and the Services'
    selectors in mode Gateway, by the Service that bears the resource's name everywhere."""
    spec = reconcile.observed.resource.spec
    if spec.rollout.paused or spec.replicas == 0 or {"Service", "HTTPRoute"} & reconcile.observed.cluster.unlisted_kinds.keys():
        return ""
    serving = {name: min(count, _replicas_after(reconcile, name)) for name, count in reconcile.serving.items()}
    labels_by_deployment = {name: _pod_labels(reconcile, name) for name, count in serving.items() if count}
    if not labels_by_deployment:
        return ""

    def serves(service: str) -> bool:
        selector = (_object_after(reconcile, "Service", service) or {}).get("spec", {}).get("selector")
        return selector is not None and any(selector.items() <= labels.items() for labels in labels_by_deployment.values())

    if not serves("chat"):
        return f"Service chat selects none of the pods that serve: {sorted(labels_by_deployment)}"
    route = _object_after(reconcile, "HTTPRoute", "chat")
    if spec.rollout.traffic.gateway is None or route is None:
        return ""
    empty = [backend for backend in route["spec"]["rules"][0]["backendRefs"] if backend["weight"] and not serves(backend["name"])]
    if not empty:
        return ""
    weights = [(backend["name"], backend["weight"]) for backend in empty]
    return f"{weights} get requests without a pod, while {sorted(labels_by_deployment)} serve"


def no_serving_pod_removed(reconcile: Reconcile) -> str:
    """A reconcile leaves the minimum of serving pods that the spec allows, or all that exist: with Surge all replicas, with Reuse
    those less the places of canary and control. The few pods that may be late are excused, because a rollout does not wait for
    them."""
    before = sum(reconcile.serving.values())
    after = sum(min(count, _replicas_after(reconcile, name)) for name, count in reconcile.serving.items())
    replicas, floor = reconcile.observed.resource.spec.replicas, _min_serving_pods(reconcile)
    excused = 0 if replicas < 3 else max(1, replicas // 20)
    if after >= min(before, floor - excused):
        return ""
    status = reconcile.observed.resource.status
    last = status.rollout_history[0] if status and status.rollout_history else None
    if last is not None and find_reversal_cause(last) is not None and 2 * after >= before:
        return ""  # a blocked rollback was reversed: pods that have not served for so long are deleted, and the larger part stays
    return f"{before} pods served, {after} are left, and the spec ({replicas} replicas) allows {floor} less {excused} late ones"


def arms_are_of_different_revisions(reconcile: Reconcile) -> str:
    """No revision is stable and canary or previous at once: its pods would be counted in both arms."""
    status = reconcile.plan.status
    revisions = [arm.revision for arm in (status.stable, status.canary, status.previous) if arm is not None]
    return "" if len(set(revisions)) == len(revisions) else f"two arms have the same revision: {revisions}"


def isolated_canary_is_not_reached(reconcile: Reconcile) -> str:
    """Users reach no canary whose shadow evaluation has no result, while a stable pod serves."""
    status, spec = reconcile.plan.status, reconcile.observed.resource.spec
    canary, stable = status.canary, status.stable
    if canary is None or stable is None or canary.evaluation is None or canary.evaluation.result is not None:
        return ""
    if spec.rollout.paused or {"Service", "HTTPRoute", "Deployment"} & reconcile.observed.cluster.unlisted_kinds.keys():
        return ""
    if not reconcile.serving.get(f"chat-{stable.revision}"):
        return ""
    if _object_after(reconcile, "Deployment", f"chat-{canary.revision}") is None:
        return ""
    labels, service = _pod_labels(reconcile, f"chat-{canary.revision}"), _object_after(reconcile, "Service", "chat")
    if service is not None and service["spec"]["selector"].items() <= labels.items():
        return f"Service chat selects pods of the isolated canary {canary.revision}"
    route = _object_after(reconcile, "HTTPRoute", "chat")
    weights = {backend["name"]: backend["weight"] for backend in route["spec"]["rules"][0]["backendRefs"]} if route else {}
    return f"the route leads to the isolated canary: {weights}" if weights.get("chat-canary") else ""


def no_rollback_for_gpu_time(reconcile: Reconcile) -> str:
    """No rollout is rolled back for its latency: here drafters differ in acceptance alone, and GPUs in time alone. A time that
    was not counted until the deadline is no verdict."""
    ended = next((record for record in reconcile.plan.status.rollout_history if record.completion_time == reconcile.at), None)
    analysis = reconcile.plan.status.analysis
    if ended is None or ended.result != "RolledBack" or (analysis is not None and analysis.verdict == "Inconclusive"):
        return ""
    if "ime per output token" not in ended.message.partition(".")[0]:
        return ""
    return f"revision {ended.revision} is rolled back: {ended.message}"


def no_spin(cluster: Cluster, reconcile: Reconcile) -> str:
    """A reconcile that writes nothing does not request the next one immediately; and writes end where nothing else happens."""
    if not reconcile.written and reconcile.requeue_after is not None and reconcile.requeue_after <= timedelta(0):
        return f"nothing was written, and it wants to reconcile again in {reconcile.requeue_after}"
    if cluster.idle_streak.writing > WRITES_IN_A_ROW:
        return f"{cluster.idle_streak.writing} reconciles in a row wrote without another event: {_describe_writes(reconcile)}"
    return ""


def bounded_reconciles(cluster: Cluster, reconcile: Reconcile) -> str:
    """A waiting rollout is not reconciled every second for long."""
    if cluster.idle_streak.idle > IDLE_IN_A_ROW:
        return f"{cluster.idle_streak.idle} reconciles in a row found nothing to do; next one in {reconcile.requeue_after}"
    return ""


# ----------------------------------------------------------------------------------------------------------------- left alone
def ended_or_waits_for_user(cluster: Cluster) -> str:
    """A rollout that is left alone for three days has ended, or its condition Progressing names a manual action or lack of
    room."""
    cluster.advance(SETTLING_TIME, lambda: bool(_outcome(cluster)) and _is_at_rest(cluster))
    return "" if _outcome(cluster) else f"after {SETTLING_TIME} it is {_summary(cluster)}"


def new_spec_gets_pods(cluster: Cluster) -> str:
    """A new spec is handled in every state of a rollout, whatever else is broken: it gets pods, or ends with a reason."""
    cluster.api_errors, cluster.unlisted_kinds, cluster.gateway = [], {}, "Accepts"
    _apply_valid_spec(cluster)
    desired_revision = cluster.desired_revision

    def is_handled() -> bool:
        arms = [cluster.status.get(arm) or {} for arm in ("stable", "canary")]
        ended = [record["revision"] for record in cluster.status.get("rolloutHistory") or []]
        return desired_revision in [*(status.get("revision") for status in arms), *ended]

    return (
        ""
        if cluster.advance(SETTLING_TIME, is_handled)
        else f"revision {desired_revision} has no pods after {SETTLING_TIME}: {_summary(cluster)}"
    )


def healthy_spec_is_promoted(cluster: Cluster) -> str:
    """A spec of any size is promoted once cluster and drafters are healthy: automatically if there are requests, else by a manual
    promotion."""
    cluster.heal_all()
    _apply_valid_spec(cluster)
    desired_revision = cluster.desired_revision

    def promoted() -> bool:
        status = cluster.status
        canary = status.get("canary") or {}
        if status.get("conditions") and f"aerie.dev/promote={desired_revision}" in cluster.message("Progressing"):
            cluster.annotate(promote=desired_revision)
        return bool(
            (status.get("stable") or {}).get("revision") == desired_revision and not canary and not status.get("previous")
        )

    return (
        ""
        if cluster.advance(4 * SETTLING_TIME, promoted)
        else f"revision {desired_revision} is not promoted: {_summary(cluster)}"
    )


def all_replicas_serve(cluster: Cluster) -> str:
    """All pods of a promoted revision serve, no other pods are left, and all requests go to them."""
    desired_revision, replicas = cluster.desired_revision, cluster.document["spec"]["replicas"]
    cluster.advance(timedelta(hours=2))
    deployments = cluster.replicas()
    if deployments != {f"chat-{desired_revision}": replicas} or cluster.serving(desired_revision) != replicas:
        return f"{cluster.serving(desired_revision)} of {replicas} pods serve, of Deployments {deployments}"
    if cluster.condition("Ready")[0] != "True" or cluster.status["phase"] != "Ready":
        return f"it serves whole and is {_summary(cluster)}"
    return ""


def no_writes_at_rest(cluster: Cluster) -> str:
    """A resource at rest causes no writes, however often it is reconciled."""
    for duration in (timedelta(0), timedelta(minutes=7), timedelta(days=2)):
        cluster.now += duration
        reconcile = cluster.reconcile()
        if reconcile.written:
            return f"after {duration} of rest {_describe_writes(reconcile)}"
    return ""


# -------------------------------------------------------------------------------------------------------------------- helpers
def _min_serving_pods(reconcile: Reconcile) -> int:
    spec = reconcile.observed.resource.spec
    canary, replicas = spec.rollout.canary, spec.replicas
    borrowed = min(canary.replicas, replicas) * (2 if canary.control == "Fresh" else 1)
    if canary.capacity == "Surge" or replicas == 0:
        return replicas
    return max(replicas, borrowed + 1) - borrowed


def _object_after(reconcile: Reconcile, kind: str, name: str) -> Mapping[str, Any] | None:
    """Return the object as it is after the plan is applied, or None."""
    if any((reference.kind, reference.name) == (kind, name) for reference in reconcile.plan.objects_to_delete):
        return None
    applied = next(
        (item for item in reconcile.plan.objects_to_apply if (item["kind"], item["metadata"]["name"]) == (kind, name)), None
    )
    return applied or reconcile.observed.cluster.child(kind, name)


def _replicas_after(reconcile: Reconcile, deployment: str) -> int:
    if "Deployment" in reconcile.observed.cluster.unlisted_kinds:
        return 10**6
    item = _object_after(reconcile, "Deployment", deployment)
    return 0 if item is None else int(item["spec"]["replicas"])


def _pod_labels(reconcile: Reconcile, deployment: str) -> Mapping[str, str]:
    item = _object_after(reconcile, "Deployment", deployment)
    assert item is not None, "it has pods that stay"
    labels: Mapping[str, str] = item["spec"]["template"]["metadata"]["labels"]
    return labels


def _outcome(cluster: Cluster) -> str:
    """Return the phase in which it has ended or waits for a user; empty while neither."""
    status = cluster.status
    if not status.get("conditions"):
        return ""
    canary, message = status.get("canary"), cluster.message("Progressing")
    if status["phase"] == "Paused":
        return "Paused"
    if status.get("previous") and "lacks " in message and "aerie.dev/rollback" in message:
        return str(status["phase"])
    if canary is None:
        return "" if status.get("previous") or status["phase"] not in _FINAL else str(status["phase"])
    if "aerie.dev/promote" in message or any(words in message for words in _ROOM):
        return str(canary["phase"])
    if cluster.condition("Progressing")[1] == "ScaledToZero":
        return "ScaledToZero"
    if status.get("stable") is None and status["phase"] == "Failed":
        return "Failed"  # the first revision: its pods show what is wrong, and it waits for another spec
    return ""


def _is_at_rest(cluster: Cluster) -> bool:
    """Return whether nothing is written any more before something else happens or hours are over."""
    last = cluster.document.get("status") or {"phase": None}
    before = (cluster.__dict__.get("rested"), cluster.__dict__.get("rested_at", cluster.now))
    summary = (last["phase"], last.get("canary", {}).get("phase"), cluster.message("Progressing").split(":")[0])
    if before[0] != summary:
        cluster.__dict__["rested"], cluster.__dict__["rested_at"] = summary, cluster.now
        return False
    return bool(cluster.now - before[1] > timedelta(hours=1))


def _apply_valid_spec(cluster: Cluster) -> None:
    """Apply a valid spec that was not requested before, without manual actions."""
    spec = cluster.document["spec"]
    cluster.document["metadata"].pop("annotations", None)
    rollout = {**spec.get("rollout", {}), "paused": False, "progressDeadline": "1h"}
    rollout["analysis"] = {**rollout.get("analysis", {}), "onInconclusive": "Hold"}
    cluster.edit(
        rollout=rollout,
        drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": f"new{cluster.reconcile_count}"}}},
    )


def _summary(cluster: Cluster) -> str:
    status = cluster.status
    arms = {arm: status[arm]["revision"] for arm in ("stable", "canary", "previous") if status.get(arm)}
    canary = status.get("canary") or {}
    return f"{status['phase']} ({canary.get('phase')}), {arms}, {cluster.replicas()}: {cluster.message('Progressing')}"


def _describe_writes(reconcile: Reconcile) -> str:
    before = reconcile.observed.resource.status
    after = reconcile.plan.status
    old, new = before.to_dict() if before else {}, after.to_dict()
    changed = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    applied = [f"{item['kind']} {item['metadata']['name']}" for item in reconcile.plan.objects_to_apply]
    deleted = [f"{reference.kind} {reference.name}" for reference in reconcile.plan.objects_to_delete]
    return f"it applies {applied}, deletes {deleted}, tells {[event.reason for event in reconcile.plan.events]}, writes {changed}"
