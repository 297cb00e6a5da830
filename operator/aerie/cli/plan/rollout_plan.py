"""A plan: all parts of the answer, and the verdict that follows from them.

Guarantee: pure. Each verdict has an exit status: 0 for an apply that may be made, 1 for one that would not be rolled out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from aerie.api.types.duration import format_duration
from aerie.cli.plan.capacity import ClusterRoom, PodGpus, PodNeed
from aerie.cli.plan.change import ROLLOUT_KINDS, PlannedChange
from aerie.cli.plan.preflight_summary import PreflightSummary

Verdict = Literal["Apply", "Nothing", "Rejected"]


@dataclass(frozen=True)
class ForecastRow:
    """Forecast of a rollout for a drafter with this gain in tokens per step."""

    effect: float
    median_seconds: float | None
    """Until the verdict; None without a verdict in any simulated rollout."""
    promotion_chance: float
    rollback_chance: float


@dataclass(frozen=True)
class Forecast:
    """Forecast at a rate of requests, or why there is none."""

    message: str
    rows: tuple[ForecastRow, ...] = ()


@dataclass(frozen=True)
class RolloutPlan:
    """What an apply of a file would do."""

    namespace: str
    name: str
    file: str
    flags: Sequence[str]
    """Flags of kubectl that the user has set, without the namespace."""
    change: PlannedChange
    preflight: PreflightSummary
    need: PodNeed
    gpus: PodGpus
    room: ClusterRoom | None
    """None: not needed, or unknown."""
    room_problem: str
    """Why the room is unknown, as a sentence; empty where it is known or not needed."""
    forecast: Forecast
    users: Sequence[str]
    reversal: str
    diff: str | None = None
    """Diff of the pod templates; None where none is requested."""

    @property
    def verdict(self) -> Verdict:
        if self.preflight.state == "Failed" or self.change.kind in ("Impossible", "Rejected"):
            return "Rejected"
        return "Nothing" if self.change.kind == "Unchanged" else "Apply"

    @property
    def exit_status(self) -> int:
        return 1 if self.verdict == "Rejected" else 0

    @property
    def has_room(self) -> bool | None:
        """Whether the pods fit now; None where that is unknown or no pod is needed."""
        return None if self.room is None else self.room.pods >= self.need.extra

    @property
    def headline(self) -> str:
        """The verdict as a sentence."""
        change = self.change
        if self.preflight.state == "Failed":
            return f"Do not apply: revision {change.desired.revision} fails preflight, and no pod of it would start."
        text = {
            "Unchanged": "Nothing changes.",
            "Settings": "May be applied: only settings of Aerie change, and no pod.",
            "Network": "May be applied: only Service, route or disruption budget change, and no pod.",
            "Scaling": "May be applied: only the number of pods changes.",
            "InPlace": "May be applied: the drafter changes inside the running engines, without new pods.",
            "Canary": "May be applied: a canary with new pods tests the change.",
            "FirstRevision": "May be applied: the first revision starts, with nothing to compare it with.",
            "Continues": "May be applied: the rollout in progress continues.",
            "Adopted": "May be applied: the revision becomes stable without a comparison.",
            "Reverted": "May be applied: the last promotion is reverted.",
            "Withdrawn": "May be applied: the stable revision serves on.",
            "Rejected": f"Nothing would be rolled out: revision {change.desired.revision} was rejected before.",
            "Delayed": "May be applied: the revision is tried when there may be capacity.",
            "Impossible": "Do not apply: the change cannot run.",
        }[change.kind]
        if change.kind == "InPlace" and self.preflight.state == "NotChecked":
            text += " If preflight finds that the engines cannot load it, a canary with new pods follows instead."
        if change.superseded is not None:
            text += f" The rollout in progress ({change.superseded.change}) ends first."
        if self.has_room is False:
            text += " The pods do not fit now."
        return f"{text} The rollout is paused: nothing of this happens before it is resumed." if change.is_paused else text

    @property
    def next_commands(self) -> Sequence[str]:
        flags = "".join(f" {shlex.quote(flag)}" for flag in self.flags)
        where, file = f"{self.name} -n {self.namespace}{flags}", shlex.quote(self.file)
        if self.verdict == "Nothing":
            return ()
        if self.change.kind == "Rejected":
            return (f"kubectl aerie retry {where}",)
        if self.verdict == "Rejected":
            return (f"correct {file}, then: kubectl aerie plan -n {self.namespace}{flags} -f {file}",)
        commands = [f"kubectl apply -n {self.namespace}{flags} -f {file}"]
        if self.change.is_paused:
            commands.append(f"kubectl aerie resume {where}")
        if self.change.kind in ROLLOUT_KINDS or self.change.superseded is not None:
            commands.append(f"kubectl aerie status {where} --watch")
        return commands

    def describe_change(self) -> Iterator[str]:
        """Yield what changes, as sentences."""
        change = self.change
        revision, kind = change.desired.revision, change.kind
        if change.superseded is not None:
            old = change.superseded
            yield f"Ends: revision {old.revision} ({old.change}), now {old.phase}. It is reported as superseded."
        served = change.stable.served_revision if change.stable is not None else ""
        if kind in ROLLOUT_KINDS:
            yield (
                f"Revision {served} to {revision}: {change.description}."
                if served
                else f"Revision {revision}: {change.description}."
            )
        if kind == "Canary" and change.in_place_obstacle:
            yield f"Not in place: {change.in_place_obstacle}"
        elif kind == "FirstRevision" and change.desired.plugin_obstacle:
            yield f"Later changes of the drafter cannot be in place: {change.desired.plugin_obstacle}"
        if kind in ("Impossible", "Rejected", "Delayed", "Adopted", "Reverted", "Continues"):
            yield change.message
        if change.objects:
            yield f"Objects: {', '.join(change.objects)}."
        if change.changed_fields:
            yield f"Fields: {_join(change.changed_fields)}."

    def describe_pods(self) -> Iterator[str]:
        """Yield the pods and GPUs that are needed, as sentences."""
        need, gpus = self.need, self.gpus
        if not need.extra:
            pods = f" (canary {need.canary}, control {need.control} replace stable pods)" if need.canary else ""
            yield f"No pod beside those that run{pods}."
            return
        if need.canary:
            yield f"{_count(need.extra, 'extra pod')} while the rollout lasts: canary {need.canary}, control {need.control}."
        else:
            yield f"{_count(need.extra, 'more pod')}."
        if gpus.count is None:
            yield f"GPUs of a pod are unknown. {gpus.problem}"
            return
        if not gpus.count:
            yield "The pods request no GPU; CPU and memory are not checked here."
            return
        yield f"{gpus.count} {gpus.resource} for each pod, {gpus.count * need.extra} in all."
        if self.room is None:
            yield f"Free GPUs are unknown: {self.room_problem}"
            return
        yield from self._describe_room(self.room)

    def _describe_room(self, room: ClusterRoom) -> Iterator[str]:
        fitting = [node for node in room.nodes if node.pods]
        listed = ", ".join(
            f"{node.name} {node.pods} ({node.free} free{f', {node.product}' if node.product else ''})" for node in fitting[:4]
        )
        more = f" and {len(fitting) - 4} more nodes" if len(fitting) > 4 else ""
        excluded = f" {_count(room.excluded, 'node')} with such GPUs cannot take the pod." if room.excluded else ""
        yield f"Room now for {_count(room.pods, 'pod')}{f': {listed}{more}' if listed else ''}.{excluded}"
        if room.pending:
            yield f"{_count(room.pending, 'pending pod')} may take these GPUs first."
        if room.pods >= self.need.extra:
            return
        rollout = self.change.desired.resource.spec.rollout
        deadline = format_duration(rollout.progress_deadline)
        if self.change.kind == "Canary":
            yield f"Too few. After {deadline} without GPUs the canary ends, and is retried after {deadline}, then ever later."
            if rollout.canary.capacity == "Surge":
                yield "spec.rollout.canary.capacity: Reuse needs no spare GPU; control: Stable needs half of the pods."
        else:
            yield "Too few. The remaining pods wait until GPUs are free."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _join(items: Sequence[str], limit: int = 6) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
