"""Checks of a training's settings against the configuration of its target, in seconds: before hours of tokenizing begin.

    sizes, family, norms, rope      a drafter of these settings exists for the target's sizes (`DrafterConfig`)
    drafter.aux_layer_ids           the target has these layers
    drafter.draft_vocab_size        at most the target's vocabulary
    drafter.initial_checkpoint      was made for a target of these sizes, and reads layers that this one has
    target.hidden_state_layer_ids   contain the layers that the drafter reads, and the last one
    the target's logits             are lm_head(state), without scale or cap

Guarantees: only configurations are read, and the first problem is an error. `check_lengths` follows after the tokenizing. Checked
elsewhere: the chat template (`aerie_drafter.train.encode`), tokens of the data and the tokenizer of exact tokens
(`aerie_drafter.train.setup`), the weights, tied or not (`aerie_drafter.train.states`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from aerie_drafter.checkpoint import read_drafter_config
from aerie_drafter.config import DrafterConfig
from aerie_drafter.errors import ConfigError, TargetError
from aerie_drafter.train.create import build_drafter_config
from aerie_drafter.train.data import Corpus
from aerie_drafter.train.settings import TrainingSettings
from aerie_drafter.train.states import check_layers, check_logits


def check_settings(settings: TrainingSettings) -> None:
    """Check the settings against the target's configuration. Raises CheckpointError, ConfigError, TargetError."""
    target = read_text_config(settings.target.model, settings.target.revision)
    check_logits(target)
    layer_count = int(target.num_hidden_layers)
    config = resolve_drafter_config(settings, target)
    check_layers(config.aux_layer_ids, layer_count)
    stored = settings.target.hidden_state_layer_ids
    if stored is not None:
        missing = [layer for layer in (*config.aux_layer_ids, layer_count) if layer not in stored]
        if missing:
            raise TargetError(
                f"target.hidden_state_layer_ids is {list(stored)}, but layer {missing[0]} is required: the drafter reads "
                f"{list(config.aux_layer_ids)}, and the loss reads {layer_count}."
            )


def check_lengths(settings: TrainingSettings, corpus: Corpus) -> None:
    """Check that the target has a position for each token of a conversation. Raises ConfigError, TargetError."""
    positions = getattr(read_text_config(settings.target.model, settings.target.revision), "max_position_embeddings", None)
    longest = max(corpus.lengths)
    if isinstance(positions, int) and longest > positions:
        raise ConfigError(
            f"data.max_length is {settings.data.max_length}, a conversation has {longest} tokens, and the target has {positions} "
            f"positions (max_position_embeddings): set at most {positions}."
        )


def resolve_drafter_config(settings: TrainingSettings, target: Any) -> DrafterConfig:
    """Return the configuration of the drafter that the settings describe. Raises CheckpointError, ConfigError, TargetError."""
    folder = settings.drafter.initial_checkpoint
    if folder is None:
        return build_drafter_config(settings.drafter, target)
    config = read_drafter_config(folder)
    for name, own, expected in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
    ):
        if own != expected:
            raise TargetError(
                f"drafter.initial_checkpoint {folder}: its {name} is {own}, and the target has {expected}: it was "
                "trained for another target."
            )
    return config


def read_text_config(model: str, revision: str | None) -> Any:
    """Return the configuration of a target's text model. Raises TargetError."""
    try:
        config: Any = AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.model {model}: cannot be read: {str(error).strip().splitlines()[0]}") from error
    return config.get_text_config()


def describe_draft_vocabulary(corpus: Corpus, t2d: Tensor) -> str:
    """Return a line about the share of the answers' tokens that the draft vocabulary contains."""
    answers = corpus.tokens[corpus.loss_mask].long()
    occurring = torch.bincount(answers, minlength=len(t2d)).count_nonzero()
    inside = t2d.cpu()[answers]
    return (
        f"draft vocabulary: {int(t2d.sum()):,} of {len(t2d):,} tokens, which are {float(inside.float().mean()):.2%} of the "
        f"{len(answers):,} tokens of the answers; {int(occurring):,} tokens occur"
    )
