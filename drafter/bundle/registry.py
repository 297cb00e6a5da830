"""registry.json: parts of the bundle with their digests, and the acceptance of each drafter."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from aerie.terminal import err
from aerie_drafter.checkpoint import compute_model_digest
from aerie_drafter.evaluate import read_prompts
from aerie_drafter.evaluate.exact import COPY_NAME, measure_exact_acceptance
from aerie_drafter.evaluate.expected import acceptance_length
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, acceptance_to_json, evaluate_prompts

USE = {
    "target": "the served model of every end-to-end test and of the demo",
    "eagle3": "an EAGLE 3 drafter, trained on the same answers with the same budget as eagle31: the stable side of a canary",
    "eagle31": "an EAGLE 3.1 drafter: the canary that is to be promoted, or the stable side",
    "weak": "an EAGLE 3.1 drafter that has seen 500 answers once: the canary that is to be rolled back",
}
TOKENS = 3
SERVE = (
    "vllm serve drafter/bundle/target --served-model-name docs --dtype float32 --max-model-len 2048 --speculative-config "
    '\'{{"method": "eagle3", "model": "drafter/bundle/{drafter}", "num_speculative_tokens": 3}}\''
)


def measure(target: Path, drafter: Path, prompts: Path) -> dict[str, Any]:
    """Measure acceptance length and acceptance per position over all prompts, greedy, and AL by category.

    At temperature 1 the acceptance length is the expected one, for greedy and drawn drafts.
    """
    pair, options = ModelPair.load(target, drafter), EvaluationOptions(num_speculative_tokens=TOKENS)
    acceptance = acceptance_to_json(evaluate_prompts(pair, read_prompts(prompts), options))
    total = acceptance.pop("total")
    by_category = {name: round(numbers["acceptance_length"], 3) for name, numbers in acceptance.items()}
    err.print(f"{drafter}: AL {total['acceptance_length']:.3f} {by_category}")
    exact = measure_exact_acceptance(pair, {"drafter": pair.drafter}, read_prompts(prompts), options, temperatures=(1.0,))
    at_temperature_1 = {
        f"{condition.draft_sampling.value}{suffix}": round(float(acceptance_length(by_name[name].sum(0))), 3)
        for condition, by_name in exact.counts.items()
        for name, suffix in (("drafter", ""), (COPY_NAME, "_by_a_copy_of_the_target"))
    }
    return {
        "acceptance_length": round(total["acceptance_length"], 3),
        "acceptance_per_position": [round(rate, 3) for rate in total["acceptance_per_position"]],
        "by_category": by_category,
        "acceptance_length_at_temperature_1": at_temperature_1,
    }


def make(drafters: dict[str, str], measured: dict[str, dict[str, Any]], corpus_digest: str, loss: float) -> dict[str, Any]:
    """Build the registry of the parts in the work folder."""
    target = {"digest": compute_model_digest(Path("target")), "tokenizer_sha256": _sha256(Path("target/tokenizer.json"))}
    return {
        "licence": {
            "weights": "Apache-2.0, as this repository",
            "text": "trained on documentation of Python, (c) Python Software Foundation, PSF License Version 2",
        },
        "corpus": {"python": platform.python_version(), "sha256": corpus_digest},
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy")},
        "machine": platform.machine(),
        "target": {"folder": "target", **target, "loss": round(loss, 3), "use": USE["target"]},
        "drafters": {
            name: {
                "folder": name,
                "kind": kind,
                "digest": compute_model_digest(Path(name)),
                "num_speculative_tokens": TOKENS,
                **measured[name],
                "use": USE[name],
                "serve": SERVE.format(drafter=name),
            }
            for name, kind in drafters.items()
        },
        "measured_on": "prompts.jsonl: questions that were in no training, greedy, at most 128 tokens each",
    }


def write(registry: dict[str, Any], file: Path) -> None:
    """Write the registry as JSON."""
    file.write_text(json.dumps(registry, indent=2) + "\n")


def digests(registry: dict[str, Any]) -> dict[str, str]:
    """Return the digest of each part."""
    target = registry["target"]
    return {
        "corpus": registry["corpus"]["sha256"],
        "tokenizer": target["tokenizer_sha256"],
        "target": target["digest"],
        **{name: entry["digest"] for name, entry in registry["drafters"].items()},
    }


def compare(manifest: dict[str, Any], committed: Path) -> str:
    """Return a line per part: its digest, and whether it equals the committed bundle's."""
    before = digests(json.loads(committed.read_text())) if committed.is_file() else {}
    lines = []
    for part, value in digests(manifest).items():
        verdict = ("same" if before.get(part) == value else "differs") if before else "new"
        lines.append(f"{part:10} {value.removeprefix('sha256:')[:16]}  {verdict}")
    return "\n".join(lines)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
