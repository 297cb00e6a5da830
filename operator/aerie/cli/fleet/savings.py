"""Replica-hours and GPU-hours that speculation settings have saved, and what their trials have cost.

The operator calculates both at the end of a trial (`status.speculation.savings`), and the rate at which the applied setting saves
since then. This module adds that rate up to now, and converts hours of a replica into hours of its GPUs.

Guarantees: pure. Replica-hours are added only of resources whose pods have the same GPUs: an hour of a pod with eight is another
unit than one of a pod with one. GPU-hours are added by the name of the GPU resource. Not included: what speculation saves
against no speculation, and what a rollout of a drafter saves or costs. Not guaranteed: an interval, which the status does not
have. Each figure is an estimate from the measured gains of the trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aerie.cli.fleet.resource_view import Object, ResourceView, format_age, parse_time

_HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class ResourceSavings:
    """Savings of one resource, in hours of one replica."""

    namespace: str
    name: str
    saved: float
    """Until now: as of the last update, and at the present rate since then."""
    spent: float
    current_rate: float
    """Share of the replicas that the applied setting saves at present."""
    update_time: datetime
    since: datetime | None
    """Begin of the oldest trial that the status has; older ones, which count too, are forgotten there."""
    has_older_trials: bool
    gpus_per_replica: Mapping[str, float]
    """Number by name of the GPU resource; empty where the spec does not tell."""

    @property
    def net(self) -> float:
        return self.saved - self.spent


MAX_TRIAL_RECORDS = 5
"""Trials that a status keeps (`aerie.api.status.tuning`); a full list may have had older ones."""


def read_savings(view: ResourceView, now: datetime) -> ResourceSavings | None:
    """Return the savings of a resource; None before its first trial."""
    speculation = view.status.get("speculation") or {}
    savings = speculation.get("savings")
    update_time = parse_time((savings or {}).get("updateTime"))
    if not savings or update_time is None:
        return None
    rate = float(savings.get("currentRate", 0.0))
    hours = max(timedelta(0), now - update_time) / _HOUR
    trials = speculation.get("trials") or ()
    starts = [start for trial in trials if (start := parse_time(trial.get("startTime"))) is not None]
    return ResourceSavings(
        view.namespace,
        view.name,
        float(savings.get("saved", 0.0)) + rate * view.desired_replicas * hours,
        float(savings.get("spent", 0.0)),
        rate,
        update_time,
        min(starts, default=None),
        len(trials) >= MAX_TRIAL_RECORDS,
        count_gpus(view.spec),
    )


def count_gpus(spec: Object) -> Mapping[str, float]:
    """Return the GPUs of a pod by resource name, such as nvidia.com/gpu; without shares of one, whose size is unknown."""
    limits = ((spec.get("engine") or {}).get("resources") or {}).get("limits") or {}
    counts = {name: str(quantity) for name, quantity in limits.items() if name.endswith("/gpu")}
    return {name: float(quantity) for name, quantity in counts.items() if quantity.isdecimal()}


def are_replicas_equal(items: Sequence[ResourceSavings]) -> bool:
    """Return whether an hour of a replica is the same unit in all resources."""
    first = items[0].gpus_per_replica
    return len(items) == 1 or (bool(first) and all(item.gpus_per_replica == first for item in items))


def sum_gpu_hours(items: Sequence[ResourceSavings]) -> Mapping[str, float]:
    """Return the net GPU-hours by resource name."""
    totals: Counter[str] = Counter()
    for item in items:
        for name, count in item.gpus_per_replica.items():
            totals[name] += item.net * count  # type: ignore[assignment]  # a Counter of floats
    return dict(totals)


# -------------------------------------------------------------------------------------------------------------------- screen
def render_savings(items: Sequence[ResourceSavings], now: datetime, *, resource_count: int) -> RenderableType:
    """Return a line for each resource with trials, totals, and their meaning."""
    if not items:
        return Text(f"No trial of a speculation setting has ended yet in {resource_count} resources.")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("RESOURCE", "SAVED", "TRIALS", "NET", "NOW", "GPU-HOURS", "SINCE"):
        table.add_column(
            title, justify="left" if title in ("RESOURCE", "SINCE") else "right", no_wrap=title != "RESOURCE", overflow="fold"
        )
    for item in sorted(items, key=lambda item: -item.net):
        gpu_hours = sum(item.net * count for count in item.gpus_per_replica.values()) if item.gpus_per_replica else None
        since = "?" if item.since is None else f"{'before ' if item.has_older_trials else ''}{item.since:%Y-%m-%d}"
        table.add_row(
            Text(_clean(f"{item.namespace}/{item.name}")),
            f"{item.saved:.1f} h",
            f"-{item.spent:.1f} h",
            Text(f"{item.net:+.1f} h", "green" if item.net > 0 else "red" if item.net < 0 else ""),
            f"{100 * item.current_rate:+.1f} %",
            "?" if gpu_hours is None else f"{gpu_hours:+.1f}",
            since,
        )
    return Group(table, Text(), *(Text(line, style) for line, style in _list_notes(items, now, resource_count)))


def _list_notes(items: Sequence[ResourceSavings], now: datetime, resource_count: int) -> Iterator[tuple[str, str]]:
    net, spent = sum(item.net for item in items), sum(item.spent for item in items)
    if are_replicas_equal(items):
        yield f"Estimate: {net:+.1f} replica-hours net, after {spent:.1f} for trials.", "bold"
    else:
        yield "Replica-hours are not added: the pods have different GPUs, or the spec does not tell them.", "dim"
    for name, hours in sorted(sum_gpu_hours(items).items()):
        yield (
            f"Estimate: {hours:+.1f} GPU-hours net of {_clean(name)}. Hours of unlike GPUs are alike only by their name.",
            "bold",
        )
    if unknown := [item for item in items if not item.gpus_per_replica]:
        yield f"GPUs of a pod are not in the spec of {len(unknown)} of {len(items)} resources: they are in no GPU-hours.", "dim"
    if without := resource_count - len(items):
        yield f"Without an ended trial: {without} of {resource_count} resources.", "dim"
    newest = max(item.update_time for item in items)
    age = format_age(newest, now)
    yield (
        f"Saved: of the applied setting against the spec's, by the gains that trials measured; since {age} at the present rate.",
        "dim",
    )
    yield "Trials: extra pods, retained pods, and the loading of pods that replaced replicas.", "dim"
    yield "Not included: what speculation saves against none, and rollouts of drafters. The status has no interval.", "dim"


# -------------------------------------------------------------------------------------------------------------- for programs
def build_savings_document(items: Sequence[ResourceSavings], resource_count: int) -> dict[str, Any]:
    """Return the savings for programs, in hours."""
    return {
        "items": [
            {
                "namespace": item.namespace,
                "name": item.name,
                "savedReplicaHours": round(item.saved, 2),
                "spentReplicaHours": round(item.spent, 2),
                "netReplicaHours": round(item.net, 2),
                "currentRate": item.current_rate,
                "gpusPerReplica": dict(item.gpus_per_replica) or None,
                "since": None if item.since is None else item.since.isoformat(),
                "hasOlderTrials": item.has_older_trials,
            }
            for item in items
        ],
        "total": {
            "resources": resource_count,
            "netReplicaHours": round(sum(item.net for item in items), 2) if items and are_replicas_equal(items) else None,
            "netGpuHours": {name: round(hours, 2) for name, hours in sum_gpu_hours(items).items()},
            "isEstimate": True,
        },
    }


def _clean(text: str) -> str:
    """Return the text without control characters, which could move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
