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
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, max_tokens

HOUR = 3600.0
BLOCK_SECONDS = 300.0
CELL_SECONDS = 4 * HOUR
WARM_AFTER = 600.0
"""The lengths of a `Scale` where nothing is said."""
BINS_PER_OCTAVE = 4
LEAST_ITERATIONS = 50
"""Of a window; fewer tell more of when the scrapes fell than of a step."""
LONGEST_STEP = 10.0
"""Seconds; a longer mean step is a stall, not a cost."""
MOST_SENTENCES = 32
"""Reasons for leaving a window out that are counted apart; a page's own words are in some."""
OTHER_REASONS = "for other reasons."
_LENGTH_TOLERANCE = 0.05
"""By which the tokens per draft may exceed a fixed K, relative; beyond it the engine runs another setting."""
_MOST_BATCH = 1e5
_NUMBERS = (
    *("generation_tokens", "prompt_tokens", "computed_prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("preemptions", "request_steps", "step_seconds", "iterations", "queued_requests", "queue_seconds"),
)
_CUT_DRAFTS = 0.5
"""Share of K below which tokens per draft are not explained by drafts cut short."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Lengths in seconds."""

    block: float = BLOCK_SECONDS
    cell: float = CELL_SECONDS
    warm: float = WARM_AFTER
    """After which a pod's steps count: graphs are captured and caches filled."""

    @classmethod
    def of(cls, interval: float, history: float) -> Scale:
        """For a decision each `interval` that looks back over `history`: six blocks or less in between, 288 at most in all."""
        return cls(max(interval / 6, history / 288), history / 6, min(WARM_AFTER, interval / 3))


@dataclass(frozen=True, slots=True)
class Reading:
    """One window of one replica: two scrapes and what happened between them (`samples.between`)."""

    replica: str
    end: float
    """Seconds of Unix time."""
    setting: Setting
    window: Counters
    age: float = math.inf
    """Seconds that the engine has run for at the beginning of the window."""


@dataclass(slots=True)
class Cell:
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

    def take(self, other: Cell) -> None:
        self.windows += other.windows
        self.request_steps += other.request_steps
        self.step_seconds += other.step_seconds
        self.batch += other.batch
        self.prefill += other.prefill
        self.drafted += other.drafted


@dataclass(frozen=True, slots=True)
class Key:
    """What the windows of a cell have in common."""

    slot: int
    """Time since the epoch, in lengths of a cell."""
    replica: str
    setting: Setting
    batch_bin: int
    prefill_bin: int


@dataclass(frozen=True, slots=True)
class Block:
    """What the whole fleet counted under one setting in the length of a block."""

    start: float
    setting: Setting
    counters: Counters


@dataclass
class Telemetry:
    """The windows of the last `horizon` seconds."""

    horizon: float = 24 * HOUR
    api_servers: int = 1
    """API-server processes of a pod; with more than one the batch is not known, so that no step time can be fitted."""
    scale: Scale = Scale()
    cells: dict[Key, Cell] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    """By sentence, how many windows did not become part of a cell."""
    _blocks: dict[tuple[int, Setting], Counters] = field(default_factory=dict)
    _newest: float = -math.inf
    _forgotten: float = -math.inf
    """The slot before which no cell is left."""

    def add(self, reading: Reading) -> None:
        """Take one window in. Its acceptance and latencies count even where its steps do not, unless another setting ran."""
        window = reading.window
        if not window.request_steps and not window.first_tokens:
            return
        self.seen(reading.end)
        reason = impossible(window) or wrong_setting(window, reading.setting)
        if reason is None:
            self.count(int(reading.end // self.scale.block), reading.setting, window)
            reason = self._no_step_time(reading)
        if reason is not None:
            self.leave_out(reason)
            return
        batch = window.request_steps / window.iterations
        prefill = window.computed_prompt_tokens / window.iterations
        drafted = window.speculation.draft_tokens / window.request_steps if window.speculation else 0.0
        slot = int(reading.end // self.scale.cell)
        key = Key(slot, reading.replica, reading.setting, batch_bin(batch), int(math.log2(1 + prefill) / 2))
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = Cell()
        drafted = min(drafted, float(max_tokens(reading.setting)))
        cell.add(window.request_steps, window.step_seconds / window.request_steps, batch, prefill, drafted)

    @property
    def newest(self) -> float | None:
        """The end of the newest window, in seconds of Unix time; None before the first."""
        return self._newest if math.isfinite(self._newest) else None

    def blocks(self) -> Iterator[Block]:
        """All blocks, the oldest first."""
        for (slot, setting), counters in sorted(self._blocks.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            yield Block(slot * self.scale.block, setting, counters)

    def leave_out(self, reason: str, windows: int = 1) -> None:
        """Windows that did not become part of a cell, and why."""
        known = reason in self.left_out or len(self.left_out) < MOST_SENTENCES
        self.left_out[reason if known else OTHER_REASONS] += windows

    def merge(self, later: Telemetry) -> None:
        """Take in what was kept apart, of the same scale: all of it, as if its windows had been added here."""
        if later.scale != self.scale:
            raise ValueError(f"blocks of {later.scale.block:g} s and of {self.scale.block:g} s do not add up.")
        for (slot, setting), counters in later._blocks.items():
            self.count(slot, setting, counters)
        for cell_key, cell in later.cells.items():
            self.cells.setdefault(cell_key, Cell()).take(cell)
        for reason, count in later.left_out.items():
            self.leave_out(reason, count)
        self.seen(later._newest)

    def seen(self, end: float) -> None:
        """Windows have come up to this time: what lies more than the horizon before it goes."""
        if end <= self._newest:
            return
        aged = not math.isfinite(self._newest) or end // self.scale.block > self._newest // self.scale.block
        self._newest = end
        if aged:
            self._forget()

    def count(self, slot: int, setting: Setting, counters: Counters) -> None:
        """Add to the block that is this many lengths of a block after the epoch."""
        key = (slot, setting)
        known = self._blocks.get(key)
        try:
            self._blocks[key] = counters if known is None else known + counters
        except ValueError as error:  # custom buckets, or another number of positions
            self.leave_out(f"replicas of one setting count in different ways: {error}")

    def _no_step_time(self, reading: Reading) -> str | None:
        window = reading.window
        if self.api_servers > 1:
            return (
                f"{self.api_servers} API-server processes count each engine step once or more, so the batch is not known: "
                "set --api-server-count=1 in spec.engine.args."
            )
        if isinstance(reading.setting, Adaptive):
            return "adaptive verification trims drafts on the device, so what a step verified is not known."
        if reading.age < self.scale.warm:
            return f"the engine was younger than {_said(self.scale.warm)}."
        if window.preemptions > 0:
            return "requests were preempted for want of KV cache."
        if window.iterations < LEAST_ITERATIONS or window.request_steps < LEAST_ITERATIONS:
            return f"fewer than {LEAST_ITERATIONS} steps were made."
        if not 0 < window.step_seconds / window.request_steps < LONGEST_STEP:
            return f"a step took no time, or {LONGEST_STEP:.0f} s and more: a counter jumped, or the engine stalled."
        return None

    def _forget(self) -> None:
        oldest, cell = self._newest - self.horizon, self.scale.cell
        for slot, setting in [key for key in self._blocks if key[0] < oldest // self.scale.block]:
            del self._blocks[slot, setting]
        if self._forgotten < oldest // cell:
            self._forgotten = oldest // cell
            for key in [key for key in self.cells if key.slot < oldest // cell]:
                del self.cells[key]


def _said(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def batch_bin(batch: float) -> int:
    """The bin of a mean batch; bins are a quarter of an octave wide."""
    return round(BINS_PER_OCTAVE * math.log2(max(batch, 0.5)))


def bin_center(index: int) -> float:
    """The batch in the middle of a bin."""
    return float(2.0 ** (index / BINS_PER_OCTAVE))


def impossible(window: Counters) -> str | None:
    """Why no engine can have counted this, if so: a counter jumped, or the page is broken. Rounding may, and requests that come
    back after a preemption."""
    spoken = window.speculation
    numbers = [getattr(window, name) for name in _NUMBERS]
    for histogram in (window.time_to_first_token, window.time_per_output_token):
        numbers += [histogram.sum, *histogram.counts]
    numbers += window.finished.values()
    if spoken is not None:
        numbers += [spoken.drafts, spoken.draft_tokens, spoken.accepted, *spoken.accepted_per_position]
    if not all(0 <= number < math.inf for number in numbers):
        return "a counter fell, or is no number."
    if window.request_steps > _MOST_BATCH * window.iterations:
        return f"more than {_MOST_BATCH:.0f} requests were in a step: a counter jumped."
    if spoken is not None:
        counts = (spoken.drafts, *spoken.accepted_per_position)
        if any(deeper > 1.05 * before + 10 for before, deeper in itertools.pairwise(counts)):
            return "more drafts were accepted than were made: a counter jumped."
    return None


def wrong_setting(window: Counters, setting: Setting) -> str | None:
    """Why the window cannot be one of an engine with this setting, if so: somebody changed it by hand, or metrics are off."""
    drafted = windows.mean_draft_length(window)
    if isinstance(setting, Off):
        if window.speculation is not None and window.speculation.drafts > 0:
            return f"the engine drafts, and the setting is '{setting}'."
        return None
    if window.speculation is None:
        return f"the engine does not count drafts, and the setting is '{setting}'."
    most, counted = max_tokens(setting), len(window.speculation.accepted_per_position)
    if counted != most:
        return f"the engine is built for {counted} draft tokens, and the setting is '{setting}'."
    if isinstance(drafted, windows.Unknown):
        return None  # idle, or a tier without drafts
    if drafted > most * (1 + _LENGTH_TOLERANCE):
        return f"the engine drafts more tokens than the setting '{setting}' has."
    if isinstance(setting, Static) and drafted < most * _CUT_DRAFTS:
        return f"the engine drafts fewer than half of the tokens of the setting '{setting}'."
    if isinstance(setting, Schedule) and drafted < min(setting.drafting) * _CUT_DRAFTS:
        return f"the engine drafts fewer than half of the tokens of the setting '{setting}'."
    return None
