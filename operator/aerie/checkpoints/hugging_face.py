"""Reads a checkpoint from the Hugging Face Hub by range requests: config.json, the index, headers and d2t, never the weights.

    Hub.read(repo, revision)
      1. GET /api/models/{repo}/revision/{revision}      the commit and the list of files
      2. GET /{repo}/resolve/{commit}/config.json, ...   all at that one commit, whatever happens to the branch
      3. GET .../model-00001-of-N.safetensors            Range: the first 64 KiB, then the rest of a longer header

Guarantees: at most `budget` bytes are received per checkpoint, also from a server that ignores ranges (its answer is dropped
once the needed bytes are in), and in at most `deadline` seconds, also from one that drips. 429, 5xx and broken connections are
retried, honouring Retry-After. The token goes to the Hub only, not to the store it redirects to. Every failure is a
CheckpointError that says what to do: HubRefusalError where the Hub has said no, HubError where it has not answered as a Hub does
(a page of a proxy included), and a plain one where the files are at fault.
Not guaranteed: that a mirror serves the commit it names. No cache is kept.

The addresses are those of huggingface_hub (`file_download.py`, `hf_api.py`), as are the settings: HF_ENDPOINT, HF_TOKEN,
HF_TOKEN_PATH, HF_HOME; proxies (HTTPS_PROXY, NO_PROXY, ...) and authorities (SSL_CERT_FILE, SSL_CERT_DIR, REQUESTS_CA_BUNDLE,
CURL_CA_BUNDLE) are those of every Python client.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self
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
"""Seconds per checkpoint, pauses included."""
_CA_FILE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class HubError(CheckpointError):
    """The Hub did not hand out what was asked for: another try, another token or another mirror may get it."""


class HubRejectionError(HubError):
    """The Hub has said no (401, 403, 404), or an offline cache does not have it: it stays so until a person does something."""


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
        """`timeout`: seconds for a connection and between two pieces of an answer. `sleep`: how to pause before a retry.
        `verify`: the authorities of the Hub; None: the public ones. Raises HubError where a proxy's address is none."""
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
        """HF_ENDPOINT, and the token of HF_TOKEN or of the file HF_TOKEN_PATH (default: $HF_HOME/token)."""
        token = environment.get("HF_TOKEN", "").strip()
        if not token:
            home = environment.get("HF_HOME") or "~/.cache/huggingface"
            path = Path(environment.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
            try:
                token = path.read_text().strip()
            except OSError:
                token = ""  # a public model needs none; for another the refusal says how to give one
        return cls(
            environment.get("HF_ENDPOINT") or "https://huggingface.co", token or None, ssl_context=_build_ssl_context(environment)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def read_checkpoint(self, repository: str, revision: str | None = None) -> Checkpoint:
        """The checkpoint, named `repository@commit`. `revision`: branch, tag or commit. Raises CheckpointError."""
        download = _Download(self, f"{repository}@{revision or 'main'}")
        address = f"{self._endpoint}/api/models/{quote(repository)}/revision/{quote(revision or 'main', safe='')}"
        try:
            listing = parse_config(download.fetch_file(address, MAX_JSON_BYTES), address)
        except HubError:
            raise
        except CheckpointError as error:  # a Hub's own answers are JSON
            raise HubError(f"{error} Or {_NOT_A_HUB_HINT}") from error
        commit, siblings = listing.get("sha"), listing.get("siblings")
        if not isinstance(commit, str) or not isinstance(siblings, list):
            raise HubError(f"{address} names no commit and no files: {_NOT_A_HUB_HINT}")
        files = {str(entry.get("rfilename")) for entry in siblings if isinstance(entry, dict)}
        download.name = f"{repository}@{commit}"
        base = f"{self._endpoint}/{quote(repository)}/resolve/{quote(commit, safe='')}"
        return self._build_checkpoint(download, base, files)

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
            pool.shutdown(cancel_futures=True)  # after a failure the other shards are not asked for
        checkpoint = build_checkpoint(download.name, config, headers, index)
        d2t = (checkpoint.tensors or {}).get("d2t")
        if d2t is None or d2t.byte_size > MAX_D2T_BYTES:
            return checkpoint
        raw, _ = download.fetch_range(f"{base}/{quote(d2t.file)}", d2t.begin, d2t.byte_size)
        return checkpoint.with_d2t_offsets(raw)


class _Download:
    """The requests for one checkpoint, which share one budget."""

    def __init__(self, hub: HubClient, name: str) -> None:
        self.name = name
        self._hub = hub
        self._remaining_bytes = hub._max_bytes
        self._deadline = hub._clock() + hub._deadline_seconds
        self._lock = threading.Lock()

    def read_header(self, address: str, file: str) -> SafetensorsHeader:
        shown = f"{self.name}: {file}"
        data, size = self.fetch_range(address, 0, FIRST_RANGE_BYTES)
        length = read_header_length(data, size, shown)
        if length + 8 > len(data):
            more, _ = self.fetch_range(address, len(data), length + 8 - len(data))
            data += more
        return parse_header(data[8 : length + 8], size, file, shown)

    def fetch_file(self, address: str, max_bytes: int) -> bytes:
        data, size = self._request(address, None, max_bytes)
        if size > max_bytes:
            raise CheckpointError(f"{self.name}: {address} has {size} bytes, and {max_bytes} is the most: is this a model?")
        return data

    def fetch_range(self, address: str, start: int, count: int) -> tuple[bytes, int]:
        """Up to `count` bytes from `begin`, and the size of the file."""
        return self._request(address, start, count)

    def _request(self, address: str, begin: int | None, count: int) -> tuple[bytes, int]:
        problem = ""
        for attempt in range(MAX_REQUEST_ATTEMPTS):
            try:
                answer = self._request_once(address, begin, count)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
                raise HubError(f"{self.name}: {address}: {error}: set HF_ENDPOINT to the address of a Hub.") from error
            except httpx.TransportError as error:
                problem, pause = str(error) or type(error).__name__, 2.0**attempt
            else:
                if not isinstance(answer, _RetryableResponse):
                    return answer
                problem, pause = answer.reason, 2.0**attempt if answer.retry_after_seconds is None else answer.retry_after_seconds
            if attempt < MAX_REQUEST_ATTEMPTS - 1:
                self._hub._sleep(min(pause, MAX_RETRY_DELAY_SECONDS))
                self._check_deadline(address)
        raise HubError(
            f"{self.name}: {address} failed {MAX_REQUEST_ATTEMPTS} times, at last with: {problem}: "
            "try again later, set HF_ENDPOINT to a mirror, or give a local folder."
        )

    def _request_once(self, address: str, begin: int | None, count: int) -> tuple[bytes, int] | _RetryableResponse:
        wanted = {} if begin is None else {"Range": f"bytes={begin}-{begin + count - 1}"}
        # As it is stored: a compressed answer would have no use for offsets.
        headers = {**self._hub._headers, "Accept-Encoding": "identity", **wanted}
        with self._hub._client.stream("GET", address, headers=headers) as response:
            if response.status_code == 429 or response.status_code >= 500:
                after = response.headers.get("Retry-After", "")
                return _RetryableResponse(f"HTTP {response.status_code}", float(after) if after.isdigit() else None)
            if response.status_code == 416:
                raise CheckpointError(f"{self.name}: {address} ends before byte {begin}: it is damaged; upload it again.")
            if response.status_code not in (200, 206):
                kind = HubRejectionError if response.status_code in (401, 403, 404) else HubError
                raise kind(f"{self.name}: {address} answered HTTP {response.status_code}: {_suggest_fix(response)}")
            if response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "text/html":
                raise HubError(f"{self.name}: {address} answered with a page for people, as proxies do: {_NOT_A_HUB_HINT}")
            # A server that ignores ranges answers 200 and begins at the beginning.
            skip = begin or 0 if response.status_code == 200 else 0
            data = bytearray()
            for piece in response.iter_raw():
                self._consume_budget(len(piece))
                self._check_deadline(address)
                data += piece
                if len(data) >= skip + count:
                    break
            size = _file_size(response, len(data))
            expected = min(count, size - (begin or 0))
            if len(data) - skip < expected:
                return _RetryableResponse(f"{len(data) - skip} of {expected} bytes")
            return bytes(data[skip : skip + count]), size

    def _check_deadline(self, address: str) -> None:
        if self._hub._clock() > self._deadline:
            raise HubError(
                f"{self.name}: {address} was not read within {self._hub._deadline_seconds:g} s: try again later, or set HF_ENDPOINT to a "
                "mirror."
            )

    def _consume_budget(self, count: int) -> None:
        with self._lock:
            self._remaining_bytes -= count
            left = self._remaining_bytes
        if left < 0:
            raise CheckpointError(
                f"{self.name}: more than {self._hub._max_bytes} bytes were received before all headers were in: "
                "the server may ignore Range requests; set HF_ENDPOINT to one that does not, or give a local folder."
            )


class _RetryableResponse:
    """An answer that may be better the next time. `pause`: seconds that the server asks for."""

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


def _file_size(response: httpx.Response, received: int) -> int:
    """The size of the file, from Content-Range (`bytes 0-65535/123456`) or Content-Length; else what was received."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if response.status_code == 206 and total.isdigit():
        return int(total)
    length = response.headers.get("Content-Length", "")
    return int(length) if response.status_code == 200 and length.isdigit() else received


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
    """Those of the environment, whichever library's variable names them; None where none does. Raises HubError."""
    name = next((name for name in _CA_FILE_VARIABLES if environment.get(name)), "SSL_CERT_DIR")
    path = environment.get(name)
    if not path:
        return None
    try:
        folder = Path(path).is_dir()
        return ssl.create_default_context(cafile=None if folder else path, capath=path if folder else None)
    except OSError as error:
        raise HubError(
            f"{name} is {path}, which holds no certificates that can be read ({error}): correct it, or mount them."
        ) from error
