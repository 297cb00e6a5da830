"""Run all tests as two commands side by side: the lab's, which mostly wait, and those of the other tiers.

The others get less of the processors, so that they delay none of the lab's.

Guarantees: every test runs in one of the two; output of the first is shown immediately, and that of the other as a whole
after it, also after a failure or Ctrl-C; if the first failed, its last lines are repeated; status and tests of a failure are
named at the end, where a truncated log still has them; the exit status is 0 only if both are 0. A signal to this process ends
both like Ctrl-C in a terminal, pytest with all its processes, so that no lab is left running. Not guaranteed: an order between
the tests of the two, and a clean-up after a SIGKILL. `pytest` alone runs everything in one process.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from types import FrameType

SHOWN = ("tests/lab",)
"""One lab: beside a second one, and the other tests, two cores scrape too late for blocks of two seconds."""
BESIDE = ("-m", "not lab")
NICE = ("nice", "-n", "10")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_LINES = 60
"""Number of lines of a failed run that are repeated: pytest's summary, and the end of the output before it."""
MOST_NAMED = 12
"""Maximum number of failed tests of each that are named at the end."""
POLL_SECONDS = 0.2
"""Seconds between two reads of the first command's log."""


def run_side_by_side(shown: Sequence[str], beside: Sequence[str], name: str) -> int:
    """Run two commands, and return the first exit status other than 0. `name`: name of the second."""
    with (
        tempfile.NamedTemporaryFile(prefix="tests-", suffix=".log") as first,
        tempfile.NamedTemporaryFile(prefix="tests-", suffix=".log") as second,
    ):
        print(f"{name} run beside these, and their output follows at the end; so far it is in {second.name}", flush=True)
        running: list[subprocess.Popen[bytes]] = []

        def end(_: int, __: FrameType | None) -> None:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)  # the whole group, so that each process takes its own lab down

        # Set before they start: they would inherit an ignored SIGINT, which a shell sets for background jobs.
        before = [signal.signal(number, end) for number in ENDING]
        try:
            # Separate process groups, so that Ctrl-C reaches each of them once, from here.
            for command, out in ((beside, second), (shown, first)):
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0))
            statuses = [print_log(running[1], first.name), running[0].wait()]
        finally:
            for number, handler in zip(ENDING, before, strict=True):
                signal.signal(number, handler)
        print(f"\n{name}, which ran beside these:", flush=True)
        second.seek(0)
        shutil.copyfileobj(second, sys.stdout.buffer)
        if statuses[0]:
            print(f"\nWhat ran first ended with status {statuses[0]}; its last lines were:", flush=True)
            first.seek(0)
            sys.stdout.buffer.writelines(deque(first, LAST_LINES))
        for what, status, log in (("What ran first", statuses[0], first), (name, statuses[1], second)):
            if status:
                print(f"\n{what} ended with status {status}.", flush=True)
                log.seek(0)
                sys.stdout.buffer.writelines(itertools.islice(filter(_names_a_test, log), MOST_NAMED))
        sys.stdout.flush()
        return next((status for status in statuses if status), 0)


def _names_a_test(line: bytes) -> bool:
    """Return whether it is a line of pytest's summary that names a failed test."""
    return line.startswith((b"FAILED ", b"ERROR "))


def print_log(process: subprocess.Popen[bytes], log: str) -> int:
    """Print the log of a process until it has ended, and return its status. No pipe, which orphaned children could keep open."""
    with open(log, "rb") as written:
        while True:
            ended = process.poll() is not None
            shutil.copyfileobj(written, sys.stdout.buffer)
            sys.stdout.flush()
            if ended:
                return process.returncode
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    pytest = (sys.executable, "-m", "pytest")
    # A process that a signal ended has a status below zero.
    commands = (*pytest, *SHOWN), (*NICE, *pytest, *BESIDE)
    sys.exit(abs(run_side_by_side(*commands, "The tests without the lab, and those with real vLLM,")))
