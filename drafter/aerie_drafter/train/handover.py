"""Hand-over of a training to another project's trainer: its configuration, written from ours.

    torchspec    train.yaml and drafter.json for LightSeek's TorchSpec (read at commit 6f21829cd0e3, 2026-04)
    specforge    train.yaml and drafter.json for SpecForge 0.2.0

Data, target, auxiliary layers, horizon, optimizer, batch and lengths carry over. Guarantee: what the other trainer cannot express
is returned as a list of differences; nothing is dropped silently. Not guaranteed: that the other trainer runs; its engines,
devices and hosts are the user's to add.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from aerie_drafter.config import DrafterConfig
from aerie_drafter.errors import ConfigError
from aerie_drafter.train.settings import TrainingSettings


class OtherTrainer(Enum):
    """Project that the configuration is for."""

    TORCHSPEC = "torchspec"
    SPECFORGE = "specforge"


def build_drafter_json(config: DrafterConfig) -> dict[str, Any]:
    """Return the drafter's configuration, which both projects read as that of an EAGLE 3 Llama. Raises ConfigError."""
    if config.mla is not None:
        raise ConfigError("a drafter with latent attention cannot be handed over: set drafter.family to llama.")
    return {**config.to_vllm_config(), "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def build_torchspec_config(
    settings: TrainingSettings, config: DrafterConfig, drafter_json: Path, chat_template: str
) -> dict[str, Any]:
    """Return TorchSpec's nested configuration for vLLM as its engine. Its layer ids name a layer's output, one less than ours."""
    optimizer = settings.optimizer
    [source, *_] = settings.data.train
    return {
        "model": {
            "target_model_path": settings.target.model,
            "draft_model_config": str(drafter_json),
            "target_model_backend": "vllm",
        },
        "dataset": {"train_data_path": str(source), "prompt_key": "messages", "chat_template": chat_template},
        "training": {
            "ttt_length": settings.loss.horizon,
            "learning_rate": optimizer.learning_rate,
            "weight_decay": optimizer.weight_decay,
            "warmup_ratio": optimizer.warmup_ratio,
            "max_grad_norm": optimizer.max_grad_norm,
            "max_seq_length": settings.data.max_length,
            "num_epochs": optimizer.epochs,
            "micro_batch_size": optimizer.batch_size_per_process,
            "draft_accumulation_steps": optimizer.gradient_accumulation_steps,
            "gradient_checkpointing": optimizer.activation_checkpointing,
            "seed": optimizer.seed,
        },
        "inference": {
            "inference_engine_type": "vllm",
            "aux_hidden_states_layers": [layer - 1 for layer in config.aux_layer_ids],
        },
        "output_dir": str(settings.output.folder),
    }


def build_specforge_config(
    settings: TrainingSettings, config: DrafterConfig, drafter_json: Path, chat_template: str
) -> dict[str, Any]:
    """Return SpecForge's configuration of a run with answers as text. Its layer ids name a layer's output, one less than ours."""
    optimizer, loss = settings.optimizer, settings.loss
    [source, *_] = settings.data.train
    training = {
        "strategy": "eagle3",
        "num_epochs": optimizer.epochs,
        "batch_size": optimizer.batch_size_per_process,
        "accumulation_steps": optimizer.gradient_accumulation_steps,
        "learning_rate": optimizer.learning_rate,
        "warmup_ratio": optimizer.warmup_ratio,
        "max_grad_norm": optimizer.max_grad_norm,
        "ttt_length": loss.horizon,
        "seed": optimizer.seed,
    }
    if loss.lk_lambda or loss.lk_alpha:
        training["lk_loss_type"] = "lambda" if loss.lk_lambda else "alpha"
    return {
        "model": {
            "target_model_path": settings.target.model,
            "draft_model_config": str(drafter_json),
            "aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layer_ids],
        },
        "data": {
            "train_data_path": str(source),
            "max_length": settings.data.max_length,
            "chat_template": chat_template,
        },
        "training": training,
        # The only form in which release 0.2.0 computes states while it trains; its server addresses are the user's to add.
        "deployment": {
            "mode": "disaggregated",
            "disaggregated": {"control_dir": str(settings.output.folder / "control"), "backend": "mooncake"},
        },
        "output_dir": str(settings.output.folder),
    }


def find_differences(settings: TrainingSettings, trainer: OtherTrainer) -> Iterator[str]:
    """Yield what the other trainer does differently with these settings."""
    loss, optimizer = settings.loss, settings.optimizer
    if len(settings.data.train) > 1:
        yield f"data.train: only {settings.data.train[0]} is handed over; join the files."
    if settings.data.held_out:
        yield "data.held_out: not handed over; evaluate its checkpoints with `aerie-drafter evaluate`."
    if settings.data.packing:
        yield "data.packing: it pads rows."
    if tuple(optimizer.betas) != (0.9, 0.999):
        yield f"optimizer.betas {list(optimizer.betas)}: it has no such field."
    if loss.step_weights is not None or loss.step_decay != 0.8:
        yield "loss.step_weights, loss.step_decay: its steps are weighted with 0.8^i."
    mixed = [name for name in ("total_variation", "lk_alpha", "lk_lambda") if getattr(loss, name)]
    if mixed and trainer is OtherTrainer.TORCHSPEC:
        yield f"loss.{mixed[0]}: it has the forward KL."
    if settings.drafter.initial_checkpoint is not None:
        yield "drafter.initial_checkpoint: not handed over; it starts from new weights."
    if trainer is OtherTrainer.SPECFORGE:
        if optimizer.weight_decay:
            yield f"optimizer.weight_decay {optimizer.weight_decay}: it has no such field."
        if settings.drafter.norm_output:
            yield (
                "drafter.norm_output: release 0.2.0 feeds the state before the norm back, as EAGLE 3 does: "
                "import its drafter with `aerie-drafter convert --no-norm-output`."
            )
    elif settings.drafter.fc_norm or settings.drafter.norm_output:
        yield "drafter.fc_norm, drafter.norm_output: the commit that was read has no EAGLE 3.1; use one that has."
    yield "exact tokens: it encodes the text of the answers again."
