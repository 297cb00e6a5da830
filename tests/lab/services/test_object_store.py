"""The recorder and a real server with the API of Amazon S3: uploads, retention, and failures of the store."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aerie.recorder import files
from aerie.recorder.objects import Bucket, PromptObjects
from aerie.recorder.storage import MAX_SPOOLED_FILES, Retention, Storage
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


def stored_lines(folder: Path) -> list[int]:
    """Return the records in the bucket's folder, each a number."""
    paths = sorted((folder / "buckets" / "prompts" / "team" / "chat").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_complete_files_are_uploaded_and_deleted_by_the_retention(tmp_path: Path) -> None:
    clock = Clock()
    with run_object_store(tmp_path, "prompts") as url:
        storage = Storage(tmp_path / "spool", bucket(url), RETENTION, clock)
        storage.append(b"1\n")
        assert storage.maintain().files == ()  # the open file is not uploaded
        clock.now += files.ROTATE_AFTER
        assert [file.size for file in storage.maintain().files] == [2]
        assert list((tmp_path / "spool").iterdir()) == []
        storage.append(b"2\n")
        storage.close()
        assert stored_lines(tmp_path) == [1, 2]

        (tmp_path / "buckets" / "prompts" / "team" / "chat" / "notes.txt").write_text("of somebody else")
        clock.now = START + RETENTION.max_age
        report = storage.maintain()
        assert (report.deleted_files, stored_lines(tmp_path)) == (1, [2])
        clock.now += RETENTION.max_age
        assert storage.maintain().deleted_files == 1
        assert (tmp_path / "buckets" / "prompts" / "team" / "chat" / "notes.txt").exists()


def test_store_that_is_absent_loses_nothing_until_the_spool_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROTATE_BYTES", 4)
    clock = Clock()
    with run_object_store(tmp_path, "prompts") as url:
        port = int(url.rpartition(":")[2])
    storage = Storage(tmp_path / "spool", bucket(url), RETENTION, clock)
    for number in range(MAX_SPOOLED_FILES):
        storage.append(b"%d\n" % (100 + number))
    with pytest.raises(OSError, match="wait for their upload"):
        storage.append(b"200\n")
    with pytest.raises(OSError, match="Generic"):
        storage.maintain()
    successor = Storage(tmp_path / "spool", bucket(url), RETENTION, clock)  # as after a crash
    with run_object_store(tmp_path, "prompts", port=port):
        assert len(successor.maintain().files) == MAX_SPOOLED_FILES
        successor.append(b"300\n")
        successor.close()
    assert sorted(stored_lines(tmp_path)) == [*range(100, 100 + MAX_SPOOLED_FILES), 300]


@pytest.mark.parametrize(("name", "secret_key", "status"), [("absent", SECRET_KEY, "404"), ("prompts", "wrong", "403")])
def test_rejection_is_reported_without_secrets(tmp_path: Path, name: str, secret_key: str, status: str) -> None:
    with run_object_store(tmp_path, "prompts") as url, pytest.raises(OSError, match=status) as rejection:
        PromptObjects(bucket(url, name, secret_key)).list_files()
    assert ACCESS_KEY not in str(rejection.value)
    assert secret_key not in str(rejection.value)
