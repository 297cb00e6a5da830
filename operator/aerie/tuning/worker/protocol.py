"""What the operator asks of the process that decides, and what it answers: a line of JSON each.

    Order: what is known and the telemetry ─► worker ─► Answer: an advice, its explanation, and all telemetry packed anew

Two parts of telemetry go with an order: what was packed by the answer before, and what came since. So the operator's own process
holds a resource's history as one text, and adds up nothing.

Guarantee: neither needs numpy. An answer that is none of an order raises ValueError.
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
    """Of the engines, as the record of their revision says."""

    version: str
    arguments: tuple[str, ...] = ()
    method: str = "eagle3"
    environment: Mapping[str, str] = field(default_factory=dict)
    experts: bool | None = None


@dataclass(frozen=True)
class DecisionRequest:
    """A decision that is asked for."""

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
    """What an answer has packed before; empty for nothing."""
    since: TuningTelemetry

    def to_line(self) -> str:
        """As one line."""
        found = {
            **{
                name: getattr(self, name)
                for name in ("revision", "now", "most", "replicas", "waiting", "lent", "extra", "horizon", "kept")
            },
            **{name: asdict(getattr(self, name)) for name in ("engine", "objectives", "history", "policy", "scale")},
            "current": setting_to_dict(self.current),
            "exploring": None if self.exploring is None else setting_to_dict(self.exploring),
            "failed": [asdict(one) | {"setting": setting_to_dict(one.setting)} for one in self.failed],
            "since": telemetry_to_json(self.since),
            "leftOut": dict(self.since.excluded_windows),
            "apiServers": self.since.api_servers,
        }
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> DecisionRequest:
        """What `to_line` made. Raises ValueError, LookupError or TypeError."""
        found = json.loads(line)
        scale, horizon, servers = TelemetryScale(**found["scale"]), float(found["horizon"]), int(found["apiServers"])
        since = telemetry_from_json(found["since"], horizon, scale, servers)
        since.excluded_windows.update(found["leftOut"])
        engine = found["engine"]
        return cls(
            revision=found["revision"],
            now=found["now"],
            current=setting_from_dict(found["current"]),
            engine=EngineFacts(**{**engine, "arguments": tuple(engine["arguments"])}),
            most=found["most"],
            replicas=found["replicas"],
            waiting=found["waiting"],
            lent=found["lent"],
            extra=found["extra"],
            failed=tuple(FailedTrial(**{**one, "setting": setting_from_dict(one["setting"])}) for one in found["failed"]),
            exploring=None if found["exploring"] is None else setting_from_dict(found["exploring"]),
            objectives=LatencyObjectives(**found["objectives"]),
            history=TrialHistory(**found["history"] | {"explored": tuple(found["history"]["explored"])}),
            policy=TuningPolicy(**found["policy"]),
            horizon=horizon,
            scale=scale,
            kept=found["kept"],
            since=since,
        )

    def merged_telemetry(self) -> TuningTelemetry:
        """Both parts together."""
        whole = unpack_telemetry(self.kept, self.horizon, self.scale, self.since.api_servers)
        if whole is None:
            return self.since
        whole.merge(self.since)
        return whole


@dataclass(frozen=True)
class DecisionResponse:
    """What came of it."""

    recommendation: Recommendation
    explanation: str
    packed_telemetry: str
    """All of it, packed."""

    def to_line(self) -> str:
        """As one line."""
        found = {"advice": self.recommendation.to_dict(), "explanation": self.explanation, "telemetry": self.packed_telemetry}
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> DecisionResponse:
        """What `to_line` made. Raises ValueError, with what went wrong where the answer says that."""
        try:
            found: Mapping[str, Any] = json.loads(line)
            if "error" in found:
                raise ValueError(str(found["error"]))
            return cls(Recommendation.from_dict(found["advice"]), str(found["explanation"]), str(found["telemetry"]))
        except (LookupError, TypeError, RecommendationError) as error:
            raise ValueError(f"it is no answer: {error}") from None
