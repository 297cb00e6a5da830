"""Container output on disk, in the CRI line format, and its reading for `kubectl logs`.

    2026-11-21T08:30:00.123456789Z stdout F the line

One file per run of a container: logs/CONTAINER/RUN.log. A file past 10 MiB is set aside as RUN.log.1, so that a chatty
container keeps at most the last 10 to 20 MiB, as a kubelet's defaults do.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_MAX_LOG_FILE_BYTES = 10 * 1024 * 1024
_FOLLOW_POLL_SECONDS = 0.2
_MAX_LINE_BYTES = 1_000_000  # bytes of a line; a longer one is broken


class LogFile:
    """Takes a container's output; one writer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)

    async def copy(self, reader: asyncio.StreamReader, stream: str) -> None:
        """Write every line of `reader` as it is complete, until it ends; `stream` is stdout or stderr."""
        rest = b""
        while chunk := await reader.read(65_536):
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                self.write(lines + newline, stream)
            if len(rest) > _MAX_LINE_BYTES:
                self.write(rest + b"\n", stream)
                rest = b""
        if rest:
            self.write(rest + b"\n", stream)

    def write(self, chunk: bytes, stream: str) -> None:
        """Write whole lines."""
        nanoseconds = time.time_ns()
        moment = datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
        prefix = f"{moment}.{nanoseconds % 10**9:09d}Z {stream} F ".encode()
        with contextlib.suppress(OSError):  # a full disk loses log lines, not the container
            self._file.write(b"".join(prefix + line + b"\n" for line in chunk[:-1].split(b"\n")))
            if self._file.tell() > _MAX_LOG_FILE_BYTES:
                self._file.close()
                self.path.replace(_rotated_path(self.path))
                self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """No more output will come."""
        self._file.close()


def _rotated_path(path: Path) -> Path:
    return path.with_name(path.name + ".1")


@dataclass(frozen=True)
class LogQuery:
    """Options of `kubectl logs`, with the field names of PodLogOptions."""

    tail_lines: int | None = None
    limit_bytes: int | None = None
    since: float | None = None
    """Seconds since the epoch."""
    timestamps: bool = False
    follow: bool = False
    stream: str | None = None


def _format_line(raw: bytes, query: LogQuery) -> bytes | None:
    moment, _, rest = raw.partition(b" ")
    stream, _, rest = rest.partition(b" ")
    _, _, text = rest.partition(b" ")
    if query.since is not None:
        seconds = datetime.datetime.fromisoformat(moment.decode()[:19] + "+00:00").timestamp()
        if seconds < int(query.since):
            return None
    if query.stream and stream.decode() != query.stream:
        return None
    return (moment + b" " + text if query.timestamps else text) + b"\n"


def _open_if_exists(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _read_rest(file: BinaryIO | None) -> bytes:
    return file.read() if file is not None else b""


def read_container_log_tail(path: Path, lines: int) -> str:
    """Return the last lines of text, for messages."""
    with contextlib.ExitStack() as opened:
        raw = b""
        for part in (_rotated_path(path), path):
            if file := _open_if_exists(part):
                raw += opened.enter_context(file).read()
    last_lines = raw.split(b"\n")[:-1][-lines:]
    return "\n".join((_format_line(line, LogQuery()) or b"").decode(errors="replace").rstrip("\n") for line in last_lines)


async def stream_log(path: Path, query: LogQuery, exit_event: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield the log as `kubectl logs` requests it; with follow, until the container has ended and all is read."""
    left = query.limit_bytes if query.limit_bytes is not None else 1 << 62
    async for text in _stream_lines(path, query, exit_event):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


async def _stream_lines(path: Path, query: LogQuery, exit_event: asyncio.Event) -> AsyncIterator[bytes]:
    # The current file is opened first and kept: when it is set aside meanwhile, it is read to its end under its new name.
    file = _open_if_exists(path)
    try:
        finished = exit_event.is_set()
        raw = b""
        if (older := _open_if_exists(_rotated_path(path))) is not None:
            with older:
                if file is None or not os.path.sameopenfile(older.fileno(), file.fileno()):
                    raw = older.read()
        *lines, rest = (raw + _read_rest(file)).split(b"\n")
        shown = [text for line in lines if (text := _format_line(line, query)) is not None]
        for text in shown if query.tail_lines is None else shown[len(shown) - min(len(shown), query.tail_lines) :]:
            yield text
        while query.follow:
            chunk = _read_rest(file)
            if not chunk and (newer := _open_if_rotated(path, file)) is not None:
                chunk = _read_rest(file)  # what was written between the last look and the setting aside
                if file is not None:
                    file.close()
                file = newer
            if chunk:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if (text := _format_line(line, query)) is not None:
                        yield text
            elif finished:
                return
            else:
                finished = exit_event.is_set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(exit_event.wait(), 0 if finished else _FOLLOW_POLL_SECONDS)
    finally:
        if file is not None:
            file.close()


def _open_if_rotated(path: Path, file: BinaryIO | None) -> BinaryIO | None:
    """Return the current file, if it is another one than `file`."""
    current = _open_if_exists(path)
    if current is None or file is None or not os.path.sameopenfile(current.fileno(), file.fileno()):
        return current
    current.close()
    return None
