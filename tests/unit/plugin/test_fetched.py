"""The Hub's cache of a pod over many rollouts: it stays small, and what vLLM has fetched stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aerie_vllm.fetched import RECORD, record_fetch, remove_unneeded

VLLM_COMMIT = "f" * 40


def commit(number: int) -> str:
    return f"{number:040x}"


def write_snapshot(hub: Path, repository: str, revision: str) -> None:
    """Write a snapshot as huggingface_hub does."""
    cache = hub / f"models--{repository.replace('/', '--')}"
    blob, snapshot = cache / "blobs" / revision, cache / "snapshots" / revision
    blob.parent.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(bytes(1000))
    (snapshot / "model.safetensors").symlink_to(blob)


def fetch(hub: Path, repository: str, revision: str, *needed: str) -> None:
    """Do what the process does, with the revision as the drafter's digest."""
    remove_unneeded(hub, repository, revision, needed)
    record_fetch(hub, repository, revision)
    if not (hub / f"models--{repository.replace('/', '--')}" / "snapshots" / revision).exists():
        write_snapshot(hub, repository, revision)
    record_fetch(hub, repository, revision, revision)


def list_snapshots(hub: Path) -> set[str]:
    return {path.name for path in hub.glob("models--*/snapshots/*")}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A cache with the target and a drafter that vLLM has fetched."""
    write_snapshot(tmp_path, "acme/target", VLLM_COMMIT)
    write_snapshot(tmp_path, "acme/drafter", commit(0))
    return tmp_path


def test_the_cache_has_what_is_needed_after_many_rollouts(hub: Path) -> None:
    own = commit(0)
    for number in range(1, 20):
        candidate = commit(number)
        fetch(hub, ("acme/drafter", "acme/other")[number % 2], candidate, own)
        assert list_snapshots(hub) == {VLLM_COMMIT, commit(0), own, candidate}
        own = candidate if number % 3 == 0 else own
    assert len(list(hub.glob("models--*/blobs/*"))) == len(list_snapshots(hub)), "the blobs are removed too"
    assert {name.rpartition("@")[2] for name in json.loads((hub / RECORD).read_text())} == list_snapshots(hub) - {
        VLLM_COMMIT,
        commit(0),
    }


def test_what_vllm_has_fetched_is_never_removed(hub: Path) -> None:
    fetch(hub, "acme/drafter", commit(0))  # a return to the drafter of the arguments
    fetch(hub, "acme/drafter", "main")  # a name says nothing about the folder
    fetch(hub, "acme/copy", VLLM_COMMIT)  # a copy of a repository has the same commits
    fetch(hub, "acme/drafter", commit(1))
    assert {VLLM_COMMIT, commit(0), commit(1)} <= list_snapshots(hub)
    assert (hub / "models--acme--target/snapshots" / VLLM_COMMIT).exists()


def test_a_fetch_that_was_ended_is_removed(hub: Path) -> None:
    record_fetch(hub, "acme/drafter", commit(1))
    write_snapshot(hub, "acme/drafter", commit(1))
    fetch(hub, "acme/drafter", commit(2), commit(0))
    assert list_snapshots(hub) == {VLLM_COMMIT, commit(0), commit(2)}


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_record_that_cannot_be_read_fails_no_fetch(hub: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (hub / RECORD).write_text(content)
    fetch(hub, "acme/drafter", commit(1))
    assert list_snapshots(hub) == {VLLM_COMMIT, commit(0), commit(1)}
    assert "drafters cannot be removed" in caplog.text
