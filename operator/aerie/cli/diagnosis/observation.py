"""What was read of one engine, and the counters of the time in between.

Guarantees: a restart in between is a `CommandError`, never a rate. Without requests in that time the counters since the engine's
start take their place, and `is_since_start` is true.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.cli.console import CommandError
from aerie.cli.diagnosis.engine_reader import EngineReader
from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie.engine.metrics.sample import CounterReset, Counters, Sample, diff_samples
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, SpeculationSettingError, Static

READS = 7
"""Reads of /metrics: the counters need two. Gauges are values of an instant, so a queue that stands needs several."""


@dataclass(frozen=True)
class EngineObservation:
    """Answers of one engine."""

    address: str
    version: str
    """vLLM's version; empty where the engine does not tell."""
    models: tuple[str, ...]
    """Served model names; empty where the engine does not tell."""
    samples: tuple[Sample, ...]
    """All reads of /metrics, in order of time."""
    seconds: float
    """Time between the first and the last sample; 0 for a single read."""
    speculative_config: Mapping[str, Any] | None = None
    """Speculative config of the pod's command line; None: not readable, as at a URL."""

    @property
    def is_since_start(self) -> bool:
        """Whether the counters are those since the engine's start."""
        return not self.seconds or not _window(self.samples).request_steps

    @property
    def counters(self) -> Counters:
        """Counters of the time in between; those since the start without requests in it. Raises CommandError: a restart."""
        return self.samples[-1].counters if self.is_since_start else _window(self.samples)

    @property
    def setting(self) -> SpeculationSetting:
        """The setting: of the command line, else a fixed K with as many tokens as the engine counts positions."""
        speculation = self.samples[-1].counters.speculation
        if speculation is None:
            return Off()
        positions = len(speculation.accepted_per_position) or int(
            (self.speculative_config or {}).get("num_speculative_tokens", 0)
        )
        if not positions:
            return Off()  # the front end in Rust, before the first accepted token
        return _read_setting(self.speculative_config or {}, positions)

    @property
    def request_count(self) -> float:
        """Number of requests that the counters are of."""
        running = 0.0 if self.is_since_start else self.samples[0].gauges.running_requests or 0.0
        return self.counters.first_tokens + running


def _window(samples: Sequence[Sample]) -> Counters:
    window = diff_samples(samples[0], samples[-1])
    if isinstance(window, CounterReset):
        raise CommandError(f"{window.message.rstrip('.')}: wait until it serves, and diagnose it again.")
    return window


def _read_setting(config: Mapping[str, Any], positions: int) -> SpeculationSetting:
    if config.get("enable_adaptive_verification") is True:
        return Adaptive(positions)
    try:
        tiers = tuple(ScheduleTier(*map(int, tier)) for tier in config.get("num_speculative_tokens_per_batch_size") or ())
        return Schedule(tiers, positions) if tiers else Static(positions)
    except (SpeculationSettingError, TypeError, ValueError):
        return Static(positions)


def observe_engine(
    reader: EngineReader,
    duration: float,
    speculative_config: Mapping[str, Any] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> EngineObservation:
    """Read an engine. `duration`: seconds between the first and the last read; 0 for a single one. Raises CommandError."""
    version = _read_version(reader)
    samples, start = [_read_sample(reader, version)], time.monotonic()
    for _ in range(READS - 1 if duration else 0):
        sleep(duration / (READS - 1))
        samples.append(_read_sample(reader, version))
    seconds = max(duration, time.monotonic() - start) if duration else 0.0
    return EngineObservation(reader.address, version, _read_models(reader), tuple(samples), seconds, speculative_config)


def _read_version(reader: EngineReader) -> str:
    answer = reader.get("/version")
    document = _parse_object(answer.body) if answer.status == 200 else {}
    version = document.get("version")
    return version if isinstance(version, str) and len(version) <= 64 else ""


def _read_models(reader: EngineReader) -> tuple[str, ...]:
    answer = reader.get("/v1/models")
    data = _parse_object(answer.body).get("data") if answer.status == 200 else None
    items = data if isinstance(data, list) else []
    return tuple(str(item["id"])[:200] for item in items if isinstance(item, dict) and "id" in item)


def _read_sample(reader: EngineReader, version: str) -> Sample:
    answer = reader.get("/metrics")
    subject = f"{reader.address}/metrics" if reader.address.startswith("http") else f"/metrics of {reader.address}"
    if answer.status in (401, 403):
        raise CommandError(f"{subject} answers with status {answer.status}: set the API key with --key-file FILE.")
    if answer.status != 200:
        what = "the engine has no metrics there" if version else "it is no vLLM engine"
        raise CommandError(f"{subject} answers with status {answer.status}: {what}. Set the address of vLLM's API server.")
    if b"vllm:" not in answer.body and version:
        raise CommandError(f"{subject} has no metrics of vLLM {version}: start the engine without --disable-log-stats.")
    try:
        return parse_exposition(answer.body)
    except ExpositionError as error:
        raise CommandError(f"{subject}: {error}") from None


def _parse_object(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
