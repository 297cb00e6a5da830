"""Windows with known parameters: the counters of a replica at a batch, with known step time and acceptance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, SpeculationCounters
from aerie.engine.speculation import Schedule, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.telemetry import ReplicaWindow, TuningTelemetry

EDGES = (0.005, 0.01, 0.02, 0.05, 0.1, 1.0, math.inf)
StepSeconds = Callable[[float, float], float]
"""Seconds of a step, by batch and K."""


def observed(values: Sequence[float]) -> Histogram:
    return Histogram(EDGES, tuple(float(sum(value <= edge for value in values)) for edge in EDGES), float(sum(values)))


def window(
    setting: SpeculationSetting,
    batch: float,
    step_seconds: float,
    conditionals: Sequence[float] = (0.8, 0.75, 0.7),
    *,
    seconds: float = 60.0,
    prefill: float = 0.0,
    prefill_seconds: float = 0.0,
    preemptions: float = 0.0,
) -> Counters:
    """Make the counters of one replica over `seconds`. Later positions have the last conditional."""
    most = max_speculative_tokens(setting)
    tokens = setting.tokens_at(max(1, round(batch))) if isinstance(setting, Schedule) else most
    interval = step_seconds + prefill_seconds * prefill
    iterations = seconds / interval
    steps = iterations * batch
    q = [*conditionals, *[conditionals[-1]] * most][:tokens]
    accepted = [steps * s for s in itertools.accumulate(q, lambda a, b: a * b)] + [0.0] * (most - tokens)
    drafts = steps if tokens else 0.0
    speculation = SpeculationCounters(drafts, tokens * drafts, sum(accepted), tuple(accepted)) if most else None
    user = interval * steps / (steps + sum(accepted))
    return Counters(
        generation_tokens=steps + sum(accepted),
        prompt_tokens=prefill * iterations,
        computed_prompt_tokens=prefill * iterations,
        prefix_cache_queries=0.0,
        prefix_cache_hits=0.0,
        preemptions=preemptions,
        finished={"stop": 10.0},
        request_steps=steps,
        step_seconds=steps * interval,
        iterations=iterations,
        queued_requests=10.0,
        queue_seconds=0.1,
        time_to_first_token=observed([0.04] * 10),
        time_per_output_token=observed([user] * 10),
        speculation=speculation,
    )


def spread(low: float, high: float, count: int) -> list[float]:
    """Return batches, evenly spaced over the octaves."""
    return [float(b) for b in np.geomspace(low, high, count)]


def telemetry(
    settings: Iterable[SpeculationSetting],
    step_seconds: StepSeconds,
    batches: Sequence[float],
    conditionals: Sequence[float] = (0.8, 0.75, 0.7),
    *,
    noise: float = 0.0,
    prefill_seconds: float = 0.0,
    seed: int = 0,
    replicas: int = 2,
    end: float = 360000.0,
) -> TuningTelemetry:
    """Make one window a minute at each batch, each setting on replicas of its own; the last one ends at `end`."""
    random = np.random.default_rng(seed)
    tuning_telemetry = TuningTelemetry()
    for index, batch in enumerate(batches):
        for setting in settings:
            tokens = setting.tokens_at(max(1, round(batch))) if isinstance(setting, Schedule) else max_speculative_tokens(setting)
            for replica in range(replicas):
                seconds = step_seconds(batch, tokens) * math.exp(noise * random.standard_normal())
                prefill = float(random.uniform(0, 3 * batch)) if prefill_seconds else 0.0
                counters = window(setting, batch, seconds, conditionals, prefill=prefill, prefill_seconds=prefill_seconds)
                tuning_telemetry.add(
                    ReplicaWindow(f"{setting}/{replica}", end - 60.0 * (len(batches) - 1 - index), setting, counters)
                )
    return tuning_telemetry


K3 = Static(3)
