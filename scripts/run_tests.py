"""Run the tests as three commands, two at a time: the lab's, which mostly wait, those with real vLLM, then the others.

Those without the lab have what it leaves of the processors. A lab's operators and engines work in each second, so a delay of its
tests also costs more. Linux shares the processors between sessions first (autogroups), and only within one by niceness; each node
and engine of a lab is a session. So each command is a session too, which has the niceness as well. Two at a time: of three,
two shared what a lab left, and their tests exceeded their time limits.

Guarantees: every test runs in one of the three, those marked `nightly` with `--all` alone; output of the first is shown
immediately, and that of each other as a whole after it, also after a failure or Ctrl-C; the last lines of a failed command are
repeated, unless they are the last anyway; status and tests of a failure are named at the end, where a truncated log still has
them; the exit status is 0 only if all are 0. A signal to this process ends all like Ctrl-C in a terminal, pytest with all its
processes, so that no lab is left running. Not guaranteed: an order between the tests of two commands, and a clean-up after a
SIGKILL. `pytest` alone runs everything in one process.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

PYTEST = (sys.executable, "-m", "pytest", "--durations=12")
LONGER_LIMIT = "--timeout=1800"
"""A time limit of a test in place of pyproject.toml's, which is for a processor of one's own."""
WITHOUT_NIGHTLY = ("-m", "not nightly")
COMMANDS = {
    # Two labs, each with files of its own: tests of the lab mostly wait.
    "The tests with the lab": (*PYTEST, "--numprocesses=2", "--dist=loadfile", "tests/lab"),
    # One process: two engines at once are slower than one after the other.
    "The tests with real vLLM": (*PYTEST, LONGER_LIMIT, "tests/vllm"),
    # Two processes: both processors are free when the others have ended. The files in tests/conftest.py's order.
    "The unit tests": (*PYTEST, "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "tests/unit"),
}
"""The commands by name, with all tests. The first one's output is shown while it runs."""
MOST_AT_A_TIME = 2
"""Maximum number of commands at a time. The others begin when one ends."""
NICENESS = {"The tests with real vLLM": 10, "The unit tests": 10}
"""Niceness of the commands by name; 0 for the others."""
ENVIRONMENT = {"GOGC": "800", "GOMEMLIMIT": "2GiB"}
"""Variables where the caller has none of that name. The labs' control planes are busy: at 200 % a quarter of an API server's time
was collection of garbage, with 0.8 GB. So they collect seldom until they have 2 GiB."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_LINES = 60
"""Number of lines of a failed command that are repeated: pytest's summary, and the end of the output before it."""
MOST_NAMED = 12
"""Maximum number of failed tests of each command that are named at the end."""
ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("operator", "drafter", "lab", "plugin")
"""Folders with the packages that the tests' processes import."""
POLL_SECONDS = 0.2
"""Seconds between two reads of the first command's log, and two looks at which commands have ended."""


def run_side_by_side(
    commands: Mapping[str, Sequence[str]], niceness: Mapping[str, int] = NICENESS, most_at_a_time: int = MOST_AT_A_TIME
) -> int:
    """Run the commands, by name, in their order, and return the first exit status other than 0."""
    with contextlib.ExitStack() as files:
        logs = {name: files.enter_context(tempfile.NamedTemporaryFile(prefix="tests-", suffix=".log")) for name in commands}
        first, *others = commands
        for name in others:
            print(f"{name} run beside these; their output follows at the end, and is so far in {logs[name].name}", flush=True)
        running: dict[str, subprocess.Popen[bytes]] = {}
        signals: list[int] = []

        def end(number: int, __: FrameType | None) -> None:
            signals.append(number)
            for process in running.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)  # the whole group, so that each process takes its own lab down

        # Set before they start: they would inherit an ignored SIGINT, which a shell sets for background jobs.
        before = [signal.signal(number, end) for number in ENDING]
        try:
            with open(logs[first].name, "rb") as written:  # no pipe, which orphaned children could keep open
                waiting = list(commands)
                while (not signals and waiting) or _count_running(running):
                    while not signals and waiting and _count_running(running) < most_at_a_time:
                        name = waiting.pop(0)
                        running[name] = start(commands[name], logs[name], niceness.get(name, 0))
                    shutil.copyfileobj(written, sys.stdout.buffer)
                    sys.stdout.flush()
                    time.sleep(POLL_SECONDS)
                shutil.copyfileobj(written, sys.stdout.buffer)
            statuses = {name: running[name].wait() if name in running else -signals[0] for name in commands}
        finally:
            for number, handler in zip(ENDING, before, strict=True):
                signal.signal(number, handler)
        for name in others:
            print(f"\n{name}, which ran beside these:", flush=True)
            logs[name].seek(0)
            shutil.copyfileobj(logs[name], sys.stdout.buffer)
        failed = [name for name, status in statuses.items() if status]
        for name in failed:
            if name != others[-1]:
                print(f"\n{name} ended with status {statuses[name]}; the last lines were:", flush=True)
                logs[name].seek(0)
                sys.stdout.buffer.writelines(deque(logs[name], LAST_LINES))
        for name in failed:
            print(f"\n{name} ended with status {statuses[name]}.", flush=True)
            logs[name].seek(0)
            sys.stdout.buffer.writelines(itertools.islice(filter(_names_a_test, logs[name]), MOST_NAMED))
        sys.stdout.flush()
        return next((status for status in statuses.values() if status), 0)


def start(command: Sequence[str], log: IO[bytes], niceness: int) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, so that Ctrl-C in a terminal reaches it once, from this process."""
    process = subprocess.Popen(
        ("nice", "-n", str(niceness), *command),
        env={**ENVIRONMENT, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    set_session_niceness(process.pid, niceness)
    return process


def set_session_niceness(pid: int, niceness: int) -> None:
    """Set the niceness of a process's autogroup (sched(7)). Systems without autogroups have none to set."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def _names_a_test(line: bytes) -> bool:
    """Return whether it is a line of pytest's summary that names a failed test."""
    return line.startswith((b"FAILED ", b"ERROR "))


def _count_running(commands: Mapping[str, subprocess.Popen[bytes]]) -> int:
    return sum(process.poll() is None for process in commands.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the tests, as `make test` does.", allow_abbrev=False)
    parser.add_argument(
        "--all", action="store_true", help="also those marked nightly, and more examples, as `make test-all` does"
    )
    more: tuple[str, ...] = ()
    if not parser.parse_args().all:
        more = WITHOUT_NIGHTLY
        os.environ.setdefault("HYPOTHESIS_PROFILE", "short")
    # Hundreds of processes import the sources: an operator needs 2.7 s of a processor for that, and 3.3 s without bytecode, which
    # containers and machines with PYTHONDONTWRITEBYTECODE do not write.
    for folder in SOURCES:
        compileall.compile_dir(ROOT / folder, quiet=2)
    # A process that a signal ended has a status below zero.
    sys.exit(abs(run_side_by_side({name: (*command, *more) for name, command in COMMANDS.items()})))
