"""The thresholds of probes, and single probes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie_lab.node.probes import ProbeState, resolve_port, run_probe


@pytest.mark.parametrize(
    ("start", "answers", "verdicts"),
    [
        (None, "+", [True]),
        (None, "--+", [None, None, True]),
        (None, "---", [None, None, False]),
        (True, "--+--+", [None] * 6),  # a success in between starts the count again
        (True, "---", [None, None, False]),
        (False, "+", [True]),
        (False, "----", [None] * 4),
        (None, "+---+", [True, None, None, False, True]),
    ],
)
def test_verdict_changes_after_three_failures_or_one_success(
    start: bool | None, answers: str, verdicts: list[bool | None]
) -> None:
    state = ProbeState(3, 1, verdict=start)
    assert [state.record(answer == "+") for answer in answers] == verdicts


@given(st.lists(st.booleans(), max_size=50), st.integers(1, 5), st.integers(1, 5))
def test_a_verdict_needs_its_threshold_of_equal_answers(answers: list[bool], failures: int, successes: int) -> None:
    state = ProbeState(failures, successes)
    last: bool | None = None
    for index, answer in enumerate(answers):
        verdict = state.record(answer)
        if verdict is not None:
            needed = successes if verdict else failures
            assert answers[index + 1 - needed : index + 1] == [verdict] * needed
            assert verdict != last
            last = verdict


def test_ports_are_resolved_by_name() -> None:
    container = {"ports": [{"name": "web", "containerPort": 8080}, {"containerPort": 1}]}
    assert [resolve_port(port, container) for port in (1, "2", "web")] == [1, 2, 8080]
    with pytest.raises(ValueError, match="other"):
        resolve_port("other", container)


async def _unused(command: Sequence[str], timeout: float) -> tuple[int | None, str]:
    raise AssertionError(f"{command} within {timeout}")


@pytest.mark.parametrize(
    ("answer", "good", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True, ""),
        (b"HTTP/1.1 302 Found\r\nLocation: http://nowhere.example\r\n\r\n", True, ""),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", False, "statuscode: 404"),
        (b"hello\r\n", False, "not HTTP"),
        (b"", False, "not HTTP"),
        (None, False, "no response within 2s"),
    ],
)
def test_http_probes(answer: bytes | None, good: bool, problem: str) -> None:
    request = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request
        request = await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    async def probe_server() -> tuple[bool, str]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            headers = [{"name": "X-Probe", "value": "yes"}]
            http_get = {"path": "/ok?a=1", "port": port, "httpHeaders": headers}
            probe = {"httpGet": http_get, "timeoutSeconds": 2 if answer is None else 60}
            return await run_probe(probe, {}, "127.0.0.1", _unused)

    succeeded, message = asyncio.run(probe_server())
    assert succeeded is good
    assert good or problem in message
    assert request.startswith(b"GET /ok?a=1 HTTP/1.1\r\n")
    assert b"X-Probe: yes\r\n" in request


def test_tcp_probes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe = {"tcpSocket": {"port": listener.getsockname()[1]}}
        assert asyncio.run(run_probe(probe, {}, "127.0.0.1", _unused)) == (True, "")
    good, problem = asyncio.run(run_probe(probe, {}, "127.0.0.1", _unused))
    assert not good
    assert "refused" in problem or "Connect call failed" in problem


@pytest.mark.parametrize(
    ("outcome", "good", "problem"),
    [((0, "fine"), True, "fine"), ((1, " bad\n"), False, "bad"), ((None, ""), False, "timed out after 3s")],
)
def test_command_probes(outcome: tuple[int | None, str], good: bool, problem: str) -> None:
    async def execute(command: Sequence[str], timeout: float) -> tuple[int | None, str]:
        assert (list(command), timeout) == (["check"], 3.0)
        return outcome

    probe = {"exec": {"command": ["check"]}, "timeoutSeconds": 3}
    succeeded, message = asyncio.run(run_probe(probe, {}, "", execute))
    assert succeeded is good
    assert problem in message


def test_a_command_that_cannot_be_run_is_a_failure() -> None:
    async def execute(_command: Sequence[str], _timeout: float) -> tuple[int | None, str]:
        raise OSError(28, "No space left on device")

    assert asyncio.run(run_probe({"exec": {"command": ["check"]}}, {}, "", execute))[0] is False
