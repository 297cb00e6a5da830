"""The edge of every command here (`aerie`, `aerie-drafter`, `aerie-lab`): what a process ends with, and what it says then.

    status  meaning
    0       all is well
    1       the answer is no: refused, or there is none
    2       it could not be done: a wrong call, a file that cannot be read, no such cluster, a full disk
    70      a defect of the command itself
    130     interrupted
    141     whoever read the output has closed it

A script can rely on that only if nothing else ends a process with 1, which is Python's own status for a traceback.

Guarantees: whatever a command raises is one line on standard error; a traceback is printed only with AERIE_TRACEBACK=1. Output
that cannot be delivered is never mistaken for an answer. A character that the terminal's encoding lacks is replaced. A standard
stream that is closed fails when it is used, and its number never goes to another file. Not guaranteed: an end by a signal other
than SIGINT, which is the system's.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

REFUSED, FAILED, DEFECT, INTERRUPTED, CLOSED = 1, 2, 70, 130, 141
TRACEBACK = "AERIE_TRACEBACK"
"""Variable that asks for tracebacks."""
_OURS = ("aerie", "aerie_drafter", "aerie_lab")
_MARKS = {"✓": "ok", "✗": "x", "·": "-", "…": "...", "─": "-", "│": "|", "→": "->"}
_LONGEST = 500


class UndeliverableError(BaseException):
    """Standard output takes no more. Not an Exception: nothing between the write and the edge may take it for its own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.closed = isinstance(error, BrokenPipeError)


def enter(name: str, extra: str, load: Callable[[], Callable[[], int]]) -> NoReturn:
    """Run a command as this process. `load` imports it; `extra` is the optional dependency that it needs."""
    # Ctrl-C may come while the imports are still running, in which Python may lose it, or report it as another error.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    _prepare_streams()

    def command() -> int:
        run = load()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return run()

    sys.exit(status(name, extra, command))


def status(name: str, extra: str, command: Callable[[], int]) -> int:
    """The exit status of a command, whatever it raises."""
    try:
        found = command()
        sys.stdout.flush()
        return found
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except UndeliverableError as error:
        # What is still in the buffer has no way out, and is not to be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return CLOSED if error.closed else _fail(FAILED, f"standard output cannot be written ({error})")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OURS:
            return _defect(name, error)
        return _fail(FAILED, f"the package {package} is not installed: run pip install 'aerie[{extra}]'" if extra else str(error))
    except OSError as error:
        what = error.filename if isinstance(error.filename, str | bytes) else "a file or a connection"
        return _fail(FAILED, f"{os.fsdecode(what)} cannot be used ({error.strerror or error})")
    except MemoryError:
        return _fail(FAILED, "there is not enough memory for this")
    except BaseException as error:  # noqa: BLE001 - the edge: above it is only the interpreter, with a traceback and status 1
        return _defect(name, error)


def _defect(name: str, error: BaseException) -> int:
    return _fail(DEFECT, f"{name} has a defect ({type(error).__name__}: {error}): set {TRACEBACK}=1 to see where, and report it")


def _fail(code: int, text: str) -> int:
    if os.environ.get(TRACEBACK):
        import traceback  # not needed otherwise

        traceback.print_exc()
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    sys.stderr.write(f"error: {line if len(line) <= _LONGEST else line[: _LONGEST - 1] + '…'}.\n")
    return code


# -- Standard streams ----------------------------------------------------------------------------------------------------


class _Out(io.FileIO):
    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise UndeliverableError(error) from error


class _Err(io.FileIO):
    """Notes for a person: where they cannot be written, the exit status still says whether all is well."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return len(data)  # type: ignore[arg-type]


def _prepare_streams() -> None:
    # A closed one gets a file that cannot be used in its direction: using it fails, and no file opened later gets its number.
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    codecs.register_error("marks", _marks)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    sys.stdout = _text(_Out(1, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Err(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: TextIO | None) -> TextIO:
    direct = isinstance(before, io.TextIOWrapper) and (before.line_buffering or before.write_through)
    encoding = before.encoding if before is not None else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "marks", line_buffering=direct)


def _marks(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_MARKS.get(letter, "?") for letter in error.object[error.start : error.end]), error.end
