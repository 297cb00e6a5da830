"""`aerie catalog`: tables, JSON, and the message where there is no entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from aerie.cli.app import run_command_line
from aerie.cli.inputs.files import read_valid_catalog
from tests.golden import Messages


def test_one_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["catalog", "moonshotai/Kimi-K2.6"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["TARGET", "DRAFTER", "KIND", "K", "AL", "COMMIT", "LICENCE", "SELECTION", "SOURCE", "NOTES"]
    assert first.split()[:8] == [
        "moonshotai/Kimi-K2.6",
        "lightseekorg/kimi-k2.6-eagle3.1-mla",
        "eagle3.1",
        "3",
        "-",
        "35194ee8",
        "-",
        "selected",
    ]
    assert [second.split()[i] for i in (2, 5)] == ["eagle3", "-"]
    assert "selected (earlier default, files not checked)" in first
    assert "no verified commit" in second


def test_json_has_the_selection_reason_of_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = 'targets = ["Qwen/Qwen3-8B"]\nkind = "eagle3"\nrepo = "me/mine"\nrevision = "' + "1" * 40 + '"'
    (tmp_path / "map.yaml").write_text(json.dumps({"kind": "ConfigMap", "data": {"mine": row}}))
    assert run_command_line(["catalog", "Qwen/Qwen3-8B", "--catalog", str(tmp_path / "map.yaml"), "-o", "json"]) == 0
    selections = {row["drafter"]: row["selection"] for row in json.loads(capsys.readouterr().out)}
    assert selections["me/mine"] == "selected"
    assert selections["RedHatAI/Qwen3-8B-speculator.eagle3"] == "another row takes precedence"
    assert selections["Tengyunw/qwen3_8b_eagle3"] == "files not checked"
    assert selections["AngelSlim/Qwen3-8B_eagle3"] == "reported commit only"
    assert selections["RedHatAI/Qwen3-8B-speculator.dflash"] == "dflash is not supported"


def test_without_a_target_all_rows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["catalog"]) == 0
    output = capsys.readouterr().out
    assert len(output.splitlines()) > 50
    assert "Dogacel/specdrift-gpt-oss-120b-eagle3" in output
    assert "2.55-3.34" in output


@pytest.mark.parametrize(("width", "header"), [(40, False), (80, False), (119, False), (120, True)])
def test_a_narrow_terminal_gets_a_line_for_each_field(
    width: int, header: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "aerie.cli.commands.catalog.out", Console(width=width, force_terminal=True, no_color=True, color_system=None)
    )
    assert run_command_line(["catalog", "moonshotai/Kimi-K2.6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert (lines[0].split()[:2] == ["TARGET", "DRAFTER"]) == header
    if not header:
        lines = [line.rstrip() for line in lines]
        first = lines[: lines.index("")]
        assert first[0] == "TARGET     moonshotai/Kimi-K2.6"
        assert [line for line in first if line.startswith(("KIND", "K ", "AL", "COMMIT"))] == [
            "KIND       eagle3.1",
            "K          3",
            "COMMIT     35194ee8",
        ]
        assert "lightseekorg/kimi-k2.6-eagle3.1-mla" in "".join(line[11:] for line in first)


def test_unknown_target(capsys: pytest.CaptureFixture[str], messages: Messages) -> None:
    assert run_command_line(["catalog", "Qwen/Qwen3-9B"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    messages.check("unknown target", output.err)
    assert run_command_line(["catalog", "x/y", "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == []


def test_target_with_only_unsupported_drafters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["catalog", "zai-org/GLM-5.2"]) == 0
    assert "None of these drafters is supported: Aerie supports EAGLE 3 and 3.1." in capsys.readouterr().err


def test_a_folder_is_matched_by_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_command_line(["catalog", str(tmp_path)]) == 0
    assert "same sizes, possibly another model" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert run_command_line(["catalog", str(tmp_path / "empty")]) == 2
    assert "config.json cannot be read (No such file or directory): set a folder with a model" in capsys.readouterr().err


def test_user_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = 'targets = ["x/y"]\nkind = "eagle3.1"\nrepo = "me/mine"\nnum_speculative_tokens = 4\nacceptance = { chat = 2.9 }'
    (tmp_path / "map.yaml").write_text(json.dumps({"kind": "ConfigMap", "data": {"mine": row}}))
    assert run_command_line(["catalog", "x/y", "--catalog", str(tmp_path / "map.yaml"), "-o", "json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry == {
        "targets": ["x/y"],
        "drafter": "me/mine",
        "kind": "eagle3.1",
        "numSpeculativeTokens": 4,
        "acceptance": {"chat": 2.9},
        "source": "your own entry",
        "notes": "",
        "revision": None,
        "reportedRevision": None,
        "automatic": None,
        "checked": None,
        "licence": None,
        "matchedBy": "name",
        "selection": "no verified commit",
        "supported": True,
    }
    (tmp_path / "bad.yaml").write_text(json.dumps({"kind": "ConfigMap", "data": {"mine": 'kind = "x"'}}))
    assert run_command_line(["catalog", "--catalog", str(tmp_path / "bad.yaml")]) == 2
    assert "the catalog entry 'mine' has no 'targets'" in capsys.readouterr().err
    (tmp_path / "none.yaml").write_text("kind: Pod")
    assert run_command_line(["catalog", "--catalog", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml must contain one ConfigMap whose data are strings" in capsys.readouterr().err


def test_entries_of_a_mounted_config_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read a mount of kubelet: each key is a link to a file in a folder that is exchanged as a whole."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "mine").write_text('targets = ["x/y"]\nkind = "eagle3"\nrepo = "me/mine"')
    (tmp_path / "mine").symlink_to("..data/mine")
    assert run_command_line(["catalog", "x/y", "--catalog", str(tmp_path), "-o", "json"]) == 0
    assert [entry["drafter"] for entry in json.loads(capsys.readouterr().out)] == ["me/mine"]
    (tmp_path / "..data" / "mine").write_bytes(b"\xff")
    assert run_command_line(["catalog", "--catalog", str(tmp_path)]) == 2
    assert "cannot be read (one of its files is not text)" in capsys.readouterr().err


def test_an_unreadable_entry_leaves_the_other_entries(tmp_path: Path) -> None:
    good = f'targets = ["me/target"]\nrepo = "me/drafter"\nkind = "eagle3"\nrevision = "{"1" * 40}"\n'
    for name, text in (("good", good), ("torn", "repo = "), ("odd", "repo = 1")):
        (tmp_path / name).write_text(text)
    catalog, problems = read_valid_catalog(str(tmp_path))
    assert [match.entry.repo for match in catalog.find_matches("me/target")] == ["me/drafter"]
    assert [problem.partition(" is ignored: ")[0] for problem in problems] == [
        "the catalog entry odd",
        "the catalog entry torn",
    ]
