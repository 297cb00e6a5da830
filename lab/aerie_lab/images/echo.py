"""A small HTTP server for the demo and for tests: `python -m aerie_lab.images.echo [--port 8080] [--start-delay S]`.

    GET  /...           JSON: pod, version, path, and the request's headers
    GET  /healthz       200 once started; 503 after POST /unhealthy, 200 again after POST /healthy
    POST /exit?code=N   answers, then exits with N
    GET  /wait?seconds=S   answers after S seconds, as a long completion would

On SIGTERM it keeps serving new requests for `--drain` seconds, then finishes open requests and exits with 0.
Standard library only, and little of it, so that sixty of them start quickly on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from urllib.parse import parse_qs, urlsplit


class EchoServer:
    """The server's state."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.healthy = True
        self.open_requests = 0
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_draining = False

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive as HTTP/1.1 does."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                method, target, _ = line.decode("latin-1").split(" ", 2)
                headers = {}
                while (header := (await reader.readline()).decode("latin-1").strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.strip().lower()] = value.strip()
                if length := int(headers.get("content-length", 0)):
                    await reader.readexactly(length)
                self.open_requests += 1
                try:
                    status, body = await self.build_response(method, target, headers)
                    last = self.is_draining or headers.get("connection", "").lower() == "close"
                    raw = json.dumps(body).encode()
                    writer.write(
                        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
                        f"Connection: {'close' if last else 'keep-alive'}\r\n\r\n".encode()
                        + raw
                    )
                    await writer.drain()
                finally:
                    self.open_requests -= 1
                if last:
                    break
        writer.close()

    async def build_response(self, method: str, target: str, headers: dict[str, str]) -> tuple[str, object]:
        """Status line and body for one request."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match method, url.path:
            case "GET", "/healthz":
                return ("200 OK" if self.healthy else "503 Service Unavailable"), {"healthy": self.healthy}
            case "POST", "/healthy" | "/unhealthy":
                self.healthy = url.path == "/healthy"
            case "POST", "/exit":
                asyncio.get_running_loop().call_later(0.05, self.request_exit, int(query.get("code", "0")))
            case "GET", "/wait":
                await asyncio.sleep(min(float(query.get("seconds", "1")), 600))
        return "200 OK", {
            "pod": os.environ.get("POD_NAME", os.uname().nodename),
            "version": self.version,
            "path": target,
            "headers": headers,
        }

    def request_exit(self, code: int) -> None:
        """Exit with `code` as soon as the main coroutine runs."""
        if not self.exit_code.done():
            self.exit_code.set_result(code)


async def run_server(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or POST /exit; the exit code."""
    await asyncio.sleep(arguments.start_delay)
    echo = EchoServer(arguments.version)
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        echo.is_draining = True
        loop.call_later(arguments.drain, echo.request_exit, 0)

    loop.add_signal_handler(signal.SIGTERM, terminate)
    server = await asyncio.start_server(echo.handle_connection, "0.0.0.0", arguments.port)
    print(f"echo {arguments.version} listening on port {arguments.port}", flush=True)
    code = await echo.exit_code
    server.close()
    while echo.open_requests:
        await asyncio.sleep(0.02)
    return code


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="echo")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--version", default="1")
    parser.add_argument("--start-delay", type=float, default=0.0)
    parser.add_argument("--drain", type=float, default=0.0)
    return asyncio.run(run_server(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
