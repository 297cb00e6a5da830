"""The process that reads a drafter's files: from folders, and from a Hub on the loopback interface."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from aerie_lab.hub.checkpoints import load_repositories
from aerie_lab.hub.server import create_hub_server
from aerie_vllm import source_process, source_reader
from aerie_vllm.checkpoint import CheckpointError
from aerie_vllm.rejection import RejectionError
from aerie_vllm.requests import DrafterSource
from aerie_vllm.settings import Settings
from aerie_vllm.source_reader import SourceFiles, read_source
from tests.unit.plugin.test_checkpoint import write_drafter

pytestmark = pytest.mark.slow

COMMIT = "0123456789" * 4
HUB_DRAFTER = DrafterSource(repository="acme/drafter", revision=COMMIT)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of drafters, as the environment names it; the Hub's cache is below it."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setenv("AERIE_DRAFTER_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AERIE_DRAFTER_ROOTS", str(root))
    monkeypatch.setenv("HF_HOME", str(root / "hub"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return root


@dataclass
class Hub:
    """A running Hub with one drafter."""

    files: dict[str, str]
    """SHA-256 of the drafter's files by name."""
    address: str


@pytest.fixture
def hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, and the variable with its address."""
    assert root.is_dir()
    files = write_drafter(tmp_path / "drafter")
    (tmp_path / "drafter" / "below").mkdir()
    shutil.copy(tmp_path / "drafter" / "model-1.safetensors", tmp_path / "drafter" / "below")
    (tmp_path / "drafter" / "model.safetensors.index.json").write_text("{}")
    table = tmp_path / "images.toml"
    table.write_text(f'[[checkpoint]]\nrepository = "acme/drafter"\ncommit = "{COMMIT}"\nfolder = "drafter"\n')
    with create_hub_server(load_repositories([table]), "127.0.0.1", 0) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        try:
            yield Hub(files, address)
        finally:
            server.shutdown()
            serving.join()


def read(source: DrafterSource) -> SourceFiles:
    return asyncio.run(read_source(source))


def test_a_folder_is_hashed(root: Path) -> None:
    files = write_drafter(root / "drafter")
    (root / "link").symlink_to(root / "drafter")
    answer = read(DrafterSource(folder=str(root / "link")))
    assert (answer.drafter.folder, answer.drafter.files, answer.commit) == (str(root / "drafter"), files, None)


def test_a_folder_that_is_not_read(root: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "outside")
    write_drafter(root / "linked")
    (root / "linked" / "model-1.safetensors").unlink()
    (root / "linked" / "model-1.safetensors").symlink_to(tmp_path / "outside" / "model-1.safetensors")
    write_drafter(root / "name")
    (root / "name" / "model-1.safetensors").rename(root / "name" / "model 1.safetensors")
    write_drafter(root / "truncated")
    (root / "truncated" / "model-1.safetensors").write_bytes(b"")
    for folder, reason in (
        (tmp_path / "outside", "FolderOutsideRoots"),
        (root / "linked", "LinkOutsideRoots"),
        (root / "name", "InvalidField"),
        (root / "truncated", "Truncated"),
        (root / "missing", "FolderMissing"),
    ):
        with pytest.raises(RejectionError) as rejection:
            read(DrafterSource(folder=str(folder)))
        assert rejection.value.reason == reason


def test_the_own_drafter_is_found_where_vllm_has_fetched_some_files(hub: Hub, tmp_path: Path) -> None:
    """A process of its own, because huggingface_hub reads the variables at its import."""
    (tmp_path / "drafter" / "README.md").write_text("A file that vLLM does not fetch.")
    program = f"""
from types import SimpleNamespace
from huggingface_hub import hf_hub_download, snapshot_download
from aerie_vllm.reader import find_folder

source = {{"repo_id": "acme/drafter", "revision": "{COMMIT}"}}
hf_hub_download(**source, filename="config.json")
snapshot_download(**source, allow_patterns=["*.safetensors"])
print(find_folder(SimpleNamespace(model="acme/drafter", revision="{COMMIT}")))
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert {path.name for path in Path(printed.strip()).iterdir()} >= {*hub.files}


def test_a_drafter_of_the_hub_is_fetched_once(root: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = read(HUB_DRAFTER)
    assert (answer.drafter.files, answer.commit) == (hub.files, COMMIT)
    folder = Path(str(answer.drafter.folder))
    assert folder.is_relative_to(root / "hub")
    assert sorted(path.name for path in folder.iterdir()) == sorted([*hub.files, "model.safetensors.index.json"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read(HUB_DRAFTER) == answer
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert read(HUB_DRAFTER) == answer


def test_a_fetch_into_the_pods_own_cache_is_recorded(hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = root / "hub" / "hub" / "aerie-fetched.json"
    asyncio.run(read_source(HUB_DRAFTER, ()))
    assert not record.exists(), "pods share the cache"
    shutil.rmtree(root / "hub")
    monkeypatch.setenv("AERIE_DRAFTER_OWN_CACHE", str(root))
    answer = asyncio.run(read_source(HUB_DRAFTER, ()))
    assert answer.drafter.files == hub.files
    assert json.loads(record.read_text()) == {f"acme/drafter@{COMMIT}": answer.drafter.digest}


def test_a_cache_outside_the_roots_gets_no_files(hub: Hub, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(RejectionError, match=f"is not below a root of drafters .*{root}") as rejection:
        read(HUB_DRAFTER)
    assert rejection.value.reason == "FolderOutsideRoots"
    assert not (tmp_path / "elsewhere").exists(), hub.address


@pytest.mark.parametrize(
    ("source", "variables", "reason", "fix"),
    [
        (DrafterSource(repository="acme/other", revision=COMMIT), {}, "HubRepositoryMissing", "set HF_TOKEN"),
        (DrafterSource(repository="acme/drafter", revision="f" * 40), {}, "HubRevisionMissing", "correct the revision"),
        (
            DrafterSource(repository="meta-llama/Llama-3.1-8B-Instruct", revision="main"),
            {"AERIE_DRAFTER_OWN_CACHE": "ROOT", "AERIE_DRAFTER_OWN_CACHE_BYTES": "1000000"},  # a rejection needs no space
            "HubAccessDenied",
            "accept the model's terms",
        ),
        (HUB_DRAFTER, {"HF_HUB_OFFLINE": "1"}, "HubOffline", "remove HF_HUB_OFFLINE"),
        (
            HUB_DRAFTER,
            {"AERIE_DRAFTER_OWN_CACHE": "ROOT", "AERIE_DRAFTER_OWN_CACHE_BYTES": "1000"},
            "DiskFull",
            "give the Hub's cache more space",
        ),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_fetch_that_fails_says_why(
    root: Path, monkeypatch: pytest.MonkeyPatch, source: DrafterSource, variables: dict[str, str], reason: str, fix: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(root) if value == "ROOT" else value)
    with pytest.raises(RejectionError) as rejection:
        read(source)
    assert (rejection.value.status, rejection.value.reason) == (422, reason)
    assert fix in rejection.value.message
    assert str(source.repository) in rejection.value.message


def list_children() -> set[str]:
    """Return the process ids of this process's children."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.mark.usefixtures("root")
def test_a_call_that_is_cancelled_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_children()
    with socket.create_server(("127.0.0.1", 0)) as silent_hub:  # it accepts connections and answers nothing
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_hub.getsockname()[1]}")

        async def work() -> None:
            reading = asyncio.ensure_future(read_source(HUB_DRAFTER))
            connection, _ = await asyncio.to_thread(silent_hub.accept)
            assert len(list_children() - before) == 1
            reading.cancel()
            await asyncio.wait((reading,))
            assert list_children() == before
            connection.close()

        asyncio.run(work())


@pytest.mark.usefixtures("root")
def test_a_process_that_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_reader, "_COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(RejectionError, match="ended with status -9 and no answer: check the log and the memory"):
        read(HUB_DRAFTER)


# ------------------------------------------------------------------------------------------------------------ in-process parts
def test_what_does_not_fit_on_the_disk_is_not_begun(hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    usage = SimpleNamespace(total=1000, free=150)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    settings = Settings(Path("token"), (root,), None, root)
    cache = root / "hub" / "hub" / "models--acme--drafter"
    with pytest.raises(CheckpointError, match=r"acme/drafter needs \d+ more bytes in .*, and 100 are left .* 5%: give the Hub's"):
        source_process.check_space("acme/drafter", COMMIT, cache, settings)
    usage.total = usage.free = 1 << 40
    source_process.check_space("acme/drafter", COMMIT, cache, settings)
    (root / "other").write_bytes(bytes(1 << 16))
    limited = replace(settings, own_cache_bytes=1 << 16)
    with pytest.raises(CheckpointError, match="and 0 are left") as failure:
        source_process.check_space("acme/drafter", COMMIT, cache, limited)
    assert failure.value.reason == "DiskFull"
    read(HUB_DRAFTER)
    source_process.check_space("acme/drafter", COMMIT, cache, limited)  # all is there


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "no space"), "DiskFull"),
        (OSError(errno.EDQUOT, "no space"), "DiskFull"),
        (OSError(errno.EROFS, "read-only"), "CacheNotWritable"),
        (OSError(errno.EACCES, "permission"), "CacheNotWritable"),
        (OSError(errno.EIO, "input or output"), "HubFailed"),
        (LocalEntryNotFoundError("the Hub does not answer"), "HubFailed"),
        (HFValidationError("a name"), "HubFailed"),
        (RuntimeError("a defect"), "HubFailed"),
    ],
)
def test_faults_of_a_fetch_are_named(error: Exception, reason: str) -> None:
    assert source_process.describe_hub_error(error, "acme/drafter at revision main", Path("/cache"))[0] == reason


def test_messages_have_no_signed_addresses() -> None:
    error = RuntimeError(
        "403 Forbidden for url 'https://cdn.example/blob?X-Amz-Signature=secret&Expires=1'\nfor more information"
    )
    message = source_process.describe_hub_error(error, "acme/drafter at revision main", Path("/cache"))[1]
    assert "https://cdn.example/blob?... for more information" in message
    assert "secret" not in message


def test_the_process_ends_when_nothing_progresses() -> None:
    clock, ends = [0.0], list[float]()
    sizes = {0.0: -1, 400.0: 5, 1200.0: 7}  # the size from a time on

    def measure() -> int:
        return sizes[max(time for time in sizes if time <= clock[0])]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    source_process.end_stalled(measure, lambda: ends.append(clock[0]), sleep, lambda: clock[0])
    assert ends == [1200.0 + source_process.STALL_SECONDS]


def test_bytes_of_a_fetch_are_measured(tmp_path: Path) -> None:
    assert source_process.measure_bytes(tmp_path) == -1
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a.incomplete").write_bytes(bytes(7))
    (tmp_path / "blobs" / "b").write_bytes(bytes(3))
    assert source_process.measure_bytes(tmp_path) == 10
