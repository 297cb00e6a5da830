"""An engine's counters in a registry of prometheus_client, where vLLM has them and Aerie's plugin reads them.

Each family has a collector of its own, so that a reader of some families does not pay for all.

Guarantees: families, labels and values are those of `exposition`; reading advances nothing, so all families of one reading are of
the same engine step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from aerie_lab.engine.metrics.counters import Counters, Histogram
from aerie_lab.engine.metrics.exposition import MetricFamily, format_number, list_families

_PREFIX = "vllm:"


def register_counters(registry: CollectorRegistry, counters: Counters, model_name: str) -> None:
    """Register an engine's families."""
    for family in list_families(counters.max_draft_tokens is not None):
        registry.register(_FamilyCollector(family, counters, model_name))


def render_other_families(registry: CollectorRegistry) -> str:
    """Render the families of a registry that are not the engine's own."""
    return generate_latest(_OtherFamilies(registry)).decode()


class _FamilyCollector(Collector):
    """One family of an engine."""

    def __init__(self, family: MetricFamily, counters: Counters, model_name: str) -> None:
        self._family, self._counters = family, counters
        self._labels = {"engine": "0"} if family.engine_label else {}
        self._labels["model_name"] = model_name

    def describe(self) -> Iterator[Metric]:
        """Yield the family without samples."""
        yield self._create_metric()

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        metric = self._create_metric()
        values = self._family.read(self._counters)
        if isinstance(values, Histogram):
            cumulated = list(itertools.accumulate(values.counts))
            for bound, count in zip((*values.bounds, math.inf), cumulated, strict=True):
                metric.add_sample(f"{metric.name}_bucket", {**self._labels, "le": format_number(bound)}, count)
            metric.add_sample(f"{metric.name}_count", self._labels, cumulated[-1])
            metric.add_sample(f"{metric.name}_sum", self._labels, values.total)
        else:
            name = f"{metric.name}_total" if self._family.kind == "counter" else metric.name
            for label, value in values.items():
                metric.add_sample(name, {**self._labels, **_parse_label(label)}, value)
        yield metric

    def _create_metric(self) -> Metric:
        return Metric(f"{_PREFIX}{self._family.name}", self._family.help, self._family.kind)


class _OtherFamilies(Collector):
    """The families of a registry that are not an engine's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._registry.collect() if not family.name.startswith(_PREFIX))


def _parse_label(text: str) -> dict[str, str]:
    """Return the label that is written as `name="value"`; none for the empty text."""
    name, _, value = text.partition("=")
    return {name: value.strip('"')} if name else {}
