"""Counts of what one arm alone failed to answer in a shadow evaluation.

An engine that ends or stalls fails many requests at once. So an evaluator counts (`aerie.evaluator.failures`)

    failures   requests that the arm alone failed after an answer of its own: an outage is one, however many requests it fails
    events     failures at least `FAILURE_INTERVAL_SECONDS` apart: one stall that fails some of the requests has few

Guarantee: counts and dict convert into each other without loss, and merged counts have the outage of the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aerie.analysis.statistics.confidence_sequence import RareEvents

FAILURE_INTERVAL_SECONDS = 10.0
"""Least seconds between two events of an arm."""


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Failures of each arm alone, and the canary's outage."""

    canary: int = 0
    """Failures of the canary alone."""
    canary_events: int = 0
    control: int = 0
    """Failures of the control alone."""
    control_events: int = 0
    outage_attempts: int = 0
    """Requests one after the other that the canary alone has not answered, since its last answer; 0 after an answer."""
    outage_seconds: float = 0.0
    """Seconds that they took."""

    @property
    def rare_events(self) -> RareEvents:
        """Events of both arms. Each is as likely to be the canary's, if it is as good."""
        return RareEvents().add_block(self.canary_events, self.control_events, 0.5)

    @property
    def is_plausible(self) -> bool:
        """Return whether requests can have these counts."""
        counts = (self.canary, self.canary_events, self.control, self.control_events, self.outage_attempts)
        return (
            all(type(count) is int for count in counts)
            and self.canary_events <= self.canary
            and self.control_events <= self.control
            and (self.outage_attempts > 0 or self.outage_seconds == 0)
        )

    def merge(self, later: FailureCounts) -> FailureCounts:
        """Return the counts of both, with the outage of the later ones."""
        return FailureCounts(
            self.canary + later.canary,
            self.canary_events + later.canary_events,
            self.control + later.control,
            self.control_events + later.control_events,
            later.outage_attempts,
            later.outage_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> FailureCounts:
        """Return the counts of a dict that `to_dict` returned."""
        return cls(**document)
