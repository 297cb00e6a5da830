"""EAGLE 3 against EAGLE 3.1 on the bundle's target: the part of `make bench NAME=drafter` about what is served.

Both are trained alike, on the same answers with a horizon of 3, once for each seed (first weights and order of the data), with
less than the bundle's budget. Measured on questions that were in no training, greedy:

| key                                      | what is measured, mean over seeds                                               |
|------------------------------------------|---------------------------------------------------------------------------------|
| al_k3_*, al_k7_*                         | acceptance length with 3 and 7 drafted tokens                                   |
| al_k3_min_*, al_k3_max_*                 | the least and the greatest of the seeds                                         |
| al_k7_template_shift_*                   | the same questions in a chat template that neither target nor drafter has seen  |
| al_k7_length_x4_*                        | a conversation of 1,024 tokens before the question; trainings were of 256       |
| norm_ratio_k8_*                          | length of the fed-back state in step 8 over that in step 1                      |
| sink_k1_*, sink_k8_*, own_k8_*           | attention mass on the first token, and on the drafter's own tokens              |
| accepted_k8_*                            | share of drafts whose 8 tokens are all accepted                                 |
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from aerie_drafter import bundle
from aerie_drafter.drift import measure_drift
from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.evaluate.prompts import Prompt
from aerie_drafter.train.settings import parse_settings
from aerie_drafter.train.setup import build_trainer
from bundle import answers, corpus

KINDS = ("eagle3", "eagle31")
SEEDS = (1, 2, 3)
EVERY, EPOCHS, LENGTH = 4, 3, 256  # a quarter of the questions
STEPS = 8
SHIFTED = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\\n' + message['content'] + '\\n\\n' }}"
    "{% endfor %}### Response:\\n"
)


def measure_served() -> dict[str, float]:
    """Measure everything; print the table of steps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as name:
        folder = Path(name)
        items = corpus.items()
        answers.write_answers(folder, bundle.find_bundle_path("target"), items, EVERY)
        torch.save(evaluation_texts(items), folder / "texts.pt")
        runs = [(kind, seed) for seed in SEEDS for kind in KINDS]
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda run: in_process(folder, *run), runs))
    by_kind = {kind: [result for (run_kind, _), result in zip(runs, results, strict=True) if run_kind == kind] for kind in KINDS}
    print(steps_table(by_kind))
    figures: dict[str, float] = {}
    for key in ("al_k3", "al_k7", "al_k7_template_shift", "al_k7_length_x4", "norm_ratio_k8"):
        figures |= {f"{key}_{kind}": round(_mean(by_kind[kind], key), 3) for kind in KINDS}
    for kind in KINDS:
        lengths = [result["al_k3"] for result in by_kind[kind]]
        figures |= {f"al_k3_min_{kind}": round(min(lengths), 3), f"al_k3_max_{kind}": round(max(lengths), 3)}
        for key, step in (("sink", 0), ("sink", STEPS - 1), ("own", STEPS - 1), ("accepted", STEPS - 1)):
            figures[f"{key}_k{step + 1}_{kind}"] = round(_mean_step(by_kind[kind], key, step), 4)
    return figures | {"seeds": len(SEEDS)}


def evaluation_texts(items: list[corpus.Item]) -> dict[str, list[AnsweredText]]:
    """Return the target's greedy answers to held-out questions: as trained, in another template, after a long conversation."""
    pair = ModelPair.load(bundle.find_bundle_path("target"), bundle.find_bundle_path("eagle3"))
    tokenizer = pair.tokenizer
    held_out = [item for item in items if item.held_out][::2]
    plain = [Prompt("", messages=({"role": "user", "content": item.question},)).encode(tokenizer) for item in held_out]
    long = [_long(tokenizer, items, item, number) for number, item in enumerate(held_out[::4])]
    tokenizer.chat_template = SHIFTED
    shifted = [Prompt("", messages=({"role": "user", "content": item.question},)).encode(tokenizer) for item in held_out]
    options = EvaluationOptions(num_speculative_tokens=STEPS, max_tokens=96)
    return {
        "plain": answer_prompts(pair, plain, options),
        "shifted": answer_prompts(pair, shifted, options),
        "long": answer_prompts(pair, long, options),
    }


def _long(tokenizer: Any, items: list[corpus.Item], last: corpus.Item, number: int) -> list[int]:
    """Encode the question `last` after other questions and answers, with at least four training lengths of tokens."""
    learned = [item for item in items if not item.held_out]
    messages: list[dict[str, str]] = []
    for turn in range(len(learned)):
        item = learned[(number * 37 + turn * 11) % len(learned)]
        messages += [{"role": "user", "content": item.question}, {"role": "assistant", "content": item.answer}]
        ids = Prompt("", messages=(*messages, {"role": "user", "content": last.question})).encode(tokenizer)
        if len(ids) >= 4 * LENGTH:
            return ids
    raise ValueError("the corpus has too little text for a long conversation.")


def in_process(folder: Path, kind: str, seed: int) -> dict[str, Any]:
    """Train and measure one drafter in a process of one thread."""
    command = [sys.executable, "-m", "benchmarks._drafter_drift", str(folder), kind, str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind} seed {seed}: AL {result['al_k3']:.3f} at K=3, norm ratio {result['norm_ratio_k8']:.2f}", flush=True)
    return result


def train_and_measure(folder: Path, kind: str, seed: int) -> dict[str, Any]:
    """Train one drafter and measure it."""
    new = kind == "eagle31"
    target = bundle.find_bundle_path("target")
    output = folder / f"{kind}-{seed}"
    settings = {
        "target": {"model": str(target)},
        "drafter": {
            "aux_layer_ids": [1, 2, 3],
            "draft_vocab_size": 1024,
            "intermediate_size": 512,
            "fc_norm": new,
            "norm_output": new,
        },
        "data": {"train": [str(folder / "answers.jsonl")], "max_length": LENGTH, "packing": True},
        "loss": {"horizon": 3},
        "optimizer": {"learning_rate": 1e-3, "warmup_ratio": 0.05, "epochs": EPOCHS, "batch_size_per_process": 8, "seed": seed},
        "output": {"folder": str(output), "evaluate_every": 40},
    }
    build_trainer(parse_settings(settings, "the benchmark's settings")).run()
    pair = ModelPair.load(target, output / "best")
    answered: dict[str, list[AnsweredText]] = torch.load(folder / "texts.pt", weights_only=False)
    drift = measure_drift(pair, answered["plain"], STEPS)
    return {
        "al_k3": evaluate_texts(pair, answered["plain"], 3).acceptance_length,
        "al_k7": evaluate_texts(pair, answered["plain"], 7).acceptance_length,
        "al_k7_template_shift": evaluate_texts(pair, answered["shifted"], 7).acceptance_length,
        "al_k7_length_x4": evaluate_texts(pair, answered["long"], 7).acceptance_length,
        "norm_ratio_k8": drift.state_norm_ratio,
        "norm": drift.state_norm,
        "sink": drift.first_token_attention,
        "own": drift.draft_token_attention,
        "accepted": drift.cumulative_acceptance,
    }


def steps_table(by_kind: dict[str, list[dict[str, Any]]]) -> str:
    """Format a Markdown table: per step and kind the mean over seeds."""
    names = {"norm": "norm", "sink": "sink", "own": "own tokens", "accepted": "accepted"}
    lines = ["| step | " + " | ".join(f"{title} {kind}" for title in names.values() for kind in KINDS) + " |"]
    lines.append("|---:" * (1 + len(names) * len(KINDS)) + "|")
    for step in range(STEPS):
        cells = [f"{_mean_step(by_kind[kind], key, step):.3f}" for key in names for kind in KINDS]
        lines.append(f"| {step + 1} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(results: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(result[key] for result in results)


def _mean_step(results: list[dict[str, Any]], key: str, step: int) -> float:
    return statistics.fmean(result[key][step] for result in results)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train_and_measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
