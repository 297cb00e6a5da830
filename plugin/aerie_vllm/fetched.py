"""Drafters of the Hub that the plugin has fetched into a cache of this pod's alone, and their removal.

Each rollout in place fetches a drafter. Without a removal the cache grows until the kubelet evicts the pods, all at about the
same time, because all have fetched the same drafters.

Guarantees: only what is in the record (`aerie-fetched.json` beside the repositories) is removed, and so nothing that vLLM has
fetched. The record is replaced atomically. Errors are logged and never raised: a fetch is more important. Not guaranteed: that a
drafter which is removed while something reads it can still be read.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

RECORD = "aerie-fetched.json"
_log = logging.getLogger(f"vllm.{__name__}")
_COMMIT = re.compile("[0-9a-f]{40}")


def record_fetch(hub: Path, repository: str, revision: str, digest: str = "") -> None:
    """Record a fetch before it begins, unless the files are there without a record, and its digest when that is known.

    Args:
        hub: folder of the Hub's cache.
        repository: owner/name.
        revision: recorded if it is a commit, which alone names the folder of the files.
        digest: of the drafter.
    """
    try:
        record, name = _read_record(hub), f"{repository}@{revision}"
        if _COMMIT.fullmatch(revision) and (name in record or not _find_snapshot(hub, name).exists()):
            _write_record(hub, {**record, name: digest or record.get(name, "")})
    except Exception:  # noqa: BLE001 - the drafter stays in the cache
        _log.exception("%s cannot be written", hub / RECORD)


def remove_unneeded(hub: Path, repository: str, revision: str, needed: Collection[str]) -> None:
    """Remove the recorded drafters, except the one of these arguments and those with a digest in `needed`."""
    from huggingface_hub import scan_cache_dir

    try:
        record = _read_record(hub)
        unneeded = {name for name, digest in record.items() if digest not in needed} - {f"{repository}@{revision}"}
        if not unneeded:
            return
        cache = scan_cache_dir(hub)
        names = [f"{folder.repo_id}@{snapshot.commit_hash}" for folder in cache.repos for snapshot in folder.revisions]
        commits = [name.rpartition("@")[2] for name in names]
        # A copy of a repository has the same commits, and `delete_revisions` knows no repository.
        removed = [name.rpartition("@")[2] for name in names if name in unneeded]
        cache.delete_revisions(*(commit for commit in removed if commits.count(commit) == 1)).execute()
        _log.warning("removed from %s: %s", hub, sorted(unneeded))
        _write_record(hub, {name: digest for name, digest in record.items() if _find_snapshot(hub, name).exists()})
    except Exception:  # noqa: BLE001 - the next fetch tries it again
        _log.exception("drafters cannot be removed from %s", hub)


def _find_snapshot(hub: Path, name: str) -> Path:
    repository, _, commit = name.rpartition("@")
    return hub / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def _read_record(hub: Path) -> dict[str, str]:
    """Return digests (empty if the fetch has not ended) by `owner/name@commit`."""
    try:
        record = json.loads((hub / RECORD).read_bytes())
    except FileNotFoundError:
        return {}
    return {str(name): str(digest) for name, digest in record.items()}


def _write_record(hub: Path, record: dict[str, str]) -> None:
    hub.mkdir(parents=True, exist_ok=True)
    path = hub / f".{RECORD}.{os.getpid()}"
    path.write_text(json.dumps(record, sort_keys=True))
    path.replace(hub / RECORD)
