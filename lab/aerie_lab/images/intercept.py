"""A proxy as companies have them, for tests: the only way to the Hub, with TLS that it ends itself by an authority of its own.

    client ── CONNECT huggingface.co:443 ──► proxy ── plain HTTP ──► the lab's Hub
                 TLS, certificate of the proxy's authority

    python -m aerie_lab.images.intercept --certificate FILE --key FILE [--port 3128] [--upstream http://10.245.0.1:8070]

Guarantees: a request reaches the Hub only by CONNECT and a TLS handshake; each is a line of the log. Not guaranteed: anything a
real proxy does besides; names of hosts are taken as they come, and all of them are the Hub.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
from urllib.parse import urlsplit

from aerie_lab.sandbox.addresses import HUB_URL

_CHUNK_BYTES = 65536


class InterceptingProxy:
    """The proxy's connections."""

    def __init__(self, context: ssl.SSLContext, upstream: str) -> None:
        url = urlsplit(upstream)
        self._context, self._host, self._port = context, url.hostname, url.port

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await self._intercept(reader, writer)
        writer.close()

    async def _intercept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, target, *_ = head.split()
        print(f"{method} {target}", flush=True)
        if method != "CONNECT":
            writer.write(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await writer.drain()
        await writer.start_tls(self._context)
        there, to = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(_copy(reader, to), _copy(there, writer))
        finally:
            to.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Everything, and then the end."""
    while piece := await source.read(_CHUNK_BYTES):
        sink.write(piece)
        await sink.drain()
    sink.close()


async def run_proxy(arguments: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(arguments.certificate, arguments.key)
    server = await asyncio.start_server(
        InterceptingProxy(context, arguments.upstream).handle_connection, "0.0.0.0", arguments.port
    )
    print(f"intercepting on port {arguments.port}", flush=True)
    await server.serve_forever()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="A proxy that ends TLS itself, before the lab's Hub.")
    parser.add_argument("--certificate", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--port", type=int, default=3128)
    parser.add_argument("--upstream", default=HUB_URL)
    asyncio.run(run_proxy(parser.parse_args()))


if __name__ == "__main__":
    main()
