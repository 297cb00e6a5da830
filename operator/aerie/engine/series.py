"""Reads engines' metrics out of a Prometheus server: what to ask it, and its answer as the `Sample`s that the pages would give.

    query ─► {__name__=~"...", pod=~"..."}[30s] ─► samples with the times of their scrapes ─► newest whole scrape, by pod

A range is asked for, and not the values of this moment: those may be of different scrapes, and have no time of their own.

Guarantees: a scrape is whole, all its series have one time, and it is of one target; what is no number or lacks a series is
refused as a page is. Series that Prometheus adds itself or that other containers of the pod have do not matter. Not guaranteed:
that a scrape is whole on the server itself, where its answers are put together from several places; the newest one is then passed
over as long as it has fewer series than the one before.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aerie.engine.metrics import Metric
from aerie.engine.page import PROCESS_START, SERIES, PageError, from_series
from aerie.engine.samples import Sample

UP = "up"
"""What Prometheus says of each scrape: 1 when it succeeded."""

Labels = Mapping[str, str]


class AnswerError(ValueError):
    """An answer that is none of Prometheus' API; the message is the rest of a sentence about the server."""


def query(pods: Sequence[str], pod_label: str, labels: Labels, seconds: float) -> str:
    """PromQL for all that is read of these pods' engines, scraped in the last so many seconds."""
    names = "|".join(sorted([*SERIES, PROCESS_START, UP]))
    either = "|".join(re.escape(pod) for pod in pods)
    matchers = [f'__name__=~"{names}"', f'{pod_label}=~"{_quoted(either)}"']
    matchers += [f'{name}="{_quoted(value)}"' for name, value in labels.items()]
    return f"{{{','.join(matchers)}}}[{round(1000 * seconds)}ms]"


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
    by_pod: dict[str, list[_Series]] = {}
    try:
        document = json.loads(answer)
        if document["status"] != "success" or document["data"]["resultType"] != "matrix":
            raise AnswerError(f"answered with {str(document)[:200]}")
        for one in document["data"]["result"]:
            labels, values = one["metric"], {float(at): str(value) for at, value in one.get("values", ())}
            if values:  # else a native histogram
                by_pod.setdefault(labels[pod_label], []).append(_Series(labels["__name__"], labels, values))
    except AnswerError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError):
        raise AnswerError(f"answered with what is no answer of Prometheus: {answer[:100]!r}") from None
    return {pod: _newest(series) for pod, series in by_pod.items()}


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
    targets = [dict(pairs) for pairs in {tuple(sorted(one.target().items())) for one in engine if one.name != _CONFIG}]
    if not targets:
        return _without(found)
    if len(targets) > 1:
        apart = sorted({name for one in targets for other in targets for name, value in one.items() if other.get(name) != value})
        told = ", ".join(f"{name} {' and '.join(sorted(str(one.get(name)) for one in targets))}" for name in apart)
        return f"is scraped more than once ({told}): name one of them in spec.metrics.source.prometheus.matchLabels"
    sizes = Counter(at for one in engine for at in one.values)
    times = sorted(sizes)[-2:]
    at = times[0] if sizes[times[-1]] < sizes[times[0]] else times[-1]
    whole = [(one.name, one.labels, one.values[at]) for one in engine if at in one.values]
    starts = (one.values.get(at) for one in found if one.name == PROCESS_START and one.target() == targets[0])
    return Scrape(at, whole, next(starts, None))


def _without(found: Sequence[_Series]) -> Scrape | str:
    """Of a pod without a series of an engine, what the server says of its scrapes."""
    ups = [one for one in found if one.name == UP]
    if len(ups) != 1:
        return "has no metrics of vLLM there, and which of its scrapes would be the engine's does not show"
    at, value = max(ups[0].values.items())
    if float(value) == 1:
        return Scrape(at, (), None)  # a page, and none of vLLM's
    return "could not be scraped (up is 0)"
