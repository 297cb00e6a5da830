"""Acceptance by category without a server: the target answers, and the drafter is walked over the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aerie_drafter.checkpoint import load
from aerie_drafter.errors import ConfigError, TargetError
from aerie_drafter.evaluate.acceptance import Acceptance, Text, accepted_lengths, count
from aerie_drafter.evaluate.answers import answer
from aerie_drafter.evaluate.prompts import Prompt, bucket
from aerie_drafter.evaluate.speculation import Sampling, speculate
from aerie_drafter.evaluate.target import Target
from aerie_drafter.model import Drafter
from aerie_drafter.train.states import load_model, load_tokenizer


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, and a drafter for it."""

    target: Target
    tokenizer: Any
    drafter: Drafter

    @classmethod
    def load(cls, target: Path, drafter: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Pair:
        """From two folders. Raises TargetError, CheckpointError, ConfigError."""
        where = usable(device)
        found = load(drafter, target=target).to(device=where, dtype=dtype)
        model = load_model(str(target), None, dtype, where)
        config = model.config.get_text_config()
        for name, ours in (("vocab_size", found.config.vocab_size), ("hidden_size", found.config.target_hidden_size)):
            if getattr(config, name) != ours:
                raise TargetError(
                    f"{drafter}: it is for a target with {name} {ours}, and {target} has {getattr(config, name)}: "
                    "give the target that it was trained for."
                )
        return cls(Target(model, found.config.aux_layer_ids), load_tokenizer(str(target), None), found.requires_grad_(False))

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's and those of the generation config."""
        found = self.target.model.generation_config.eos_token_id
        more = found if isinstance(found, list) else [found]
        return frozenset(token for token in (self.tokenizer.eos_token_id, *more) if token is not None)


def usable(device: str) -> torch.device:
    """The device of that name. Raises ConfigError where this machine, or the installed PyTorch, has none."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"--device is {device}, which cannot be used here ({reason}): write cpu, or cuda with a GPU.") from None
    return found


@dataclass(frozen=True)
class Asking:
    """How prompts are answered."""

    k: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    sampled_drafts: bool = False
    seed: int = 0
    batch: int = 32


Result = dict[str, Acceptance]
"""By category, in the order of the prompts."""


def evaluate(pair: Pair, prompts: Sequence[Prompt], asking: Asking, report: Callable[[str], None] | None = None) -> Result:
    """Acceptance by category."""
    draw = torch.Generator(pair.target.device).manual_seed(asking.seed)
    found: Result = {}
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        ids = [prompt.encode(pair.tokenizer) for prompt in prompts if prompt.category == category]
        found[category] = _by_loop(pair, ids, asking, draw) if asking.sampled_drafts else _by_walk(pair, ids, asking, draw)
        if report is not None:
            report(f"{category}: {len(ids)} prompts, AL {found[category].length:.3f}")
    return found


def by_length(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with buckets of their lengths as categories, shortest first."""
    measured = [(len(prompt.encode(tokenizer)), prompt) for prompt in prompts]
    return [replace(prompt, category=bucket(length)) for length, prompt in sorted(measured, key=lambda pair: pair[0])]


def total(found: Result) -> Acceptance:
    """All categories together."""
    first, *rest = found.values()
    return sum(rest, first)


def texts(pair: Pair, ids: Sequence[list[int]], asking: Asking, draw: torch.Generator | None = None) -> list[Text]:
    """The target's answers, in the order of `ids`; prompts of like length are answered together."""
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    found: dict[int, Text] = {}
    for begin in range(0, len(order), asking.batch):
        some = order[begin : begin + asking.batch]
        answers = answer(
            pair.target,
            [ids[index] for index in some],
            max_tokens=asking.max_tokens,
            beyond=asking.k,
            end_tokens=pair.end_tokens,
            temperature=asking.temperature,
            generator=draw,
        )
        found |= dict(zip(some, answers, strict=True))
    return [found[index] for index in range(len(ids))]


@torch.no_grad()
def acceptance(pair: Pair, answered: Sequence[Text], k: int, batch: int = 16) -> Acceptance:
    """The counters of answered texts, for a draft of k tokens."""
    found = Acceptance.none(k)
    ordered = sorted(answered, key=lambda text: len(text.tokens))
    for begin in range(0, len(ordered), batch):
        some = ordered[begin : begin + batch]
        tokens = torch.nn.utils.rnn.pad_sequence([text.tokens for text in some], batch_first=True, padding_value=0)
        tokens = tokens.to(pair.target.device)
        lengths = accepted_lengths(pair.drafter, tokens, pair.target(tokens).aux, k).tolist()
        for text, row in zip(some, lengths, strict=True):
            # A column's own drafts cannot be confirmed by the padding behind its text.
            found += count([min(length, max(0, len(text.tokens) - 2 - t)) for t, length in enumerate(row)], text, k)
    return found


def _by_walk(pair: Pair, ids: Sequence[list[int]], asking: Asking, draw: torch.Generator) -> Acceptance:
    return acceptance(pair, texts(pair, ids, asking, draw), asking.k)


def _by_loop(pair: Pair, ids: Sequence[list[int]], asking: Asking, draw: torch.Generator) -> Acceptance:
    sampling = Sampling(asking.temperature, asking.sampled_drafts, draw)
    found = Acceptance.none(asking.k)
    for prompt in ids:
        found += speculate(pair.target, pair.drafter, prompt, asking.k, asking.max_tokens, pair.end_tokens, sampling)[1]
    return found


def as_json(found: Result) -> dict[str, dict[str, Any]]:
    """Plain numbers by category and for `total`; what has no draft is null."""
    return {name: _numbers(each) for name, each in {**found, "total": total(found)}.items()}


def _numbers(each: Acceptance) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 6)

    return {
        "acceptance_length": number(each.length),
        "drafts": each.drafts,
        "accepted_per_position": list(each.accepted),
        "acceptance_per_position": [number(rate) for rate in each.rates],
        "conditional_acceptance": [number(rate) for rate in each.conditional],
    }
