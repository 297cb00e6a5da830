"""Hidden states that vLLM writes with `extract_hidden_states` are those of the same target in this process.

Training on files relies on that: the reader accepts vLLM's files, layer ids are the same on both sides, and the last id is the
state before the final norm.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie_drafter.train.states import HiddenStateFiles, InProcessTarget, extract_target_parts, load_model
from aerie_lab.testing.model import Shape, write_tiny_llama

# Most of the timeout is for a first installation of vLLM.
pytestmark = pytest.mark.timeout(2400)

LAYERS = 4
AUX = (0, 1, 3)
LENGTHS = (1, 7, 64, 65, 300)
"""Tokens of the texts: full and partial blocks of the cache."""

MAX_ROUNDING = 1e-5
"""Maximum difference, relative to the largest number. Measured: up to 1e-6."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target", Shape(layers=LAYERS))


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 258, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def files(
    serve: Callable[..., AbstractContextManager[Any]],
    target: Path,
    texts: list[torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return the folder of the files that vLLM wrote for the texts."""
    folder = tmp_path_factory.mktemp("states")
    layers = [*AUX, LAYERS]
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    transfer = {
        "kv_connector": "HiddenStatesOnCpu",
        "kv_connector_module_path": "on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    flags = [f"--kv-transfer-config={json.dumps(transfer)}", "--no-enable-chunked-prefill", "--no-enable-prefix-caching"]
    with serve(target, speculation, *flags, "--max-model-len=2048", "--max-num-batched-tokens=2048") as server:
        server.generate([text.tolist() for text in texts], 1)
        for file in folder.glob("*.lock"):  # exists before the response, and is held until the file is complete
            with file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
    return folder


def test_states_are_those_of_the_target_in_process(files: Path, target: Path, texts: list[torch.Tensor]) -> None:
    model = load_model(str(target), None, torch.float32, torch.device("cpu"))
    written = HiddenStateFiles(files, extract_target_parts(model), AUX, [*AUX, LAYERS])
    in_process = InProcessTarget(model, AUX)
    for text in texts:
        actual, expected = (
            written.fetch_hidden_states(text.unsqueeze(0), [[text]]),
            in_process.fetch_hidden_states(text.unsqueeze(0)),
        )
        for state, expected_state in zip(actual, expected, strict=True):
            assert state.shape == expected_state.shape
            difference = float((state - expected_state).abs().max() / expected_state.abs().max())
            logging.getLogger(__name__).info("%d tokens: %.1e", len(text), difference)  # shown by --log-cli-level=info
            assert difference < MAX_ROUNDING
