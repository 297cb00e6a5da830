"""Speculation is lossless at any temperature on the lab's vLLM: sampled answers have the target's distribution with any drafts.

vLLM's CPU backend as released is not lossless (issue 55005). The last test shows that the comparison detects that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aerie_drafter.evaluate.prompts import read_prompts
from aerie_lab.testing.agreement import BUNDLE_FOLDER, build_speculative_config, start_engine
from aerie_lab.testing.sampled import (
    SAMPLING_SETTINGS,
    UNFILTERED_SAMPLING_SETTINGS,
    UNPATCHED_ENVIRONMENT,
    ChatRequest,
    EngineSamples,
    greedy_agreement,
    permutation_p_value,
    sample_engine,
    send_requests,
)
from tests.nightly import use_each_nth

ANSWERS_PER_KIND = 240
"""Number of answers of each kind."""
ERROR_RATE = 0.001
"""Error rate of the test for engines with the same distribution. Seeds are fixed, so the result does not change."""
CRASHING_REQUESTS = [
    ChatRequest([{"role": "user", "content": "What is a module?"}], tokens, SAMPLING_SETTINGS[2], 1) for tokens in (1, 6)
]
"""Requests that end the engine as released (aerie_vllm_sampling): top_k, no top_p, and a step without a draft."""
DRAFTS = ("greedy", "probabilistic")
UNPATCHED = "unmended"
"""Name of the engine as released; it determines the seeds."""

pytestmark = pytest.mark.timeout(2400)  # four engines start, and the first test may have to install vLLM


@pytest.fixture(scope="module")
def engine_samples(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineSamples]:
    """Return a function for the answers of an engine: `off`, a draft sampling, or `UNPATCHED`. Each engine runs once."""
    folder = tmp_path_factory.mktemp("sampling")
    prompts = [prompt.messages for prompt in read_prompts(BUNDLE_FOLDER / "prompts.jsonl")][::40]
    samples_by_engine: dict[str, EngineSamples] = {}

    def sample(name: str) -> EngineSamples:
        if name not in samples_by_engine:
            config = build_speculative_config(
                BUNDLE_FOLDER / "eagle31", draft_sample_method="greedy" if name == UNPATCHED else name
            )
            flags = () if name == "off" else ("--speculative-config", config)
            with start_engine(
                "real", vllm, folder, *flags, variables=UNPATCHED_ENVIRONMENT if name == UNPATCHED else None
            ) as running:
                if name != UNPATCHED:
                    send_requests(running, CRASHING_REQUESTS)
                samples_by_engine[name] = sample_engine(
                    running,
                    name,
                    prompts,
                    ANSWERS_PER_KIND,
                    UNFILTERED_SAMPLING_SETTINGS if name == UNPATCHED else SAMPLING_SETTINGS,
                )
        return samples_by_engine[name]

    return sample


@pytest.mark.parametrize("drafts", use_each_nth(2, DRAFTS))
def test_sampled_answers_follow_the_targets_distribution(engine_samples: Callable[[str], EngineSamples], drafts: str) -> None:
    assert permutation_p_value(engine_samples("off"), engine_samples(drafts)) > ERROR_RATE


@pytest.mark.parametrize("drafts", use_each_nth(2, DRAFTS))
def test_greedy_answers_beside_sampled_ones_are_the_targets(engine_samples: Callable[[str], EngineSamples], drafts: str) -> None:
    # float32 rounds differently if a step has several tokens.
    assert greedy_agreement(engine_samples("off"), engine_samples(drafts)) > 0.95


@pytest.mark.nightly  # the fault of an engine that the lab does not run
def test_an_unpatched_engine_has_another_distribution(engine_samples: Callable[[str], EngineSamples]) -> None:
    assert permutation_p_value(engine_samples("off"), engine_samples(UNPATCHED)) < ERROR_RATE
