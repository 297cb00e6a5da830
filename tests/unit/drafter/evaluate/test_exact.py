"""Expected acceptance of real models: against sampled serving, against the greedy walk, and beside a copy of the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie_drafter.evaluate.acceptance import compute_accepted_lengths, count_acceptance
from aerie_drafter.evaluate.answers import answer_batch
from aerie_drafter.evaluate.exact import (
    COPY_NAME,
    Condition,
    DraftSampling,
    ExactAcceptance,
    count_texts,
    measure_exact_acceptance,
    to_json,
)
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair
from aerie_drafter.evaluate.speculation import TokenSampler, decode_speculatively
from aerie_drafter.model import ProjectedTokens
from tests.nightly import use_each_nth

PROMPTS = [[0, 3, 2, 5], [1, 1, 4, 6, 2, 3, 0], [5, 2]]
K = 3


class CopyDrafter(torch.nn.Module):
    """A drafter with the distributions of a target whose next token depends on the last one alone."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target, self.lm_head = target, target.lm_head
        self.fc = torch.nn.Linear(1, 1, bias=False).double()
        self.config = SimpleNamespace(aux_layer_ids=(1, 3), num_hidden_layers=1)
        self.draft_token_ids = torch.arange(target.config.vocab_size)
        self.t2d = torch.ones(target.config.vocab_size, dtype=torch.bool)

    def fuse_aux_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        return aux_hidden_states

    def project_tokens(self, tokens: Tensor) -> ProjectedTokens:
        return ProjectedTokens((self.target.model.norm(self.target.model.embed_tokens(tokens)),), ())

    def run_step(self, projected: ProjectedTokens, hidden: Tensor, _: object) -> tuple[Tensor, Tensor]:
        return projected.parts[0], hidden


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_an_exact_copy_reaches_the_figures_of_the_copy(make_pair: Callable[..., Any], temperature: float) -> None:
    target, other = make_pair(2)
    for layer in target.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    draw = torch.Generator().manual_seed(5)
    texts = answer_batch(
        target, PROMPTS * 4, max_tokens=20, extra_tokens=K, end_tokens=frozenset({6}), temperature=temperature, generator=draw
    )
    drafters: dict[str, Any] = {"copy": CopyDrafter(target.model), "other": other}
    measured = count_texts(target.model, drafters, texts, K, temperature)
    assert len(measured) == (2 if temperature else 1)
    for condition, counts in measured.items():
        torch.testing.assert_close(counts["copy"], counts[COPY_NAME])
        if condition.draft_sampling is DraftSampling.DRAWN or not temperature:
            assert torch.equal(counts[COPY_NAME][:, 1:], counts[COPY_NAME][:, :1].expand(-1, K))
        assert counts["other"][:, 1:].sum() < 0.9 * counts[COPY_NAME][:, 1:].sum()


def test_a_greedy_text_has_the_counters_of_the_walk(make_pair: Callable[..., Any]) -> None:
    for seed in range(3):
        target, drafter = make_pair(seed, draft_vocabulary=6)
        texts = answer_batch(target, PROMPTS, max_tokens=24, extra_tokens=K, end_tokens=frozenset({6}))
        [counts] = count_texts(target.model, {"d": drafter}, texts, K, 0.0).values()
        for text, counted in zip(texts, counts["d"].tolist(), strict=True):
            tokens = text.tokens.unsqueeze(0)
            [lengths] = compute_accepted_lengths(drafter, tokens, target(tokens).aux_hidden_states, K).tolist()
            walked = count_acceptance(lengths, text, K)
            assert counted == [walked.drafts, *walked.accepted_per_position]


@pytest.mark.parametrize(
    ("temperature", "sampling"),
    use_each_nth(3, [(1.0, DraftSampling.DRAWN), (1.0, DraftSampling.GREEDY), (0.7, DraftSampling.DRAWN)]),
)
def test_expected_counters_are_the_mean_of_sampled_serving(
    make_pair: Callable[..., Any], temperature: float, sampling: DraftSampling
) -> None:
    target, drafter = make_pair(3, draft_vocabulary=6)
    draw = torch.Generator().manual_seed(11)
    texts = answer_batch(
        target, [PROMPTS[1]] * 400, max_tokens=7, extra_tokens=K, end_tokens=frozenset(), temperature=temperature, generator=draw
    )
    expected = count_texts(target.model, {"d": drafter}, texts, K, temperature)[Condition(temperature, sampling)]["d"]
    sampler = TokenSampler(temperature, sampling is DraftSampling.DRAWN, draw)
    runs = [decode_speculatively(target, drafter, PROMPTS[1], K, 7, frozenset(), sampler)[1] for _ in range(120)]
    sampled = torch.tensor([[run.drafts, *run.accepted_per_position] for run in runs], dtype=torch.float64)
    error = (sampled.var(0) / len(sampled) + expected.var(0) / len(expected)).sqrt()
    assert ((sampled.mean(0) - expected.mean(0)).abs() < 4 * error + 1e-9).all()
    assert sampled.mean(0)[1] > 0.5, "hardly a draft is accepted: the test would prove nothing"


@pytest.fixture
def measured(make_pair: Callable[..., Any]) -> ExactAcceptance:
    target, first = make_pair(1)
    _, second = make_pair(4, norm_output=True)
    tokenizer: Any = SimpleNamespace(eos_token_id=6)
    target.model.generation_config.eos_token_id = None
    prompts: list[Any] = [
        SimpleNamespace(category=category, encode=lambda _, ids=ids: ids)
        for category, ids in zip(("a", "b", "a"), PROMPTS, strict=True)
    ]
    options = EvaluationOptions(num_speculative_tokens=2, max_tokens=12)
    pair = ModelPair(target, tokenizer, first)
    return measure_exact_acceptance(pair, {"first": first, "second": second}, prompts, options, draws=2)


def test_the_report_has_every_condition_category_and_drafter(measured: ExactAcceptance) -> None:
    report = json.loads(json.dumps(to_json(measured)))
    conditions = [(0.0, "greedy"), (0.7, "greedy"), (0.7, "drawn"), (1.0, "greedy"), (1.0, "drawn")]
    names = ("first", "second", COPY_NAME)
    assert [(row["temperature"], row["draft_sampling"], row["category"], row["drafter"]) for row in report["acceptance"]] == [
        (*condition, category, name) for condition in conditions for category in ("a", "b", "total") for name in names
    ]
    assert [row["category"] for row in report["gains"]] == ["a", "b", "total"] * 5
    for row in report["acceptance"]:
        assert row["share_of_copy"] == pytest.approx(1) if row["drafter"] == COPY_NAME else row["share_of_copy"] < 1
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["acceptance_per_position"]), abs=1e-5)
    by_drafter = [row["acceptance_length"] for row in report["acceptance"] if row["category"] == "total"][:2]
    assert report["gains"][2]["gain"] == pytest.approx(by_drafter[1] / by_drafter[0] - 1, abs=1e-5)
    assert report["gains"][1]["low"] is None  # a single prompt


def test_all_answers_of_a_prompt_count_as_one_prompt(measured: ExactAcceptance) -> None:
    for condition, by_name in measured.counts.items():
        for counts in by_name.values():
            assert counts.shape == (3, 3), condition
