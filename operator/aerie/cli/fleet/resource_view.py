"""A SpeculativeDeployment as people look at it: its arms, the rollout in progress, and whether clients are served.

It reads the document as the API server returns it. The models of `aerie.api` would read the same, but take longer to import than
a command may take.

Guarantee: pure; a field that is absent is None or empty, and a status of another release is read as far as it has these fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

Object = Mapping[str, Any]
SERVED_PHASES = frozenset({"Ready", "Monitoring", "Verifying"})
"""Phases in which the revision of the spec serves."""
CANDIDATE_PHASES = frozenset(
    {
        *("Starting", "Staging", "Evaluating", "WarmingUp", "Analyzing"),
        *("AwaitingApproval", "Held", "Ramping", "Promoting", "RollingBack"),
    }
)
"""Phases of a rollout in progress."""
_SHARING_ROLES = ("canary", "control")
"""Roles of pods that may share the traffic of the stable ones."""


@dataclass(frozen=True)
class ArmView:
    """The pods of a revision."""

    role: str
    """stable, canary, control, previous, or trial: the drafter under trial in place."""
    revision: str
    drafter: str
    setting: str
    """Draft tokens per step, in short."""
    replicas: int
    ready_replicas: int
    weight: int | None
    """Percentage of the traffic."""
    acceptance_length: float | None
    time_per_output_token: float | None
    """Seconds."""
    time_to_first_token: float | None
    """Seconds."""


class ResourceView:
    """One resource."""

    def __init__(self, document: Object) -> None:
        self.document = document
        self.metadata: Object = document["metadata"]
        self.spec: Object = document.get("spec") or {}
        self.status: Object = document.get("status") or {}

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace") or "default")

    @property
    def phase(self) -> str:
        """Phase; `Unknown` before the operator has seen the resource."""
        return str(self.status.get("phase") or "Unknown")

    @property
    def is_observed(self) -> bool:
        """Whether the status describes the present spec."""
        return self.status.get("observedGeneration") == self.metadata.get("generation")

    @property
    def decision_key(self) -> tuple[object, ...]:
        """What a decision is about: it stays valid while this is the same."""
        identity = (self.metadata.get("uid"), self.metadata.get("generation"))
        return (*identity, self.phase, self.candidate_revision, self.served_revision)

    @property
    def is_paused(self) -> bool:
        return bool((self.spec.get("rollout") or {}).get("paused"))

    @property
    def desired_replicas(self) -> int:
        return int(self.spec.get("replicas", 1))

    @property
    def serving_replicas(self) -> int:
        """Ready pods that clients reach: of the stable revision, and of canary and control where they get traffic."""
        return sum(arm.ready_replicas for arm in self.arms if arm.role == "stable" or (arm.role in _SHARING_ROLES and arm.weight))

    def condition(self, name: str) -> Object:
        """Return a condition; empty if there is none."""
        return next((item for item in self.status.get("conditions") or () if item.get("type") == name), {})

    @property
    def is_serving(self) -> bool:
        return self.condition("Ready").get("status") == "True"

    @property
    def candidate(self) -> Object:
        """The canary or the rollout in place; empty if there is none."""
        return self.status.get("canary") or self.status.get("inPlaceRollout") or {}

    @property
    def is_in_place(self) -> bool:
        """Whether the candidate is a rollout in place."""
        return not self.status.get("canary") and bool(self.status.get("inPlaceRollout"))

    @property
    def candidate_phase(self) -> str:
        """Phase of the rollout, also while it is paused; empty if there is none."""
        return str(self.candidate.get("phase") or "")

    @property
    def candidate_revision(self) -> str:
        return str(self.candidate.get("revision") or "")

    @property
    def served_revision(self) -> str:
        """Revision whose spec the stable pods serve."""
        stable = self.status.get("stable") or {}
        return str((stable.get("inPlace") or stable).get("revision") or "")

    @property
    def analysis(self) -> Object:
        return self.status.get("analysis") or {}

    @property
    def comparisons(self) -> Sequence[Object]:
        return self.analysis.get("comparisons") or ()

    @property
    def history(self) -> Sequence[Object]:
        """The last rollouts, newest first."""
        return self.status.get("rolloutHistory") or ()

    @cached_property
    def arms(self) -> tuple[ArmView, ...]:
        """The arms that have pods, and the drafter under trial in place."""
        canary = self.status.get("canary") or {}
        documents = {
            "stable": self.status.get("stable"),
            "control": canary.get("control"),
            "canary": canary or None,
            "previous": self.status.get("previous"),
        }
        if documents["control"]:  # the status has its pods alone: it is the stable revision
            inherited = {
                name: value for name, value in (documents["stable"] or {}).items() if name in ("drafter", "setting", "inPlace")
            }
            documents["control"] = inherited | documents["control"]
        arms = [_build_arm(role, document) for role, document in documents.items() if document]
        if trial := self.status.get("inPlaceRollout"):
            arms.append(
                ArmView(
                    "trial",
                    str(trial.get("revision") or ""),
                    str(trial.get("drafter") or ""),
                    "",
                    len(trial.get("pods") or ()),
                    0,
                    *[None] * 4,
                )
            )
        return tuple(arms)

    @property
    def rollout_start_time(self) -> datetime | None:
        """Time at which the rollout in progress began."""
        return parse_time(self.candidate.get("startTime"))


def _build_arm(role: str, document: Object) -> ArmView:
    in_place = document.get("inPlace") or {}
    return ArmView(
        role,
        str(document.get("revision") or ""),
        str(in_place.get("drafter") or document.get("drafter") or ""),
        format_setting(document.get("setting")),
        int(document.get("replicas") or 0),
        int(document.get("readyReplicas") or 0),
        document.get("weight"),
        document.get("acceptanceLength"),
        document.get("timePerOutputToken"),
        document.get("timeToFirstToken"),
    )


def format_setting(setting: Object | None) -> str:
    """Return a speculation setting in short: 3, off, adaptive 5, or tiers of batch sizes like 1-8:5."""
    if not setting:
        return ""
    tokens = setting.get("numSpeculativeTokens", 0)
    match setting.get("mode"):
        case "Off":
            return "off"
        case "Adaptive":
            return f"adaptive {tokens}"
        case "Schedule":
            tiers = setting.get("schedule") or ()
            return ",".join(f"{tier['minBatchSize']}-{tier['maxBatchSize']}:{tier['numSpeculativeTokens']}" for tier in tiers)
        case _:
            return str(tokens)


def parse_time(text: str | None) -> datetime | None:
    """Return a time of the status."""
    return None if text is None else datetime.fromisoformat(text)


def format_age(time: datetime | None, now: datetime) -> str:
    """Return how long ago a time was, in its two largest units; empty for None.

    >>> format_age(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 1, 5, tzinfo=UTC))
    '1 h 5 min'
    """
    if time is None:
        return ""
    seconds = max(now - time, timedelta()).total_seconds()
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{number} {unit}" for number, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if number]
    return " ".join(parts[:2])


def now() -> datetime:
    return datetime.now(UTC)
