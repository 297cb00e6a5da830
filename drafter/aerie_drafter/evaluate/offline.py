"""Acceptance by category without a server: the target generates answers, and the drafter drafts along them."""

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
        """Load target and drafter from two folders. Raises TargetError, CheckpointError, ConfigError."""
        (pair,) = cls.load_each(target, [drafter], device=device, dtype=dtype)
        return pair

    @classmethod
    def load_each(
        cls, target: Path, drafters: Sequence[Path], *, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> list[ModelPair]:
        """Load a pair for each drafter, which share the target in memory. Raises TargetError, CheckpointError, ConfigError."""
        torch_device = resolve_device(device)
        drafter_models = [load_drafter(drafter, target=target).to(device=torch_device, dtype=dtype) for drafter in drafters]
        model = load_model(str(target), None, dtype, torch_device)
        tokenizer, config = load_tokenizer(str(target), None), model.config.get_text_config()
        pairs = []
        for drafter, drafter_model in zip(drafters, drafter_models, strict=True):
            for name, expected in (
                ("vocab_size", drafter_model.config.vocab_size),
                ("hidden_size", drafter_model.config.target_hidden_size),
            ):
                if getattr(config, name) != expected:
                    raise TargetError(
                        f"{drafter}: it is for a target with {name} {expected}, and {target} has {getattr(config, name)}: "
                        "set the target that it was trained for."
                    )
            runner = TargetRunner(model, drafter_model.config.aux_layer_ids)
            pairs.append(cls(runner, tokenizer, drafter_model.requires_grad_(False)))
        return pairs

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the tokens that end an answer: the tokenizer's and those of the generation config."""
        configured = self.target.model.generation_config.eos_token_id
        end_token_ids = configured if isinstance(configured, list) else [configured]
        return frozenset(token for token in (self.tokenizer.eos_token_id, *end_token_ids) if token is not None)


def resolve_device(device_name: str) -> torch.device:
    """Return a device by name. Raises ConfigError if the machine or the installed PyTorch does not have it."""
    try:
        device = torch.device(device_name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"--device is {device_name}, which is not available ({reason}): use cpu, or cuda with a GPU.") from None
    return device


@dataclass(frozen=True)
class EvaluationOptions:
    """Settings of an evaluation."""

    num_speculative_tokens: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    sampled_drafts: bool = False
    seed: int = 0
    batch_size: int = 32


AcceptanceByCategory = dict[str, AcceptanceCounts]
"""Counters by category, in the order of the prompts."""


def evaluate_prompts(
    pair: ModelPair, prompts: Sequence[Prompt], options: EvaluationOptions, log_progress: Callable[[str], None] | None = None
) -> AcceptanceByCategory:
    """Measure acceptance by category."""
    generator = torch.Generator(pair.target.device).manual_seed(options.seed)
    acceptance: AcceptanceByCategory = {}
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        ids = [prompt.encode(pair.tokenizer) for prompt in prompts if prompt.category == category]
        acceptance[category] = (
            _evaluate_sampled_drafts(pair, ids, options, generator)
            if options.sampled_drafts
            else _evaluate_greedy_drafts(pair, ids, options, generator)
        )
        if log_progress is not None:
            log_progress(f"{category}: {len(ids)} prompts, AL {acceptance[category].acceptance_length:.3f}")
    return acceptance


def group_by_length(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with buckets of their lengths as categories, shortest first."""
    measured = [(len(prompt.encode(tokenizer)), prompt) for prompt in prompts]
    return [replace(prompt, category=length_bucket(length)) for length, prompt in sorted(measured, key=lambda pair: pair[0])]


def sum_acceptance(acceptance_by_category: AcceptanceByCategory) -> AcceptanceCounts:
    """Return the sum over all categories."""
    first, *rest = acceptance_by_category.values()
    return sum(rest, first)


def answer_prompts(
    pair: ModelPair, prompt_token_ids: Sequence[list[int]], options: EvaluationOptions, generator: torch.Generator | None = None
) -> list[AnsweredText]:
    """Generate the target's answers, in the order of the prompts; prompts of similar length form a batch."""
    order = sorted(range(len(prompt_token_ids)), key=lambda index: len(prompt_token_ids[index]))
    answer_by_index: dict[int, AnsweredText] = {}
    for begin in range(0, len(order), options.batch_size):
        batch = order[begin : begin + options.batch_size]
        answers = answer_batch(
            pair.target,
            [prompt_token_ids[index] for index in batch],
            max_tokens=options.max_tokens,
            extra_tokens=options.num_speculative_tokens,
            end_tokens=pair.end_tokens,
            temperature=options.temperature,
            generator=generator,
        )
        answer_by_index |= dict(zip(batch, answers, strict=True))
    return [answer_by_index[index] for index in range(len(prompt_token_ids))]


@torch.no_grad()
def evaluate_texts(pair: ModelPair, answered_texts: Sequence[AnsweredText], k: int, batch_size: int = 16) -> AcceptanceCounts:
    """Return the counters of answered texts for drafts of k tokens."""
    counts = AcceptanceCounts.zero(k)
    ordered = sorted(answered_texts, key=lambda text: len(text.tokens))
    for begin in range(0, len(ordered), batch_size):
        batch = ordered[begin : begin + batch_size]
        tokens = torch.nn.utils.rnn.pad_sequence([text.tokens for text in batch], batch_first=True, padding_value=0)
        tokens = tokens.to(pair.target.device)
        lengths = compute_accepted_lengths(pair.drafter, tokens, pair.target(tokens).aux_hidden_states, k).tolist()
        for text, row in zip(batch, lengths, strict=True):
            # Padding behind a text must not confirm drafts.
            counts += count_acceptance([min(length, max(0, len(text.tokens) - 2 - t)) for t, length in enumerate(row)], text, k)
    return counts


def _evaluate_greedy_drafts(
    pair: ModelPair, prompt_token_ids: Sequence[list[int]], options: EvaluationOptions, generator: torch.Generator
) -> AcceptanceCounts:
    return evaluate_texts(pair, answer_prompts(pair, prompt_token_ids, options, generator), options.num_speculative_tokens)


def _evaluate_sampled_drafts(
    pair: ModelPair, prompt_token_ids: Sequence[list[int]], options: EvaluationOptions, generator: torch.Generator
) -> AcceptanceCounts:
    sampler = TokenSampler(options.temperature, options.sampled_drafts, generator)
    counts = AcceptanceCounts.zero(options.num_speculative_tokens)
    for prompt in prompt_token_ids:
        counts += decode_speculatively(
            pair.target, pair.drafter, prompt, options.num_speculative_tokens, options.max_tokens, pair.end_tokens, sampler
        )[1]
    return counts


def acceptance_to_json(acceptance_by_category: AcceptanceByCategory) -> dict[str, dict[str, Any]]:
    """Convert the counters by category, and their `total`, to JSON; null without drafts."""
    return {
        name: _acceptance_numbers(counts)
        for name, counts in {**acceptance_by_category, "total": sum_acceptance(acceptance_by_category)}.items()
    }


def _acceptance_numbers(counts: AcceptanceCounts) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 6)

    return {
        "acceptance_length": number(counts.acceptance_length),
        "drafts": counts.drafts,
        "accepted_per_position": list(counts.accepted_per_position),
        "acceptance_per_position": [number(rate) for rate in counts.acceptance_rates],
        "conditional_acceptance": [number(rate) for rate in counts.conditional_rates],
    }
