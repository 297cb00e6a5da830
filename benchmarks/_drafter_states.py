"""Drift of EAGLE 3 by the scale of the target's states: one cause of it, apart from all others.

RMSNorm removes the scale of its input. So the bundle's target with all contributions to its residual stream multiplied by a scale
has the same outputs, and states whose norm is multiplied by it. EAGLE 3 feeds such states back, with what each step adds to them.
A drafter for each scale is trained alike, with a quarter of the questions. EAGLE 3.1 normalizes the states that it reads, so a
single training of it serves all scales.

| key                             | what is measured, one training each                                             |
|---------------------------------|---------------------------------------------------------------------------------|
| states_norm_ratio_SCALE         | norm of EAGLE 3's fed-back state in step 8 over that in step 1                  |
| states_al_k3_SCALE, _al_k7_     | acceptance length of EAGLE 3, greedy, 3 and 7 draft tokens                      |
| states_al_k3_eagle31, _al_k7_   | the same of EAGLE 3.1                                                           |
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from aerie_drafter import bundle
from aerie_drafter.train.states import load_model, load_tokenizer
from benchmarks._drafter_acceptance import answer_disturbed_prompts, run_training
from bundle import answers, corpus

SCALES = (1.0, 0.25, 0.1, 0.03)
EVERY = 4


def measure_states() -> dict[str, float]:
    """Train and measure; print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as name:
        folder = Path(name)
        items, target = corpus.items(), bundle.find_bundle_path("target")
        answers.write_answers(folder, target, items, EVERY)
        held_out = [item for item in items if item.held_out]
        torch.save({"plain": answer_disturbed_prompts(target, held_out, items)["plain"]}, folder / "texts.pt")
        for scale in SCALES:
            save_scaled_target(target, folder / f"target-{scale:g}", scale)
        runs = [("eagle3", folder / f"target-{scale:g}") for scale in SCALES] + [("eagle31", target)]
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda run: run_training(folder, run[0], 1, run[1]), runs))
    figures: dict[str, float] = {}
    print("| scale | norm ratio | AL, K = 3 | AL, K = 7 |\n|---:|---:|---:|---:|")
    for label, result in zip([*(f"{scale:g}" for scale in SCALES), "eagle31"], results, strict=True):
        figures |= _keys(label, result)
        print(f"| {label} | {result['norm_ratio']:.2f} | {result['al_k3']:.3f} | {result['al_k7']:.3f} |")
    return figures


def _keys(label: str, result: dict[str, Any]) -> dict[str, float]:
    return {f"states_{key}_{label}": round(result[key], 3) for key in ("norm_ratio", "al_k3", "al_k7")}


def save_scaled_target(target: Path, folder: Path, scale: float) -> None:
    """Write a target with the same outputs, whose states are `scale` times as large."""
    model = load_model(str(target), None, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(scale)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    model.config.rms_norm_eps *= scale**2
    model.save_pretrained(folder)
    load_tokenizer(str(target), None).save_pretrained(folder)
