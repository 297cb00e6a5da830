"""The shipped drafters served by real vLLM: answers do not change, and acceptance equals that of `aerie_drafter.evaluate`.

vLLM accepts most drafters whose configuration contradicts their weights, without a message. So `aerie_drafter.export` writes
every switch, and `aerie_drafter.inspect` compares.

One server runs at a time. Each starts once, is measured, and ends before the next.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import aerie_drafter
from aerie.analysis.equivalence import EquivalenceResult, compare_answers, find_first_difference
from aerie.engine.completions import COMPLETIONS_PATH, PROBE_PROMPTS, GreedyCompletion, build_completion_request, parse_completion
from aerie_drafter import checkpoint
from aerie_drafter.evaluate import Prompt, read_prompts
from aerie_drafter.evaluate.acceptance import AcceptanceCounts, AnsweredText
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.model import Drafter
from tests.nightly import at_night

# Most of the timeout is for a first installation of vLLM.
pytestmark = pytest.mark.timeout(2400)

BUNDLE = Path(aerie_drafter.__file__).parents[1] / "bundle"
COUNT, MAX_TOKENS, K = 200, 64, 3
SHORT_COUNT = 80
"""Number of prompts for drafters with a wrong configuration."""

LENGTH_TOLERANCE = 0.02
"""Relative tolerance of served and offline acceptance length. Measured: equal in the first four digits."""

COUNT_TOLERANCE = 0.01
"""Relative tolerance of counts of drafts and of accepted tokens."""

ROUNDING_DIFFERENCE = 1e-4
"""Difference of logits that is rounding of float32, so that either token is the target's greedy choice. A server that verifies
several tokens at once adds in another order than one that generates token by token."""


@dataclass(frozen=True)
class Measurement:
    """Answers and counters of a server for the prompts."""

    answers: list[list[int]]
    drafts: float
    accepted: list[float]
    """Accepted tokens per position."""
    greedy: list[list[GreedyCompletion]]
    """Greedy answers to the operator's probe prompts, twice, under load."""

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted) / self.drafts


Measure = Callable[..., Measurement]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Return the bundle's held-out prompts, and some of them as texts to continue, shuffled."""
    chat_prompts = read_prompts(BUNDLE / "prompts.jsonl")
    texts = [Prompt(prompt.category, text=prompt.messages[0]["content"]) for prompt in chat_prompts]
    mixed = [*chat_prompts, *texts][:COUNT]
    assert len(mixed) == COUNT
    random.Random(0).shuffle(mixed)  # noqa: S311 - an order, no secret
    return mixed


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """Load the target in this process (with a drafter, which evaluation requires)."""
    return ModelPair.load(BUNDLE / "target", BUNDLE / "eagle31")


@pytest.fixture(scope="module")
def measure(serve: Callable[..., AbstractContextManager[Any]], prompts: list[Prompt], pair: ModelPair) -> Measure:
    """Return a function that starts a server with a drafter, measures its answers, and ends it."""

    def measure_server(drafter: Path | None, count: int = COUNT) -> Measurement:
        ids = [prompt.encode(pair.tokenizer) for prompt in prompts[:count]]
        speculation = drafter and {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K}
        with serve(BUNDLE / "target", speculation) as server:
            answers = server.generate(ids, MAX_TOKENS)
            counters = server.counters()
            with ThreadPoolExecutor(8) as pool:
                greedy = [list(pool.map(partial(request_greedy_answer, server.client), PROBE_PROMPTS)) for _ in range(2)]
        accepted = [counters.get(str(position), 0.0) for position in range(K)]
        return Measurement(answers, counters.get("drafts", 0.0), accepted, greedy)

    return measure_server


@pytest.fixture(scope="module")
def without_speculation(measure: Measure) -> Measurement:
    """Measure the server without speculation."""
    return measure(None)


@pytest.fixture(scope="module", params=["eagle31", at_night("eagle3")])
def drafter(request: pytest.FixtureRequest) -> str:
    """Return the name of a shipped drafter."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(measure: Measure, drafter: str) -> Measurement:
    """Measure the server with the drafter."""
    return measure(BUNDLE / drafter)


@pytest.fixture(scope="module")
def texts(pair: ModelPair, prompts: list[Prompt]) -> list[AnsweredText]:
    """Return the target's own answers, generated once in this process for all drafters."""
    ids = [prompt.encode(pair.tokenizer) for prompt in prompts]
    return answer_prompts(pair, ids, EvaluationOptions(num_speculative_tokens=K, max_tokens=MAX_TOKENS))


def request_greedy_answer(client: httpx.Client, prompt: str) -> GreedyCompletion:
    """Return the answer to the operator's own request."""
    response = client.post(
        COMPLETIONS_PATH, content=build_completion_request("target", prompt), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200, response.text
    return parse_completion(response.content)


def offline_acceptance_length(drafter: Path, texts: list[AnsweredText]) -> float:
    """Return the acceptance length that `aerie_drafter.evaluate` measures."""
    return evaluate_texts(ModelPair.load(BUNDLE / "target", drafter), texts, K).acceptance_length


def logit_difference(pair: ModelPair, tokens: list[int], first: int, second: int) -> float:
    """Return the difference of the target's logits of two next tokens after `tokens`."""
    logits = pair.target(torch.tensor([tokens])).logits[0, -1]
    return float((logits[first] - logits[second]).abs())


def test_answers_equal_those_without_speculation(
    drafter: str, served: Measurement, without_speculation: Measurement, prompts: list[Prompt], pair: ModelPair
) -> None:
    assert without_speculation.drafts == 0
    assert served.drafts > 0
    assert sum(map(len, without_speculation.answers)) > 10 * COUNT
    gaps = {}
    for prompt, expected, actual in zip(prompts, without_speculation.answers, served.answers, strict=True):
        if actual != expected:
            position = next(i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b)
            ids = prompt.encode(pair.tokenizer)
            gaps[pair.tokenizer.decode(ids)] = logit_difference(
                pair, ids + expected[:position], expected[position], actual[position]
            )
    logging.getLogger(__name__).info("%s: %d of %d answers differ", drafter, len(gaps), COUNT)
    assert all(logit_gap < ROUNDING_DIFFERENCE for logit_gap in gaps.values()), (
        f"answers differ where the target prefers its token by {gaps}"
    )


def test_greedy_answers_are_equivalent(drafter: str, served: Measurement, without_speculation: Measurement) -> None:
    first, second = served.greedy
    result = EquivalenceResult(
        tuple(map(compare_answers, first, without_speculation.greedy[0], without_speculation.greedy[1])), len(PROBE_PROMPTS)
    )
    logging.getLogger(__name__).info("%s: %s", drafter, result.message)
    assert (result.canary_difference_count, result.control_difference_count) == (0, 0)
    assert [find_first_difference(answer, repeated) for answer, repeated in zip(first, second, strict=True)] == [None] * len(
        PROBE_PROMPTS
    )
    assert sum(len(answer.tokens) for answer in first) > 8 * len(PROBE_PROMPTS), "there are tokens to compare"


def test_acceptance_length_equals_the_offline_one(drafter: str, served: Measurement, texts: list[AnsweredText]) -> None:
    served_length, offline_length = served.acceptance_length, offline_acceptance_length(BUNDLE / drafter, texts)
    lengths = (drafter, served_length, offline_length)
    logging.getLogger(__name__).info("%s: served %.4f, offline %.4f", *lengths)  # shown by --log-cli-level=info
    assert served_length == pytest.approx(offline_length, rel=LENGTH_TOLERANCE)


@pytest.mark.nightly  # test_parity.py compares two layers with a window
def test_two_layers_with_a_window_accept_as_offline(
    measure: Measure, pair: ModelPair, texts: list[AnsweredText], tmp_path: Path
) -> None:
    """The shipped drafter with a second layer of random weights, and with a window that most answers exceed."""
    shipped = checkpoint.load_drafter(BUNDLE / "eagle31", target=BUNDLE / "target")
    torch.manual_seed(0)
    two_layers = Drafter(replace(shipped.config, num_hidden_layers=2))
    weights = {**two_layers.state_dict(), **shipped.state_dict()}
    for name in ("layers.1.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight"):
        weights[name] = 10 * weights[name]  # so that the layer changes drafts

    def build(num_layers: int, window: int | None) -> Drafter:
        drafter = Drafter(replace(shipped.config, num_hidden_layers=num_layers, sliding_window=window)).requires_grad_(False)
        drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
        return drafter

    def evaluate(drafter: Drafter) -> AcceptanceCounts:
        return evaluate_texts(ModelPair(pair.target, pair.tokenizer, drafter), texts[:SHORT_COUNT], K)

    drafter = build(2, 33)
    checkpoint.save_checkpoint(tmp_path / "drafter", drafter, {})
    served = measure(tmp_path / "drafter", SHORT_COUNT)
    offline, others = evaluate(drafter), [evaluate(build(1, 33)), evaluate(build(2, None))]
    logging.getLogger(__name__).info("served %s, offline %s, others %s", served, offline, others)
    assert served.drafts == pytest.approx(offline.drafts, rel=COUNT_TOLERANCE)
    assert served.accepted == pytest.approx(offline.accepted_per_position, rel=COUNT_TOLERANCE)
    for other in others:  # without the second layer, and without the window
        assert other.drafts < served.drafts * (1 - 5 * COUNT_TOLERANCE)


@pytest.mark.nightly  # a fault whose effect test_acceptance_is_lower_with_wrong_switches and test_parity.py show without a server
def test_acceptance_is_lower_without_norm_output(measure: Measure, texts: list[AnsweredText], tmp_path: Path) -> None:
    """vLLM cannot detect it from the weights, and logs nothing."""
    right, wrong = BUNDLE / "eagle31", tmp_path / "drafter"
    shutil.copytree(right, wrong)
    config = json.loads((right / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "norm_output": False}))
    served_length, offline_length = (
        measure(wrong, SHORT_COUNT).acceptance_length,
        offline_acceptance_length(right, texts[:SHORT_COUNT]),
    )
    logging.getLogger(__name__).info("with norm_output: %.4f, without: served %.4f", offline_length, served_length)
    assert served_length == pytest.approx(offline_acceptance_length(wrong, texts[:SHORT_COUNT]), rel=LENGTH_TOLERANCE)
    assert served_length < offline_length - 0.1


def test_acceptance_is_lower_with_wrong_switches(pair: ModelPair, texts: list[AnsweredText]) -> None:
    """vLLM loads them without a message (test_parity.py), with norms of weight 1 before fc, and the state after the norm."""
    right = checkpoint.load_drafter(BUNDLE / "eagle3", target=BUNDLE / "target")
    wrong = Drafter(replace(right.config, fc_norm=True, norm_output=True)).requires_grad_(False)
    wrong.load_state_dict({**wrong.state_dict(), **right.state_dict()})
    lengths = [
        evaluate_texts(ModelPair(pair.target, pair.tokenizer, drafter), texts, K).acceptance_length for drafter in (right, wrong)
    ]
    logging.getLogger(__name__).info("weights of 3: %.4f, with the switches of 3.1: %.4f", *lengths)
    assert lengths[1] < lengths[0] - 0.1
