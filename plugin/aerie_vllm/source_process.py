"""The process that gets a drafter's files into a folder of the pod and hashes them (`python -m aerie_vllm.source_process`).

A process and not a thread of the API server: a kill ends a download or a read that hangs, and requests share neither the
interpreter nor the priority with it. It reads {"folder": ...} or {"repository": ..., "revision": ...} from its input, with the
digests that are `needed` (fetched.py), and writes
{"folder", "files", "commit"} or {"reason", "message"} to its output.

Guarantees: the folder is below a root (`settings.resolve_folder`), and all of its drafter files are hashed. A drafter of the Hub
goes into the Hub's cache of the pod, by the pod's variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE): only config.json,
safetensors files and their index, one after the other in small parts, so that memory is bounded. What does not fit onto the disk
or into the cache's limit is not begun, and a part of both stays free. From a cache of this pod's alone, drafters that are no
longer needed are removed first (fetched.py). The process ends when no byte has been fetched or hashed for `STALL_SECONDS`. Not
guaranteed: a limit of a fetch that progresses slowly.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aerie_vllm.checkpoint import CONFIG, SUFFIX, CheckpointError, list_files, open_checkpoint
from aerie_vllm.fetched import record_fetch, remove_unneeded
from aerie_vllm.rejection import RejectionError
from aerie_vllm.settings import Settings
from aerie_vllm.worker_protocol import build_problem, compute_digest

STALL_SECONDS = 900.0
RESERVE = 0.05
"""Share of the disk, and of a limit of the cache, that a fetch leaves free: the kubelet evicts pods before a disk is full."""
_STALL_CHECK_SECONDS = 5.0
_NEEDED_PATTERNS = [CONFIG, f"*{SUFFIX}", f"*{SUFFIX}.index.json"]
_HUB_VARIABLES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_XET": "1",  # its buffers take gigabytes; a plain download takes megabytes
    "HF_HUB_ENABLE_HF_TRANSFER": "0",  # so do those of this one, which releases before 1.0 know
}


def main() -> None:
    """Answer one request."""
    os.nice(19)
    os.environ.update(_HUB_VARIABLES)
    with contextlib.redirect_stdout(sys.stderr):
        answer = answer_request(json.load(sys.stdin))
    json.dump(answer, sys.stdout)


def answer_request(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a source."""
    try:
        return read_files(source)
    except CheckpointError as error:
        return {**build_problem(error.reason, str(error))}
    except RejectionError as error:
        return {**error.problem}
    except OSError as error:
        return {**build_problem("Unreadable", f"the drafter's files cannot be read ({error}): check the disk.")}


def read_files(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the folder and SHA-256 of a source's files. Raises CheckpointError, RejectionError and OSError."""
    settings = Settings.from_environment(os.environ)
    assert settings is not None, "the endpoint is on"
    folder, repository, revision = source.get("folder", ""), source.get("repository", ""), source.get("revision", "")
    cache, commit, chunks, is_own, needed = None, None, 0, False, source.get("needed")
    if repository:
        cache = find_cache(repository)
        settings.resolve_folder(str(cache), ())  # rather than after the download

    def count_chunk() -> bool:
        nonlocal chunks
        chunks += 1
        return False

    def measure() -> tuple[int, int]:
        return 0 if cache is None else measure_bytes(cache), chunks

    threading.Thread(target=end_stalled, args=(measure, _exit_stalled), daemon=True).start()
    if cache is not None:
        if is_own := needed is not None and settings.own_cache is not None and cache.is_relative_to(settings.own_cache):
            remove_unneeded(cache.parent, repository, revision, needed)
            record_fetch(cache.parent, repository, revision)
        folder = fetch(repository, revision, cache, settings)
        commit = os.path.basename(folder)
    resolved = settings.resolve_folder(folder, ())
    settings.resolve_folder(resolved, list_files(Path(resolved)))
    with open_checkpoint(Path(resolved)) as checkpoint:
        files = checkpoint.hash_files(count_chunk)
    if cache is not None and is_own:
        record_fetch(cache.parent, repository, revision, compute_digest(files))
    return {"folder": resolved, "files": files, "commit": commit}


def end_stalled(
    measure: Callable[[], object],
    end: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
    read_clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call `end` when `measure` has returned the same value for `STALL_SECONDS`."""
    progress, changed_at = measure(), read_clock()
    while read_clock() - changed_at < STALL_SECONDS:
        sleep(_STALL_CHECK_SECONDS)
        if (current := measure()) != progress:
            progress, changed_at = current, read_clock()
    end()


def _exit_stalled() -> None:
    message = f"no byte was fetched or read for {STALL_SECONDS:.0f} s: check the disk, the network and the Hub, then try again."
    sys.__stdout__.write(json.dumps({"reason": "Stalled", "message": message}))  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
    os._exit(1)


# --------------------------------------------------------------------------------------------------------------- the Hub
def find_cache(repository: str) -> Path:
    """Return the folder of a repository in the Hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def fetch(repository: str, revision: str, cache: Path, settings: Settings) -> str:
    """Return the folder of a revision in the Hub's cache, after fetching what is not there. Raises CheckpointError."""
    from huggingface_hub import snapshot_download

    def download(patterns: list[str]) -> str:
        return str(
            snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns="*/*", max_workers=1)
        )

    try:
        download([CONFIG])  # a small file tells whether the files may be read; the sizes are public even where they may not
        check_space(repository, revision, cache, settings)
        return download(_NEEDED_PATTERNS)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(*describe_hub_error(error, f"{repository} at revision {revision}", cache)) from error


def check_space(repository: str, revision: str, cache: Path, settings: Settings) -> None:
    """Raise CheckpointError if the disk, or the limit of the pod's own cache, has no space for the files that are missing."""
    from huggingface_hub import HfApi

    try:
        information = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception:  # noqa: BLE001 - the download meets it again, and needs no Hub where all files are in the cache
        return
    sizes = {file.rfilename: file.size or 0 for file in information.siblings or ()}
    names = [name for name in sizes if "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in _NEEDED_PATTERNS)]
    snapshot = cache / "snapshots" / str(information.sha)
    missing = sum(sizes[name] for name in names if not (snapshot / name).exists())
    disk = next(path for path in (cache, *cache.parents) if path.exists())
    usage = shutil.disk_usage(disk)
    free = usage.free - int(RESERVE * usage.total)
    if settings.own_cache is not None and settings.own_cache_bytes is not None:
        free = min(free, int((1 - RESERVE) * settings.own_cache_bytes) - measure_volume(settings.own_cache))
    if missing > max(free, 0):
        message = (
            f"{repository} needs {missing} more bytes in {cache}, and {max(free, 0)} are left beside a reserve of "
            f"{RESERVE:.0%}: give the Hub's cache more space."
        )
        raise CheckpointError("DiskFull", message)


def describe_hub_error(error: Exception, subject: str, cache: Path) -> tuple[str, str]:
    """Return the reason and message of what huggingface_hub has raised, whose classes lose and gain parents between releases."""
    from huggingface_hub import constants, errors

    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, errors.GatedRepoError):
        reason, fix = "HubAccessDenied", "accept the model's terms with the account of HF_TOKEN, or set HF_TOKEN to another token"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason, fix = "HubRepositoryMissing", "correct the name, or set HF_TOKEN to a token that may read it if it is private"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason, fix = "HubRevisionMissing", "correct the revision: the repository's page on the Hub lists its commits"
    elif number in (errno.ENOSPC, errno.EDQUOT):
        reason, fix = "DiskFull", f"give the Hub's cache ({cache}) more space"
    elif number in (errno.EROFS, errno.EACCES, errno.EPERM):
        reason, fix = "CacheNotWritable", f"mount the Hub's cache ({cache}) so that the engine's user may write to it"
    elif isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        reason, fix = "HubOffline", "remove HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or fetch it into the cache beforehand"
    else:
        reason, fix = "HubFailed", "check HF_ENDPOINT, HF_TOKEN, the proxy and the network policies, then try again"
    text = re.sub(r"\?\S*", "?...", " ".join(str(error).split()))[:300]  # queries of addresses have signatures
    return reason, f"{subject} was not fetched from {constants.ENDPOINT} ({type(error).__name__}: {text}): {fix}."


def measure_volume(folder: Path) -> int:
    """Return the bytes that a volume's files take on the disk, as the kubelet counts them."""
    paths = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_blocks * 512 for path in paths if os.path.lexists(path))


def measure_bytes(cache: Path) -> int:
    """Return the bytes of a repository's files in the cache."""
    try:
        with os.scandir(cache / "blobs") as entries:
            return sum(entry.stat().st_size for entry in entries)
    except OSError:  # not there yet, or a file was renamed meanwhile
        return -1


if __name__ == "__main__":
    main()
