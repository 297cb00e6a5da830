"""The decision about one resource: from what was observed to what is to be done.

    choice ─► tuned ─► wanted ─► verdict ─► course ─► children ─► handover ─► Plan
                                                └──► report ──►

Guarantees: a function of its arguments. Paused, nothing is applied or deleted, and the status goes on. While a kind cannot be
listed, or a field of the spec cannot be read (last_spec.py), the rollout rests as if paused: nothing of that kind, or that
follows from that field, is applied, nothing at all deleted, and no arm of a rollout loses pods; the rest is repaired and scaled.
What the status says of the rollout stays while the spec cannot be read. A decision that writes nothing never asks for another one
at once, so that nothing spins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import Purpose, Status
from aerie.engine.models.drafter_catalog import Catalog
from aerie.manifests.apply_diff import drifted
from aerie.manifests.preflight_job import Runner
from aerie.rollout.capacity import drain_order, service_handover
from aerie.rollout.children.desired import objects, outdated, superfluous
from aerie.rollout.conditions import DEGRADED, PROGRESSING, Finding, conditions, events
from aerie.rollout.facts import concurrency, hardware
from aerie.rollout.facts.orphans import AGAIN_AFTER as LEFT_UNTIL
from aerie.rollout.facts.orphans import without_leftovers
from aerie.rollout.facts.route_status import unanswered
from aerie.rollout.facts.snapshot import Observed, owned
from aerie.rollout.plan import Event, Plan
from aerie.rollout.progression import Course, course
from aerie.rollout.revision.desired import read_wanted
from aerie.rollout.revision.drafter_selection import choose
from aerie.rollout.revision.preflight_result import verdict_of
from aerie.rollout.revision.recovery import recovered
from aerie.rollout.status.build import report
from aerie.rollout.status.hold import resting
from aerie.rollout.trials import effective_setting

NO_CATALOG = Catalog(())
_OF_THE_SPEC = ("speculation", "drafters", "rejected", "retry")
"""Fields of the status that follow from what the spec asks for, which is not known where a part of it cannot be read."""
LEAST_PAUSE = timedelta(seconds=1)
"""Between a decision that writes nothing and the next one."""


def decide(observed: Observed, runner: Runner, now: datetime, catalog: Catalog = NO_CATALOG) -> Plan:
    """What is to be done about the resource now. `runner` and catalog are the operator's own."""
    choice = choose(observed.resource, catalog)
    resource = choice.resource
    observed, leftovers = without_leftovers(replace(observed, resource=resource))
    observed, overdue = observed.alive(now)
    observed = recovered(observed, now)
    paused = observed.resource.spec.rollout.paused
    if observed.rests:
        observed = replace(observed, resource=_resting(observed.resource))
    resource = observed.resource
    asked = effective_setting.asked(observed, now)
    wanted = read_wanted(resource, choice.problem, asked.setting, asked.trial)
    verdict = verdict_of(observed, wanted.revision, now)
    way = effective_setting.with_end(course(observed, wanted, verdict, now), observed, asked, now)
    intent = effective_setting.intended(observed, asked, way, now)
    if (why := resting(observed)) is not None and not paused:
        way = replace(way, progressing=Finding(PROGRESSING, "False", why.reason, why.message))
    made = [] if paused else list(objects(observed, wanted, way, verdict, runner))
    made = [item for item in made if item["kind"] not in observed.unknown]
    made, handed_over = service_handover.ordered(observed, made, now)
    held_up = min(filter(None, (handed_over, drain_order.left(observed, made, now))), default=None)
    halted = observed.rests and (way.canary is not None or way.previous is not None)
    taken, missing = [], []
    for item in made:
        if item in leftovers or ((held_up or halted) and drain_order.shrinks(observed, item)):
            continue
        live = observed.child(item["kind"], item["metadata"]["name"]) or _namesake(observed, item)
        if live is not None and not owned(live, resource.metadata.uid):
            taken.append(live)
        elif item["kind"] == "HTTPRoute" and _leads_to(item, taken):
            continue  # its requests would go to somebody else's pods
        elif drifted(live, item):
            missing.append(item)
    over = verdict.over or outdated(observed, wanted, verdict, runner)
    delete = () if paused or observed.rests else tuple(superfluous(observed, wanted, made, way, now, over=over))
    if held_up:
        delete = tuple(filter(drain_order.may_go, delete))
    chosen = choice.recorded(used=wanted.revision in (way.stable, way.rolling))
    claims: Purpose | None = "Rollout" if way.queued else "Trial" if intent.queued else None
    queued = concurrency.queued(claims, resource.status or Status(), now)
    status = report(observed, wanted, way, taken, now, asked, intent)
    status = status.model_copy(update={"drafters": chosen, "queued": queued})
    if observed.substitute is not None:
        status = status.model_copy(update={name: getattr(resource.status or Status(), name) for name in _OF_THE_SPEC})
    news = (
        *(() if observed.substitute is not None else choice.events()),
        *events(resource.status, status),
        *_outcome(way),
        *_next_share(resource.status, status),
    )
    told = dict.fromkeys(news)  # two conditions may say the same
    soon = timedelta(0) if intent.trial is not None else effective_setting.again(observed, asked, way, now)
    lost = overdue - now if overdue is not None else None
    waits = (soon, way.again, held_up, LEFT_UNTIL if leftovers.names else None, unanswered(observed, now)[1], lost)
    again = min((one for one in waits if one is not None), default=None)
    if again is not None and not (missing or delete or told) and status == choice.resource.status:
        again = again if again > timedelta(0) else LEAST_PAUSE
    return Plan(tuple(missing), delete, status, tuple(told), again, hardware.nodes_of(observed, status))


def _resting(resource: SpeculativeDeployment) -> SpeculativeDeployment:
    rollout = resource.spec.rollout.model_copy(update={"paused": True})
    return resource.model_copy(update={"spec": resource.spec.model_copy(update={"rollout": rollout})})


def refused(plan: Plan, before: Status | None, refusals: list[str], now: datetime) -> Plan:
    """The plan after the API server has refused some of its objects: the status says so."""
    finding = Finding(DEGRADED, "True", "Refused", "the API server refused " + "; ".join(sorted(refusals)))
    others = [Finding(c.type, c.status, c.reason, c.message) for c in plan.status.conditions if c.type != DEGRADED]
    made = conditions([*others, finding], before, plan.status.observed_generation, now)
    status = plan.status.model_copy(update={"conditions": made})
    news = tuple(event for event in events(before, status) if event.reason == "Refused")
    return replace(plan, status=status, events=plan.events + news, again=timedelta(minutes=1))


def _leads_to(route: dict[str, Any], taken: list[Any]) -> bool:
    """Whether the route sends requests to a Service that is somebody else's."""
    services = {item["metadata"]["name"] for item in taken if item["kind"] == "Service"}
    return any(backend["name"] in services for rule in route["spec"]["rules"] for backend in rule["backendRefs"])


def _outcome(way: Course) -> Iterator[Event]:
    """How a rollout has ended."""
    if way.outcome is not None:
        good = way.outcome.result in ("Promoted", "Superseded", "Explored")
        yield Event("Normal" if good else "Warning", way.outcome.result, way.outcome.reason)


def _next_share(before: Status | None, after: Status) -> Iterator[Event]:
    """A step of the ramp that follows another: the condition's reason stays, and it is news all the same."""
    if before is None or before.canary is None or after.canary is None or before.canary.step is None:
        return
    if after.canary.phase == "Ramping" and after.canary.step != before.canary.step:
        message = next(one.message for one in after.conditions if one.type == "Progressing")
        yield Event("Normal", "Ramping", message)


def _namesake(observed: Observed, item: dict[str, Any]) -> Any:
    wanted = (item["kind"], item["metadata"]["name"])
    return next((one for one in observed.namesakes if (one["kind"], one["metadata"]["name"]) == wanted), None)
