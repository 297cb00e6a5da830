"""`aerie-drafter evaluate` and `aerie-drafter drift` on folders, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aerie_drafter.checkpoint import Provenance, save_checkpoint
from aerie_drafter.cli import run_cli
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.evaluate import offline
from aerie_drafter.evaluate.acceptance import AcceptanceCounts
from aerie_drafter.evaluate.offline import acceptance_to_json, sum_acceptance
from aerie_drafter.model import Drafter
from aerie_drafter.train.states import load_model
from bundle.target import make_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with target, three, threeone and prompts.jsonl."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer(["a small text, of small words, for a small model"])
    torch.manual_seed(0)
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    for name, new in (("three", False), ("threeone", True)):
        drafter = Drafter(
            DrafterConfig(DrafterFamily.LLAMA, 32, 32, 2, 2, 16, size, size, 32, (1, 2), fc_norm=new, norm_output=new)
        )
        save_checkpoint(root / name, drafter, Provenance(target="target"), include_embedding=False)
    other = Drafter(DrafterConfig(DrafterFamily.LLAMA, 32, 32, 2, 2, 16, size + 1, size, 32, (1, 2)))
    save_checkpoint(root / "foreign", other, Provenance(target="another"), include_embedding=True)
    prompts = [
        {"category": "short", "messages": [{"role": "user", "content": "a small"}]},
        {"category": "long", "messages": [{"role": "user", "content": "a small text, of small words " * 3}]},
        {"category": "short", "text": "small words"},
    ]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return root


def test_evaluate_prints_acceptance_by_category(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(folders / "prompts.jsonl"), "--target", str(folders / "target"), "--drafter", str(folders / "threeone")]
    assert run_cli(["evaluate", *common, "--max-tokens", "12", "-k", "2", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["short", "long", "total"]
    assert report["total"]["drafts"] == report["short"]["drafts"] + report["long"]["drafts"] > 0
    assert len(report["short"]["acceptance_per_position"]) == 2
    assert run_cli(["evaluate", *common, "--max-tokens", "12", "--by-length"]) == 0
    table = capsys.readouterr().out
    assert "<= 1024" in table
    assert "ACC@3" in table


def test_sampled_drafts_run_the_loop(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(folders / "prompts.jsonl"), "--target", str(folders / "target"), "--max-tokens", "6"]
    arguments += ["--drafter", str(folders / "three"), "--sampled-drafts", "-o", "json"]
    assert run_cli(arguments) == 2
    assert "set --temperature too" in capsys.readouterr().err
    assert run_cli([*arguments, "--temperature", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["drafts"] > 0


def test_exact_acceptance_compares_two_drafters_with_a_copy(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", str(folders / "prompts.jsonl"), "--target", str(folders / "target"), "--max-tokens", "8"]
    arguments += ["--exact", "--drafter", str(folders / "three"), "-k", "2"]
    assert run_cli([*arguments, "--versus", str(folders / "threeone"), "-o", "json", "--draws", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["temperature"] for row in report["acceptance"]} == {0, 0.7, 1}
    assert {row["drafter"] for row in report["acceptance"]} == {"three", "threeone", "copy of the target"}
    assert [row["category"] for row in report["gains"][:3]] == ["short", "long", "total"]
    assert report["gains"][2]["low"] <= report["gains"][2]["gain"] <= report["gains"][2]["high"]
    plot = tmp_path / "acceptance.svg"
    assert run_cli([*arguments, "--versus", str(folders / "threeone"), "--temperature", "1", "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 1000
    table = capsys.readouterr().out
    assert "OF COPY" in table
    assert "95 % INTERVAL" in table
    assert run_cli([*arguments, "--temperature", "0", "--temperature", "1", "--by-length"]) == 0
    table = capsys.readouterr().out
    assert "PROMPT TOKENS" in table
    assert "INTERVAL" not in table


def test_two_drafters_share_a_target_in_memory(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[str] = []

    def load(target: str, *arguments: Any) -> Any:
        loaded.append(target)
        return load_model(target, *arguments)

    monkeypatch.setattr(offline, "load_model", load)
    target, prompts = ["--target", str(folders / "target"), "--max-tokens", "6"], str(folders / "prompts.jsonl")
    drafters = [str(folders / "three"), str(folders / "threeone")]
    versus = ["--exact", "--temperature", "0", "--drafter", drafters[0], "--versus", drafters[1]]
    assert run_cli(["evaluate", prompts, *versus, *target]) == 0
    assert run_cli(["drift", *drafters, "--prompts", prompts, *target]) == 0
    assert len(loaded) == 2
    assert "GAIN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--url", "http://127.0.0.1:1"], "it goes with --model"),
        ([], "--drafter and --target are required"),
        (["--drafter", "three"], "--drafter and --target are required"),
        (["--drafter", "foreign", "--target", "target"], "it is for a target with vocab_size"),
        (["--url", "http://127.0.0.1:1", "--model", "m"], "no response"),
        (["--exact", "--url", "http://127.0.0.1:1"], "--exact goes with --drafter and --target"),
        (["--drafter", "three", "--target", "target", "--versus", "threeone"], "go with --exact"),
        (["--drafter", "three", "--target", "target", "--plot", "plot.svg"], "go with --exact"),
        (["--exact", "--drafter", "three", "--target", "target", "--plot", "plot.doc"], "a file ending in .svg or .png"),
        (["--drafter", "three", "--target", "target", "--temperature", "0", "--temperature", "1"], "go with --exact"),
    ],
)
def test_contradictory_options_are_rejected(
    folders: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folders)
    assert run_cli(["evaluate", "prompts.jsonl", *arguments]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_drift_prints_and_plots_both_drafters(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["drift", str(folders / "three"), str(folders / "threeone"), "--target", str(folders / "target")]
    arguments += ["--prompts", str(folders / "prompts.jsonl"), "--max-tokens", "12", "-k", "4"]
    assert run_cli([*arguments, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["three (EAGLE 3)", "threeone (EAGLE 3.1)"]
    assert report["threeone (EAGLE 3.1)"]["state_norm_ratio"] == pytest.approx(1.0, abs=0.01)
    assert report["three (EAGLE 3)"]["draft_token_attention"][0] == 0
    assert run_cli([*arguments, "--plot", str(tmp_path / "drift.svg")]) == 0
    assert "OWN TOKENS" in capsys.readouterr().out
    assert (tmp_path / "drift.svg").stat().st_size > 1000
    assert run_cli([*arguments, "--plot", "drift.doc"]) == 2


def test_acceptance_without_drafts_is_null() -> None:
    counts = {"a": AcceptanceCounts(0, (0, 0)), "b": AcceptanceCounts(2, (1, 0))}
    assert acceptance_to_json(counts)["a"]["acceptance_length"] is None
    assert acceptance_to_json(counts)["b"]["conditional_acceptance"] == [0.5, 0.0]
    assert sum_acceptance(counts) == AcceptanceCounts(2, (1, 0))
