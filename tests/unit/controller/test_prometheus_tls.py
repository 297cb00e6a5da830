"""Prometheus over https: the server is verified before it gets a token. Real sockets, in real time."""

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
pytestmark = pytest.mark.usefixtures("long_timeouts")


@dataclass
class HttpsServer:
    """A server that responds to every request."""

    port: int
    tokens: list[str | None] = field(default_factory=list)
    """Token of each request."""

    def source_at(self, host: str) -> PrometheusSource:
        return PrometheusSource(address=f"https://{host}:{self.port}")


@contextlib.contextmanager
def start_server(folder: Path, certificate: str) -> Iterator[HttpsServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            https_server.tokens.append(self.headers["Authorization"])
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
        https_server = HttpsServer(server.server_address[1])
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield https_server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    certificate_authority = Authority(tmp_path_factory.mktemp("authority"))
    certificate_authority.issue("local", hosts=["127.0.0.1", "localhost"])
    certificate_authority.issue("elsewhere", hosts=["prometheus.example"])
    return certificate_authority


def poll_server(server: PrometheusSource, access: PrometheusAccess) -> PrometheusScrape | str:
    async def poll() -> PrometheusScrape | str:
        client = PrometheusClient(access)
        try:
            (scrapes,) = [scrapes_of_batch async for scrapes_of_batch in client.poll(server, "default", ["chat-1"], 15.0)]
            return scrapes["chat-1"]
        finally:
            await client.close()

    return asyncio.run(poll())


def test_server_with_a_trusted_certificate_gets_its_token(authority: Authority, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with start_server(authority.folder, "local") as server:
        access = PrometheusAccess({server.source_at("localhost").address: token}, authority.certificate)
        for host, token_header in (("localhost", "Bearer secret"), ("127.0.0.1", None)):
            scrape = poll_server(server.source_at(host), access)
            assert isinstance(scrape, PrometheusScrape)
            assert server.tokens.pop() == token_header


@pytest.mark.parametrize(
    ("certificate", "trusted", "message"),
    [
        ("local", "another", "certificate verify failed"),
        ("local", None, "certificate verify failed"),  # the public ones
        ("elsewhere", "its", "IP address mismatch"),
    ],
)
def test_server_without_a_trusted_certificate_gets_no_request(
    authority: Authority, tmp_path: Path, certificate: str, trusted: str | None, message: str
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    other_ca = Authority(tmp_path / "another").certificate
    ca_files = {"its": authority.certificate, "another": other_ca, None: None}
    with start_server(authority.folder, certificate) as server:
        source = server.source_at("127.0.0.1")
        with pytest.raises(ScrapeError, match=message) as error:
            poll_server(source, PrometheusAccess({source.address: token}, ca_files[trusted]))
        assert error.value.reason == "unreachable"
        assert "the chart value prometheus.caBundle" in str(error.value)
        assert server.tokens == []


def test_error_names_an_unreadable_ca_file(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.crt"
    ca_file.write_text("none")
    with pytest.raises(ScrapeError, match=rf"the CA certificates in {ca_file} cannot be read"):
        poll_server(PrometheusSource(address="https://127.0.0.1:9"), PrometheusAccess(ca_file=ca_file))
