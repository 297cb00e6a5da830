"""Process boundary of every command (`aerie`, `aerie-drafter`, `aerie-lab`): exit statuses and error output.

    status  meaning
    0       success
    1       negative result: rejected, or nothing found
    2       the command failed: a wrong call, an unreadable file, no such cluster, a full disk
    70      a defect of the command itself
    130     interrupted
    141     the reader has closed the output

A script can rely on these only if nothing else ends a process with 1, which is Python's own status for a traceback.

Guarantees: every exception becomes one line on standard error; a traceback is printed only with AERIE_TRACEBACK=1. Output that
cannot be delivered is never mistaken for an answer. A character that the terminal's encoding lacks is replaced. A closed
standard stream fails when it is used, and its file descriptor never goes to another file. Not guaranteed: an end by a signal
other than SIGINT, which is the system's.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

EXIT_REJECTED, EXIT_FAILED, EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED, EXIT_OUTPUT_CLOSED = 1, 2, 70, 130, 141
TRACEBACK_VARIABLE = "AERIE_TRACEBACK"
"""Environment variable that enables tracebacks."""
_OWN_PACKAGES = ("aerie", "aerie_drafter", "aerie_lab")
_ASCII_REPLACEMENTS = {"✓": "ok", "✗": "x", "·": "-", "…": "...", "─": "-", "│": "|", "→": "->"}
_MAX_ERROR_CHARACTERS = 500
_CODEC_ERROR_HANDLER = "aerie-ascii"


class OutputUndeliverableError(BaseException):
    """Standard output cannot be written any more. Not an Exception, so that no code between the write and the boundary catches
    it by mistake."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.is_closed = isinstance(error, BrokenPipeError)


def run_process(command_name: str, extra: str, load_command: Callable[[], Callable[[], int]]) -> NoReturn:
    """Run a command as this process and exit with its status. `load_command` imports the command; `extra` is the optional
    dependency that the command needs."""
    # Block Ctrl-C while the imports run: Python may lose it there, or report it as another error.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    _prepare_streams()

    def command() -> int:
        run = load_command()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return run()

    sys.exit(run_to_exit_status(command_name, extra, command))


def run_to_exit_status(command_name: str, extra: str, command: Callable[[], int]) -> int:
    """Return the exit status of a command, whatever it raises."""
    try:
        exit_status = command()
        sys.stdout.flush()
        return exit_status
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except OutputUndeliverableError as error:
        # The buffered rest cannot be written either. The interpreter must not try to flush it again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return (
            EXIT_OUTPUT_CLOSED
            if error.is_closed
            else _report_failure(EXIT_FAILED, f"standard output cannot be written ({error})")
        )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OWN_PACKAGES:
            return _report_defect(command_name, error)
        return _report_failure(
            EXIT_FAILED, f"the package {package} is not installed: run pip install aerie-{extra}" if extra else str(error)
        )
    except OSError as error:
        resource = error.filename if isinstance(error.filename, str | bytes) else "a file or a connection"
        return _report_failure(EXIT_FAILED, f"{os.fsdecode(resource)} cannot be used ({error.strerror or error})")
    except MemoryError:
        return _report_failure(EXIT_FAILED, "there is not enough memory for this command")
    except BaseException as error:  # noqa: BLE001 - the boundary: only the interpreter is above it, with a traceback and status 1
        return _report_defect(command_name, error)


def _report_defect(command_name: str, error: BaseException) -> int:
    return _report_failure(
        EXIT_INTERNAL_ERROR,
        f"{command_name} has a defect ({type(error).__name__}: {error}): set {TRACEBACK_VARIABLE}=1 to see where, and report it",
    )


def _report_failure(exit_status: int, message: str) -> int:
    if os.environ.get(TRACEBACK_VARIABLE):
        import traceback  # not needed otherwise

        traceback.print_exc()
    line = "".join(character if character.isprintable() else "?" for character in " ".join(message.split()))
    sys.stderr.write(f"error: {line if len(line) <= _MAX_ERROR_CHARACTERS else line[: _MAX_ERROR_CHARACTERS - 1] + '…'}.\n")
    return exit_status


# -- Standard streams ----------------------------------------------------------------------------------------------------


class _CheckedStdout(io.FileIO):
    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise OutputUndeliverableError(error) from error


class _BestEffortStderr(io.FileIO):
    """Standard error for messages to the user: where they cannot be written, the exit status still reports success or failure."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return len(data)  # type: ignore[arg-type]


def _prepare_streams() -> None:
    # Open a file of the wrong direction for a closed stream: using it fails, and no later file gets its descriptor.
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)
    codecs.register_error(_CODEC_ERROR_HANDLER, _replace_unencodable)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    sys.stdout = _wrap_text_stream(_CheckedStdout(1, "w", closefd=False), sys.stdout)
    sys.stderr = _wrap_text_stream(_BestEffortStderr(2, "w", closefd=False), sys.stderr)


def _wrap_text_stream(raw: io.FileIO, previous_stream: TextIO | None) -> TextIO:
    is_line_buffered = isinstance(previous_stream, io.TextIOWrapper) and (
        previous_stream.line_buffering or previous_stream.write_through
    )
    encoding = previous_stream.encoding if previous_stream is not None else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, _CODEC_ERROR_HANDLER, line_buffering=is_line_buffered)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_ASCII_REPLACEMENTS.get(character, "?") for character in error.object[error.start : error.end]), error.end
