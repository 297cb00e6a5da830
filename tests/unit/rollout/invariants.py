"""What holds of every decision about a rollout, whatever happens in the cluster, and what a rollout comes to that is left alone.

    of each look            no_exception (walk.py), no_weight_without_a_pod, no_serving_pod_given_up, no_gpu_decides, no_spin,
                            bounded_looks
    of what is left alone   ended_or_waits_for_a_person, taken_up, faultless_is_promoted, serves_whole, steady

Each is a function that gives a sentence on what is wrong, or none. What they calculate, they calculate from the spec, the objects
and the pods alone, and never by the code that they judge. While a resource is paused nothing is decided, so nothing is demanded
of what is asked for; what a cluster does by itself (a pod that fails, an eviction) is nobody's decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from aerie.rollout.canary.blocked_rollback import find_reversal_cause
from tests.unit.rollout.cluster import Cluster, Look

ALONE = timedelta(hours=72)
"""After so long, whatever ends by itself has ended."""
WRITES_IN_A_ROW = 12
IDLE_IN_A_ROW = 40
"""Looks within less than five seconds each that find nothing to do: a gateway's patience is 30 seconds."""
_FINAL = frozenset({"Ready", "RolledBack", "Failed"})
_ROOM = ("insufficient nvidia.com/gpu", "exceeded quota")


def no_weight_without_a_pod(look: Look) -> str:
    """No arm without a serving pod gets requests while pods of another arm serve: by the route's weights and the Services'
    selectors in mode Gateway, by the Service that bears the resource's name everywhere."""
    spec = look.observed.resource.spec
    if spec.rollout.paused or spec.replicas == 0 or {"Service", "HTTPRoute"} & look.observed.cluster.unlisted_kinds.keys():
        return ""
    serving = {name: min(count, _asked_after(look, name)) for name, count in look.serving.items()}
    labels = {name: _pod_labels(look, name) for name, count in serving.items() if count}
    if not labels:
        return ""

    def serves(service: str) -> bool:
        selector = (_after(look, "Service", service) or {}).get("spec", {}).get("selector")
        return selector is not None and any(selector.items() <= one.items() for one in labels.values())

    if not serves("chat"):
        return f"Service chat selects none of the pods that serve: {sorted(labels)}"
    route = _after(look, "HTTPRoute", "chat")
    if spec.rollout.traffic.gateway is None or route is None:
        return ""
    empty = [one for one in route["spec"]["rules"][0]["backendRefs"] if one["weight"] and not serves(one["name"])]
    return (
        f"{[(one['name'], one['weight']) for one in empty]} get requests without a pod, while {sorted(labels)} serve"
        if empty
        else ""
    )


def no_serving_pod_given_up(look: Look) -> str:
    """A decision leaves as many serving pods as the spec allows to be the fewest, or all that there are: Surge all replicas,
    Reuse those less the places lent to canary and control; and less the few that may be late, which a rollout goes around."""
    before = sum(look.serving.values())
    after = sum(min(count, _asked_after(look, name)) for name, count in look.serving.items())
    replicas, floor = look.observed.resource.spec.replicas, _floor(look)
    excused = 0 if replicas < 3 else max(1, replicas // 20)
    if after >= min(before, floor - excused):
        return ""
    status = look.observed.resource.status
    last = status.rollout_history[0] if status and status.rollout_history else None
    if last is not None and find_reversal_cause(last) is not None and 2 * after >= before:
        return (
            ""  # a rollback that could not end was turned round: what has not served for so long goes, and the larger part stays
        )
    return f"{before} pods served, {after} are left, and the spec ({replicas} replicas) allows {floor} less {excused} late ones"


def no_gpu_decides(look: Look) -> str:
    """No rollout is taken back for its times: here drafters differ in acceptance alone, and GPUs in time alone. That a time
    was not counted until the deadline is no verdict on it."""
    ended = next((one for one in look.plan.status.rollout_history if one.completion_time == look.at), None)
    analysis = look.plan.status.analysis
    if ended is None or ended.result != "RolledBack" or (analysis is not None and analysis.verdict == "Inconclusive"):
        return ""
    if "ime per output token" not in ended.message.partition(".")[0]:
        return ""
    return f"revision {ended.revision} is taken back: {ended.message}"


def no_spin(cluster: Cluster, look: Look) -> str:
    """A decision that writes nothing does not ask for the next at once; and writes end where nothing else happens."""
    if not look.written and look.again is not None and look.again <= timedelta(0):
        return f"nothing was written, and it wants to look again in {look.again}"
    if cluster.quiet.writing > WRITES_IN_A_ROW:
        return f"{cluster.quiet.writing} looks in a row have written although nothing else has happened: {_wrote(look)}"
    return ""


def bounded_looks(cluster: Cluster, look: Look) -> str:
    """What waits does not look again every second for long."""
    if cluster.quiet.idle > IDLE_IN_A_ROW:
        return f"{cluster.quiet.idle} looks in a row found nothing to do, and the next one is wanted in {look.again}"
    return ""


# ----------------------------------------------------------------------------------------------------------------- left alone
def ended_or_waits_for_a_person(cluster: Cluster) -> str:
    """Left alone for three days, a rollout has ended, or its condition Progressing says what a person can do, or lacks room."""
    cluster.go_on(ALONE, lambda: bool(_decided(cluster)) and _rests(cluster))
    return "" if _decided(cluster) else f"after {ALONE} it is {_summary(cluster)}"


def taken_up(cluster: Cluster) -> str:
    """A new spec is taken up from wherever a rollout is, whatever else is broken: it gets pods, or ends with a reason."""
    cluster.refusing, cluster.unlisted, cluster.gateway = [], {}, "Accepts"
    _good_spec(cluster)
    wanted = cluster.wanted

    def found() -> bool:
        arms = [cluster.status.get(arm) or {} for arm in ("stable", "canary")]
        ended = [one["revision"] for one in cluster.status.get("rolloutHistory") or []]
        return wanted in [*(one.get("revision") for one in arms), *ended]

    return "" if cluster.go_on(ALONE, found) else f"revision {wanted} has no pods after {ALONE}: {_summary(cluster)}"


def faultless_is_promoted(cluster: Cluster) -> str:
    """When nothing is wrong any more with the cluster, nor with drafters that serve or are asked for, what is asked for is
    promoted, of whatever size: where there are requests by itself, and else by a person's word."""
    cluster.cure()
    _good_spec(cluster)
    wanted = cluster.wanted

    def promoted() -> bool:
        status = cluster.status
        canary = status.get("canary") or {}
        if status.get("conditions") and f"aerie.dev/promote={wanted}" in cluster.message("Progressing"):
            cluster.annotate(promote=wanted)
        return bool((status.get("stable") or {}).get("revision") == wanted and not canary and not status.get("previous"))

    return "" if cluster.go_on(4 * ALONE, promoted) else f"revision {wanted} is not promoted: {_summary(cluster)}"


def serves_whole(cluster: Cluster) -> str:
    """After a promotion all pods of it serve, nothing else is left, and all requests go to them."""
    wanted, replicas = cluster.wanted, cluster.document["spec"]["replicas"]
    cluster.go_on(timedelta(hours=2))
    deployments = cluster.replicas()
    if deployments != {f"chat-{wanted}": replicas} or cluster.serving(wanted) != replicas:
        return f"{cluster.serving(wanted)} of {replicas} pods serve, of Deployments {deployments}"
    if cluster.condition("Ready")[0] != "True" or cluster.status["phase"] != "Ready":
        return f"it serves whole and is {_summary(cluster)}"
    return ""


def steady(cluster: Cluster) -> str:
    """What has come to rest writes nothing any more, however often it is looked at."""
    for lasts in (timedelta(0), timedelta(minutes=7), timedelta(days=2)):
        cluster.now += lasts
        look = cluster.look()
        if look.written:
            return f"after {lasts} of rest {_wrote(look)}"
    return ""


# ------------------------------------------------------------------------------------------------------------------ their parts
def _floor(look: Look) -> int:
    spec = look.observed.resource.spec
    canary, replicas = spec.rollout.canary, spec.replicas
    lent = min(canary.replicas, replicas) * (2 if canary.control == "Fresh" else 1)
    if canary.capacity == "Surge" or replicas == 0:
        return replicas
    return max(replicas, lent + 1) - lent


def _after(look: Look, kind: str, name: str) -> Mapping[str, Any] | None:
    """The object when the plan is carried out."""
    if any((gone.kind, gone.name) == (kind, name) for gone in look.plan.objects_to_delete):
        return None
    made = next((one for one in look.plan.objects_to_apply if (one["kind"], one["metadata"]["name"]) == (kind, name)), None)
    return made or look.observed.cluster.child(kind, name)


def _asked_after(look: Look, deployment: str) -> int:
    if "Deployment" in look.observed.cluster.unlisted_kinds:
        return 10**6
    found = _after(look, "Deployment", deployment)
    return 0 if found is None else int(found["spec"]["replicas"])


def _pod_labels(look: Look, deployment: str) -> Mapping[str, str]:
    found = _after(look, "Deployment", deployment)
    assert found is not None, "it has pods that stay"
    labels: Mapping[str, str] = found["spec"]["template"]["metadata"]["labels"]
    return labels


def _decided(cluster: Cluster) -> str:
    """In a word, how it has ended or for whom it waits; empty while neither."""
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
        return "Failed"  # of the first revision: its pods show what is wrong, and it waits for another spec
    return ""


def _rests(cluster: Cluster) -> bool:
    """Whether nothing is written any more, and will not be before something else happens or hours are over."""
    last = cluster.document.get("status") or {"phase": None}
    before = (cluster.__dict__.get("rested"), cluster.__dict__.get("rested_at", cluster.now))
    told = (last["phase"], last.get("canary", {}).get("phase"), cluster.message("Progressing").split(":")[0])
    if before[0] != told:
        cluster.__dict__["rested"], cluster.__dict__["rested_at"] = told, cluster.now
        return False
    return bool(cluster.now - before[1] > timedelta(hours=1))


def _good_spec(cluster: Cluster) -> None:
    """A spec that nobody has asked for before and with which nothing is wrong, and nobody's word against it."""
    spec = cluster.document["spec"]
    cluster.document["metadata"].pop("annotations", None)
    rollout = {**spec.get("rollout", {}), "paused": False, "progressDeadline": "1h"}
    rollout["analysis"] = {**rollout.get("analysis", {}), "onInconclusive": "Hold"}
    cluster.edit(
        rollout=rollout, drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": f"new{cluster.looks}"}}}
    )


def _summary(cluster: Cluster) -> str:
    status = cluster.status
    arms = {arm: status[arm]["revision"] for arm in ("stable", "canary", "previous") if status.get(arm)}
    canary = status.get("canary") or {}
    return f"{status['phase']} ({canary.get('phase')}), {arms}, {cluster.replicas()}: {cluster.message('Progressing')}"


def _wrote(look: Look) -> str:
    before = look.observed.resource.status
    after = look.plan.status
    old, new = before.to_dict() if before else {}, after.to_dict()
    changed = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    applied = [f"{one['kind']} {one['metadata']['name']}" for one in look.plan.objects_to_apply]
    deleted = [f"{one.kind} {one.name}" for one in look.plan.objects_to_delete]
    return f"it applies {applied}, deletes {deleted}, tells {[one.reason for one in look.plan.events]}, writes {changed}"
