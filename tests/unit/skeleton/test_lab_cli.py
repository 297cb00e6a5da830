"""The lab's command line: what typer refuses, and what the lab refuses, are both a sentence and an exit status."""

from __future__ import annotations

import sys

import pytest

from aerie_lab.cli.run import run


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["up", "nonsense"], 2, "Got unexpected extra argument"),
        (["status", "--nothing"], 2, "No such option"),
        (["status", "--name", "Not A Name"], 2, "cannot name a lab"),
        (["up", "--gateway-name", "public"], 2, "gateway_name is 'public': write NAMESPACE/NAME"),
        (["--help"], 0, ""),
    ],
)
def test_refusals(
    arguments: list[str], status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["aerie-lab", *arguments])
    assert run() == status
    assert said in capsys.readouterr().err
