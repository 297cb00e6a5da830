"""The recorder and a real server with the API of Amazon S3: uploads, retention, and failures of the store."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aerie.recorder import files
from aerie.recorder import storage as storage_module
from aerie.recorder.objects import Bucket, PromptObjects
from aerie.recorder.retention import StorageReport
from aerie.recorder.storage import Retention, Storage
from aerie_lab.testing.object_store import ACCESS_KEY, SECRET_KEY, run_object_store

START = datetime(2026, 3, 1, tzinfo=UTC)
RETENTION = Retention(timedelta(hours=1), 2**30)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def bucket(url: str, name: str = "prompts", secret_key: str = SECRET_KEY) -> Bucket:
    return Bucket(name, "team/chat", "us-east-1", url, ACCESS_KEY, secret_key)


def maintain(storage: Storage) -> StorageReport:
    """Do what the pipeline does at intervals."""
    storage.prepare()
    storage.upload()
    return storage.apply_retention()


def stored_lines(folder: Path) -> list[int]:
    """Return the records in the bucket's folder, each a number."""
    paths = sorted((folder / "buckets" / "prompts" / "team" / "chat").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_complete_files_are_uploaded_and_deleted_by_the_retention(tmp_path: Path) -> None:
    clock = Clock()
    with run_object_store(tmp_path, "prompts") as url:
        storage = Storage(tmp_path / "spool", bucket(url), RETENTION, clock)
        storage.append(b"1\n")
        assert maintain(storage).files == []  # the open file is not uploaded
        clock.now += files.ROTATE_AFTER
        assert [file.size for file in maintain(storage).files] == [2]
        assert list((tmp_path / "spool").iterdir()) == []
        storage.append(b"2\n")
        storage.complete()
        storage.upload()
        assert stored_lines(tmp_path) == [1, 2]

        (tmp_path / "buckets" / "prompts" / "team" / "chat" / "notes.txt").write_text("of somebody else")
        clock.now = START + RETENTION.max_age
        report = maintain(storage)
        assert (report.deleted_files, stored_lines(tmp_path)) == (1, [2])
        clock.now += RETENTION.max_age
        assert maintain(storage).deleted_files == 1
        assert (tmp_path / "buckets" / "prompts" / "team" / "chat" / "notes.txt").exists()


def test_store_that_is_absent_loses_nothing_until_the_spool_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROTATE_BYTES", 4)
    monkeypatch.setattr(storage_module, "MAX_SPOOLED_BYTES", 16)
    clock = Clock()
    with run_object_store(tmp_path, "prompts") as url:
        port = int(url.rpartition(":")[2])
    storage = Storage(tmp_path / "spool", bucket(url), RETENTION, clock)
    for number in range(4):
        storage.append(b"%d\n" % (100 + number))
    with pytest.raises(OSError, match="wait for their upload"):
        storage.append(b"200\n")
    with pytest.raises(OSError, match="Generic"):
        storage.upload()
    successor = Storage(tmp_path / "spool", bucket(url), RETENTION, clock)  # as after a crash
    with run_object_store(tmp_path, "prompts", port=port):
        successor.upload()
        assert len(maintain(successor).files) == 4
        successor.append(b"300\n")
        successor.complete()
        successor.upload()
    assert sorted(stored_lines(tmp_path)) == [100, 101, 102, 103, 300]


def test_two_recorders_delete_the_same_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with run_object_store(tmp_path, "prompts") as url:
        first, second = (Storage(tmp_path / name, bucket(url), RETENTION, clock) for name in ("first", "second"))
        for storage in (first, second):
            storage.append(b"1\n")
            storage.complete()
            storage.upload()
        clock.now += RETENTION.max_age
        listed = PromptObjects(bucket(url)).list_files()
        assert len(listed) == 2
        assert first.apply_retention().deleted_files == 2
        monkeypatch.setattr(PromptObjects, "list_files", lambda _: listed)  # as if it had listed them before
        assert second.apply_retention().deleted_files == 2
        assert stored_lines(tmp_path) == []


@pytest.mark.parametrize(("name", "secret_key", "status"), [("absent", SECRET_KEY, "404"), ("prompts", "wrong", "403")])
def test_rejection_is_reported_without_secrets(tmp_path: Path, name: str, secret_key: str, status: str) -> None:
    with run_object_store(tmp_path, "prompts") as url, pytest.raises(OSError, match=status) as rejection:
        PromptObjects(bucket(url, name, secret_key)).list_files()
    assert ACCESS_KEY not in str(rejection.value)
    assert secret_key not in str(rejection.value)
