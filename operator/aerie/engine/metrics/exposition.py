"""Parse an exposition of vLLM's metrics, in Prometheus's text format, into a `Sample`.

The parser reads only what Aerie needs, so that an exposition of 50 KiB takes a millisecond. It selects lines by their name alone,
and reads labels only where they matter. An exposition comes from a container that anybody may have written, so it has limits: its
bytes and lines, lines that are read and their length, labels of a line, and distinct values of a label.

Guarantees: time is linear in the bytes, and the largest exposition takes some 20 ms whatever it contains. A sample has at most 16
KiB. Every number is finite, not negative and not above `MAX_COUNTER_VALUE`, sums over ranks included. Engines (data-parallel
ranks) and served model names are summed. Label values are unescaped as the format specifies. An exposition that is truncated,
over a limit, malformed in a line that is read, or not vLLM's raises `ExpositionError`, and never gives a number. Its message is
Aerie's own, the same for each exposition with the fault: it contains nothing of its text. Not guaranteed: that
lines which are not read are well-formed. Nothing of OpenMetrics is read that Prometheus's text format does not have. The
exposition of vLLM's front end in Rust, which is always `application/openmetrics-text`, is read completely.
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
"""Bytes of an exposition. vLLM 0.32 writes 58 KiB for one engine and 45 KiB for each further data-parallel rank. 16 ranks, as
many as a node has GPUs, take 730 KiB with a model name of 33 characters, and one MiB with 70."""
MAX_EXPOSITION_LINES = 20_000
"""Lines of an exposition; 16 ranks have 6,200. The rest is for LoRA adapters: one line for each set of them that ever ran."""
MAX_PARSED_LINES = 4096
"""Lines that are read; 16 ranks have 1,400."""
MAX_LINE_BYTES = 8192
"""Bytes of a line that is read; the longest, the cache config, has about 1,100."""
MAX_LABELS_PER_LINE, MAX_CACHE_CONFIG_LABELS = 8, 128
"""Labels of a line that is read, which has 2 or 3, and labels of the cache config, which has some 40."""
_MAX_INTEGER_DIGITS = 18
MAX_VALUE_BYTES = 64
"""Bytes of a label value that is stored, or of a number."""
MAX_COUNTER_VALUE = 1e18
"""Value of a counter: at a million tokens each second an engine reaches it after 30,000 years."""


class ExpositionError(ValueError):
    """A response that is no complete exposition of vLLM's metrics; the message is a sentence."""


def parse_exposition(body: bytes) -> Sample:
    """Parse an exposition in Prometheus's text format. Raises ExpositionError."""
    if len(body) > MAX_EXPOSITION_BYTES:
        raise ExpositionError(f"the metrics response has more than {MAX_EXPOSITION_BYTES} bytes.")
    if not body.endswith(b"\n"):
        raise ExpositionError("the metrics response ends in the middle of a line: the connection was cut, scrape again.")
    if body.count(b"\n") > MAX_EXPOSITION_LINES:
        raise ExpositionError(f"the metrics response has more than {MAX_EXPOSITION_LINES} lines.")
    builder, parsed_lines = _SampleBuilder(), 0
    for line in body.split(b"\n"):
        if not line.startswith(_VLLM_PREFIX):
            continue
        name, _, rest = line.partition(b"{")
        label = _LABEL_BY_SERIES.get(name)
        if label is None:
            continue
        parsed_lines += 1
        try:
            if parsed_lines > MAX_PARSED_LINES:
                raise _LineError(f"more than {MAX_PARSED_LINES} lines that are read")
            if len(rest) > MAX_LINE_BYTES:
                raise _LineError(f"it is longer than {MAX_LINE_BYTES} bytes")
            labels, _, tail = rest.rpartition(b"}")
            if label == _NO_LABEL:
                builder.add_sum(name, _parse_value(tail))
            elif label == _CACHE_CONFIG:
                builder.add_kv_cache(
                    _parse_labels(labels, MAX_CACHE_CONFIG_LABELS)
                )  # the values that are read contain no escapes
            else:
                builder.add_labelled(name, label, _parse_label(labels, label), _parse_value(tail))
        except _LineError as error:
            raise _unreadable_line_error(name, error) from None
    return builder.build(_parse_process_start(body))


def parse_series(series: Iterable[tuple[str, Mapping[str, str], str]], process_start_time: str | None) -> Sample:
    """Build a sample from the lines of one exposition, split into name, labels and value, and the process start time. Raises
    ExpositionError."""
    builder, parsed_lines = _SampleBuilder(), 0
    for series_name, labels, value in series:
        name = series_name.encode()
        label = _LABEL_BY_SERIES.get(name)
        if label is None:
            continue
        parsed_lines += 1
        try:
            if parsed_lines > MAX_PARSED_LINES:
                raise _LineError(f"more than {MAX_PARSED_LINES} lines that are read")
            if label == _NO_LABEL:
                builder.add_sum(name, _parse_value(value.encode()))
            elif label == _CACHE_CONFIG:
                builder.add_kv_cache({label_name.encode(): text_value.encode() for label_name, text_value in labels.items()})
            elif (label_value := labels.get(label.decode())) is None:
                raise _LineError(f"no label {label.decode()}")
            else:
                builder.add_labelled(name, label, label_value.encode(), _parse_value(value.encode()))
        except _LineError as error:
            raise _unreadable_line_error(name, error) from None
    return builder.build(None if process_start_time is None else _parse_start_time(process_start_time.encode()))


class _LineError(Exception):
    """An invalid line; the message contains nothing from the exposition."""


def _unreadable_line_error(name: bytes, error: _LineError) -> ExpositionError:
    """Return the error of a line. `name` is one of `PARSED_SERIES`, so the message contains nothing from the exposition."""
    return ExpositionError(f"the metrics response has a line that cannot be read ({error}): {name.decode()}")


# ---------------------------------------------------------------------------------------------------------------- lines
PROCESS_START_SERIES = "process_start_time_seconds"
_VLLM_PREFIX = b"vllm:"
_NO_LABEL, _CACHE_CONFIG = b"", b"\0"  # neither is a valid label name


def _build_label_by_series() -> dict[bytes, bytes]:
    """Return, by series name, the label that distinguishes its values; `_NO_LABEL` for a series that is summed."""
    label_by_metric = {
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
            names[name] = label_by_metric.get(metric, _NO_LABEL)
    for metric in (Metric.TIME_TO_FIRST_TOKEN, Metric.TIME_PER_OUTPUT_TOKEN):
        names[metric.definition.name.encode() + b"_bucket"] = b"le"
    return names


_LABEL_BY_SERIES = _build_label_by_series()
PARSED_SERIES = frozenset(name.decode() for name in _LABEL_BY_SERIES)
"""Names of all series that are read, except `PROCESS_START_SERIES`."""


_MAX_LABEL_VALUES: Mapping[bytes, int] = {b"engine": 64, b"position": 64, b"finished_reason": 32, b"source": 32, b"le": 128}
"""Distinct values of one series, by label. vLLM has 5 reasons, 3 sources and 23 edges, and a user may change the edges. The
other two have as many values as there are ranks and draft tokens."""
_LABEL_PATTERN = re.compile(rb'[, \t]*+([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
"""A label and its value, still escaped. The pattern does not backtrack, so that time is linear."""


def _parse_value(tail: bytes) -> float:
    """Parse the value after the labels; a timestamp may follow it."""
    if len(tail) > MAX_VALUE_BYTES:
        raise _LineError(f"a value longer than {MAX_VALUE_BYTES} bytes")
    words = tail.split()
    try:
        value = float(words[0]) if words else math.nan
    except ValueError:
        raise _LineError("a value that is no number") from None
    if not math.isfinite(value):
        raise _LineError("no finite value")
    if value < 0:  # no series that is read can be negative: counters, sums of times, amounts
        raise _LineError("a value below zero")
    if value > MAX_COUNTER_VALUE:
        raise _LineError(f"a value above {MAX_COUNTER_VALUE:g}")
    return value


def _parse_label(labels: bytes, name: bytes) -> bytes:
    """Return the unescaped value of one label."""
    if b"\\" in labels:
        escaped = _parse_labels(labels, MAX_LABELS_PER_LINE).get(name)
        value = None if escaped is None else _unescape_value(escaped)
    else:  # without escapes, every quote begins or ends a value
        parts = labels.split(b'"', 2 * MAX_LABELS_PER_LINE + 1)
        if len(parts) > 2 * MAX_LABELS_PER_LINE + 1:
            raise _LineError(f"more than {MAX_LABELS_PER_LINE} labels")
        starts = range(0, len(parts) - 1, 2)
        value = next((parts[index + 1] for index in starts if parts[index].strip(b", =") == name), None)
    if value is None:
        raise _LineError(f"no label {name.decode()}")
    return value


def _parse_labels(text: bytes, max_labels: int) -> dict[bytes, bytes]:
    """Return all labels, with their values still escaped."""
    labels: dict[bytes, bytes] = {}
    offset = count = 0
    while match := _LABEL_PATTERN.match(text, offset):
        count += 1
        if count > max_labels:
            raise _LineError(f"more than {max_labels} labels")
        labels[match[1]] = match[2]
        offset = match.end()
    if text[offset:].strip(b", \t"):
        raise _LineError("malformed labels")
    return labels


def _unescape_value(value: bytes) -> bytes:
    r"""Replace \\, \" and \n by a backslash, a quote and a line feed."""
    if b"\\" not in value:
        return value
    pieces = value.split(b"\\\\")
    return b"\\".join(piece.replace(b'\\"', b'"').replace(b"\\n", b"\n") for piece in pieces)


def _parse_process_start(exposition: bytes) -> float | None:
    start = exposition.find(f"\n{PROCESS_START_SERIES} ".encode())
    if start < 0:
        return None
    start += len(PROCESS_START_SERIES) + 2
    return _parse_start_time(exposition[start : min(exposition.index(b"\n", start), start + MAX_VALUE_BYTES + 1)])


def _parse_start_time(tail: bytes) -> float:
    try:
        return _parse_value(tail)
    except _LineError as error:
        raise _unreadable_line_error(PROCESS_START_SERIES.encode(), error) from None


# --------------------------------------------------------------------------------------------------------------- sample
@dataclass(frozen=True, slots=True)
class _SampleBuilder:
    """Collector of an exposition's numbers by series name: sums, and values by label."""

    sums: dict[bytes, float] = field(default_factory=dict)
    labelled_sums: dict[bytes, dict[bytes, float]] = field(default_factory=dict)
    kv_cache_tokens: list[int | None] = field(default_factory=list)
    """Tokens in the KV cache of each engine; None if the number is missing ("None" before the cache is sized)."""

    def add_sum(self, name: bytes, value: float) -> None:
        self.sums[name] = _add_bounded(self.sums.get(name, 0.0), value)

    def add_labelled(self, name: bytes, label: bytes, label_value: bytes, value: float) -> None:
        values = self.labelled_sums.setdefault(name, {})
        if (previous := values.get(label_value)) is not None:
            values[label_value] = _add_bounded(previous, value)
            return
        if len(label_value) > MAX_VALUE_BYTES:
            raise _LineError(f"a value of {label.decode()} longer than {MAX_VALUE_BYTES} bytes")
        if len(values) == _MAX_LABEL_VALUES[label]:
            raise _LineError(f"more than {_MAX_LABEL_VALUES[label]} values of {label.decode()}")
        values[label_value] = value

    def add_kv_cache(self, labels: Mapping[bytes, bytes]) -> None:
        blocks, size = (labels.get(name, b"") for name in (b"num_gpu_blocks", b"block_size"))
        if max(len(blocks), len(size)) > _MAX_INTEGER_DIGITS:
            raise _LineError(f"a number of more than {_MAX_INTEGER_DIGITS} digits")
        if len(self.kv_cache_tokens) == _MAX_LABEL_VALUES[b"engine"]:
            raise _LineError(f"more than {_MAX_LABEL_VALUES[b'engine']} engines")
        self.kv_cache_tokens.append(int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None)

    def build(self, process_start_time: float | None) -> Sample:
        """Return the sample. Raises ExpositionError."""
        cache_tokens = [tokens for tokens in self.kv_cache_tokens if tokens is not None]
        return _build_sample(self, float(sum(cache_tokens)) if cache_tokens else None, process_start_time)

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
        buckets, total = self.read_by_label(metric, "_bucket"), self.read_sum(metric, "_sum")
        try:
            edges, counts = zip(*sorted((_parse_edge(edge), count) for edge, count in buckets.items()), strict=True)
            return Histogram(_intern_edges(edges), _intern_counts(counts), total)
        except ValueError:
            requirement = "its buckets need different edges that are numbers, the last of them +Inf."
            raise ExpositionError(f"the metrics response's {metric} is no histogram: {requirement}") from None

    def read_speculation(self) -> SpeculationCounters | None:
        if Metric.DRAFTS.definition.name.encode() not in self.sums:
            return None
        # The front end in Rust omits the positions until a draft token is accepted.
        accepted = self.labelled_sums.get(Metric.ACCEPTED_PER_POSITION.definition.name.encode(), {})
        positions = [str(position).encode() for position in range(len(accepted))]
        if accepted.keys() != set(positions):
            raise ExpositionError(
                f"the metrics response's {Metric.ACCEPTED_PER_POSITION} does not have the positions 0, 1, 2 and so on."
            )
        return SpeculationCounters(
            self.read_sum(Metric.DRAFTS),
            self.read_sum(Metric.DRAFT_TOKENS),
            self.read_sum(Metric.ACCEPTED),
            tuple(accepted[position] for position in positions),
        )


def _add_bounded(total: float, value: float) -> float:
    if total + value > MAX_COUNTER_VALUE:
        raise _LineError(f"a sum above {MAX_COUNTER_VALUE:g}")
    return total + value


def _parse_edge(text: bytes) -> float:
    edge = float(text)
    if math.isnan(edge):
        raise ValueError("no number")
    return edge


def _decode_label(value: bytes, metric: Metric) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ExpositionError(f"the metrics response's {metric} has a label that is no text in UTF-8.") from None


@functools.lru_cache(maxsize=64)
def _intern_edges(edges: tuple[float, ...]) -> tuple[float, ...]:
    """Return these edges as one object for all expositions with them, because an operator stores samples of thousands of pods."""
    return edges


def _intern_counts(counts: tuple[float, ...]) -> tuple[float, ...]:
    """Return these counts with one object for equal values; cumulative counts repeat a lot."""
    interned: dict[float, float] = {}
    return tuple(interned.setdefault(count, count) for count in counts)


def _missing_series_error(name: str) -> ExpositionError:
    return ExpositionError(f"the metrics response has no {name}: it is not from a vLLM engine, or from one older than 0.24.")


def _build_sample(builder: _SampleBuilder, capacity: float | None, process_start_time: float | None) -> Sample:
    # The front end in Rust omits a reason until the first request finishes with it.
    finished_by_label = builder.labelled_sums.get(Metric.FINISHED.definition.name.encode(), {})
    finished = {_decode_label(reason, Metric.FINISHED): count for reason, count in finished_by_label.items()}
    generation_tokens = builder.read_by_label(Metric.GENERATION_TOKENS)
    usage = builder.labelled_sums.get(Metric.KV_CACHE_USAGE.definition.name.encode(), {})
    counters = Counters(
        generation_tokens=sum(generation_tokens.values()),
        prompt_tokens=builder.read_sum(Metric.PROMPT_TOKENS),
        computed_prompt_tokens=builder.read_by_label(Metric.PROMPT_TOKENS_BY_SOURCE).get(b"local_compute", 0.0),
        prefix_cache_queries=builder.read_sum(Metric.PREFIX_CACHE_QUERIES),
        prefix_cache_hits=builder.read_sum(Metric.PREFIX_CACHE_HITS),
        preemptions=builder.read_sum(Metric.PREEMPTIONS),
        finished=finished,
        request_steps=builder.read_sum(Metric.INTER_TOKEN_LATENCY, "_count"),
        step_seconds=builder.read_sum(Metric.INTER_TOKEN_LATENCY, "_sum"),
        iterations=builder.read_sum(Metric.ITERATION_TOKENS, "_count"),
        queued_requests=builder.read_sum(Metric.QUEUE_TIME, "_count"),
        queue_seconds=builder.read_sum(Metric.QUEUE_TIME, "_sum"),
        time_to_first_token=builder.read_histogram(Metric.TIME_TO_FIRST_TOKEN),
        time_per_output_token=builder.read_histogram(Metric.TIME_PER_OUTPUT_TOKEN),
        speculation=builder.read_speculation(),
    )
    gauges = Gauges(
        builder.read_gauge(Metric.RUNNING), builder.read_gauge(Metric.WAITING), max(usage.values(), default=None), capacity
    )
    return Sample(
        counters,
        gauges,
        frozenset(_decode_label(engine, Metric.GENERATION_TOKENS) for engine in generation_tokens),
        process_start_time,
    )
