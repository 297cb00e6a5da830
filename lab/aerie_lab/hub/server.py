"""The HTTP interface of a Hugging Face Hub, as far as aerie.checkpoints, huggingface_hub and vLLM's loader use it.

    GET  /api/models/OWNER/NAME[/revision/REV]     commit and names of files
    GET  /api/models/OWNER/NAME/tree/REV[/PATH]    names and sizes
    POST /api/models/OWNER/NAME/paths-info/REV     the same of given paths
    GET  /OWNER/NAME/resolve/REV/PATH              a file, or a range of it; HEAD describes it

Errors have the Hub's statuses and its header X-Error-Code, by which huggingface_hub distinguishes them; X-Error-Message states
what this Hub has instead. Addresses and headers are those of huggingface_hub 2.4 (hf_api.py, file_download.py).
Not offered: uploads, data sets, spaces, searches, Git.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from aerie_lab.hub.checkpoints import Repository, RepositoryFile

_CHUNK_BYTES = 2**20
_NO_WEIGHTS_MESSAGE = (
    "the lab's Hub has the shape of this checkpoint and no weights: an engine that loads weights needs another, such as "
    "aerie/bundle-target, or a [[checkpoint]] row of yours (docs/reference/lab-pods.md)"
)


class HubServer(ThreadingHTTPServer):
    """Serves the repositories until shut down."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, repositories: Mapping[str, Repository], host: str, port: int) -> None:
        self.repositories = repositories
        super().__init__((host, port), _HubRequestHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing when a client has disconnected, as one does whose pod has ended."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def create_hub_server(repositories: Mapping[str, Repository], host: str, port: int) -> HubServer:
    """Return the listening server; the caller runs its `serve_forever`."""
    return HubServer(repositories, host, port)


class _HubError(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _HubRequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        self._handle_request()

    def do_HEAD(self) -> None:
        self._handle_request()

    def do_POST(self) -> None:
        self._handle_request()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the base class's
        sys.stderr.write(f"{self.address_string()} {format % args}\n")
        sys.stderr.flush()

    def _handle_request(self) -> None:
        # The body is read in any case, or it would be taken for the next request.
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        try:
            if path == "/health":
                self._send_json({})
            elif self.command == "POST":
                self._send_paths_info(path, body)
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path):
                self._send_repository_info(match[1], match[2] or "revision", match[3] or "main", match[4] or "")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._send_file(match[1], match[2], match[3])
            else:
                raise _HubError(404, "EntryNotFound", f"the lab's Hub does not offer {path}")
        except _HubError as hub_error:
            self._send_hub_error(hub_error)
        except FileNotFoundError as error:  # a row whose folder is not on this machine
            self._send_hub_error(_HubError(404, "EntryNotFound", str(error)))

    # --- requests ----------------------------------------------------------------------------------------------------

    def _find_repository(self, name: str, revision: str, *, files: bool = False) -> Repository:
        repository = self.server.repositories.get(name)
        token = (self.headers.get("Authorization") or "").startswith("Bearer ")
        if repository is None:  # as the Hub, which does not disclose to strangers what exists
            names = ", ".join(sorted(self.server.repositories))
            raise _HubError(404 if token else 401, "RepoNotFound", f"the lab's Hub has no {name}, but {names}")
        if revision not in ("main", repository.commit):
            raise _HubError(404, "RevisionNotFound", f"{name} has no {revision} here: its one commit is {repository.commit}")
        if files and repository.gated and not token:
            raise _HubError(401, "GatedRepo", f"{name} is gated: send a token. Any token will do in the lab")
        return repository

    def _send_repository_info(self, name: str, what: str, revision: str, folder: str) -> None:
        repository = self._find_repository(name, revision)
        if what == "tree":
            below = dict(_files_below(repository.files(), folder))
            if folder and not below:
                raise _HubError(404, "EntryNotFound", f"{name} has no folder {folder}")
            self._send_json([_build_tree_entry(repository, path, file) for path, file in below.items()])
            return
        self._send_json(
            {
                "_id": hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:24],
                "id": name,
                "modelId": name,
                "sha": (repository.main if revision == "main" else "") or repository.commit,
                "private": False,
                "gated": "manual" if repository.gated else False,
                "disabled": False,
                "cardData": {"license": repository.licence} if repository.licence else {},
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": path, "size": file.size} for path, file in repository.files().items()],
            }
        )

    def _send_paths_info(self, path: str, body: bytes) -> None:
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)", path)
        if match is None:
            raise _HubError(404, "EntryNotFound", f"the lab's Hub does not offer {path}")
        repository = self._find_repository(match[1], match[2])
        files = repository.files()
        if (self.headers.get("Content-Type") or "").startswith("application/json"):
            paths = json.loads(body)["paths"]
        else:
            paths = parse_qs(body.decode()).get("paths", [])
        self._send_json([_build_tree_entry(repository, name, files[name]) for name in paths if name in files])

    def _send_file(self, name: str, revision: str, path: str) -> None:
        repository = self._find_repository(name, revision, files=True)
        file = repository.files().get(path)
        if file is None:
            raise _HubError(404, "EntryNotFound", f"{name} has no {path} at {repository.commit}")
        begin, end, status = 0, file.size, 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            begin, end = int(match[1]), min(int(match[2]) + 1 if match[2] else file.size, file.size)
            if begin >= end:
                self._send_headers(416, {"Content-Range": f"bytes */{file.size}", "Content-Length": "0"})
                return
            status = 206
        if self.command == "GET" and file.requests_weights(begin, end):
            raise _HubError(403, "WithoutWeights", _NO_WEIGHTS_MESSAGE)
        headers = {
            "Content-Length": str(end - begin),
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": f'"{_content_id(repository, path)}"',
            "X-Repo-Commit": repository.commit,
        }
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{file.size}"
        self._send_headers(status, headers)
        while self.command == "GET" and begin < end:
            data = file.read(begin, min(end, begin + _CHUNK_BYTES))
            self.wfile.write(data)
            begin += len(data)
            if not data:  # the file has become shorter: the client sees that bytes are missing
                self.close_connection = True
                break

    # --- answers ------------------------------------------------------------------------------------------------------

    def _send_headers(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def _send_json(self, document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self._send_headers(status, {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_hub_error(self, error: _HubError) -> None:
        headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
        self._send_json({"error": str(error)}, error.status, headers)


def _files_below(files: Mapping[str, RepositoryFile], folder: str) -> Iterator[tuple[str, RepositoryFile]]:
    inside = f"{folder.strip('/')}/" if folder else ""
    return ((path, file) for path, file in files.items() if path.startswith(inside))


def _build_tree_entry(repository: Repository, path: str, file: RepositoryFile) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": file.size, "oid": _content_id(repository, path)}


def _content_id(repository: Repository, path: str) -> str:
    """Return an id of the content: a commit's files do not change."""
    return hashlib.sha1(f"{repository.name}@{repository.commit}/{path}".encode(), usedforsecurity=False).hexdigest()
