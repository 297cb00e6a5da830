"""Records the metrics of examples/metrics: an hour of simulated engines, in the form that `aerie tune --metrics` reads.

    python -m scripts.record_metrics examples/metrics/chat.jsonl.gz

The engines are those of the lab's simulator, which run in virtual time, so the hour takes seconds. Each line has the page that
such an engine answers at /metrics, less the comments and the metrics that Aerie does not read, which are most of it.
Guarantee: the same packages and the same seed write the same bytes.
Not guaranteed: that a real engine has these times or this acceptance. They are parameters of this file.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from aerie.engine.metrics.names import Metric
from aerie_lab.engine.fleet import ScrapeSettings, SimulatedFleet, SimulatedPod
from aerie_lab.engine.load_generation.workload import DiurnalArrivals, LengthDistribution, TrafficClass
from aerie_lab.engine.metrics.exposition import render_exposition
from aerie_lab.engine.performance_model.acceptance import Acceptance
from aerie_lab.engine.performance_model.request import EngineSettings
from aerie_lab.engine.performance_model.step import StepTimeFormula

NUM_SPECULATIVE_TOKENS = 5
SECONDS = 3600.0
START_TIME = 1_767_225_600.0
"""Unix time at which the recording begins: 2026-01-01, 00:00 UTC."""
SEED = 1
_MODEL_NAME = "chat"
_REPLICAS = ("chat-0", "chat-1", "chat-2")
_ENGINE_AGE_SECONDS = 3600.0
_READ_LINE = re.compile(rf"({'|'.join(map(str, Metric))}|process_start_time_seconds)(_bucket|_sum|_count)?[{{ ]")
"""A line of a page with a metric that Aerie reads."""


def iterate_scrapes() -> Iterator[dict[str, object]]:
    """Yield the scrapes in order of time. The load rises and falls twice."""
    step_time = StepTimeFormula(7e-3, 2e-5, 5e-4, seconds_per_prompt_token=1e-5, log_sd=0.02)
    pods = [SimulatedPod(name, EngineSettings(num_speculative_tokens=NUM_SPECULATIVE_TOKENS), step_time) for name in _REPLICAS]
    chat = TrafficClass(
        "chat", Acceptance((0.68, 0.58, 0.5, 0.45, 0.4)), LengthDistribution(300, 0.6), LengthDistribution(200, 0.6)
    )
    arrivals = DiurnalArrivals(18.0, 0.8, peak_seconds=900.0, day_seconds=1800.0)
    fleet = SimulatedFleet(
        pods, [chat], arrivals, routing="random", scrape_settings=ScrapeSettings(interval_seconds=60.0), seed=SEED
    )
    for scrape in fleet.run(SECONDS):
        assert scrape.counters is not None, "no pod restarts, and no scrape is lost"
        page = render_exposition(scrape.counters, _MODEL_NAME, START_TIME - _ENGINE_AGE_SECONDS)
        lines = [line for line in page.splitlines(keepends=True) if _READ_LINE.match(line)]
        yield {"time": round(START_TIME + scrape.time, 3), "replica": scrape.pod, "page": "".join(lines)}


def write_recording(file: Path) -> None:
    """Write the recording, compressed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as stream:
        for scrape in iterate_scrapes():
            stream.write(json.dumps(scrape).encode() + b"\n")


if __name__ == "__main__":
    write_recording(Path(sys.argv[1]))
