"""A refresh as a whole, with a tiny target: its training data, its export, and that it continues after an end at any step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from aerie.boundary import EXIT_REJECTED
from aerie_drafter import checkpoint
from aerie_drafter.cli import run_cli
from aerie_drafter.cli.refresh import build_table, describe_outcome
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.evaluate import exact
from aerie_drafter.evaluate.offline import answer_prompts
from aerie_drafter.files import reserve_output
from aerie_drafter.refresh.run import NEW, OLD, Refresh, RefreshInputs
from aerie_drafter.refresh.settings import RefreshSettings
from aerie_drafter.refresh.sources import find_training_data, read_captured_prompts, read_old_conversations
from aerie_drafter.train.settings import parse_groups, parse_settings
from aerie_drafter.train.setup import build_trainer
from aerie_drafter.train.trainer import NullReporter, Trainer
from tests.nightly import at_night

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


@pytest.mark.parametrize("step", ["select", at_night("answer"), "train", at_night("evaluate")])
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


def test_only_what_a_complete_step_used_is_fixed(refresh: Callable[..., Refresh]) -> None:
    class KilledError(Exception):
        pass

    def kill(line: str) -> None:
        if line.startswith("answer: "):
            raise KilledError

    with pytest.raises(KilledError):
        refresh(log=kill).run()
    for change in ({"answers": {"max_tokens": 7}}, {"prompts": {"held_out_share": 0.4}}, {"template": {"kwargs": {"x": 1}}}):
        with pytest.raises(ConfigError, match=f"the settings of {next(iter(change))}; set the earlier value"):
            refresh(**change).run()
    later = {
        "answers": {"max_tokens": 6, "concurrency": 1},
        "optimizer": {"epochs": 2},
        "evaluation": {"max_tokens": 5},
    }
    assert refresh(**later, limits={"min_new_gain": 9.0}).run()["accepted"] is False
    assert refresh(**later).run()["accepted"] is True
    with pytest.raises(ConfigError, match="the settings of evaluation"):
        refresh(**later | {"evaluation": {"max_tokens": 6}}).run()


def test_prompts_that_leave_no_room_for_an_answer_are_reported_before_they_are_answered(
    refresh: Callable[..., Refresh], captured: Path
) -> None:
    (captured / "chat" / "0.jsonl").write_text("".join(_line("x" * 100 + f" {index}") for index in range(60)))
    with pytest.raises(DataError, match=r"\d\d of \d\d prompts have no room for an answer in data.max_length, which is 64"):
        refresh(data={"max_length": 64}).run()
    assert not (refresh().work / "select.json").exists()
    assert refresh(data={"max_length": 128}).run()["omitted"] == {NEW: 0, OLD: 0}


def test_conversations_without_an_answer_token_are_not_counted_as_trained(
    refresh: Callable[..., Refresh], captured: Path
) -> None:
    (captured / "chat" / "3.jsonl").write_text("".join(_line("x" * 100 + f" {index}") for index in range(10)))
    logged: list[str] = []
    run = refresh(data={"max_length": 64}, log=logged.append)
    report = run.run()
    long = sum(text.startswith("x") for text in read_texts(run.work / "new.jsonl"))
    assert report["omitted"] == {NEW: long, OLD: 0}
    assert long > 0
    assert report["trained"][NEW] == len(read_texts(run.work / "new.jsonl")) - long
    total = sum(report["trained"].values()) + long
    assert f"{long} of {total} conversations have no answer token in their first 64 tokens, and are omitted" in logged
    assert f"; {long} others have no answer token" in describe_outcome(report, run.output)


@contextlib.contextmanager
def serve(rejects: Callable[[str], bool]) -> Iterator[str]:
    """Answer each question with two tokens, or with status 400, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            question = body["messages"][-1]["content"] if body else ""
            choice = {"message": {"role": "assistant", "content": "a"}, "token_ids": [97, 256]}
            answer = {"data": [{"id": "target"}], "choices": [choice], "prompt_token_ids": [257, *question.encode(), 258]}
            self.send_response(400 if body and rejects(question) else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST = _reply  # noqa: N815 (names of http.server)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,)).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()


def test_a_prompt_that_the_server_rejects_is_omitted(refresh: Callable[..., Refresh]) -> None:
    logged: list[str] = []
    questions: list[str] = []

    def rejects(question: str) -> bool:
        questions.append(question)
        return question == questions[0]

    groups = {"prompts": {"held_out_share": 0.1}, "answers": {"max_tokens": 6, "concurrency": 1}}
    run = refresh(log=logged.append, **groups)
    with serve(rejects) as url:
        run = dataclasses.replace(run, inputs=dataclasses.replace(run.inputs, endpoint=url, model="target"))
        report = run.run()
    assert report["rejected"] == {NEW: 1, OLD: 0}
    assert report["trained"][NEW] == len(read_texts(run.work / "new.jsonl")) - 1
    assert any("the server rejects 1 prompts, which are omitted; the first is" in line for line in logged)
    assert "; the server rejected 1 others" in describe_outcome(report, run.output)


def test_a_server_that_rejects_many_prompts_ends_a_refresh(refresh: Callable[..., Refresh]) -> None:
    run = refresh()
    with serve(lambda question: "1" in question) as url:
        run = dataclasses.replace(run, inputs=dataclasses.replace(run.inputs, endpoint=url, model="target"))
        with pytest.raises(DataError, match=r"rejects \d+ of \d\d conversations"):
            run.run()
    assert not (run.work / "answer.json").exists()


def test_a_training_without_most_of_the_answers_does_not_begin(refresh: Callable[..., Refresh]) -> None:
    class KilledError(Exception):
        pass

    def kill(line: str) -> None:
        if line.startswith("answer: "):
            raise KilledError

    with pytest.raises(KilledError):
        refresh(log=kill).run()
    with pytest.raises(DataError, match=r"(\d+) of \1 prompts have no room"):
        refresh(data={"max_length": 5}).run()
    assert refresh().run()["accepted"]


def test_characters_that_unicode_takes_for_line_ends_are_part_of_a_prompt(
    refresh: Callable[..., Refresh], captured: Path
) -> None:
    text = "tell\u2028me\u2029of\u0085"
    (captured / "chat" / "3.jsonl").write_text("".join(_line(f"{text} {index}") for index in range(20)))
    run = refresh()
    run.run()
    assert text in (run.work / "held_out.jsonl").read_text()


def test_drafts_cannot_be_drawn_at_the_temperature_of_greedy_answers(refresh: Callable[..., Refresh], captured: Path) -> None:
    for file in (captured / "chat").glob("*.jsonl"):
        file.write_text(file.read_text().replace('"temperature": 0.7', '"temperature": 0'))
    with pytest.raises(ConfigError, match=r"draft_sampling is drawn, and .* is 0: .* set greedy"):
        refresh(evaluation={"max_tokens": 6, "draft_sampling": "drawn"}).run()
    assert not (refresh().work / "answer.json").exists()
    assert refresh().run()["temperature"] == 0


def test_old_answers_keep_their_tokens_and_must_be_of_the_target(refresh: Callable[..., Refresh], tmp_path: Path) -> None:
    old, sequence = tmp_path / "old.jsonl", {"token_ids": list(range(100, 120)), "answer_spans": [[5, 20]]}
    records = [{"prompt": f"q {index}", "response": "a", "sequences": [sequence]} for index in range(20)]
    old.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = refresh()
    run = dataclasses.replace(run, inputs=dataclasses.replace(run.inputs, old=(old,)))
    run_file = tmp_path / "old.jsonl.run.json"
    run_file.write_text(json.dumps({"tokenizer": "sha256:other"}))
    with pytest.raises(DataError, match=r"old.jsonl: its tokens are of the tokenizer sha256:other"):
        run.run()
    run_file.unlink()
    assert run.run()["trained"][OLD] > 5
    lines = (run.work / "old.jsonl").read_text().splitlines()
    assert all(json.loads(line)["sequences"] == [sequence] for line in lines)
    assert not any(conversation.sequences for conversation in read_old_conversations([old]))


def test_a_domain_without_drafts_is_not_accepted(refresh: Callable[..., Refresh], monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_with_one_token(*arguments: Any) -> list[Any]:
        texts = answer_prompts(*arguments)
        return [dataclasses.replace(text, answer_end=text.prompt_length + 1) for text in texts]

    monkeypatch.setattr(exact, "answer_prompts", answer_with_one_token)
    run = refresh()
    report = run.run()
    assert (report["accepted"], report["recovered_share"], report[NEW]["gain"]) == (False, None, None)
    assert "too few held-back prompts" in report["reasons"][0]
    assert build_table(report).row_count == 2
    assert "not exported" in describe_outcome(report, run.output)


def test_the_same_drafter_in_another_folder_continues(
    refresh: Callable[..., Refresh], served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    save = Trainer._save

    def save_and_end(trainer: Trainer) -> None:
        save(trainer)
        raise KilledError

    run = refresh()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", save_and_end)
        with pytest.raises(KilledError):
            run.run()
    shutil.copytree(served.parent, tmp_path / "moved")
    moved = dataclasses.replace(run.inputs, drafter=tmp_path / "moved" / "drafter")
    assert dataclasses.replace(run, inputs=moved).run()["accepted"]


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
    for folder in (".", ".."):
        assert run_cli(["refresh", str(served), folder, *options]) == 2
        assert f"{folder}: expected: a new folder" in capsys.readouterr().err
    with reserve_output(tmp_path / "out.work", is_folder=True):
        assert run_cli(["refresh", str(served), str(tmp_path / "out"), *options]) == 2
        assert "out.work: another process writes to it" in " ".join(capsys.readouterr().err.split())
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
