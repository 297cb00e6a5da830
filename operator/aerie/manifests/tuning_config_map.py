"""The ConfigMap in which what the tuner knows of a resource outlives the operator, with its explanation for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aerie.manifests import naming

DECISION_TIME_KEY, ENGINE_FAMILY_KEY, TELEMETRY_KEY, RECOMMENDATION_KEY, EXPLANATION_KEY = (
    "at",
    "family",
    "telemetry",
    "advice",
    "explanation",
)


@dataclass(frozen=True)
class TuningRecord:
    """What is in it."""

    decision_time: float
    """When it was decided, in seconds of Unix time."""
    engine_family: str
    """Which engines the telemetry is of, whatever their setting."""
    telemetry: str
    """Packed (aerie.tuning.worker.codec)."""
    recommendation: str
    """As JSON."""
    explanation: str
    """The decision, for a person."""

    def to_data(self) -> dict[str, str]:
        """The ConfigMap's data."""
        at = datetime.fromtimestamp(self.decision_time, tz=UTC).isoformat(timespec="milliseconds")
        return {
            DECISION_TIME_KEY: at,
            ENGINE_FAMILY_KEY: self.engine_family,
            TELEMETRY_KEY: self.telemetry,
            RECOMMENDATION_KEY: self.recommendation,
            EXPLANATION_KEY: self.explanation,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, str]) -> TuningRecord | None:
        """What `to_data` made, to the millisecond; None for anything else."""
        try:
            at = datetime.fromisoformat(data[DECISION_TIME_KEY]).timestamp()
            return cls(at, data[ENGINE_FAMILY_KEY], data[TELEMETRY_KEY], data[RECOMMENDATION_KEY], data[EXPLANATION_KEY])
        except (KeyError, ValueError):
            return None


def tuning_config_map_name(resource_name: str) -> str:
    """Its name: with ours in it, as the history's."""
    return f"{resource_name}-aerie-tuning"


def render_tuning_config_map(resource_name: str, record: TuningRecord) -> dict[str, Any]:
    """The ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": tuning_config_map_name(resource_name), "labels": naming.common_labels(resource_name)},
        "data": record.to_data(),
    }
