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

from aerie.engine.metrics.exposition import PROCESS_START, SERIES, PageError, from_series
from aerie.engine.metrics.names import Metric
from aerie.engine.metrics.sample import Sample

UP = "up"
"""What Prometheus says of each scrape: 1 when it succeeded."""

ERROR_TYPES = frozenset(
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
TOLD_APART = ("job", "instance", "container", "endpoint", "service", "prometheus", "cluster")
"""Labels that usually tell one target from another, so that they may be named."""
MOST_SERIES, MOST_SAMPLES = 20_000, 64
"""Of an answer about a few pods' newest scrapes, and of one series in it: 8 pods of 16 ranks are 11,000."""

Labels = Mapping[str, str]
_ALL = (*SERIES, PROCESS_START, UP)


class AnswerError(ValueError):
    """An answer that is none of Prometheus' API; the message is the rest of a sentence about the server."""


def query(pods: Sequence[str], pod_label: str, labels: Labels, seconds: float) -> str:
    """PromQL for all that is read of these pods' engines, scraped in the last so many seconds."""
    return f"{selector('|'.join(re.escape(pod) for pod in pods), pod_label, labels)}[{round(1000 * seconds)}ms]"


def selector(pods: str, pod_label: str, labels: Labels, names: Iterable[str] = _ALL) -> str:
    """PromQL for these series of the pods that a regular expression names in full."""
    matchers = [f'__name__=~"{"|".join(sorted(names))}"', f'{pod_label}=~"{_quoted(pods)}"']
    matchers += [f'{name}="{_quoted(value)}"' for name, value in labels.items()]
    return f"{{{','.join(matchers)}}}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape of one pod by the server."""

    at: float
    """By the server's clock, in seconds of Unix time."""
    series: Sequence[tuple[str, Labels, str]]
    """Name, labels and value, as the server writes it."""
    started: str | None

    def sample(self) -> Sample:
        """As the page would have given it. Raises PageError."""
        try:
            return from_series(self.series, self.started)
        except PageError as error:
            raise PageError(f"as Prometheus has it, {error}") from None


def read(answer: bytes, pod_label: str) -> Mapping[str, Scrape | str]:
    """By pod its newest whole scrape, or why there is none, as the rest of a sentence about it. Raises AnswerError."""
    found = result(answer)
    if isinstance(found, list) and len(found) > MOST_SERIES:
        raise AnswerError(f"answered with more than {MOST_SERIES} series")
    return {pod: _newest(series) for pod, series in _by_pod(found, pod_label, samples=MOST_SAMPLES).items()}


def history(found: Any, *pod_labels: str) -> list[tuple[float, str, Scrape | str]]:
    """Of a `result`, time, pod and scrape at each step, the oldest first, or why there is none. Raises AnswerError.

    A pod is the first of the labels that a series has. Where it is scraped more than once there is no telling whose step it is.
    """
    steps = [(at, pod, one) for pod, series in _by_pod(found, *pod_labels).items() for at, one in _steps(series)]
    return sorted(steps, key=lambda step: step[:2])


def result(answer: bytes, kind: str = "matrix") -> Any:
    """What a server found, as it says it. Raises AnswerError."""
    try:
        document = json.loads(answer)
        if document["status"] != "success" or document["data"]["resultType"] != kind:
            raise AnswerError(f"answered with no such result{error_type(answer)}")
        return document["data"]["result"]
    except AnswerError:
        raise
    except _STRANGE:
        raise AnswerError("answered with what is no answer of Prometheus") from None


_STRANGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What comes of JSON that is not as it should be, when it is read or taken apart."""


def _by_pod(found: Any, *pod_labels: str, samples: float = math.inf) -> Mapping[str, list[_Series]]:
    by_pod: dict[str, list[_Series]] = {}
    try:
        for one in found:
            labels, pairs = {str(name): str(value) for name, value in one["metric"].items()}, one.get("values", ())
            if len(pairs) > samples:
                raise AnswerError(f"answered with more than {samples} samples of a series")
            values = {float(at): str(value) for at, value in pairs}
            pod = next((labels[label] for label in pod_labels if labels.get(label)), None)
            if pod is None:
                raise AnswerError(f"answered with a series without the label {' or '.join(pod_labels)}")
            if values:  # else a native histogram
                by_pod.setdefault(pod, []).append(_Series(labels["__name__"], labels, values))
    except AnswerError:
        raise
    except _STRANGE:
        raise AnswerError("answered with what is no answer of Prometheus") from None
    return by_pod


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    labels: Labels
    values: Mapping[float, str]
    """By the time of the scrape."""

    def target(self) -> Labels:
        """The labels that are not the metric's own: what tells one target of the server from another."""
        own = _OWN.get(self.name, ())
        return {name: value for name, value in self.labels.items() if name.removeprefix("exported_") not in own}


def _own() -> Iterator[tuple[str, frozenset[str]]]:
    of = {metric.row.name: metric.row.labels for metric in Metric}
    for name in SERIES:
        labels = next(found for start, found in of.items() if name in (start, *(start + end for end in _PARTS)))
        yield name, frozenset({"__name__", "le", *labels})


_PARTS = ("_bucket", "_sum", "_count")
_OWN: Mapping[str, frozenset[str]] = {**dict(_own()), **dict.fromkeys((PROCESS_START, UP), frozenset({"__name__"}))}
_CONFIG = Metric.CACHE_CONFIG.row.name
"""Its labels are vLLM's settings, so they do not tell its target."""


def _newest(found: Sequence[_Series]) -> Scrape | str:
    engine = [one for one in found if one.name in SERIES]
    targets = [dict(pairs) for pairs in {_pairs(one) for one in engine if one.name != _CONFIG}]
    if not targets:
        return _without(found)
    if len(targets) > 1:
        return f"{_twice(targets)}: name one of them in spec.metrics.source.prometheus.matchLabels"
    sizes = Counter(at for one in engine for at in one.values)
    times = sorted(sizes)[-2:]
    at = times[0] if sizes[times[-1]] < sizes[times[0]] else times[-1]
    whole = [(one.name, one.labels, one.values[at]) for one in engine if at in one.values]
    starts = (one.values.get(at) for one in found if one.name == PROCESS_START and one.target() == targets[0])
    return Scrape(at, whole, next(starts, None))


def _steps(found: Sequence[_Series]) -> Iterator[tuple[float, Scrape | str]]:
    series: dict[float, list[tuple[str, Labels, str]]] = {}
    targets: dict[float, set[_Pairs]] = {}
    for one in found:
        if one.name in SERIES:
            pairs = _pairs(one)
            for at, value in one.values.items():
                series.setdefault(at, []).append((one.name, one.labels, value))
                if one.name != _CONFIG:
                    targets.setdefault(at, set()).add(pairs)
    starts = {_pairs(one): one.values for one in found if one.name == PROCESS_START}
    for at, whole in series.items():
        of = targets.get(at, set())
        if len(of) > 1:
            yield at, _twice([dict(pairs) for pairs in of])
        else:
            yield at, Scrape(at, whole, next((starts.get(pairs, {}).get(at) for pairs in of), None))


_Pairs = tuple[tuple[str, str], ...]


def _pairs(one: _Series) -> _Pairs:
    return tuple(sorted(one.target().items()))


def _twice(targets: Sequence[Labels]) -> str:
    apart = [name for name in TOLD_APART if len({one.get(name) for one in targets}) > 1]
    told = f" (by {', '.join(apart)})" if apart else ""
    return f"is scraped more than once{told}"


def _without(found: Sequence[_Series]) -> Scrape | str:
    """Of a pod without a series of an engine, what the server says of its scrapes."""
    ups = [one for one in found if one.name == UP]
    if len(ups) != 1:
        return "has no metrics of vLLM there, and which of its scrapes would be the engine's does not show"
    at, value = max(ups[0].values.items())
    if value == "1":
        return Scrape(at, (), None)  # a page, and none of vLLM's
    return "could not be scraped (up is 0)"


def complaint(body: bytes) -> str:
    """What Prometheus says is wrong, in brackets after a blank; empty where it says nothing. For whoever asks it by hand."""
    try:
        return f" ({str(json.loads(body)['error'])[:200]})"
    except _STRANGE:
        return ""


def error_type(body: bytes) -> str:
    """The type of error that Prometheus names, in brackets after a blank; empty where it names none of its own."""
    try:
        kind = json.loads(body)["errorType"]
    except _STRANGE:
        return ""
    return f" ({kind})" if isinstance(kind, str) and kind in ERROR_TYPES else ""
