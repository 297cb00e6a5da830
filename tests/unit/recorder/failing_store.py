"""A server with the few calls of Amazon S3's API that the recorder makes, which fails on request.

It is for faults alone: a real server is in tests/lab/services/test_object_store.py.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from aerie.recorder.objects import Bucket

PREFIX = "team/chat"


@dataclass
class FailingStore:
    """A bucket. A call fails if its method has a status in `statuses`, and waits while `hangs` is set."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Content by name below the prefix."""
    statuses: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Method, and the first parameter if there is one."""
    answers: threading.Event = field(default_factory=threading.Event)

    @property
    def bucket(self) -> Bucket:
        return Bucket("prompts", PREFIX, "us-east-1", self.url, "key", "secret")


def _build_handler(store: FailingStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            split = urlsplit(self.path)
            name = split.path.removeprefix(f"/prompts/{PREFIX}/")
            parameter = next(iter(parse_qs(split.query, keep_blank_values=True)), "")
            store.calls.append(f"{self.command} {parameter}".strip())
            store.answers.wait(30)
            status, answer = store.statuses.get(self.command, 200), ""
            if status == 200:
                status, answer = self._apply(name, parameter, body)
            self.send_response(status)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", str(len(answer.encode())))
            self.end_headers()
            self.wfile.write(answer.encode())

        def _apply(self, name: str, parameter: str, body: bytes) -> tuple[int, str]:
            if self.command == "PUT":
                store.objects[name] = body
            elif self.command == "POST" and parameter == "delete":
                keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for key in keys:
                    store.objects.pop(key.removeprefix(f"{PREFIX}/"), None)
                deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                return 200, f"<DeleteResult>{deleted}</DeleteResult>"
            elif self.command == "GET":
                items = "".join(
                    f"<Contents><Key>{PREFIX}/{escape(key)}</Key><LastModified>2026-03-01T00:00:00.000Z</LastModified>"
                    f"<ETag>1</ETag><Size>{len(content)}</Size></Contents>"
                    for key, content in store.objects.items()
                )
                return 200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
            return 200, ""

        do_GET = do_PUT = do_POST = _handle  # noqa: N815 - names of the base class

    return Handler


@contextlib.contextmanager
def run_failing_store() -> Iterator[FailingStore]:
    """Run a server on loopback, which answers."""
    store = FailingStore()
    store.answers.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _build_handler(store))
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()
