"""The protocol between the operator and the worker: requests and responses, a line of JSON each.

    DecisionRequest (context, telemetry) ─► worker ─► DecisionResponse (recommendation, explanation, telemetry packed again)

A request contains two parts of telemetry: the text that the previous response packed, and what was measured since. So the
operator's own process stores a resource's history as one text, and merges nothing.

Guarantee: neither request nor response needs numpy. A line that is no response raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from aerie.engine.speculation import SpeculationSetting
from aerie.tuning.decision.policy import FailedTrial, LatencyObjectives, TrialHistory, TuningPolicy
from aerie.tuning.recommendation import Recommendation, RecommendationError, setting_from_dict, setting_to_dict
from aerie.tuning.telemetry import TelemetryScale, TuningTelemetry
from aerie.tuning.worker.codec import telemetry_from_json, telemetry_to_json, unpack_telemetry


@dataclass(frozen=True)
class EngineFacts:
    """Properties of the engines, from the record of their revision."""

    version: str
    arguments: tuple[str, ...] = ()
    method: str = "eagle3"
    environment: Mapping[str, str] = field(default_factory=dict)
    experts: bool | None = None


@dataclass(frozen=True)
class DecisionRequest:
    """Request for a decision: its context and the telemetry."""

    revision: str
    now: float
    current: SpeculationSetting
    engine: EngineFacts
    most: int
    replicas: int
    waiting: float
    lent: int
    extra: int
    failed: tuple[FailedTrial, ...]
    exploring: SpeculationSetting | None
    objectives: LatencyObjectives
    history: TrialHistory
    policy: TuningPolicy
    horizon: float
    scale: TelemetryScale
    kept: str
    """Telemetry that the previous response packed; empty without one."""
    since: TuningTelemetry
    """Telemetry measured since then."""

    def to_line(self) -> str:
        """Return the request as one line."""
        document = {
            **{
                name: getattr(self, name)
                for name in ("revision", "now", "most", "replicas", "waiting", "lent", "extra", "horizon", "kept")
            },
            **{name: asdict(getattr(self, name)) for name in ("engine", "objectives", "history", "policy", "scale")},
            "current": setting_to_dict(self.current),
            "exploring": None if self.exploring is None else setting_to_dict(self.exploring),
            "failed": [asdict(trial) | {"setting": setting_to_dict(trial.setting)} for trial in self.failed],
            "since": telemetry_to_json(self.since),
            "leftOut": dict(self.since.excluded_windows),
            "apiServers": self.since.api_servers,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> DecisionRequest:
        """Parse the result of `to_line`. Raises ValueError, LookupError or TypeError."""
        document = json.loads(line)
        scale, horizon, api_servers = TelemetryScale(**document["scale"]), float(document["horizon"]), int(document["apiServers"])
        new_telemetry = telemetry_from_json(document["since"], horizon, scale, api_servers)
        new_telemetry.excluded_windows.update(document["leftOut"])
        engine = document["engine"]
        return cls(
            revision=document["revision"],
            now=document["now"],
            current=setting_from_dict(document["current"]),
            engine=EngineFacts(**{**engine, "arguments": tuple(engine["arguments"])}),
            most=document["most"],
            replicas=document["replicas"],
            waiting=document["waiting"],
            lent=document["lent"],
            extra=document["extra"],
            failed=tuple(
                FailedTrial(**{**trial, "setting": setting_from_dict(trial["setting"])}) for trial in document["failed"]
            ),
            exploring=None if document["exploring"] is None else setting_from_dict(document["exploring"]),
            objectives=LatencyObjectives(**document["objectives"]),
            history=TrialHistory(**document["history"] | {"explored": tuple(document["history"]["explored"])}),
            policy=TuningPolicy(**document["policy"]),
            horizon=horizon,
            scale=scale,
            kept=document["kept"],
            since=new_telemetry,
        )

    def merged_telemetry(self) -> TuningTelemetry:
        """Return both parts of the telemetry, merged."""
        telemetry = unpack_telemetry(self.kept, self.horizon, self.scale, self.since.api_servers)
        if telemetry is None:
            return self.since
        telemetry.merge(self.since)
        return telemetry


@dataclass(frozen=True)
class DecisionResponse:
    """Response to a request: the recommendation, its explanation, and the telemetry."""

    recommendation: Recommendation
    explanation: str
    packed_telemetry: str
    """All telemetry of the request, packed."""

    def to_line(self) -> str:
        """Return the response as one line."""
        document = {"advice": self.recommendation.to_dict(), "explanation": self.explanation, "telemetry": self.packed_telemetry}
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> DecisionResponse:
        """Parse the result of `to_line`. Raises ValueError, with the worker's error if the response contains one."""
        try:
            document: Mapping[str, Any] = json.loads(line)
            if "error" in document:
                raise ValueError(str(document["error"]))
            return cls(Recommendation.from_dict(document["advice"]), str(document["explanation"]), str(document["telemetry"]))
        except (LookupError, TypeError, RecommendationError) as error:
            raise ValueError(f"it is no answer: {error}") from None
