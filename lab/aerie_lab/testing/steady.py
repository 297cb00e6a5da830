"""Real engines under a constant batch, their counters in windows of it, and the tuner's decision from them.

    constant number of open requests ─► scrapes ─► windows in which no request begins or ends ─► telemetry ─► decision

So the draft tokens per draft can be compared with the setting without a margin; the batch is known except for the few steps by
which two counters of one scrape may differ. A window lasts for a number of steps, never for a time, and windows are measured
until they are enough for a decision: the result does not depend on the speed of the machine. tests/vllm asserts it, `make bench
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
"""Minimum of engine steps in a window: a few more than the tuner requires."""
WINDOWS_PER_SET = 2
"""Windows of one batch in one set: few, so that a slow minute of the machine does not affect one batch of one engine alone."""
MIN_ROUNDS, MAX_ROUNDS = 5, 24
"""How often all batches are measured, and the maximum for a decision."""
ANSWER_TOKENS = 1500
"""Tokens of an answer: with any prompt within the context, and never all generated before the window ends."""
MAX_SPECULATIVE_TOKENS = 7
"""Maximum number of draft tokens that the tuner may select."""
TELEMETRY_SCALE = TelemetryScale(block_seconds=1.0, cell_seconds=3600.0, warm_up_seconds=0.0)
"""Short blocks, because the load is always the same."""
_MODEL_RUNNER_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""vLLM's own choice without Triton, as on CPU; the tuner gets it as environment."""


@dataclass(frozen=True)
class CounterWindow:
    """Counters of an engine while its batch was constant."""

    end: float
    """Unix time in seconds."""
    engine_age_seconds: float
    """Age of the engine at the window's beginning."""
    counters: Counters


@dataclass
class MeasuredEngine:
    """One engine: its setting, and its windows by batch."""

    engine: RunningEngine
    setting: SpeculationSetting
    windows: dict[int, list[CounterWindow]] = field(default_factory=dict)

    def measure(self, batch: int) -> None:
        """Measure more windows of the batch."""
        self.windows.setdefault(batch, []).extend(asyncio.run(_measure_windows(self.engine.url, batch)))

    def seconds_per_token(self, batch: int) -> float:
        """Return a user's time per token over all windows of the batch, slow moments included, as the tuner has it."""
        counters = [window.counters for window in self.windows[batch]]
        return sum(each.step_seconds for each in counters) / sum(each.generation_tokens for each in counters)

    def median_seconds_per_token(self, batch: int) -> float:
        """Return a user's time per token in the median window of the batch: it ignores windows with other load on the machine."""
        counters = [window.counters for window in self.windows[batch]]
        return median(each.step_seconds / each.generation_tokens for each in counters)


@contextlib.contextmanager
def start_engines(vllm_folder: Path, folder: Path, settings: Sequence[SpeculationSetting]) -> Iterator[list[MeasuredEngine]]:
    """Start real vLLM with the bundle's target and its EAGLE 3.1 drafter, one engine per setting, with Aerie's arguments."""
    with contextlib.ExitStack() as stack:
        contexts = [start_engine("real", vllm_folder, folder, *build_engine_arguments(setting)) for setting in settings]
        with ThreadPoolExecutor(len(contexts)) as pool:
            engines = list(pool.map(stack.enter_context, contexts))
        for engine in engines:
            engine.run_load(4, 8, 30, seed=0)  # the first requests are slower: lazy initialization
        yield [MeasuredEngine(*each) for each in zip(engines, settings, strict=True)]


def build_engine_arguments(setting: SpeculationSetting) -> list[str]:
    """Return the arguments with which Aerie sets an engine's speculation setting."""
    drafter = command_line.DrafterArguments(str(BUNDLE_FOLDER / "eagle31"))
    config = command_line.build_speculative_config(setting, drafter, VLLM_VERSION, arguments.EngineArguments())
    return [] if config is None else ["--speculative-config", json.dumps(config)]


async def _measure_windows(url: str, batch: int) -> list[CounterWindow]:
    windows: list[CounterWindow] = []
    async with httpx.AsyncClient(base_url=url, timeout=START_TIMEOUT_SECONDS) as client:
        while len(windows) < WINDOWS_PER_SET:
            windows += await _measure_set(client, batch, WINDOWS_PER_SET - len(windows))
    return windows


async def _measure_set(client: httpx.AsyncClient, batch: int, count: int) -> list[CounterWindow]:
    """Measure windows during one set of answers: `count`, or as many as fit before the first answer ends."""
    before = await _scrape(client)
    answers = [asyncio.create_task(client.post("/v1/completions", json=_build_request(index))) for index in range(batch)]
    windows: list[CounterWindow] = []
    start: tuple[float, Sample] | None = None
    try:
        while len(windows) < count and not any(answer.done() for answer in answers):
            now, sample = time.time(), await _scrape(client)
            if not _is_batch_constant(before, sample, batch):
                start = None
            elif start is None:
                start = now, sample
            else:
                counters = diff_samples(start[1], sample)
                assert isinstance(counters, Counters), counters
                if counters.iterations >= MIN_WINDOW_STEPS:
                    windows.append(CounterWindow(now, start[0] - (sample.process_start_time or 0.0), counters))
                    start = now, sample
            await asyncio.sleep(0.05)
    finally:
        for answer in answers:
            answer.cancel()  # the engine notices that its client has disconnected
        results = await asyncio.gather(*answers, return_exceptions=True)
    for result in results:  # a connection lost on busy cores only ends the set: if the engine has ended, the next scrape fails
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError | httpx.ReadError):
            raise result
        assert not isinstance(result, httpx.Response) or result.status_code == 200, result.text
    return windows


def _build_request(index: int) -> dict[str, object]:
    """Return a sampled request: greedy answers of this length end in loops, whose rest any drafter predicts."""
    prompt = f"{index}. The module is"
    sampling = {"temperature": 0.8, "seed": derive_seed("steady", index)}
    return {"model": "agreement", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, **sampling}


async def _scrape(client: httpx.AsyncClient) -> Sample:
    return parse_exposition((await client.get("/metrics")).raise_for_status().content)


def _is_batch_constant(before: Sample, now: Sample, batch: int) -> bool:
    """Return whether all requested answers have begun, none has ended, and none of an earlier set still runs."""
    all_begun = now.counters.first_tokens - before.counters.first_tokens == batch
    return all_begun and now.gauges.running_requests == batch and now.counters.finished == before.counters.finished


# ---------------------------------------------------------------------------------------------------------------- the tuner
@dataclass(frozen=True)
class TunerResult:
    """The tuner's decision for some engines, and its explanation."""

    decision: TuningDecision
    explanation: str


def run_tuner(engines: Sequence[MeasuredEngine]) -> TunerResult:
    """Decide for these engines as replicas of one fleet with the first engine's setting, at the end of its newest window."""
    telemetry = TuningTelemetry(scale=TELEMETRY_SCALE)
    replica_windows = [
        ReplicaWindow(str(engine.setting), window.end, engine.setting, window.counters, window.engine_age_seconds)
        for engine in engines
        for windows in engine.windows.values()
        for window in windows
    ]
    for replica_window in sorted(replica_windows, key=lambda each: each.end):
        telemetry.add(replica_window)
    config = EngineConfig(
        VLLM_VERSION, arguments.parse_arguments(["--enforce-eager"]), environment=_MODEL_RUNNER_ENVIRONMENT, is_moe=False
    )
    newest = max(window.end for windows in engines[0].windows.values() for window in windows)
    context = TuningContext(config, engines[0].setting, MAX_SPECULATIVE_TOKENS, len(engines), newest)
    decision = decide_setting(telemetry, context, TuningPolicy(), seed=1)
    return TunerResult(decision, explain_decision(decision, telemetry, context, TuningPolicy()))


def measure_until_decided(engines: Sequence[MeasuredEngine]) -> TunerResult:
    """Measure the engines in turn until the tuner has enough data to decide; return its result."""
    measure_in_turn(engines, MIN_ROUNDS)
    result, rounds = run_tuner(engines), MIN_ROUNDS
    while result.decision.action is TuningAction.INSUFFICIENT and rounds < MAX_ROUNDS:
        measure_in_turn(engines, 1)
        result, rounds = run_tuner(engines), rounds + 1
    return result


def measure_in_turn(engines: Sequence[MeasuredEngine], rounds: int) -> None:
    """Measure more windows of all engines at all batches."""
    for batch in BATCH_SIZES * rounds:
        for engine in reversed(engines):  # the first one last: the newest windows are of the current setting
            engine.measure(batch)


@dataclass(frozen=True)
class SteadyReport:
    """All measurements, and the tuner's result."""

    engines: dict[SpeculationSetting, MeasuredEngine]
    tuner_result: TunerResult
    """Result from the engines with the current setting and without speculation."""

    @property
    def mean_gain(self) -> dict[int, float]:
        """Relative change of a user's time per token by the current setting, per batch, over all windows as the tuner has."""
        return self._gain(MeasuredEngine.seconds_per_token)

    @property
    def median_gain(self) -> dict[int, float]:
        """The same in the median windows."""
        return self._gain(MeasuredEngine.median_seconds_per_token)

    def _gain(self, seconds: Callable[[MeasuredEngine, int], float]) -> dict[int, float]:
        off, current = self.engines[Off()], self.engines[CURRENT_SETTING]
        return {batch: seconds(current, batch) / seconds(off, batch) - 1 for batch in BATCH_SIZES}

    @property
    def forecast_quantiles(self) -> dict[int, tuple[float, float, float]]:
        """The same as the tuner forecasts it, at the nearest batch of its load: the 5 %, 50 % and 95 % quantiles."""
        forecast = self.tuner_result.decision.evidence.forecast
        assert forecast is not None, self.tuner_result.explanation
        gains = forecast.token_seconds(CURRENT_SETTING) / forecast.token_seconds(Off()) - 1
        columns = {batch: int(np.abs(np.log(forecast.load.batches / batch)).argmin()) for batch in BATCH_SIZES}
        points = {batch: quantiles(gains[:, column], 0.05, 0.5, 0.95) for batch, column in columns.items()}
        return {batch: (low, middle, high) for batch, (low, middle, high) in points.items()}


def run_steady(vllm_folder: Path, folder: Path) -> SteadyReport:
    """Measure two engines at a time, which fit in two cores and 8 GiB. Takes five minutes on an idle machine."""
    engines: dict[SpeculationSetting, MeasuredEngine] = {}
    with start_engines(vllm_folder, folder, [CURRENT_SETTING, Off()]) as pair:
        tuner_result = measure_until_decided(pair)
        engines |= {engine.setting: engine for engine in pair}
    with start_engines(vllm_folder, folder, [OTHER_SETTING, SCHEDULE_SETTING]) as pair:
        measure_in_turn(pair, MIN_ROUNDS)
        engines |= {engine.setting: engine for engine in pair}
    return SteadyReport(engines, tuner_result)
