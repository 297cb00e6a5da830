"""A refresh of the bundle's EAGLE 3.1 drafter after a shift of traffic: from captured prompts to the drafter that is served.

The old domain is the questions that the drafter was trained on, `bundle.domains` defines the new one. Requests of the new domain
go through the recorder's own parser and encoder, as `spec.capture` has them. `aerie-drafter refresh` runs with its defaults,
except for SETTINGS, once for each seed (the order of the data). Acceptance lengths are of prompts that no training saw, K = 3,
greedy. PARTS=offline or PARTS=served runs one part alone; the second serves the drafter of the first seed.

| key                        | what is measured                                                                          |
|----------------------------|-------------------------------------------------------------------------------------------|
| refresh_recovered_pct      | of the acceptance length that the shift cost, the share that is back; mean over seeds      |
| refresh_recovered_min_pct  | the least of the seeds                                                                    |
| refresh_old_loss_pct       | loss on the old domain, greatest of the seeds; negative: it gained                         |
| exported                   | seeds whose drafter was exported, by the command's own decision                           |
| al_old_*, al_new_*         | acceptance length of the served and the refreshed drafter on both domains, mean over seeds |
| draft_vocabulary_pct       | answers' tokens of the new domain that the drafter can propose at all                      |
| *_s                        | seconds of each step on one core, mean over seeds                                         |
| served_*                   | the same of real vLLM on CPU                                                              |
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from aerie.recorder.prompts import encode_line, parse_request
from aerie_drafter import bundle
from aerie_drafter.evaluate.offline import sum_acceptance
from aerie_drafter.evaluate.prompts import Prompt, read_prompts
from aerie_drafter.evaluate.server import VllmServer
from aerie_lab.binaries import ensure_family
from aerie_lab.testing.agreement import build_speculative_config, start_engine
from benchmarks._parts import measure_parts, name_result
from bundle import answers, corpus
from bundle.domains import build_new_requests

SEEDS = (1, 2, 3)
EVERY = 8
"""One in EVERY questions is an old conversation of the training."""
CAPTURED = 400
HELD_OUT = 80
SETTINGS: dict[str, Any] = {
    "answers": {"max_tokens": 128, "batch_size": 48},
    "data": {"max_length": 1024},
    "loss": {"horizon": 3},
    "optimizer": {"learning_rate": 3e-4, "epochs": 4},
    "prompts": {"held_out_share": 0.2},
    "evaluation": {"max_tokens": 96},
}


def measure() -> dict[str, float]:
    return measure_parts(PARTS)


def result_name() -> str:
    return name_result("refresh", PARTS)


def measure_offline() -> dict[str, float]:
    """Refresh once for each seed."""
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as name:
        folder = Path(name)
        prepare(folder)
        reports = [run_refresh(folder, seed) for seed in SEEDS]
    print(format_table(reports))
    return summarize(reports)


def prepare(folder: Path) -> None:
    """Write what a refresh reads: captured prompts, old conversations, and old prompts that no training saw."""
    items = corpus.items()
    answers.write_answers(folder, bundle.find_bundle_path("target"), items, EVERY)
    (folder / "captured").mkdir()
    requests = build_new_requests(held_out=False)
    lines = [record(request) for request in requests[:: len(requests) // CAPTURED][:CAPTURED]]
    (folder / "captured" / "prompts.jsonl").write_bytes(b"".join(lines))


def record(request: dict[str, Any]) -> bytes:
    """Return the line that the recorder writes of a request."""
    parsed = parse_request({"model": "docs", "temperature": 0, **request})
    if not isinstance(parsed, tuple):
        raise TypeError(f"the recorder skips the request: {parsed}")
    line = encode_line(*parsed, datetime.now(UTC))
    if not isinstance(line, bytes):
        raise TypeError(f"the recorder skips the request: {line}")
    return line


def write_lines(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def run_refresh(folder: Path, seed: int) -> dict[str, Any]:
    """Run the command in a process of one thread, and return its report."""
    settings = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "seed": seed}}
    file = folder / f"{seed}.yaml"
    file.write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "aerie_drafter.cli",
        "refresh",
        str(bundle.find_bundle_path("eagle31")),
        str(folder / f"refreshed-{seed}"),
    ]
    command += [
        "--target",
        str(bundle.find_bundle_path("target")),
        "--prompts",
        str(folder / "captured"),
        "--settings",
        str(file),
    ]
    command += ["--old", str(folder / "answers.jsonl"), "--old-held-out", str(folder / "prompts.jsonl"), "-o", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: not exported, which is a result
        raise RuntimeError(f"the refresh with seed {seed} ended with status {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def summarize(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Return the keys of the offline part."""

    def mean(values: list[float]) -> float:
        return statistics.fmean(values)

    recovered = [100 * (report["recovered_share"] or 0.0) for report in reports]
    lengths = {
        f"al_{domain}_{drafter}": round(mean([report[domain][drafter] for report in reports]), 3)
        for domain in ("old", "new")
        for drafter in ("served", "refreshed")
    }
    seconds = {f"{step}_s": round(mean([report["seconds"][step] for report in reports]), 1) for step in reports[0]["seconds"]}
    return {
        "seeds": len(reports),
        "refresh_recovered_pct": round(mean(recovered), 1),
        "refresh_recovered_min_pct": round(min(recovered), 1),
        "refresh_old_loss_pct": round(max(-100 * report["old"]["gain"] for report in reports), 2),
        "exported": sum(report["accepted"] for report in reports),
        **lengths,
        "draft_vocabulary_pct": round(100 * mean([report["draft_vocabulary_coverage"] for report in reports]), 1),
        **seconds,
    }


def format_table(reports: list[dict[str, Any]]) -> str:
    """Format a Markdown table with a row for each seed and domain."""
    lines = [
        "| seed | domain | prompts | AL served | AL refreshed | gain | 95 % interval |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for seed, report in zip(SEEDS, reports, strict=True):
        for domain in ("new", "old"):
            row = report[domain]
            numbers = f"{row['prompts']} | {row['served']:.3f} | {row['refreshed']:.3f} | {row['gain']:+.1%}"
            lines.append(f"| {seed} | {domain} | {numbers} | {row['low']:+.1%} to {row['high']:+.1%} |")
    return "\n".join(lines)


def measure_served() -> dict[str, float]:
    """Serve the drafter before and after a refresh with real vLLM, and measure both domains by its counters."""
    vllm = ensure_family("vllm", lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as name:
        folder = Path(name)
        prepare(folder)
        report = run_refresh(folder, SEEDS[0])
        refreshed = folder / f"refreshed-{SEEDS[0]}"
        if not report["accepted"]:
            refreshed = refreshed.with_name(f"{refreshed.name}.work") / "training" / "best"
        domains = {
            "new": read_prompts(write_lines(folder / "new.jsonl", build_new_requests(held_out=True)[:HELD_OUT])),
            "old": read_prompts(folder / "prompts.jsonl")[:HELD_OUT],
        }
        figures: dict[str, float] = {}
        for label, drafter in (("served", bundle.find_bundle_path("eagle31")), ("refreshed", refreshed)):
            with start_engine("real", vllm, folder, f"--speculative-config={build_speculative_config(drafter)}") as engine:
                for domain, prompts in domains.items():
                    length = asyncio.run(measure_server(str(engine.client.base_url), prompts))
                    figures[f"served_al_{domain}_{label}"] = round(length, 3)
    lost = figures["served_al_old_served"] - figures["served_al_new_served"]
    gained = figures["served_al_new_refreshed"] - figures["served_al_new_served"]
    return figures | {
        "served_recovered_pct": round(100 * gained / lost, 1),
        "served_old_loss_pct": round(100 * (1 - figures["served_al_old_refreshed"] / figures["served_al_old_served"]), 2),
    }


async def measure_server(url: str, prompts: list[Prompt]) -> float:
    """Return the acceptance length of greedy answers to the prompts."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        evaluation = await VllmServer(client, "agreement").evaluate(prompts, max_tokens=96, temperature=0.0, concurrency=4)
    return sum_acceptance(evaluation.acceptance_by_category).acceptance_length


PARTS = {"offline": measure_offline, "served": measure_served}
