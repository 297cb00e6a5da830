"""Storage under faults: full volumes, stores that reject or hang, two recorders in one folder, clocks that are set back."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from aerie.recorder import files, objects
from aerie.recorder.files import PromptFolder
from aerie.recorder.objects import PromptObjects
from aerie.recorder.retention import StorageReport, StoredFile
from aerie.recorder.storage import Retention, Storage
from tests.unit.recorder.clock import Clock
from tests.unit.recorder.failing_store import FailingStore, run_failing_store

RETENTION = Retention(timedelta(hours=1), 2**30)
OLD = "20260101T000000Z-00000000.jsonl"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingStore]:
    monkeypatch.setattr(objects, "_RETRIES", 0)
    with run_failing_store() as store:
        yield store


def maintain(storage: Storage) -> StorageReport:
    """Do what the pipeline does at intervals."""
    storage.prepare()
    try:
        storage.upload()
    finally:
        report = storage.apply_retention()
    return report


def folder_of(path: Path, clock: Clock) -> PromptFolder:
    folder = PromptFolder(path, clock)
    folder.recover()
    return folder


def test_full_volume_still_deletes_what_has_expired(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path, None, RETENTION, clock)
    (tmp_path / OLD).write_bytes(b"1\n")
    monkeypatch.setattr(files, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(OSError, match="free space"):
        storage.prepare()
    assert storage.apply_retention().deleted_files == 1
    assert list(tmp_path.iterdir()) == []


def test_full_pod_still_uploads(tmp_path: Path, clock: Clock, store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path, store.bucket, RETENTION, clock)
    storage.append(b"1\n")
    clock.now += files.ROTATE_AFTER
    monkeypatch.setattr(files, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(OSError, match="free space"):
        storage.prepare()
    storage.upload()
    assert [file.size for file in storage.apply_retention().files] == [2]
    assert list(tmp_path.iterdir()) == []


def test_store_that_rejects_uploads_still_deletes_what_has_expired(tmp_path: Path, clock: Clock, store: FailingStore) -> None:
    storage = Storage(tmp_path, store.bucket, RETENTION, clock)
    store.objects[OLD] = b"1\n"
    store.statuses["PUT"] = 403
    storage.append(b"2\n")
    clock.now += files.ROTATE_AFTER
    with pytest.raises(OSError, match="PermissionDenied"):
        maintain(storage)
    assert store.objects == {}
    assert len(list(tmp_path.glob("*.jsonl"))) == 1  # it waits


@pytest.mark.parametrize("status", [403, 500])
def test_what_waits_for_its_upload_is_deleted_by_the_retention(
    tmp_path: Path,
    clock: Clock,
    store: FailingStore,
    status: int,
) -> None:
    storage = Storage(tmp_path, store.bucket, RETENTION, clock)
    store.statuses |= {"PUT": status, "GET": status}
    storage.append(b"1\n")
    clock.now += files.ROTATE_AFTER
    for _ in range(2):
        with pytest.raises(OSError, match=str(status)):
            maintain(storage)
    assert len(list(tmp_path.iterdir())) == 1
    clock.now += RETENTION.max_age
    with pytest.raises(OSError, match=str(status)):
        maintain(storage)
    assert list(tmp_path.iterdir()) == []


def test_files_are_uploaded_by_one_request_each(tmp_path: Path, clock: Clock, store: FailingStore) -> None:
    """Parts of an upload that was interrupted would stay in the bucket, where no listing shows them."""
    storage = Storage(tmp_path, store.bucket, RETENTION, clock)
    storage.append(b"x" * (files.ROTATE_BYTES - 1) + b"\n")
    maintain(storage)
    assert [len(content) for content in store.objects.values()] == [files.ROTATE_BYTES]
    assert [call for call in store.calls if not call.startswith("GET")] == ["PUT"]


def test_hours_without_a_store_lose_nothing_until_the_size_is_reached(
    tmp_path: Path,
    clock: Clock,
    store: FailingStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage(tmp_path, store.bucket, Retention(timedelta(days=7), 2**30), clock)
    store.statuses |= {"PUT": 503, "GET": 503}
    for _ in range(40):
        storage.append(b"x" * 999 + b"\n")
        clock.now += files.ROTATE_AFTER
        with pytest.raises(OSError, match="503"):
            maintain(storage)
    monkeypatch.setattr("aerie.recorder.storage.MAX_SPOOLED_BYTES", 42_000)
    storage.append(b"x" * 999 + b"\n")
    storage.append(b"x" * 999 + b"\n")
    with pytest.raises(OSError, match="wait for their upload"):
        storage.append(b"x" * 999 + b"\n")
    with pytest.raises(OSError, match="wait for their upload"):
        storage.prepare()
    store.statuses.clear()
    storage.upload()
    assert sum(file.size for file in storage.apply_retention().files) == 40_000
    storage.prepare()
    storage.append(b"x" * 999 + b"\n")


def test_expired_objects_are_deleted_together_and_those_of_others_stay(tmp_path: Path, clock: Clock, store: FailingStore) -> None:
    expired = {OLD.replace("-0", f"-{number}"): b"1\n" for number in range(9)}
    store.objects |= expired | {"notes.txt": b"of somebody else"}
    report = Storage(tmp_path, store.bucket, RETENTION, clock).apply_retention()
    assert (report.files, report.deleted_files) == ([], 9)
    assert list(store.objects) == ["notes.txt"]
    assert store.calls == ["GET list-type", "POST delete"]


def test_file_that_another_recorder_deletes_during_a_listing_is_left_out(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scandir = os.scandir

    class Vanishing:
        def __init__(self, path: Path) -> None:
            self._entries = scandir(path)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            for entry in self._entries:
                if entry.name == OLD:
                    Path(entry.path).unlink()
                yield entry

        def __exit__(self, *_: object) -> None:
            self._entries.close()

    folder = folder_of(tmp_path, clock)
    for name in (OLD, OLD.replace("2026", "2025")):
        (tmp_path / name).write_bytes(b"1\n")
    monkeypatch.setattr(os, "scandir", Vanishing)
    assert folder.list_files() == [StoredFile(OLD.replace("2026", "2025"), 2)]


def test_file_that_another_recorder_completes_meanwhile_is_no_error(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is renamed between the listing and the opening, or between the opening and the lock."""
    for moment in ("open", "flock"):
        path = tmp_path / f"{OLD}.open"
        path.write_bytes(b"1\n")
        target = Path if moment == "open" else fcntl
        original = getattr(target, moment)

        def rename_before(*arguments: object, call: object = original, path: Path = path, **options: object) -> object:
            if path.exists():
                path.rename(path.with_suffix(""))
            return call(*arguments, **options)  # type: ignore[operator]

        monkeypatch.setattr(target, moment, rename_before)
        PromptFolder(tmp_path, clock).recover()
        monkeypatch.undo()
        assert [entry.name for entry in tmp_path.iterdir()] == [OLD]


def test_new_file_that_another_recorder_takes_for_abandoned_is_not_written(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, flock = folder_of(tmp_path, clock), fcntl.flock

    def recover_before(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        PromptFolder(tmp_path, clock).recover()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", recover_before)
    with pytest.raises(OSError, match="another process has removed"):
        folder.append(b"1\n")
    folder.append(b"2\n")
    folder.complete()
    assert [(tmp_path / item.name).read_bytes() for item in folder.list_files()] == [b"2\n"]


def test_file_of_a_recorder_that_was_killed_is_completed_by_the_other(tmp_path: Path, clock: Clock) -> None:
    storage = Storage(tmp_path, None, RETENTION, clock)
    storage.append(b"1\n")
    (tmp_path / f"{OLD}.open").write_bytes(b"2\n3")
    storage.prepare()
    assert storage.apply_retention().deleted_files == 1
    assert len(list(tmp_path.glob("*.open"))) == 1  # its own


def test_file_that_could_not_be_completed_is_completed_later(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage(tmp_path, None, RETENTION, clock)
    storage.append(b"1\n")
    clock.now += files.ROTATE_AFTER

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="input/output"):
        storage.prepare()
    monkeypatch.undo()
    storage.prepare()
    assert [file.size for file in storage.apply_retention().files] == [2]


def test_line_that_is_written_in_part_is_the_last_of_its_file(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage(tmp_path, None, RETENTION, clock)
    storage.append(b"first\n")
    write = os.write

    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:3]))
    with pytest.raises(OSError, match="only 3 of 7"):
        storage.append(b"second\n")
    monkeypatch.undo()
    storage.append(b"third\n")
    storage.complete()
    storage.prepare()
    assert sorted(path.read_bytes() for path in tmp_path.glob("*.jsonl")) == [b"first\n", b"third\n"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("jump", [timedelta(days=-2), timedelta(days=2)])
def test_file_is_complete_when_the_clock_jumps(tmp_path: Path, clock: Clock, jump: timedelta) -> None:
    folder = folder_of(tmp_path, clock)
    folder.append(b"1\n")
    clock.now += jump
    folder.rotate()
    assert [item.size for item in folder.list_files()] == [2]


def test_errors_of_the_store_have_no_signature_and_no_time(store: FailingStore) -> None:
    store.statuses["GET"] = 403
    texts = set()
    for _ in range(3):
        with pytest.raises(OSError, match="403 Forbidden") as rejection:
            PromptObjects(store.bucket).list_files()
        texts.add(str(rejection.value))
    (text,) = texts
    assert "secret" not in text
