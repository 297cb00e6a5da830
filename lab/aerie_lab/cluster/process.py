"""Whether a lab's process 1 lives, and how to end it: by process id and start time, so that a stranger is never hit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from pathlib import Path

from aerie_lab.sandbox.world import read_process_start_time


def find_lab_pid(folder: Path) -> int | None:
    """Return the process id of the lab's process 1 as this machine sees it, if it lives."""
    try:
        document = json.loads((folder / "process.json").read_text())
        process, started = int(document["pid"]), document["start_time"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return process if started is not None and read_process_start_time(process) == started else None


def wait_for_exit(pid: int, timeout: float) -> bool:
    """Wait until the process has ended, with all its namespaces; return False if it still lives."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(handle)


def kill_lab(folder: Path) -> None:
    """End the lab immediately: the kernel ends every process of its PID namespace with process 1."""
    process = find_lab_pid(folder)
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process)
        try:
            # The number may have been given to another process between the two calls: look once more, then use the handle.
            if find_lab_pid(folder) == process:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                wait_for_exit(process, 30)
        finally:
            os.close(handle)
