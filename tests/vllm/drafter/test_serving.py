"""The shipped drafters served by real vLLM: no answer changes, and as much is accepted as `aerie_drafter.evaluate` says.

Also what vLLM does with a drafter whose configuration does not say what its weights are: mostly nothing that anyone would see,
which is why `aerie_drafter.export` writes every switch and `aerie_drafter.inspect` compares.

One server at a time, each started once and ended before the next; what tests look at is measured in between.
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
from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts, evaluate_texts
from aerie_drafter.model import Drafter

# Most of it is for installing vLLM, which the first test's fixtures may have to do.
pytestmark = pytest.mark.timeout(2400)

BUNDLE = Path(aerie_drafter.__file__).parents[1] / "bundle"
COUNT, MAX_TOKENS, K = 200, 64, 3
FEW = 80
"""Prompts for drafters that are wrongly configured."""

AGREE = 0.02
"""Served and offline acceptance length may differ by this part. Measured: not in the first four digits."""

TIE = 1e-4
"""Logits that are closer than this are equal to float32 rounding, and either token is the target's greedy choice. A server
that verifies several tokens at once adds up in another order than one that goes token by token."""


@dataclass(frozen=True)
class Measured:
    """What a server did with the prompts."""

    answers: list[list[int]]
    drafts: float
    accepted: list[float]
    """Per position."""
    greedy: list[list[GreedyCompletion]]
    """Twice the answers to the prompts by which the operator sees that a drafter changes nothing, once each under load."""

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted) / self.drafts


Measure = Callable[..., Measured]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """The bundle's held-out questions, then some of them as texts to go on with; kinds are mixed in any first part of it."""
    asked = read_prompts(BUNDLE / "prompts.jsonl")
    texts = [Prompt(prompt.category, text=prompt.messages[0]["content"]) for prompt in asked]
    found = [*asked, *texts][:COUNT]
    assert len(found) == COUNT
    random.Random(0).shuffle(found)  # noqa: S311 - an order, no secret
    return found


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """The target in this process (with a drafter, which evaluation always has)."""
    return ModelPair.load(BUNDLE / "target", BUNDLE / "eagle31")


@pytest.fixture(scope="module")
def measure(serve: Callable[..., AbstractContextManager[Any]], prompts: list[Prompt], pair: ModelPair) -> Measure:
    """Start a server with a drafter, let it answer, end it."""

    def once(drafter: Path | None, count: int = COUNT) -> Measured:
        ids = [prompt.encode(pair.tokenizer) for prompt in prompts[:count]]
        speculation = drafter and {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K}
        with serve(BUNDLE / "target", speculation) as server:
            answers = server.answer(ids, MAX_TOKENS)
            counters = server.counters()
            with ThreadPoolExecutor(8) as pool:
                greedy = [list(pool.map(partial(asked, server.client), PROBE_PROMPTS)) for _ in range(2)]
        accepted = [counters.get(str(position), 0.0) for position in range(K)]
        return Measured(answers, counters.get("drafts", 0.0), accepted, greedy)

    return once


@pytest.fixture(scope="module")
def plain(measure: Measure) -> Measured:
    """Without speculation."""
    return measure(None)


@pytest.fixture(scope="module")
def served(measure: Measure) -> dict[str, Measured]:
    """With each of the two drafters."""
    return {name: measure(BUNDLE / name) for name in ("eagle3", "eagle31")}


@pytest.fixture(scope="module")
def texts(pair: ModelPair, prompts: list[Prompt]) -> list[AnsweredText]:
    """The target's own answers, made in this process once for all drafters."""
    ids = [prompt.encode(pair.tokenizer) for prompt in prompts]
    return answer_prompts(pair, ids, EvaluationOptions(num_speculative_tokens=K, max_tokens=MAX_TOKENS))


def asked(client: httpx.Client, prompt: str) -> GreedyCompletion:
    """The answer to the operator's own request."""
    answer = client.post(
        COMPLETIONS_PATH, content=build_completion_request("target", prompt), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    return parse_completion(answer.content)


def offline(drafter: Path, texts: list[AnsweredText]) -> float:
    """Acceptance length by `aerie_drafter.evaluate`."""
    return evaluate_texts(ModelPair.load(BUNDLE / "target", drafter), texts, K).acceptance_length


def gap(pair: ModelPair, tokens: list[int], one: int, other: int) -> float:
    """By how much the target prefers one next token to the other after `tokens`, in logits."""
    logits = pair.target(torch.tensor([tokens])).logits[0, -1]
    return float((logits[one] - logits[other]).abs())


@pytest.mark.parametrize("drafter", ["eagle3", "eagle31"])
def test_answers_are_those_without_speculation(
    drafter: str, served: dict[str, Measured], plain: Measured, prompts: list[Prompt], pair: ModelPair
) -> None:
    assert plain.drafts == 0
    assert served[drafter].drafts > 0
    assert sum(map(len, plain.answers)) > 10 * COUNT
    gaps = {}
    for prompt, expected, found in zip(prompts, plain.answers, served[drafter].answers, strict=True):
        if found != expected:
            at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
            ids = prompt.encode(pair.tokenizer)
            gaps[pair.tokenizer.decode(ids)] = gap(pair, ids + expected[:at], expected[at], found[at])
    logging.getLogger(__name__).info("%s: %d of %d answers differ", drafter, len(gaps), COUNT)
    assert all(each < TIE for each in gaps.values()), f"answers differ where the target prefers its token by {gaps}"


@pytest.mark.parametrize("drafter", ["eagle3", "eagle31"])
def test_the_operator_sees_that_answers_are_the_same(drafter: str, served: dict[str, Measured], plain: Measured) -> None:
    first, again = served[drafter].greedy
    found = EquivalenceResult(tuple(map(compare_answers, first, plain.greedy[0], plain.greedy[1])), len(PROBE_PROMPTS))
    logging.getLogger(__name__).info("%s: %s", drafter, found.message)
    assert (found.canary_difference_count, found.control_difference_count) == (0, 0)
    assert [find_first_difference(one, other) for one, other in zip(first, again, strict=True)] == [None] * len(PROBE_PROMPTS)
    assert sum(len(one.tokens) for one in first) > 8 * len(PROBE_PROMPTS), "there is something to be compared"


@pytest.mark.parametrize("drafter", ["eagle3", "eagle31"])
def test_acceptance_length_is_the_offline_one(drafter: str, served: dict[str, Measured], texts: list[AnsweredText]) -> None:
    found, expected = served[drafter].acceptance_length, offline(BUNDLE / drafter, texts)
    logging.getLogger(__name__).info("%s: served %.4f, offline %.4f", drafter, found, expected)  # --log-cli-level=info
    assert found == pytest.approx(expected, rel=AGREE)


def test_without_norm_output_less_is_accepted(measure: Measure, texts: list[AnsweredText], tmp_path: Path) -> None:
    """vLLM cannot know it from the weights, and says nothing."""
    right, wrong = BUNDLE / "eagle31", tmp_path / "drafter"
    shutil.copytree(right, wrong)
    config = json.loads((right / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "norm_output": False}))
    found, expected = measure(wrong, FEW).acceptance_length, offline(right, texts[:FEW])
    logging.getLogger(__name__).info("with norm_output: %.4f, without: served %.4f", expected, found)
    assert found == pytest.approx(offline(wrong, texts[:FEW]), rel=AGREE)
    assert found < expected - 0.1


def test_switches_of_3_1_on_weights_of_3_cost_acceptance(pair: ModelPair, texts: list[AnsweredText]) -> None:
    """What vLLM makes of them in silence, as test_parity.py has it: norms of weight 1 before fc, and the state after the norm."""
    right = checkpoint.load_drafter(BUNDLE / "eagle3", target=BUNDLE / "target")
    wrong = Drafter(replace(right.config, fc_norm=True, norm_output=True)).requires_grad_(False)
    wrong.load_state_dict({**wrong.state_dict(), **right.state_dict()})
    lengths = [
        evaluate_texts(ModelPair(pair.target, pair.tokenizer, drafter), texts, K).acceptance_length for drafter in (right, wrong)
    ]
    logging.getLogger(__name__).info("weights of 3: %.4f, with the switches of 3.1: %.4f", *lengths)
    assert lengths[1] < lengths[0] - 0.1
