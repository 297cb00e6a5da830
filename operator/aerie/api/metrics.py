"""Source of the engines' metrics: the pods themselves, or a Prometheus server that scrapes them.

The resource holds no credentials. Whoever may write a resource could send them to a server of their own, and the operator would
need the right to read Secrets. So tokens are settings of the operator, each with the one address that it is for.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import Field

from aerie.api.types.base import DurationRange, ResourceModel, ValidationRule, schema_extra

_LABEL_NAME_PATTERN = r"^[a-zA-Z_][a-zA-Z0-9_]*$"
_HOST_PATTERN = r"([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\\[[0-9A-Fa-f:.]+\\])"
_ADDRESS_PATTERN = f"^https?://{_HOST_PATTERN}(:[0-9]{{1,5}})?(/[-A-Za-z0-9._~/]*)?$"

PrometheusLabelName = Annotated[str, Field(min_length=1, max_length=128, pattern=_LABEL_NAME_PATTERN)]


class PrometheusSource(ResourceModel):
    """A Prometheus server, or one that answers as it does, that scrapes the engines' pods."""

    address: Annotated[
        str,
        Field(
            min_length=1,
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    f"self.matches('{_ADDRESS_PATTERN}') && !self.matches('/api/v1/?$')",
                    "write the URL of the server as http://host:port or https://host/path, without user, query and /api/v1",
                )
            ),
        ),
    ]
    """URL of the server, such as http://prometheus.monitoring:9090. A token for it belongs to the operator (chart value
    prometheus.tokens)."""
    pod_label: PrometheusLabelName = "pod"
    """Label that holds the name of the pod."""
    namespace_label: PrometheusLabelName = "namespace"
    """Label that holds the namespace of the pod."""
    match_labels: Annotated[
        dict[str, Annotated[str, Field(max_length=253)]],
        Field(
            max_length=8,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.all(key, key.matches('^\\\\w+$'))",
                    "write names of labels as Prometheus has them, with letters, digits and _ only",
                )
            ),
        ),
    ] = Field(default_factory=dict)
    """Further labels of the series, where the pod's name alone does not tell them: the cluster, where one server has several, or
    the job, where two scrape the pods."""


class MetricsSource(ResourceModel):
    """What the metrics are read from instead of the pods."""

    prometheus: PrometheusSource


class MetricsSpec(ResourceModel):
    """How Aerie reads the engines' metrics."""

    scrape_interval: Annotated[timedelta, DurationRange("1s", "5m")] = timedelta(seconds=15)
    """Time between two readings of a pod while a rollout is under way. All others are read four times slower, up to a minute
    apart, but twice in a block of rollout.analysis, for the figures in the status and the history of stable pods. It is doubled
    until there are at most 100 replicas for each second of it: 1,000 are read each 10 s at the soonest. Where source names a
    server, no shorter than the time between its scrapes."""
    source: MetricsSource | None = None
    """Where to read them. Default: from the pods' own /metrics."""
