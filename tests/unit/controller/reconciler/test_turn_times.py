"""How late the calls of a window are, whatever the size of the fleet: reconciles rest the longer the more pods there are."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from aerie.controller.clock import Clock
from aerie.controller.drafters.executor import DrafterExecutor
from aerie.controller.reconciler import REST_SECONDS_PER_OBJECT
from aerie.controller.tokens import ResourceTokens
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.engine.drafter_endpoint.calls import DrafterFiles, LoadDrafter
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.in_place.trial_pods import MAX_TRIAL_PODS
from aerie.rollout.plan import PodDrafterPlan, ScheduledCall
from tests.snapshots import build_snapshot
from tests.unit.controller.conftest import Run
from tests.unit.controller.drafters.served_plugin import KEY
from tests.unit.controller.scraped import deployment, pod, resource
from tests.unit.controller.test_tokens import CHAT, KEY_SECRET, SecretServer

WINDOW_SECONDS, WINDOW_COUNT = 8.0, 12
MAX_DELAY_SECONDS = 0.1
SWAP_SECONDS = 0.05
START = datetime(2026, 1, 1, tzinfo=UTC)
DRAFTERS = [DrafterFiles({"config.json": digit * 64, "model.safetensors": digit * 64}) for digit in "01"]
KINDS = [{"digest": drafter.digest, "files": dict(drafter.files), "kind": "eagle3"} for drafter in DRAFTERS]


class LoopClock(Clock):
    """The time of the event loop, as the time of day."""

    def now(self) -> datetime:
        return START + timedelta(seconds=asyncio.get_running_loop().time())


def turn(window: int) -> LoadDrafter:
    """Return the call of a window; each window has the other drafter."""
    expected = DRAFTERS[(window - 1) % 2].digest
    return LoadDrafter(DRAFTERS[window % 2], 60.0, expected_digest=expected, turn=f"trial/{window}", settle_seconds=2.0)


def respond(status: int, body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(status, stream=httpx.ByteStream(json.dumps(body).encode()))


@dataclass
class Pods(httpx.AsyncBaseTransport):
    """The endpoints of all pods."""

    begun: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Number and time of each window, by the pod's address."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        windows = self.begun.setdefault(request.url.host, [(0, 0.0)])
        if request.method == "PUT":
            await asyncio.sleep(SWAP_SECONDS)
            body = json.loads(request.content)
            number = int(body["turn"].rpartition("/")[2])
            if body["expected_digest"] != KINDS[windows[-1][0] % 2]["digest"]:
                return respond(409, {"reason": "LoadedChanged", "message": "another drafter is loaded."})
            windows.append((number, asyncio.get_running_loop().time()))
        return respond(200, self._describe(windows))

    def _describe(self, windows: list[tuple[int, float]]) -> dict[str, Any]:
        number, started = windows[-1]
        window = {
            "number": len(windows),
            "digest": KINDS[number % 2]["digest"],
            "turn": f"trial/{number}",
            "started": started,
            "settled": started,
            "ended": None,
            "counts": {},
        }
        return {
            "problem": None,
            "unfit": None,
            "process": {"id": "0" * 32, "started": 0.0},
            "engine": {"method": "eagle3", "ranks": 1, "counting": True},
            "own": KINDS[0],
            "loaded": KINDS[number % 2],
            "lease": {"digest": KINDS[number % 2]["digest"], "remaining_seconds": 60.0} if number % 2 else None,
            "change": None,
            "swaps": len(windows),
            "failures": 0,
            "last_failure": None,
            "last_rejection": None,
            "prepared": None,
            "windows": [window],
            "durations": {"staging": 0.0, "pause": 0.0, "swap": 0.0},
        }


def address(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250 + 1}"


async def measure_delays(pod_count: int, pods: Pods, *, plans_ahead: bool = True) -> list[float]:
    """Return by how many seconds each change of each pod on trial comes after the start of its window, the last one first."""
    snapshot: Snapshot = build_snapshot(
        resource(interval="15s"), [deployment()], pods=tuple(pod(number, address=address(number)) for number in range(pod_count))
    )
    names = [str(item["metadata"]["name"]) for item in snapshot.cluster.pods][:MAX_TRIAL_PODS]
    queue = WorkQueue()
    executor = DrafterExecutor(ResourceTokens(SecretServer(KEY), KEY_SECRET), queue.add, lambda: True, LoopClock(), pods)
    loop = asyncio.get_running_loop()

    async def reconcile(key: NamespacedName) -> None:
        """Plan the present window and the next one, as rollout/in_place does."""
        window = int(loop.time() / WINDOW_SECONDS)
        plans = []
        for name in names:
            observation = executor.observations(key).get(name)
            state = observation.state if observation is not None else None
            is_begun = state is not None and state.windows[-1].turn == turn(window).turn
            following = ScheduledCall(turn(window + 1), START + timedelta(seconds=(window + 1) * WINDOW_SECONDS))
            call = None if is_begun or state is None or window == 0 else turn(window)
            plans.append(PodDrafterPlan(name, call, None, following if plans_ahead else None))
        executor.follow(key, snapshot, plans)
        queue.add_after(key, (window + 1) * WINDOW_SECONDS - loop.time() + 0.01)

    async def work() -> None:
        while True:
            key, _ = await queue.get()
            await reconcile(key)
            queue.done(key, REST_SECONDS_PER_OBJECT * pod_count)

    async def change_objects() -> None:
        while True:
            queue.add(CHAT)
            await asyncio.sleep(0.7)

    tasks = [asyncio.create_task(part()) for part in (executor.run, work, change_objects)]
    await asyncio.sleep((WINDOW_COUNT + 1) * WINDOW_SECONDS - 0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(pods.begun) == len(names)
    return [time - number * WINDOW_SECONDS for windows in pods.begun.values() for number, time in windows if number > 0]


@pytest.mark.parametrize("pod_count", [1, 40, 1000])
def test_changes_come_at_the_start_of_their_window(run: Run, pod_count: int) -> None:
    async def work() -> None:
        delays = await measure_delays(pod_count, Pods())
        assert len(delays) == WINDOW_COUNT * min(pod_count, MAX_TRIAL_PODS), "each pod begins each window once"
        assert min(delays) >= 0.0
        assert max(delays) <= SWAP_SECONDS + MAX_DELAY_SECONDS

    run(work())
