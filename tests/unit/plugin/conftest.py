"""The endpoint in front of a fake engine, in virtual time: its clock jumps to the next timer when nothing else runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from aerie_vllm.endpoint import DrafterEndpoint
from aerie_vllm.rejection import RejectionError
from aerie_vllm.requests import DrafterFiles, DrafterSource
from aerie_vllm.source_reader import SourceFiles
from tests.unit.controller.conftest import VirtualLoop
from tests.unit.plugin.fake_engine import FakeEngineClient, make_files

TOKEN = "a-token-of-32-characters-at-least"
Message = MutableMapping[str, Any]
Run = Callable[[Coroutine[Any, Any, None]], None]


class PluginLoop(VirtualLoop):
    """Event loop in virtual time, which runs the work of threads itself: its clock would not wait for them."""

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


@pytest.fixture
def run() -> Run:
    """Runs a coroutine to its end in virtual time."""

    def run_virtually(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=PluginLoop) as runner:
            runner.run(work)

    return run_virtually


@dataclass
class Answer:
    """An answer of the endpoint, or of the application behind it."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def loaded(self) -> str:
        """The digest of the loaded drafter."""
        return str(self.body["loaded"]["digest"])


COMMIT = "0123456789" * 4


class FakeSources:
    """The folders and the Hub that sources are read from: the last part of a source's name is its drafter's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds = 2.0
        """Time of a read."""
        self.problems: dict[str, RejectionError] = {}
        """Why a drafter cannot be read, by its name."""
        self.reads: list[str] = []
        self.needed: list[Sequence[str] | None] = []
        """Digests of the drafters that each read must not remove."""
        self.active = self.max_active = 0
        """Reads in progress, now and at most."""

    async def read(self, source: DrafterSource, needed: Sequence[str] | None = None) -> SourceFiles:
        """Return the source's files, as `source_reader.read_source` does."""
        name = (source.folder or source.repository or "").rpartition("/")[2]
        self.reads.append(name)
        self.needed.append(needed)
        self.active += 1
        self.max_active = max(self.max_active, self.active)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.active -= 1
        if name in self.problems:
            raise self.problems[name]
        return SourceFiles(DrafterFiles(str(self.root / name), make_files(name)), COMMIT if source.repository else None)


class Client:
    """A client of the server, with the token."""

    def __init__(self, endpoint: DrafterEndpoint, engine: FakeEngineClient, root: Path) -> None:
        self.endpoint, self.engine, self.root = endpoint, engine, root

    async def call(
        self, method: str, path: str, body: object = None, *, token: str | None = TOKEN, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request with a JSON body, or with bytes as they are."""
        encoded = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        all_headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        all_headers |= headers or {}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
        }
        parts = [encoded[start : start + 4096] for start in range(0, len(encoded), 4096)] or [b""]
        messages = [
            {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)} for index, part in enumerate(parts)
        ]
        sent: list[Message] = []

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        await self.endpoint(scope, receive, send)
        answer_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], answer_headers, json.loads(sent[1]["body"]))

    async def get(self, query: str = "") -> Answer:
        """Read the state."""
        answer = await self.call("GET", f"/aerie/drafter{query}")
        assert answer.status == 200
        return answer

    async def put(self, name: str, lease_seconds: float | None = 60, **fields: object) -> Answer:
        """Load the drafter with this name from its folder."""
        body = {"folder": str(self.root / name), "files": make_files(name), "lease_seconds": lease_seconds, **fields}
        return await self.call("PUT", "/aerie/drafter", body)

    async def prepare(self, name: str, **fields: object) -> Answer:
        """Prepare the drafter with this name: from its folder, or from the Hub if `fields` has a revision."""
        source = {"repository": f"owner/{name}", **fields} if fields else {"folder": str(self.root / name)}
        return await self.call("POST", "/aerie/drafter/prepare", source)

    async def delete(self) -> Answer:
        """Return to the own drafter."""
        return await self.call("DELETE", "/aerie/drafter")

    async def renew(self, digest: str, lease_seconds: float = 60) -> Answer:
        """Renew a lease."""
        return await self.call("POST", "/aerie/drafter/lease", {"digest": digest, "lease_seconds": lease_seconds})

    async def isolate(self, lease_seconds: float = 60) -> Answer:
        """Isolate the pod, or renew the isolation."""
        return await self.call("POST", "/aerie/isolation", {"lease_seconds": lease_seconds})

    async def ready(self) -> Answer:
        """Read the readiness, as the kubelet does."""
        return await self.call("GET", "/aerie/ready", token=None)


async def application(scope: Message, receive: Callable[[], Any], send: Callable[[Message], Any]) -> None:
    """Answer all requests with 418, and wait for the end of the server."""
    if scope["type"] == "lifespan":
        await receive()
        return
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


class Server:
    """A server with the endpoint, and what it reads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.token_file, self.expected = folder / "drafters", folder / "token", folder / "expected.json"
        self.registry = prometheus_client.CollectorRegistry()
        self.engine = FakeEngineClient(registry=self.registry)
        self.sources = FakeSources(self.root)
        self.token_file.write_text(f"{TOKEN}\n")
        monkeypatch.setenv("AERIE_DRAFTER_TOKEN_FILE", str(self.token_file))
        monkeypatch.setenv("AERIE_DRAFTER_ROOTS", str(self.root))
        for name in ("own", "better", "worse", "other"):
            self.add_drafter(name)

    def add_drafter(self, name: str) -> None:
        """Write the files of a drafter."""
        folder = self.root / name
        folder.mkdir(parents=True)
        for file in make_files(name):
            (folder / file).write_text(name)

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[Client]:
        """Run the server until the end of the block, and check what must never happen."""
        endpoint = DrafterEndpoint(application, registry=self.registry, read_source=self.sources.read)
        end = asyncio.Event()
        scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))}
        lifespan = asyncio.ensure_future(endpoint(scope, end.wait, None))  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        yield Client(endpoint, self.engine, self.root)
        end.set()
        await lifespan
        assert self.engine.violations == []
        assert self.sources.active == 0, "a process has not ended"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that is not started yet."""
    return Server(tmp_path, monkeypatch)
