"""What a tuner remembers of the replicas' metrics: cells for the cost of a step, blocks for acceptance and latency.

A day of 64 replicas scraped every 15 s is 370,000 windows. They are kept as sums: a step's cost by time, replica, setting, batch
and prefill (`Cell`), and everything a fleet counted in five minutes under one setting (`Block`). Within a cell batch and prefill
differ little, so that its means stand for its windows. How long these are follows from how often is decided and how far back is
looked (`Scale`).

Guarantees: memory is bounded by `horizon`; a window without a request costs nothing; a window that would mislead is left out of
the cells and counted under the sentence that says why. What was kept in parts adds up (`merge`). Not guaranteed: the order of
windows inside a block, or a quantile of step times.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from aerie.engine.metrics import rates as windows
from aerie.engine.metrics.sample import Counters
from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, Static, max_speculative_tokens

HOUR = 3600.0
BLOCK_SECONDS = 300.0
CELL_SECONDS = 4 * HOUR
WARM_UP_SECONDS = 600.0
"""The lengths of a `Scale` where nothing is said."""
BATCH_BINS_PER_OCTAVE = 4
MIN_WINDOW_ITERATIONS = 50
"""Of a window; fewer tell more of when the scrapes fell than of a step."""
MAX_STEP_SECONDS = 10.0
"""Seconds; a longer mean step is a stall, not a cost."""
MAX_EXCLUSION_REASONS = 32
"""Reasons for leaving a window out that are counted apart; a page's own words are in some."""
OTHER_EXCLUSION_REASONS = "for other reasons."
_DRAFT_LENGTH_TOLERANCE = 0.05
"""By which the tokens per draft may exceed a fixed K, relative; beyond it the engine runs another setting."""
_MAX_PLAUSIBLE_BATCH = 1e5
_SCALAR_COUNTERS = (
    *("generation_tokens", "prompt_tokens", "computed_prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("preemptions", "request_steps", "step_seconds", "iterations", "queued_requests", "queue_seconds"),
)
_MIN_DRAFT_LENGTH_SHARE = 0.5
"""Share of K below which tokens per draft are not explained by drafts cut short."""


@dataclass(frozen=True, slots=True)
class TelemetryScale:
    """Lengths in seconds."""

    block: float = BLOCK_SECONDS
    cell: float = CELL_SECONDS
    warm: float = WARM_UP_SECONDS
    """After which a pod's steps count: graphs are captured and caches filled."""

    @classmethod
    def from_decision_interval(cls, decision_interval: float, history: float) -> TelemetryScale:
        """For a decision each `interval` that looks back over `history`: six blocks or less in between, 288 at most in all."""
        return cls(max(decision_interval / 6, history / 288), history / 6, min(WARM_UP_SECONDS, decision_interval / 3))


@dataclass(frozen=True, slots=True)
class ReplicaWindow:
    """One window of one replica: two scrapes and what happened between them (`samples.between`)."""

    replica: str
    end: float
    """Seconds of Unix time."""
    setting: SpeculationSetting
    counters: Counters
    engine_age_seconds: float = math.inf
    """Seconds that the engine has run for at the beginning of the window."""


@dataclass(slots=True)
class StepCell:
    """Sums over windows that have a `Key` in common; each window weighs its request-steps."""

    windows: int = 0
    request_steps: float = 0.0
    step_seconds: float = 0.0
    batch: float = 0.0
    prefill: float = 0.0
    drafted: float = 0.0

    def add(self, request_steps: float, seconds: float, batch: float, prefill: float, drafted: float) -> None:
        self.windows += 1
        self.request_steps += request_steps
        self.step_seconds += request_steps * seconds
        self.batch += request_steps * batch
        self.prefill += request_steps * prefill
        self.drafted += request_steps * drafted

    def merge(self, other: StepCell) -> None:
        self.windows += other.windows
        self.request_steps += other.request_steps
        self.step_seconds += other.step_seconds
        self.batch += other.batch
        self.prefill += other.prefill
        self.drafted += other.drafted


@dataclass(frozen=True, slots=True)
class StepCellKey:
    """What the windows of a cell have in common."""

    slot: int
    """Time since the epoch, in lengths of a cell."""
    replica: str
    setting: SpeculationSetting
    batch_bin: int
    prefill_bin: int


@dataclass(frozen=True, slots=True)
class TelemetryBlock:
    """What the whole fleet counted under one setting in the length of a block."""

    start: float
    setting: SpeculationSetting
    counters: Counters


@dataclass
class TuningTelemetry:
    """The windows of the last `horizon` seconds."""

    horizon: float = 24 * HOUR
    api_servers: int = 1
    """API-server processes of a pod; with more than one the batch is not known, so that no step time can be fitted."""
    scale: TelemetryScale = TelemetryScale()
    cells: dict[StepCellKey, StepCell] = field(default_factory=dict)
    excluded_windows: Counter[str] = field(default_factory=Counter)
    """By sentence, how many windows did not become part of a cell."""
    _blocks: dict[tuple[int, SpeculationSetting], Counters] = field(default_factory=dict)
    _newest_window_end: float = -math.inf
    _oldest_cell_slot: float = -math.inf
    """The slot before which no cell is left."""

    def add(self, replica_window: ReplicaWindow) -> None:
        """Take one window in. Its acceptance and latencies count even where its steps do not, unless another setting ran."""
        window = replica_window.counters
        if not window.request_steps and not window.first_tokens:
            return
        self.advance_to(replica_window.end)
        reason = implausible_reason(window) or setting_mismatch_reason(window, replica_window.setting)
        if reason is None:
            self.add_to_block(int(replica_window.end // self.scale.block), replica_window.setting, window)
            reason = self._step_time_exclusion_reason(replica_window)
        if reason is not None:
            self.record_exclusion(reason)
            return
        batch = window.request_steps / window.iterations
        prefill = window.computed_prompt_tokens / window.iterations
        drafted = window.speculation.draft_tokens / window.request_steps if window.speculation else 0.0
        slot = int(replica_window.end // self.scale.cell)
        key = StepCellKey(slot, replica_window.replica, replica_window.setting, batch_bin(batch), int(math.log2(1 + prefill) / 2))
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = StepCell()
        drafted = min(drafted, float(max_speculative_tokens(replica_window.setting)))
        cell.add(window.request_steps, window.step_seconds / window.request_steps, batch, prefill, drafted)

    @property
    def newest_window_end(self) -> float | None:
        """The end of the newest window, in seconds of Unix time; None before the first."""
        return self._newest_window_end if math.isfinite(self._newest_window_end) else None

    def blocks(self) -> Iterator[TelemetryBlock]:
        """All blocks, the oldest first."""
        for (slot, setting), counters in sorted(self._blocks.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            yield TelemetryBlock(slot * self.scale.block, setting, counters)

    def record_exclusion(self, reason: str, windows: int = 1) -> None:
        """Windows that did not become part of a cell, and why."""
        known = reason in self.excluded_windows or len(self.excluded_windows) < MAX_EXCLUSION_REASONS
        self.excluded_windows[reason if known else OTHER_EXCLUSION_REASONS] += windows

    def merge(self, later: TuningTelemetry) -> None:
        """Take in what was kept apart, of the same scale: all of it, as if its windows had been added here."""
        if later.scale != self.scale:
            raise ValueError(f"blocks of {later.scale.block:g} s and of {self.scale.block:g} s do not add up.")
        for (slot, setting), counters in later._blocks.items():
            self.add_to_block(slot, setting, counters)
        for cell_key, cell in later.cells.items():
            self.cells.setdefault(cell_key, StepCell()).merge(cell)
        for reason, count in later.excluded_windows.items():
            self.record_exclusion(reason, count)
        self.advance_to(later._newest_window_end)

    def advance_to(self, end: float) -> None:
        """Windows have come up to this time: what lies more than the horizon before it goes."""
        if end <= self._newest_window_end:
            return
        aged = not math.isfinite(self._newest_window_end) or end // self.scale.block > self._newest_window_end // self.scale.block
        self._newest_window_end = end
        if aged:
            self._drop_expired()

    def add_to_block(self, slot: int, setting: SpeculationSetting, counters: Counters) -> None:
        """Add to the block that is this many lengths of a block after the epoch."""
        key = (slot, setting)
        known = self._blocks.get(key)
        try:
            self._blocks[key] = counters if known is None else known + counters
        except ValueError as error:  # custom buckets, or another number of positions
            self.record_exclusion(f"replicas of one setting count in different ways: {error}")

    def _step_time_exclusion_reason(self, reading: ReplicaWindow) -> str | None:
        window = reading.counters
        if self.api_servers > 1:
            return (
                f"{self.api_servers} API-server processes count each engine step once or more, so the batch is not known: "
                "set --api-server-count=1 in spec.engine.args."
            )
        if isinstance(reading.setting, Adaptive):
            return "adaptive verification trims drafts on the device, so what a step verified is not known."
        if reading.engine_age_seconds < self.scale.warm:
            return f"the engine was younger than {_format_duration(self.scale.warm)}."
        if window.preemptions > 0:
            return "requests were preempted for want of KV cache."
        if window.iterations < MIN_WINDOW_ITERATIONS or window.request_steps < MIN_WINDOW_ITERATIONS:
            return f"fewer than {MIN_WINDOW_ITERATIONS} steps were made."
        if not 0 < window.step_seconds / window.request_steps < MAX_STEP_SECONDS:
            return f"a step took no time, or {MAX_STEP_SECONDS:.0f} s and more: a counter jumped, or the engine stalled."
        return None

    def _drop_expired(self) -> None:
        oldest, cell = self._newest_window_end - self.horizon, self.scale.cell
        for slot, setting in [key for key in self._blocks if key[0] < oldest // self.scale.block]:
            del self._blocks[slot, setting]
        if self._oldest_cell_slot < oldest // cell:
            self._oldest_cell_slot = oldest // cell
            for key in [key for key in self.cells if key.slot < oldest // cell]:
                del self.cells[key]


def _format_duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def batch_bin(batch: float) -> int:
    """The bin of a mean batch; bins are a quarter of an octave wide."""
    return round(BATCH_BINS_PER_OCTAVE * math.log2(max(batch, 0.5)))


def batch_bin_center(index: int) -> float:
    """The batch in the middle of a bin."""
    return float(2.0 ** (index / BATCH_BINS_PER_OCTAVE))


def implausible_reason(counters: Counters) -> str | None:
    """Why no engine can have counted this, if so: a counter jumped, or the page is broken. Rounding may, and requests that come
    back after a preemption."""
    spoken = counters.speculation
    numbers = [getattr(counters, name) for name in _SCALAR_COUNTERS]
    for histogram in (counters.time_to_first_token, counters.time_per_output_token):
        numbers += [histogram.sum, *histogram.counts]
    numbers += counters.finished.values()
    if spoken is not None:
        numbers += [spoken.drafts, spoken.draft_tokens, spoken.accepted, *spoken.accepted_per_position]
    if not all(0 <= number < math.inf for number in numbers):
        return "a counter fell, or is no number."
    if counters.request_steps > _MAX_PLAUSIBLE_BATCH * counters.iterations:
        return f"more than {_MAX_PLAUSIBLE_BATCH:.0f} requests were in a step: a counter jumped."
    if spoken is not None:
        counts = (spoken.drafts, *spoken.accepted_per_position)
        if any(deeper > 1.05 * before + 10 for before, deeper in itertools.pairwise(counts)):
            return "more drafts were accepted than were made: a counter jumped."
    return None


def setting_mismatch_reason(counters: Counters, setting: SpeculationSetting) -> str | None:
    """Why the window cannot be one of an engine with this setting, if so: somebody changed it by hand, or metrics are off."""
    drafted = windows.mean_draft_length(counters)
    if isinstance(setting, Off):
        if counters.speculation is not None and counters.speculation.drafts > 0:
            return f"the engine drafts, and the setting is '{setting}'."
        return None
    if counters.speculation is None:
        return f"the engine does not count drafts, and the setting is '{setting}'."
    most, counted = max_speculative_tokens(setting), len(counters.speculation.accepted_per_position)
    if counted != most:
        return f"the engine is built for {counted} draft tokens, and the setting is '{setting}'."
    if isinstance(drafted, windows.Unknown):
        return None  # idle, or a tier without drafts
    if drafted > most * (1 + _DRAFT_LENGTH_TOLERANCE):
        return f"the engine drafts more tokens than the setting '{setting}' has."
    if isinstance(setting, Static) and drafted < most * _MIN_DRAFT_LENGTH_SHARE:
        return f"the engine drafts fewer than half of the tokens of the setting '{setting}'."
    if isinstance(setting, Schedule) and drafted < min(setting.nonzero_token_counts) * _MIN_DRAFT_LENGTH_SHARE:
        return f"the engine drafts fewer than half of the tokens of the setting '{setting}'."
    return None
