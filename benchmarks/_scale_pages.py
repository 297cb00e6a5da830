"""The engines of a lab of processless pods: `python -m benchmarks._scale_pages SOCKET PORT HOSTILE`, in the lab's own network.

    pod's address ─► the lab's loopback ─► one server ─┬─ a page as vLLM writes it, whose counters grow with the time
                                                       └─ a form of _hostile_pods.py, for an address that HOSTILE names
    SOCKET ────────► PORT of the loopback: the operator's own metrics, for a reader outside of the lab

All honest pods show the same page, so that no arm of a rollout is better than another. HOSTILE is a file that is read again
whenever it has changed: JSON, an object of names of forms by address. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from pyroute2 import IPRoute

from aerie_lab.engine.metrics.counters import Counters
from aerie_lab.engine.metrics.exposition import render_exposition
from aerie_lab.relay import relay_connection
from benchmarks._hostile_pods import HOSTILE_RESPONSES

PODS = "10.244.0.0/16"
PORT = 8000
DRAFTS = 3
STEPS_PER_S = 40
REQUESTS_PER_S = 2
_LOCAL_TABLE = 255


@functools.lru_cache(maxsize=2)
def response_after(seconds: int) -> bytes:
    """Return the response of an engine that has served for `seconds` seconds."""
    counters = Counters(131072, DRAFTS)
    steps = STEPS_PER_S * seconds
    for emitted, share in ((1, 4), (2, 3), (3, 2), (4, 1)):
        counters.tokens_per_draft.observe(emitted, steps * share // 10)
    counters.spec_decode_num_draft_tokens = DRAFTS * counters.spec_decode_num_drafts
    counters.generation_tokens = counters.spec_decode_num_drafts + counters.spec_decode_num_accepted_tokens
    requests = REQUESTS_PER_S * seconds
    counters.prompt_tokens = 500 * requests
    counters.request_success["stop"] = requests
    for histogram, value in (
        (counters.time_to_first_token, 0.2),
        (counters.inter_token_latency, 0.01),
        (counters.request_time_per_output_token, 0.01),
        (counters.e2e_request_latency, 2.0),
        (counters.request_prompt_tokens, 500),
        (counters.request_generation_tokens, 200),
    ):
        histogram.observe(value, requests)
    body = render_exposition(counters, "example/target", 1.7e9).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Engines:
    """The responses of all pods."""

    def __init__(self, hostile: Path) -> None:
        self._file, self._changed, self._forms = hostile, 0.0, dict[str, str]()
        self._began = time.monotonic()

    def form(self, address: str) -> str | None:
        """Return the form of the pod at this address; None for a valid engine."""
        if (changed := self._file.stat().st_mtime) != self._changed:
            self._changed, self._forms = changed, json.loads(self._file.read_text())
        return self._forms.get(address)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to all requests of one connection; a hostile response is the last one of its connection."""
        form = self.form(writer.get_extra_info("sockname")[0])
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            while await reader.readuntil(b"\r\n\r\n"):
                if form is not None:
                    async with contextlib.aclosing(HOSTILE_RESPONSES[form]()) as pieces:
                        async for piece in pieces:
                            writer.write(piece)
                            await writer.drain()
                    return
                writer.write(response_after(int(time.monotonic() - self._began)))
                await writer.drain()


async def serve(socket: Path, port: int, hostile: Path) -> None:
    """Serve until standard input ends."""
    async with (
        # Services listen on that port of their own addresses, and keep the requests for these.
        await asyncio.start_server(Engines(hostile).answer, "0.0.0.0", PORT, backlog=1024, reuse_port=True),
        forward_socket(socket, port),
    ):
        print("serves", flush=True)
        await asyncio.to_thread(sys.stdin.read)


@contextlib.asynccontextmanager
async def forward_socket(socket: Path, port: int) -> AsyncIterator[None]:
    """Forward the connections of a Unix socket to a port of this network's loopback."""
    forwarding: set[asyncio.Task[None] | None] = set()  # keeps references to the tasks

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding.add(task := asyncio.current_task())
        try:
            with contextlib.closing(writer):
                await relay_connection(reader, writer, "127.0.0.1", port)
        finally:
            forwarding.discard(task)

    async with await asyncio.start_unix_server(forward, socket):
        yield


def take_addresses() -> None:
    """Route the addresses of all pods to the loopback of this network."""
    with IPRoute() as ip:
        loopback = ip.link_lookup(ifname="lo")[0]
        ip.route("replace", dst=PODS, type="local", oif=loopback, table=_LOCAL_TABLE, scope="host")


if __name__ == "__main__":
    take_addresses()
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
