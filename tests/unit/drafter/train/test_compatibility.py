"""Settings that do not fit the target are rejected from configurations alone, before the data is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie_drafter.checkpoint import save_checkpoint
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.errors import ConfigError, DrafterError, TargetError
from aerie_drafter.model import Drafter
from aerie_drafter.train.compatibility import check_settings, describe_draft_vocabulary
from aerie_drafter.train.data import Corpus
from aerie_drafter.train.settings import TrainingSettings, parse_settings
from aerie_drafter.train.setup import prepare_data

from ..sizes import SIZES  # noqa: TID252


def settings_of(target: Path, **fields: Any) -> TrainingSettings:
    raw: dict[str, Any] = {
        "target": {"model": str(target)},
        "data": {"train": ["none.jsonl"], "max_length": 128},
        "output": {"folder": "out"},
    }
    for name, value in fields.items():
        group, field = name.split("__")
        raw.setdefault(group, {})[field] = value
    return parse_settings(raw, "test")


def test_defaults_fit(target_folder: Path) -> None:
    check_settings(settings_of(target_folder))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"drafter__aux_layer_ids": [2, 9]}, TargetError, "aux_layer_ids contains layer 9, but the target has 6 layers"),
        ({"drafter__aux_layer_ids": [3, 2]}, ConfigError, r"is \[3, 2\]: must list at least one layer, ascending"),
        ({"drafter__draft_vocab_size": 300}, ConfigError, "draft_vocab_size 300 is larger than vocab_size 264"),
        ({"drafter__family": "deepseek_v2"}, TargetError, "the target's configuration has no kv_lora_rank"),
        (
            {"target__hidden_states": "s", "target__hidden_state_layer_ids": [2, 3]},
            TargetError,
            r"hidden_state_layer_ids is \[2, 3\], but layer 6 is required: the drafter reads \[2, 3\], and the loss reads 6",
        ),
        ({"target__model": "/none"}, TargetError, "target.model /none: cannot be read"),
    ],
)
def test_what_does_not_fit_is_named(target_folder: Path, fields: dict[str, Any], kind: type[DrafterError], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_settings(settings_of(target_folder, **fields))


def test_data_is_not_read_before_the_checks(target_folder: Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size 300 is larger"):
        prepare_data(settings_of(target_folder, drafter__draft_vocab_size=300))


def test_conversations_longer_than_the_target_are_rejected(target_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(f"{json.dumps({'prompt': 'a', 'response': 'b' * 300})}\n" * 3)
    fields = {"data__train": [str(path)], "output__folder": str(tmp_path / "out")}
    prepare_data(settings_of(target_folder, data__max_length=256, **fields))
    message = r"data.max_length is 257, a conversation has 257 tokens, and the target has 256 positions .*: set at most 256"
    with pytest.raises(ConfigError, match=message):
        prepare_data(settings_of(target_folder, data__max_length=257, **fields))


def test_a_target_with_capped_logits_is_rejected(target_folder: Path, tmp_path: Path) -> None:
    raw = json.loads((target_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "final_logit_softcapping": 30.0}))
    with pytest.raises(TargetError, match=r"the target's final_logit_softcapping is 30\.0"):
        check_settings(settings_of(tmp_path))


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 40), ("target_hidden_size", 16)])
def test_an_initial_checkpoint_of_another_target_is_rejected(target_folder: Path, tmp_path: Path, name: str, value: int) -> None:
    sizes = {**SIZES, "vocab_size": 264, "target_hidden_size": 32, name: value}
    save_checkpoint(tmp_path / "d", Drafter(DrafterConfig(family=DrafterFamily.LLAMA, **sizes)), {"target": "t"})
    with pytest.raises(TargetError, match=rf"its {name} is {value}, and the target has (264|32): it was trained for another"):
        check_settings(settings_of(target_folder, drafter__initial_checkpoint=str(tmp_path / "d")))


def test_a_tied_target_trains_like_an_untied_one_of_equal_weights(
    tmp_path: Path, target_of: Callable[..., Any], target_folder: Path, write_conversations: Callable[..., Path]
) -> None:
    """Also the parts that a training from stored states reads from the files, which contain the tied weight once."""
    from aerie_drafter.train.setup import build_trainer
    from aerie_drafter.train.states import load_target_parts

    tied = target_of(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    untied = target_of()
    weights = {**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight}
    untied.load_state_dict(weights)
    untied.save_pretrained(tmp_path / "untied")
    digests = []
    for name in ("tied", "untied"):
        for file in target_folder.glob("*token*"):
            shutil.copy(file, tmp_path / name)
        shutil.copy(target_folder / "chat_template.jinja", tmp_path / name)
        parts = load_target_parts(tmp_path / name, torch.float32, torch.device("cpu"))
        assert torch.equal(parts.lm_head, parts.embedding)
        fields = {"data__train": [str(write_conversations(12))], "drafter__draft_vocab_size": 48, "optimizer__epochs": 1}
        trainer = build_trainer(settings_of(tmp_path / name, output__folder=str(tmp_path / f"out {name}"), **fields))
        trainer.run()
        digests.append({key: value.clone() for key, value in trainer.drafter.state_dict().items()})
    assert all(torch.equal(digests[0][key], value) for key, value in digests[1].items())


def test_the_share_of_answers_in_the_draft_vocabulary_is_reported() -> None:
    corpus = Corpus.from_conversations([(torch.tensor([1, 2, 2, 3, 4]), torch.tensor([0, 1, 1, 1, 1]))])
    line = describe_draft_vocabulary(corpus, torch.tensor([False, True, True, True, False]))
    assert line == "draft vocabulary: 3 of 5 tokens, which are 75.00% of the 4 tokens of the answers; 3 tokens occur"
