"""The command line `aerie-lab`: a thin layer over `Lab` and `FaultInjector`.

Each error is one message on standard error; exit statuses: `aerie.boundary`.
"""

from __future__ import annotations

from collections.abc import Callable

from aerie.boundary import run_process


def main() -> None:
    """Entry point."""
    run_process("aerie-lab", "lab", _load)


def _load() -> Callable[[], int]:
    from aerie_lab.cli.run import run

    return run
