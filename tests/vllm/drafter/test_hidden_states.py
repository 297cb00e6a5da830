"""Hidden states that vLLM writes with `extract_hidden_states` are those of the same target in this process.

Training on files relies on that: the reader accepts vLLM's files, layer ids are the same on both sides, and the last id is the
state before the final norm.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie_drafter.errors import TargetError
from aerie_drafter.train.state_server import HiddenStateServer, write_state_files
from aerie_drafter.train.states import (
    HiddenStateFiles,
    InProcessTarget,
    StateLayout,
    StoredHiddenStates,
    extract_target_parts,
    load_model,
)
from aerie_lab.testing.model import Shape, write_tiny_llama

# Most of the timeout is for a first installation of vLLM.
pytestmark = pytest.mark.timeout(2400)

LAYERS = 4
AUX = (0, 1, 3)

LAYOUT = StateLayout((*AUX, LAYERS), Shape().hidden)
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
def server(
    serve: Callable[..., AbstractContextManager[Any]], target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Yield the address of a vLLM that extracts hidden states, and the folder that it writes to."""
    folder = tmp_path_factory.mktemp("shared")
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYOUT.layer_ids)}},
    }
    transfer = {
        "kv_connector": "HiddenStatesOnCpu",
        "kv_connector_module_path": "on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    flags = [f"--kv-transfer-config={json.dumps(transfer)}", "--no-enable-chunked-prefill", "--no-enable-prefix-caching"]
    with serve(target, speculation, *flags, "--max-model-len=2048", "--max-num-batched-tokens=2048") as running:
        yield str(running.client.base_url), folder


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return load_model(str(target), None, torch.float32, torch.device("cpu"))


def test_states_are_those_of_the_target_in_process(
    server: tuple[str, Path], model: Any, texts: list[torch.Tensor], tmp_path: Path
) -> None:
    """Read files that a run of several requests at a time wrote; the server's own files are removed."""
    url, shared = server
    parts, in_process = extract_target_parts(model), InProcessTarget(model, AUX)
    connection = HiddenStateServer(url, "target", parts, LAYOUT)
    assert write_state_files(connection, tmp_path / "states", texts, "sha256:0", concurrency=3) == len(texts)
    assert list(shared.iterdir()) == []
    written = StoredHiddenStates(HiddenStateFiles(tmp_path / "states", LAYOUT, "sha256:0").load, parts, AUX, LAYOUT)
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


def test_another_target_is_noticed(server: tuple[str, Path], model: Any, texts: list[torch.Tensor]) -> None:
    """Its lm_head gives another next token than the server."""
    url, _ = server
    parts = extract_target_parts(model)
    connection = HiddenStateServer(url, "target", parts._replace(lm_head=parts.lm_head.roll(1, 0)), LAYOUT)
    with pytest.raises(TargetError, match="after the same states"):
        list(map(connection.extract, texts))
