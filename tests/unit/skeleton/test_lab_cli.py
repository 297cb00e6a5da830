"""The lab's command line: errors of typer and of the lab are one sentence and an exit status."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

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
    monkeypatch.setattr("aerie_lab.cli.app.Lab.find", find)
    monkeypatch.setattr("aerie_lab.cli.app.ensure_binary", lambda tool, _: tool)
    monkeypatch.setattr(
        "aerie_lab.cli.app.replace_process", lambda words, environment: recorded.extend((words, environment["KUBECONFIG"]))
    )
    assert run() == 0
    assert recorded == [name, [arguments[0], *passed], "k"]
