"""Acceptance by category without a server: the target answers, and the drafter is walked over the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aerie_drafter.checkpoint import load_drafter
from aerie_drafter.errors import ConfigError, TargetError
from aerie_drafter.evaluate.acceptance import AcceptanceCounts, AnsweredText, compute_accepted_lengths, count_acceptance
from aerie_drafter.evaluate.answers import answer_batch
from aerie_drafter.evaluate.prompts import Prompt, length_bucket
from aerie_drafter.evaluate.speculation import TokenSampler, decode_speculatively
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.model import Drafter
from aerie_drafter.train.states import load_model, load_tokenizer


@dataclass(frozen=True)
class ModelPair:
    """A target, its tokenizer, and a drafter for it."""

    target: TargetRunner
    tokenizer: Any
    drafter: Drafter

    @classmethod
    def load(cls, target: Path, drafter: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> ModelPair:
        """From two folders. Raises TargetError, CheckpointError, ConfigError."""
        where = resolve_device(device)
        found = load_drafter(drafter, target=target).to(device=where, dtype=dtype)
        model = load_model(str(target), None, dtype, where)
        config = model.config.get_text_config()
        for name, ours in (("vocab_size", found.config.vocab_size), ("hidden_size", found.config.target_hidden_size)):
            if getattr(config, name) != ours:
                raise TargetError(
                    f"{drafter}: it is for a target with {name} {ours}, and {target} has {getattr(config, name)}: "
                    "give the target that it was trained for."
                )
        return cls(
            TargetRunner(model, found.config.aux_layer_ids), load_tokenizer(str(target), None), found.requires_grad_(False)
        )

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's and those of the generation config."""
        found = self.target.model.generation_config.eos_token_id
        more = found if isinstance(found, list) else [found]
        return frozenset(token for token in (self.tokenizer.eos_token_id, *more) if token is not None)


def resolve_device(device_name: str) -> torch.device:
    """The device of that name. Raises ConfigError where this machine, or the installed PyTorch, has none."""
    try:
        found = torch.device(device_name)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"--device is {device_name}, which cannot be used here ({reason}): write cpu, or cuda with a GPU."
        ) from None
    return found


@dataclass(frozen=True)
class EvaluationOptions:
    """How prompts are answered."""

    num_speculative_tokens: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    sampled_drafts: bool = False
    seed: int = 0
    batch_size: int = 32


AcceptanceByCategory = dict[str, AcceptanceCounts]
"""By category, in the order of the prompts."""


def evaluate_prompts(
    pair: ModelPair, prompts: Sequence[Prompt], options: EvaluationOptions, log_progress: Callable[[str], None] | None = None
) -> AcceptanceByCategory:
    """Acceptance by category."""
    draw = torch.Generator(pair.target.device).manual_seed(options.seed)
    found: AcceptanceByCategory = {}
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        ids = [prompt.encode(pair.tokenizer) for prompt in prompts if prompt.category == category]
        found[category] = (
            _evaluate_sampled_drafts(pair, ids, options, draw)
            if options.sampled_drafts
            else _evaluate_greedy_drafts(pair, ids, options, draw)
        )
        if log_progress is not None:
            log_progress(f"{category}: {len(ids)} prompts, AL {found[category].acceptance_length:.3f}")
    return found


def group_by_length(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with buckets of their lengths as categories, shortest first."""
    measured = [(len(prompt.encode(tokenizer)), prompt) for prompt in prompts]
    return [replace(prompt, category=length_bucket(length)) for length, prompt in sorted(measured, key=lambda pair: pair[0])]


def sum_acceptance(acceptance_by_category: AcceptanceByCategory) -> AcceptanceCounts:
    """All categories together."""
    first, *rest = acceptance_by_category.values()
    return sum(rest, first)


def answer_prompts(
    pair: ModelPair, prompt_token_ids: Sequence[list[int]], options: EvaluationOptions, generator: torch.Generator | None = None
) -> list[AnsweredText]:
    """The target's answers, in the order of `ids`; prompts of like length are answered together."""
    order = sorted(range(len(prompt_token_ids)), key=lambda index: len(prompt_token_ids[index]))
    found: dict[int, AnsweredText] = {}
    for begin in range(0, len(order), options.batch_size):
        some = order[begin : begin + options.batch_size]
        answers = answer_batch(
            pair.target,
            [prompt_token_ids[index] for index in some],
            max_tokens=options.max_tokens,
            extra_tokens=options.num_speculative_tokens,
            end_tokens=pair.end_tokens,
            temperature=options.temperature,
            generator=generator,
        )
        found |= dict(zip(some, answers, strict=True))
    return [found[index] for index in range(len(prompt_token_ids))]


@torch.no_grad()
def evaluate_texts(pair: ModelPair, answered_texts: Sequence[AnsweredText], k: int, batch_size: int = 16) -> AcceptanceCounts:
    """The counters of answered texts, for a draft of k tokens."""
    found = AcceptanceCounts.zero(k)
    ordered = sorted(answered_texts, key=lambda text: len(text.tokens))
    for begin in range(0, len(ordered), batch_size):
        some = ordered[begin : begin + batch_size]
        tokens = torch.nn.utils.rnn.pad_sequence([text.tokens for text in some], batch_first=True, padding_value=0)
        tokens = tokens.to(pair.target.device)
        lengths = compute_accepted_lengths(pair.drafter, tokens, pair.target(tokens).aux_hidden_states, k).tolist()
        for text, row in zip(some, lengths, strict=True):
            # A column's own drafts cannot be confirmed by the padding behind its text.
            found += count_acceptance([min(length, max(0, len(text.tokens) - 2 - t)) for t, length in enumerate(row)], text, k)
    return found


def _evaluate_greedy_drafts(
    pair: ModelPair, ids: Sequence[list[int]], asking: EvaluationOptions, draw: torch.Generator
) -> AcceptanceCounts:
    return evaluate_texts(pair, answer_prompts(pair, ids, asking, draw), asking.num_speculative_tokens)


def _evaluate_sampled_drafts(
    pair: ModelPair, ids: Sequence[list[int]], asking: EvaluationOptions, draw: torch.Generator
) -> AcceptanceCounts:
    sampling = TokenSampler(asking.temperature, asking.sampled_drafts, draw)
    found = AcceptanceCounts.zero(asking.num_speculative_tokens)
    for prompt in ids:
        found += decode_speculatively(
            pair.target, pair.drafter, prompt, asking.num_speculative_tokens, asking.max_tokens, pair.end_tokens, sampling
        )[1]
    return found


def acceptance_to_json(acceptance_by_category: AcceptanceByCategory) -> dict[str, dict[str, Any]]:
    """Plain numbers by category and for `total`; what has no draft is null."""
    return {
        name: _acceptance_numbers(each)
        for name, each in {**acceptance_by_category, "total": sum_acceptance(acceptance_by_category)}.items()
    }


def _acceptance_numbers(each: AcceptanceCounts) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 6)

    return {
        "acceptance_length": number(each.acceptance_length),
        "drafts": each.drafts,
        "accepted_per_position": list(each.accepted_per_position),
        "acceptance_per_position": [number(rate) for rate in each.acceptance_rates],
        "conditional_acceptance": [number(rate) for rate in each.conditional_rates],
    }
