"""The boundary of a process: status and one line for each exception of a command and each failure of its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.boundary import run_to_exit_status

BIN = Path(sys.executable).parent
AERIE = str(BIN / "aerie")


def run_command_that_raises(error: BaseException) -> int:
    def command() -> int:
        raise error

    return run_to_exit_status("aerie-lab", "lab", command)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            KeyError("x"),
            70,
            "aerie-lab has a defect (KeyError: 'x'): set AERIE_TRACEBACK=1 to see where, and report it.\n",
        ),
        (ValueError("a\n\x1b[2Jb"), 70, "(ValueError: a ?[2Jb)"),
        (RecursionError("deep"), 70, "RecursionError"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x cannot be used (Permission denied).\n"),
        (OSError(98, "Address already in use"), 2, "error: a file or a connection cannot be used (Address already in use).\n"),
        (ModuleNotFoundError(name="torch.nn"), 2, "error: the package torch is not installed: run pip install aerie-lab.\n"),
        (ModuleNotFoundError(name="aerie.gone"), 70, "a defect"),
        (MemoryError(), 2, "error: there is not enough memory for this command.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_exception_is_one_line_and_a_status(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AERIE_TRACEBACK", raising=False)
    assert run_command_that_raises(error) == code
    stderr = capsys.readouterr().err
    assert message in stderr
    assert stderr.count("\n") == 1


def test_aerie_traceback_prints_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AERIE_TRACEBACK", "1")
    assert run_command_that_raises(KeyError("x")) == 70
    stderr = capsys.readouterr().err
    assert "Traceback (most recent call last)" in stderr
    assert stderr.splitlines()[-1].startswith("error: aerie-lab has a defect")


def run_shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    text = line.replace("AERIE", AERIE)
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("AERIE catalog > /dev/full", 2, "error: standard output cannot be written (No space left on device).\n"),
        ("AERIE catalog -o json > /dev/full", 2, "error: standard output cannot be written (No space left on device).\n"),
        ("AERIE --help > /dev/full", 2, "error: standard output cannot be written (No space left on device).\n"),
        ("AERIE catalog >&-", 2, "error: standard output cannot be written (Bad file descriptor).\n"),
        ("AERIE catalog | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("AERIE preflight -f - <&-", 2, "error: standard input cannot be read (Bad file descriptor): give a YAML file.\n"),
        ("AERIE catalog example/none 2>&-", 1, ""),
        ("AERIE preflight -f /dev/zero", 2, "error: /dev/zero has more than 4 MiB: give a file with only the manifest.\n"),
        (f"PATH=/none {BIN}/kubectl-aerie explain chat", 2, "error: kubectl is not on PATH"),
        (f"{BIN}/aerie-drafter evaluate", 2, "Usage: aerie-drafter evaluate"),
        (f"{BIN}/aerie-drafter train /none.yaml", 2, "error: /none.yaml cannot be read"),
        (f"{BIN}/aerie-lab up --api-port 70000", 2, "error: api_port is 70000: choose a number from 0 to 65535.\n"),
    ],
)
def test_status_and_message_of_a_process(line: str, code: int, message: str) -> None:
    process = run_shell(line)
    assert process.returncode == code, process.stderr
    assert "Traceback" not in process.stderr
    assert message in process.stderr
    if not message:
        assert process.stderr == ""


@pytest.mark.slow
def test_an_ascii_terminal_gets_ascii_marks() -> None:
    bundle = Path(__file__).resolve().parents[3] / "drafter/bundle"
    process = run_shell(f"AERIE preflight --target {bundle}/target --drafter {bundle}/eagle3 -v", PYTHONIOENCODING="ascii")
    assert process.returncode == 0, process.stderr
    assert "\nok C1 " in process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aerie", "kubectl-aerie", "aerie-drafter", "aerie-lab"])
def test_every_command_line_has_a_version(name: str) -> None:
    process = subprocess.run([BIN / name, "--version"], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("aerie 0.")
