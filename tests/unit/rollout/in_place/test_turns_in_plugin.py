"""The calls of turns sent to the plugin's own endpoint: its windows are those that evidence counts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from aerie.api.rollout import AnalysisSpec
from aerie.api.status import TrialPod
from aerie.engine.drafter_endpoint.calls import (
    DrafterCall,
    DrafterFiles,
    DrafterSource,
    LoadDrafter,
    PrepareDrafter,
    build_request,
)
from aerie.engine.drafter_endpoint.state import DrafterState, parse_state
from aerie.rollout.in_place.evidence import count_pairs
from aerie.rollout.in_place.return_pods import plan_return
from aerie.rollout.in_place.trial import resume_trial
from aerie.rollout.in_place.turns import plan_turn
from aerie.rollout.plan import ScheduledCall
from tests.unit.controller.drafters.served_plugin import VllmCounters
from tests.unit.plugin.conftest import Client, Run, Server
from tests.unit.plugin.conftest import run as run
from tests.unit.plugin.conftest import server as server
from tests.unit.plugin.fake_engine import make_files
from tests.unit.rollout.in_place import reports

WINDOWS = 8


def test_plugin_counts_every_turn_and_returns_at_the_end(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.engine.serve_steps(0)
    server.registry.register(VllmCounters())

    async def work() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr("aerie_vllm.endpoint.time.time", lambda: reports.START.timestamp() + loop.time())

        def now() -> datetime:
            return datetime.fromtimestamp(reports.START.timestamp() + loop.time(), tz=UTC)

        async with server.started() as client:
            source = DrafterSource(folder=str(server.root / "better"))
            await send(client, PrepareDrafter(source))
            while (state := await read(client)).prepared is None or state.prepared.phase != "Ready":
                await asyncio.sleep(1)
            assert state.own is not None
            assert state.prepared.drafter is not None
            stable = reports.STABLE.model_copy(update={"digest": state.own.digest, "files": dict(state.own.files)})
            digest = DrafterFiles(make_files("better")).digest
            assert state.prepared.drafter.digest == digest
            started = now().replace(microsecond=0) + timedelta(seconds=1)
            rollout = reports.rollout(
                replaced=stable,
                digest=digest,
                files=make_files("better"),
                trial_start_time=started,
                pods=[TrialPod(name="a", uid="uid-a", index=0)],
            )
            trial = resume_trial(rollout, AnalysisSpec())
            assert trial is not None
            next_call: ScheduledCall | None = None
            for number in range(WINDOWS):
                window = trial.plan.schedule.window(number)
                await asyncio.sleep((started - now()).total_seconds() + window.start_seconds + 0.05)
                pod = reports.pod(report=await read(client))
                call, _ = plan_turn(trial, rollout, source, rollout.pods[0], pod, now())
                assert isinstance(call, LoadDrafter)
                assert next_call is None or next_call.call == call
                await send(client, call)
                # Its response was lost: the repeated call is rejected or changes nothing, and divides no window.
                await send(client, call, accepted=(200, 409))
                pod = reports.pod(report=await read(client))
                trial = count_pairs(trial, rollout, {"a": pod}, now())
                repeated_call, next_call = plan_turn(trial, rollout, source, rollout.pods[0], pod, now())
                assert repeated_call is None
            assert (trial.state.counted_pairs, trial.state.lost_pairs) == (WINDOWS // 2 - 1, 0)
            pod = reports.pod(report=await read(client))
            if (back := plan_return(pod, None, now())) is not None:
                await send(client, back)
            state = await read(client)
            assert plan_return(replace(pod, observation=replace(pod.observation, state=state)), None, now()) is None
            assert server.engine.loaded_digests() == {stable.digest}

    run(work())


async def send(client: Client, call: DrafterCall, accepted: tuple[int, ...] = (200, 202)) -> None:
    request = build_request(call)
    answer = await client.call(request.method, request.path, request.body)
    assert answer.status in accepted, answer.body


async def read(client: Client) -> DrafterState:
    return parse_state(json.dumps((await client.get("?after=0")).body).encode())
