"""Whether Aerie can work in a cluster, check by check, from a few documents of it.

    definition ─┐
    resources  ─┤
    pods, Lease ├─► checks: ok, problem, or not checkable with the rights of the user; and the fix
    policies   ─┤
    rights     ─┘

Guarantees: pure; each check has one line. A document that the user may not read is `FORBIDDEN`, and the result of its checks is
unknown. Not guaranteed: that Prometheus answers, which only the operator tries. Its result is in the conditions of the resources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from aerie.cli.fleet.kubectl import Document
from aerie.cli.fleet.resource_view import ResourceView, format_age, parse_time

GROUP, PLURAL = "aerie.dev", "speculativedeployments"
MAX_CLOCK_SKEW = timedelta(seconds=30)
"""Difference to the API server's clock from which on times in this command line mislead: ages, and the freshness of the Lease.
The operator itself measures times on its own clock alone."""
USED_VERBS: Mapping[str, tuple[str, ...]] = {
    "list, status, explain": ("get", "list"),
    "status --watch": ("watch",),
    "promote, rollback, retry, pause, resume": ("patch",),
}
"""Verbs on SpeculativeDeployments, by the commands that need them."""
_WAITING_FOR_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_MAX_LISTED = 3


class Forbidden:
    """A document that the user may not read."""


FORBIDDEN: Final = Forbidden()


class Mark(StrEnum):
    """Result of a check. UNKNOWN: the user may not read it, or may not do it."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CheckLine:
    """Result of one check, in one line, and its fix."""

    mark: Mark
    title: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    """What was read of a cluster; `FORBIDDEN` where the user may not, None where there is nothing."""

    definition: Document | Forbidden | None
    missing_fields: Sequence[str]
    """Fields of this release's status that the definition lacks."""
    resources: Sequence[Document] | Forbidden
    operator_pods: Sequence[Document] | Forbidden
    lease: Document | Forbidden | None
    admission_bindings: Sequence[Document] | Forbidden
    rules: Sequence[Mapping[str, Any]] | Forbidden
    """Rules of the user in `namespace` (SelfSubjectRulesReview)."""
    has_gateway_api: bool | Forbidden
    server_time: datetime | None
    """Time of the API server between `read_from` and `read_until`."""
    read_from: datetime
    read_until: datetime
    namespace: str
    version: str
    """Version of this command line."""


def check_cluster(facts: ClusterFacts) -> tuple[CheckLine, ...]:
    """Return all checks, in the order in which to fix them."""
    return (
        _check_definition(facts),
        *_check_operator(facts),
        _check_admission(facts),
        *_check_rights(facts),
        *_check_resources(facts),
        _check_clock(facts),
    )


# ---------------------------------------------------------------------------------------------------------------- definition
def _check_definition(facts: ClusterFacts) -> CheckLine:
    title = "definition"
    if isinstance(facts.definition, Forbidden):
        return _unknown(title, "you may not read CustomResourceDefinitions", "ask for get on customresourcedefinitions")
    if facts.definition is None:
        fix = "install the chart, or apply crds/ of this release"
        return CheckLine(Mark.PROBLEM, title, f"{PLURAL}.{GROUP} is not installed", fix)
    conditions = (facts.definition.get("status") or {}).get("conditions") or ()
    if not any(item["type"] == "Established" and item["status"] == "True" for item in conditions):
        return CheckLine(Mark.PROBLEM, title, "installed, and not established", "kubectl describe crd " + f"{PLURAL}.{GROUP}")
    if facts.missing_fields:
        names = _list_some(facts.missing_fields)
        text = f"older than this release: the API server drops {names}"
        return CheckLine(Mark.PROBLEM, title, text, "apply crds/ of this release, or the chart with crds.enabled")
    return CheckLine(Mark.OK, title, f"{PLURAL}.{GROUP} has all fields of {facts.version}")


# ------------------------------------------------------------------------------------------------------------------ operator
def _check_operator(facts: ClusterFacts) -> Iterator[CheckLine]:
    pods = facts.operator_pods
    if isinstance(pods, Forbidden):
        yield _unknown("operator", "you may not list its pods", "ask for list on pods in its namespace, or use another context")
        return
    if not pods:
        yield CheckLine(Mark.PROBLEM, "operator", "no pod has app.kubernetes.io/name=aerie", "install the chart aerie")
        return
    ready = [pod for pod in pods if _is_ready(pod)]
    where = f"in namespace {pods[0]['metadata']['namespace']}"
    if waiting := sorted({reason for pod in pods for reason in _waiting_reasons(pod) if reason in _WAITING_FOR_IMAGE}):
        image = pods[0]["spec"]["containers"][0].get("image", "")
        yield CheckLine(
            Mark.PROBLEM, "operator image", f"{image}: {', '.join(waiting)}", "correct image.repository, or set imagePullSecrets"
        )
    if ready:
        yield CheckLine(Mark.OK, "operator", f"{len(ready)} of {len(pods)} pods ready {where}")
    else:
        reasons = sorted({reason for pod in pods for reason in _waiting_reasons(pod)}) or ["not ready"]
        fix = f"kubectl describe pods -n {pods[0]['metadata']['namespace']} -l app.kubernetes.io/name=aerie"
        yield CheckLine(Mark.PROBLEM, "operator", f"0 of {len(pods)} pods ready {where}: {', '.join(reasons)}", fix)
    yield _check_lease(facts)
    yield _check_version(pods, facts.version)
    if any("--dry-run" in _arguments(pod) for pod in pods):
        yield CheckLine(Mark.PROBLEM, "dry run", "the operator only logs what it would change", "set dryRun: false in the chart")


def _check_lease(facts: ClusterFacts) -> CheckLine:
    title, fix = "leader", "look into the operator's log for messages about the Lease"
    if isinstance(facts.lease, Forbidden):
        return _unknown(title, "you may not read its Lease", "ask for get on leases in its namespace")
    spec = {} if facts.lease is None else facts.lease.get("spec") or {}
    renew_time, holder = parse_time(spec.get("renewTime")), str(spec.get("holderIdentity") or "")
    if renew_time is None or not holder:
        return CheckLine(Mark.PROBLEM, title, "no operator holds the Lease, so nothing is reconciled", fix)
    # By the API server's clock where it is known: a wrong one of this machine is a line of its own.
    now = facts.server_time or facts.read_until
    if now - renew_time > timedelta(seconds=float(spec.get("leaseDurationSeconds") or 0)) + MAX_CLOCK_SKEW:
        text = f"{holder} has not renewed the Lease for {format_age(renew_time, now)}"
        return CheckLine(Mark.PROBLEM, title, text, fix)
    return CheckLine(Mark.OK, title, f"{holder} leads")


def _check_version(pods: Sequence[Document], version: str) -> CheckLine:
    versions = sorted({_clean_version(pod) for pod in pods})
    if versions == [version]:
        return CheckLine(Mark.OK, "versions", f"operator and command line are {version}")
    text = f"the operator is {', '.join(versions)}, and this command line {version}"
    return CheckLine(Mark.PROBLEM, "versions", text, "upgrade the older of the two")


def _clean_version(pod: Document) -> str:
    return str((pod["metadata"].get("labels") or {}).get("app.kubernetes.io/version") or "of unknown version")


def find_lease(pods: Sequence[Document]) -> tuple[str, str] | None:
    """Return namespace and name of the Lease of the operator's pods; None without a pod."""
    for pod in pods:
        options = dict(argument.removeprefix("--").split("=", 1) for argument in _arguments(pod) if "=" in argument)
        return options.get("lease-namespace", pod["metadata"]["namespace"]), options.get("lease-name", "aerie-operator")
    return None


def _arguments(pod: Document) -> Sequence[str]:
    return pod["spec"]["containers"][0].get("args") or ()


def _is_ready(pod: Document) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _waiting_reasons(pod: Document) -> Iterator[str]:
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        if reason := ((container.get("state") or {}).get("waiting") or {}).get("reason"):
            yield str(reason)


# -------------------------------------------------------------------------------------------------------- admission and rights
def _check_admission(facts: ClusterFacts) -> CheckLine:
    title = "admission policy"
    if isinstance(facts.admission_bindings, Forbidden):
        return _unknown(title, "you may not list its bindings", "ask for list on validatingadmissionpolicybindings")
    if not facts.admission_bindings:
        text = "not installed: whoever may write a SpeculativeDeployment gets pods of the operator's making"
        return CheckLine(Mark.PROBLEM, title, text, "set admission.enabled: true in the chart (docs/concepts/security.md)")
    return CheckLine(Mark.OK, title, "installed and bound")


def _check_rights(facts: ClusterFacts) -> Iterator[CheckLine]:
    if isinstance(facts.rules, Forbidden):
        yield _unknown("your rights", "the API server does not list them", "kubectl auth can-i --list")
        return
    missing = {
        commands: [verb for verb in verbs if not is_allowed(facts.rules, verb, GROUP, PLURAL)]
        for commands, verbs in USED_VERBS.items()
    }
    missing = {commands: verbs for commands, verbs in missing.items() if verbs}
    where = f"in namespace {facts.namespace}"
    if not missing:
        yield CheckLine(Mark.OK, "your rights", f"all commands about resources {where}")
    for commands, verbs in missing.items():
        fix = (
            "ask for the ClusterRole aerie-view"
            if "patch" not in verbs
            else "ask for the ClusterRole aerie-edit, to make decisions"
        )
        mark = Mark.PROBLEM if "get" in verbs or "list" in verbs else Mark.UNKNOWN  # who only reads needs no more
        yield CheckLine(mark, "your rights", f"no {', '.join(verbs)} on {PLURAL} {where}, so you cannot use {commands}", fix)
    if not is_allowed(facts.rules, "get", "", "pods/proxy"):
        text = f"no get on pods/proxy {where}, so you cannot use diagnose pod/NAME"
        yield _unknown("your rights", text, "ask for it, or use kubectl port-forward and a URL")


def is_allowed(rules: Sequence[Mapping[str, Any]], verb: str, group: str, resource: str) -> bool:
    """Return whether rules without resource names allow a verb."""
    subresource = resource.partition("/")[2]
    return any(
        not rule.get("resourceNames")
        and {verb, "*"} & set(rule.get("verbs") or ())
        and {group, "*"} & set(rule.get("apiGroups") or ())
        and {resource, "*", *([f"*/{subresource}"] if subresource else [])} & set(rule.get("resources") or ())
        for rule in rules
    )


# ----------------------------------------------------------------------------------------------------------------- resources
@dataclass
class _Problems:
    """Names of resources by reason."""

    names: dict[str, list[str]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, view: ResourceView, message: str) -> None:
        self.names.setdefault(reason, []).append(f"{view.namespace}/{view.name}")
        self.messages.setdefault(reason, message)


_REASON_FIXES = {
    "MetricsUnavailable": "correct spec.metrics.source, prometheus.allowed and the token (docs/how-to/prometheus-source.md)",
    "VersionSkew": "apply crds/ of the newest release, and install that operator",
    "UnreadableSpec": "correct the field that the message names",
    "RouteNotAccepted": "correct the Gateway: kubectl describe gateway",
    "GatewayNotResponding": "check that a controller serves the Gateway",
    "ImagePullBackOff": "correct spec.engine.image, or add a pull secret",
}


def _check_resources(facts: ClusterFacts) -> Iterator[CheckLine]:
    if isinstance(facts.resources, Forbidden):
        yield _unknown("resources", f"you may not list {PLURAL}", "ask for the ClusterRole aerie-view, or set -n")
        return
    views = [ResourceView(item) for item in facts.resources]
    problems = _Problems()
    for view in views:
        degraded = view.condition("Degraded")
        if degraded.get("status") == "True":
            problems.add(str(degraded.get("reason")), view, str(degraded.get("message")))
        if not view.is_observed and view.metadata.get("generation"):
            problems.add("NotObserved", view, "the operator has not seen the present spec")
    for reason, names in problems.names.items():
        fix = _REASON_FIXES.get(reason, f"kubectl aerie status {names[0].partition('/')[2]} -n {names[0].partition('/')[0]}")
        yield CheckLine(Mark.PROBLEM, reason, f"{_list_some(names)}: {problems.messages[reason]}", fix)
    if not problems.names:
        phases = ", ".join(f"{count} {phase}" for phase, count in Counter(view.phase for view in views).most_common())
        yield CheckLine(Mark.OK, "resources", f"{len(views)}, none degraded" + (f" ({phases})" if phases else ""))
    yield from _check_gateways(facts, views)
    yield from _check_prometheus(views, problems)


def _check_gateways(facts: ClusterFacts, views: Sequence[ResourceView]) -> Iterator[CheckLine]:
    names = [f"{view.namespace}/{view.name}" for view in views if _uses_gateway(view)]
    if not names:
        return
    if isinstance(facts.has_gateway_api, Forbidden):
        yield _unknown("Gateway API", "you may not read the API's groups", "ask for the ClusterRole system:discovery")
    elif facts.has_gateway_api:
        yield CheckLine(
            Mark.OK, "Gateway API", f"installed; {len(names)} {'resource uses' if len(names) == 1 else 'resources use'} it"
        )
    else:
        fix = "install the Gateway API's definitions and a gateway, or write mode: Service"
        yield CheckLine(Mark.PROBLEM, "Gateway API", f"not installed, and {_list_some(names)} needs it", fix)


def _check_prometheus(views: Sequence[ResourceView], problems: _Problems) -> Iterator[CheckLine]:
    sources = [view for view in views if (view.spec.get("metrics") or {}).get("source")]
    if sources and "MetricsUnavailable" not in problems.names:
        addresses = sorted({str(view.spec["metrics"]["source"]["prometheus"]["address"]) for view in sources})
        yield CheckLine(Mark.OK, "Prometheus", f"{_list_some(addresses)}: the operator reports no failure")


def _uses_gateway(view: ResourceView) -> bool:
    return ((view.spec.get("rollout") or {}).get("traffic") or {}).get("mode") == "Gateway"


# --------------------------------------------------------------------------------------------------------------------- clock
def _check_clock(facts: ClusterFacts) -> CheckLine:
    if facts.server_time is None:
        return _unknown("clock", "the API server does not tell its time", "compare it by hand")
    early, late = facts.read_from - facts.server_time, facts.server_time - facts.read_until
    skew = max(early, late)  # the server reports whole seconds: it may be a second earlier
    if skew > MAX_CLOCK_SKEW:
        text = f"this machine is {skew.total_seconds():.0f} s {'ahead of' if early > late else 'behind'} the API server"
        return CheckLine(Mark.PROBLEM, "clock", f"{text}, so that ages mislead", "synchronise the clocks")
    return CheckLine(Mark.OK, "clock", f"within {MAX_CLOCK_SKEW.total_seconds():.0f} s of the API server's")


def _unknown(title: str, text: str, fix: str) -> CheckLine:
    return CheckLine(Mark.UNKNOWN, title, text, fix)


def _list_some(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
