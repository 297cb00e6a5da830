"""Description of a metric: the one source of its registration, of its line in docs/reference/metrics.md, and of the alerts'
tests.

Guarantee: a metric that the operator exports has a description, because nothing is registered without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricType = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class MetricFamily:
    """A metric, by the conventions of Prometheus: all of its time series have the same labels."""

    name: str
    """Name without the suffixes _total, _bucket, _sum and _count of its time series."""
    type: MetricType
    documentation: str
    """Meaning, as one or more sentences."""
    labels: tuple[str, ...] = ()
    """Names of the labels."""

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names of its time series, as queries use them."""
        if self.type == "counter":
            return (f"{self.name}_total",)
        if self.type == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)
