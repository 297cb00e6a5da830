"""The two processes of `make test`: their output, failures and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aerie_lab.testing import wait_until

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

PARENT_OF_ONE = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {WAITS.format("one")!r}])
try:
    child.wait()
except KeyboardInterrupt:
    child.wait()
    raise
"""
"""Source of a program with a child process, like pytest with --numprocesses."""


def command(shown: str, beside: str) -> list[str]:
    code = "import sys; from scripts.run_tests import run_side_by_side as run\n"
    code += "sys.exit(abs(run(*((sys.executable, '-c', code) for code in sys.argv[1:]), 'The others')))"
    return [sys.executable, "-c", code, shown, beside]


@pytest.mark.parametrize(("shown", "beside", "status"), [(0, 0, 0), (1, 0, 1), (0, 5, 5), (1, 5, 1)])
def test_the_output_of_the_second_command_follows_at_the_end(shown: int, beside: int, status: int) -> None:
    codes = [f"import sys; print('{line}\\n' * 3, end=''); sys.exit({code})" for line, code in (("one", shown), ("two", beside))]
    done = subprocess.run(command(*codes), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert re.fullmatch(
        r"The others run beside these, .* so far it is in \S+\n(one\n){3}\nThe others, which ran beside these:\n(two\n){3}"
        + shown * r"\nWhat ran first ended with status 1; its last lines were:\n(one\n){3}"
        + shown * r"\nWhat ran first ended with status 1\.\n"
        + bool(beside) * r"\nThe others ended with status 5\.\n",
        done.stdout,
    )
    log = re.search(r"in (\S+)\n", done.stdout)
    assert log is not None
    assert not Path(log[1]).exists()


def test_the_tests_that_failed_are_named_last() -> None:
    summary = "FAILED tests/{0}.py::test_a - no\\nERROR tests/{0}.py::test_b\\n== 1 failed, 7 passed in 3 s =="
    codes = [f"import sys; print('{summary.format(module)}\\n' + 'noise\\n' * 99); sys.exit(1)" for module in ("one", "two")]
    done = subprocess.run(command(*codes), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith(
        "\nWhat ran first ended with status 1.\nFAILED tests/one.py::test_a - no\nERROR tests/one.py::test_b\n"
        "\nThe others ended with status 1.\nFAILED tests/two.py::test_a - no\nERROR tests/two.py::test_b\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_both_commands_clean_up(number: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as output:
        running = subprocess.Popen(command(PARENT_OF_ONE, WAITS.format("two")), cwd=ROOT, stdout=output, stderr=output)

    def begun() -> bool:
        log = re.search(r"in (\S+)\n", out.read_text())
        return log is not None and "one begins" in out.read_text() and "two begins" in Path(log[1]).read_text()

    try:
        wait_until(begun, "both run")
        os.kill(running.pid, number)
        assert running.wait(120) != 0
    finally:
        running.kill()
        running.wait()
    first, second = out.read_text().split("which ran beside these:")
    assert "one tidied up" in first
    assert "two tidied up" in second
