"""EAGLE 3 against EAGLE 3.1 on the bundle's target, trained by the bundle's recipe: what is served, drift, and disturbed prompts.

The shipped drafters are the trainings of the recipe's own seed. Each further seed (first weights and order of the data) trains
both drafters on the same answers for the same steps. All questions are held back from every training. Acceptance is exact
(`aerie_drafter.evaluate.exact`): no drafts are drawn.

| key                             | what is measured, mean over seeds                                              |
|---------------------------------|--------------------------------------------------------------------------------|
| al_k3_*_t0, _t1, _t1_drawn      | acceptance length at temperature 0, at 1 with greedy, at 1 with drawn drafts   |
| al_k3_min_*, al_k3_max_*        | the least and the greatest of the seeds, temperature 0                         |
| al_k7_*                         | temperature 0 with 7 draft tokens, beyond the horizon of the training          |
| reachable_share_t1              | EAGLE 3.1's acceptance length over that of an exact copy, greedy drafts        |
| gain_low_*_pct                  | lower bound of EAGLE 3.1's paired gain (95 %), lowest of the seeds             |
| categories_behind               | categories of all conditions in which EAGLE 3.1 is behind, by paired intervals |
| norm_ratio_k8_*                 | norm of the fed-back state in step 8 over that in step 1                       |
| loss_template_*, loss_system_*  | acceptance length lost in another chat template, and with a system prompt      |
| perturbation_loss_ratio         | EAGLE 3's mean loss of the two over EAGLE 3.1's                                |
| al_k3_long_*, long_context_gain | after a conversation of four training lengths; EAGLE 3.1 over EAGLE 3 there    |
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from aerie_drafter import bundle
from aerie_drafter.checkpoint import load_drafter
from aerie_drafter.drift import DriftProfile, measure_drift
from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.exact import COPY_NAME, Condition, DraftSampling, ExactAcceptance, measure_exact_acceptance
from aerie_drafter.evaluate.expected import acceptance_length, paired_gain
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.evaluate.prompts import Prompt
from aerie_drafter.train.settings import parse_settings
from aerie_drafter.train.setup import build_trainer
from bundle import answers, corpus

KINDS = ("eagle3", "eagle31")
SHIPPED = 0
"""The recipe's seed."""
SEEDS = (SHIPPED, 1, 2)
STEPS = 8
LONG_TOKENS = 1024
"""Four times data.max_length of the recipe."""
CONDITIONS = {
    "t0": Condition(0.0, DraftSampling.GREEDY),
    "t1": Condition(1.0, DraftSampling.GREEDY),
    "t1_drawn": Condition(1.0, DraftSampling.DRAWN),
}
SHIFTED = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\\n' + message['content'] + '\\n\\n' }}"
    "{% endfor %}### Response:\\n"
)
SYSTEM = "You are a careful assistant. Answer briefly, in the tone of a manual."


def measure_acceptance() -> dict[str, float]:
    """Train and measure; print the tables."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as name:
        folder = Path(name)
        items = corpus.items()
        target = bundle.find_bundle_path("target")
        answers.write_answers(folder, target, items)
        held_out = [item for item in items if item.held_out]
        torch.save(answer_disturbed_prompts(target, held_out, items), folder / "texts.pt")
        runs = [(kind, seed) for seed in SEEDS for kind in KINDS]
        with ThreadPoolExecutor(2) as pool:
            measured = list(pool.map(lambda run: run_training(folder, run[0], run[1], target), runs))
            exact = list(pool.map(lambda seed: _compare(folder, target, items, seed), SEEDS))
    by_kind = {kind: [result for (run_kind, _), result in zip(runs, measured, strict=True) if run_kind == kind] for kind in KINDS}
    print(format_steps(by_kind), "\n", format_acceptance(exact), sep="\n")
    return summarize(by_kind, exact)


def summarize(by_kind: Mapping[str, Sequence[dict[str, Any]]], exact: Sequence[ExactAcceptance]) -> dict[str, float]:
    """Return the keys of the benchmark."""
    figures: dict[str, float] = {"seeds": len(exact)}
    for kind in KINDS:
        for name, condition in CONDITIONS.items():
            lengths = [_length(each, condition, kind) for each in exact]
            figures[f"al_k3_{kind}_{name}"] = round(statistics.fmean(lengths), 3)
            if name == "t0":
                figures |= {f"al_k3_min_{kind}": round(min(lengths), 3), f"al_k3_max_{kind}": round(max(lengths), 3)}
        figures |= {
            f"al_k7_{kind}": round(_mean(by_kind[kind], "al_k7"), 3),
            f"norm_ratio_k8_{kind}": round(_mean(by_kind[kind], "norm_ratio"), 3),
            f"al_k3_long_{kind}": round(statistics.fmean(result["al_k3_by_text"]["long"] for result in by_kind[kind]), 3),
        }
        for name in ("template", "system"):
            losses = [1 - result["al_k3_by_text"][name] / result["al_k3"] for result in by_kind[kind]]
            figures[f"loss_{name}_{kind}_pct"] = round(100 * statistics.fmean(losses), 1)
    t1 = CONDITIONS["t1"]
    figures["reachable_share_t1"] = round(
        statistics.fmean(_length(each, t1, "eagle31") / _length(each, t1, COPY_NAME) for each in exact), 3
    )
    for name, condition in CONDITIONS.items():
        lowest = min(paired_gain(each.counts[condition]["eagle3"], each.counts[condition]["eagle31"]).low for each in exact)
        figures[f"gain_low_{name}_pct"] = round(100 * lowest, 2)
    figures["categories_behind"] = sum(
        _gain_over_seeds(exact, condition, category).high < 0
        for condition in CONDITIONS.values()
        for category in exact[0].category_names
    )
    loss_of_3, loss_of_31 = (
        statistics.fmean(figures[f"loss_{name}_{kind}_pct"] for name in ("template", "system")) for kind in KINDS
    )
    figures["perturbation_loss_ratio"] = round(loss_of_3 / loss_of_31, 2) if loss_of_31 > 0 else math.inf
    figures["long_context_gain"] = round(figures["al_k3_long_eagle31"] / figures["al_k3_long_eagle3"], 3)
    return figures


def answer_disturbed_prompts(
    target: Path, questions: Sequence[corpus.Item], items: Sequence[corpus.Item]
) -> dict[str, list[AnsweredText]]:
    """Return the target's greedy answers to questions: as trained, disturbed, and after a long conversation of other `items`."""
    pair = ModelPair.load(target, bundle.find_bundle_path("eagle3"))
    tokenizer = pair.tokenizer
    system = {"role": "system", "content": SYSTEM}

    def encode(*before: dict[str, str]) -> list[list[int]]:
        return [
            Prompt("", messages=(*before, {"role": "user", "content": item.question})).encode(tokenizer) for item in questions
        ]

    prompts = {"plain": encode(), "system": encode(system)}
    prompts["long"] = [_encode_long(tokenizer, items, item, number) for number, item in enumerate(questions[::3])]
    tokenizer.chat_template = SHIFTED
    prompts["template"] = encode()
    options = EvaluationOptions(num_speculative_tokens=STEPS, max_tokens=96)
    return {name: answer_prompts(pair, ids, options) for name, ids in prompts.items()}


def _encode_long(tokenizer: Any, items: Sequence[corpus.Item], last: corpus.Item, number: int) -> list[int]:
    """Encode the question `last` after other questions and answers, with at least LONG_TOKENS tokens."""
    learned = [item for item in items if not item.held_out and item != last]
    messages: list[dict[str, str]] = []
    for turn in range(len(learned)):
        item = learned[(number * 37 + turn * 11) % len(learned)]
        messages += [{"role": "user", "content": item.question}, {"role": "assistant", "content": item.answer}]
        ids = Prompt("", messages=(*messages, {"role": "user", "content": last.question})).encode(tokenizer)
        if len(ids) >= LONG_TOKENS:
            return ids
    raise ValueError("the corpus has too little text for a long conversation.")


def run_training(folder: Path, kind: str, seed: int, target: Path) -> dict[str, Any]:
    """Train and measure one drafter for `target` in a process of one thread."""
    command = [sys.executable, "-m", "benchmarks._drafter_acceptance", str(folder), kind, str(seed), str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind} seed {seed}: AL {result['al_k3']:.3f} at K=3, norm ratio {result['norm_ratio']:.2f}", flush=True)
    return result


def train_and_measure(folder: Path, kind: str, seed: int, target: Path) -> dict[str, Any]:
    """Train a drafter by the bundle's recipe with `seed`, unless it is shipped, and measure it on `folder`'s answered texts."""
    if seed != SHIPPED:
        _train(folder, target, kind, seed)
    pair = ModelPair.load(target, _find_drafter(folder, kind, seed, target))
    answered: dict[str, list[AnsweredText]] = torch.load(folder / "texts.pt", weights_only=False)
    lengths = {name: evaluate_texts(pair, texts, 3).acceptance_length for name, texts in answered.items()}
    drift: DriftProfile = measure_drift(pair, answered["plain"], STEPS)
    return {
        "al_k3": lengths["plain"],
        "al_k3_by_text": lengths,
        "al_k7": evaluate_texts(pair, answered["plain"], 7).acceptance_length,
        "norm_ratio": drift.state_norm_ratio,
        "norm": drift.state_norm,
        "sink": drift.first_token_attention,
        "own": drift.draft_token_attention,
        "accepted": drift.cumulative_acceptance,
    }


def _train(folder: Path, target: Path, kind: str, seed: int) -> None:
    settings = yaml.safe_load(bundle.find_bundle_path(f"{kind}.yaml").read_text())
    settings["target"]["model"] = str(target)
    settings["data"]["train"] = [str(folder / name) for name in settings["data"]["train"]]
    output = _find_drafter(folder, kind, seed, target).parent
    settings["data"]["cache"] = str(output.with_name(f"{output.name}.tokens"))
    settings["optimizer"]["seed"] = seed
    settings["output"]["folder"] = str(output)
    build_trainer(parse_settings(settings, "the benchmark's settings")).run()


def _find_drafter(folder: Path, kind: str, seed: int, target: Path) -> Path:
    return bundle.find_bundle_path(kind) if seed == SHIPPED else folder / f"{target.name}-{kind}-{seed}" / "best"


def _compare(folder: Path, target: Path, items: Sequence[corpus.Item], seed: int) -> ExactAcceptance:
    """Return the exact acceptance of a seed's two drafters on the held-out questions."""
    pair = ModelPair.load(target, _find_drafter(folder, KINDS[0], seed, target))
    drafters = {kind: load_drafter(_find_drafter(folder, kind, seed, target), target=target) for kind in KINDS}
    prompts = [Prompt(item.category, messages=({"role": "user", "content": item.question},)) for item in items if item.held_out]
    options = EvaluationOptions(num_speculative_tokens=3, max_tokens=96, seed=seed)
    return measure_exact_acceptance(pair, drafters, prompts, options, temperatures=(0.0, 1.0))


def _length(exact: ExactAcceptance, condition: Condition, name: str) -> float:
    return float(acceptance_length(exact.counts[condition][name].sum(0)))


def _gain_over_seeds(exact: Sequence[ExactAcceptance], condition: Condition, category: str | None) -> Any:
    """Return EAGLE 3.1's gain with the counters of all seeds, by prompt."""

    def counts(kind: str) -> Tensor:
        return torch.stack([each.of_category(condition, kind, category) for each in exact]).sum(0)

    return paired_gain(counts("eagle3"), counts("eagle31"))


def format_acceptance(exact: Sequence[ExactAcceptance]) -> str:
    """Format a Markdown table: acceptance length by condition and category over all seeds, with the paired interval."""
    lines = [
        "| condition | category | EAGLE 3 | EAGLE 3.1 | copy of the target | gain | 95 % |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for name, condition in CONDITIONS.items():
        for category in exact[0].category_names:
            cells = []
            for drafter in (*KINDS, COPY_NAME):
                counts = sum((each.of_category(condition, drafter, category).sum(0) for each in exact), torch.zeros(()))
                cells.append(f"{float(acceptance_length(counts)):.3f}")
            gain = _gain_over_seeds(exact, condition, category)
            cells += [f"{gain.estimate:+.1%}", f"{gain.low:+.1%} to {gain.high:+.1%}"]
            lines.append(f"| {name} | {category or 'all'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_steps(by_kind: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Format a Markdown table: drift per step and kind, mean over seeds."""
    names = {"norm": "norm", "sink": "sink", "own": "own tokens", "accepted": "accepted"}
    lines = ["| step | " + " | ".join(f"{title} {kind}" for title in names.values() for kind in KINDS) + " |"]
    lines.append("|---:" * (1 + len(names) * len(KINDS)) + "|")
    for step in range(STEPS):
        cells = [f"{statistics.fmean(each[key][step] for each in by_kind[kind]):.3f}" for key in names for kind in KINDS]
        lines.append(f"| {step + 1} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(results: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(result[key] for result in results)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train_and_measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))))
