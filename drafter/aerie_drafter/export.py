"""Export of a checkpoint for serving: in vLLM's own format or that of the speculators library, with a model card.

Guarantees: `aerie_drafter.checkpoint` can read vLLM's format again. Every switch is written, because the default of
norm_before_residual is false in vLLM's own format and true in a speculators configuration. Not guaranteed: that the drafter fits
the target; `aerie-drafter inspect --target` checks that.

Sources: vLLM 0.33, transformers_utils/configs/speculators/{base,algos}.py; speculators 0.9.0, config.py, models/eagle3/config.py.
First releases that serve a format: vLLM pull requests 42764, 43482 and 46488.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from aerie_drafter import checkpoint as checkpoints
from aerie_drafter.checkpoint import EMBEDDING_TENSOR, DrafterCheckpoint, Provenance
from aerie_drafter.checks import format_error
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.errors import CheckpointError, ConfigError
from aerie_drafter.weights import CONFIG_FILE, WEIGHTS_FILE, read_json, write_tensors

SPECULATORS_VERSION = "0.9.0"
"""Release of the speculators library whose format is written."""


class ExportFormat(Enum):
    """Format of the configuration, and name of the layer."""

    VLLM = "vllm"
    SPECULATORS = "speculators"


@dataclass(frozen=True)
class ModelCard:
    """Values of the model card that are not in the checkpoint."""

    name: str
    target: str
    """Name or folder of the target, as for `vllm serve`."""
    num_speculative_tokens: int = 3
    """Recommended num_speculative_tokens (K)."""
    acceptance_length: float | None = None
    """Mean tokens per verification at that K, bonus token included."""
    measured_on: str = ""
    evaluation: Sequence[Mapping[str, Any]] = ()
    """Rows of `aerie-drafter evaluate --exact --output json`, of one drafter."""


def export_checkpoint(
    source: Path,
    folder: Path,
    *,
    target: str = "",
    export_format: ExportFormat = ExportFormat.VLLM,
    num_speculative_tokens: int = 3,
    acceptance_length: float | None = None,
    measured_on: str = "",
    evaluation: Path | None = None,
    include_embedding: bool = True,
    dtype: torch.dtype | None = None,
) -> ModelCard:
    """Write the checkpoint `source` to `folder` in a serving format, with README.md. Raises CheckpointError, ConfigError.

    `target` defaults to that of the checkpoint's provenance, and the acceptance length to the one that its training recorded.
    `evaluation` is a file of `aerie-drafter evaluate --exact --output json`, for a table by temperature and category.
    Without `include_embedding` vLLM shares the target's.
    """
    if num_speculative_tokens < 1:
        raise ConfigError(f"num_speculative_tokens is {num_speculative_tokens}: must be at least 1.")
    if acceptance_length is not None and not 1 <= acceptance_length <= num_speculative_tokens + 1:
        raise ConfigError(
            f"acceptance_length is {acceptance_length}: must be between 1 and {num_speculative_tokens + 1} for "
            f"num_speculative_tokens {num_speculative_tokens}."
        )
    checkpoint = checkpoints.read_checkpoint(source)
    checkpoint = replace(checkpoint, provenance=replace(checkpoint.provenance, target=target or checkpoint.provenance.target))
    if acceptance_length is None:
        acceptance_length, measured_on = _read_recorded_length(checkpoint.provenance, num_speculative_tokens)
    card = ModelCard(
        folder.resolve().name,
        checkpoint.provenance.target,
        num_speculative_tokens,
        acceptance_length,
        measured_on,
        () if evaluation is None else read_evaluation(evaluation),
    )
    if not card.target:
        raise ConfigError(f"{source / WEIGHTS_FILE}: its target is unknown; set it.")
    with checkpoints.replace_checkpoint(folder) as new:
        if export_format is ExportFormat.VLLM:
            checkpoints.write_checkpoint(new, checkpoint, include_embedding=include_embedding, dtype=dtype)
        else:
            write_speculators_checkpoint(new, checkpoint, card, include_embedding=include_embedding, dtype=dtype)
        (new / "README.md").write_text(
            render_model_card(checkpoint, card, export_format, checkpoints.compute_model_digest(new), new), encoding="utf-8"
        )
    return card


def _read_recorded_length(provenance: Provenance, num_speculative_tokens: int) -> tuple[float | None, str]:
    """Return (acceptance length, data) of the training's evaluation, if it had the same number of tokens."""
    notes = provenance.notes
    if notes.get("tokens") != str(num_speculative_tokens):
        return None, ""
    try:
        return float(notes["acceptance_length"]), "held-out text of the training"
    except (KeyError, ValueError):
        return None, ""


def read_evaluation(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the first drafter in a file of `aerie-drafter evaluate --exact --output json`. Raises ConfigError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["acceptance"]
        names = [row["drafter"] for row in rows]
        return [
            {key: row[key] for key in ("temperature", "draft_sampling", "category", "acceptance_length", "share_of_copy")}
            for row in rows
            if row["drafter"] == names[0]
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"--evaluation {path}: cannot be read ({format_error(error)}); "
            "write it with `aerie-drafter evaluate --exact --output json`."
        ) from None


def write_speculators_checkpoint(
    folder: Path, checkpoint: DrafterCheckpoint, card: ModelCard, *, include_embedding: bool, dtype: torch.dtype | None
) -> None:
    """Write the two files in speculators format to an existing folder. Raises CheckpointError, ConfigError, OSError."""
    tensors = checkpoints.build_serving_tensors(checkpoint, include_embedding=include_embedding, dtype=dtype)
    config = build_speculators_config(checkpoint.config, card, read_verifier_architectures(card.target))
    config["dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    renamed_tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    write_tensors(folder / WEIGHTS_FILE, renamed_tensors, checkpoint.provenance.to_metadata())


def build_speculators_config(config: DrafterConfig, card: ModelCard, architectures: list[str]) -> dict[str, Any]:
    """Return the config.json in speculators format. Raises ConfigError for a drafter that the format does not support."""
    if config.family is DrafterFamily.MLA:
        raise ConfigError(
            "the speculators format does not support latent attention (vLLM: `Unsupported model_type`); use the format vllm."
        )
    serving = config.to_vllm_config()
    ids = serving["eagle_aux_hidden_state_layer_ids"]
    layer_keys = (
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
        "max_position_embeddings hidden_act rms_norm_eps rope_parameters attention_bias tie_word_embeddings "
        # vLLM's classes read the number of layers here, and default to 3.
        "num_aux_hidden_states eagle_config"
    )
    if config.sliding_window is not None:
        layer_keys += " sliding_window use_sliding_window layer_types"
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": card.num_speculative_tokens, "verifier_accept_k": 1}
            ],
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


def read_verifier_architectures(target: str) -> list[str]:
    """Return `architectures` of a target in a local folder; empty for a name."""
    try:
        architectures = read_json(Path(target) / CONFIG_FILE).get("architectures")
    except CheckpointError:
        return []
    return [str(name) for name in architectures] if isinstance(architectures, list) else []


def min_vllm_version(config: DrafterConfig, export_format: ExportFormat) -> str:
    """Return the first vLLM release that serves such a drafter correctly (earlier ones may silently ignore a switch)."""
    if config.num_hidden_layers > 1 or config.sliding_window is not None:
        return "0.26.0"  # the earliest release whose source was read for both
    has_eagle31_switch = config.fc_norm or config.norm_output
    if export_format is ExportFormat.SPECULATORS and has_eagle31_switch:
        return "0.25.0"
    if config.family is DrafterFamily.QWEN3:
        return "0.24.0"
    return "0.23.0" if config.family is DrafterFamily.MLA and has_eagle31_switch else "0.22.0"


def build_serve_command(card: ModelCard, drafter_path: str) -> str:
    """Return the command that serves the drafter. It sets the method, which vLLM otherwise guesses from the path."""
    speculative = json.dumps({"method": "eagle3", "model": drafter_path, "num_speculative_tokens": card.num_speculative_tokens})
    return f"vllm serve {card.target} --speculative-config '{speculative}'"


def render_model_card(
    checkpoint: DrafterCheckpoint, card: ModelCard, export_format: ExportFormat, weights_digest: str, export_folder: Path
) -> str:
    """Render the model card, README.md; `export_folder` contains the exported weights."""
    config, provenance = checkpoint.config, checkpoint.provenance
    size = (export_folder / WEIGHTS_FILE).stat().st_size / 2**20
    parameters = sum(
        tensor.numel() for name, tensor in checkpoint.tensors.items() if tensor.is_floating_point() and name != EMBEDDING_TENSOR
    )
    length = "not measured"
    if card.acceptance_length is not None:
        length = f"{card.acceptance_length:.2f} at K={card.num_speculative_tokens}" + (
            f", on {card.measured_on}" if card.measured_on else ""
        )
    rows: Mapping[str, object] = {
        "kind": config.eagle_version,
        "target": card.target,
        "target's digest": provenance.target_digest or "not recorded",
        "acceptance length": length,
        "auxiliary layers": ", ".join(map(str, config.aux_layer_ids)),
        "layers": config.num_hidden_layers,
        "attention": config.family.value + (f", the last {window} tokens" if (window := config.sliding_window) else ""),
        "parameters without embedding": f"{parameters:,}",
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}",
        "switches": ", ".join(
            f"{name}={str(getattr(config, name)).lower()}"
            for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
        ),
        "trained on": provenance.training_data or "not recorded",
        "training horizon": provenance.training_horizon or "not recorded",
        "written by": provenance.to_metadata()["eagle.code"],
        "weights": f"{size:.1f} MiB, {weights_digest}",
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
            f"An {config.eagle_version} drafter: it proposes tokens that {card.target} verifies, so that one forward pass of the",
            "target gives more than one token. What comes out is what the target alone would have said. For no other target.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {value} |" for key, value in rows.items()),
            "",
            *_render_evaluation(card),
            f"Serve it with vLLM {min_vllm_version(config, export_format)} or later:",
            "",
            "```",
            build_serve_command(card, "<this folder>"),
            "```",
            "",
        ]
    )


def _render_evaluation(card: ModelCard) -> list[str]:
    """Return the lines of the table by temperature, draft sampling and category."""
    if not card.evaluation:
        return []

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        f"Acceptance length at K={card.num_speculative_tokens}, beside the share of what an exact copy of the target reaches:",
        "",
        "| temperature | drafts | category | acceptance length | share of a copy |",
        "|---|---|---|---|---|",
        *(
            f"| {row['temperature']:g} | {row['draft_sampling']} | {row['category']} | {number(row['acceptance_length'], '.2f')} "
            f"| {number(row['share_of_copy'], '.0%')} |"
            for row in card.evaluation
        ),
        "",
    ]
