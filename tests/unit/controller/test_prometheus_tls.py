"""A Prometheus server with https: who it is gets verified before it gets a token or is believed. Real sockets, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aerie.api.metrics import PrometheusSource
from aerie.controller.scraping.http_fetch import ScrapeError
from aerie.controller.scraping.prometheus import PrometheusAccess, PrometheusClient
from aerie.engine.metrics.promql import PrometheusScrape
from aerie_lab.cluster.certificates import Authority
from aerie_lab.testing.prometheus import build_range_response

from .scraped import BEFORE

T0 = 1_790_000_000.0
pytestmark = pytest.mark.usefixtures("patient")


@dataclass
class Server:
    """One that answers whoever gets through to it."""

    port: int
    tokens: list[str | None] = field(default_factory=list)
    """Of each request."""

    def at(self, host: str) -> PrometheusSource:
        return PrometheusSource(address=f"https://{host}:{self.port}")


@contextlib.contextmanager
def serving(folder: Path, certificate: str) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            found.tokens.append(self.headers["Authorization"])
            body = json.dumps(build_range_response({"chat-1": [(T0, BEFORE)]})).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{certificate}.crt", folder / f"{certificate}.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # The handshake is that of the connection's own thread: one that fails is no concern of the server's.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        found = Server(server.server_address[1])
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    found = Authority(tmp_path_factory.mktemp("authority"))
    found.issue("local", hosts=["127.0.0.1", "localhost"])
    found.issue("elsewhere", hosts=["prometheus.example"])
    return found


def asked(server: PrometheusSource, access: PrometheusAccess) -> PrometheusScrape | str:
    async def story() -> PrometheusScrape | str:
        servers = PrometheusClient(access)
        try:
            (found,) = [some async for some in servers.poll(server, "default", ["chat-1"], 15.0)]
            return found["chat-1"]
        finally:
            await servers.close()

    return asyncio.run(story())


def test_a_server_of_a_known_authority_is_read_and_gets_its_token(authority: Authority, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving(authority.folder, "local") as server:
        access = PrometheusAccess({server.at("localhost").address: token}, authority.certificate)
        for host, sent in (("localhost", "Bearer secret"), ("127.0.0.1", None)):
            found = asked(server.at(host), access)
            assert isinstance(found, PrometheusScrape)
            assert server.tokens.pop() == sent


@pytest.mark.parametrize(
    ("certificate", "known", "said"),
    [
        ("local", "another", "certificate verify failed"),
        ("local", None, "certificate verify failed"),  # the public ones
        ("elsewhere", "its", "IP address mismatch"),
    ],
)
def test_a_server_that_cannot_show_who_it_is_gets_nothing(
    authority: Authority, tmp_path: Path, certificate: str, known: str | None, said: str
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    another = Authority(tmp_path / "another").certificate
    files = {"its": authority.certificate, "another": another, None: None}
    with serving(authority.folder, certificate) as server:
        there = server.at("127.0.0.1")
        with pytest.raises(ScrapeError, match=said) as error:
            asked(there, PrometheusAccess({there.address: token}, files[known]))
        assert error.value.reason == "unreachable"
        assert "the chart value prometheus.caBundle" in str(error.value)
        assert server.tokens == []


def test_authorities_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text("none")
    with pytest.raises(ScrapeError, match=rf"the CA certificates in {file} cannot be read"):
        asked(PrometheusSource(address="https://127.0.0.1:9"), PrometheusAccess(ca_file=file))
