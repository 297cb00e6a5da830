"""Read a checkpoint from the Hugging Face Hub by range requests: config.json, the index, headers and d2t, never the weights.

    HubClient.read_repository_info(repository, revision)   the commit, and the licence in the model card
    HubClient.read_checkpoint(repository, revision)
      1. GET /api/models/{repo}/revision/{revision}      the commit and the list of files
      2. GET /{repo}/resolve/{commit}/config.json, ...   all at that one commit, even if the branch moves
      3. GET .../model-00001-of-N.safetensors            Range: the first 64 KiB, then the rest of a longer header

Guarantees: at most `max_bytes` bytes are received per checkpoint, also from a server that ignores ranges (the rest of its
response is dropped). Reading takes at most `deadline_seconds`, also from a server that sends slowly. 429, 5xx and broken
connections are retried, with respect for Retry-After. The token goes only to the Hub, not to the store that it redirects to.
Every failure is a CheckpointError with a fix: a HubRejectionError if the Hub rejects the request, a HubError if the response is
not that of a Hub (for example a proxy's page), and a plain CheckpointError if the files are invalid. Not guaranteed: that a
mirror serves the commit that it names. There is no cache.

The URLs are those of huggingface_hub (`file_download.py`, `hf_api.py`), as are the settings: HF_ENDPOINT, HF_TOKEN,
HF_TOKEN_PATH, HF_HOME. Proxies (HTTPS_PROXY, NO_PROXY, ...) and CA certificates (SSL_CERT_FILE, SSL_CERT_DIR, REQUESTS_CA_BUNDLE,
CURL_CA_BUNDLE) are those of every Python client.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx

from aerie.checkpoints.directory import INDEX_FILE_NAME, MAX_D2T_BYTES, PICKLE_SUFFIXES
from aerie.engine.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    SafetensorsHeader,
    build_checkpoint,
    parse_config,
    parse_header,
    parse_index,
    read_header_length,
)

MAX_DOWNLOAD_BYTES = 512 * 2**20
"""Bytes per checkpoint. The largest header sets, those of models with a hundred thousand expert tensors, have some 30 MiB."""
FIRST_RANGE_BYTES = 64 * 2**10
MAX_JSON_BYTES = 64 * 2**20
"""Bytes of config.json, of the index and of the list of files, each."""
MAX_REQUEST_ATTEMPTS = 5
MAX_CONNECTIONS = 16
MAX_RETRY_DELAY_SECONDS = 30.0
CHECKPOINT_TIMEOUT_SECONDS = 600.0
"""Seconds per checkpoint, including pauses."""
_CA_FILE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class HubError(CheckpointError):
    """The Hub did not return the requested file. A retry, another token or another mirror may succeed."""


class HubRejectionError(HubError):
    """The Hub rejected the request (401, 403, 404), or an offline cache lacks the files. Only a user can change that."""


@dataclass(frozen=True)
class RepositoryInfo:
    """A repository at one commit, without its files."""

    commit: str
    licence: str
    """The licence that the model card declares, or its name if the card declares `other`. Empty: none."""


class HubClient:
    """A connection to one Hub. Use it as a context manager."""

    def __init__(
        self,
        endpoint: str,
        token: str | None = None,
        *,
        max_bytes: int = MAX_DOWNLOAD_BYTES,
        timeout_seconds: float = 30.0,
        deadline_seconds: float = CHECKPOINT_TIMEOUT_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Open a connection. Raises HubError if the address of a proxy is invalid.

        `timeout_seconds`: the timeout for a connection, and between two parts of a response. `sleep`: the pause before a retry.
        `ssl_context`: the CA certificates for the Hub; None: the public ones.
        """
        self._endpoint = endpoint.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._max_bytes = max_bytes
        self._sleep = sleep
        self._deadline_seconds, self._clock = deadline_seconds, clock
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        try:
            self._client = httpx.Client(timeout=timeout_seconds, follow_redirects=True, limits=limits, verify=ssl_context or True)
        except (ValueError, ImportError, httpx.InvalidURL) as error:
            raise HubError(
                f"the proxy cannot be used ({error}): write HTTPS_PROXY and HTTP_PROXY as http://HOST:PORT."
            ) from error

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> HubClient:
        """Create a client with HF_ENDPOINT, and the token in HF_TOKEN or in the file HF_TOKEN_PATH (default: $HF_HOME/token)."""
        token = environment.get("HF_TOKEN", "").strip()
        if not token:
            home = environment.get("HF_HOME") or "~/.cache/huggingface"
            path = Path(environment.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
            try:
                token = path.read_text().strip()
            except OSError:
                token = ""  # a public model needs none; for others the rejection has the fix
        return cls(
            environment.get("HF_ENDPOINT") or "https://huggingface.co", token or None, ssl_context=_build_ssl_context(environment)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def read_repository_info(self, repository: str, revision: str | None = None) -> RepositoryInfo:
        """Read what the Hub says of a repository. `revision`: branch, tag or commit. Raises CheckpointError."""
        listing = self._read_listing(_Download(self, f"{repository}@{revision or 'main'}"), repository, revision)
        return RepositoryInfo(str(listing["sha"]), _parse_licence(listing))

    def read_checkpoint(self, repository: str, revision: str | None = None) -> Checkpoint:
        """Read a checkpoint; its name is `repository@commit`. `revision`: branch, tag or commit. Raises CheckpointError."""
        download = _Download(self, f"{repository}@{revision or 'main'}")
        listing = self._read_listing(download, repository, revision)
        files = {str(entry.get("rfilename")) for entry in listing["siblings"] if isinstance(entry, dict)}
        commit = listing["sha"]
        download.name = f"{repository}@{commit}"
        base = f"{self._endpoint}/{quote(repository)}/resolve/{quote(commit, safe='')}"
        return self._build_checkpoint(download, base, files)

    def _read_listing(self, download: _Download, repository: str, revision: str | None) -> Mapping[str, Any]:
        """Read the description of a repository at a revision, with its commit (`sha`) and its files (`siblings`)."""
        address = f"{self._endpoint}/api/models/{quote(repository)}/revision/{quote(revision or 'main', safe='')}"
        try:
            listing = parse_config(download.fetch_file(address, MAX_JSON_BYTES), address)
        except HubError:
            raise
        except CheckpointError as error:  # a Hub's own responses are JSON
            raise HubError(f"{error} Or {_NOT_A_HUB_HINT}") from error
        commit, siblings = listing.get("sha"), listing.get("siblings")
        if not isinstance(commit, str) or not isinstance(siblings, list):
            raise HubError(f"the response of {address} has no commit and no files: {_NOT_A_HUB_HINT}")
        return listing

    def _build_checkpoint(self, download: _Download, base: str, files: set[str]) -> Checkpoint:
        config = parse_config(download.fetch_file(f"{base}/config.json", MAX_JSON_BYTES), f"{download.name}: config.json")
        index = None
        if INDEX_FILE_NAME in files:
            index = parse_index(
                download.fetch_file(f"{base}/{INDEX_FILE_NAME}", MAX_JSON_BYTES), f"{download.name}: {INDEX_FILE_NAME}"
            )
            shards = sorted(set(index.values()))
        else:
            shards = sorted(file for file in files if file.endswith(".safetensors") and "/" not in file)
        if not shards:
            if any(file.endswith(PICKLE_SUFFIXES) for file in files):
                return build_checkpoint(download.name, config, None)
            raise CheckpointError(f"{download.name} has no weights: it needs *.safetensors beside config.json.")
        pool = ThreadPoolExecutor(MAX_CONNECTIONS)
        try:
            headers = list(pool.map(lambda shard: download.read_header(f"{base}/{quote(shard)}", shard), shards))
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure the other shards are not requested
        checkpoint = build_checkpoint(download.name, config, headers, index)
        d2t = (checkpoint.tensors or {}).get("d2t")
        if d2t is None or d2t.byte_size > MAX_D2T_BYTES:
            return checkpoint
        raw, _ = download.fetch_range(f"{base}/{quote(d2t.file)}", d2t.begin, d2t.byte_size)
        return checkpoint.with_d2t_offsets(raw)


class _Download:
    """The requests for one checkpoint, which share one budget of bytes and one deadline."""

    def __init__(self, hub: HubClient, name: str) -> None:
        self.name = name
        self._hub = hub
        self._remaining_bytes = hub._max_bytes
        self._deadline = hub._clock() + hub._deadline_seconds
        self._lock = threading.Lock()

    def read_header(self, address: str, file: str) -> SafetensorsHeader:
        display_name = f"{self.name}: {file}"
        data, size = self.fetch_range(address, 0, FIRST_RANGE_BYTES)
        length = read_header_length(data, size, display_name)
        if length + 8 > len(data):
            rest, _ = self.fetch_range(address, len(data), length + 8 - len(data))
            data += rest
        return parse_header(data[8 : length + 8], size, file, display_name)

    def fetch_file(self, address: str, max_bytes: int) -> bytes:
        data, size = self._request(address, None, max_bytes)
        if size > max_bytes:
            raise CheckpointError(f"{self.name}: {address} has {size} bytes, more than the limit {max_bytes}: is this a model?")
        return data

    def fetch_range(self, address: str, start: int, count: int) -> tuple[bytes, int]:
        """Return up to `count` bytes from `start`, and the size of the file."""
        return self._request(address, start, count)

    def _request(self, address: str, begin: int | None, count: int) -> tuple[bytes, int]:
        problem = ""
        for attempt in range(MAX_REQUEST_ATTEMPTS):
            pause = 2.0**attempt
            try:
                response = self._request_once(address, begin, count)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
                raise HubError(f"{self.name}: {address}: {error}: set HF_ENDPOINT to the address of a Hub.") from error
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if not isinstance(response, _RetryableResponse):
                    return response
                problem = response.reason
                if response.retry_after_seconds is not None:
                    pause = response.retry_after_seconds
            if attempt < MAX_REQUEST_ATTEMPTS - 1:
                self._hub._sleep(min(pause, MAX_RETRY_DELAY_SECONDS))
                self._check_deadline(address)
        raise HubError(
            f"{self.name}: {address} failed {MAX_REQUEST_ATTEMPTS} times, the last time with: {problem}: "
            "try again later, set HF_ENDPOINT to a mirror, or give a local folder."
        )

    def _request_once(self, address: str, begin: int | None, count: int) -> tuple[bytes, int] | _RetryableResponse:
        range_header = {} if begin is None else {"Range": f"bytes={begin}-{begin + count - 1}"}
        # Identity, because offsets do not apply to a compressed response.
        headers = {**self._hub._headers, "Accept-Encoding": "identity", **range_header}
        with self._hub._client.stream("GET", address, headers=headers) as response:
            if response.status_code == 429 or response.status_code >= 500:
                retry_after = response.headers.get("Retry-After", "")
                return _RetryableResponse(f"HTTP {response.status_code}", float(retry_after) if retry_after.isdigit() else None)
            self._check_response(response, address, begin)
            # A server that ignores ranges responds with 200 and the file from its first byte.
            skip = begin or 0 if response.status_code == 200 else 0
            data = self._read_body(response, address, skip + count)
            size = _file_size(response, len(data))
            expected = min(count, size - (begin or 0))
            if len(data) - skip < expected:
                return _RetryableResponse(f"{len(data) - skip} of {expected} bytes")
            return bytes(data[skip : skip + count]), size

    def _check_response(self, response: httpx.Response, address: str, begin: int | None) -> None:
        """Raise the CheckpointError for a response that is no content of a Hub and that a retry cannot improve."""
        if response.status_code == 416:
            raise CheckpointError(f"{self.name}: {address} ends before byte {begin}: it is damaged; upload it again.")
        if response.status_code not in (200, 206):
            error_type = HubRejectionError if response.status_code in (401, 403, 404) else HubError
            raise error_type(f"{self.name}: {address} answered HTTP {response.status_code}: {_suggest_fix(response)}")
        if response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "text/html":
            raise HubError(f"{self.name}: {address} answered with an HTML page, as proxies do: {_NOT_A_HUB_HINT}")

    def _read_body(self, response: httpx.Response, address: str, count: int) -> bytearray:
        """Read at least `count` bytes of the body, or all of it, within budget and deadline."""
        data = bytearray()
        for chunk in response.iter_raw():
            self._consume_budget(len(chunk))
            self._check_deadline(address)
            data += chunk
            if len(data) >= count:
                break
        return data

    def _check_deadline(self, address: str) -> None:
        if self._hub._clock() > self._deadline:
            raise HubError(
                f"{self.name}: {address} was not read within {self._hub._deadline_seconds:g} s: try again later, or set "
                "HF_ENDPOINT to a mirror."
            )

    def _consume_budget(self, count: int) -> None:
        with self._lock:
            self._remaining_bytes -= count
            remaining_bytes = self._remaining_bytes
        if remaining_bytes < 0:
            raise CheckpointError(
                f"{self.name}: more than {self._hub._max_bytes} bytes were received before all headers were in: "
                "the server may ignore Range requests; set HF_ENDPOINT to one that does not, or give a local folder."
            )


class _RetryableResponse:
    """A response for which a retry may succeed. `retry_after_seconds`: the pause that the server requests."""

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


def _file_size(response: httpx.Response, received: int) -> int:
    """Return the size of the file from Content-Range (`bytes 0-65535/123456`) or Content-Length, else the received bytes."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if response.status_code == 206 and total.isdigit():
        return int(total)
    length = response.headers.get("Content-Length", "")
    return int(length) if response.status_code == 200 and length.isdigit() else received


def _parse_licence(listing: Mapping[str, Any]) -> str:
    """Return the licence in the model card's metadata. For `other`, the card names it in a field of its own."""
    card = listing.get("cardData")
    licence, name = (card.get("license"), card.get("license_name")) if isinstance(card, dict) else (None, None)
    if licence == "other" and isinstance(name, str):
        return name
    return licence if isinstance(licence, str) else ""


def _suggest_fix(response: httpx.Response) -> str:
    status = response.status_code
    if status == 401:
        return "it does not exist, or it is private: check the name, or set HF_TOKEN to a token that may read it."
    if status == 403:
        return "the token may not read it: accept the model's terms with its account, or set HF_TOKEN to another."
    if status == 404:
        return "it does not exist at this revision: check repository and revision; a private one needs HF_TOKEN."
    return _NOT_A_HUB_HINT


_NOT_A_HUB_HINT = "is HF_ENDPOINT a Hugging Face Hub, and HTTPS_PROXY the right proxy?"


def _build_ssl_context(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the CA certificates of the environment, from the variable of any library, else None. Raises HubError."""
    name = next((name for name in _CA_FILE_VARIABLES if environment.get(name)), "SSL_CERT_DIR")
    path = environment.get(name)
    if not path:
        return None
    try:
        is_directory = Path(path).is_dir()
        return ssl.create_default_context(cafile=None if is_directory else path, capath=path if is_directory else None)
    except OSError as error:
        raise HubError(f"{name} is {path}, which has no readable certificates ({error}): correct it, or mount them.") from error
