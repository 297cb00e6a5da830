"""Runs all tests as two commands side by side: the lab's, which mostly wait, and beside them those of the other tiers.

The lab's tests take longest, so they run in two processes, each with a lab of its own; all tests of a file run in the same. The
others get less of the processors, so that they delay none of the lab's.

Guarantees: every test runs in one of the two; what the first says is shown as it comes, and what the other says in one piece
after it, also after a failure or Ctrl-C; where the first failed, its last lines come once more; a failure's status and tests are
named at the very end, which is what is left of a long log; the exit status is 0 only if it is 0 of both. What ends this ends both
as Ctrl-C in a terminal ends pytest with all its processes, so that no lab is left running. Not guaranteed: an order between the
tests of the two, and what is left of either after a SIGKILL. `pytest` alone runs everything in one process.
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

SHOWN = ("--numprocesses=2", "--dist=loadfile", "tests/lab")
BESIDE = ("-m", "not lab")
NICE = ("nice", "-n", "5")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_LINES = 60
"""So many of a failure's are shown again: pytest's summary, and the end of what it tells before."""
MOST_NAMED = 12
"""Failed tests of each that are named at the end."""
POLL_SECONDS = 0.2
"""Seconds from one look at what the first has written to the next."""


def side_by_side(shown: Sequence[str], beside: Sequence[str], name: str) -> int:
    """Run two commands; the exit status of the first that has another than 0. `name`: what the second is called."""
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

        # Before they start: what a shell has made this one ignore, as SIGINT of a job in its background, they would ignore too.
        before = [signal.signal(number, end) for number in ENDING]
        try:
            # Groups of their own, so that Ctrl-C reaches each of them once: from here.
            for command, out in ((beside, second), (shown, first)):
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0))
            statuses = [follow(running[1], first.name), running[0].wait()]
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
    """Whether it is one of pytest's summary of what failed."""
    return line.startswith((b"FAILED ", b"ERROR "))


def follow(process: subprocess.Popen[bytes], log: str) -> int:
    """Show what a process writes to its log until it has ended; its status. No pipe, which what it leaves running might hold."""
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
    sys.exit(abs(side_by_side(*commands, "The tests without the lab, and those with real vLLM,")))
