"""An engine's counters in a registry of prometheus_client, where vLLM has them and Aerie's plugin reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_ENGINE_PREFIX = "vllm:"


class ExpositionCollector(Collector):
    """The families of an exposition, which is rendered at each reading."""

    def __init__(self, render: Callable[[], str]) -> None:
        self._render = render

    def describe(self) -> Iterator[Metric]:
        """Yield the families, so that a registry knows their names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from text_string_to_metric_families(self._render())


class _OtherFamilies(Collector):
    """The families of a registry that are not the engine's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._registry.collect() if not family.name.startswith(_ENGINE_PREFIX))


def render_other_families(registry: CollectorRegistry) -> str:
    """Render the families of a registry that are not the engine's own."""
    return generate_latest(_OtherFamilies(registry)).decode()
