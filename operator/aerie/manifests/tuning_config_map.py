"""The ConfigMap that keeps the tuner's record of a resource across restarts of the operator, with its explanation for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aerie.manifests import naming

DECISION_TIME_KEY, ENGINE_FAMILY_KEY, TELEMETRY_KEY, RECOMMENDATION_KEY, EXPLANATION_KEY = (
    "decisionTime",
    "engineFamily",
    "telemetry",
    "recommendation",
    "explanation",
)


@dataclass(frozen=True)
class TuningRecord:
    """Content of the ConfigMap."""

    decision_time: float
    """Time of the decision, in seconds of Unix time."""
    engine_family: str
    """The engines that the telemetry describes, whatever their speculation setting."""
    telemetry: str
    """Packed telemetry (aerie.tuning.worker.codec)."""
    recommendation: str
    """The recommendation as JSON."""
    explanation: str
    """Explanation of the decision, for people."""

    def to_data(self) -> dict[str, str]:
        """Return the ConfigMap's data."""
        decision_time = datetime.fromtimestamp(self.decision_time, tz=UTC).isoformat(timespec="milliseconds")
        return {
            DECISION_TIME_KEY: decision_time,
            ENGINE_FAMILY_KEY: self.engine_family,
            TELEMETRY_KEY: self.telemetry,
            RECOMMENDATION_KEY: self.recommendation,
            EXPLANATION_KEY: self.explanation,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, str]) -> TuningRecord | None:
        """Return the record that `to_data` wrote, exact to the millisecond; None for anything else."""
        try:
            decision_time = datetime.fromisoformat(data[DECISION_TIME_KEY]).timestamp()
            return cls(
                decision_time, data[ENGINE_FAMILY_KEY], data[TELEMETRY_KEY], data[RECOMMENDATION_KEY], data[EXPLANATION_KEY]
            )
        except (KeyError, ValueError):
            return None


def tuning_config_map_name(resource_name: str) -> str:
    """Return the ConfigMap's name. It contains `aerie`, like the name of the calibration ConfigMap."""
    return f"{resource_name}-aerie-tuning"


def render_tuning_config_map(resource_name: str, record: TuningRecord) -> dict[str, Any]:
    """Return the ConfigMap as a plain object."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": tuning_config_map_name(resource_name), "labels": naming.common_labels(resource_name)},
        "data": record.to_data(),
    }
