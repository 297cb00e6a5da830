"""The decision about one resource: from what was observed to what is to be done.

    revision of the spec ─┬─ is the stable one ──────────────────────────────► keep it
                          ├─ failed before ──────────────────────────────────► keep the stable one, say why
                          ├─ preflight: none yet, running, refused, error ───► no engine pod; say what is wrong
                          └─ preflight passed ─► its pods start ─┬─ all serve ► it is stable; the old one goes
                                                                 └─ too late ─► it goes; the stable one was never touched

Guarantees: a function of its arguments. What is deleted is named by neither the status that was read nor the one that is
written, so that a crash between the two loses nothing. Paused, nothing is applied or deleted, and the status goes on.
Not guaranteed: that two changes in a row are both rolled out; the last one is, and the other is told as superseded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, Source, VolumeClaimSource
from aerie.api.status import Arm, CanaryArm, Outcome, Phase, SpeculationStatus, Status
from aerie.api.status import Setting as StatusSetting
from aerie.engine import arguments, flags, versions
from aerie.engine.catalog import Catalog
from aerie.engine.speculation import Off, Setting, Static, max_tokens
from aerie.resources import names, network, pod, preflight, workload
from aerie.resources.drift import drifted, stamped
from aerie.resources.protect import TemplateError
from aerie.resources.revision import revision
from aerie.rollout import pods
from aerie.rollout.choice import choose
from aerie.rollout.conditions import DEGRADED, PREFLIGHT_PASSED, PROGRESSING, READY, Finding, conditions, events, shortened
from aerie.rollout.figures import with_figures
from aerie.rollout.leftovers import AGAIN_AFTER as LEFT_UNTIL
from aerie.rollout.leftovers import without_leftovers
from aerie.rollout.observed import Observed, labels, owned
from aerie.rollout.plan import Event, Plan, Reference
from aerie.rollout.verdict import AGAIN_AFTER, Verdict, verdict_of

KEPT_OUTCOMES = 10
NO_CATALOG = Catalog(())


@dataclass(frozen=True)
class Wanted:
    """What the spec asks for: a revision and its pods. `problem` says why it asks for none that could run."""

    setting: Setting
    revision: str
    template: dict[str, Any] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Course:
    """Where the rollout stands after this step."""

    stable: str | None
    rolling: str | None
    """The revision whose pods are to start beside the stable ones, or before there are any."""
    started_at: datetime | None
    phase: Phase
    progressing: Finding
    passed: Finding
    outcome: Outcome | None = None
    preflight: bool = False
    """Whether the Job has to be there."""
    again: timedelta | None = None


def decide(observed: Observed, preflight_image: str, now: datetime, catalog: Catalog = NO_CATALOG) -> Plan:
    """What is to be done about the resource now. `preflight_image` is the operator's own, and so is the catalog."""
    choice = choose(observed.resource, catalog)
    resource = choice.resource
    observed, leftovers = without_leftovers(replace(observed, resource=resource))
    wanted = read_wanted(resource, choice.problem)
    verdict = verdict_of(observed, wanted.revision)
    course = _course(observed, wanted, verdict, now)
    objects = [] if resource.spec.rollout.paused else list(_objects(resource, wanted, course, verdict, preflight_image))
    taken, missing = [], []
    for item in objects:
        if item in leftovers:
            continue
        live = observed.child(item["kind"], item["metadata"]["name"]) or _namesake(observed, item)
        if live is not None and not owned(live, resource.metadata.uid):
            taken.append(live)
        elif drifted(live, item):
            missing.append(item)
    delete = () if resource.spec.rollout.paused else tuple(_superfluous(observed, wanted, objects, course, verdict, now))
    chosen = choice.recorded(used=wanted.revision in (course.stable, course.rolling))
    status = _status(observed, wanted, course, taken, now).model_copy(update={"drafters": chosen})
    news = (*choice.events(), *events(resource.status, status), *_outcome_events(course))
    told = dict.fromkeys(news)  # two conditions may say the same
    again = min(course.again or LEFT_UNTIL, LEFT_UNTIL) if leftovers.names else course.again
    return Plan(tuple(missing), delete, status, tuple(told), again)


def refused(plan: Plan, before: Status | None, refusals: list[str], now: datetime) -> Plan:
    """The plan after the API server has refused some of its objects: the status says so."""
    finding = Finding(DEGRADED, "True", "Refused", "the API server refused " + "; ".join(sorted(refusals)))
    others = [Finding(c.type, c.status, c.reason, c.message) for c in plan.status.conditions if c.type != DEGRADED]
    made = conditions([*others, finding], before, plan.status.observed_generation, now)
    status = plan.status.model_copy(update={"conditions": made})
    news = tuple(event for event in events(before, status) if event.reason == "Refused")
    return replace(plan, status=status, events=plan.events + news, again=timedelta(minutes=1))


# ------------------------------------------------------------------------------------------------------------ what is asked for
def read_wanted(resource: SpeculativeDeployment, no_drafter: str = "") -> Wanted:
    """The revision that the spec asks for. `no_drafter` says why none was chosen, where the spec names none."""
    spec = resource.spec
    setting: Setting = Static(spec.speculation.tokens) if spec.speculation.tokens else Off()
    wanted = Wanted(setting, revision(resource, setting))
    if spec.drafter is None and not isinstance(setting, Off):
        return replace(wanted, problem=no_drafter or "spec.drafter is missing: write one, or spec.speculation.tokens: 0.")
    engine = versions.resolve(spec.engine.image, spec.engine.version)
    if isinstance(engine, versions.NoVersion):
        return replace(wanted, problem=engine.sentence)
    try:
        config = None
        if spec.drafter is not None:
            drafter = flags.Drafter(pod.drafter_location(resource) or "", spec.drafter.method, _commit(spec.drafter.source))
            config = flags.speculative_config(setting, drafter, engine.version, arguments.read(spec.engine.args))
        return replace(wanted, template=pod.template(resource, config))
    except (arguments.ArgumentError, TemplateError) as error:
        return replace(wanted, problem=str(error))


def _commit(source: Source) -> str | None:
    return source.given.revision if isinstance(source.given, HuggingFaceSource) else None


# ----------------------------------------------------------------------------------------------------------------- the course
def _course(observed: Observed, wanted: Wanted, verdict: Verdict, now: datetime) -> Course:
    resource = observed.resource
    status = resource.status or Status()
    stable = status.stable.revision if status.stable else None
    rolling = status.canary.revision if status.canary else None
    passed = verdict.finding(wanted.revision)
    if resource.spec.rollout.paused:
        finding = Finding(PROGRESSING, "False", "Paused", "spec.rollout.paused is true: nothing is changed until it is false")
        return Course(stable, rolling, status.canary.started_at if status.canary else None, "Paused", finding, passed)
    superseded = _superseded(status, wanted.revision, now)
    if wanted.revision == stable:
        done = Finding(PROGRESSING, "False", "Complete", f"revision {stable} is rolled out")
        kept = (
            passed
            if verdict.state != "Absent"
            else Finding(PREFLIGHT_PASSED, "True", "Passed", "passed before it was rolled out")
        )
        return Course(stable, None, None, "Ready", done, kept, superseded)
    if wanted.problem:
        finding = Finding(PROGRESSING, "False", "InvalidSpec", wanted.problem)
        told = Finding(PREFLIGHT_PASSED, "False", "InvalidSpec", wanted.problem)
        return Course(stable, None, None, "Failed", finding, told, superseded)
    if (last := next(iter(status.history), None)) is not None and (last.revision, last.result) == (wanted.revision, "Failed"):
        finding = Finding(
            PROGRESSING, "False", "ProgressDeadlineExceeded", f"{last.reason} It is not tried again until the spec changes."
        )
        return Course(stable, None, None, "Failed", finding, passed)
    if verdict.state != "Passed":
        phase: Phase = "Failed" if verdict.state == "Refused" else "Preflight"
        finding = Finding(PROGRESSING, "False" if verdict.state == "Refused" else "True", passed.reason, passed.message)
        again = AGAIN_AFTER if verdict.state == "Error" else None
        return Course(stable, None, None, phase, finding, passed, superseded, preflight=True, again=again)
    return _surge(observed, wanted, passed, stable, superseded, now)


def _surge(
    observed: Observed, wanted: Wanted, passed: Finding, stable: str | None, superseded: Outcome | None, now: datetime
) -> Course:
    """New pods beside the old ones; when all serve, they are the stable ones."""
    resource = observed.resource
    status, spec = resource.status or Status(), resource.spec
    known = status.canary if status.canary and status.canary.revision == wanted.revision else None
    started = known.started_at if known else now
    group = observed.group(wanted.revision)
    serving = sum(pods.ready(one) for one in group)
    if known and serving >= spec.replicas:
        reason = f"all {spec.replicas} pods serve" if spec.replicas else "no pods are asked for"
        outcome = _outcome(wanted.revision, known.change, "Promoted", f"Revision {wanted.revision}: {reason}.", started, now)
        done = Finding(PROGRESSING, "False", "Complete", f"revision {wanted.revision} is rolled out")
        return Course(wanted.revision, None, None, "Ready", done, passed, outcome)
    trouble = pods.worst(group, observed.last_lines)
    told = f"{serving} of {spec.replicas} pods of revision {wanted.revision} serve" + (f": {trouble.message}" if trouble else "")
    left = started + spec.rollout.progress_deadline - now
    if left > timedelta(0):
        finding = Finding(PROGRESSING, "True", trouble.reason if trouble else "Starting", told)
        phase: Phase = "Promoting" if stable else "Starting"
        return Course(stable, wanted.revision, started, phase, finding, passed, superseded, preflight=True, again=left)
    late = f"{told}, and spec.rollout.progressDeadline is over."
    finding = Finding(PROGRESSING, "False", "ProgressDeadlineExceeded", late)
    if stable is None:  # its pods stay: nothing else serves, and they show what is wrong
        return Course(None, wanted.revision, started, "Failed", finding, passed, superseded, preflight=True)
    outcome = _outcome(wanted.revision, known.change if known else "", "Failed", _sentence(late), started, now)
    return Course(stable, None, None, "Failed", finding, passed, outcome)


def _superseded(status: Status, wanted: str, now: datetime) -> Outcome | None:
    """How the rollout under way ends when something else is wanted."""
    canary = status.canary
    if canary is None or canary.revision == wanted:
        return None
    return _outcome(canary.revision, canary.change, "Superseded", "The spec has changed.", canary.started_at, now)


Result = Literal["Promoted", "RolledBack", "Superseded", "Failed"]


def _outcome(of: str, change: str, result: Result, reason: str, started: datetime, ended: datetime) -> Outcome:
    return Outcome(revision=of, change=change, result=result, reason=shortened(reason), started_at=started, ended_at=ended)


def _outcome_events(course: Course) -> Iterator[Event]:
    if course.outcome is not None:
        kind: Literal["Normal", "Warning"] = "Warning" if course.outcome.result == "Failed" else "Normal"
        yield Event(kind, course.outcome.result, course.outcome.reason)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# ------------------------------------------------------------------------------------------------------------------- children
def _objects(
    resource: SpeculativeDeployment, wanted: Wanted, course: Course, verdict: Verdict, image: str
) -> Iterator[dict[str, Any]]:
    """All that has to be there, as it would be applied."""
    made: list[dict[str, Any]] = [network.main_service(resource), workload.disruption_budget(resource)]
    serving = course.stable or course.rolling
    if resource.spec.rollout.traffic.gateway is not None and serving is not None:
        made += [network.arm_service(resource, "stable", serving), network.route(resource, {"stable": 100})]
    if course.preflight and verdict.state in ("Absent", "Running"):
        made.append(preflight.config_map(resource, wanted.revision))
    if course.preflight and verdict.state == "Absent":  # a Job cannot be changed: one that is there is left as it is
        made.append(preflight.job(resource, wanted.revision, image))
    if wanted.template is not None and wanted.revision in (course.stable, course.rolling):
        arm = "stable" if course.stable in (None, wanted.revision) else "canary"
        made.append(workload.deployment(resource, wanted.template, wanted.revision, arm, resource.spec.replicas))
    for item in made:
        yield stamped(_owned_by(resource, item))


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


def _namesake(observed: Observed, item: dict[str, Any]) -> Any:
    wanted = (item["kind"], item["metadata"]["name"])
    return next((one for one in observed.namesakes if (one["kind"], one["metadata"]["name"]) == wanted), None)


def _superfluous(
    observed: Observed, wanted: Wanted, objects: list[dict[str, Any]], course: Course, verdict: Verdict, now: datetime
) -> Iterator[Reference]:
    """Our own objects that nothing asks for any more."""
    resource = observed.resource
    status = resource.status or Status()
    named = {course.stable, course.rolling}
    named |= {arm.revision for arm in (status.stable, status.canary) if arm is not None}
    there = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for child in observed.children:
        key = (child["kind"], child["metadata"]["name"])
        if key in there or not owned(child, resource.metadata.uid) or child["metadata"].get("deletionTimestamp"):
            continue
        of = labels(child).get(names.REVISION)
        if child["kind"] == "Deployment" and of in named:
            continue  # as it is: its template is that of a spec that has changed since
        if child["kind"] in ("Job", "ConfigMap") and of == wanted.revision and not (child["kind"] == "Job" and verdict.over(now)):
            continue  # the record of the verdict
        yield Reference(*key, child["metadata"]["uid"])


# --------------------------------------------------------------------------------------------------------------------- status
def _status(observed: Observed, wanted: Wanted, course: Course, taken: list[Any], now: datetime) -> Status:
    resource = observed.resource
    before = resource.status or Status()
    replicas = resource.spec.replicas
    stable = None
    if course.stable is not None:
        group = observed.group(course.stable)
        if course.stable == wanted.revision:
            stable = _arm(resource, wanted, replicas)
        else:  # a spec of before: what is known of it is in the status
            assert before.stable is not None
            stable = before.stable
        ready = sum(pods.ready(one) for one in group)
        stable = stable.model_copy(update={"replicas": replicas, "ready_replicas": ready, "weight": 100})
        stable = with_figures(stable, before.stable, observed.figures_of(course.stable))
    canary = None
    if course.rolling is not None and course.started_at is not None:
        group = observed.group(course.rolling)
        known = before.canary if before.canary and before.canary.revision == course.rolling else None
        base = known or CanaryArm(
            **dict(_arm(resource, wanted, replicas)),
            change=_change(before, resource, wanted),
            started_at=course.started_at,
        )
        canary = base.model_copy(update={"replicas": replicas, "ready_replicas": sum(pods.ready(one) for one in group)})
        canary = with_figures(canary, known, observed.figures_of(course.rolling))
    arms = [arm for arm in (stable, canary) if arm is not None]
    history = ([course.outcome] if course.outcome else []) + before.history
    findings = [
        _ready(observed, stable, canary, course),
        course.progressing,
        course.passed,
        _degraded(observed, course, taken),
    ]
    return Status(
        observed_generation=resource.metadata.generation,
        phase=course.phase,
        conditions=conditions(findings, resource.status, resource.metadata.generation, now),
        replicas=sum(arm.replicas for arm in arms),
        ready_replicas=sum(arm.ready_replicas for arm in arms),
        selector=f"{names.NAME}={resource.metadata.name}",
        stable=stable,
        canary=canary,
        analysis=before.analysis,
        speculation=SpeculationStatus(current=stable.setting) if stable is not None and stable.setting is not None else None,
        history=history[:KEPT_OUTCOMES],
    )


def _arm(resource: SpeculativeDeployment, wanted: Wanted, replicas: int) -> Arm:
    tokens = max_tokens(wanted.setting)
    return Arm(
        revision=wanted.revision,
        drafter=_in_short(resource.spec.drafter.source) if resource.spec.drafter and tokens else None,
        setting=StatusSetting(mode="Static" if tokens else "Off", tokens=tokens),
        replicas=replicas,
    )


def _in_short(source: Source) -> str:
    match source.given:
        case HuggingFaceSource(repo=repo, revision=commit):
            return f"{repo}@{commit[:8]}"
        case VolumeClaimSource(claim_name=claim, path=path):
            return f"{claim}/{path}".rstrip("/")
        case image:
            return f"{image.reference.partition('@')[0]}{image.path}".rstrip("/")


def _change(before: Status, resource: SpeculativeDeployment, wanted: Wanted) -> str:
    """What is new, in a word."""
    if before.stable is None:
        return "first revision"
    new = _arm(resource, wanted, 0)
    if new.drafter != before.stable.drafter:
        return f"drafter {new.drafter}"
    if new.setting != before.stable.setting:
        return f"K={max_tokens(wanted.setting)}"
    return "engine or target"


def _ready(observed: Observed, stable: Arm | None, canary: CanaryArm | None, course: Course) -> Finding:
    replicas = observed.resource.spec.replicas
    if stable is None:
        told = course.progressing.message  # with pods under way it counts them
        return Finding(READY, "False", course.progressing.reason, told if canary else f"no pod has been started: {told}")
    if replicas == 0:
        return Finding(READY, "True", "ScaledToZero", "spec.replicas is 0: no pod is asked for")
    serving = f"{stable.ready_replicas} of {replicas} pods serve"
    if stable.ready_replicas >= replicas:
        return Finding(READY, "True", "Serving", serving)
    trouble = pods.worst(observed.group(stable.revision), observed.last_lines)
    return Finding(
        READY, "False", trouble.reason if trouble else "Starting", f"{serving}: {trouble.message}" if trouble else serving
    )


def _degraded(observed: Observed, course: Course, taken: list[Any]) -> Finding:
    if taken:
        first = taken[0]
        references = first["metadata"].get("ownerReferences") or []
        owner = next((f"{one['kind']} {one['name']}" for one in references if one.get("controller")), "somebody else")
        kind, name = first["kind"], first["metadata"]["name"]
        message = f"{kind} {name} belongs to {owner}, and Aerie needs the name: delete or rename it, or rename the resource"
        return Finding(DEGRADED, "True", "NameTaken", message)
    trouble = pods.worst(observed.group(course.stable), observed.last_lines) if course.stable else None
    if trouble is not None and not trouble.waits:
        return Finding(DEGRADED, "True", trouble.reason, trouble.message)
    return Finding(DEGRADED, "False", "AsExpected", "nothing is amiss")
