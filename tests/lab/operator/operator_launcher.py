"""Starts operators by forking a process that has imported everything: real processes, in a tenth of the time of a fresh start.

Input: a line of JSON for each operator with `arguments` of `aerie operator`, `kubeconfig`, `log`, and `clock`, a file or null.
Output: its process id. All operators end with this process, and this process ends with its input.

With `clock`, the wall clock of the operator's own code is shifted by the seconds in the file, which is read at each use of the
clock. Durations, which are measured on the monotonic clock, are unaffected, as when a machine's clock is set.

This process is started as a session, because Linux shares the processors between sessions first, and each engine of a lab is one:
operators that shared the session of the tests were starved, and their scrapes too late to count. Where it is permitted, the
session gets more than an engine, as an operator has by its CPU request in a cluster.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from kubernetes.aio.config import kube_config

import aerie.controller.operator  # noqa: F401 - the import takes most of a start's time
from aerie.cli import main
from aerie.controller import clock, leader_election

SESSION_NICENESS = -5
"""Niceness of the operators' session; that of an engine's is 0."""


def prefer_session() -> None:
    """Set the niceness of this process's autogroup (sched(7)), where it is permitted and the system has autogroups."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(SESSION_NICENESS))


def run_operator(request: dict[str, Any]) -> NoReturn:
    """Run the operator in this process."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["KUBECONFIG"] = kube_config.KUBE_CONFIG_DEFAULT_LOCATION = request["kubeconfig"]  # it was read at the import
        if request["clock"] is not None:
            shift_clock(Path(request["clock"]))
        sys.argv = ["aerie", "operator", *request["arguments"]]
        main()
    except SystemExit as exit_request:
        status = exit_request.code if isinstance(exit_request.code, int) else 1
    finally:
        os._exit(status)


def shift_clock(offset_file: Path) -> None:
    """Shift the wall clock by the seconds in the file."""

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=float(offset_file.read_text()))

    for module in (clock, leader_election):
        module.datetime = Shifted  # type: ignore[attr-defined]


if __name__ == "__main__":
    prefer_session()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit status is not read
    children = []
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run_operator(json.loads(line))
        children.append(child)
        print(child, flush=True)  # noqa: T201 - the answer
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
