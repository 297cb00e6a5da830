"""Recorded metrics of engines: files with scrape responses or with Prometheus series, as scrapes in order of time.

Two formats are read, each also gzipped. Lines of JSON, one scrape a line:

    {"time": 1767225600.0, "replica": "chat-0", "page": "# HELP vllm:...\\n..."}

and the response of Prometheus' query_range, or of a query with a range, about the series of vLLM (a matrix):

    {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {...}, "values": [[time, "1"], ...]}]}}

A replica is the label `pod`, else `instance`. Guarantees: a scrape that is no complete exposition of vLLM, or of a replica that
is scraped twice, is counted and skipped, not guessed. Not guaranteed: that the series of one time were scraped together;
Prometheus aligns them to its steps.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.cli.console import CommandError
from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie.engine.metrics.promql import PrometheusResponseError, PrometheusScrape, parse_scrape_history
from aerie.engine.metrics.sample import Sample

MAX_RECORDING_BYTES = 2**30
"""Maximum bytes of a file, unpacked: a day of a large fleet has a tenth of it."""
_MAX_UNIX_SECONDS = 253402300799
"""Seconds of Unix time at the end of the year 9999."""


@dataclass(frozen=True)
class ScrapeRecording:
    """Scrapes, the oldest first; at least one."""

    scrapes: Iterable[tuple[float, str, Sample]]
    """Seconds of Unix time, replica, and sample of each scrape."""
    skip_counts: Counter[str]
    """Number of skipped scrapes by reason; complete once the scrapes have been iterated."""


def read_recording(file: Path) -> ScrapeRecording:
    """Return the scrapes of a file. Raises CommandError for a file that cannot be read or has neither format."""
    try:
        with file.open("rb") as stream:
            is_gzipped = stream.read(2) == b"\x1f\x8b"
        with gzip.open(file) if is_gzipped else file.open("rb") as stream:
            data = stream.read(MAX_RECORDING_BYTES + 1)
        text = data.decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"
        raise CommandError(f"{file} cannot be read ({reason}): set a file of recorded metrics.") from error
    if len(data) > MAX_RECORDING_BYTES:
        raise CommandError(f"{file} has more than {MAX_RECORDING_BYTES >> 30} GiB: record a shorter period, or fewer series.")
    skip_counts: Counter[str] = Counter()
    entries = _read_prometheus_matrix(text, file) if _is_prometheus_response(text) else _read_json_lines(text, file)
    scrapes = sorted(parse_scrapes(entries, skip_counts), key=lambda scrape: scrape[:2])
    if not scrapes:
        raise CommandError(f"{file} contains no scrape of a vLLM engine{format_first_skip_reason(skip_counts)}")
    return ScrapeRecording(scrapes, skip_counts)


def parse_scrapes(
    entries: Iterable[tuple[float, str, bytes | PrometheusScrape | str]], skip_counts: Counter[str]
) -> Iterator[tuple[float, str, Sample]]:
    """Yield the samples of complete entries; the others are counted by the reason for which they are skipped."""
    for time, replica, content in entries:
        try:
            match content:
                case str():
                    raise ExpositionError(content)
                case PrometheusScrape():
                    yield time, replica, content.to_sample()
                case exposition:
                    yield time, replica, parse_exposition(exposition)
        except ExpositionError as error:
            skip_counts[f"{replica}: {error}"] += 1


def format_first_skip_reason(skip_counts: Counter[str]) -> str:
    """Return the end of a message which states that there are no scrapes."""
    return f": {next(iter(skip_counts))}" if skip_counts else "."


def _is_prometheus_response(text: str) -> bool:
    head = text.lstrip()[:2000]
    return '"resultType"' in head or ('"result"' in head and '"page"' not in head)


def _read_json_lines(text: str, file: Path) -> Iterator[tuple[float, str, bytes]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _parse_unix_seconds(row["time"]), str(row["replica"]), str(row["page"]).encode(errors="replace")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"has no {error}" if isinstance(error, KeyError) else "cannot be read"
            raise CommandError(
                f'{file}, line {number} {problem}: a line is {{"time": seconds, "replica": name, "page": text}}; '
                "a response of Prometheus' query_range is also possible."
            ) from None


def _parse_unix_seconds(value: Any) -> float:
    """Return Unix time in seconds. Raises ValueError, TypeError."""
    if isinstance(value, str) or not 0 <= value <= _MAX_UNIX_SECONDS:  # also NaN
        raise ValueError("no time")
    return float(value)


def _read_prometheus_matrix(text: str, file: Path) -> Iterator[tuple[float, str, PrometheusScrape | str]]:
    try:
        response = json.loads(text)
        yield from parse_scrape_history(response.get("data", response)["result"], "pod", "instance")
    except (
        PrometheusResponseError,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CommandError(
            f"{file} is not a matrix of series with names and a label pod or instance ({error}): record it with "
            'query_range and a query such as {__name__=~"vllm:.*"}.'
        ) from None
