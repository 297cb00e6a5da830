"""A refresh of the bundle's EAGLE 3.1 drafter after a shift of traffic: from captured prompts to the drafter that is served.

The old domain is the questions that the drafter was trained on, `bundle.domains` defines the new one.

    offline   requests of the new domain go through the recorder's own parser and encoder, and `aerie-drafter refresh` runs once
              for each seed (the order of the data). Acceptance lengths are of prompts that no training saw, K = 3, greedy
    loop      the run of `make demo SHOW=refresh`: operator, gateway, recorder and real vLLM on CPU, in the lab

Both have the settings of the demo. PARTS=offline or PARTS=loop runs one part alone. With SAVE=1, each writes its section of
docs/measurements/refresh.md. The second also writes the table of docs/measurements/README.md, results/refresh-timeline.json, and
the picture that is drawn from it.

| key                        | what is measured                                                                           |
|----------------------------|--------------------------------------------------------------------------------------------|
| refresh_recovered_pct      | of the acceptance length that the shift cost, the share that is back; mean over seeds       |
| refresh_recovered_min_pct  | the least of the seeds                                                                     |
| refresh_old_loss_pct       | loss on the old domain, greatest of the seeds; negative: it gained                          |
| exported                   | seeds whose drafter was exported, by the command's own decision                            |
| al_old_*, al_new_*         | acceptance length of the served and the refreshed drafter on both domains, mean over seeds  |
| draft_vocabulary_pct       | answers' tokens of the new domain that the drafter can propose at all                       |
| *_s                        | seconds of each step on one core, mean over seeds                                          |
| loop_al_*                  | acceptance length before the shift, after it, and after the refresh, by vLLM's counters     |
| loop_recovered_pct         | the share that is back, of texts of topics that were not recorded                           |
| loop_old_loss_pct          | loss on questions that no training saw                                                     |
| loop_gain_pct and bounds   | tokens per step of the refreshed drafter to the served one, in the rollout in place         |
| loop_*_s                   | seconds of the refresh and of the rollout, under traffic                                    |
| loop_requests              | requests that were answered; the run ends with an error if one failed                       |
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from aerie.recorder.prompts import encode_line, parse_request
from aerie_drafter import bundle
from aerie_lab.cli.demo_refresh import SETTINGS_FILE, choose_evenly, run_refresh_demo
from benchmarks._parts import measure_parts, name_result, replace_section
from bundle import answers, corpus
from bundle.domains import build_new_requests
from scripts.pictures import draw_refresh

SEEDS = (1, 2, 3)
EVERY = 2
"""One in EVERY questions is an old conversation of the training."""
CAPTURED = 400
HERE = Path(__file__).resolve().parent
TIMELINE_FILE = HERE / "results" / "refresh-timeline.json"

_sections: dict[str, str] = {}
_timelines: list[dict[str, Any]] = []


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
    figures = summarize(reports)
    _sections["offline"] = f"{format_table(reports)}\n\n{describe_offline(figures)}"
    print(_sections["offline"])
    return figures


def prepare(folder: Path) -> None:
    """Write what a refresh reads: captured prompts, old conversations, and old prompts that no training saw."""
    items = corpus.items()
    answers.write_answers(folder, bundle.find_bundle_path("target"), items, EVERY)
    (folder / "captured").mkdir()
    requests = build_new_requests(held_out=False)
    lines = [record(request) for request in choose_evenly(requests, CAPTURED)]
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


def run_refresh(folder: Path, seed: int) -> dict[str, Any]:
    """Run the command in a process of one thread, and return its report."""
    settings = yaml.safe_load(SETTINGS_FILE.read_text())
    settings["optimizer"]["seed"] = seed
    file = folder / f"{seed}.yaml"
    file.write_text(json.dumps(settings))
    served, target = (str(bundle.find_bundle_path(name)) for name in ("eagle31", "target"))
    command = [sys.executable, "-m", "aerie_drafter.cli", "refresh", served, str(folder / f"refreshed-{seed}")]
    command += ["--target", target, "--prompts", str(folder / "captured"), "--settings", str(file)]
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


def describe_offline(figures: dict[str, float]) -> str:
    """Describe the measured values of the offline part in a sentence for each."""
    minutes = sum(figures[f"{step}_s"] for step in ("select", "answer", "train", "evaluate")) / 60
    return (
        f"Recovered: {figures['refresh_recovered_pct']:.0f} % of the lost acceptance length, "
        f"{figures['refresh_recovered_min_pct']:.0f} % with the worst seed. "
        f"Loss on questions: {figures['refresh_old_loss_pct']:+.1f} % with the worst seed. "
        f"Exported: {figures['exported']:.0f} of {figures['seeds']:.0f}. "
        f"Time of a refresh on one core: {minutes:.1f} minutes."
    )


def measure_loop() -> dict[str, float]:
    """Run the demo, and measure both domains by vLLM's counters."""
    timeline = run_refresh_demo("refresh-bench")
    _timelines.append(timeline)
    figures = summarize_timeline(timeline)
    _sections["loop"] = f"{format_timeline(timeline)}\n\n{describe_loop(figures)}"
    return figures


def summarize_timeline(timeline: dict[str, Any]) -> dict[str, float]:
    """Return the keys of the loop."""
    questions, _, served, trial, refreshed, questions_after = timeline["stages"]
    old, new, new_after, old_after = (stage["acceptance_length"] for stage in (questions, served, refreshed, questions_after))
    bounds = {"estimate": "gain", "lower": "gain_lower", "upper": "gain_upper"}
    return {
        "loop_al_old_served": old,
        "loop_al_new_served": new,
        "loop_al_new_refreshed": new_after,
        "loop_al_old_refreshed": old_after,
        "loop_recovered_pct": round(100 * (new_after - new) / (old - new), 1) if old > new else 0.0,
        "loop_old_loss_pct": round(100 * (1 - old_after / old), 2),
        **{f"loop_{bounds[key]}_pct": round(100 * timeline["rollout"][key], 1) for key in bounds},
        "loop_captured": timeline["refresh"]["captured"],
        "loop_refresh_s": round(sum(timeline["refresh"]["seconds"].values()), 1),
        "loop_rollout_s": round(trial["end"] - trial["begin"], 1),
        "loop_minutes": round(questions_after["end"] / 60, 1),
        "loop_requests": sum(stage["requests"] for stage in timeline["stages"]),
    }


def format_timeline(timeline: dict[str, Any]) -> str:
    """Format a Markdown table with a row for each stage."""
    lines = ["| requests and drafter | from | to | AL | requests |", "|---|---:|---:|---:|---:|"]
    for stage in timeline["stages"]:
        times = f"{stage['begin'] / 60:.1f} min | {stage['end'] / 60:.1f} min"
        lines.append(f"| {stage['name']} | {times} | {stage['acceptance_length']:.2f} | {stage['requests']} |")
    return "\n".join(lines)


def describe_loop(figures: dict[str, float]) -> str:
    """Describe the measured values of the loop in a sentence for each."""
    return (
        f"Recovered: {figures['loop_recovered_pct']:.0f} % of the lost acceptance length. Loss on questions: "
        f"{figures['loop_old_loss_pct']:+.1f} %. The rollout measured {figures['loop_gain_pct']:+.1f} % tokens per step, bounds "
        f"{figures['loop_gain_lower_pct']:+.1f} to {figures['loop_gain_upper_pct']:+.1f} %. The refresh of "
        f"{figures['loop_captured']:.0f} recorded prompts took {figures['loop_refresh_s'] / 60:.1f} minutes beside the traffic, "
        f"the rollout {figures['loop_rollout_s'] / 60:.1f}. None of {figures['loop_requests']:.0f} requests failed."
    )


def format_row(figures: dict[str, float]) -> str:
    """Format the table of the loop for the page of all measured values."""
    lengths = " to ".join(f"{figures[f'loop_al_{name}']:.2f}" for name in ("old_served", "new_served"))
    row = (
        f"| requests change from questions to texts, and a refresh on recorded prompts follows, to its promotion in place | "
        f"acceptance length from {lengths}, then {figures['loop_al_new_refreshed']:.2f}; on questions "
        f"{figures['loop_al_old_refreshed']:.2f} ([details](refresh.md)) |"
    )
    return f"| | |\n| --- | --- |\n{row}"


def document(docs: Path) -> None:
    """Write the section of each part that ran; of the loop also its timeline and the picture."""
    page = docs / "refresh.md"
    text = page.read_text()
    for name, written in _sections.items():
        text = replace_section(text, name, written)
    page.write_text(text)
    for timeline in _timelines:
        index = docs / "README.md"
        index.write_text(replace_section(index.read_text(), "refresh", format_row(summarize_timeline(timeline))))
        TIMELINE_FILE.write_text(json.dumps(timeline, indent=1) + "\n")
        (docs.parent / "pictures" / "refresh.svg").write_text(draw_refresh(timeline).render())


PARTS = {"offline": measure_offline, "loop": measure_loop}
