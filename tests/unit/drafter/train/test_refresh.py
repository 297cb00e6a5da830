"""A refresh as a whole, with a tiny target: its training data, its export, and that it continues after an end at any step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from aerie.boundary import EXIT_REJECTED
from aerie_drafter import checkpoint
from aerie_drafter.cli import run_cli
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.refresh.run import NEW, OLD, Refresh, RefreshInputs
from aerie_drafter.refresh.settings import RefreshSettings
from aerie_drafter.refresh.sources import find_training_data, read_captured_prompts
from aerie_drafter.train.settings import parse_groups, parse_settings
from aerie_drafter.train.setup import build_trainer
from aerie_drafter.train.trainer import NullReporter

ACCEPT_ALL = {"min_new_gain": -1.0, "max_old_loss": 1.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """Return the folder of a served drafter, beside the data that it was trained on."""
    folder = tmp_path_factory.mktemp("served")
    lines = [json.dumps({"prompt": f"say {index}", "response": f"word {index % 5} " * 3}) for index in range(24)]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "target": {"model": str(target_folder)},
        "drafter": {"draft_vocab_size": 60},
        "data": {"train": [folder / "answers.jsonl"]},
        "loss": {"horizon": 3},
        "optimizer": {"epochs": 1},
        "output": {"folder": folder / "training"},
    }
    build_trainer(parse_settings(settings, "a test")).run()
    checkpoint.save_checkpoint(
        folder / "drafter",
        checkpoint.load_drafter(folder / "training" / "best"),
        checkpoint.read_provenance(folder / "training" / "best"),
        include_embedding=False,
        dtype=torch.bfloat16,
    )
    return folder / "drafter"


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """Return a folder as the recorder writes it."""
    folder = tmp_path / "prompts" / "chat"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"{number}.jsonl").write_text("".join(_line(f"tell {index}") for index in range(number * 10, number * 10 + 20)))
    (folder / "2.jsonl.open").write_text('{"messages": [{"role"')
    return tmp_path / "prompts"


def _line(text: str) -> str:
    message = {"role": "user", "content": text}
    return json.dumps({"messages": [message], "sampling": {"temperature": 0.7}, "time": "2026-03-01T14:00:00Z"}) + "\n"


@pytest.fixture
def refresh(tmp_path: Path, served: Path, target_folder: Path, captured: Path) -> Callable[..., Refresh]:
    """Return a function that makes a refresh of a name."""

    def make(name: str = "a", log: Callable[[str], None] = lambda _: None, **groups: dict[str, Any]) -> Refresh:
        raw = {
            "prompts": {"held_out_share": 0.3},
            "answers": {"max_tokens": 6},
            "loss": {"horizon": 3},
            "evaluation": {"max_tokens": 6},
            "limits": ACCEPT_ALL,
            **groups,
        }
        settings = parse_groups(raw, "a test", RefreshSettings, "refresh")
        inputs = RefreshInputs(served, target_folder, captured)
        return Refresh(inputs, settings, tmp_path / f"{name}.work", tmp_path / name, torch.device("cpu"), log, NullReporter())

    return make


def read_texts(path: Path) -> set[str]:
    return {json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()}


def test_a_refresh_trains_on_both_domains_and_exports(refresh: Callable[..., Refresh], served: Path) -> None:
    logged: list[str] = []
    run = refresh(log=logged.append)
    report = run.run()
    assert report["captured"] == 40
    assert report["trained"][NEW] + report[NEW]["prompts"] == 30  # ten are in both files
    assert report["trained"][OLD] > 0
    assert report["temperature"] == 0.7
    assert 0 < report["draft_vocabulary_coverage"] <= 1
    assert set(report["seconds"]) == {"select", "answer", "train", "evaluate"}
    assert any("which the served drafter was trained on" in line for line in logged)
    held_out = read_texts(run.work / "held_out.jsonl")
    trained = read_texts(run.work / "new.answers.jsonl") | read_texts(run.work / "old.jsonl")
    assert held_out
    assert trained
    assert not held_out & trained
    new, old = checkpoint.read_checkpoint(run.output), checkpoint.read_checkpoint(served)
    assert checkpoint.EMBEDDING_TENSOR not in new.tensors
    assert new.tensors["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(new.tensors["d2t"], old.tensors["d2t"])
    assert new.provenance.notes["trained further from"] == checkpoint.compute_model_digest(served)
    assert "captured prompts held back" in (run.output / "README.md").read_text()


@pytest.mark.parametrize("step", ["select", "answer", "train", "evaluate"])
def test_a_refresh_that_was_killed_continues_with_the_same_prompts(
    refresh: Callable[..., Refresh], captured: Path, step: str
) -> None:
    class KilledError(Exception):
        pass

    def kill(line: str) -> None:
        if line.startswith(f"{step}: "):
            raise KilledError

    whole = refresh("whole")
    expected = whole.run()
    with pytest.raises(KilledError):
        refresh("resumed", kill).run()
    (captured / "chat" / "9.jsonl").write_text(_line("a later prompt"))
    resumed = refresh("resumed")
    report = resumed.run()
    assert {**report, "seconds": None} == {**expected, "seconds": None}
    assert checkpoint.compute_model_digest(resumed.output) == checkpoint.compute_model_digest(whole.output)


def test_a_drafter_that_is_not_better_is_not_exported(refresh: Callable[..., Refresh]) -> None:
    run = refresh(limits={"min_new_gain": 9.0})
    report = run.run()
    assert not report["accepted"]
    assert not run.output.exists()


def test_other_inputs_are_rejected(refresh: Callable[..., Refresh]) -> None:
    refresh().run()
    with pytest.raises(ConfigError, match="the settings"):
        refresh(optimizer={"epochs": 7}).run()


def test_training_data_is_found_by_its_digest_only(served: Path, tmp_path: Path) -> None:
    provenance = checkpoint.read_provenance(served)
    assert find_training_data(provenance, [tmp_path, served.parent]) == [served.parent / "answers.jsonl"]
    (tmp_path / "answers.jsonl").write_text('{"prompt": "another"}\n')
    assert find_training_data(provenance, [tmp_path]) == []


def test_no_captured_prompts_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompts"):
        read_captured_prompts(tmp_path)


def test_the_command_prints_the_decision(
    tmp_path: Path, served: Path, target_folder: Path, captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["refresh", "--init"]) == 0
    (tmp_path / "refresh.yaml").write_text(
        capsys.readouterr()
        .out.replace("held_out_share: 0.1", "held_out_share: 0.3")
        .replace("max_tokens: 1024", "max_tokens: 6")
        .replace("max_tokens: 256", "max_tokens: 6")
        .replace("max_old_loss: 0.02", "max_old_loss: 1.0")
        .replace("min_new_gain: 0.0", "min_new_gain: 5.0")
    )
    options = ["--target", str(target_folder), "--prompts", str(captured), "--settings", str(tmp_path / "refresh.yaml")]
    assert run_cli(["refresh", str(served), str(tmp_path / "out"), *options]) == 1
    printed = capsys.readouterr()
    assert "AL REFRESHED" in printed.out
    assert "not exported" in printed.out
    assert run_cli(["refresh", str(served), str(tmp_path / "out"), *options, "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["accepted"] is False
    assert run_cli(["refresh", str(served)]) == 2
    assert "--prompts" in capsys.readouterr().err


def test_the_job_of_the_examples_calls_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load((Path(__file__).resolve().parents[4] / "examples" / "refresh-job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["aerie-drafter", "refresh"]
    assert run_cli(["refresh", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(argument.partition("=")[0] in printed for argument in container["args"])
    rejected = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert (rejected["containerName"], rejected["values"]) == (container["name"], [EXIT_REJECTED])
