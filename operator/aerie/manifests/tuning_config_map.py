"""The ConfigMap in which what the tuner knows of a resource outlives the operator, with its explanation for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aerie.manifests import naming

AT, FAMILY, TELEMETRY, ADVICE, EXPLANATION = "at", "family", "telemetry", "advice", "explanation"


@dataclass(frozen=True)
class Kept:
    """What is in it."""

    at: float
    """When it was decided, in seconds of Unix time."""
    family: str
    """Which engines the telemetry is of, whatever their setting."""
    telemetry: str
    """Packed (aerie.tuning.worker.codec)."""
    advice: str
    """As JSON."""
    explanation: str
    """The decision, for a person."""

    def to_data(self) -> dict[str, str]:
        """The ConfigMap's data."""
        at = datetime.fromtimestamp(self.at, tz=UTC).isoformat(timespec="milliseconds")
        return {
            AT: at,
            FAMILY: self.family,
            TELEMETRY: self.telemetry,
            ADVICE: self.advice,
            EXPLANATION: self.explanation,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, str]) -> Kept | None:
        """What `to_data` made, to the millisecond; None for anything else."""
        try:
            at = datetime.fromisoformat(data[AT]).timestamp()
            return cls(at, data[FAMILY], data[TELEMETRY], data[ADVICE], data[EXPLANATION])
        except (KeyError, ValueError):
            return None


def name(resource_name: str) -> str:
    """Its name: with ours in it, as the history's."""
    return f"{resource_name}-aerie-tuning"


def config_map(resource_name: str, kept: Kept) -> dict[str, Any]:
    """The ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name(resource_name), "labels": naming.common(resource_name)},
        "data": kept.to_data(),
    }
