"""Recorded metrics of engines: files of pages or of Prometheus's series, as scrapes in order of time.

Two forms are read, each also gzipped. Lines of JSON, one scrape a line:

    {"time": 1767225600.0, "replica": "chat-0", "page": "# HELP vllm:...\\n..."}

and the answer of Prometheus's query_range, or of a query with a range, about the series of vLLM (a matrix):

    {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {...}, "values": [[time, "1"], ...]}]}}

A replica is the label `pod`, else `instance`. Guarantees: a scrape that is no whole page of vLLM is counted and left out, not
guessed. Not guaranteed: that the series of one time were scraped together; Prometheus aligns them to its steps.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.cli.console import CommandError
from aerie.engine.page import PageError, parse
from aerie.engine.samples import Sample

_NOT_OF_A_PAGE = ("__name__", "pod", "instance", "job", "namespace", "container", "endpoint", "service")


@dataclass(frozen=True)
class Recorded:
    """All scrapes of a file, the oldest first."""

    scrapes: list[tuple[float, str, Sample]]
    """Seconds of Unix time, replica, and the page."""
    unreadable: list[str]
    """Why a scrape was left out, one sentence each."""


def read_recorded(file: Path) -> Recorded:
    """Raises CommandError for a file that cannot be read or has neither form."""
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"
        raise CommandError(f"{file} cannot be read ({reason}): give a file of recorded metrics.") from error
    pages = _series(text, file) if _is_one_object(text) else _lines(text, file)
    scrapes: list[tuple[float, str, Sample]] = []
    unreadable: list[str] = []
    for time, replica, page in pages:
        try:
            scrapes.append((time, replica, parse(page.encode())))
        except PageError as error:
            unreadable.append(f"{replica}: {error}")
    if not scrapes:
        why = f": {unreadable[0]}" if unreadable else "."
        raise CommandError(f"{file} holds no scrape of a vLLM engine{why}")
    scrapes.sort(key=lambda scrape: scrape[:2])
    return Recorded(scrapes, unreadable)


def _is_one_object(text: str) -> bool:
    head = text.lstrip()[:2000]
    return '"resultType"' in head or ('"result"' in head and '"page"' not in head)


def _lines(text: str, file: Path) -> Iterator[tuple[float, str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield float(row["time"]), str(row["replica"]), str(row["page"])
        except (ValueError, KeyError, TypeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else "cannot be read"
            raise CommandError(
                f'{file}, line {number} {what}: a line is {{"time": seconds, "replica": name, "page": text}}, '
                "or give an answer of Prometheus's query_range."
            ) from None


def _series(text: str, file: Path) -> Iterator[tuple[float, str, str]]:
    try:
        answer = json.loads(text)
        result = answer.get("data", answer)["result"]
        moments: dict[tuple[float, str], list[str]] = defaultdict(list)
        for series in result:
            labels: Mapping[str, Any] = series["metric"]
            replica = str(labels.get("pod") or labels["instance"])
            name = labels["__name__"]
            inner = ",".join(f'{key}="{_escaped(str(value))}"' for key, value in labels.items() if key not in _NOT_OF_A_PAGE)
            head = f"{name}{{{inner}}}" if inner or name.startswith("vllm:") else name
            for time, value in series["values"]:
                moments[float(time), replica].append(f"{head} {value}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{file} is no matrix of series with names and a label pod or instance ({error}): record it with query_range and a "
            'query like {__name__=~"vllm:.*"}.'
        ) from None
    for (time, replica), lines in sorted(moments.items()):
        yield time, replica, "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
