"""vLLM's own counters, attributed to the drafter that was loaded while they grew.

vLLM's stat loggers run in the API server's process and write to its Prometheus registry, so the registry is read there, at the
moment of a swap, while the engine is paused. A scrape from outside would mix two drafters in one interval.

A window begins with a call that names a drafter, and ends with the next. Its first `settle_seconds` are counted apart: requests
that the previous drafter served in part end there, and the first step after a swap verifies the previous drafter's tokens.

Guarantees: windows do not overlap and leave nothing out: what is counted from the first window's start until now is in exactly
one window. The last `MAX_WINDOWS` that ended can be read. Not guaranteed: that a request is in one window only; its latencies
count in the window in which it ends. Nothing is counted with `--disable-log-stats`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

MAX_WINDOWS = 128
"""An hour of windows of half a minute, which a caller that was away can still read."""

DRAFTS, DRAFT_TOKENS = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
REQUESTS = "vllm:request_success_total"
TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
TIME_PER_OUTPUT_TOKEN = "vllm:request_time_per_output_token_seconds"
_COUNTERS = (
    *(DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, "vllm:spec_decode_num_accepted_tokens_per_pos_total", GENERATION_TOKENS, REQUESTS),
    *("vllm:prompt_tokens_total", "vllm:prompt_tokens_by_source_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
)
_SUMMARIES = ("vllm:inter_token_latency_seconds", "vllm:iteration_tokens_total", "vllm:request_queue_time_seconds")
"""Histograms of which sum and count are read."""
_HISTOGRAMS = (TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN)
SERIES = frozenset(
    (
        *_COUNTERS,
        *(f"{name}{suffix}" for name in (*_SUMMARIES, *_HISTOGRAMS) for suffix in ("_sum", "_count")),
        *(f"{name}_bucket" for name in _HISTOGRAMS),
    )
)
"""Names of the series that are read: tokens per step, acceptance length and latencies can be calculated from them."""
_SUMMED_LABELS = frozenset(("model_name", "engine"))

Counts = dict[str, dict[str, float]]
"""Values by series name and by its distinguishing label's value (position, source, finished_reason, le), or the empty text."""


def read_counts(registry: CollectorRegistry) -> Counts:
    """Return vLLM's counters, summed over engines and served names; empty where vLLM counts nothing."""
    counts: Counts = {}
    for metric in registry.restricted_registry(sorted(SERIES)).collect():
        for sample in metric.samples:
            label = next((value for name, value in sample.labels.items() if name not in _SUMMED_LABELS), "")
            values = counts.setdefault(sample.name, {})
            values[label] = values.get(label, 0.0) + sample.value
    return counts


def subtract(later: Mapping[str, Mapping[str, float]], earlier: Mapping[str, Mapping[str, float]]) -> Counts:
    """Return what was counted between two readings."""
    return {
        name: {label: value - earlier.get(name, {}).get(label, 0.0) for label, value in values.items()}
        for name, values in later.items()
    }


def add(total: Counts, counts: Mapping[str, Mapping[str, float]]) -> None:
    """Add counts to a total."""
    for name, values in counts.items():
        sums = total.setdefault(name, {})
        for label, value in values.items():
            sums[label] = sums.get(label, 0.0) + value


@dataclass
class Window:
    """The time from one call that names a drafter to the next; times are seconds since 1970."""

    number: int
    """1 for the first window of the process, and so on."""
    digest: str
    turn: str | None
    started: float
    start_counts: Counts
    settled: float | None = None
    """When the settling part ended; None while it lasts."""
    settled_counts: Counts = field(default_factory=dict)
    ended: float | None = None
    end_counts: Counts = field(default_factory=dict)


class WindowLog:
    """The windows of this process."""

    def __init__(self, read: Callable[[], Counts], wall_time: Callable[[], float]) -> None:
        self._read, self._wall_time = read, wall_time
        self._ended: deque[Window] = deque(maxlen=MAX_WINDOWS)
        self._totals: dict[str, Counts] = {}
        """Counts of ended windows by digest, the settling parts included."""
        self.current: Window | None = None

    def begin(self, digest: str, turn: str | None, settles: bool) -> Window:
        """End the current window and begin the next, at one reading of the counters."""
        now, counts = self._wall_time(), self._read()
        number = 1
        if (previous := self.current) is not None:
            number = previous.number + 1
            previous.ended, previous.end_counts = now, counts
            if previous.settled is None:
                previous.settled, previous.settled_counts = now, counts
            add(self._totals.setdefault(previous.digest, {}), subtract(counts, previous.start_counts))
            self._ended.append(previous)
        self.current = window = Window(number, digest, turn, now, counts)
        if not settles:
            window.settled, window.settled_counts = now, counts
        return window

    def settle(self, number: int) -> None:
        """End the settling part of a window, if the window lasts and is not settled."""
        window = self.current
        if window is not None and window.number == number and window.settled is None:
            window.settled, window.settled_counts = self._wall_time(), self._read()

    def list_windows(self, after: int) -> list[dict[str, object]]:
        """Return the windows with a number above `after`, the current one last, as JSON."""
        windows = [*self._ended, *([] if self.current is None else [self.current])]
        return [self._to_json(window) for window in windows if window.number > after]

    def total_by_digest(self) -> dict[str, Counts]:
        """Return all that was counted for each drafter until now."""
        totals = {digest: {name: dict(values) for name, values in counts.items()} for digest, counts in self._totals.items()}
        if (window := self.current) is not None:
            add(totals.setdefault(window.digest, {}), subtract(self._read(), window.start_counts))
        return totals

    def _to_json(self, window: Window) -> dict[str, object]:
        end = window.end_counts if window.ended is not None else self._read()
        settled = end if window.settled is None else window.settled_counts
        return {
            "number": window.number,
            "digest": window.digest,
            "turn": window.turn,
            "started": window.started,
            "settled": window.settled,
            "ended": window.ended,
            "settling_counts": subtract(settled, window.start_counts),
            "counts": subtract(end, settled),
        }
