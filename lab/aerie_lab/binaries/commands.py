"""Runs one long command (a compiler, pip) so that it can be watched, explained and stopped.

Guarantees: all output is in a log file; the caller is called back every BEAT seconds; whatever ends the call early
(Ctrl-C included) ends the command's whole process group first; and when this process is killed outright, the kernel
kills the command too. Not guaranteed in that last case: the command's own children, which may finish their one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ProgressCallback = Callable[[str], None]

HEARTBEAT_SECONDS = 15.0

# Ties the command's life to ours, then becomes the command. Done in a program of its own because the ways to run code
# between fork and exec are not safe in a process with threads. 1 is PR_SET_PDEATHSIG, 9 is SIGKILL.
_PARENT_DEATH_SCRIPT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def run_command(
    command: Sequence[str | Path],
    *,
    folder: Path,
    environment: Mapping[str, str],
    log_file: Path,
    on_heartbeat: Callable[[float], None],
) -> int:
    """Run `command` (an absolute path and its arguments) to its end, and return its exit status.

    Output is appended to `log_file`; `on_heartbeat` is called with the elapsed seconds, every HEARTBEAT_SECONDS.
    """
    tied = [sys.executable, "-I", "-S", "-c", _PARENT_DEATH_SCRIPT, str(os.getpid()), *command]
    begin = time.monotonic()
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            tied,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        while True:
            try:
                return process.wait(timeout=HEARTBEAT_SECONDS)
            except subprocess.TimeoutExpired:
                on_heartbeat(time.monotonic() - begin)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; `on_wait` is called first when another process has it.

    The kernel releases it when its holder ends, however that happens.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
