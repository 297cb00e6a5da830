"""Speculation is lossless at any temperature on the lab's vLLM: sampled answers are the target's own, whatever drafts.

vLLM's CPU backend as released is not (issue 55005): the last test shows that the comparison sees it, so the others could fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aerie_drafter.evaluate.prompts import read_prompts
from aerie_lab.testing.agreement import BUNDLE, engine, speculation
from aerie_lab.testing.sampled import PLAIN, SAMPLINGS, UNMENDED, Ask, Samples, agreeing, ask, p_value, sample

EACH = 240
"""Answers of each kind."""
CHANCE = 0.001
"""Engines that draw alike are told apart this often; seeds are fixed, so what passes once goes on passing."""
ALONE = [Ask([{"role": "user", "content": "What is a module?"}], tokens, SAMPLINGS[2], 1) for tokens in (1, 6)]
"""Requests that the engine dies of as it was released (aerie_vllm_sampling): top_k, no top_p, and a step without a draft."""
DRAFTS = ("greedy", "probabilistic")

pytestmark = pytest.mark.timeout(2400)  # four engines start, and the first test may have to install vLLM


@pytest.fixture(scope="module")
def drawn(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Samples]:
    """The answers of an engine by its name: `off`, a way of drafting, or `unmended`; each engine runs once."""
    folder = tmp_path_factory.mktemp("sampling")
    prompts = [prompt.messages for prompt in read_prompts(BUNDLE / "prompts.jsonl")][::40]
    found: dict[str, Samples] = {}

    def take(name: str) -> Samples:
        if name not in found:
            config = speculation(BUNDLE / "eagle31", draft_sample_method="greedy" if name == "unmended" else name)
            words = () if name == "off" else ("--speculative-config", config)
            with engine("real", vllm, folder, *words, variables=UNMENDED if name == "unmended" else None) as running:
                if name != "unmended":
                    ask(running, ALONE)
                found[name] = sample(running, name, prompts, EACH, PLAIN if name == "unmended" else SAMPLINGS)
        return found[name]

    return take


@pytest.mark.parametrize("drafts", DRAFTS)
def test_sampled_answers_with_drafts_follow_the_targets_distribution(drawn: Callable[[str], Samples], drafts: str) -> None:
    assert p_value(drawn("off"), drawn(drafts)) > CHANCE


@pytest.mark.parametrize("drafts", DRAFTS)
def test_greedy_answers_in_a_batch_with_sampled_ones_are_the_targets(drawn: Callable[[str], Samples], drafts: str) -> None:
    assert agreeing(drawn("off"), drawn(drafts)) > 0.95  # float32 rounds differently in a pass over several tokens


def test_an_engine_without_the_mend_is_told_apart(drawn: Callable[[str], Samples]) -> None:
    assert p_value(drawn("off"), drawn("unmended")) < CHANCE
