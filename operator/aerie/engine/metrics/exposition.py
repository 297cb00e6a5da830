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
from aerie.engine.metrics.names import Kind, Metric
from aerie.engine.metrics.sample import Counters, Gauges, Sample, Speculation

LARGEST = 1024 * 1024
"""Bytes of a page. vLLM 0.32 writes 58 KiB for one engine and 45 KiB for each further data-parallel rank: 16 ranks, as many as a
node has GPUs, take 730 KiB with a model name of 33 characters, and one MiB with 70."""
LINES = 20_000
"""Of a page; 16 ranks have 6,200. What is left is for the lines about LoRA adapters, one for each set of them that ever ran."""
READ = 4096
"""Lines that are read; 16 ranks have 1,400."""
LONGEST_LINE = 8192
"""Bytes of a line that is read; the longest, the settings of the cache, has about 1,100."""
LABELS, SETTINGS = 8, 128
"""Labels of a line that is read; it has 2 or 3. Of the line with the settings of the cache, which are some 40."""
_DIGITS = 18
LONGEST_VALUE = 64
"""Bytes of a label's value that is kept, or of a number."""
HIGHEST = 1e18
"""Of a counter: what an engine that makes a million tokens each second counts in 30,000 years."""


class PageError(ValueError):
    """A page that is no whole metrics page of vLLM; the message is a sentence."""


def parse(page: bytes) -> Sample:
    """Read a page in Prometheus's text format. Raises PageError."""
    if len(page) > LARGEST:
        raise PageError(f"the metrics page has more than {LARGEST} bytes.")
    if not page.endswith(b"\n"):
        raise PageError("the metrics page ends in the middle of a line: the connection was cut, scrape again.")
    if page.count(b"\n") > LINES:
        raise PageError(f"the metrics page has more than {LINES} lines.")
    found, lines = _Found(), 0
    for line in page.split(b"\n"):
        if not line.startswith(_PREFIX):
            continue
        name, _, rest = line.partition(b"{")
        label = _READ.get(name)
        if label is None:
            continue
        lines += 1
        try:
            if lines > READ:
                raise _LineError(f"more than {READ} lines that are read")
            if len(rest) > LONGEST_LINE:
                raise _LineError(f"it is longer than {LONGEST_LINE} bytes")
            labels, _, tail = rest.rpartition(b"}")
            if label == _SUM:
                found.add(name, _value(tail))
            elif label == _CAPACITY:
                found.add_capacity(_labels(labels, SETTINGS))  # none of those that count needs an escape
            else:
                found.add_labelled(name, label, _label(labels, label), _value(tail))
        except _LineError as error:
            raise _unreadable(name, error) from None
    return found.sample(_started(page))


def from_series(series: Iterable[tuple[str, Mapping[str, str], str]], started: str | None) -> Sample:
    """The same from the lines of one page taken apart: name, labels and value, and when the process began. Raises PageError."""
    found, lines = _Found(), 0
    for text, labels, value in series:
        name = text.encode()
        label = _READ.get(name)
        if label is None:
            continue
        lines += 1
        try:
            if lines > READ:
                raise _LineError(f"more than {READ} lines that are read")
            if label == _SUM:
                found.add(name, _value(value.encode()))
            elif label == _CAPACITY:
                found.add_capacity({key.encode(): value.encode() for key, value in labels.items()})
            elif (key := labels.get(label.decode())) is None:
                raise _LineError(f"no label {label.decode()}")
            else:
                found.add_labelled(name, label, key.encode(), _value(value.encode()))
        except _LineError as error:
            raise _unreadable(name, error) from None
    return found.sample(None if started is None else _moment(started.encode()))


class _LineError(Exception):
    """What is wrong with a line, in words that are not the page's."""


def _unreadable(name: bytes, error: _LineError) -> PageError:
    """`name` is one of the table, so it is not the page's word either."""
    return PageError(f"the metrics page has a line that cannot be read ({error}): {name.decode()}")


# ---------------------------------------------------------------------------------------------------------------- lines
PROCESS_START = "process_start_time_seconds"
_PREFIX = b"vllm:"
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


_MOST: Mapping[bytes, int] = {b"engine": 64, b"position": 64, b"finished_reason": 32, b"source": 32, b"le": 128}
"""By label, the values that are told apart in one series: vLLM has 5 reasons, 3 sources and 23 edges, and a user may change the
edges; the other two are as many as the ranks and the draft tokens."""
_QUOTED = re.compile(rb'[, \t]*+([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
"""A label and its value, still escaped; without going back, so that time is linear."""


def _value(tail: bytes) -> float:
    """The value behind the labels; a timestamp may follow."""
    if len(tail) > LONGEST_VALUE:
        raise _LineError(f"a value longer than {LONGEST_VALUE} bytes")
    words = tail.split()
    try:
        value = float(words[0]) if words else math.nan
    except ValueError:
        raise _LineError("a value that is no number") from None
    if not math.isfinite(value):
        raise _LineError("no finite value")
    if value < 0:  # nothing that is read can be: counters, sums of times, amounts
        raise _LineError("a value below zero")
    if value > HIGHEST:
        raise _LineError(f"a value above {HIGHEST:g}")
    return value


def _label(labels: bytes, name: bytes) -> bytes:
    """The value of one label."""
    if b"\\" in labels:
        escaped = _labels(labels, LABELS).get(name)
        value = None if escaped is None else _unescape(escaped)
    else:  # then every quote begins or ends a value
        parts = labels.split(b'"', 2 * LABELS + 1)
        if len(parts) > 2 * LABELS + 1:
            raise _LineError(f"more than {LABELS} labels")
        starts = range(0, len(parts) - 1, 2)
        value = next((parts[index + 1] for index in starts if parts[index].strip(b", =") == name), None)
    if value is None:
        raise _LineError(f"no label {name.decode()}")
    return value


def _labels(text: bytes, most: int) -> dict[bytes, bytes]:
    """All labels, their values as they stand there."""
    found: dict[bytes, bytes] = {}
    at = number = 0
    while match := _QUOTED.match(text, at):
        number += 1
        if number > most:
            raise _LineError(f"more than {most} labels")
        found[match[1]] = match[2]
        at = match.end()
    if text[at:].strip(b", \t"):
        raise _LineError("malformed labels")
    return found


def _unescape(value: bytes) -> bytes:
    r"""\\, \" and \n stand for a backslash, a quote and a line feed."""
    if b"\\" not in value:
        return value
    pieces = value.split(b"\\\\")
    return b"\\".join(piece.replace(b'\\"', b'"').replace(b"\\n", b"\n") for piece in pieces)


def _started(page: bytes) -> float | None:
    at = page.find(f"\n{PROCESS_START} ".encode())
    if at < 0:
        return None
    at += len(PROCESS_START) + 2
    return _moment(page[at : min(page.index(b"\n", at), at + LONGEST_VALUE + 1)])


def _moment(tail: bytes) -> float:
    try:
        return _value(tail)
    except _LineError as error:
        raise _unreadable(PROCESS_START.encode(), error) from None


# --------------------------------------------------------------------------------------------------------------- sample
@dataclass(frozen=True, slots=True)
class _Found:
    """The numbers of a page, by name: sums, and what a label tells apart."""

    plain: dict[bytes, float] = field(default_factory=dict)
    labelled: dict[bytes, dict[bytes, float]] = field(default_factory=dict)
    capacity: list[int | None] = field(default_factory=list)
    """Tokens in the KV cache of each engine; None where it does not say ("None" before its cache is sized)."""

    def add(self, name: bytes, value: float) -> None:
        self.plain[name] = _sum(self.plain.get(name, 0.0), value)

    def add_labelled(self, name: bytes, label: bytes, key: bytes, value: float) -> None:
        values = self.labelled.setdefault(name, {})
        if (known := values.get(key)) is not None:
            values[key] = _sum(known, value)
            return
        if len(key) > LONGEST_VALUE:
            raise _LineError(f"a value of {label.decode()} longer than {LONGEST_VALUE} bytes")
        if len(values) == _MOST[label]:
            raise _LineError(f"more than {_MOST[label]} values of {label.decode()}")
        values[key] = value

    def add_capacity(self, labels: Mapping[bytes, bytes]) -> None:
        blocks, size = (labels.get(name, b"") for name in (b"num_gpu_blocks", b"block_size"))
        if max(len(blocks), len(size)) > _DIGITS:
            raise _LineError(f"a number of more than {_DIGITS} digits")
        if len(self.capacity) == _MOST[b"engine"]:
            raise _LineError(f"more than {_MOST[b'engine']} engines")
        self.capacity.append(int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None)

    def sample(self, started: float | None) -> Sample:
        """All of it. Raises PageError."""
        known = [tokens for tokens in self.capacity if tokens is not None]
        return _sample(self, float(sum(known)) if known else None, started)

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
        found, total = self.by_label(metric, "_bucket"), self.number(metric, "_sum")
        try:
            edges, counts = zip(*sorted((_edge(edge), count) for edge, count in found.items()), strict=True)
            return Histogram(_shared(edges), _with_shared_numbers(counts), total)
        except ValueError:
            told = "its buckets need different edges that are numbers, the last of them +Inf."
            raise PageError(f"the metrics page's {metric} is no histogram: {told}") from None

    def speculation(self) -> Speculation | None:
        if Metric.DRAFTS.row.name.encode() not in self.plain:
            return None
        # Until something was accepted the front end in Rust does not name the positions.
        accepted = self.labelled.get(Metric.ACCEPTED_PER_POSITION.row.name.encode(), {})
        positions = [str(position).encode() for position in range(len(accepted))]
        if accepted.keys() != set(positions):
            raise PageError(f"the metrics page's {Metric.ACCEPTED_PER_POSITION} does not have the positions 0, 1, 2 and so on.")
        return Speculation(
            self.number(Metric.DRAFTS),
            self.number(Metric.DRAFT_TOKENS),
            self.number(Metric.ACCEPTED),
            tuple(accepted[position] for position in positions),
        )


def _sum(known: float, value: float) -> float:
    if known + value > HIGHEST:
        raise _LineError(f"a sum above {HIGHEST:g}")
    return known + value


def _edge(text: bytes) -> float:
    edge = float(text)
    if math.isnan(edge):
        raise ValueError("no number")
    return edge


def _text(value: bytes, metric: Metric) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise PageError(f"the metrics page's {metric} has a label that is no text in UTF-8.") from None


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
    ended = found.labelled.get(
        Metric.FINISHED.row.name.encode(), {}
    )  # the front end in Rust names a reason with its first request
    finished = {_text(reason, Metric.FINISHED): count for reason, count in ended.items()}
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
    return Sample(counters, gauges, frozenset(_text(engine, Metric.GENERATION_TOKENS) for engine in generated), started)
