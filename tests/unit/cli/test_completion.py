"""Completion of command lines: candidates, and what shells and kubectl make of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.cli.app import COMMANDS, run_command_line
from aerie.cli.commands import completion
from aerie.cli.commands.completion import SCRIPTS, Shell, find_candidates


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that lists two names, and logs its arguments."""
    script = tmp_path / "kubectl"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/log\nprintf "chat coder"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("st", ["status"]),
        ("--v", ["--version"]),
        ("status --wa", ["--watch"]),
        ("list -o ", ["text", "wide", "json", "yaml"]),
        ("list --output j", ["json"]),
        ("wait chat --for ro", ["rolledback"]),
        ("completion z", ["zsh"]),
        ("preflight --vl", ["--vllm"]),
        ("preflight -f ", []),
        ("status chat ", []),
        ("fly ", []),
        ("operator ", []),
    ],
)
def test_candidates(line: str, candidates: list[str]) -> None:
    assert find_candidates(line.split(" ")) == candidates


def test_names_are_listed_with_the_flags_of_the_line(kubectl: Path) -> None:
    assert find_candidates(["status", "-n", "prod", "--context=eu", "c"]) == ["chat", "coder"]
    assert find_candidates(["status", "co"]) == ["coder"]
    assert find_candidates(["list", "--as", "viewer", "-n", ""]) == ["chat", "coder"]
    lines = kubectl.read_text().splitlines()
    assert lines[0].startswith("-n prod --context=eu --request-timeout=3s get speculativedeployments.aerie.dev ")
    assert lines[2].startswith("--as viewer --request-timeout=3s get namespaces ")


def test_without_a_cluster_there_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    assert find_candidates(["status", ""]) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_options(name: str) -> None:
    if name not in ("completion", "complete"):
        assert "--help" in find_candidates([name, "--"])
        assert len(find_candidates([name, "--"])) > 1


def test_bash_completes_words() -> None:
    code = f"{SCRIPTS[Shell.BASH]}\nCOMP_WORDS=(aerie wait chat --for r); COMP_CWORD=4; _aerie; echo ${{COMPREPLY[@]}}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    shell = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert (shell.stdout, shell.stderr) == ("ready rolledback\n", "")


def test_scripts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in Shell:
        assert run_command_line(["completion", shell]) == 0
        assert capsys.readouterr().out == SCRIPTS[shell]


def test_kubectl_gets_candidates_and_a_directive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {}
    for words in (["wait", "chat", "--for", "p"], ["preflight", "-f", ""]):
        monkeypatch.setattr("sys.argv", ["kubectl_complete-aerie", *words])
        completion.main()
        outputs[words[0]] = capsys.readouterr().out
    assert json.dumps(outputs) == json.dumps({"wait": "promoted\n:4\n", "preflight": ":0\n"})
