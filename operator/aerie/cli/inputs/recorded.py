"""Recorded metrics of engines: files of pages or of Prometheus' series, as scrapes in order of time.

Two forms are read, each also gzipped. Lines of JSON, one scrape a line:

    {"time": 1767225600.0, "replica": "chat-0", "page": "# HELP vllm:...\\n..."}

and the answer of Prometheus' query_range, or of a query with a range, about the series of vLLM (a matrix):

    {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {...}, "values": [[time, "1"], ...]}]}}

A replica is the label `pod`, else `instance`. Guarantees: a scrape that is no whole page of vLLM, or of a replica that is scraped
twice, is counted and left out, not guessed. Not guaranteed: that the series of one time were scraped together; Prometheus aligns
them to its steps.
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
"""Of a file, unpacked: a day of a large fleet has a tenth of it."""
_MAX_UNIX_SECONDS = 253402300799
"""Seconds of Unix time at the end of the year 9999."""


@dataclass(frozen=True)
class ScrapeRecording:
    """Scrapes, the oldest first; at least one."""

    scrapes: Iterable[tuple[float, str, Sample]]
    """Seconds of Unix time, replica, and the page."""
    skip_counts: Counter[str]
    """Why scrapes were left out, and how many; complete once the scrapes were all taken."""


def read_recording(file: Path) -> ScrapeRecording:
    """Raises CommandError for a file that cannot be read or has neither form."""
    try:
        with file.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(file) if packed else file.open("rb") as stream:
            data = stream.read(MAX_RECORDING_BYTES + 1)
        text = data.decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"
        raise CommandError(f"{file} cannot be read ({reason}): give a file of recorded metrics.") from error
    if len(data) > MAX_RECORDING_BYTES:
        raise CommandError(f"{file} has more than {MAX_RECORDING_BYTES >> 30} GiB: record a shorter time, or fewer series.")
    unreadable: Counter[str] = Counter()
    steps = _read_prometheus_matrix(text, file) if _is_prometheus_response(text) else _read_json_lines(text, file)
    scrapes = sorted(parse_scrapes(steps, unreadable), key=lambda scrape: scrape[:2])
    if not scrapes:
        raise CommandError(f"{file} holds no scrape of a vLLM engine{format_first_skip_reason(unreadable)}")
    return ScrapeRecording(scrapes, unreadable)


def parse_scrapes(
    entries: Iterable[tuple[float, str, bytes | PrometheusScrape | str]], skip_counts: Counter[str]
) -> Iterator[tuple[float, str, Sample]]:
    """The whole ones of these pages or series; the others are counted, with a word of what is wrong with them."""
    for time, replica, found in entries:
        try:
            match found:
                case str():
                    raise ExpositionError(found)
                case PrometheusScrape():
                    yield time, replica, found.to_sample()
                case page:
                    yield time, replica, parse_exposition(page)
        except ExpositionError as error:
            skip_counts[f"{replica}: {error}"] += 1


def format_first_skip_reason(skip_counts: Counter[str]) -> str:
    """The end of a sentence that says that there is nothing else."""
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
            what = f"has no {error}" if isinstance(error, KeyError) else "cannot be read"
            raise CommandError(
                f'{file}, line {number} {what}: a line is {{"time": seconds, "replica": name, "page": text}}, '
                "or give an answer of Prometheus' query_range."
            ) from None


def _parse_unix_seconds(value: Any) -> float:
    """Unix time. Raises ValueError, TypeError."""
    if isinstance(value, str) or not 0 <= value <= _MAX_UNIX_SECONDS:  # also NaN
        raise ValueError("no time")
    return float(value)


def _read_prometheus_matrix(text: str, file: Path) -> Iterator[tuple[float, str, PrometheusScrape | str]]:
    try:
        answer = json.loads(text)
        yield from parse_scrape_history(answer.get("data", answer)["result"], "pod", "instance")
    except (
        PrometheusResponseError,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        why = str(error).removeprefix("answered with ")
        raise CommandError(
            f"{file} is no matrix of series with names and a label pod or instance ({why}): record it with query_range and a "
            'query like {__name__=~"vllm:.*"}.'
        ) from None
