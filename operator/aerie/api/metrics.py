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
    """A Prometheus server, or a server with the same API, that scrapes the engines' pods."""

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
    """Label with the name of the pod."""
    namespace_label: PrometheusLabelName = "namespace"
    """Label with the namespace of the pod."""
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
    """Further labels of the series, if the pod's name alone is ambiguous. Examples: the cluster, if one server has several, or
    the job, if two scrape the pods."""


class MetricsSource(ResourceModel):
    """Source of the metrics instead of the pods."""

    prometheus: PrometheusSource


class MetricsSpec(ResourceModel):
    """Source of the engines' metrics, and interval of their scrapes."""

    scrape_interval: Annotated[timedelta, DurationRange("1s", "5m")] = timedelta(seconds=15)
    """Time between two scrapes of a pod during a rollout. Other pods are scraped up to four times less often: at most a minute
    apart if the interval is shorter, and at least twice in a block of rollout.analysis. Their metrics are for the status and for
    the calibration on stable pods. The interval doubles until there are at most 100 replicas for each second of it: 1,000
    replicas are scraped at most every 10 s. If source names a server, it must not be shorter than the server's own scrape
    interval."""
    source: MetricsSource | None = None
    """Source of the metrics. Default: the pods' own /metrics."""
