"""Reads a metrics page of vLLM, Prometheus's text format, into a `Sample`.

Only what Aerie needs is read, so that a page of 300 KiB takes milliseconds: lines are told apart by their name alone, and labels
are looked at only where they matter. Guarantees: engines (data-parallel ranks) and served names are summed; label values are
unescaped as the format says; a page that is cut short, malformed where it is read, or not vLLM's is a `PageError`, never a
number. Whoever serves the page is not trusted: reading takes time in proportion to the bytes, whatever they are, and a `Sample`
holds at most `MOST_VALUES` values of a label, each at most `LONGEST_VALUE` long. Not guaranteed: that lines which are not read
are well-formed. OpenMetrics pages are not understood: ask for text/plain.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aerie.engine.histogram import Histogram
from aerie.engine.metrics import Kind, Metric
from aerie.engine.samples import Counters, Gauges, Sample, Speculation

MOST_VALUES = 128
"""Values of one label of one series: engines behind a page, reasons, positions, buckets. vLLM has some 20 of the most."""
LONGEST_VALUE = 64
"""Bytes of such a value."""
LONGEST_LABELS = 16 * 1024
"""Bytes of the labels of one line. vLLM's longest line, its cache configuration, has about one thousand."""


class PageError(ValueError):
    """A page that is no whole metrics page of vLLM; the message is a sentence."""


def parse(page: bytes) -> Sample:
    """Read a page in Prometheus's text format. Raises PageError."""
    if not page.endswith(b"\n"):
        raise PageError("the metrics page ends in the middle of a line: the connection was cut, scrape again.")
    plain: dict[bytes, float] = {}
    labelled: dict[bytes, dict[bytes, float]] = {}
    capacity: float | None = None
    for found in _LINE.finditer(page):
        line = found[0]
        name, _, rest = line.partition(b"{")
        label = _READ.get(name)
        if label is None:
            continue
        labels, _, tail = rest.rpartition(b"}")
        try:
            if label == _SUM:
                plain[name] = plain.get(name, 0.0) + _value(tail)
            elif label == _CAPACITY:
                capacity = _add_capacity(capacity, _labels(labels))
            else:
                _add(labelled.setdefault(name, {}), _label(labels, label), _value(tail))
        except ValueError as error:
            shown = line[:200].decode(errors="replace")
            raise PageError(f"the metrics page has a line that cannot be read ({error}): {shown}") from None
    try:
        return _sample(_Found(plain, labelled), capacity, _started(page))
    except PageError:
        raise
    except ValueError as error:  # a label's value that is no number, or no text
        raise PageError(f"the metrics page has a label that cannot be read: {error}.") from None


def from_series(series: Iterable[tuple[str, Mapping[str, str], str]], started: str | None) -> Sample:
    """The same from the lines of one page taken apart: name, labels and value, and when the process began. Raises PageError."""
    plain: dict[bytes, float] = {}
    labelled: dict[bytes, dict[bytes, float]] = {}
    capacity: float | None = None
    for text, labels, value in series:
        name = text.encode()
        label = _READ.get(name)
        try:
            if label is None:
                continue
            if label == _SUM:
                plain[name] = plain.get(name, 0.0) + _value(value.encode())
            elif label == _CAPACITY:
                capacity = _add_capacity(capacity, labels)
            else:
                if (key := labels.get(label.decode())) is None:
                    raise ValueError(f"no label {label.decode()}")
                _add(labelled.setdefault(name, {}), key.encode(), _value(value.encode()))
        except ValueError as error:
            raise PageError(f"the metrics page has a value that cannot be read ({error}): {text} {value}") from None
    try:
        return _sample(_Found(plain, labelled), capacity, None if started is None else _value(started.encode()))
    except PageError:
        raise
    except ValueError as error:
        raise PageError(f"the metrics page has a label or start time that cannot be read: {error}.") from None


# ---------------------------------------------------------------------------------------------------------------- lines
PROCESS_START = "process_start_time_seconds"
_LINE = re.compile(rb"^vllm:[^\n]*", re.MULTILINE)
_SUM, _CAPACITY = b"", b"\0"  # no label name is either


def _names() -> dict[bytes, bytes]:
    """By series name, the label that tells its values apart, or `_SUM`."""
    told_apart = {
        Metric.ACCEPTED_PER_POSITION: b"position",
        Metric.PROMPT_TOKENS_BY_SOURCE: b"source",
        Metric.FINISHED: b"finished_reason",
        Metric.GENERATION_TOKENS: b"engine",
        Metric.KV_CACHE_USAGE: b"engine",
        Metric.CACHE_CONFIG: _CAPACITY,
    }
    names: dict[bytes, bytes] = {}
    for metric in Metric:
        name = metric.row.name.encode()
        if metric.row.kind is Kind.HISTOGRAM:
            names |= {name + b"_sum": _SUM, name + b"_count": _SUM}
        else:
            names[name] = told_apart.get(metric, _SUM)
    for metric in (Metric.TIME_TO_FIRST_TOKEN, Metric.TIME_PER_OUTPUT_TOKEN):
        names[metric.row.name.encode() + b"_bucket"] = b"le"
    return names


_READ = _names()
SERIES = frozenset(name.decode() for name in _READ)
"""Names of all series that are read, but for `PROCESS_START`."""


def _value(tail: bytes) -> float:
    """The value behind the labels; a timestamp may follow."""
    words = tail.split()
    value = float(words[0]) if words else math.nan
    if not math.isfinite(value):
        raise ValueError("no finite value")
    if value < 0:  # nothing that is read can be: counters, sums of times, amounts
        raise ValueError("a value below zero")
    return value


def _add(values: dict[bytes, float], key: bytes, value: float) -> None:
    """Count the value in; raises ValueError where a sample would become larger than an engine's."""
    if key not in values and (len(values) >= MOST_VALUES or len(key) > LONGEST_VALUE):
        raise ValueError(f"more than {MOST_VALUES} values of one label, or a value of more than {LONGEST_VALUE} bytes")
    values[key] = values.get(key, 0.0) + value


def _label(labels: bytes, name: bytes) -> bytes:
    """The value of one label, as it stands there when it holds no escape."""
    if len(labels) > LONGEST_LABELS:
        raise ValueError(f"more than {LONGEST_LABELS} bytes of labels")
    if b"\\" not in labels:  # then every quote begins or ends a value
        parts = labels.split(b'"')
        for index in range(0, len(parts) - 1, 2):
            if parts[index].strip(b", =") == name:
                return parts[index + 1]
        raise ValueError(f"no label {name.decode()}")
    value = _labels(labels).get(name.decode())
    if value is None:
        raise ValueError(f"no label {name.decode()}")
    return value.encode()


def _labels(text: bytes) -> dict[str, str]:
    r"""All labels; in values \\, \" and \n stand for a backslash, a quote and a line feed."""
    if len(text) > LONGEST_LABELS:
        raise ValueError(f"more than {LONGEST_LABELS} bytes of labels")
    labels, whole, at = {}, text.decode(), 0
    while at < len(whole):
        part = _LABEL.match(whole, at)
        if part is None:
            raise ValueError("malformed labels")
        if part["name"] is not None:
            labels[part["name"].strip()] = _unescape(part["value"])
        at = part.end()
    return labels


_LABEL = re.compile(r'[, \t]+|(?P<name>[^=]*)=\s*"(?P<value>[^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
"""One label, or what stands between two: each character is looked at once."""


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    pieces = value.split("\\\\")
    return "\\".join(piece.replace('\\"', '"').replace("\\n", "\n") for piece in pieces)


def _add_capacity(sum_so_far: float | None, labels: Mapping[str, str]) -> float | None:
    """Tokens in the KV cache of one more engine; None when it does not say ("None" before its cache is sized)."""
    try:
        return (sum_so_far or 0.0) + int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    except (KeyError, ValueError):
        return sum_so_far


def _started(page: bytes) -> float | None:
    at = page.find(f"\n{PROCESS_START} ".encode())
    if at < 0:
        return None
    return _value(page[at : page.index(b"\n", at + 1)].partition(b" ")[2])


# --------------------------------------------------------------------------------------------------------------- sample
@dataclass(frozen=True, slots=True)
class _Found:
    plain: Mapping[bytes, float]
    labelled: Mapping[bytes, Mapping[bytes, float]]

    def number(self, metric: Metric, suffix: str = "") -> float:
        name = metric.row.name + suffix
        try:
            return self.plain[name.encode()]
        except KeyError:
            raise _missing(name) from None

    def gauge(self, metric: Metric) -> float | None:
        return self.plain.get(metric.row.name.encode())

    def by_label(self, metric: Metric, suffix: str = "") -> Mapping[bytes, float]:
        name = metric.row.name + suffix
        try:
            return self.labelled[name.encode()]
        except KeyError:
            raise _missing(name) from None

    def histogram(self, metric: Metric) -> Histogram:
        buckets = sorted((float(edge), count) for edge, count in self.by_label(metric, "_bucket").items())
        edges, counts = zip(*buckets, strict=True)
        try:
            return Histogram(_shared(edges), _with_shared_numbers(counts), self.number(metric, "_sum"))
        except ValueError as error:
            raise PageError(f"the metrics page's {metric} is no histogram: {error}") from None

    def speculation(self) -> Speculation | None:
        if Metric.DRAFTS.row.name.encode() not in self.plain:
            return None
        accepted = {int(position): count for position, count in self.by_label(Metric.ACCEPTED_PER_POSITION).items()}
        if sorted(accepted) != list(range(len(accepted))):
            raise PageError(
                f"the metrics page's {Metric.ACCEPTED_PER_POSITION} has the positions {sorted(accepted)}, with a gap."
            )
        return Speculation(
            self.number(Metric.DRAFTS),
            self.number(Metric.DRAFT_TOKENS),
            self.number(Metric.ACCEPTED),
            tuple(accepted[position] for position in range(len(accepted))),
        )


@functools.lru_cache(maxsize=64)
def _shared(edges: tuple[float, ...]) -> tuple[float, ...]:
    """These edges, as one object for all pages that have them: an operator keeps samples of thousands of pods."""
    return edges


def _with_shared_numbers(counts: tuple[float, ...]) -> tuple[float, ...]:
    """The same; cumulative counts repeat a lot."""
    known: dict[float, float] = {}
    return tuple(known.setdefault(count, count) for count in counts)


def _missing(name: str) -> PageError:
    return PageError(f"the metrics page has no {name}: it is not that of a vLLM engine, or of one older than 0.24.")


def _sample(found: _Found, capacity: float | None, started: float | None) -> Sample:
    finished = {reason.decode(): count for reason, count in found.by_label(Metric.FINISHED).items()}
    generated = found.by_label(Metric.GENERATION_TOKENS)
    usage = found.labelled.get(Metric.KV_CACHE_USAGE.row.name.encode(), {})
    counters = Counters(
        generation_tokens=sum(generated.values()),
        prompt_tokens=found.number(Metric.PROMPT_TOKENS),
        computed_prompt_tokens=found.by_label(Metric.PROMPT_TOKENS_BY_SOURCE).get(b"local_compute", 0.0),
        prefix_cache_queries=found.number(Metric.PREFIX_CACHE_QUERIES),
        prefix_cache_hits=found.number(Metric.PREFIX_CACHE_HITS),
        preemptions=found.number(Metric.PREEMPTIONS),
        finished=finished,
        request_steps=found.number(Metric.INTER_TOKEN_LATENCY, "_count"),
        step_seconds=found.number(Metric.INTER_TOKEN_LATENCY, "_sum"),
        iterations=found.number(Metric.ITERATION_TOKENS, "_count"),
        queued_requests=found.number(Metric.QUEUE_TIME, "_count"),
        queue_seconds=found.number(Metric.QUEUE_TIME, "_sum"),
        time_to_first_token=found.histogram(Metric.TIME_TO_FIRST_TOKEN),
        time_per_output_token=found.histogram(Metric.TIME_PER_OUTPUT_TOKEN),
        speculation=found.speculation(),
    )
    gauges = Gauges(found.gauge(Metric.RUNNING), found.gauge(Metric.WAITING), max(usage.values(), default=None), capacity)
    return Sample(counters, gauges, frozenset(engine.decode() for engine in generated), started)
