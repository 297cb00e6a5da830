"""Makes of a checkpoint what an engine serves: vLLM's own form, or that of the speculators library, each with a model card.

Guarantees: the serving form is a checkpoint that `aerie_drafter.checkpoint` reads back; every switch is written, whatever its value,
because vLLM's default for norm_before_residual is false and its default for a speculators configuration without it is true.
Not guaranteed: that the drafter fits the target; `aerie-drafter inspect --target` says that.

Sources: vLLM 0.33, transformers_utils/configs/speculators/{base,algos}.py; speculators 0.9.0, config.py, models/eagle3/config.py.
First releases that serve a form: vLLM pull requests 42764, 43482 and 46488.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from aerie_drafter import checkpoint as checkpoints
from aerie_drafter.checkpoint import EMBEDDING, Checkpoint
from aerie_drafter.config import DrafterConfig, Family
from aerie_drafter.errors import CheckpointError, ConfigError
from aerie_drafter.weights import CONFIG, SINGLE, read_json, write_tensors

SPECULATORS = "0.9.0"
"""The release of the speculators library whose form is written."""


class Form(Enum):
    """How the configuration is written and the layer is called."""

    VLLM = "vllm"
    SPECULATORS = "speculators"


@dataclass(frozen=True)
class Card:
    """What the model card says beyond what the checkpoint itself does."""

    name: str
    target: str
    """Name or folder of the target, as `vllm serve` takes it."""
    tokens: int = 3
    """num_speculative_tokens (K) to serve it with."""
    acceptance_length: float | None = None
    """Mean tokens per verification at that K, bonus token included."""
    measured_on: str = ""


def export(
    source: Path,
    folder: Path,
    *,
    target: str = "",
    form: Form = Form.VLLM,
    tokens: int = 3,
    acceptance_length: float | None = None,
    measured_on: str = "",
    embeddings: bool = True,
    dtype: torch.dtype | None = None,
) -> Card:
    """Write the checkpoint `source` to `folder` in the form asked for, with README.md. Raises CheckpointError, ConfigError.

    `target` is that of the checkpoint's provenance where it is not given. Without `embeddings` vLLM shares the target's.
    """
    if tokens < 1:
        raise ConfigError(f"tokens is {tokens}: a drafter proposes at least 1.")
    if acceptance_length is not None and not 1 <= acceptance_length <= tokens + 1:
        raise ConfigError(f"acceptance_length is {acceptance_length}: with {tokens} tokens it is between 1 and {tokens + 1}.")
    found = checkpoints.read(source)
    found = replace(found, provenance=replace(found.provenance, target=target or found.provenance.target))
    card = Card(folder.resolve().name, found.provenance.target, tokens, acceptance_length, measured_on)
    if not card.target:
        raise ConfigError(f"{source / SINGLE}: says nothing of its target; name it.")
    with checkpoints.writing(folder) as new:
        if form is Form.VLLM:
            checkpoints.write(new, found, embeddings=embeddings, dtype=dtype)
        else:
            write_speculators(new, found, card, embeddings=embeddings, dtype=dtype)
        (new / "README.md").write_text(describe(found, card, form, checkpoints.digest(new), new), encoding="utf-8")
    return card


def write_speculators(folder: Path, found: Checkpoint, card: Card, *, embeddings: bool, dtype: torch.dtype | None) -> None:
    """The two files of the speculators form into an existing folder. Raises CheckpointError, ConfigError, OSError."""
    tensors = checkpoints.serving_tensors(found, embeddings=embeddings, dtype=dtype)
    config = speculators_config(found.config, card, verifier_architectures(card.target))
    config["dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    write_tensors(folder / SINGLE, named, found.provenance.to_metadata())


def speculators_config(config: DrafterConfig, card: Card, architectures: list[str]) -> dict[str, Any]:
    """config.json of the speculators form. Raises ConfigError for a drafter that this form does not have."""
    if config.family is Family.MLA:
        raise ConfigError("the speculators form has no latent attention (vLLM: `Unsupported model_type`); use the form vllm.")
    serving = config.to_serving()
    ids = serving["eagle_aux_hidden_state_layer_ids"]
    layer_keys = (
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
        "max_position_embeddings hidden_act rms_norm_eps rope_parameters attention_bias tie_word_embeddings "
        # vLLM's classes look for the number of layers here, and assume 3 where it is missing.
        "num_aux_hidden_states eagle_config"
    )
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": card.tokens, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": card.target, "architectures": architectures},
        },
        "transformer_layer_config": {key: serving[key] for key in layer_keys.split()},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": ids,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def verifier_architectures(target: str) -> list[str]:
    """`architectures` of a target that is a folder here; nothing of one that is only a name."""
    try:
        found = read_json(Path(target) / CONFIG).get("architectures")
    except CheckpointError:
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def first_vllm(config: DrafterConfig, form: Form) -> str:
    """The first vLLM release that serves such a drafter rightly (an earlier one may drop a switch without a word)."""
    switched = config.fc_norm or config.norm_output
    if form is Form.SPECULATORS and switched:
        return "0.25.0"
    if config.family is Family.QWEN3:
        return "0.24.0"
    return "0.23.0" if config.family is Family.MLA and switched else "0.22.0"


def serve_command(card: Card, drafter: str) -> str:
    """How vLLM is started with the drafter; the method is named, because vLLM otherwise guesses it from the path."""
    speculative = json.dumps({"method": "eagle3", "model": drafter, "num_speculative_tokens": card.tokens})
    return f"vllm serve {card.target} --speculative-config '{speculative}'"


def describe(found: Checkpoint, card: Card, form: Form, digest: str, written: Path) -> str:
    """The model card, README.md; `written` is the folder with the weights that it is about."""
    config, provenance = found.config, found.provenance
    size = (written / SINGLE).stat().st_size / 2**20
    parameters = sum(one.numel() for name, one in found.tensors.items() if one.is_floating_point() and name != EMBEDDING)
    length = "not measured"
    if card.acceptance_length is not None:
        length = f"{card.acceptance_length:.2f} at K={card.tokens}" + (f", on {card.measured_on}" if card.measured_on else "")
    rows: Mapping[str, object] = {
        "kind": config.kind,
        "target": card.target,
        "target's digest": provenance.target_digest or "not recorded",
        "acceptance length": length,
        "auxiliary layers": ", ".join(map(str, config.aux_layer_ids)),
        "attention": config.family.value,
        "parameters without embedding": f"{parameters:,}",
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}",
        "switches": ", ".join(
            f"{name}={str(getattr(config, name)).lower()}"
            for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
        ),
        "trained on": provenance.data or "not recorded",
        "training horizon": provenance.horizon or "not recorded",
        "written by": provenance.to_metadata()["eagle.code"],
        "weights": f"{size:.1f} MiB, {digest}",
        **provenance.notes,
    }
    header = {"base_model": card.target, "tags": ["eagle3", "speculative-decoding", "vllm"]}
    return "\n".join(
        [
            "---",
            *(f"{key}: {json.dumps(value)}" for key, value in header.items()),
            "---",
            f"# {card.name}",
            "",
            f"An {config.kind} drafter: it proposes tokens that {card.target} verifies, so that one forward pass of the",
            "target gives more than one token. What comes out is what the target alone would have said. For no other target.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {value} |" for key, value in rows.items()),
            "",
            f"Serve it with vLLM {first_vllm(config, form)} or later:",
            "",
            "```",
            serve_command(card, "<this folder>"),
            "```",
            "",
        ]
    )
