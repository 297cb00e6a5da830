"""The objects that have to be there for a course, as they would be applied, and those that nothing asks for any more.

Guarantees: what is deleted is named by neither the status that was read nor the one that is written, so that a crash between the
two loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.resources import names, network, preflight, workload
from aerie.resources.drift import APPLIED, stamped
from aerie.resources.history import name as history_name
from aerie.resources.tuning import name as tuning_name
from aerie.rollout import history, kept
from aerie.rollout.course import Course
from aerie.rollout.fleet import owed
from aerie.rollout.observed import Observed, labels, owned
from aerie.rollout.plan import Reference
from aerie.rollout.templates import template_of, template_of_control
from aerie.rollout.traffic import ALL
from aerie.rollout.verdict import Verdict
from aerie.rollout.wanted import Wanted


def objects(
    observed: Observed, wanted: Wanted, course: Course, verdict: Verdict, runner: preflight.Runner
) -> Iterator[dict[str, Any]]:
    """All that has to be there, in the order in which it is applied."""
    resource = observed.resource
    made: list[dict[str, Any]] = [network.main_service(resource, course.only), *_budgets(resource, course)]
    made += _traffic(observed, wanted, course)
    needed = course.preflight or wanted.revision in (course.stable, course.rolling)
    template = template_of(observed, wanted, wanted.revision)
    if needed and template is not None:
        made.append(preflight.record(wanted.resource, wanted.revision, template, verdict.record))
    if course.preflight and template is not None and verdict.state == "Absent":
        # A Job cannot be changed: one that is there is left as it is.
        made.append(preflight.job(resource, wanted.revision, template, runner))
    made += _deployments(observed, wanted, course)
    memory = observed.memory
    if memory is not None and history.due(memory, history.written(observed), rolling=course.canary is not None):
        made.append(history.record(resource, memory))
    if observed.kept is not None and kept.due(observed):
        made.append(kept.record(resource, observed.kept))
    for item in made:
        yield stamped(_owned_by(resource, item))


def _budgets(resource: SpeculativeDeployment, course: Course) -> Iterator[dict[str, Any]]:
    """One for each revision that has pods, unless the user wants none."""
    if resource.spec.rollout.disruption.budget == "None":
        return
    revisions = (course.stable, course.rolling, course.previous.revision if course.previous is not None else None)
    for revision in dict.fromkeys(revisions):
        if revision is not None:
            yield workload.disruption_budget(resource, revision)


def _traffic(observed: Observed, wanted: Wanted, course: Course) -> Iterator[dict[str, Any]]:
    """In mode Gateway the Services of the arms, and after them the route that sends to them."""
    resource = observed.resource
    serving = course.stable or course.rolling
    if resource.spec.rollout.traffic.gateway is None or serving is None:
        return
    yield network.arm_service(resource, "stable", serving)
    weights = dict(course.weights)
    if course.stable is not None and course.rolling is not None:
        yield network.arm_service(resource, "canary", course.rolling)
        if _with_control(course):
            yield network.arm_service(resource, "control", course.stable)
        else:
            weights.pop("control", None)
    elif course.previous is not None and course.all_serve:
        yield network.arm_service(resource, "previous", course.previous.revision)
    elif course.stable is not None and (alone := _alone(observed, wanted, course.stable)) is not None:
        arm, revision = alone
        yield network.arm_service(resource, arm, revision)
        weights = {"stable": 0, arm: ALL}
    else:
        weights = {"stable": ALL}
    yield network.route(resource, weights)


def _deployments(observed: Observed, wanted: Wanted, course: Course) -> Iterator[dict[str, Any]]:
    resource, arms = observed.resource, course.arms
    if course.stable is None:
        first = template_of(observed, wanted, course.rolling) if course.rolling is not None else None
        if course.rolling is not None and first is not None:
            yield workload.deployment(resource, first, course.rolling, "stable", arms.canary)
        return
    stable = template_of(observed, wanted, course.stable)
    if stable is not None:
        yield workload.deployment(resource, stable, course.stable, "stable", arms.stable)
    if course.previous is not None:
        before = template_of(observed, wanted, course.previous.revision)
        if before is not None:
            yield workload.deployment(resource, before, course.previous.revision, "previous", course.previous.replicas)
    if course.rolling is None:
        return
    mine = template_of(observed, wanted, course.rolling)
    if mine is not None:
        yield workload.deployment(resource, mine, course.rolling, "canary", arms.canary)
    if stable is not None and _with_control(course):
        beside = template_of_control(observed, stable, course.stable)
        yield workload.deployment(resource, beside, course.stable, "control", arms.control)


def _alone(observed: Observed, wanted: Wanted, stable: str) -> tuple[str, str] | None:
    """Where no stable pod serves: the arm and the revision of what a rollout has left behind and serves, and is not about to be
    deleted (`superfluous`): the pods of a control, first of the stable revision; those of the desired revision; any pods while
    the rollout rests."""
    if observed.serving(stable):
        return None
    owner = observed.resource.metadata.uid
    found = []
    for one in observed.of("Deployment"):
        revision, control = labels(one).get(names.REVISION), labels(one).get(names.CONTROL) == "true"
        if revision is None or not owned(one, owner) or one["metadata"].get("deletionTimestamp"):
            continue
        if (control or revision == wanted.revision or observed.rests) and observed.serving(revision, control=control):
            found.append((not control, revision != stable, revision))
    if not found:
        return None
    canary, _, revision = min(found)
    return ("canary" if canary else "control"), revision


def _with_control(course: Course) -> bool:
    return course.arms.control > 0


def outdated(observed: Observed, wanted: Wanted, verdict: Verdict, runner: preflight.Runner) -> bool:
    """Whether a Job without a verdict runs with what the operator was given before, such as pull secrets or an image."""
    job = observed.child("Job", preflight.name(observed.resource.metadata.name, wanted.revision))
    if job is None or verdict.state not in ("Running", "Error"):
        return False
    template = template_of(observed, wanted, wanted.revision)
    if template is None:
        return False
    made = stamped(_owned_by(observed.resource, preflight.job(observed.resource, wanted.revision, template, runner)))
    applied = (job["metadata"].get("annotations") or {}).get(APPLIED)
    # What webhooks have changed in the Job is theirs; only what was asked for is compared.
    return bool(applied != made["metadata"]["annotations"][APPLIED])


def superfluous(
    observed: Observed, wanted: Wanted, made: list[dict[str, Any]], course: Course, at: datetime, *, over: bool
) -> Iterator[Reference]:
    """Our own objects that nothing asks for any more. `over`: the Job is to be made anew."""
    resource = observed.resource
    status = resource.status or Status()
    before = {arm.revision for arm in (status.stable, status.canary, status.previous) if arm is not None}
    now = (course.stable, course.rolling, course.previous.revision if course.previous is not None else None)
    named = before | {revision for revision in now if revision}
    controlled = status.stable is not None and status.canary is not None and status.canary.control is not None
    there = {(item["kind"], item["metadata"]["name"]) for item in made}
    for child in observed.children:
        key = (child["kind"], child["metadata"]["name"])
        if key in there or not owned(child, resource.metadata.uid) or child["metadata"].get("deletionTimestamp"):
            continue
        of, kind = labels(child).get(names.REVISION), child["kind"]
        if kind == "Deployment" and of in named and (labels(child).get(names.CONTROL) != "true" or controlled):
            continue  # a crash may have kept what comes after it out of the status
        control = labels(child).get(names.CONTROL) == "true"
        # A control that the canary under way has use for is missing from what is made where nothing tells what its pods are.
        unmade = course.canary is None or of != course.stable or _with_control(course)
        stays = of == wanted.revision or (control and unmade)
        if kind == "Deployment" and of and stays and observed.serving(of, control=control) and owed(observed, named, at):
            continue  # it stands in until other pods serve, though nothing asks for it: the control of a canary that is gone
        if kind == "PodDisruptionBudget" and of in named and resource.spec.rollout.disruption.budget != "None":
            continue  # that of its pods
        if kind == "ConfigMap" and (of in named or of == wanted.revision):
            continue  # the record of its pods
        if key == ("ConfigMap", history_name(resource.metadata.name)):
            continue  # what stable pods told, of whatever revision
        if key == ("ConfigMap", tuning_name(resource.metadata.name)) and kept.tunes(resource):
            continue  # what the tuner knows
        if kind == "Job" and of == wanted.revision and not over:
            continue  # the record of the verdict
        yield Reference(*key, child["metadata"]["uid"])


def _owned_by(resource: SpeculativeDeployment, item: dict[str, Any]) -> dict[str, Any]:
    owner = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": resource.metadata.name,
        "uid": resource.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {**item["metadata"], "namespace": resource.metadata.namespace, "ownerReferences": [owner]}
    return {**item, "metadata": metadata}
