"""Names of files, and which are deleted: by age, by size, and never those of others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from aerie.recorder.retention import StoredFile, build_name, parse_name, separate_expired

NOW = datetime(2026, 3, 8, tzinfo=UTC)
DAY = timedelta(days=1)


def file(days: float, size: int = 100, unique: str = "00000000") -> StoredFile:
    """Return a file that began so many days ago."""
    return StoredFile(build_name(NOW - days * DAY, unique), size)


def select_expired(files: list[StoredFile], now: datetime, max_age: timedelta, max_bytes: int) -> list[str]:
    """Return the names to delete. Together with the rest they are the recorder's files."""
    retained, expired = separate_expired(files, now, max_age, max_bytes)
    assert sorted(item.name for item in (*retained, *expired)) == sorted(item.name for item in files if parse_name(item.name))
    return [item.name for item in expired]


def test_age_and_size() -> None:
    files = [file(7), file(6.99), file(3), file(1)]
    assert select_expired(files, NOW, 7 * DAY, 10**6) == [files[0].name]
    assert select_expired(files, NOW, 7 * DAY, 250) == [files[0].name, files[1].name]
    assert select_expired(files, NOW, 7 * DAY, 0) == [item.name for item in files]


def test_files_of_others_stay() -> None:
    names = ["README", "prompts.jsonl", "20260301T140509Z-1f0c2a9b.jsonl.open", "20269901T140509Z-1f0c2a9b.jsonl", "../x"]
    assert select_expired([StoredFile(name, 10**9) for name in names], NOW, DAY, 0) == []
    assert parse_name("20260301T140509Z-1f0c2a9b.jsonl") == datetime(2026, 3, 1, 14, 5, 9, tzinfo=UTC)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1000)), max_size=30),
    st.integers(1, 20),
    st.integers(0, 10_000),
)
def test_what_remains_is_within_the_limits_and_newest(entries: list[tuple[int, int]], days: int, max_bytes: int) -> None:
    files = [file(age, size, f"{number:08x}") for number, (age, size) in enumerate(entries)]
    expired = select_expired(files, NOW, days * DAY, max_bytes)
    remaining = [item for item in files if item.name not in expired]
    assert sum(item.size for item in remaining) <= max_bytes
    assert all(NOW - (parse_name(item.name) or NOW) < days * DAY for item in remaining)
    if remaining and expired:
        assert max(expired) <= min(item.name for item in remaining) or max_bytes < sum(item.size for item in files)
    in_time = [item for item in files if NOW - (parse_name(item.name) or NOW) < days * DAY]
    if sum(item.size for item in in_time) <= max_bytes:
        assert remaining == in_time
