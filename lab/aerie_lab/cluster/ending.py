"""Takes labs down before a signal ends the process: SIGTERM and SIGHUP run neither `finally` nor `__exit__`.

    with ended_first(lab.down):     # a signal in here calls it, and then ends the process
        ...
        with undisturbed():         # a signal in here waits until the end of this block
            lab.down()

Guarantees: the process ends by the signal, as it would without a lab; of several labs the latest is taken down first. Not
guaranteed: anything on SIGKILL (a leash is for that), in other threads than the main one, in processes that are forked from this
one, or where the program ignores the signal or has a handler of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Ending:
    """What is to be done before a signal ends this process."""

    def __init__(self) -> None:
        self.first: list[Callable[[], object]] = []
        self.process = 0
        """A process that is forked from this one has its handlers, and none of its labs."""
        self.undisturbed = 0
        self.waiting: int | None = None
        """The signal that came meanwhile."""

    def handle(self, number: int, _: object = None) -> None:
        if os.getpid() == self.process:
            if self.undisturbed:
                self.waiting = number
                return
            self.undisturbed += 1
            for down in reversed(self.first):
                with contextlib.suppress(Exception):  # the others are taken down all the same
                    down()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


_ending = _Ending()


@contextlib.contextmanager
def ended_first(down: Callable[[], object]) -> Iterator[None]:
    """Within it, a signal that would end the process calls `down` before."""
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if not _ending.first:
        _ending.process = os.getpid()
    _ending.first.append(down)
    for number in ours:
        signal.signal(number, _ending.handle)
    try:
        yield
    finally:
        _ending.first.remove(down)
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within it, a signal that would end the process waits, if there is something to be done before."""
    _ending.undisturbed += 1
    try:
        yield
    finally:
        _ending.undisturbed -= 1
        if _ending.waiting is not None and not _ending.undisturbed:
            _ending.handle(_ending.waiting)
