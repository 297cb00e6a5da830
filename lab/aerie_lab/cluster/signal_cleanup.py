"""Takes labs down before a signal ends the process: SIGTERM and SIGHUP run neither `finally` nor `__exit__`.

    with clean_up_on_signal(lab.down):    # a signal in this block calls it, and then ends the process
        ...
        with defer_signals():             # a signal in this block waits until its end
            lab.down()

Guarantees: the process ends by the signal, as it would without a lab; of several labs the latest is taken down first. Not
guaranteed: anything on SIGKILL (`end_with_caller` is for that), in threads other than the main one, in forked processes, or where
the program ignores the signal or has its own handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _SignalCleanup:
    """Callbacks that run before a signal ends this process."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []
        self.owner_pid = 0
        """A process that is forked from this one has its handlers, and none of its labs."""
        self.deferral_depth = 0
        self.pending_signal: int | None = None
        """The signal that came meanwhile."""

    def handle(self, number: int, _: object = None) -> None:
        if os.getpid() == self.owner_pid:
            if self.deferral_depth:
                self.pending_signal = number
                return
            self.deferral_depth += 1
            for down in reversed(self.callbacks):
                with contextlib.suppress(Exception):  # the others are taken down all the same
                    down()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


_signal_cleanup = _SignalCleanup()


@contextlib.contextmanager
def clean_up_on_signal(callback: Callable[[], object]) -> Iterator[None]:
    """Within it, a signal that would end the process calls `down` before."""
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _TERMINATION_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if not _signal_cleanup.callbacks:
        _signal_cleanup.owner_pid = os.getpid()
    _signal_cleanup.callbacks.append(callback)
    for number in ours:
        signal.signal(number, _signal_cleanup.handle)
    try:
        yield
    finally:
        _signal_cleanup.callbacks.remove(callback)
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Within it, a signal that would end the process waits, if there is something to be done before."""
    _signal_cleanup.deferral_depth += 1
    try:
        yield
    finally:
        _signal_cleanup.deferral_depth -= 1
        if _signal_cleanup.pending_signal is not None and not _signal_cleanup.deferral_depth:
            _signal_cleanup.handle(_signal_cleanup.pending_signal)
