"""How a wrongly loaded drafter looks in an engine's metrics: the bundle's drafters with one fault each, on the bundle's target.

Greedy, the target's answers to every second of the bundle's prompts. `FAULTS` has the faults: vLLM reports an error for none
of them. Drafters were trained with a horizon of three, so position 4 is the first one beyond it.

| key                   | what is measured                                                                        |
|-----------------------|-----------------------------------------------------------------------------------------|
| al_k3_DRAFTER_FAULT   | acceptance length with three draft tokens                                               |
| qN_DRAFTER_FAULT      | acceptance at position N of the drafts whose earlier tokens were all accepted           |
| drafts_DRAFTER_FAULT  | drafts                                                                                  |
| se_*_DRAFTER          | standard error of the acceptance length, correctly loaded: by requests (their spread),    |
|                       | by drafts (as if all were independent), and as one independent draft for each request   |
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from aerie_drafter import bundle
from aerie_drafter.evaluate.acceptance import AcceptanceCounts, AnsweredText
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.model import Drafter

K = 4
SERVED_K = 3
DRAFTERS = ("eagle31", "eagle3", "weak")
_CORRECT = "right"


def measure() -> dict[str, float]:
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    texts = None
    for name in DRAFTERS:
        pair = ModelPair.load(bundle.find_bundle_path("target"), bundle.find_bundle_path(name))
        if texts is None:
            prompts = [prompt.encode(pair.tokenizer) for prompt in read_prompts(bundle.find_bundle_path("prompts.jsonl"))[::2]]
            texts = answer_prompts(pair, prompts, EvaluationOptions(num_speculative_tokens=K, max_tokens=96))
        for fault, apply in FAULTS.items():
            if name == "weak" and fault != _CORRECT:
                continue
            with torch.no_grad():
                faulty = apply(pair)
            if faulty is None:
                continue
            counts = evaluate_texts(faulty, texts, K)
            figures |= _figures(f"{name}_{fault}", counts)
            if fault == _CORRECT:
                figures |= _standard_errors(name, faulty, texts, counts)
            rates = " ".join(f"{rate:.3f}" for rate in counts.conditional_rates)
            print(f"{name:8} {fault:20} AL {figures[f'al_k3_{name}_{fault}']:.3f} at K=3   {rates}", flush=True)
    return figures


def _figures(name: str, counts: AcceptanceCounts) -> dict[str, float]:
    figures = {f"al_k3_{name}": round(1 + sum(counts.acceptance_rates[:SERVED_K]), 3)}
    figures |= {
        f"q{position}_{name}": round(rate, 3) for position, rate in enumerate(counts.conditional_rates, 1) if rate == rate
    }
    return figures | {f"drafts_{name}": counts.drafts}


def _standard_errors(name: str, pair: ModelPair, texts: Sequence[AnsweredText], total: AcceptanceCounts) -> dict[str, float]:
    """Measure the errors of the acceptance length at SERVED_K; that by requests is of a ratio of sums."""
    by_request = [evaluate_texts(pair, [text], K) for text in texts]
    length = 1 + sum(total.acceptance_rates[:SERVED_K])
    residuals = [counts.drafts + sum(counts.accepted_per_position[:SERVED_K]) - length * counts.drafts for counts in by_request]
    accepted = total.accepted_per_position[:SERVED_K]
    square = sum((2 * position - 1) * count for position, count in enumerate(accepted, 1)) / total.drafts
    deviation = math.sqrt(square - (length - 1) ** 2)
    errors = {
        "requests": math.sqrt(sum(residual**2 for residual in residuals)) / total.drafts,
        "drafts": deviation / math.sqrt(total.drafts),
        "one_per_request": deviation / math.sqrt(len(by_request)),
    }
    print(f"{name:8} standard errors: {errors}", flush=True)
    return {f"se_{key}_{name}": round(error, 4) for key, error in errors.items()} | {"requests": len(by_request)}


def _with_config(pair: ModelPair, **changes: Any) -> ModelPair | None:
    """Return the pair with switches as another engine or configuration has them; None if they are so already."""
    changed = replace(pair.drafter.config, **changes)
    if changed == pair.drafter.config:
        return None
    drafter = Drafter(changed)
    drafter.load_state_dict(pair.drafter.state_dict(), strict=False)
    return replace(pair, drafter=drafter.requires_grad_(False))


def _with_layers(pair: ModelPair, shift: int) -> ModelPair:
    layers = tuple(layer + shift for layer in pair.drafter.config.aux_layer_ids)
    return replace(pair, target=TargetRunner(pair.target.model, layers))


def _with_weights(pair: ModelPair, change: Callable[[Drafter], None]) -> ModelPair:
    drafter = copy.deepcopy(pair.drafter)
    change(drafter)
    return replace(pair, drafter=drafter)


def _exchange_layers(drafter: Drafter) -> None:
    """Reverse the parts of fc: the states of the layers arrive in another order."""
    width = drafter.config.target_hidden_size
    drafter.fc.weight.copy_(torch.cat(torch.split(drafter.fc.weight, width, dim=1)[::-1], dim=1))


def _lose_weights(drafter: Drafter) -> None:
    """Replace the drafter's own weights by random ones; the embedding is the target's."""
    torch.manual_seed(0)
    for name, weight in drafter.named_parameters():
        if weight.ndim == 2 and not name.startswith("embed_tokens"):
            weight.normal_(std=0.02)


def _ignore_vocabulary(drafter: Drafter) -> None:
    drafter.d2t.zero_()


FAULTS: Mapping[str, Callable[[ModelPair], ModelPair | None]] = {
    _CORRECT: lambda pair: pair,
    "norm_output_flipped": lambda pair: _with_config(pair, norm_output=not pair.drafter.config.norm_output),
    "switches_ignored": lambda pair: _with_config(pair, norm_output=False, fc_norm=False),
    "residual_flipped": lambda pair: _with_config(pair, norm_before_residual=not pair.drafter.config.norm_before_residual),
    "layers_one_lower": lambda pair: _with_layers(pair, -1),
    "layers_one_higher": lambda pair: _with_layers(pair, 1),
    "layers_exchanged": lambda pair: _with_weights(pair, _exchange_layers),
    "vocabulary_ignored": lambda pair: _with_weights(pair, _ignore_vocabulary),
    "weights_lost": lambda pair: _with_weights(pair, _lose_weights),
}
"""Faults by name: None where the drafter cannot have it."""
