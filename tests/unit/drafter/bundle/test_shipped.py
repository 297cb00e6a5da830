"""The committed bundle is complete, matches its registry, and is consistent."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from aerie_drafter.bundle import find_bundle_path
from aerie_drafter.checkpoint import compute_model_digest, read_drafter_config, read_provenance
from aerie_drafter.drift import measure_drift
from aerie_drafter.evaluate import read_prompts
from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.evaluate.speculation import TokenSampler, decode_speculatively
from bundle import registry

DRAFTERS = ("eagle3", "eagle31", "weak")


@pytest.fixture(scope="module")
def committed_registry() -> dict[str, Any]:
    committed_registry: dict[str, Any] = json.loads(find_bundle_path("registry.json").read_text())
    return committed_registry


@pytest.fixture(scope="module")
def answers() -> list[AnsweredText]:
    pair = ModelPair.load(find_bundle_path("target"), find_bundle_path("eagle31"))
    prompts = read_prompts(find_bundle_path("prompts.jsonl"))[::6]
    return answer_prompts(
        pair, [prompt.encode(pair.tokenizer) for prompt in prompts], EvaluationOptions(num_speculative_tokens=8, max_tokens=64)
    )


def test_digests_are_those_of_the_registry(committed_registry: dict[str, Any]) -> None:
    assert committed_registry["target"]["digest"] == compute_model_digest(find_bundle_path("target"))
    assert committed_registry["target"]["tokenizer_sha256"] == registry._sha256(find_bundle_path("target") / "tokenizer.json")
    assert tuple(committed_registry["drafters"]) == DRAFTERS
    for name in DRAFTERS:
        assert committed_registry["drafters"][name]["digest"] == compute_model_digest(find_bundle_path(name))
        assert read_provenance(find_bundle_path(name)).target_digest in ("", committed_registry["target"]["digest"])


def test_the_bundle_is_small() -> None:
    size = sum(file.stat().st_size for file in find_bundle_path().rglob("*") if file.is_file())
    assert size <= 40e6


def test_drafters_have_the_eagle_version_of_their_name() -> None:
    assert [read_drafter_config(find_bundle_path(name)).eagle_version for name in DRAFTERS] == [
        "EAGLE 3",
        "EAGLE 3.1",
        "EAGLE 3.1",
    ]


def test_acceptance_lengths_are_in_their_ranges(committed_registry: dict[str, Any], answers: list[AnsweredText]) -> None:
    lengths = {name: committed_registry["drafters"][name]["acceptance_length"] for name in DRAFTERS}
    assert 2.2 <= lengths["eagle31"] <= 3.2
    assert 2.2 <= lengths["eagle3"] <= 3.2
    assert lengths["weak"] <= lengths["eagle31"] - 0.5
    for name in DRAFTERS:  # a sixth of the prompts, truncated
        measured = evaluate_texts(
            ModelPair.load(find_bundle_path("target"), find_bundle_path(name)), answers, 3
        ).acceptance_length
        assert measured == pytest.approx(lengths[name], rel=0.15)


def test_the_walk_equals_the_loop_and_speculation_is_lossless(answers: list[AnsweredText]) -> None:
    for name in ("eagle3", "eagle31"):
        pair = ModelPair.load(find_bundle_path("target"), find_bundle_path(name))
        for text in answers[:6]:
            prompt = text.tokens[: text.prompt_length].tolist()
            emitted, counted = decode_speculatively(pair.target, pair.drafter, prompt, 3, 64, pair.end_tokens, TokenSampler())
            assert emitted == text.tokens[text.prompt_length : text.answer_end].tolist()
            assert counted == evaluate_texts(pair, [text], 3)


def test_eagle31_keeps_the_norm_of_its_state(answers: list[AnsweredText]) -> None:
    ratios = {
        name: measure_drift(ModelPair.load(find_bundle_path("target"), find_bundle_path(name)), answers).state_norm_ratio
        for name in DRAFTERS[:2]
    }
    assert ratios["eagle31"] == pytest.approx(1.0, abs=0.1)
    assert ratios["eagle3"] > ratios["eagle31"]


def test_states_are_float32() -> None:
    pair = ModelPair.load(find_bundle_path("target"), find_bundle_path("eagle3"))
    assert pair.target.model.dtype == torch.float32
    assert json.loads((find_bundle_path("target") / "config.json").read_text())["dtype"] == "float32"
