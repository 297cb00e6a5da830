"""The traffic generator's own arithmetic and prompts; test_server tests it with real answers."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from aerie_lab.engine.load_generation.traffic import (
    RequestOutcome,
    TrafficReport,
    TrafficTarget,
    build_prompt,
    nearest_rank_percentile,
    run_open_loop,
    send_request,
)
from aerie_lab.engine.load_generation.workload import LengthDistribution, TrafficClass, Turn
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE

from .conftest import Start

KIND = TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(10), LengthDistribution(10))


def turn(number: int, at: float, *segments: tuple[str, int]) -> Turn:
    return Turn(number, at, KIND, 0, sum(tokens for _, tokens in segments) or 10, 5, segments)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 11)]
    assert [nearest_rank_percentile(values, p) for p in (50, 90, 95, 99)] == [5.0, 9.0, 10.0, 10.0]
    assert nearest_rank_percentile([7.0], 50) == 7.0
    assert nearest_rank_percentile([], 50) == 0.0


def test_a_report_counts_errors_but_not_in_the_latencies() -> None:
    report = TrafficReport(
        10.0,
        [
            RequestOutcome("a", None, 11, 0.1, 1.1),
            RequestOutcome("a", None, 21, 0.3, 4.3),
            RequestOutcome("b", "timeout", total_seconds=300.0),
        ],
    )
    summary = report.summary()
    assert (summary["all"]["requests"], summary["all"]["errors"], summary["b"]["errors"]) == (3, 1, 1)
    assert summary["all"]["e2e_p99_ms"] == pytest.approx(4300)
    assert summary["a"]["tpot_p50_ms"] == pytest.approx(100)
    assert summary["all"]["tokens_per_s"] == pytest.approx(3.2)
    assert report.errors == {"timeout": 1}


def test_prompts_of_one_session_share_their_beginning() -> None:
    first = build_prompt(turn(1, 0.0, ("system", 20), ("session", 30)), 4.0)
    second = build_prompt(turn(2, 0.0, ("system", 20), ("session", 90)), 4.0)
    other = build_prompt(turn(3, 0.0, ("system", 20), ("another", 90)), 4.0)
    assert (len(first), len(second)) == (200, 440)
    assert second.startswith(first.rstrip())
    assert other.startswith(first[:80])
    assert not other.startswith(first[:120])


def test_an_open_loop_sends_at_the_planned_times(start: Start) -> None:
    running = start()
    turns = [turn(number, 0.1 * number) for number in range(8)]
    began = time.monotonic()
    report = asyncio.run(run_open_loop(TrafficTarget(str(running.client.base_url).rstrip("/"), "acme/model"), turns))
    assert time.monotonic() - began >= 0.7
    assert (len(report.outcomes), report.errors.total()) == (8, 0)


@pytest.mark.parametrize(("ignore_eos", "error"), [(True, "wrong number of tokens"), (False, None)])
def test_answers_may_end_early_only_without_ignore_eos(ignore_eos: bool, error: str | None) -> None:
    bodies: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"usage": {"completion_tokens": 3}})

    async def send() -> RequestOutcome:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            target = TrafficTarget(
                f"http://127.0.0.1:{server.port}",
                "m",
                stream=False,
                chats=[[{"role": "user", "content": "q"}]],
                chat_fields={"chat_template_kwargs": {"complete": True}},
                ignore_eos=ignore_eos,
            )
            return await send_request(session, target, turn(0, 0.0))

    assert asyncio.run(send()).error == error
    assert bodies[0]["ignore_eos"] is ignore_eos
    assert bodies[0]["chat_template_kwargs"] == {"complete": True}
