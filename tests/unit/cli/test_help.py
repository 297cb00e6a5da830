"""Help and version of the programs: no type names, no broken sentences, and `version` beside `--version`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from aerie import typer_app
from aerie.cli.app import COMMANDS, run_command_line
from aerie_drafter.cli import run_cli
from aerie_lab.cli.app import COMMANDS as LAB_COMMANDS
from aerie_lab.cli.run import run as run_lab

TYPE_NAMES = re.compile(r"<(str|bool|int|float|list\[|path|file|directory)|range>")


def run_program(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    if program == "aerie-lab":
        return run_lab()
    return run_cli(arguments) if program == "aerie-drafter" else run_command_line(arguments)


@pytest.mark.parametrize("program", ["aerie", "kubectl-aerie", "aerie-drafter", "aerie-lab"])
def test_version_is_an_option_and_a_command(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for argument in ("version", "--version"):
        assert run_program(program, [argument], monkeypatch) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert re.fullmatch(r"aerie \d+\.\d+\.\d+\n", texts[0])


@pytest.mark.parametrize(
    ("program", "command"),
    [
        *(("aerie", name) for name in COMMANDS),
        *(("aerie-lab", name) for name in LAB_COMMANDS if name not in ("kubectl", "helm")),
    ],
)
def test_help_has_no_type_names(
    program: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(program, [command, "--help"], monkeypatch) == 0
    text = capsys.readouterr().out
    assert "--help" in text
    assert not TYPE_NAMES.search(text)


def test_help_shows_what_a_value_may_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 130)
    assert run_command_line(["resume", "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"--for +DURATION +Extend", text)
    assert re.search(r"--reason +VALUE +With --for: why", text)
    assert re.search(r"--dry-run +Have the API server", text)
    assert re.search(r"--output +-o +<text\|wide\|json\|yaml> +Form", text)
    assert re.search(r"name +Name of the SpeculativeDeployment", text)


def test_sentences_are_not_broken_where_the_source_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer_app.build_root_app("A program.")

    @app.command()
    def fly() -> None:
        """Fly a round.

        The first line of the paragraph
        and its second line.
        """

    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 130)
    with pytest.raises(SystemExit):
        app(["fly", "--help"])
    assert "The first line of the paragraph and its second line." in capsys.readouterr().out


def test_only_the_shared_app_builds_programs() -> None:
    """An app of typer itself would have type names and broken sentences in its help."""
    root = Path(__file__).resolve().parents[3]
    files = [file for folder in ("operator", "lab", "drafter") for file in (root / folder).rglob("*.py")]
    assert [file for file in files if re.search(r"= typer\.Typer\(", file.read_text())] == []
