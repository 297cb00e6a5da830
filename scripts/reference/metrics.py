"""The page of all metrics, generated from the descriptions by which they are registered.

Guarantee: a metric that the operator, the evaluator, the recorder or the plugin exports is on the page, and so is a metric of
vLLM that Aerie reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from prometheus_client import CollectorRegistry

from aerie.controller.metrics import OperatorMetrics
from aerie.controller.rollout_metrics import ROLLOUT_FAMILIES
from aerie.engine.metrics.names import Metric
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.metric_family import MetricFamily, MetricType
from aerie.recorder.metrics import RecorderMetrics
from aerie_vllm.metrics import DrafterCollector, DrafterState, Metrics
from scripts.reference.markdown import GENERATED, join_parts, table

INTRODUCTION = """\
# Metrics

This page lists every metric that Aerie exports, and the metrics of vLLM that it reads. [monitoring.md](../how-to/monitoring.md)
explains how to collect them, and which ones to look at first."""
OPERATOR = """\
## The operator

The operator exports these metrics on its port `metrics`, at `/metrics`. Those of a resource have its namespace and name as
labels. They follow its status, and only the leader has them. A value that the status lacks has no time series."""
EVALUATOR = """\
## The evaluator

The evaluator of a [shadow evaluation](../concepts/shadow-evaluation.md) exports these metrics on its port, at `/metrics`."""
RECORDER = """\
## The recorder

The recorder of a [capture](../how-to/capture.md) exports these metrics on its port, at `/metrics`."""
PLUGIN = """\
## Engine pods with the plugin

A pod whose drafter can change [in place](../concepts/in-place.md) adds these metrics to vLLM's own, at vLLM's `/metrics`.
`digest` is the SHA-256 of a drafter's files. The counters by digest add up to those of vLLM."""
VLLM = """\
## Metrics of vLLM that Aerie reads

The meaning is that of vLLM's code, where the name suggests another one. Names and types are the same in vLLM 0.24 to 0.33."""


def page() -> str:
    """Return the page as Markdown."""
    return join_parts(
        GENERATED.format(source="the descriptions of the metrics"),
        INTRODUCTION,
        OPERATOR,
        "### Resources and their rollouts",
        render_families(ROLLOUT_FAMILIES),
        "### The operator itself",
        render_families(OperatorMetrics().families),
        EVALUATOR,
        render_families(read_families(EvaluatorMetrics().registry)),
        RECORDER,
        render_families(read_families(RecorderMetrics().registry)),
        PLUGIN,
        render_families(list_plugin_families()),
        VLLM,
        table(
            ["metric", "type", "unit", "meaning"],
            ((f"`{metric.value.name}`", metric.value.metric_type, metric.value.unit, metric.value.meaning) for metric in Metric),
        ),
    )


def list_metric_families() -> list[MetricFamily]:
    """Return the descriptions of all metrics that the operator exports: those of resources, then its own."""
    return [*ROLLOUT_FAMILIES, *OperatorMetrics().families]


def render_families(families: Iterable[MetricFamily]) -> str:
    """Return the table of some metrics."""
    return table(
        ["metric", "type", "labels", "meaning"],
        (
            (
                f"`{family.series_names[0] if family.type == 'counter' else family.name}`",
                family.type,
                ", ".join(family.labels),
                family.documentation,
            )
            for family in families
        ),
    )


def read_families(registry: CollectorRegistry) -> list[MetricFamily]:
    """Return the descriptions of what a registry exports. A metric with labels needs a sample, which shows their names."""
    return [
        MetricFamily(
            metric.name,
            cast(MetricType, metric.type),
            metric.documentation,
            tuple(label for label in metric.samples[0].labels if label != "le"),
        )
        for metric in registry.collect()
    ]


class _LoadedDrafter:
    """State of a pod with one drafter, which has a sample of every metric."""

    def __init__(self) -> None:
        self.own = self.loaded = {"digest": "0", "kind": "eagle3"}
        self.windows = self

    def total_by_digest(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the counts of the drafter: none."""
        return {"0": {}}


def list_plugin_families() -> list[MetricFamily]:
    """Return the descriptions of the metrics that the plugin adds to an engine's."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.observe_swap(0.0)
    metrics.count_rejection("")
    registry.register(DrafterCollector(cast(DrafterState, _LoadedDrafter())))
    return read_families(registry)
