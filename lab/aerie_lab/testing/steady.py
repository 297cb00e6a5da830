"""Real engines under a load of a constant batch, what they count in windows of it, and what the tuner makes of that.

    answers under way, always as many ─► pages ─► windows in which nothing begins or ends ─► telemetry ─► decision

So the draft tokens per draft can be compared with the setting without a margin; the batch is known but for the few steps by which
two counters of one page may lie apart. A window lasts for a number of steps, never for a time, and windows are taken until they
are enough for a decision: what is shown does not depend on how fast the machine is. tests/vllm asserts it, `make bench
NAME=tuning_vllm` records it.

Not guaranteed: that step times agree while other work keeps the cores busy. Engines that are compared are measured in turn, so
that slow minutes fall on all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from aerie.engine import arguments, command_line
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Counters, Sample, diff_samples
from aerie.engine.releases import Version
from aerie.engine.speculation import Off, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.tuning.decision.candidates import EngineConfig
from aerie.tuning.decision.explain import explain_decision
from aerie.tuning.decision.policy import TuningPolicy
from aerie.tuning.decision.recommend import decide_setting
from aerie.tuning.decision.types import TuningAction, TuningContext, TuningDecision
from aerie.tuning.models.numeric import quantiles
from aerie.tuning.telemetry import ReplicaWindow, TelemetryScale, TuningTelemetry
from aerie_lab.testing.agreement import BUNDLE_FOLDER, START_TIMEOUT_SECONDS, RunningEngine, start_engine
from aerie_lab.testing.sampled import derive_seed

VLLM_VERSION = Version.parse("0.32.0")
CURRENT_SETTING = Static(3)
OTHER_SETTING = Static(1)
SCHEDULE_SETTING = Schedule((ScheduleTier(1, 2, 3), ScheduleTier(3, 8, 1)), max_tokens=3)
BATCH_SIZES = (1, 2, 4, 8)
MIN_WINDOW_STEPS = 60
"""Engine steps of a window at least: a few more than the tuner asks of one."""
WINDOWS_PER_SET = 2
"""Of a batch, at a time: few, so that a slow minute of the machine does not fall on one batch of one engine alone."""
MIN_ROUNDS, MAX_ROUNDS = 5, 24
"""So often all batches are measured, and at most for a decision."""
ANSWER_TOKENS = 1500
"""Tokens of an answer: with any of the prompts below the context's end, and left before they are all there."""
MAX_SPECULATIVE_TOKENS = 7
"""The most draft tokens that the tuner may choose."""
TELEMETRY_SCALE = TelemetryScale(block=1.0, cell=3600.0, warm=0.0)
"""Short blocks, because the load is always the same."""
_MODEL_RUNNER_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""What vLLM decides by itself where there is no Triton, as on CPU; the tuner is told."""


@dataclass(frozen=True)
class CounterWindow:
    """What an engine counted while its batch stood still."""

    end: float
    """Seconds of Unix time."""
    engine_age_seconds: float
    """Seconds that the engine had run for at its beginning."""
    counters: Counters


@dataclass
class MeasuredEngine:
    """One engine: its setting, and its windows by batch."""

    engine: RunningEngine
    setting: SpeculationSetting
    windows: dict[int, list[CounterWindow]] = field(default_factory=dict)

    def measure(self, batch: int) -> None:
        """Take more windows of the batch."""
        self.windows.setdefault(batch, []).extend(asyncio.run(_measure_windows(self.engine.url, batch)))

    def seconds_per_token(self, batch: int) -> float:
        """A user's, over all windows of the batch: what the tuner's figures are means of, slow moments included."""
        counted = [window.counters for window in self.windows[batch]]
        return sum(one.step_seconds for one in counted) / sum(one.generation_tokens for one in counted)

    def median_seconds_per_token(self, batch: int) -> float:
        """A user's in the middle one of the batch's windows: one in which the machine did something else does not count."""
        counted = [window.counters for window in self.windows[batch]]
        return median(one.step_seconds / one.generation_tokens for one in counted)


@contextlib.contextmanager
def start_engines(vllm_folder: Path, folder: Path, settings: Sequence[SpeculationSetting]) -> Iterator[list[MeasuredEngine]]:
    """Real vLLM with the bundle's target and its EAGLE 3.1 drafter, one for each setting as Aerie writes it, started together."""
    with contextlib.ExitStack() as stack:
        made = [start_engine("real", vllm_folder, folder, *build_engine_arguments(setting)) for setting in settings]
        with ThreadPoolExecutor(len(made)) as pool:
            engines = list(pool.map(stack.enter_context, made))
        for one in engines:
            one.load(4, 8, 30, seed=0)  # first requests pay for lazily made state
        yield [MeasuredEngine(*each) for each in zip(engines, settings, strict=True)]


def build_engine_arguments(setting: SpeculationSetting) -> list[str]:
    """The arguments by which Aerie gives an engine the setting."""
    drafter = command_line.DrafterArguments(str(BUNDLE_FOLDER / "eagle31"))
    config = command_line.build_speculative_config(setting, drafter, VLLM_VERSION, arguments.EngineArguments())
    return [] if config is None else ["--speculative-config", json.dumps(config)]


async def _measure_windows(url: str, batch: int) -> list[CounterWindow]:
    found: list[CounterWindow] = []
    async with httpx.AsyncClient(base_url=url, timeout=START_TIMEOUT_SECONDS) as client:
        while len(found) < WINDOWS_PER_SET:
            found += await _measure_set(client, batch, WINDOWS_PER_SET - len(found))
    return found


async def _measure_set(client: httpx.AsyncClient, batch: int, count: int) -> list[CounterWindow]:
    """Windows of one set of answers: as many as are wanted, or as there is time for before the first of the answers ends."""
    before = await _scrape(client)
    answers = [asyncio.create_task(client.post("/v1/completions", json=_build_request(index))) for index in range(batch)]
    found: list[CounterWindow] = []
    begun: tuple[float, Sample] | None = None
    try:
        while len(found) < count and not any(answer.done() for answer in answers):
            now, sample = time.time(), await _scrape(client)
            if not _is_batch_constant(before, sample, batch):
                begun = None
            elif begun is None:
                begun = now, sample
            else:
                counted = diff_samples(begun[1], sample)
                assert isinstance(counted, Counters), counted
                if counted.iterations >= MIN_WINDOW_STEPS:
                    found.append(CounterWindow(now, begun[0] - (sample.process_start_time or 0.0), counted))
                    begun = now, sample
            await asyncio.sleep(0.05)
    finally:
        for answer in answers:
            answer.cancel()  # the engine sees that its client has gone
        ended = await asyncio.gather(*answers, return_exceptions=True)
    for one in ended:  # a connection lost on busy cores costs the set: an engine that is gone fails the next scrape
        if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError | httpx.ReadError):
            raise one
        assert not isinstance(one, httpx.Response) or one.status_code == 200, one.text
    return found


def _build_request(index: int) -> dict[str, object]:
    """Sampled, because greedy answers of this length end in loops, of which any drafter guesses the rest."""
    prompt = f"{index}. The module is"
    drawn = {"temperature": 0.8, "seed": derive_seed("steady", index)}
    return {"model": "agreement", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, **drawn}


async def _scrape(client: httpx.AsyncClient) -> Sample:
    return parse_exposition((await client.get("/metrics")).raise_for_status().content)


def _is_batch_constant(before: Sample, now: Sample, batch: int) -> bool:
    """Whether all answers that were asked for have begun, none has ended, and none of an earlier set still runs."""
    begun = now.counters.first_tokens - before.counters.first_tokens == batch
    return begun and now.gauges.running_requests == batch and now.counters.finished == before.counters.finished


# ---------------------------------------------------------------------------------------------------------------- the tuner
@dataclass(frozen=True)
class TunerResult:
    """What the tuner says of some engines' windows."""

    decision: TuningDecision
    explanation: str


def run_tuner(engines: Sequence[MeasuredEngine]) -> TunerResult:
    """Of these engines as the replicas of one fleet whose setting is that of the first, as of the first one's newest window."""
    told = TuningTelemetry(scale=TELEMETRY_SCALE)
    readings = [
        ReplicaWindow(str(one.setting), window.end, one.setting, window.counters, window.engine_age_seconds)
        for one in engines
        for windows in one.windows.values()
        for window in windows
    ]
    for reading in sorted(readings, key=lambda each: each.end):
        told.add(reading)
    known = EngineConfig(
        VLLM_VERSION, arguments.parse_arguments(["--enforce-eager"]), environment=_MODEL_RUNNER_ENVIRONMENT, is_moe=False
    )
    newest = max(window.end for windows in engines[0].windows.values() for window in windows)
    situation = TuningContext(known, engines[0].setting, MAX_SPECULATIVE_TOKENS, len(engines), newest)
    decision = decide_setting(told, situation, TuningPolicy(), seed=1)
    return TunerResult(decision, explain_decision(decision, told, situation, TuningPolicy()))


def measure_until_decided(engines: Sequence[MeasuredEngine]) -> TunerResult:
    """Measure the engines in turn, until the tuner has figures enough to decide on; its decision."""
    measure_in_turn(engines, MIN_ROUNDS)
    found, rounds = run_tuner(engines), MIN_ROUNDS
    while found.decision.action is TuningAction.INSUFFICIENT and rounds < MAX_ROUNDS:
        measure_in_turn(engines, 1)
        found, rounds = run_tuner(engines), rounds + 1
    return found


def measure_in_turn(engines: Sequence[MeasuredEngine], rounds: int) -> None:
    """More windows of all engines at all batches."""
    for batch in BATCH_SIZES * rounds:
        for one in reversed(engines):  # the first one last: what is newest is of the setting that runs
            one.measure(batch)


@dataclass(frozen=True)
class SteadyReport:
    """All that was measured."""

    engines: dict[SpeculationSetting, MeasuredEngine]
    tuner_result: TunerResult
    """With the figures of the engines that ran the current setting, and no speculation."""

    @property
    def mean_gain(self) -> dict[int, float]:
        """By batch, how many more tokens a user got in the same time without speculation: over all windows, as the tuner has
        them."""
        return self._gain(MeasuredEngine.seconds_per_token)

    @property
    def median_gain(self) -> dict[int, float]:
        """The same of each one's middle window."""
        return self._gain(MeasuredEngine.median_seconds_per_token)

    def _gain(self, seconds: Callable[[MeasuredEngine, int], float]) -> dict[int, float]:
        off, current = self.engines[Off()], self.engines[CURRENT_SETTING]
        return {batch: seconds(current, batch) / seconds(off, batch) - 1 for batch in BATCH_SIZES}

    @property
    def forecast_quantiles(self) -> dict[int, tuple[float, float, float]]:
        """The same as the tuner has it, at the batch of its load that is nearest: the 5 %, 50 % and 95 % points."""
        drawn = self.tuner_result.decision.evidence.forecast
        assert drawn is not None, self.tuner_result.explanation
        gains = drawn.token_seconds(CURRENT_SETTING) / drawn.token_seconds(Off()) - 1
        columns = {batch: int(np.abs(np.log(drawn.load.batches / batch)).argmin()) for batch in BATCH_SIZES}
        found = {batch: quantiles(gains[:, column], 0.05, 0.5, 0.95) for batch, column in columns.items()}
        return {batch: (low, middle, high) for batch, (low, middle, high) in found.items()}


def run_steady(vllm_folder: Path, folder: Path) -> SteadyReport:
    """Two engines at a time, which is what two cores and 8 GiB hold. Takes five minutes on an idle machine."""
    engines: dict[SpeculationSetting, MeasuredEngine] = {}
    with start_engines(vllm_folder, folder, [CURRENT_SETTING, Off()]) as pair:
        found = measure_until_decided(pair)
        engines |= {one.setting: one for one in pair}
    with start_engines(vllm_folder, folder, [OTHER_SETTING, SCHEDULE_SETTING]) as pair:
        measure_in_turn(pair, MIN_ROUNDS)
        engines |= {one.setting: one for one in pair}
    return SteadyReport(engines, found)
