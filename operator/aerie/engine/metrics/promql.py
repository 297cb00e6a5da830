"""Query a Prometheus server for engines' metrics, and turn its response into the `Sample`s that the engines would give.

    query ────► {__name__=~"...", pod=~"..."}[30s] ────────► samples, scrape times ─► `parse_newest_scrapes`: newest, by pod
    selector ─► {__name__=~"...", pod=~"..."}, with a step ─► values at each step ──► `parse_scrape_history`: all, by pod

The newest scrape needs a range query. An instant query may return values of different scrapes, and no scrape times. A history
uses steps, because it would have many more samples; its consumers only take differences between steps.

Guarantees: a scrape is complete, all its series have one time, and it is of one target. A value that is no number, or a missing
series, is rejected as in an exposition. Series that Prometheus adds itself or that other containers of the pod have are ignored.
The server may be anybody's. An error message contains only the kind of fault, an error type of `PROMETHEUS_ERROR_TYPES`, and
label names of `TARGET_LABELS`, and never the server's own text. Time is linear in the bytes, and `parse_newest_scrapes`
limits series and samples. Not guaranteed: that a scrape is complete on the server itself, if its responses are assembled from
several stores. The newest scrape is then skipped as long as it has fewer series than the previous one.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.engine.metrics.exposition import PARSED_SERIES, PROCESS_START_SERIES, ExpositionError, parse_series
from aerie.engine.metrics.names import Metric
from aerie.engine.metrics.sample import Sample

UP_SERIES = "up"
"""Prometheus's own series about each scrape: 1 if it succeeded."""

PROMETHEUS_ERROR_TYPES = frozenset(
    (
        "timeout",
        "canceled",
        "execution",
        "bad_data",
        "internal",
        "unavailable",
        "not_found",
        "not_acceptable",
        "too_many_requests",
    )
)
"""Error types of Prometheus (web/api/v1/api.go), and one of Mimir."""
TARGET_LABELS = ("job", "instance", "container", "endpoint", "service", "prometheus", "cluster")
"""Labels that usually distinguish targets, so that a message may name them."""
MAX_RESPONSE_SERIES, MAX_SAMPLES_PER_SERIES = 20_000, 64
"""Series of a response with a few pods' newest scrapes, and samples of one series in it: 8 pods of 16 ranks have 11,000
series."""

Labels = Mapping[str, str]
_QUERIED_SERIES = (*PARSED_SERIES, PROCESS_START_SERIES, UP_SERIES)


class PrometheusResponseError(ValueError):
    """A response that is not one of Prometheus' API; the message is a noun phrase: what the server returned."""


def build_range_query(pods: Sequence[str], pod_label: str, labels: Labels, range_seconds: float) -> str:
    """Return the PromQL query for all series that are read of these pods' engines, over the last `range_seconds`."""
    return f"{build_selector('|'.join(re.escape(pod) for pod in pods), pod_label, labels)}[{round(1000 * range_seconds)}ms]"


def build_selector(pods: str, pod_label: str, labels: Labels, names: Iterable[str] = _QUERIED_SERIES) -> str:
    """Return the PromQL selector of these series for the pods that a regular expression matches in full."""
    matchers = [f'__name__=~"{"|".join(sorted(names))}"', f'{pod_label}=~"{_escape_string(pods)}"']
    matchers += [f'{name}="{_escape_string(value)}"' for name, value in labels.items()]
    return f"{{{','.join(matchers)}}}"


def _escape_string(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class PrometheusScrape:
    """One scrape of one pod by the server."""

    timestamp: float
    """Time by the server's clock, in seconds of Unix time."""
    series: Sequence[tuple[str, Labels, str]]
    """Name, labels and value, as in the server's response."""
    process_start_time: str | None

    def to_sample(self) -> Sample:
        """Return the sample that the exposition would have given. Raises ExpositionError."""
        try:
            return parse_series(self.series, self.process_start_time)
        except ExpositionError as error:
            raise ExpositionError(f"according to Prometheus, {error}") from None


def parse_newest_scrapes(body: bytes, pod_label: str) -> Mapping[str, PrometheusScrape | str]:
    """Return the newest complete scrape by pod, or why there is none, as the rest of a sentence about the pod.

    Raises PrometheusResponseError.
    """
    result = parse_result(body)
    if isinstance(result, list) and len(result) > MAX_RESPONSE_SERIES:
        raise PrometheusResponseError(f"more than {MAX_RESPONSE_SERIES} series")
    return {
        pod: _newest_scrape(series) for pod, series in _group_by_pod(result, pod_label, samples=MAX_SAMPLES_PER_SERIES).items()
    }


def parse_scrape_history(result: Any, *pod_labels: str) -> list[tuple[float, str, PrometheusScrape | str]]:
    """Return time, pod and scrape at each step of a `result`, the oldest first; instead of a scrape, the reason why there is
    none.

    A pod is the value of the first of the labels that a series has. If a pod is scraped more than once, a step is ambiguous.
    Raises PrometheusResponseError.
    """
    steps = [
        (timestamp, pod, scrape)
        for pod, series in _group_by_pod(result, *pod_labels).items()
        for timestamp, scrape in _scrapes_by_step(series)
    ]
    return sorted(steps, key=lambda step: step[:2])


def parse_result(body: bytes, result_type: str = "matrix") -> Any:
    """Return the result of a query, as the server's JSON has it. Raises PrometheusResponseError."""
    try:
        document = json.loads(body)
        if document["status"] != "success" or document["data"]["resultType"] != result_type:
            raise PrometheusResponseError(f"no result of type {result_type}{format_error_type(body)}")
        return document["data"]["result"]
    except PrometheusResponseError:
        raise
    except _PARSE_ERRORS:
        raise PrometheusResponseError("an invalid Prometheus response") from None


_PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors from invalid JSON, and from JSON of an unexpected shape."""


def _group_by_pod(result: Any, *pod_labels: str, samples: float = math.inf) -> Mapping[str, list[_Series]]:
    by_pod: dict[str, list[_Series]] = {}
    try:
        for item in result:
            labels, pairs = {str(name): str(value) for name, value in item["metric"].items()}, item.get("values", ())
            if len(pairs) > samples:
                raise PrometheusResponseError(f"more than {samples} samples of a series")
            values = {float(timestamp): str(value) for timestamp, value in pairs}
            pod = next((labels[label] for label in pod_labels if labels.get(label)), None)
            if pod is None:
                raise PrometheusResponseError(f"a series without the label {' or '.join(pod_labels)}")
            if values:  # a native histogram has no values
                by_pod.setdefault(pod, []).append(_Series(labels["__name__"], labels, values))
    except PrometheusResponseError:
        raise
    except _PARSE_ERRORS:
        raise PrometheusResponseError("an invalid Prometheus response") from None
    return by_pod


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    labels: Labels
    values: Mapping[float, str]
    """Values by the time of the scrape."""

    def target_labels(self) -> Labels:
        """Return the labels that are not the metric's own and that distinguish the server's targets."""
        own_labels = _OWN_LABELS.get(self.name, ())
        return {name: value for name, value in self.labels.items() if name.removeprefix("exported_") not in own_labels}


def _own_labels_by_series() -> Iterator[tuple[str, frozenset[str]]]:
    labels_by_metric = {metric.definition.name: metric.definition.labels for metric in Metric}
    for name in PARSED_SERIES:
        labels = next(
            labels
            for metric_name, labels in labels_by_metric.items()
            if name in (metric_name, *(metric_name + suffix for suffix in _HISTOGRAM_SUFFIXES))
        )
        yield name, frozenset({"__name__", "le", *labels})


_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
_OWN_LABELS: Mapping[str, frozenset[str]] = {
    **dict(_own_labels_by_series()),
    **dict.fromkeys((PROCESS_START_SERIES, UP_SERIES), frozenset({"__name__"})),
}
_CACHE_CONFIG_SERIES = Metric.CACHE_CONFIG.definition.name
"""Series whose labels are vLLM's settings, so they do not identify its target."""


def _newest_scrape(pod_series: Sequence[_Series]) -> PrometheusScrape | str:
    engine = [series for series in pod_series if series.name in PARSED_SERIES]
    targets = [dict(pairs) for pairs in {_target_pairs(series) for series in engine if series.name != _CACHE_CONFIG_SERIES}]
    if not targets:
        return _scrape_without_engine(pod_series)
    if len(targets) > 1:
        return f"{_duplicate_target_message(targets)}: name one of them in spec.metrics.source.prometheus.matchLabels"
    sizes = Counter(timestamp for series in engine for timestamp in series.values)
    times = sorted(sizes)[-2:]
    newest = times[0] if sizes[times[-1]] < sizes[times[0]] else times[-1]
    values = [(series.name, series.labels, series.values[newest]) for series in engine if newest in series.values]
    starts = (
        series.values.get(newest)
        for series in pod_series
        if series.name == PROCESS_START_SERIES and series.target_labels() == targets[0]
    )
    return PrometheusScrape(newest, values, next(starts, None))


def _scrapes_by_step(pod_series: Sequence[_Series]) -> Iterator[tuple[float, PrometheusScrape | str]]:
    values_by_step: dict[float, list[tuple[str, Labels, str]]] = {}
    targets_by_step: dict[float, set[_LabelPairs]] = {}
    for series in pod_series:
        if series.name in PARSED_SERIES:
            target = _target_pairs(series)
            for timestamp, value in series.values.items():
                values_by_step.setdefault(timestamp, []).append((series.name, series.labels, value))
                if series.name != _CACHE_CONFIG_SERIES:
                    targets_by_step.setdefault(timestamp, set()).add(target)
    starts = {_target_pairs(series): series.values for series in pod_series if series.name == PROCESS_START_SERIES}
    for timestamp, values in values_by_step.items():
        targets = targets_by_step.get(timestamp, set())
        if len(targets) > 1:
            yield timestamp, _duplicate_target_message([dict(target) for target in targets])
        else:
            start = next((starts.get(target, {}).get(timestamp) for target in targets), None)
            yield timestamp, PrometheusScrape(timestamp, values, start)


_LabelPairs = tuple[tuple[str, str], ...]


def _target_pairs(series: _Series) -> _LabelPairs:
    return tuple(sorted(series.target_labels().items()))


def _duplicate_target_message(targets: Sequence[Labels]) -> str:
    differing = [name for name in TARGET_LABELS if len({target.get(name) for target in targets}) > 1]
    detail = f" (by {', '.join(differing)})" if differing else ""
    return f"is scraped more than once{detail}"


def _scrape_without_engine(pod_series: Sequence[_Series]) -> PrometheusScrape | str:
    """Return what the server's own series tell about the scrape of a pod that has no series of an engine."""
    up_series = [series for series in pod_series if series.name == UP_SERIES]
    if len(up_series) != 1:
        return "has no metrics of vLLM there, and which of its scrapes would be the engine's does not show"
    timestamp, value = max(up_series[0].values.items())
    if value == "1":
        return PrometheusScrape(timestamp, (), None)  # the exposition exists and is not vLLM's
    return "could not be scraped (up is 0)"


def format_error_message(body: bytes) -> str:
    """Return Prometheus's error message, in brackets after a blank; empty without one. For a user who queries it manually."""
    try:
        return f" ({str(json.loads(body)['error'])[:200]})"
    except _PARSE_ERRORS:
        return ""


def format_error_type(body: bytes) -> str:
    """Return Prometheus's error type, in brackets after a blank; empty without a known one."""
    try:
        error_type = json.loads(body)["errorType"]
    except _PARSE_ERRORS:
        return ""
    return f" ({error_type})" if isinstance(error_type, str) and error_type in PROMETHEUS_ERROR_TYPES else ""
