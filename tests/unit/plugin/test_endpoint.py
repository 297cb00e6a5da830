"""The endpoint's guard: who may call it, with what, and what it answers to all others."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from aerie_vllm import endpoint as endpoint_module
from aerie_vllm.endpoint import BODY_SECONDS, MAX_BODY_BYTES, DrafterEndpoint
from tests.unit.plugin.conftest import TOKEN, Client, Run, Server, application
from tests.unit.plugin.fake_engine import make_drafter, make_files

OWN, BETTER = make_drafter("own")["digest"], make_drafter("better")["digest"]


def test_without_a_token_file_there_is_no_endpoint(run: Run, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.delenv("AERIE_DRAFTER_TOKEN_FILE")

    async def work() -> None:
        client = Client(DrafterEndpoint(application), server.engine, server.root)
        assert (await client.call("GET", "/aerie/drafter")).status == 418
        assert (await client.ready()).status == 418

    run(work())


def test_a_root_that_is_no_absolute_path_is_an_error(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    del server
    monkeypatch.setenv("AERIE_DRAFTER_ROOTS", "/drafters:drafters")
    with pytest.raises(ValueError, match="AERIE_DRAFTER_ROOTS has 'drafters', which is no absolute path"):
        DrafterEndpoint(application)


def test_all_other_requests_reach_the_application(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            for path in ("/v1/completions", "/aerie", "/metrics", "/health"):
                assert (await client.call("POST", path, token=None)).status == 418

    run(work())


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        TOKEN,
        f"Bearer {TOKEN.upper()}",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/aerie/drafter"), ("PUT", "/aerie/drafter"), ("POST", "/aerie/drafter/lease")]
)
def test_a_call_without_the_token_is_rejected(
    run: Run, server: Server, method: str, path: str, authorization: str | None
) -> None:
    async def work() -> None:
        async with server.started() as client:
            calls = len(server.engine.calls)
            headers = {} if authorization is None else {"authorization": authorization}
            answer = await client.call(method, path, b"x" * 200_000, token=None, headers=headers)
            assert (answer.status, answer.body["reason"]) == (401, "Unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["connection"] == "close"
            assert len(server.engine.calls) == calls

    run(work())


def test_the_token_may_rotate(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            server.token_file.write_text("another-token-of-some-length")
            assert (await client.call("GET", "/aerie/drafter")).status == 401
            assert (await client.call("GET", "/aerie/drafter", token="another-token-of-some-length")).status == 200

    run(work())


@pytest.mark.parametrize("text", ["", "short", None])
def test_an_empty_token_file_admits_nobody(run: Run, server: Server, text: str | None) -> None:
    async def work() -> None:
        async with server.started() as client:
            if text is None:
                server.token_file.unlink()
            else:
                server.token_file.write_text(text)
            answer = await client.call("GET", "/aerie/drafter", token=text or "")
            assert (answer.status, answer.body["reason"]) == (503, "NoToken")

    run(work())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/aerie/drafter", 405),
        ("PATCH", "/aerie/drafter", 405),
        ("GET", "/aerie/drafter/lease", 405),
        ("PUT", "/aerie/ready", 405),
        ("GET", "/aerie/drafter/", 404),
        ("GET", "/aerie/drafter/../drafter", 404),
        ("GET", "/aerie/", 404),
        ("GET", "/aerie//drafter", 404),
    ],
)
def test_other_paths_and_methods(run: Run, server: Server, method: str, path: str, status: int) -> None:
    async def work() -> None:
        async with server.started() as client:
            answer = await client.call(method, path)
            assert answer.status == status
            assert (status == 405) == ("allow" in answer.headers)

    run(work())


def valid_body(**fields: object) -> dict[str, object]:
    return {"folder": "/drafters/better", "files": make_files("better"), "lease_seconds": 60, **fields}


SHA = "0" * 64
INVALID_BODIES: list[tuple[object, str]] = [
    (b"", "InvalidBody"),
    (b"\xff\xfe", "InvalidBody"),
    (b"{", "InvalidBody"),
    (b"[" * 60_000, "InvalidBody"),
    (b"9" * 60_000, "InvalidBody"),
    (b'{"files": {}, "files": {}}', "InvalidBody"),
    (json.dumps(valid_body()).replace("60", "NaN").encode(), "InvalidBody"),
    (json.dumps(valid_body()).replace("60", "1e999").encode(), "InvalidField"),
    ([], "InvalidBody"),
    ("text", "InvalidBody"),
    ({}, "MissingField"),
    (valid_body(path="/etc"), "UnknownField"),
    (valid_body(folder=7), "InvalidField"),
    (valid_body(files=[]), "InvalidField"),
    (valid_body(files={}), "InvalidField"),
    (valid_body(files={"config.json": SHA}), "InvalidField"),
    (valid_body(files={"a.safetensors": SHA, "b.safetensors": SHA}), "InvalidField"),
    (valid_body(files={f"{index}.safetensors": SHA for index in range(100)}), "InvalidField"),
    (valid_body(files={"config.json": SHA, "pytorch_model.bin": SHA}), "InvalidField"),
    (valid_body(files={"config.json": SHA, "../other/model.safetensors": SHA}), "InvalidField"),
    (valid_body(files={"config.json": SHA, "/etc/model.safetensors": SHA}), "InvalidField"),
    (valid_body(files={"config.json": SHA, "model.safetensors\0": SHA}), "InvalidField"),
    (valid_body(files={"config.json": SHA, "model.safetensors": SHA.upper() + "A"}), "InvalidField"),
    (valid_body(files={"config.json": SHA, "model.safetensors": None}), "InvalidField"),
    (valid_body(lease_seconds=True), "InvalidField"),
    (valid_body(lease_seconds="60"), "InvalidField"),
    (valid_body(lease_seconds=0), "InvalidField"),
    (valid_body(lease_seconds=-1), "InvalidField"),
    (valid_body(lease_seconds=1e9), "InvalidField"),
    (valid_body(expected_digest="own"), "InvalidField"),
    (valid_body(turn="a b"), "InvalidField"),
    (valid_body(turn="x" * 65), "InvalidField"),
    (valid_body(settle_seconds=None), "InvalidField"),
    (valid_body(settle_seconds=-1), "InvalidField"),
]


@pytest.mark.parametrize(("body", "reason"), INVALID_BODIES)
def test_a_body_that_is_no_change_is_rejected(run: Run, server: Server, body: object, reason: str) -> None:
    async def work() -> None:
        async with server.started() as client:
            calls = len(server.engine.calls)
            answer = await client.call("PUT", "/aerie/drafter", body)
            assert (answer.status, answer.body["reason"]) == (400, reason)
            assert len(answer.body["message"]) < 400
            assert len(server.engine.calls) == calls

    run(work())


def test_a_body_is_limited(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            for headers in ({}, {"content-length": str(MAX_BODY_BYTES + 1)}):
                answer = await client.call("PUT", "/aerie/drafter", b" " * (MAX_BODY_BYTES + 1), headers=headers)
                assert (answer.status, answer.body["reason"]) == (413, "BodyTooLarge")

    run(work())


@pytest.mark.parametrize("disconnects", [False, True])
def test_a_body_that_does_not_arrive(run: Run, server: Server, disconnects: bool) -> None:
    async def work() -> None:
        async with server.started() as client:
            sent: list[Any] = []

            async def receive() -> dict[str, Any]:
                if disconnects:
                    return {"type": "http.disconnect"}
                await asyncio.sleep(1.0)
                return {"type": "http.request", "body": b" ", "more_body": True}

            async def send(message: Any) -> None:
                sent.append(message)

            headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
            scope = {"type": "http", "method": "PUT", "path": "/aerie/drafter", "query_string": b"", "headers": headers}
            started = asyncio.get_running_loop().time()
            await client.endpoint(scope, receive, send)
            assert sent[0]["status"] == (400 if disconnects else 408)
            assert asyncio.get_running_loop().time() - started <= BODY_SECONDS + 0.01

    run(work())


@pytest.mark.parametrize("query", ["after=x", "after=-1", "after=1&after=2", "before=1", "after=99999999999999999999", "after=²"])
def test_a_query_that_is_not_after(run: Run, server: Server, query: str) -> None:
    async def work() -> None:
        async with server.started() as client:
            answer = await client.call("GET", f"/aerie/drafter?{query}")
            assert (answer.status, answer.body["reason"]) == (400, "InvalidQuery")

    run(work())


def link_folder_out(server: Server) -> str:
    outside = server.root.parent / "outside"
    (server.root / "better").rename(outside)
    (server.root / "better").symlink_to(outside)
    return str(server.root / "better")


def link_file_out(server: Server) -> str:
    file = server.root / "better" / "model.safetensors"
    file.unlink()
    file.symlink_to("/dev/zero")
    return str(server.root / "better")


def replace_by_pipe(server: Server) -> str:
    file = server.root / "better" / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    return str(server.root / "better")


def remove_file(server: Server) -> str:
    (server.root / "better" / "model.safetensors").unlink()
    return str(server.root / "better")


@pytest.mark.parametrize(
    ("folder", "status", "reason"),
    [
        ("better", 400, "InvalidFolder"),
        ("{root}/better\0", 400, "InvalidFolder"),
        ("{root}/../outside", 403, "FolderOutsideRoots"),
        ("{root}-others/better", 403, "FolderOutsideRoots"),
        ("/", 403, "FolderOutsideRoots"),
        ("/proc/self/root/etc", 403, "FolderOutsideRoots"),
        ("{root}/missing", 422, "FileMissing"),
        (link_folder_out, 403, "FolderOutsideRoots"),
        (link_file_out, 403, "LinkOutsideRoots"),
        (replace_by_pipe, 422, "NotAFile"),
        (remove_file, 422, "FileMissing"),
    ],
)
def test_a_folder_is_below_a_root(run: Run, server: Server, folder: Any, status: int, reason: str) -> None:
    path = folder.format(root=server.root) if isinstance(folder, str) else folder(server)

    async def work() -> None:
        async with server.started() as client:
            answer = await client.put("better", folder=path)
            assert (answer.status, answer.body["reason"]) == (status, reason)
            assert "aerie_drafter_stage" not in server.engine.calls
            assert (await client.get()).loaded == OWN

    run(work())


def test_links_below_the_root_are_followed(run: Run, server: Server) -> None:
    """A ConfigMap's volume and the Hub's cache consist of links."""
    blob = server.root / "blobs" / "1"
    blob.parent.mkdir()
    file = server.root / "better" / "model.safetensors"
    file.rename(blob)
    file.symlink_to(Path("..") / "blobs" / "1")

    async def work() -> None:
        async with server.started() as client:
            assert (await client.put("better")).loaded == BETTER

    run(work())


def test_an_error_of_the_endpoint_does_not_reach_the_application(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(query: bytes) -> int:
        raise RuntimeError(query.decode())

    monkeypatch.setattr(endpoint_module, "_parse_after", fail)

    async def work() -> None:
        async with server.started() as client:
            answer = await client.call("GET", "/aerie/drafter?after=1")
            assert (answer.status, answer.body["reason"]) == (500, "InternalError")
            assert "after=1" not in answer.body["message"]
        assert "RuntimeError: after=1" in caplog.text

    run(work())


def test_before_the_server_has_started(run: Run, server: Server) -> None:
    async def work() -> None:
        client = Client(DrafterEndpoint(application, registry=server.registry), server.engine, server.root)
        assert (await client.call("GET", "/aerie/drafter")).body["reason"] == "NotStarted"
        assert (await client.ready()).status == 503

    run(work())


def test_rejections_are_counted_by_reason(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.call("GET", "/aerie/drafter", token="wrong")
            await client.call("PUT", "/aerie/drafter", b"{")
            await client.call("PUT", "/aerie/drafter", b"{")

    run(work())
    assert server.registry.get_sample_value("aerie_drafter_refusals_total", {"reason": "Unauthorized"}) == 1
    assert server.registry.get_sample_value("aerie_drafter_refusals_total", {"reason": "InvalidBody"}) == 2
