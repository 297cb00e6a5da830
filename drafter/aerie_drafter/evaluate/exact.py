"""Acceptance of drafters beside that of an exact copy of the target: by temperature, draft sampling, category and position.

    prompts ─► the target's answers at each temperature ─► one pass of the target ─► K steps of each drafter ─► expected counters

All drafters get the same answers, so they are compared in pairs. `aerie_drafter.evaluate.expected` explains the counters. The
copy has the target's own distribution at every position: what no drafter exceeds with greedy drafts, but for the variance of
the texts; with drawn drafts it reaches K + 1.

Guarantee: a drafter with the target's distributions gets the copy's counters. Not supported: targets whose logits are not
lm_head(state), and top-p, top-k or other changes of the distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.expected import Interval, acceptance_length, expected_counts, paired_gain
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts
from aerie_drafter.evaluate.prompts import Prompt
from aerie_drafter.model import Drafter
from aerie_drafter.train.states import InProcessTarget, TargetHiddenStates, extract_target_parts
from aerie_drafter.train.ttt import LOGIT_SLICE_ELEMENTS, ColumnAcceptance, TrainingBatch, TrainingTimeTest

COPY_NAME = "copy of the target"
DEFAULT_TEMPERATURES = (0.0, 0.7, 1.0)


class DraftSampling(Enum):
    """How a drafter chooses its tokens."""

    GREEDY = "greedy"
    """The most likely token: vLLM's default."""
    DRAWN = "drawn"
    """Drawn at the target's temperature: vLLM's `draft_sample_method: probabilistic`."""


class Condition(NamedTuple):
    """Temperature and draft sampling of a measurement."""

    temperature: float
    draft_sampling: DraftSampling


@dataclass(frozen=True)
class ExactAcceptance:
    """Expected counters of some drafters and of the copy."""

    categories: tuple[str, ...]
    """Category of each prompt."""
    counts: Mapping[Condition, Mapping[str, Tensor]]
    """Counters by condition and name: [prompts, 1 + K], drafts and accepted tokens per position."""

    def of_category(self, condition: Condition, name: str, category: str | None) -> Tensor:
        """Return the counters of the prompts of a category, or of all."""
        chosen = [category in (None, other) for other in self.categories]
        return self.counts[condition][name][torch.tensor(chosen)]

    @property
    def category_names(self) -> list[str | None]:
        """Return all categories, in the order of the prompts, and None for their total."""
        return [*dict.fromkeys(self.categories), None]


def measure_exact_acceptance(
    pair: ModelPair,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    *,
    temperatures: Sequence[float] = DEFAULT_TEMPERATURES,
    draws: int = 1,
    log_progress: Callable[[str], None] | None = None,
) -> ExactAcceptance:
    """Measure `drafters` by name, for the target of `pair`; above temperature 0 with `draws` answers to each prompt."""
    ids = [prompt.encode(pair.tokenizer) for prompt in prompts]
    counts: dict[Condition, dict[str, Tensor]] = {}
    for temperature in temperatures:
        repeats = draws if temperature else 1
        generator = torch.Generator(pair.target.device).manual_seed(options.seed)
        at_temperature = EvaluationOptions(**{**vars(options), "temperature": temperature})
        texts = answer_prompts(pair, ids * repeats, at_temperature, generator)
        measured = count_texts(pair.target.model, drafters, texts, options.num_speculative_tokens, temperature)
        for condition, by_name in measured.items():
            counts[condition] = {name: table.view(repeats, len(ids), -1).sum(0) for name, table in by_name.items()}
        if log_progress is not None:
            log_progress(f"temperature {temperature:g}: {len(texts)} answers")
    return ExactAcceptance(tuple(prompt.category for prompt in prompts), counts)


@torch.no_grad()
def count_texts(
    model: Any,
    drafters: Mapping[str, Drafter],
    texts: Sequence[AnsweredText],
    k: int,
    temperature: float,
    batch_size: int = 16,
) -> dict[Condition, dict[str, Tensor]]:
    """Return the expected counters of each text of the target `model`, [texts, 1 + K], by condition and name."""
    layers = sorted({layer for drafter in drafters.values() for layer in drafter.config.aux_layer_ids})
    source, lm_head = InProcessTarget(model, layers), extract_target_parts(model).lm_head
    samplings = list(DraftSampling) if temperature else [DraftSampling.GREEDY]
    counts = {
        Condition(temperature, sampling): {
            name: torch.zeros(len(texts), 1 + k, dtype=torch.float64) for name in (*drafters, COPY_NAME)
        }
        for sampling in samplings
    }
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
    for begin in range(0, len(order), batch_size):
        indices = order[begin : begin + batch_size]
        batch = [texts[index] for index in indices]
        tokens = torch.nn.utils.rnn.pad_sequence([text.tokens for text in batch], batch_first=True).to(lm_head.device)
        position = torch.arange(tokens.shape[1], device=tokens.device)
        answer = torch.stack([(position > text.prompt_length) & (position < len(text.tokens)) for text in batch])
        states = source.fetch_hidden_states(tokens)
        acceptance = {
            name: _drafter_acceptance(drafter, tokens, answer, states, layers, lm_head, k, temperature)
            for name, drafter in drafters.items()
        }
        acceptance[COPY_NAME] = _copy_acceptance(tokens, answer, states.final_hidden_states, lm_head, k, temperature)
        for name, columns in acceptance.items():
            by_sampling = {
                DraftSampling.GREEDY: (columns.greedy, columns.greedy_text),
                DraftSampling.DRAWN: (columns.drawn, columns.drawn_text),
            }
            for sampling in samplings:
                at_position, of_text = (part.transpose(0, 1).tolist() for part in by_sampling[sampling])
                for row, index in enumerate(indices):
                    counts[Condition(temperature, sampling)][name][index] = expected_counts(
                        at_position[row], of_text[row], texts[index].prompt_length, texts[index].answer_end
                    )
    return counts


def _drafter_acceptance(
    drafter: Drafter,
    tokens: Tensor,
    answer: Tensor,
    states: TargetHiddenStates,
    layers: Sequence[int],
    lm_head: Tensor,
    k: int,
    temperature: float,
) -> ColumnAcceptance:
    parts = dict(zip(layers, states.aux_hidden_states.chunk(len(layers), dim=-1), strict=True))
    aux = torch.cat([parts[layer] for layer in drafter.config.aux_layer_ids], dim=-1)
    test = TrainingTimeTest(drafter, lm_head, step_weights=(1.0,) * k, temperatures=(temperature,))
    return test(TrainingBatch(tokens, answer, aux, states.final_hidden_states)).acceptance[0]  # type: ignore[no-any-return]


def _copy_acceptance(
    tokens: Tensor, answer: Tensor, final_hidden_states: Tensor, lm_head: Tensor, k: int, temperature: float
) -> ColumnAcceptance:
    """Return the acceptance of a drafter with the target's own distribution."""
    rows, positions = answer[:, 1:].nonzero(as_tuple=True)  # the position before each token of the answer
    greedy, greedy_text, drawn = (torch.zeros(*tokens.shape, device=tokens.device) for _ in range(3))
    size = max(1, LOGIT_SLICE_ELEMENTS // len(lm_head))
    for row, position in zip(torch.split(rows, size), torch.split(positions, size), strict=True):
        drawn[row, position] = 1.0
        if temperature == 0:
            greedy[row, position] = greedy_text[row, position] = 1.0
            continue
        logits = (final_hidden_states[row, position].to(lm_head.dtype) @ lm_head.T).float()
        greedy[row, position] = (logits / temperature).softmax(-1).amax(-1)
        greedy_text[row, position] = (logits.argmax(-1) == tokens[row, position + 1]).float()

    def by_column(values: Tensor) -> Tensor:
        """Return [k, batch, length - 1]: column t of step i has the values of position t + 1 + i."""
        ahead = torch.nn.functional.pad(values, (0, k))
        return torch.stack([ahead[:, 1 + step : step + tokens.shape[1]] for step in range(k)])

    return ColumnAcceptance(by_column(drawn), by_column(greedy), by_column(drawn), by_column(greedy_text))


def to_json(acceptance: ExactAcceptance) -> dict[str, Any]:
    """Return `acceptance`, a row for each condition, category and drafter, and `gains` of the second drafter over the first."""
    rows: list[dict[str, Any]] = []
    gains: list[dict[str, Any]] = []
    for condition, by_name in acceptance.counts.items():
        for category in acceptance.category_names:
            key = {
                "temperature": condition.temperature,
                "draft_sampling": condition.draft_sampling.value,
                "category": category or "total",
            }
            rows += [key | {"drafter": name} | _describe(acceptance, condition, name, category) for name in by_name]
            gain = gain_between(acceptance, condition, category)
            if gain is not None:
                gains.append(key | {"gain": _number(gain.estimate), "low": _number(gain.low), "high": _number(gain.high)})
    return {"prompts": len(acceptance.categories), "acceptance": rows, "gains": gains}


def gain_between(acceptance: ExactAcceptance, condition: Condition, category: str | None) -> Interval | None:
    """Return the relative gain of the second drafter over the first; None if there is only one."""
    names = [name for name in acceptance.counts[condition] if name != COPY_NAME]
    if len(names) < 2:
        return None
    return paired_gain(*(acceptance.of_category(condition, name, category) for name in names[:2]))


def _describe(acceptance: ExactAcceptance, condition: Condition, name: str, category: str | None) -> dict[str, Any]:
    counts, copy = (acceptance.of_category(condition, each, category).sum(0) for each in (name, COPY_NAME))
    length = acceptance_length(counts)
    return {
        "acceptance_length": _number(float(length)),
        "share_of_copy": _number(float(length / acceptance_length(copy))),
        "drafts": _number(float(counts[0])),
        "acceptance_per_position": [_number(rate) for rate in (counts[1:] / counts[0]).tolist()],
        "conditional_acceptance": [_number(rate) for rate in (counts[1:] / counts[:-1]).tolist()],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)
