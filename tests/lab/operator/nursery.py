"""Starts operators by forking a process that has imported everything: a real process each, in a tenth of the time of a fresh one.

A line of JSON comes in for each operator: `arguments` of `aerie operator`, `kubeconfig`, `log`, and `clock`, a file or null. Its
process id goes out. All of them end with this process, and this process ends when its input does.

With `clock`, the wall clock of the operator's own code is off by the seconds that stand in the file; they are read with each
look at the clock. Durations, which are measured on the monotonic clock, go on as they are, as when a machine's clock is set.
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

import aerie.controller.operator  # noqa: F401 - what a start would spend its time on
from aerie.cli import main
from aerie.controller import clock, leader_election


def live(order: dict[str, Any]) -> NoReturn:
    """Be the operator."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["KUBECONFIG"] = kube_config.KUBE_CONFIG_DEFAULT_LOCATION = order["kubeconfig"]  # it was read at the import
        if order["clock"] is not None:
            shift(Path(order["clock"]))
        sys.argv = ["aerie", "operator", *order["arguments"]]
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(status)


def shift(file: Path) -> None:
    """Let the wall clock be off by what the file says."""

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=float(file.read_text()))

    for module in (clock, leader_election):
        module.datetime = Shifted  # type: ignore[attr-defined]


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    children = []
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            live(json.loads(line))
        children.append(child)
        print(child, flush=True)  # noqa: T201 - the answer
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
