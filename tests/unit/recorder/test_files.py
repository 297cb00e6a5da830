"""Files: complete lines, atomic rotation, recovery after SIGKILL, retention."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.recorder import files
from aerie.recorder.files import PromptFolder
from aerie.recorder.storage import Retention, Storage
from tests.unit.recorder.clock import NOW, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path, clock: Clock) -> PromptFolder:
    folder = PromptFolder(tmp_path / "prompts", clock)
    folder.recover()
    return folder


def names(folder: PromptFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir())


def test_file_is_complete_after_its_time(folder: PromptFolder, clock: Clock) -> None:
    folder.append(b"1\n")
    (name,) = names(folder)
    assert name.startswith("20260301T140509Z-")
    assert name.endswith(".jsonl.open")
    assert folder.list_files() == []
    clock.now += files.ROTATE_AFTER
    folder.rotate()
    (complete,) = folder.list_files()
    assert (complete.name, complete.size) == (name.removesuffix(".open"), 2)
    folder.append(b"2\n")
    assert len(names(folder)) == 2


def test_file_is_complete_at_its_size(folder: PromptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROTATE_BYTES", 10)
    for _ in range(4):
        folder.append(b"12345\n")
    assert [item.size for item in folder.list_files()] == [12, 12]
    assert len(names(folder)) == 2


def test_line_that_is_written_in_part_is_removed(folder: PromptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.append(b"first\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:3]))
    with pytest.raises(OSError, match="only 3 of 7 bytes"):
        folder.append(b"second\n")
    monkeypatch.undo()
    folder.append(b"third\n")
    folder.complete()
    folder.recover()
    assert sorted((folder.folder / name).read_bytes() for name in names(folder)) == [b"first\n", b"third\n"]


@given(st.lists(st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"")), max_size=5), st.binary(max_size=200_000))
def test_recovery_keeps_the_complete_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], rest: bytes) -> None:
    folder = PromptFolder(tmp_path_factory.mktemp("recovery"), lambda: NOW)
    complete = b"".join(line + b"\n" for line in lines)
    abandoned = folder.folder / "20260301T140509Z-00000000.jsonl.open"
    abandoned.write_bytes(complete + rest.replace(b"\n", b" "))
    folder.recover()
    assert names(folder) == (["20260301T140509Z-00000000.jsonl"] if lines else [])
    assert all(path.read_bytes() == complete for path in folder.folder.iterdir())


def test_open_file_of_a_living_process_is_left_alone(folder: PromptFolder, clock: Clock) -> None:
    folder.append(b"1\n")
    other = PromptFolder(folder.folder, clock)
    other.recover()
    assert other.list_files() == []
    folder.append(b"2\n")
    folder.complete()
    assert [item.size for item in other.list_files()] == [4]


def test_files_of_others_are_neither_recovered_nor_deleted(folder: PromptFolder, clock: Clock) -> None:
    for name in ("notes.jsonl", "notes.jsonl.open", "20260301T140509Z-1.jsonl"):
        (folder.folder / name).write_text("mine")
    (folder.folder / "20260301T140509Z-00000000.jsonl").symlink_to("/etc/hostname")
    folder.recover()
    clock.now += timedelta(days=400)
    assert folder.delete_expired(timedelta(days=1), 10**9).deleted_files == 0
    assert len(names(folder)) == 4


def test_retention_deletes_the_oldest_first(folder: PromptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROTATE_BYTES", 10)
    for _ in range(5):
        folder.append(b"0123456789\n")
        clock.now += timedelta(hours=1)
    assert folder.delete_expired(timedelta(hours=4), 10**9).deleted_files == 2  # began five and four hours ago
    assert folder.delete_expired(timedelta(hours=4), 10 + 22).deleted_files == 1  # beside room for the open file
    assert [item.name[:13] for item in sorted(folder.list_files(), key=lambda item: item.name)] == [
        "20260301T1705",
        "20260301T1805",
    ]


def test_volume_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    retention = Retention(timedelta(days=1), 2**30)
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        Storage(tmp_path / "file", None, retention, lambda: NOW).prepare()
    storage = Storage(tmp_path / "prompts", None, retention, lambda: NOW)
    storage.prepare()
    assert storage.apply_retention().files == []
    monkeypatch.setattr(files, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(OSError, match="MiB of free space"):
        storage.prepare()
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="cannot be written"):
        storage.prepare()


WRITER = """
import itertools, json, sys
from datetime import UTC, datetime
from pathlib import Path
from aerie.recorder import files
files.ROTATE_BYTES = 2_000_000
folder = files.PromptFolder(Path(sys.argv[1]), lambda: datetime.now(UTC))
folder.recover()
for number in itertools.count():
    folder.append(json.dumps({"number": number, "text": "x" * 50_000}).encode() + b"\\n")
    print(number, flush=True)
"""


@pytest.mark.slow
def test_sigkill_loses_at_most_the_line_that_is_being_written(tmp_path: Path) -> None:
    delays, total = random.Random(3), 0  # noqa: S311 - no secrets
    for _ in range(12):
        folder = tmp_path / str(total)
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            confirmed = int(writer.stdout.readline())
            time.sleep(delays.uniform(0, 0.1))
            writer.kill()
            confirmed = max([confirmed, *map(int, writer.stdout.read().split("\n")[:-1])])
        recovered = PromptFolder(folder, lambda: NOW)
        recovered.recover()
        paths = [folder / item.name for item in recovered.list_files()]
        assert len(paths) == len(list(folder.iterdir()))
        numbers = sorted(json.loads(line)["number"] for path in paths for line in path.read_bytes().splitlines())
        assert numbers[: confirmed + 1] == list(range(confirmed + 1))
        assert len(numbers) <= confirmed + 2
        total += 1 + len(numbers)
