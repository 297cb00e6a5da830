"""Read checkpoints from folders and from a Hub: an HTTP server with valid, invalid and failed responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aerie.checkpoints import (
    HubClient,
    HubError,
    HubRejectionError,
    RepositoryInfo,
    read_checkpoint_directory,
    read_repository,
)
from aerie.engine.models.checkpoint import CheckpointError


def write_shards(small_models: Any, folder: Path, count: int) -> Path:
    """Write a folder with `count` weight files and their index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    index = {}
    for number in range(count):
        file = f"model-{number}.safetensors"
        (folder / file).write_bytes(small_models.build_file({f"t{number}": ("BF16", (4, 4))}))
        index[f"t{number}"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_folder_gives_config_headers_and_d2t(small_models: Any, tmp_path: Path) -> None:
    written = small_models.drafter(metadata={"format": "pt"})
    read = read_checkpoint_directory(small_models.write(tmp_path / "drafter", written), "a name")
    assert read.name == "a name"
    assert read.config == written.config
    assert read.metadata == {"format": "pt"}
    assert read.d2t_offsets == small_models.offsets
    assert {name: info.shape for name, info in (read.tensors or {}).items()} == {n: t.shape for n, t in written.tensors.items()}
    assert read.weight_bytes == written.weight_bytes


def test_folder_with_an_index_reads_only_the_indexed_files(small_models: Any, tmp_path: Path) -> None:
    folder = write_shards(small_models, tmp_path / "m", 3)
    (folder / "consolidated.safetensors").write_bytes(b"not looked at")
    assert sorted(read_checkpoint_directory(folder).tensors or ()) == ["t0", "t1", "t2"]


def test_folder_of_pickles_has_a_config_and_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    read = read_checkpoint_directory(tmp_path)
    assert read.config == {"a": 1}
    assert read.tensors is None
    assert read.weight_bytes is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json cannot be read (No such file or directory): give a folder with config.json"),
        ({"config.json": b"{}"}, "has no weights: it needs *.safetensors beside config.json"),
        ({"config.json": b"<html>", "a.safetensors": b""}, "config.json is not JSON"),
        ({"config.json": b"{}", "a.safetensors": b"\x10\0\0\0\0\0\0\0{}"}, "a.safetensors declares a header of 16 bytes"),
        (
            {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'},
            "b.safetensors cannot be read",
        ),
    ],
)
def test_folder_that_is_no_checkpoint_is_rejected(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint_directory(tmp_path)
    assert message in str(caught.value)


Read = Callable[..., Any]


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def read(hub: Any, pauses: list[float]) -> Read:
    def read(**options: Any) -> Any:
        with HubClient(hub.address, **{"sleep": pauses.append, **options}) as client:
            return client.read_checkpoint("me/model")

    return read


def test_hub_gives_the_same_as_the_folder_at_one_commit(small_models: Any, hub: Any, read: Read) -> None:
    folder = small_models.write(hub.folder, small_models.drafter())
    checkpoint, expected = read(), read_checkpoint_directory(folder)
    assert checkpoint.name == f"me/model@{hub.commit}"
    assert checkpoint.config == expected.config
    assert checkpoint.d2t_offsets == expected.d2t_offsets
    assert {name: (t.dtype, t.shape, t.begin, t.end) for name, t in checkpoint.tensors.items()} == {
        name: (t.dtype, t.shape, t.begin, t.end) for name, t in (expected.tensors or {}).items()
    }
    assert all(hub.commit in path for path, _ in hub.requests[1:])


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (None, ""),
        ([], ""),
        ({}, ""),
        ({"license": "mit", "license_name": "x"}, "mit"),
        ({"license": "other", "license_name": "nvidia-open-model-license"}, "nvidia-open-model-license"),
        ({"license": "other"}, "other"),
        ({"license": ["mit", "apache-2.0"]}, ""),
    ],
)
def test_repository_info_has_the_licence_of_the_card(hub: Any, card: object, licence: str) -> None:
    hub.folder.mkdir()
    hub.card = card
    with HubClient(hub.address) as client:
        assert client.read_repository_info("me/model") == RepositoryInfo(hub.commit, licence)


def test_hub_reads_no_weights(small_models: Any, hub: Any, read: Read) -> None:
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text("{}")
    (hub.folder / "model.safetensors").write_bytes(small_models.build_file({"big": ("BF16", (4096, 1024))}))
    assert read().weight_bytes == 2 * 4096 * 1024
    assert hub.sent_bytes < 70_000


def test_hub_fetches_the_rest_of_a_long_header(small_models: Any, hub: Any, read: Read) -> None:
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text("{}")
    (hub.folder / "model.safetensors").write_bytes(small_models.build_file({f"t{n:06}": ("U8", (1,)) for n in range(2000)}))
    assert len(read().tensors) == 2000
    first, second = (requested_range for _, requested_range in hub.requests if requested_range)
    assert first == "bytes=0-65535"
    assert second is not None
    assert second.startswith("bytes=65536-")


def test_hub_reads_shards_by_their_index(small_models: Any, hub: Any, read: Read) -> None:
    write_shards(small_models, hub.folder, 40)
    assert len(read().tensors) == 40


def test_hub_that_ignores_ranges_is_read(small_models: Any, hub: Any, read: Read) -> None:
    hub.supports_ranges = False
    small_models.write(hub.folder, small_models.drafter())
    assert read().d2t_offsets == small_models.offsets


def test_hub_that_ignores_ranges_is_read_up_to_a_limit(small_models: Any, hub: Any, read: Read) -> None:
    hub.supports_ranges = False
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text("{}")
    (hub.folder / "model.safetensors").write_bytes(small_models.build_file({"big": ("U8", (3_000_000,)), "d2t": ("I64", (2,))}))
    with pytest.raises(
        CheckpointError, match="more than 1000000 bytes were received before all headers were in: the server may ignore"
    ):
        read(max_bytes=1_000_000)


def test_pickles_on_the_hub_have_no_tensors(hub: Any, read: Read) -> None:
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text("{}")
    (hub.folder / "pytorch_model.bin").write_bytes(b"x")
    assert read().tensors is None


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "it does not exist, or it is private: check the name, or set HF_TOKEN"),
        (403, "the token may not read it: accept the model's terms"),
        (404, "it does not exist at this revision: check repository and revision"),
        (418, "is HF_ENDPOINT a Hugging Face Hub"),
    ],
)
def test_rejections_of_the_hub_are_not_repeated(hub: Any, read: Read, pauses: list[float], status: int, message: str) -> None:
    hub.failures = [(status, {})]
    with pytest.raises(CheckpointError) as caught:
        read()
    assert f"answered HTTP {status}: {message}" in str(caught.value)
    assert pauses == []


def test_busy_hub_is_requested_after_its_retry_after(small_models: Any, hub: Any, read: Read, pauses: list[float]) -> None:
    small_models.write(hub.folder, small_models.drafter())
    hub.failures = [(429, {"Retry-After": "7"}), (503, {}), (429, {"Retry-After": "9999"})]
    assert read().d2t_offsets == small_models.offsets
    assert pauses == [7.0, 2.0, 30.0]


def test_busy_hub_fails_after_five_requests(hub: Any, read: Read, pauses: list[float]) -> None:
    hub.failures = [(429, {})] * 5
    with pytest.raises(
        CheckpointError, match=r"failed 5 times, the last time with: HTTP 429: try again later, set HF_ENDPOINT to a mirror"
    ):
        read()
    assert pauses == [1.0, 2.0, 4.0, 8.0]


def test_truncated_responses_are_requested_again(small_models: Any, hub: Any, read: Read, pauses: list[float]) -> None:
    small_models.write(hub.folder, small_models.drafter())
    hub.truncated_responses = 2
    assert read().d2t_offsets == small_models.offsets
    assert pauses == [1.0, 2.0]


@pytest.mark.parametrize("endpoint", ["hub.example", "http://hub:port", "ftp://hub.example"])
def test_endpoint_that_is_no_address_fails_without_a_pause(pauses: list[float], endpoint: str) -> None:
    with (
        HubClient(endpoint, sleep=pauses.append) as client,
        pytest.raises(CheckpointError, match="set HF_ENDPOINT to the address of a Hub"),
    ):
        client.read_checkpoint("me/model")
    assert pauses == []


def test_response_that_is_no_listing_is_rejected(hub: Any, read: Read) -> None:
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text("{}")
    hub.failures = [(200, {})]
    with pytest.raises(CheckpointError, match="is not JSON"):
        read()


def test_token_is_read_from_the_environment_or_a_file(small_models: Any, hub: Any, tmp_path: Path) -> None:
    small_models.write(hub.folder, small_models.drafter())
    hub.token = "s3cret"
    (tmp_path / "token").write_text("s3cret\n")
    base = {"HF_ENDPOINT": hub.address}
    for environment in ({"HF_TOKEN": "s3cret"}, {"HF_TOKEN_PATH": str(tmp_path / "token")}, {"HF_HOME": str(tmp_path)}):
        with HubClient.from_environment(base | environment) as client:
            assert client.read_checkpoint("me/model").d2t_offsets == small_models.offsets
    with (
        HubClient.from_environment(base | {"HF_HOME": str(tmp_path / "none")}) as client,
        pytest.raises(CheckpointError, match="HTTP 401") as caught,
    ):
        client.read_checkpoint("me/model")
    assert "s3cret" not in str(caught.value)


def test_token_is_not_sent_to_the_redirected_host(small_models: Any, hub: Any, read: Read) -> None:
    small_models.write(hub.folder, small_models.drafter())
    hub.token, hub.redirects_weights = "s3cret", True
    assert read(token="s3cret").d2t_offsets == small_models.offsets
    assert {host for host, _ in hub.authorized} == {"127.0.0.1", "localhost"}
    assert all(has_token == (host == "127.0.0.1") for host, has_token in hub.authorized)


def test_a_missing_shard_ends_the_read_before_the_others(small_models: Any, hub: Any, read: Read, pauses: list[float]) -> None:
    write_shards(small_models, hub.folder, 300)
    (hub.folder / "model-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="HTTP 404: it does not exist at this revision"):
        read()
    assert len(hub.requests) < 300
    assert pauses == []


# -- Rejections, servers that are no Hub, and slow responses -----------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_rejection_has_its_own_error(hub: Any, read: Read, status: int) -> None:
    hub.failures = [(status, {})]
    with pytest.raises(HubRejectionError):
        read()


@pytest.mark.parametrize("response_count", [0, 1, 2], ids=["the list", "the config", "a header"])
def test_an_html_response_is_not_an_error_of_the_files(small_models: Any, hub: Any, read: Read, response_count: int) -> None:
    small_models.write(hub.folder, small_models.drafter())
    hub.html_after = response_count
    with pytest.raises(HubError, match="is HF_ENDPOINT a Hugging Face Hub") as caught:
        read()
    assert not isinstance(caught.value, HubRejectionError)


def test_a_listing_that_is_no_json_is_not_an_error_of_the_files(hub: Any, read: Read) -> None:
    hub.failures = [(200, {})]
    with pytest.raises(HubError, match="is HF_ENDPOINT a Hugging Face Hub"):
        read()


def test_a_config_that_is_no_json_is_an_error_of_the_files(small_models: Any, hub: Any, read: Read) -> None:
    small_models.write(hub.folder, small_models.drafter())
    (hub.folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        read()
    assert not isinstance(caught.value, HubError)


def test_a_slow_response_fails_at_the_deadline(small_models: Any, hub: Any, read: Read) -> None:
    small_models.write(hub.folder, small_models.drafter())
    ticks = iter(range(0, 10_000, 20))
    with pytest.raises(HubError, match="was not read within 30 s: try again later"):
        read(clock=lambda: float(next(ticks)), deadline_seconds=30.0)


def test_a_proxy_that_is_no_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "proxy:port:3128")
    with pytest.raises(HubError, match="HTTPS_PROXY"):
        HubClient("https://hub.example")


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unreadable_certificates_are_rejected(tmp_path: Path, name: str, content: str | None) -> None:
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(HubError, match=f"{name} is {file}, which has no readable certificates"):
        HubClient.from_environment({name: str(file)})


# -- The Hub's cache ---------------------------------------------------------------------------------------------------------

COMMIT = "c0ffee" * 6 + "abcd"


def write_cache(small_models: Any, home: Path, tmp_path: Path) -> Path:
    """Write me/model to the Hub's cache in the layout of huggingface_hub, and return its snapshot."""
    repository = home / "hub" / "models--me--model"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(small_models.write(tmp_path / "written", small_models.drafter()).iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("revision", [COMMIT, "main", None])
@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"])
def test_offline_a_repository_is_read_from_the_cache(
    small_models: Any, tmp_path: Path, revision: str | None, variable: str
) -> None:
    home = tmp_path / "huggingface"
    write_cache(small_models, home, tmp_path)
    folder = {"HF_HOME": home, "XDG_CACHE_HOME": tmp_path}.get(variable, home / "hub")
    checkpoint = read_repository(
        "me/model", revision, {"HF_HUB_OFFLINE": "1", variable: str(folder), "HF_ENDPOINT": "nonsense://"}
    )
    assert checkpoint.name == f"me/model@{COMMIT}"
    assert checkpoint.d2t_offsets == small_models.offsets


@pytest.mark.parametrize("missing", ["everything", "config.json", "model.safetensors"])
def test_a_file_missing_in_the_cache_has_a_fix(small_models: Any, tmp_path: Path, missing: str) -> None:
    if missing != "everything":
        snapshot = write_cache(small_models, tmp_path / "hf", tmp_path)
        (snapshot / missing).unlink()
        if missing != "config.json":  # huggingface_hub leaves the link of a blob that was deleted
            (snapshot / missing).symlink_to("../../blobs/gone")
    with pytest.raises(HubRejectionError, match="download me/model at c0ffee"):
        read_repository("me/model", COMMIT, {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")})


def test_a_damaged_file_in_the_cache_is_an_error_of_the_files(small_models: Any, tmp_path: Path) -> None:
    (write_cache(small_models, tmp_path / "hf", tmp_path) / "config.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        read_repository("me/model", COMMIT, {"HF_HUB_OFFLINE": "yes", "HF_HOME": str(tmp_path / "hf")})
    assert not isinstance(caught.value, HubError)
