"""The part of vLLM's /metrics that is not the engine's: the process, the interpreter, and the HTTP server.

Families as prometheus_client and prometheus-fastapi-instrumentator 8 write them for vLLM 0.32.0: page 1 of a running server.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
from pathlib import Path

from aerie_lab.engine.metrics.counters import Histogram
from aerie_lab.engine.metrics.exposition import family_header, format_number, render_histogram

_HIGH_RESOLUTION_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(5.0, 7.5, 10.0, 30.0, 60.0),
)
_LOW_RESOLUTION_BUCKETS = (0.1, 0.5, 1.0)
_SUMMARY_HELP = "Only value of header is respected. Otherwise ignored. No percentile calculated. "


class HttpCounters:
    """Counters of the HTTP server's responses; the caller omits the paths that vLLM omits."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        self._sizes: dict[str, list[float]] = {}
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._all_durations = Histogram(_HIGH_RESOLUTION_BUCKETS)

    def observe(self, handler: str, method: str, status: int, received: int, sent: int, seconds: float) -> None:
        """One answer. `handler` is the route, or `none`; sizes are the Content-Length headers, 0 where there is none."""
        key = (handler, method, f"{status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        sizes = self._sizes.setdefault(handler, [0.0, 0.0, 0.0])
        for index, value in enumerate((1, received, sent)):
            sizes[index] += value
        self._durations.setdefault((handler, method), Histogram(_LOW_RESOLUTION_BUCKETS)).observe(seconds)
        self._all_durations.observe(seconds)

    def render(self, created: float) -> str:
        lines: list[str] = []
        name, text = "http_requests", "Total number of requests by method, status and handler."
        rows = {f'{{handler="{h}",method="{m}",status="{s}"}}': float(n) for (h, m, s), n in self._requests.items()}
        lines += [
            *family_header(f"{name}_total", text, "counter"),
            *(f"{name}_total{row} {format_number(n)}" for row, n in rows.items()),
        ]
        lines += _created_lines(name, text, list(rows), created)
        for direction, index in (("request", 1), ("response", 2)):
            name = f"http_{direction}_size_bytes"
            text = f"Content length of {'incoming requests' if index == 1 else 'outgoing responses'} by handler. {_SUMMARY_HELP}"
            lines += family_header(name, text, "summary")
            for handler, sizes in self._sizes.items():
                lines.append(f'{name}_count{{handler="{handler}"}} {format_number(sizes[0])}')
                lines.append(f'{name}_sum{{handler="{handler}"}} {format_number(sizes[index])}')
            lines += _created_lines(name, text, [f'{{handler="{handler}"}}' for handler in self._sizes], created)
        name = "http_request_duration_highr_seconds"
        text = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
        lines += [*family_header(name, text, "histogram"), *render_histogram(name, self._all_durations, [])]
        lines += _created_lines(name, text, [""], created)
        name = "http_request_duration_seconds"
        text = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "
        lines += family_header(name, text, "histogram")
        labels = []
        for (handler, method), histogram in self._durations.items():
            common = [f'handler="{handler}"', f'method="{method}"']
            lines += render_histogram(name, histogram, common)
            labels.append(f"{{{','.join(common)}}}")
        lines += _created_lines(name, text, labels, created)
        return "\n".join(lines) + "\n"


def _created_lines(name: str, text: str, labels: list[str], created: float) -> list[str]:
    if not labels:
        return []
    return [
        *family_header(f"{name}_created", text, "gauge"),
        *(f"{name}_created{row} {format_number(created)}" for row in labels),
    ]


def render_process_metrics(start_time: float) -> str:
    """Render the families of the garbage collector, the interpreter and the process. `start_time` is a Unix time."""
    lines: list[str] = []
    for key, text in (
        ("collected", "Objects collected during gc"),
        ("uncollectable", "Uncollectable objects found during GC"),
        ("collections", "Number of times this generation was collected"),
    ):
        name = "python_gc_collections_total" if key == "collections" else f"python_gc_objects_{key}_total"
        lines += family_header(name, text, "counter")
        lines += [f'{name}{{generation="{i}"}} {format_number(float(row[key]))}' for i, row in enumerate(gc.get_stats())]
    major, minor, patch = platform.python_version_tuple()
    lines += family_header("python_info", "Python platform information", "gauge")
    labels = f'implementation="{platform.python_implementation()}",major="{major}",minor="{minor}",patchlevel="{patch}"'
    lines.append(f'python_info{{{labels},version="{platform.python_version()}"}} 1.0')
    page_size = os.sysconf("SC_PAGE_SIZE")
    virtual, resident = (float(n) * page_size for n in Path("/proc/self/statm").read_text().split()[:2])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for name, text, kind, value in (
        ("process_virtual_memory_bytes", "Virtual memory size in bytes.", "gauge", virtual),
        ("process_resident_memory_bytes", "Resident memory size in bytes.", "gauge", resident),
        ("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", "gauge", start_time),
        (
            "process_cpu_seconds_total",
            "Total user and system CPU time spent in seconds.",
            "counter",
            usage.ru_utime + usage.ru_stime,
        ),
        ("process_open_fds", "Number of open file descriptors.", "gauge", float(len(os.listdir("/proc/self/fd")))),
        (
            "process_max_fds",
            "Maximum number of open file descriptors.",
            "gauge",
            float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ),
    ):
        lines += [*family_header(name, text, kind), f"{name} {format_number(value)}"]
    return "\n".join(lines) + "\n"
