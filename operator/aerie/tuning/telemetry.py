"""The tuner's summary of the replicas' metrics: cells for the cost of a step, blocks for acceptance and latency.

A day of 64 replicas scraped every 15 s is 370,000 windows. They are stored as sums. A `StepCell` sums the cost of steps by time,
replica, setting, batch and prefill. A `TelemetryBlock` sums everything a fleet counted in five minutes under one setting. Within
a cell, batch and prefill differ little, so its means represent its windows. The decision interval and the length of the history
determine the lengths of blocks and cells (`TelemetryScale`).

Guarantees: `horizon` bounds the memory. A window without a request costs nothing. A misleading window is excluded from the cells
and counted under the reason for it. Telemetry stored in parts adds up (`merge`). Not guaranteed: the order of windows inside a
block, or a quantile of step times.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from aerie.engine.metrics.rates import Unknown, mean_draft_length
from aerie.engine.metrics.sample import Counters
from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, Static, max_speculative_tokens

HOUR = 3600.0
BLOCK_SECONDS = 300.0
CELL_SECONDS = 4 * HOUR
WARM_UP_SECONDS = 600.0
"""Default lengths of a `TelemetryScale`."""
BATCH_BINS_PER_OCTAVE = 4
MIN_WINDOW_ITERATIONS = 50
"""Iterations of a window. With fewer, the timing of the scrapes dominates the step time."""
MAX_STEP_SECONDS = 10.0
"""Mean step time in seconds. A longer one is a stall, not a cost."""
MAX_EXCLUSION_REASONS = 32
"""Exclusion reasons that are counted separately. Some contain words of the scraped page, hence the limit."""
OTHER_EXCLUSION_REASONS = "for other reasons."
_DRAFT_LENGTH_TOLERANCE = 0.05
"""Relative excess of tokens per draft over a fixed K. Beyond it the engine runs another setting."""
_MAX_PLAUSIBLE_BATCH = 1e5
_SCALAR_COUNTERS = (
    *("generation_tokens", "prompt_tokens", "computed_prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("preemptions", "request_steps", "step_seconds", "iterations", "queued_requests", "queue_seconds"),
)
_MIN_DRAFT_LENGTH_SHARE = 0.5
"""Share of K. Drafts cut short do not explain fewer tokens per draft."""


@dataclass(frozen=True, slots=True)
class TelemetryScale:
    """Lengths of a block, of a cell and of an engine's warm-up, in seconds."""

    block_seconds: float = BLOCK_SECONDS
    cell_seconds: float = CELL_SECONDS
    warm_up_seconds: float = WARM_UP_SECONDS
    """Age of an engine from which on its steps count: by then its graphs are captured and its caches filled."""

    @classmethod
    def from_decision_interval(cls, decision_interval: float, history: float) -> TelemetryScale:
        """Return the scale for a decision each `decision_interval` seconds over `history` seconds.

        There are at most six blocks between two decisions, and at most 288 in all.
        """
        return cls(max(decision_interval / 6, history / 288), history / 6, min(WARM_UP_SECONDS, decision_interval / 3))


@dataclass(frozen=True, slots=True)
class ReplicaWindow:
    """One window of one replica: the difference of two scrapes (`sample.diff_samples`)."""

    replica: str
    end: float
    """Seconds of Unix time."""
    setting: SpeculationSetting
    counters: Counters
    engine_age_seconds: float = math.inf
    """Age of the engine at the start of the window, in seconds."""


@dataclass(slots=True)
class StepCell:
    """Sums over windows with a common `StepCellKey`; each window is weighted by its request-steps."""

    windows: int = 0
    request_steps: float = 0.0
    step_seconds: float = 0.0
    batch_sum: float = 0.0
    prefill_sum: float = 0.0
    draft_tokens_sum: float = 0.0

    def add(self, request_steps: float, seconds: float, batch: float, prefill: float, draft_tokens: float) -> None:
        """Add one window: its request-steps, and its means per step (seconds, batch, prefill tokens, draft tokens)."""
        self.windows += 1
        self.request_steps += request_steps
        self.step_seconds += request_steps * seconds
        self.batch_sum += request_steps * batch
        self.prefill_sum += request_steps * prefill
        self.draft_tokens_sum += request_steps * draft_tokens

    def merge(self, other: StepCell) -> None:
        """Add another cell's sums."""
        self.windows += other.windows
        self.request_steps += other.request_steps
        self.step_seconds += other.step_seconds
        self.batch_sum += other.batch_sum
        self.prefill_sum += other.prefill_sum
        self.draft_tokens_sum += other.draft_tokens_sum


@dataclass(frozen=True, slots=True)
class StepCellKey:
    """Properties that the windows of a cell have in common."""

    slot: int
    """Time since the epoch, in cell lengths."""
    replica: str
    setting: SpeculationSetting
    batch_bin: int
    prefill_bin: int


@dataclass(frozen=True, slots=True)
class TelemetryBlock:
    """Counters of the whole fleet under one setting over one block length."""

    start: float
    setting: SpeculationSetting
    counters: Counters


@dataclass
class TuningTelemetry:
    """Cells and blocks of the windows of the last `horizon` seconds."""

    horizon: float = 24 * HOUR
    api_servers: int = 1
    """API-server processes of a pod. With more than one the batch is unknown, so no step time can be fitted."""
    scale: TelemetryScale = TelemetryScale()
    cells: dict[StepCellKey, StepCell] = field(default_factory=dict)
    excluded_windows: Counter[str] = field(default_factory=Counter)
    """Number of windows that are in no cell, by reason."""
    _blocks: dict[tuple[int, SpeculationSetting], Counters] = field(default_factory=dict)
    _newest_window_end: float = -math.inf
    _oldest_cell_slot: float = -math.inf
    """Slot of the oldest cells that may remain."""

    def add(self, replica_window: ReplicaWindow) -> None:
        """Add one window.

        A window that is excluded from the step times still counts for acceptance and latencies, unless it is implausible or
        another setting ran in it.
        """
        counters = replica_window.counters
        if not counters.request_steps and not counters.first_tokens:
            return
        self.advance_to(replica_window.end)
        reason = implausible_reason(counters) or setting_mismatch_reason(counters, replica_window.setting)
        if reason is None:
            self.add_to_block(int(replica_window.end // self.scale.block_seconds), replica_window.setting, counters)
            reason = self._step_time_exclusion_reason(replica_window)
        if reason is not None:
            self.record_exclusion(reason)
            return
        self._add_to_cell(replica_window)

    @property
    def newest_window_end(self) -> float | None:
        """End of the newest window, in seconds of Unix time; None before the first window."""
        return self._newest_window_end if math.isfinite(self._newest_window_end) else None

    def blocks(self) -> Iterator[TelemetryBlock]:
        """Yield all blocks, the oldest first."""
        for (slot, setting), counters in sorted(self._blocks.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            yield TelemetryBlock(slot * self.scale.block_seconds, setting, counters)

    def record_exclusion(self, reason: str, windows: int = 1) -> None:
        """Count windows that are in no cell, by reason."""
        counted_separately = reason in self.excluded_windows or len(self.excluded_windows) < MAX_EXCLUSION_REASONS
        self.excluded_windows[reason if counted_separately else OTHER_EXCLUSION_REASONS] += windows

    def merge(self, later: TuningTelemetry) -> None:
        """Add separately collected telemetry of the same scale, as if its windows had been added here.

        Raises ValueError for another block length.
        """
        if later.scale != self.scale:
            raise ValueError(f"blocks of {later.scale.block_seconds:g} s and of {self.scale.block_seconds:g} s cannot be merged.")
        for (slot, setting), counters in later._blocks.items():
            self.add_to_block(slot, setting, counters)
        for cell_key, cell in later.cells.items():
            self.cells.setdefault(cell_key, StepCell()).merge(cell)
        for reason, count in later.excluded_windows.items():
            self.record_exclusion(reason, count)
        self.advance_to(later._newest_window_end)

    def advance_to(self, end: float) -> None:
        """Advance the newest window's end, and drop what is older than the horizon before it."""
        if end <= self._newest_window_end:
            return
        enters_new_block = (
            not math.isfinite(self._newest_window_end)
            or end // self.scale.block_seconds > self._newest_window_end // self.scale.block_seconds
        )
        self._newest_window_end = end
        if enters_new_block:
            self._drop_expired()

    def add_to_block(self, slot: int, setting: SpeculationSetting, counters: Counters) -> None:
        """Add counters to the block at `slot`, the number of block lengths since the epoch."""
        key = (slot, setting)
        previous = self._blocks.get(key)
        try:
            self._blocks[key] = counters if previous is None else previous + counters
        except ValueError as error:  # custom buckets, or a different number of positions
            self.record_exclusion(f"replicas of one setting report different counters: {error}")

    def _add_to_cell(self, replica_window: ReplicaWindow) -> None:
        counters, setting = replica_window.counters, replica_window.setting
        batch = counters.request_steps / counters.iterations
        prefill = counters.computed_prompt_tokens / counters.iterations
        draft_tokens = counters.speculation.draft_tokens / counters.request_steps if counters.speculation else 0.0
        slot = int(replica_window.end // self.scale.cell_seconds)
        key = StepCellKey(slot, replica_window.replica, setting, batch_bin(batch), int(math.log2(1 + prefill) / 2))
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = StepCell()
        draft_tokens = min(draft_tokens, float(max_speculative_tokens(setting)))
        cell.add(counters.request_steps, counters.step_seconds / counters.request_steps, batch, prefill, draft_tokens)

    def _step_time_exclusion_reason(self, replica_window: ReplicaWindow) -> str | None:
        """Return why the window's steps do not count for the step time; None if they do."""
        counters = replica_window.counters
        if self.api_servers > 1:
            return (
                f"{self.api_servers} API-server processes count each engine step once or more, so the batch is unknown: "
                "set --api-server-count=1 in spec.engine.args."
            )
        if isinstance(replica_window.setting, Adaptive):
            return "adaptive verification trims drafts on the device, so the number of tokens that a step verified is unknown."
        if replica_window.engine_age_seconds < self.scale.warm_up_seconds:
            return f"the engine was younger than {_format_duration(self.scale.warm_up_seconds)}."
        if counters.preemptions > 0:
            return "requests were preempted, because the KV cache was full."
        if counters.iterations < MIN_WINDOW_ITERATIONS or counters.request_steps < MIN_WINDOW_ITERATIONS:
            return f"fewer than {MIN_WINDOW_ITERATIONS} steps were made."
        if not 0 < counters.step_seconds / counters.request_steps < MAX_STEP_SECONDS:
            return f"a step took no time, or {MAX_STEP_SECONDS:.0f} s and more: a counter jumped, or the engine stalled."
        return None

    def _drop_expired(self) -> None:
        oldest_time, cell_seconds = self._newest_window_end - self.horizon, self.scale.cell_seconds
        for slot, setting in [key for key in self._blocks if key[0] < oldest_time // self.scale.block_seconds]:
            del self._blocks[slot, setting]
        if self._oldest_cell_slot < oldest_time // cell_seconds:
            self._oldest_cell_slot = oldest_time // cell_seconds
            for key in [key for key in self.cells if key.slot < oldest_time // cell_seconds]:
                del self.cells[key]


def _format_duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def batch_bin(batch: float) -> int:
    """Return the bin of a mean batch; bins are a quarter of an octave wide."""
    return round(BATCH_BINS_PER_OCTAVE * math.log2(max(batch, 0.5)))


def implausible_reason(counters: Counters) -> str | None:
    """Return why no engine can have counted these numbers; None if one can.

    Either a counter jumped, or the scraped page is broken. Rounding and requests that return after a preemption are tolerated.
    """
    speculation = counters.speculation
    numbers = [getattr(counters, name) for name in _SCALAR_COUNTERS]
    for histogram in (counters.time_to_first_token, counters.time_per_output_token):
        numbers += [histogram.sum, *histogram.counts]
    numbers += counters.finished.values()
    if speculation is not None:
        numbers += [speculation.drafts, speculation.draft_tokens, speculation.accepted, *speculation.accepted_per_position]
    if not all(0 <= number < math.inf for number in numbers):
        return "a counter decreased, or is not a number."
    if counters.request_steps > _MAX_PLAUSIBLE_BATCH * counters.iterations:
        return f"more than {_MAX_PLAUSIBLE_BATCH:.0f} requests were in a step: a counter jumped."
    if speculation is not None:
        counts = (speculation.drafts, *speculation.accepted_per_position)
        if any(accepted > 1.05 * previous + 10 for previous, accepted in itertools.pairwise(counts)):
            return "more drafts were accepted than were made: a counter jumped."
    return None


def setting_mismatch_reason(counters: Counters, setting: SpeculationSetting) -> str | None:
    """Return why an engine with this setting cannot have counted the window; None if it can.

    Either somebody changed the engine's setting by hand, or the metrics are wrong.
    """
    draft_length = mean_draft_length(counters)
    if isinstance(setting, Off):
        if counters.speculation is not None and counters.speculation.drafts > 0:
            return f"the engine drafts, and the setting is '{setting}'."
        return None
    if counters.speculation is None:
        return f"the engine does not count drafts, and the setting is '{setting}'."
    max_k, engine_k = max_speculative_tokens(setting), len(counters.speculation.accepted_per_position)
    if engine_k != max_k:
        return f"the engine is built for {engine_k} draft tokens, and the setting is '{setting}'."
    if isinstance(draft_length, Unknown):
        return None  # the engine is idle, or runs a tier without drafts
    if draft_length > max_k * (1 + _DRAFT_LENGTH_TOLERANCE):
        return f"the engine drafts more tokens than the setting '{setting}' has."
    if isinstance(setting, Static) and draft_length < max_k * _MIN_DRAFT_LENGTH_SHARE:
        return f"the engine drafts fewer than half of the tokens of the setting '{setting}'."
    if isinstance(setting, Schedule) and draft_length < min(setting.nonzero_token_counts) * _MIN_DRAFT_LENGTH_SHARE:
        return f"the engine drafts fewer than half of the tokens of the setting '{setting}'."
    return None
