"""The processes of `make test`: their output, failures and signals."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aerie_lab.testing import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
WAITS = """
import time
try:
    print('{0} begins', flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print('{0} tidied up')
    raise
"""
"""Source of a program that ends only on Ctrl-C, and then cleans up."""

PARENT_OF_FIRST = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {WAITS.format("first")!r}])
try:
    child.wait()
except KeyboardInterrupt:
    child.wait()
    raise
"""
"""Source of a program with a child process, like pytest with --numprocesses."""


NAMES = ("first", "second", "third")


def command(*codes: str, niceness: dict[str, int] | None = None, most: int = 3) -> list[str]:
    """Return the command that runs these programs side by side, named by their order."""
    code = "import sys; from scripts.run_tests import run_side_by_side as run\n"
    code += f"commands = {{name: (sys.executable, '-c', code) for name, code in zip({NAMES}, sys.argv[1:], strict=True)}}\n"
    code += f"run = run(commands, {niceness or {}}, {most})\n"
    return [sys.executable, "-c", code + "sys.exit(abs(run))", *codes]


@pytest.mark.parametrize("statuses", list(itertools.product((0, 1), (0, 5), (0, 7))))
def test_the_output_of_the_others_follows_at_the_end(statuses: tuple[int, int, int]) -> None:
    codes = [
        f"import sys; print('{name}\\n' * 3, end=''); sys.exit({status})" for name, status in zip(NAMES, statuses, strict=True)
    ]
    done = subprocess.run(command(*codes), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == next((status for status in statuses if status), 0)
    first, second, third = statuses
    assert re.fullmatch(
        r"second run beside these; .* is so far in \S+\nthird run beside these; .* is so far in \S+\n(first\n){3}"
        r"\nsecond, which ran beside these:\n(second\n){3}\nthird, which ran beside these:\n(third\n){3}"
        + bool(first) * r"\nfirst ended with status 1; the last lines were:\n(first\n){3}"
        + bool(second) * r"\nsecond ended with status 5; the last lines were:\n(second\n){3}"
        + bool(first) * r"\nfirst ended with status 1\.\n"
        + bool(second) * r"\nsecond ended with status 5\.\n"
        + bool(third) * r"\nthird ended with status 7\.\n",
        done.stdout,
    )
    logs = re.findall(r"so far in (\S+)\n", done.stdout)
    assert len(logs) == 2
    assert not any(Path(log).exists() for log in logs)


def test_the_tests_that_failed_are_named_last() -> None:
    summary = "FAILED tests/{0}.py::test_a - no\\nERROR tests/{0}.py::test_b\\n== 1 failed, 7 passed in 3 s =="
    codes = [f"import sys; print('{summary.format(module)}\\n' + 'noise\\n' * 99); sys.exit(1)" for module in ("one", "two")]
    done = subprocess.run(command(*codes, "pass"), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith(
        "\nfirst ended with status 1.\nFAILED tests/one.py::test_a - no\nERROR tests/one.py::test_b\n"
        "\nsecond ended with status 1.\nFAILED tests/two.py::test_a - no\nERROR tests/two.py::test_b\n"
    )


def test_a_command_and_its_session_have_its_niceness() -> None:
    code = "import os, pathlib; print(os.nice(0), *pathlib.Path('/proc').glob('self/autogroup'), os.getsid(0) == os.getpid())\n"
    code += "for path in pathlib.Path('/proc').glob('self/autogroup'): print(path.read_text().split()[-1])"
    done = subprocess.run(command(code, code, "pass", niceness={"second": 7}), cwd=ROOT, capture_output=True, text=True)
    shown = re.findall(r"^(\d+) .*True\n(?:(\d+)\n)?", done.stdout, re.MULTILINE)
    sessions = ("0", "7") if Path("/proc/self/autogroup").exists() else ("", "")
    assert shown == [(str(min(os.nice(0) + added, 19)), session) for added, session in zip((0, 7), sessions, strict=True)], (
        done.stdout
    )


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_beyond_the_maximum_begins_when_one_ends(status: int, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    ends_first = f"import time, pathlib; time.sleep(1); pathlib.Path({str(ended)!r}).touch(); raise SystemExit({status})"
    waits = f"import time, pathlib\nwhile not pathlib.Path({str(ended)!r}).exists(): time.sleep(0.1)"
    third = f"import pathlib; print(pathlib.Path({str(ended)!r}).exists())"
    done = subprocess.run(command(waits, ends_first, third, most=2), cwd=ROOT, capture_output=True, text=True)
    assert "\nthird, which ran beside these:\nTrue\n" in done.stdout
    assert done.returncode == status


def test_a_signal_begins_no_waiting_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as output:
        codes = (WAITS.format("first"), WAITS.format("second"), "print('third begins')")
        running = subprocess.Popen(command(*codes, most=2), cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_until(lambda: all(f"{name} begins" in _read_logs(out) for name in NAMES[:2]), "two run")
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait(120) != 0
    finally:
        running.kill()
        running.wait()
    assert "second tidied up" in out.read_text()
    assert "third begins" not in out.read_text()


def _read_logs(out: Path) -> str:
    """Return what the commands have written so far."""
    logs = re.findall(r"so far in (\S+)\n", out.read_text())
    return "".join(Path(log).read_text() for log in logs) + out.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_all_commands_clean_up(number: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    programs = [PARENT_OF_FIRST, *(WAITS.format(name) for name in NAMES[1:])]
    with out.open("wb") as output:
        running = subprocess.Popen(command(*programs), cwd=ROOT, stdout=output, stderr=output)

    def begun() -> bool:
        written = _read_logs(out)
        return all(f"{name} begins" in written for name in NAMES)

    try:
        wait_until(begun, "all run")
        os.kill(running.pid, number)
        assert running.wait(120) != 0
    finally:
        running.kill()
        running.wait()
    first, second, third = re.split(r"\w+, which ran beside these:", out.read_text())
    assert "first tidied up" in first
    assert "second tidied up" in second
    assert "third tidied up" in third
