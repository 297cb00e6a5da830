"""Hidden states: numbering of layers, from a target in this process and from files in vLLM's format."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aerie_drafter.errors import DataError, TargetError
from aerie_drafter.train.states import (
    HiddenStateFiles,
    InProcessTarget,
    StateLayout,
    StoredHiddenStates,
    TargetParts,
    compute_token_digest,
    extract_target_parts,
    load_model,
    load_target_parts,
    state_file_path,
)

Targets = Callable[..., Any]
TEXTS = [torch.arange(7), torch.arange(3, 14)]


def pad(texts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)


def write_files(folder: Path, model: Any, texts: Sequence[Tensor], layers: Sequence[int]) -> None:
    """Write files like vLLM's ExampleHiddenStatesConnector: [tokens, layers, hidden], the last layer without the final norm."""
    source = InProcessTarget(model, layers)
    for index, text in enumerate(texts):
        aux = source.fetch_hidden_states(text.unsqueeze(0)).aux_hidden_states[0]
        hidden = aux.view(len(text), len(layers), -1).contiguous()
        save_file({"hidden_states": hidden, "token_ids": text}, folder / f"request-{index}.safetensors")


def test_layer_k_is_the_input_of_layer_k_and_the_final_state_is_normed(target_of: Targets) -> None:
    model, tokens = target_of(), torch.arange(10).unsqueeze(0)
    states = InProcessTarget(model, (0, 2, 5)).fetch_hidden_states(tokens)
    with torch.no_grad():
        outputs = model.model(input_ids=tokens, output_hidden_states=True)
    # Transformers lists the embedding first, then each layer's output, the last of them after the final norm.
    torch.testing.assert_close(states.aux_hidden_states, torch.cat([outputs.hidden_states[k] for k in (0, 2, 5)], dim=-1))
    torch.testing.assert_close(states.final_hidden_states, outputs.last_hidden_state)
    with torch.no_grad():
        torch.testing.assert_close(
            states.final_hidden_states @ extract_target_parts(model).lm_head.T, model(input_ids=tokens).logits
        )


def test_the_number_of_layers_is_the_last_output_before_the_norm(target_of: Targets) -> None:
    model = target_of()
    model.model.norm.weight.data.uniform_(0.5, 2.0)
    states = InProcessTarget(model, (6,)).fetch_hidden_states(torch.arange(10).unsqueeze(0))
    torch.testing.assert_close(model.model.norm(states.aux_hidden_states), states.final_hidden_states)


def test_padding_at_the_end_changes_nothing(target_of: Targets) -> None:
    source = InProcessTarget(target_of(), (1, 3))
    both = source.fetch_hidden_states(pad(TEXTS))
    alone = source.fetch_hidden_states(TEXTS[0].unsqueeze(0))
    torch.testing.assert_close(both.aux_hidden_states[:1, :7], alone.aux_hidden_states)
    torch.testing.assert_close(both.final_hidden_states[:1, :7], alone.final_hidden_states)


def stored_source(folder: Path, model: Any, aux: Sequence[int], layers: Sequence[int], target_id: str = "") -> StoredHiddenStates:
    layout = StateLayout(tuple(layers), 32)
    return StoredHiddenStates(HiddenStateFiles(folder, layout, target_id).load, extract_target_parts(model), aux, layout)


def test_files_of_vllm_equal_the_states_of_the_target(tmp_path: Path, target_of: Targets) -> None:
    model = target_of()
    model.model.norm.weight.data.uniform_(0.5, 2.0)
    write_files(tmp_path, model, TEXTS, (1, 3, 4, 6))
    expected = InProcessTarget(model, (1, 4)).fetch_hidden_states(pad(TEXTS))
    source = stored_source(tmp_path, model, (1, 4), (1, 3, 4, 6))
    source.prefetch(TEXTS[:1])
    states = source.fetch_hidden_states(pad(TEXTS), [[text] for text in TEXTS])
    for row, text in enumerate(TEXTS):
        torch.testing.assert_close(states.aux_hidden_states[row, : len(text)], expected.aux_hidden_states[row, : len(text)])
        torch.testing.assert_close(states.final_hidden_states[row, : len(text)], expected.final_hidden_states[row, : len(text)])


def test_announced_states_are_loaded_once_and_before_they_are_fetched(target_of: Targets) -> None:
    loaded: list[list[int]] = []
    release = threading.Event()

    def load(tokens: Tensor) -> Tensor:
        release.wait(10)
        loaded.append(tokens.tolist())
        return torch.zeros(len(tokens), 2, 32, dtype=torch.bfloat16)

    source = StoredHiddenStates(load, extract_target_parts(target_of()), (1,), StateLayout((1, 6), 32), workers=1)
    source.prefetch([TEXTS[0], TEXTS[1], TEXTS[0]])  # returns, though nothing is loaded yet
    release.set()
    deadline = time.monotonic() + 10
    while len(loaded) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loaded == [TEXTS[0].tolist(), TEXTS[1].tolist()]
    states = source.fetch_hidden_states(pad(TEXTS), [[text] for text in TEXTS])
    assert states.final_hidden_states.dtype is torch.float32  # the target's type, whatever the files have
    assert len(loaded) == 2
    source.fetch_hidden_states(TEXTS[0].unsqueeze(0), [[TEXTS[0]]])
    assert len(loaded) == 3  # nothing is kept


def test_discarded_loads_do_not_begin(target_of: Targets) -> None:
    """A process ends only after the loads that its threads have begun, and a load from a server takes up to minutes."""
    loaded: list[int] = []
    begun, release = threading.Event(), threading.Event()

    def load(tokens: Tensor) -> Tensor:
        begun.set()
        release.wait(10)
        loaded.append(len(tokens))
        return torch.zeros(len(tokens), 2, 32)

    source = StoredHiddenStates(load, extract_target_parts(target_of()), (1,), StateLayout((1, 6), 32), workers=1)
    source.prefetch([torch.arange(length) for length in range(1, 9)])
    assert begun.wait(10)
    source.discard_prefetched()
    release.set()
    source.fetch_hidden_states(TEXTS[1].unsqueeze(0), [[TEXTS[1]]])
    assert loaded == [1, 11]


def test_conversations_without_a_file_are_counted(tmp_path: Path, target_of: Targets) -> None:
    write_files(tmp_path, target_of(), TEXTS, (1, 6))
    layout, missing = StateLayout((1, 6), 32), torch.arange(30, 42)
    HiddenStateFiles(tmp_path, layout).check_complete(TEXTS)
    with pytest.raises(DataError, match=r"1 of 3 conversations have no file .* 12 tokens that begins with \[30, 31"):
        HiddenStateFiles(tmp_path, layout).check_complete([*TEXTS, missing])
    stored = tmp_path / "stored"
    path = state_file_path(stored, compute_token_digest(TEXTS[0]))
    path.parent.mkdir(parents=True)
    (tmp_path / "request-0.safetensors").rename(path)
    (stored / "states.json").write_text('{"target": "sha256:1", "layer_ids": [1, 6], "hidden_size": 32}')
    HiddenStateFiles(stored, layout, "sha256:1").check_complete(TEXTS[:1])
    with pytest.raises(DataError, match=r"2 of 3 conversations have no file"):
        HiddenStateFiles(stored, layout, "sha256:1").check_complete([*TEXTS, missing])


def test_invalid_files_are_reported(tmp_path: Path, target_of: Targets) -> None:
    model = target_of()

    def source(layers: tuple[int, ...] = (1, 6), target_id: str = "") -> StoredHiddenStates:
        return stored_source(tmp_path, model, (1,), layers, target_id)

    with pytest.raises(DataError, match=r"no \*.safetensors files"):
        source()
    write_files(tmp_path, model, TEXTS[:1], (1, 6))
    with pytest.raises(TargetError, match=r"contain the layers \[1\], but layer 6 is required"):
        StoredHiddenStates(lambda tokens: tokens, extract_target_parts(model), (1,), StateLayout((1,), 32))
    with pytest.raises(DataError, match=r"hidden_states is 7 x 2 x 32; expected: tokens x 3 x 32"):
        source((1, 2, 6))
    with pytest.raises(
        DataError,
        match=r"no file contains the hidden states of a conversation of 11 tokens that begins "
        r"with \[3, 4",
    ):
        source().fetch_hidden_states(pad(TEXTS), [[text] for text in TEXTS])
    path = tmp_path / "request-0.safetensors"
    complete = path.read_bytes()
    opened = source()
    for states, message in (
        (torch.zeros(7, 2, 31), "hidden_states is 7 x 2 x 31"),
        (torch.zeros(6, 2, 32), "hidden_states is 6 x 2 x 32"),
        (torch.zeros(7, 2, 32, dtype=torch.int32), "hidden_states is torch.int32; expected: floating point"),
    ):
        save_file({"hidden_states": states, "token_ids": TEXTS[0]}, path)  # replaced after the start of the training
        with pytest.raises(DataError, match=message):
            opened.load(TEXTS[0])
    save_file({"hidden_states": torch.zeros(7, 2, 32), "token_ids": TEXTS[0] + 1}, path)
    with pytest.raises(DataError, match="its 7 tokens are not those of the conversation of 7; write it again"):
        opened.load(TEXTS[0])
    path.write_bytes(complete[:-10])
    with pytest.raises(DataError, match=r"request-0.safetensors: not a complete file of hidden states"):
        source()


def test_states_of_another_target_or_other_layers_are_rejected(tmp_path: Path, target_of: Targets) -> None:
    (tmp_path / "states.json").write_text('{"target": "sha256:1", "layer_ids": [1, 6], "hidden_size": 32}')
    with pytest.raises(TargetError, match="the states are of the target sha256:1, and the target is sha256:2; set a new folder"):
        stored_source(tmp_path, target_of(), (1,), (1, 6), "sha256:2")
    with pytest.raises(TargetError, match=r"the files have the layers \[1, 6\], and \[1, 2, 6\] are required"):
        stored_source(tmp_path, target_of(), (1,), (1, 2, 6), "sha256:1")
    (tmp_path / "states.json").write_text("{}")
    with pytest.raises(DataError, match=r"states.json: cannot be read"):
        stored_source(tmp_path, target_of(), (1,), (1, 6), "sha256:1")


@pytest.mark.parametrize("tied", [False, True])
def test_target_parts_are_read_without_the_rest_of_the_target(tmp_path: Path, target_of: Targets, *, tied: bool) -> None:
    model = target_of(tie_word_embeddings=tied)
    model.model.norm.weight.data.uniform_(0.5, 2.0)
    model.save_pretrained(tmp_path)
    expected, parts = extract_target_parts(model), load_target_parts(tmp_path, torch.float32, torch.device("cpu"))
    assert torch.equal(parts.embedding, expected.embedding)
    assert torch.equal(parts.lm_head, expected.lm_head)
    x = torch.randn(3, 32)
    assert torch.equal(parts.final_norm(x), expected.final_norm(x))


def test_a_missing_or_incompatible_target_is_reported(tmp_path: Path, target_of: Targets) -> None:
    with pytest.raises(TargetError, match=r"target.model .*nothing: cannot be loaded"):
        load_model(str(tmp_path / "nothing"), None, torch.float32, torch.device("cpu"))
    with pytest.raises(TargetError, match="aux_layer_ids contains layer 7, but the target has 6"):
        InProcessTarget(target_of(), (1, 7))
    model = target_of()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(TargetError, match=r"final_logit_softcapping is 30.0"):
        extract_target_parts(model)


def test_target_parts_name_their_tensors(target_of: Targets) -> None:
    frame: TargetParts = extract_target_parts(target_of())
    assert frame.embedding.shape == frame.lm_head.shape == (264, 32)
    assert frame.config.num_hidden_layers == 6
