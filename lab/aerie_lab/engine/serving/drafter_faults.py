"""Faults of a change of the drafter in place, to test what the operator does then.

    stage-hangs   a drafter's files are not read to their end while it lasts, as from a disk that hangs
    swap-fails    a swap fails, and the drafter before it is loaded again
    swap-breaks   a swap fails and cannot be undone: only a restart helps
    swap-ignored  a swap is reported as done, while the engine drafts with what it had: the endpoint lies

The option `drafter_fault` sets the fault from the start, and POST /simulator/drafter-fault at any time (`server`). The option
`swap_seconds` makes a pause long.
"""

from __future__ import annotations

from typing import Literal, get_args

from aerie_lab.errors import StateError

DrafterFault = Literal["stage-hangs", "swap-fails", "swap-breaks", "swap-ignored"]


def parse_drafter_fault(text: str) -> DrafterFault:
    """Return the fault of this name. Raises StateError."""
    for name in get_args(DrafterFault):
        if text == name:
            fault: DrafterFault = name
            return fault
    raise StateError(f"there is no drafter fault '{text}': one of {', '.join(get_args(DrafterFault))}.")
