"""What a tuner remembers of the replicas' metrics: cells for the cost of a step, blocks for acceptance and latency.

A day of 64 replicas scraped every 15 s is 370,000 windows. They are kept as sums: a step's cost by time, replica, setting, batch
and prefill (`Cell`), and everything a fleet counted in five minutes under one setting (`Block`). Within a cell batch and prefill
differ little, so that its means stand for its windows.

Guarantees: memory is bounded by `horizon`; a window that would mislead is left out of the cells and counted under the sentence
that says why. Not guaranteed: the order of windows inside a block, or a quantile of step times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from aerie.engine import windows
from aerie.engine.samples import Counters
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, max_tokens

HOUR = 3600.0
BLOCK_SECONDS = 300.0
CELL_SECONDS = 4 * HOUR
BINS_PER_OCTAVE = 4
LEAST_ITERATIONS = 50
"""Of a window; fewer tell more of when the scrapes fell than of a step."""
WARM_AFTER = 600.0
"""Seconds after which a pod's steps count: graphs are captured and caches filled."""
LONGEST_STEP = 10.0
"""Seconds; a longer mean step is a stall, not a cost."""
_LENGTH_TOLERANCE = 0.05
"""By which the tokens per draft may exceed a fixed K, relative; beyond it the engine runs another setting."""
_CUT_DRAFTS = 0.5
"""Share of K below which tokens per draft are not explained by drafts cut short."""


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


@dataclass(frozen=True, slots=True)
class Key:
    """What the windows of a cell have in common."""

    slot: int
    """Time since the epoch in `CELL_SECONDS`."""
    replica: str
    setting: Setting
    batch_bin: int
    prefill_bin: int


@dataclass(frozen=True, slots=True)
class Block:
    """What the whole fleet counted under one setting in `BLOCK_SECONDS`."""

    start: float
    setting: Setting
    counters: Counters


@dataclass
class Telemetry:
    """The windows of the last `horizon` seconds."""

    horizon: float = 24 * HOUR
    api_servers: int = 1
    """API-server processes of a pod; with more than one the batch is not known, so that no step time can be fitted."""
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
        if reading.end > self._newest:
            aged = reading.end // BLOCK_SECONDS > self._newest // BLOCK_SECONDS
            self._newest = reading.end
            if aged:
                self._forget()
        reason = wrong_setting(window, reading.setting)
        if reason is None:
            self._add_block(reading)
            reason = self._no_step_time(reading)
        if reason is not None:
            self.left_out[reason] += 1
            return
        batch = window.request_steps / window.iterations
        prefill = window.computed_prompt_tokens / window.iterations
        drafted = window.speculation.draft_tokens / window.request_steps if window.speculation else 0.0
        slot = int(reading.end // CELL_SECONDS)
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
        for (slot, setting), counters in sorted(self._blocks.items(), key=lambda item: item[0][0]):
            yield Block(slot * BLOCK_SECONDS, setting, counters)

    def _add_block(self, reading: Reading) -> None:
        key = (int(reading.end // BLOCK_SECONDS), reading.setting)
        known = self._blocks.get(key)
        try:
            self._blocks[key] = reading.window if known is None else known + reading.window
        except ValueError as error:  # custom buckets, or another number of positions
            self.left_out[f"replicas of one setting count in different ways: {error}"] += 1

    def _no_step_time(self, reading: Reading) -> str | None:
        window = reading.window
        if self.api_servers > 1:
            return (
                f"{self.api_servers} API-server processes count each engine step once or more, so the batch is not known: "
                "set --api-server-count=1 in spec.engine.args."
            )
        if isinstance(reading.setting, Adaptive):
            return "adaptive verification trims drafts on the device, so what a step verified is not known."
        if reading.age < WARM_AFTER:
            return f"the engine was younger than {WARM_AFTER / 60:.0f} minutes."
        if window.preemptions > 0:
            return "requests were preempted for want of KV cache."
        if window.iterations < LEAST_ITERATIONS or window.request_steps <= 0:
            return f"fewer than {LEAST_ITERATIONS} steps were made."
        if not 0 < window.step_seconds / window.request_steps < LONGEST_STEP:
            return f"a step took no time, or {LONGEST_STEP:.0f} s and more: a counter jumped, or the engine stalled."
        return None

    def _forget(self) -> None:
        oldest = self._newest - self.horizon
        self._blocks = {key: value for key, value in self._blocks.items() if key[0] >= oldest // BLOCK_SECONDS}
        if self._forgotten < oldest // CELL_SECONDS:
            self._forgotten = oldest // CELL_SECONDS
            self.cells = {key: cell for key, cell in self.cells.items() if key.slot >= oldest // CELL_SECONDS}


def batch_bin(batch: float) -> int:
    """The bin of a mean batch; bins are a quarter of an octave wide."""
    return round(BINS_PER_OCTAVE * math.log2(max(batch, 0.5)))


def bin_center(index: int) -> float:
    """The batch in the middle of a bin."""
    return float(2.0 ** (index / BINS_PER_OCTAVE))


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
