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
from aerie_drafter.train.settings import DrafterSettings, LossSettings, TrainingSettings


class OtherTrainer(Enum):
    """Project that the configuration is for."""

    TORCHSPEC = "torchspec"
    SPECFORGE = "specforge"


def build_drafter_json(config: DrafterConfig) -> dict[str, Any]:
    """Return the drafter's configuration, which both projects read as that of an EAGLE 3 Llama. Raises ConfigError."""
    if config.mla is not None:
        raise ConfigError("a drafter with latent attention cannot be handed over: set drafter.family to llama.")
    if config.num_hidden_layers > 1 or config.sliding_window is not None:
        raise ConfigError(
            "drafter.num_layers and drafter.sliding_window cannot be handed over: the Llama classes of both projects were read "
            "as one layer with full attention. Omit them."
        )
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
    if (lk_loss := _choose_lk_loss(loss)) is not None:
        training["lk_loss_type"] = lk_loss.removeprefix("lk_")
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


_HANDED_OVER = frozenset(
    {
        "target.model",
        "data.train",
        "data.max_length",
        "loss.horizon",
        "optimizer.learning_rate",
        "optimizer.warmup_ratio",
        "optimizer.max_grad_norm",
        "optimizer.epochs",
        "optimizer.batch_size_per_process",
        "optimizer.gradient_accumulation_steps",
        "optimizer.seed",
        "output.folder",
        *(f"drafter.{name}" for name in DrafterSettings.model_fields if name != "initial_checkpoint"),  # in drafter.json
    }
)
_EXPLAINED = frozenset(
    {
        "drafter.initial_checkpoint",
        "data.held_out",
        "data.packing",
        "loss.step_decay",
        "loss.step_weights",
        "loss.total_variation",
        "loss.lk_alpha",
        "loss.lk_lambda",
        "optimizer.betas",
        "optimizer.weight_decay",
        "optimizer.activation_checkpointing",
    }
)
"""Fields that `_explain_differences` treats."""


def find_differences(settings: TrainingSettings, trainer: OtherTrainer) -> Iterator[str]:
    """Yield what the other trainer does differently with these settings: each changed field is handed over, or is named here."""
    yield from _explain_differences(settings, trainer)
    for group, values in settings.model_dump(mode="json").items():
        model: Any = TrainingSettings.model_fields[group].annotation
        for name, value in values.items():
            is_default = getattr(getattr(settings, group), name) == model.model_fields[name].default
            if not is_default and f"{group}.{name}" not in _HANDED_OVER | _EXPLAINED:
                yield f"{group}.{name} {value}: not handed over."
    yield "exact tokens: it encodes the text of the answers again."


def _explain_differences(settings: TrainingSettings, trainer: OtherTrainer) -> Iterator[str]:
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
    for name in mixed:
        weight = getattr(loss, name)
        if trainer is OtherTrainer.TORCHSPEC:
            yield f"loss.{name} {weight}: it has the forward KL."
        elif name == _choose_lk_loss(loss):
            yield f"loss.{name} {weight}: lk_loss_type names it, without its weight and without loss.kl {loss.kl}."
        else:
            yield f"loss.{name} {weight}: not handed over."
    if settings.drafter.initial_checkpoint is not None:
        yield "drafter.initial_checkpoint: not handed over; it starts from new weights."
    if trainer is OtherTrainer.SPECFORGE:
        if optimizer.weight_decay:
            yield f"optimizer.weight_decay {optimizer.weight_decay}: it has no such field."
        if optimizer.activation_checkpointing:
            yield "optimizer.activation_checkpointing: not handed over."
        if settings.drafter.norm_output:
            yield (
                "drafter.norm_output: release 0.2.0 feeds the state before the norm back, as EAGLE 3 does: "
                "import its drafter with `aerie-drafter convert --no-norm-output`."
            )
    elif settings.drafter.fc_norm or settings.drafter.norm_output:
        yield "drafter.fc_norm, drafter.norm_output: the commit that was read has no EAGLE 3.1; use one that has."


def _choose_lk_loss(loss: LossSettings) -> str | None:
    return next((name for name in ("lk_lambda", "lk_alpha") if getattr(loss, name)), None)
