"""The lab's command line: errors of typer and of the lab are one sentence and an exit status."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer

from aerie_lab.cli.app import COMMANDS, load_command
from aerie_lab.cli.run import run


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["up", "nonsense"], 2, "Got unexpected extra argument"),
        (["status", "--nothing"], 2, "No such option"),
        (["status", "--name", "Not A Name"], 2, "cannot name a lab"),
        (["up", "--gateway-name", "public"], 2, "gateway_name is 'public': write NAMESPACE/NAME"),
        (
            ["kubectl", "--name", "nobodys-lab", "get", "pods"],
            2,
            "lab 'nobodys-lab' is not up: start it with `aerie-lab up --name",
        ),
        (["helm", "--name=nobodys-lab", "list"], 2, "lab 'nobodys-lab' is not up: start it with `aerie-lab up --name"),
        (["kubectl", "--name"], 2, "--name has no value: write --name NAME before the arguments of kubectl"),
        (["demo", "--show", "all"], 2, "--show all: nothing to show has this name. Choose rollouts or refresh."),
        (["demo", "--show", "refresh", "--engine", "vllm"], 2, "--show refresh has real vLLM in the lab"),
        (["--help"], 0, ""),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["aerie-lab", *arguments])
    assert run() == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name", "passed"),
    [
        (["kubectl", "--name", "dev", "get", "pods"], "dev", ["get", "pods"]),
        (["kubectl", "--name=dev", "expose", "pod", "x", "--name=y"], "dev", ["expose", "pod", "x", "--name=y"]),
        (["kubectl", "expose", "pod", "x", "--name", "y"], "own", ["expose", "pod", "x", "--name", "y"]),
        (["helm", "list"], "own", ["list"]),
    ],
)
def test_a_name_before_the_arguments_selects_the_lab(
    arguments: list[str], name: str, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[object] = []

    def find(name: str) -> SimpleNamespace:
        recorded.append(name)
        return SimpleNamespace(kubeconfig="k")

    monkeypatch.setattr(sys, "argv", ["aerie-lab", *arguments])
    monkeypatch.setenv("AERIE_LAB_NAME", "own")
    monkeypatch.setattr("aerie_lab.cli.cluster_commands.Lab.find", find)
    monkeypatch.setattr("aerie_lab.cli.cluster_commands.ensure_binary", lambda tool, _: tool)
    monkeypatch.setattr(
        "aerie_lab.cli.cluster_commands.replace_process",
        lambda words, environment: recorded.extend((words, environment["KUBECONFIG"])),
    )
    assert run() == 0
    assert recorded == [name, [arguments[0], *passed], "k"]


@pytest.mark.parametrize("name", COMMANDS)
def test_summaries_are_the_first_sentence_of_the_help(name: str) -> None:
    command = load_command(name)
    text = command.info.help if isinstance(command, typer.Typer) else command.__doc__
    assert " ".join((text or "").split()).startswith(COMMANDS[name].summary)


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = "import sys; sys.argv[1:] = ['--help']; from aerie_lab.cli.run import run; run(); print(sorted(sys.modules))"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    imported = set(eval(lines[-1]))  # noqa: S307
    assert not imported & {"aiohttp", "cryptography", "httpx", "numpy", *(entry.module for entry in COMMANDS.values())}
