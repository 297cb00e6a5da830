"""What disturbed prompts cost the bundle's drafters after a training with varied prompts.

`make bench NAME=drafter` measures what the bundle's drafters lose with another chat template, with a system prompt, and after a
conversation of four training lengths. No training saw any of these. Here each shipped drafter is trained further on the target's
answers to training questions, with chat templates and system prompts that are none of the measured ones: the data of a deployment
has several. Both are measured on the held-out questions of `drafter`. Temperature 0, K = 3, one training for each drafter.

| key                                  | what is measured                                                           |
|--------------------------------------|----------------------------------------------------------------------------|
| al_k3_FORM_*, al_k3_FORM_*_varied    | acceptance length of the shipped drafter, and after the further training   |
| perturbation_loss_*_pct              | mean loss of template and system, of plain                                 |
| perturbation_loss_ratio_varied       | EAGLE 3's loss over EAGLE 3.1's, both trained on varied prompts            |
| long_context_gain_varied             | after a long conversation: EAGLE 3.1 over EAGLE 3, both trained so         |
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import yaml

from aerie_drafter import bundle
from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.evaluate.prompts import Prompt
from aerie_drafter.train.conversations import TokenSequence
from aerie_drafter.train.settings import parse_settings
from aerie_drafter.train.setup import build_trainer
from benchmarks._drafter_acceptance import KINDS, STEPS, answer_disturbed_prompts
from bundle import corpus

FORMS = ("plain", "template", "system", "long")
PERTURBATIONS = ("template", "system")
EPOCHS = 3
LEARNING_RATE = 5e-4
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] ",
    "{{ bos_token }}{% for m in messages %}{{ m['role'].upper() }}: {{ m['content'] }}\n{% endfor %}ASSISTANT:",
    "{{ bos_token }}{% for m in messages %}{{ '= ' if m['role'] == 'system' else 'Q: ' }}{{ m['content'] }}\n{% endfor %}A: ",
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}\n---\n{% endfor %}assistant\n",
)
"""Templates in the manner of real ones. None has the marks of the measured one."""
SYSTEMS = (
    "",
    "You are a helpful assistant.",
    "Answer questions about the Python library. Do not guess.",
    "The user is a programmer. Reply in plain text, without examples, and stop when the question is answered.",
)


def measure() -> dict[str, float]:
    """Train each drafter further on various templates and system prompts; print the acceptance lengths."""
    torch.set_num_threads(1)
    items, target = corpus.items(), bundle.find_bundle_path("target")
    learned, held_out = ([item for item in items if item.held_out is is_held_out] for is_held_out in (False, True))
    texts = answer_disturbed_prompts(target, held_out, items)
    varied = answer_varied_prompts(target, learned)
    lengths: dict[str, float] = {}
    for kind in KINDS:
        lengths |= measure_lengths(target, bundle.find_bundle_path(kind), texts, kind)
        with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder:
            lengths |= measure_lengths(target, train_further(Path(folder), target, kind, varied), texts, f"{kind}_varied")
    return {key: round(value, 3) for key, value in (lengths | summarize(lengths)).items()}


def answer_varied_prompts(target: Path, questions: Sequence[corpus.Item]) -> list[AnsweredText]:
    """Return the target's greedy answers to questions; each has one of TEMPLATES or the target's own, and one of SYSTEMS."""
    pair = ModelPair.load(target, bundle.find_bundle_path(KINDS[0]))
    templates = (pair.tokenizer.chat_template, *TEMPLATES)
    prompts = []
    for number, item in enumerate(questions):
        pair.tokenizer.chat_template = templates[number % len(templates)]
        system = SYSTEMS[number // len(templates) % len(SYSTEMS)]
        messages = [{"role": "system", "content": system}] if system else []
        prompts.append(Prompt("", messages=(*messages, {"role": "user", "content": item.question})).encode(pair.tokenizer))
    return answer_prompts(pair, prompts, EvaluationOptions(num_speculative_tokens=STEPS, max_tokens=96))


def measure_lengths(target: Path, drafter: Path, texts: Mapping[str, Sequence[AnsweredText]], name: str) -> dict[str, float]:
    """Return the acceptance length of a drafter by form, as keys of the benchmark."""
    pair = ModelPair.load(target, drafter)
    lengths = {f"al_k3_{form}_{name}": evaluate_texts(pair, texts[form], 3).acceptance_length for form in FORMS}
    print(lengths, flush=True)
    return lengths


def summarize(lengths: Mapping[str, float]) -> dict[str, float]:
    """Return the losses and ratios."""
    figures: dict[str, float] = {}
    for name in (f"{kind}{suffix}" for kind in KINDS for suffix in ("", "_varied")):
        loss = statistics.fmean(1 - lengths[f"al_k3_{form}_{name}"] / lengths[f"al_k3_plain_{name}"] for form in PERTURBATIONS)
        figures[f"perturbation_loss_{name}_pct"] = 100 * loss
    of_3, of_31 = (figures[f"perturbation_loss_{kind}_varied_pct"] for kind in KINDS)
    return figures | {
        "perturbation_loss_ratio_varied": of_3 / of_31 if of_31 > 0 else math.inf,
        "long_context_gain_varied": lengths["al_k3_long_eagle31_varied"] / lengths["al_k3_long_eagle3_varied"],
    }


def train_further(folder: Path, target: Path, kind: str, answered: Sequence[AnsweredText]) -> Path:
    """Train the shipped drafter of `kind` on answered texts; return the folder of the last checkpoint."""
    sequences = [
        TokenSequence(tuple(text.tokens.tolist()[: text.answer_end]), ((text.prompt_length, text.answer_end),))
        for text in answered
        if text.answer_end > text.prompt_length
    ]
    messages = [{"role": "user", "content": "varied"}]  # not read: the tokens are given
    lines = [json.dumps({"messages": messages, "sequences": [sequence.to_json()]}) for sequence in sequences]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    settings = yaml.safe_load(bundle.find_bundle_path(f"{kind}.yaml").read_text())
    settings["target"]["model"] = str(target)
    settings["drafter"] = {"initial_checkpoint": str(bundle.find_bundle_path(kind))}
    settings["data"] |= {"train": [str(folder / "answers.jsonl")], "cache": str(folder / "tokens")}
    settings["optimizer"] |= {"learning_rate": LEARNING_RATE, "epochs": EPOCHS}
    settings["output"] = {"folder": str(folder / "training")}
    build_trainer(parse_settings(settings, "the benchmark's settings")).run()
    return folder / "training" / "last"
