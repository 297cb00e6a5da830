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

_PLAIN_FIELDS = (
    *("revision", "now", "max_speculative_tokens", "replicas", "queued_requests", "borrowed_replicas", "surge_pods", "horizon"),
    "packed_telemetry",
)
"""Fields of a request that JSON takes as they are."""


@dataclass(frozen=True)
class EngineFacts:
    """Properties of the engines, from the record of their revision."""

    version: str
    arguments: tuple[str, ...] = ()
    method: str = "eagle3"
    environment: Mapping[str, str] = field(default_factory=dict)
    is_moe: bool | None = None


@dataclass(frozen=True)
class DecisionRequest:
    """Request for a decision: its context and the telemetry."""

    revision: str
    now: float
    current_setting: SpeculationSetting
    engine: EngineFacts
    max_speculative_tokens: int
    replicas: int
    queued_requests: float
    borrowed_replicas: int
    surge_pods: int
    failed_trials: tuple[FailedTrial, ...]
    explored_setting: SpeculationSetting | None
    objectives: LatencyObjectives
    history: TrialHistory
    policy: TuningPolicy
    horizon: float
    scale: TelemetryScale
    packed_telemetry: str
    """Telemetry that the previous response packed; empty without one."""
    new_telemetry: TuningTelemetry
    """Telemetry measured since then."""

    def to_line(self) -> str:
        """Return the request as one line."""
        document = {
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            **{name: asdict(getattr(self, name)) for name in ("engine", "objectives", "history", "policy", "scale")},
            "current_setting": setting_to_dict(self.current_setting),
            "explored_setting": None if self.explored_setting is None else setting_to_dict(self.explored_setting),
            "failed_trials": [asdict(trial) | {"setting": setting_to_dict(trial.setting)} for trial in self.failed_trials],
            "new_telemetry": telemetry_to_json(self.new_telemetry),
            "excluded_windows": dict(self.new_telemetry.excluded_windows),
            "api_servers": self.new_telemetry.api_servers,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> DecisionRequest:
        """Parse the result of `to_line`. Raises ValueError, LookupError or TypeError."""
        document = json.loads(line)
        scale, horizon, api_servers = (
            TelemetryScale(**document["scale"]),
            float(document["horizon"]),
            int(document["api_servers"]),
        )
        new_telemetry = telemetry_from_json(document["new_telemetry"], horizon, scale, api_servers)
        new_telemetry.excluded_windows.update(document["excluded_windows"])
        engine = document["engine"]
        return cls(
            revision=document["revision"],
            now=document["now"],
            current_setting=setting_from_dict(document["current_setting"]),
            engine=EngineFacts(**{**engine, "arguments": tuple(engine["arguments"])}),
            max_speculative_tokens=document["max_speculative_tokens"],
            replicas=document["replicas"],
            queued_requests=document["queued_requests"],
            borrowed_replicas=document["borrowed_replicas"],
            surge_pods=document["surge_pods"],
            failed_trials=tuple(
                FailedTrial(**{**trial, "setting": setting_from_dict(trial["setting"])}) for trial in document["failed_trials"]
            ),
            explored_setting=None if document["explored_setting"] is None else setting_from_dict(document["explored_setting"]),
            objectives=LatencyObjectives(**document["objectives"]),
            history=TrialHistory(**document["history"] | {"exploration_times": tuple(document["history"]["exploration_times"])}),
            policy=TuningPolicy(**document["policy"]),
            horizon=horizon,
            scale=scale,
            packed_telemetry=document["packed_telemetry"],
            new_telemetry=new_telemetry,
        )

    def merged_telemetry(self) -> TuningTelemetry:
        """Return both parts of the telemetry, merged."""
        telemetry = unpack_telemetry(self.packed_telemetry, self.horizon, self.scale, self.new_telemetry.api_servers)
        if telemetry is None:
            return self.new_telemetry
        telemetry.merge(self.new_telemetry)
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
        document = {
            "recommendation": self.recommendation.to_dict(),
            "explanation": self.explanation,
            "packed_telemetry": self.packed_telemetry,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> DecisionResponse:
        """Parse the result of `to_line`. Raises ValueError, with the worker's error if the response contains one."""
        try:
            document: Mapping[str, Any] = json.loads(line)
            if "error" in document:
                raise ValueError(str(document["error"]))
            return cls(
                Recommendation.from_dict(document["recommendation"]),
                str(document["explanation"]),
                str(document["packed_telemetry"]),
            )
        except (LookupError, TypeError, RecommendationError) as error:
            raise ValueError(f"the worker's response is invalid: {error}") from None
