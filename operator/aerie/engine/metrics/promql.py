"""Reads engines' metrics out of a Prometheus server: what to ask it, and its answer as the `Sample`s that the pages would give.

    query ────► {__name__=~"...", pod=~"..."}[30s] ─► samples with the times of their scrapes ─► `read`: newest whole one, by pod
    selector ─► {__name__=~"...", pod=~"..."}, with a step ─► the values at each step of a period ─► `history`: all, by pod

For the newest scrape a range is asked for, and not the values of this moment: those may be of different scrapes, and have no time
of their own. For a history steps have to do, for samples would be many more; what is made of it is differences between steps.

Guarantees: a scrape is whole, all its series have one time, and it is of one target; what is no number or lacks a series is
refused as a page is. Series that Prometheus adds itself or that other containers of the pod have do not matter. The server may be
anybody's: what is said of an answer is its kind of fault, an error type out of `ERROR_TYPES`, names of labels out of
`TOLD_APART`, and never a word of its own; time is linear in its bytes, and `read` has limits on series and samples. Not
guaranteed: that a scrape is whole on the server itself, where its answers are put together from several places; the newest one is
then passed over as long as it has fewer series than the one before.
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
"""What Prometheus says of each scrape: 1 when it succeeded."""

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
"""What Prometheus calls its errors (web/api/v1/api.go), and one of Mimir's."""
TARGET_LABELS = ("job", "instance", "container", "endpoint", "service", "prometheus", "cluster")
"""Labels that usually tell one target from another, so that they may be named."""
MAX_RESPONSE_SERIES, MAX_SAMPLES_PER_SERIES = 20_000, 64
"""Of an answer about a few pods' newest scrapes, and of one series in it: 8 pods of 16 ranks are 11,000."""

Labels = Mapping[str, str]
_QUERIED_SERIES = (*PARSED_SERIES, PROCESS_START_SERIES, UP_SERIES)


class PrometheusResponseError(ValueError):
    """An answer that is none of Prometheus' API; the message is the rest of a sentence about the server."""


def build_range_query(pods: Sequence[str], pod_label: str, labels: Labels, range_seconds: float) -> str:
    """PromQL for all that is read of these pods' engines, scraped in the last so many seconds."""
    return f"{build_selector('|'.join(re.escape(pod) for pod in pods), pod_label, labels)}[{round(1000 * range_seconds)}ms]"


def build_selector(pods: str, pod_label: str, labels: Labels, names: Iterable[str] = _QUERIED_SERIES) -> str:
    """PromQL for these series of the pods that a regular expression names in full."""
    matchers = [f'__name__=~"{"|".join(sorted(names))}"', f'{pod_label}=~"{_escape_string(pods)}"']
    matchers += [f'{name}="{_escape_string(value)}"' for name, value in labels.items()]
    return f"{{{','.join(matchers)}}}"


def _escape_string(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class PrometheusScrape:
    """One scrape of one pod by the server."""

    timestamp: float
    """By the server's clock, in seconds of Unix time."""
    series: Sequence[tuple[str, Labels, str]]
    """Name, labels and value, as the server writes it."""
    process_start_time: str | None

    def to_sample(self) -> Sample:
        """As the page would have given it. Raises PageError."""
        try:
            return parse_series(self.series, self.process_start_time)
        except ExpositionError as error:
            raise ExpositionError(f"as Prometheus has it, {error}") from None


def parse_newest_scrapes(body: bytes, pod_label: str) -> Mapping[str, PrometheusScrape | str]:
    """By pod its newest whole scrape, or why there is none, as the rest of a sentence about it. Raises AnswerError."""
    found = parse_result(body)
    if isinstance(found, list) and len(found) > MAX_RESPONSE_SERIES:
        raise PrometheusResponseError(f"answered with more than {MAX_RESPONSE_SERIES} series")
    return {
        pod: _newest_scrape(series) for pod, series in _group_by_pod(found, pod_label, samples=MAX_SAMPLES_PER_SERIES).items()
    }


def parse_scrape_history(result: Any, *pod_labels: str) -> list[tuple[float, str, PrometheusScrape | str]]:
    """Of a `result`, time, pod and scrape at each step, the oldest first, or why there is none. Raises AnswerError.

    A pod is the first of the labels that a series has. Where it is scraped more than once there is no telling whose step it is.
    """
    steps = [(at, pod, one) for pod, series in _group_by_pod(result, *pod_labels).items() for at, one in _scrapes_by_step(series)]
    return sorted(steps, key=lambda step: step[:2])


def parse_result(body: bytes, result_type: str = "matrix") -> Any:
    """What a server found, as it says it. Raises AnswerError."""
    try:
        document = json.loads(body)
        if document["status"] != "success" or document["data"]["resultType"] != result_type:
            raise PrometheusResponseError(f"answered with no such result{format_error_type(body)}")
        return document["data"]["result"]
    except PrometheusResponseError:
        raise
    except _PARSE_ERRORS:
        raise PrometheusResponseError("answered with what is no answer of Prometheus") from None


_PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What comes of JSON that is not as it should be, when it is read or taken apart."""


def _group_by_pod(found: Any, *pod_labels: str, samples: float = math.inf) -> Mapping[str, list[_Series]]:
    by_pod: dict[str, list[_Series]] = {}
    try:
        for one in found:
            labels, pairs = {str(name): str(value) for name, value in one["metric"].items()}, one.get("values", ())
            if len(pairs) > samples:
                raise PrometheusResponseError(f"answered with more than {samples} samples of a series")
            values = {float(at): str(value) for at, value in pairs}
            pod = next((labels[label] for label in pod_labels if labels.get(label)), None)
            if pod is None:
                raise PrometheusResponseError(f"answered with a series without the label {' or '.join(pod_labels)}")
            if values:  # else a native histogram
                by_pod.setdefault(pod, []).append(_Series(labels["__name__"], labels, values))
    except PrometheusResponseError:
        raise
    except _PARSE_ERRORS:
        raise PrometheusResponseError("answered with what is no answer of Prometheus") from None
    return by_pod


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    labels: Labels
    values: Mapping[float, str]
    """By the time of the scrape."""

    def target_labels(self) -> Labels:
        """The labels that are not the metric's own: what tells one target of the server from another."""
        own = _OWN_LABELS.get(self.name, ())
        return {name: value for name, value in self.labels.items() if name.removeprefix("exported_") not in own}


def _own_labels_by_series() -> Iterator[tuple[str, frozenset[str]]]:
    of = {metric.definition.name: metric.definition.labels for metric in Metric}
    for name in PARSED_SERIES:
        labels = next(found for start, found in of.items() if name in (start, *(start + end for end in _HISTOGRAM_SUFFIXES)))
        yield name, frozenset({"__name__", "le", *labels})


_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
_OWN_LABELS: Mapping[str, frozenset[str]] = {
    **dict(_own_labels_by_series()),
    **dict.fromkeys((PROCESS_START_SERIES, UP_SERIES), frozenset({"__name__"})),
}
_CACHE_CONFIG_SERIES = Metric.CACHE_CONFIG.definition.name
"""Its labels are vLLM's settings, so they do not tell its target."""


def _newest_scrape(found: Sequence[_Series]) -> PrometheusScrape | str:
    engine = [one for one in found if one.name in PARSED_SERIES]
    targets = [dict(pairs) for pairs in {_target_pairs(one) for one in engine if one.name != _CACHE_CONFIG_SERIES}]
    if not targets:
        return _scrape_without_engine(found)
    if len(targets) > 1:
        return f"{_duplicate_target_message(targets)}: name one of them in spec.metrics.source.prometheus.matchLabels"
    sizes = Counter(at for one in engine for at in one.values)
    times = sorted(sizes)[-2:]
    at = times[0] if sizes[times[-1]] < sizes[times[0]] else times[-1]
    whole = [(one.name, one.labels, one.values[at]) for one in engine if at in one.values]
    starts = (one.values.get(at) for one in found if one.name == PROCESS_START_SERIES and one.target_labels() == targets[0])
    return PrometheusScrape(at, whole, next(starts, None))


def _scrapes_by_step(found: Sequence[_Series]) -> Iterator[tuple[float, PrometheusScrape | str]]:
    series: dict[float, list[tuple[str, Labels, str]]] = {}
    targets: dict[float, set[_LabelPairs]] = {}
    for one in found:
        if one.name in PARSED_SERIES:
            pairs = _target_pairs(one)
            for at, value in one.values.items():
                series.setdefault(at, []).append((one.name, one.labels, value))
                if one.name != _CACHE_CONFIG_SERIES:
                    targets.setdefault(at, set()).add(pairs)
    starts = {_target_pairs(one): one.values for one in found if one.name == PROCESS_START_SERIES}
    for at, whole in series.items():
        of = targets.get(at, set())
        if len(of) > 1:
            yield at, _duplicate_target_message([dict(pairs) for pairs in of])
        else:
            yield at, PrometheusScrape(at, whole, next((starts.get(pairs, {}).get(at) for pairs in of), None))


_LabelPairs = tuple[tuple[str, str], ...]


def _target_pairs(one: _Series) -> _LabelPairs:
    return tuple(sorted(one.target_labels().items()))


def _duplicate_target_message(targets: Sequence[Labels]) -> str:
    apart = [name for name in TARGET_LABELS if len({one.get(name) for one in targets}) > 1]
    told = f" (by {', '.join(apart)})" if apart else ""
    return f"is scraped more than once{told}"


def _scrape_without_engine(found: Sequence[_Series]) -> PrometheusScrape | str:
    """Of a pod without a series of an engine, what the server says of its scrapes."""
    ups = [one for one in found if one.name == UP_SERIES]
    if len(ups) != 1:
        return "has no metrics of vLLM there, and which of its scrapes would be the engine's does not show"
    at, value = max(ups[0].values.items())
    if value == "1":
        return PrometheusScrape(at, (), None)  # a page, and none of vLLM's
    return "could not be scraped (up is 0)"


def format_error_message(body: bytes) -> str:
    """What Prometheus says is wrong, in brackets after a blank; empty where it says nothing. For whoever asks it by hand."""
    try:
        return f" ({str(json.loads(body)['error'])[:200]})"
    except _PARSE_ERRORS:
        return ""


def format_error_type(body: bytes) -> str:
    """The type of error that Prometheus names, in brackets after a blank; empty where it names none of its own."""
    try:
        kind = json.loads(body)["errorType"]
    except _PARSE_ERRORS:
        return ""
    return f" ({kind})" if isinstance(kind, str) and kind in PROMETHEUS_ERROR_TYPES else ""
