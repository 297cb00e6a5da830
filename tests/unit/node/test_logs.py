"""Logs on disk, and the output of `kubectl logs`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aerie_lab.node import logs
from aerie_lab.node.logs import LogFile, LogQuery, read_container_log_tail, stream_log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogFile]:
    opened = LogFile(tmp_path / "logs" / "0.log")
    yield opened
    opened.close()


def read_lines(path: Path, query: LogQuery) -> list[str]:
    async def read() -> bytes:
        ended = asyncio.Event()
        ended.set()
        return b"".join([chunk async for chunk in stream_log(path, query, ended)])

    return asyncio.run(read()).decode().splitlines()


def test_lines_have_timestamp_and_stream(log: LogFile) -> None:
    log.write(b"one\ntwo\n", "stdout")
    log.write(b"three\n", "stderr")
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z (stdout|stderr) F \w+"
    assert all(re.fullmatch(pattern, line) for line in log.path.read_text().splitlines())
    assert read_lines(log.path, LogQuery()) == ["one", "two", "three"]
    assert read_lines(log.path, LogQuery(stream="stderr")) == ["three"]
    assert [line.split(" ")[1] for line in read_lines(log.path, LogQuery(timestamps=True))] == ["one", "two", "three"]


def test_tail_limit_and_since(log: LogFile) -> None:
    log.write(b"one\ntwo\nthree\n", "stdout")
    assert read_lines(log.path, LogQuery(tail_lines=2)) == ["two", "three"]
    assert read_lines(log.path, LogQuery(tail_lines=0)) == []
    assert read_lines(log.path, LogQuery(tail_lines=9)) == ["one", "two", "three"]
    assert read_lines(log.path, LogQuery(limit_bytes=6)) == ["one", "tw"]
    assert read_lines(log.path, LogQuery(since=time.time() - 60)) == ["one", "two", "three"]
    assert read_lines(log.path, LogQuery(since=time.time() + 60)) == []
    assert read_container_log_tail(log.path, 2) == "two\nthree"
    assert read_container_log_tail(log.path.with_name("none"), 2) == ""


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.log", LogQuery(follow=True)) == []


def test_carriage_returns_are_no_line_ends(log: LogFile) -> None:
    log.write(b"10%\r50%\rdone\n", "stdout")
    raw = log.path.read_bytes()
    assert raw.count(b" F ") == 1
    assert read_container_log_tail(log.path, 5) == "10%\r50%\rdone"


def test_complete_lines_are_written_before_an_unfinished_one(log: LogFile) -> None:
    async def run() -> tuple[str, str]:
        reader = asyncio.StreamReader()
        copying = asyncio.create_task(log.copy(reader, "stdout"))
        reader.feed_data(b"first\nsecond\nunfin")
        await asyncio.sleep(0)
        early = read_container_log_tail(log.path, 9)
        reader.feed_data(b"ished")
        reader.feed_eof()
        await copying
        return early, read_container_log_tail(log.path, 9)

    assert asyncio.run(run()) == ("first\nsecond", "first\nsecond\nunfinished")


def test_a_line_that_is_too_long_is_split(log: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_LINE_BYTES", 10)

    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"x" * 25)
        reader.feed_eof()
        await log.copy(reader, "stdout")

    asyncio.run(run())
    assert read_container_log_tail(log.path, 9) == "x" * 25


def test_old_lines_are_rotated_and_dropped(log: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_LOG_FILE_BYTES", 200)
    for number in range(50):
        log.write(f"line {number}\n".encode(), "stdout")
    lines = read_lines(log.path, LogQuery())
    assert lines[-1] == "line 49"
    assert 4 <= len(lines) < 20
    assert lines == [f"line {number}" for number in range(50 - len(lines), 50)]
    assert len(list(log.path.parent.iterdir())) == 2


def test_following_misses_no_line_when_the_file_is_rotated(log: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_LOG_FILE_BYTES", 400)
    monkeypatch.setattr(logs, "_FOLLOW_POLL_SECONDS", 0.001)

    async def run() -> list[str]:
        ended = asyncio.Event()
        log.write(b"line 0\n", "stdout")

        async def write() -> None:
            for number in range(1, 60):
                log.write(f"line {number}\n".encode(), "stdout")
                await asyncio.sleep(0.002)
            ended.set()

        writing = asyncio.create_task(write())
        content = b"".join([chunk async for chunk in stream_log(log.path, LogQuery(follow=True), ended)])
        await writing
        return content.decode().splitlines()

    assert asyncio.run(run()) == [f"line {number}" for number in range(60)]
