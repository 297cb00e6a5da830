"""Reads a metrics page of vLLM, Prometheus's text format, into a `Sample`.

Only what Aerie needs is read, so that a page of 50 KiB takes a millisecond: lines are told apart by their name alone, and labels
are looked at only where they matter. A page comes from a container that anybody may have written, so it has limits: in bytes and
lines, in the lines that are read and their length, in the labels of a line, and in the values of a label that are told apart.

Guarantees: time is linear in a page's bytes, and the largest page takes some 20 ms whatever it says; a sample has at most 16 KiB;
every number is finite, not negative and not above `HIGHEST`, sums over ranks included. Engines (data-parallel ranks) and served
names are summed; label values are unescaped as the format says; a page that is cut short, over a limit, malformed where it is
read, or not vLLM's is a `PageError`, never a number. A PageError says what is wrong in words of Aerie's own, the same for each
page that has the fault: nothing that stands on the page is in it. Not guaranteed: that lines which are not read are well-formed.
Of OpenMetrics nothing is read that Prometheus's text format does not have; the page of vLLM's front end in Rust, which is always
`application/openmetrics-text`, is read whole.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.names import Metric, MetricType
from aerie.engine.metrics.sample import Counters, Gauges, Sample, SpeculationCounters

MAX_EXPOSITION_BYTES = 1024 * 1024
"""Bytes of a page. vLLM 0.32 writes 58 KiB for one engine and 45 KiB for each further data-parallel rank: 16 ranks, as many as a
node has GPUs, take 730 KiB with a model name of 33 characters, and one MiB with 70."""
MAX_EXPOSITION_LINES = 20_000
"""Of a page; 16 ranks have 6,200. What is left is for the lines about LoRA adapters, one for each set of them that ever ran."""
MAX_PARSED_LINES = 4096
"""Lines that are read; 16 ranks have 1,400."""
MAX_LINE_BYTES = 8192
"""Bytes of a line that is read; the longest, the settings of the cache, has about 1,100."""
MAX_LABELS_PER_LINE, MAX_CACHE_CONFIG_LABELS = 8, 128
"""Labels of a line that is read; it has 2 or 3. Of the line with the settings of the cache, which are some 40."""
_MAX_INTEGER_DIGITS = 18
MAX_VALUE_BYTES = 64
"""Bytes of a label's value that is kept, or of a number."""
MAX_COUNTER_VALUE = 1e18
"""Of a counter: what an engine that makes a million tokens each second counts in 30,000 years."""


class ExpositionError(ValueError):
    """A page that is no whole metrics page of vLLM; the message is a sentence."""


def parse_exposition(body: bytes) -> Sample:
    """Read a page in Prometheus's text format. Raises PageError."""
    if len(body) > MAX_EXPOSITION_BYTES:
        raise ExpositionError(f"the metrics page has more than {MAX_EXPOSITION_BYTES} bytes.")
    if not body.endswith(b"\n"):
        raise ExpositionError("the metrics page ends in the middle of a line: the connection was cut, scrape again.")
    if body.count(b"\n") > MAX_EXPOSITION_LINES:
        raise ExpositionError(f"the metrics page has more than {MAX_EXPOSITION_LINES} lines.")
    found, lines = _SampleBuilder(), 0
    for line in body.split(b"\n"):
        if not line.startswith(_VLLM_PREFIX):
            continue
        name, _, rest = line.partition(b"{")
        label = _LABEL_BY_SERIES.get(name)
        if label is None:
            continue
        lines += 1
        try:
            if lines > MAX_PARSED_LINES:
                raise _LineError(f"more than {MAX_PARSED_LINES} lines that are read")
            if len(rest) > MAX_LINE_BYTES:
                raise _LineError(f"it is longer than {MAX_LINE_BYTES} bytes")
            labels, _, tail = rest.rpartition(b"}")
            if label == _NO_LABEL:
                found.add_sum(name, _parse_value(tail))
            elif label == _CACHE_CONFIG:
                found.add_kv_cache(_parse_labels(labels, MAX_CACHE_CONFIG_LABELS))  # none of those that count needs an escape
            else:
                found.add_labelled(name, label, _parse_label(labels, label), _parse_value(tail))
        except _LineError as error:
            raise _unreadable_line_error(name, error) from None
    return found.build(_parse_process_start(body))


def parse_series(series: Iterable[tuple[str, Mapping[str, str], str]], process_start_time: str | None) -> Sample:
    """The same from the lines of one page taken apart: name, labels and value, and when the process began. Raises PageError."""
    found, lines = _SampleBuilder(), 0
    for text, labels, value in series:
        name = text.encode()
        label = _LABEL_BY_SERIES.get(name)
        if label is None:
            continue
        lines += 1
        try:
            if lines > MAX_PARSED_LINES:
                raise _LineError(f"more than {MAX_PARSED_LINES} lines that are read")
            if label == _NO_LABEL:
                found.add_sum(name, _parse_value(value.encode()))
            elif label == _CACHE_CONFIG:
                found.add_kv_cache({key.encode(): value.encode() for key, value in labels.items()})
            elif (key := labels.get(label.decode())) is None:
                raise _LineError(f"no label {label.decode()}")
            else:
                found.add_labelled(name, label, key.encode(), _parse_value(value.encode()))
        except _LineError as error:
            raise _unreadable_line_error(name, error) from None
    return found.build(None if process_start_time is None else _parse_start_time(process_start_time.encode()))


class _LineError(Exception):
    """What is wrong with a line, in words that are not the page's."""


def _unreadable_line_error(name: bytes, error: _LineError) -> ExpositionError:
    """`name` is one of the table, so it is not the page's word either."""
    return ExpositionError(f"the metrics page has a line that cannot be read ({error}): {name.decode()}")


# ---------------------------------------------------------------------------------------------------------------- lines
PROCESS_START_SERIES = "process_start_time_seconds"
_VLLM_PREFIX = b"vllm:"
_NO_LABEL, _CACHE_CONFIG = b"", b"\0"  # no label name is either


def _build_label_by_series() -> dict[bytes, bytes]:
    """By series name, the label that tells its values apart, or `_SUM`."""
    told_apart = {
        Metric.ACCEPTED_PER_POSITION: b"position",
        Metric.PROMPT_TOKENS_BY_SOURCE: b"source",
        Metric.FINISHED: b"finished_reason",
        Metric.GENERATION_TOKENS: b"engine",
        Metric.KV_CACHE_USAGE: b"engine",
        Metric.CACHE_CONFIG: _CACHE_CONFIG,
    }
    names: dict[bytes, bytes] = {}
    for metric in Metric:
        name = metric.definition.name.encode()
        if metric.definition.metric_type is MetricType.HISTOGRAM:
            names |= {name + b"_sum": _NO_LABEL, name + b"_count": _NO_LABEL}
        else:
            names[name] = told_apart.get(metric, _NO_LABEL)
    for metric in (Metric.TIME_TO_FIRST_TOKEN, Metric.TIME_PER_OUTPUT_TOKEN):
        names[metric.definition.name.encode() + b"_bucket"] = b"le"
    return names


_LABEL_BY_SERIES = _build_label_by_series()
PARSED_SERIES = frozenset(name.decode() for name in _LABEL_BY_SERIES)
"""Names of all series that are read, but for `PROCESS_START`."""


_MAX_LABEL_VALUES: Mapping[bytes, int] = {b"engine": 64, b"position": 64, b"finished_reason": 32, b"source": 32, b"le": 128}
"""By label, the values that are told apart in one series: vLLM has 5 reasons, 3 sources and 23 edges, and a user may change the
edges; the other two are as many as the ranks and the draft tokens."""
_LABEL_PATTERN = re.compile(rb'[, \t]*+([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
"""A label and its value, still escaped; without going back, so that time is linear."""


def _parse_value(tail: bytes) -> float:
    """The value behind the labels; a timestamp may follow."""
    if len(tail) > MAX_VALUE_BYTES:
        raise _LineError(f"a value longer than {MAX_VALUE_BYTES} bytes")
    words = tail.split()
    try:
        value = float(words[0]) if words else math.nan
    except ValueError:
        raise _LineError("a value that is no number") from None
    if not math.isfinite(value):
        raise _LineError("no finite value")
    if value < 0:  # nothing that is read can be: counters, sums of times, amounts
        raise _LineError("a value below zero")
    if value > MAX_COUNTER_VALUE:
        raise _LineError(f"a value above {MAX_COUNTER_VALUE:g}")
    return value


def _parse_label(labels: bytes, name: bytes) -> bytes:
    """The value of one label."""
    if b"\\" in labels:
        escaped = _parse_labels(labels, MAX_LABELS_PER_LINE).get(name)
        value = None if escaped is None else _unescape_value(escaped)
    else:  # then every quote begins or ends a value
        parts = labels.split(b'"', 2 * MAX_LABELS_PER_LINE + 1)
        if len(parts) > 2 * MAX_LABELS_PER_LINE + 1:
            raise _LineError(f"more than {MAX_LABELS_PER_LINE} labels")
        starts = range(0, len(parts) - 1, 2)
        value = next((parts[index + 1] for index in starts if parts[index].strip(b", =") == name), None)
    if value is None:
        raise _LineError(f"no label {name.decode()}")
    return value


def _parse_labels(text: bytes, most: int) -> dict[bytes, bytes]:
    """All labels, their values as they stand there."""
    found: dict[bytes, bytes] = {}
    at = number = 0
    while match := _LABEL_PATTERN.match(text, at):
        number += 1
        if number > most:
            raise _LineError(f"more than {most} labels")
        found[match[1]] = match[2]
        at = match.end()
    if text[at:].strip(b", \t"):
        raise _LineError("malformed labels")
    return found


def _unescape_value(value: bytes) -> bytes:
    r"""\\, \" and \n stand for a backslash, a quote and a line feed."""
    if b"\\" not in value:
        return value
    pieces = value.split(b"\\\\")
    return b"\\".join(piece.replace(b'\\"', b'"').replace(b"\\n", b"\n") for piece in pieces)


def _parse_process_start(page: bytes) -> float | None:
    at = page.find(f"\n{PROCESS_START_SERIES} ".encode())
    if at < 0:
        return None
    at += len(PROCESS_START_SERIES) + 2
    return _parse_start_time(page[at : min(page.index(b"\n", at), at + MAX_VALUE_BYTES + 1)])


def _parse_start_time(tail: bytes) -> float:
    try:
        return _parse_value(tail)
    except _LineError as error:
        raise _unreadable_line_error(PROCESS_START_SERIES.encode(), error) from None


# --------------------------------------------------------------------------------------------------------------- sample
@dataclass(frozen=True, slots=True)
class _SampleBuilder:
    """The numbers of a page, by name: sums, and what a label tells apart."""

    sums: dict[bytes, float] = field(default_factory=dict)
    labelled_sums: dict[bytes, dict[bytes, float]] = field(default_factory=dict)
    kv_cache_tokens: list[int | None] = field(default_factory=list)
    """Tokens in the KV cache of each engine; None where it does not say ("None" before its cache is sized)."""

    def add_sum(self, name: bytes, value: float) -> None:
        self.sums[name] = _add_bounded(self.sums.get(name, 0.0), value)

    def add_labelled(self, name: bytes, label: bytes, key: bytes, value: float) -> None:
        values = self.labelled_sums.setdefault(name, {})
        if (known := values.get(key)) is not None:
            values[key] = _add_bounded(known, value)
            return
        if len(key) > MAX_VALUE_BYTES:
            raise _LineError(f"a value of {label.decode()} longer than {MAX_VALUE_BYTES} bytes")
        if len(values) == _MAX_LABEL_VALUES[label]:
            raise _LineError(f"more than {_MAX_LABEL_VALUES[label]} values of {label.decode()}")
        values[key] = value

    def add_kv_cache(self, labels: Mapping[bytes, bytes]) -> None:
        blocks, size = (labels.get(name, b"") for name in (b"num_gpu_blocks", b"block_size"))
        if max(len(blocks), len(size)) > _MAX_INTEGER_DIGITS:
            raise _LineError(f"a number of more than {_MAX_INTEGER_DIGITS} digits")
        if len(self.kv_cache_tokens) == _MAX_LABEL_VALUES[b"engine"]:
            raise _LineError(f"more than {_MAX_LABEL_VALUES[b'engine']} engines")
        self.kv_cache_tokens.append(int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None)

    def build(self, started: float | None) -> Sample:
        """All of it. Raises PageError."""
        known = [tokens for tokens in self.kv_cache_tokens if tokens is not None]
        return _build_sample(self, float(sum(known)) if known else None, started)

    def read_sum(self, metric: Metric, suffix: str = "") -> float:
        name = metric.definition.name + suffix
        try:
            return self.sums[name.encode()]
        except KeyError:
            raise _missing_series_error(name) from None

    def read_gauge(self, metric: Metric) -> float | None:
        return self.sums.get(metric.definition.name.encode())

    def read_by_label(self, metric: Metric, suffix: str = "") -> Mapping[bytes, float]:
        name = metric.definition.name + suffix
        try:
            return self.labelled_sums[name.encode()]
        except KeyError:
            raise _missing_series_error(name) from None

    def read_histogram(self, metric: Metric) -> Histogram:
        found, total = self.read_by_label(metric, "_bucket"), self.read_sum(metric, "_sum")
        try:
            edges, counts = zip(*sorted((_parse_edge(edge), count) for edge, count in found.items()), strict=True)
            return Histogram(_intern_edges(edges), _intern_counts(counts), total)
        except ValueError:
            told = "its buckets need different edges that are numbers, the last of them +Inf."
            raise ExpositionError(f"the metrics page's {metric} is no histogram: {told}") from None

    def read_speculation(self) -> SpeculationCounters | None:
        if Metric.DRAFTS.definition.name.encode() not in self.sums:
            return None
        # Until something was accepted the front end in Rust does not name the positions.
        accepted = self.labelled_sums.get(Metric.ACCEPTED_PER_POSITION.definition.name.encode(), {})
        positions = [str(position).encode() for position in range(len(accepted))]
        if accepted.keys() != set(positions):
            raise ExpositionError(
                f"the metrics page's {Metric.ACCEPTED_PER_POSITION} does not have the positions 0, 1, 2 and so on."
            )
        return SpeculationCounters(
            self.read_sum(Metric.DRAFTS),
            self.read_sum(Metric.DRAFT_TOKENS),
            self.read_sum(Metric.ACCEPTED),
            tuple(accepted[position] for position in positions),
        )


def _add_bounded(known: float, value: float) -> float:
    if known + value > MAX_COUNTER_VALUE:
        raise _LineError(f"a sum above {MAX_COUNTER_VALUE:g}")
    return known + value


def _parse_edge(text: bytes) -> float:
    edge = float(text)
    if math.isnan(edge):
        raise ValueError("no number")
    return edge


def _decode_label(value: bytes, metric: Metric) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ExpositionError(f"the metrics page's {metric} has a label that is no text in UTF-8.") from None


@functools.lru_cache(maxsize=64)
def _intern_edges(edges: tuple[float, ...]) -> tuple[float, ...]:
    """These edges, as one object for all pages that have them: an operator keeps samples of thousands of pods."""
    return edges


def _intern_counts(counts: tuple[float, ...]) -> tuple[float, ...]:
    """The same; cumulative counts repeat a lot."""
    known: dict[float, float] = {}
    return tuple(known.setdefault(count, count) for count in counts)


def _missing_series_error(name: str) -> ExpositionError:
    return ExpositionError(f"the metrics page has no {name}: it is not that of a vLLM engine, or of one older than 0.24.")


def _build_sample(found: _SampleBuilder, capacity: float | None, started: float | None) -> Sample:
    ended = found.labelled_sums.get(
        Metric.FINISHED.definition.name.encode(), {}
    )  # the front end in Rust names a reason with its first request
    finished = {_decode_label(reason, Metric.FINISHED): count for reason, count in ended.items()}
    generated = found.read_by_label(Metric.GENERATION_TOKENS)
    usage = found.labelled_sums.get(Metric.KV_CACHE_USAGE.definition.name.encode(), {})
    counters = Counters(
        generation_tokens=sum(generated.values()),
        prompt_tokens=found.read_sum(Metric.PROMPT_TOKENS),
        computed_prompt_tokens=found.read_by_label(Metric.PROMPT_TOKENS_BY_SOURCE).get(b"local_compute", 0.0),
        prefix_cache_queries=found.read_sum(Metric.PREFIX_CACHE_QUERIES),
        prefix_cache_hits=found.read_sum(Metric.PREFIX_CACHE_HITS),
        preemptions=found.read_sum(Metric.PREEMPTIONS),
        finished=finished,
        request_steps=found.read_sum(Metric.INTER_TOKEN_LATENCY, "_count"),
        step_seconds=found.read_sum(Metric.INTER_TOKEN_LATENCY, "_sum"),
        iterations=found.read_sum(Metric.ITERATION_TOKENS, "_count"),
        queued_requests=found.read_sum(Metric.QUEUE_TIME, "_count"),
        queue_seconds=found.read_sum(Metric.QUEUE_TIME, "_sum"),
        time_to_first_token=found.read_histogram(Metric.TIME_TO_FIRST_TOKEN),
        time_per_output_token=found.read_histogram(Metric.TIME_PER_OUTPUT_TOKEN),
        speculation=found.read_speculation(),
    )
    gauges = Gauges(
        found.read_gauge(Metric.RUNNING), found.read_gauge(Metric.WAITING), max(usage.values(), default=None), capacity
    )
    return Sample(counters, gauges, frozenset(_decode_label(engine, Metric.GENERATION_TOKENS) for engine in generated), started)
