"""Probes for greedy answers: which pods get them, at which rate, and how answers are compared. Virtual time, fake engines."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from aiohttp import web

from aerie.analysis.equivalence import EquivalenceResult, PromptDifference
from aerie.api import SpeculativeDeployment
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import Status
from aerie.controller.probes import equivalence
from aerie.controller.probes.equivalence import (
    MAX_ATTEMPTS_PER_PROMPT,
    MAX_COMPLETION_RESPONSE_BYTES,
    MAX_CONCURRENT_PROBES,
    PROMPT_TIMEOUT_SECONDS,
    EquivalenceProber,
    ProbeError,
)
from aerie.controller.scraping.http_fetch import create_http_client
from aerie.controller.work_queue import NamespacedName
from aerie.engine.completions import PROBE_PROMPTS, build_completion_request
from aerie.rollout.canary.analysis_run import start_analysis
from aerie.rollout.facts.snapshot import Snapshot
from tests.golden import Messages
from tests.snapshots import build_snapshot

from .served import Handler, serve_http

Run = Callable[[Coroutine[Any, Any, None]], None]
OLD = "2026-01-01T00:00:00Z"
CANARY, CONTROL, STABLE, OTHER = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
NUMBER = len(PROBE_PROMPTS)
CHAT = NamespacedName("default", "chat")


def completion_body(tokens: str, **likely: float) -> bytes:
    """Return a completion of one token per letter; each is by far the likeliest, or has the alternatives `likely`."""
    top = [{token: -0.1, "~": -6.0} | likely for token in tokens]
    return json.dumps({"choices": [{"logprobs": {"tokens": list(tokens), "top_logprobs": top}}]}).encode()


def pod(name: str, group: str, address: str, *, ready: bool = True) -> dict[str, Any]:
    revision, control = group.removeprefix("chat-").removesuffix("-control"), group.endswith("-control")
    labels = {"aerie.dev/name": "chat", "aerie.dev/revision": revision, "aerie.dev/control": str(control).lower()}
    owner = {"controller": True, "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{group}-hash"}
    return {
        "metadata": {"name": name, "labels": {**labels, "pod-template-hash": "hash"}, "ownerReferences": [owner]},
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {
            "podIP": address,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "engine", "started": True, "containerID": "c1", "restartCount": 0}],
        },
    }


def deployment(group: str) -> dict[str, Any]:
    revision, control = group.removeprefix("chat-").removesuffix("-control"), group.endswith("-control")
    labels = {"aerie.dev/name": "chat", "aerie.dev/revision": revision, "aerie.dev/control": str(control).lower()}
    return {
        "kind": "Deployment",
        "metadata": {"name": group, "labels": labels, "ownerReferences": [{"controller": True, "uid": "u"}]},
        "spec": {"template": {"spec": {"containers": [{"name": "engine", "image": "vllm:1", "args": ["m"]}]}}},
    }


PODS = (
    pod("a", "chat-new", CANARY),
    pod("b", "chat-old-control", CONTROL),
    pod("c", "chat-old", STABLE),
    pod("d", "chat-old", OTHER),
)


def snapshot_of(*pods: dict[str, Any], **rollout: Any) -> Snapshot:
    document = {
        "metadata": {"name": "chat", "namespace": "default", "uid": "u"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "rollout": rollout,
        },
    }
    children = tuple(map(deployment, ("chat-new", "chat-old", "chat-old-control")))
    return build_snapshot(SpeculativeDeployment.from_dict(document), children, pods=pods or PODS)


def status(
    phase: str = "WarmingUp", *, start_time: str = OLD, probe_result: EquivalenceResult | None = None, skip_reason: str = ""
) -> Status:
    canary = {"revision": "new", "change": "drafter", "startTime": start_time, "readyTime": start_time, "phase": phase}
    deployment_status = Status.model_validate({"stable": {"revision": "old"}, "canary": canary})
    if phase != "Analyzing":
        return deployment_status
    assert deployment_status.canary is not None
    assert deployment_status.stable is not None
    arms = (deployment_status.canary, deployment_status.stable)
    evidence = start_analysis(
        AnalysisSpec(), arms, (1, 1), None, 0, None, deployment_status.canary.start_time, skip_reason
    ).with_probe_result(probe_result)
    analysis = {"parameters": AnalysisSpec().to_dict(), "verdict": "Continue", "state": evidence.pack()}
    return Status.model_validate({**deployment_status.to_dict(), "analysis": analysis})


class FakeEngines:
    """Responses of the pods by address; records each request with its time."""

    def __init__(self, **responses: Any) -> None:
        self.requests: list[tuple[float, str, dict[str, Any]]] = []
        self.responses: dict[str, Any] = {
            CANARY: completion_body("abc"),
            CONTROL: completion_body("abc"),
            STABLE: completion_body("abc"),
            OTHER: completion_body("abc"),
        }
        for arm, response in responses.items():
            self.responses[{"canary": CANARY, "control": CONTROL, "stable": STABLE}[arm]] = response
        self.transport = httpx.MockTransport(self.respond)

    async def respond(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path, request.url.port) == ("POST", "/v1/completions", 8000)
        request_body = json.loads(request.content)
        self.requests.append((asyncio.get_running_loop().time(), request.url.host, request_body))
        response = self.responses[request.url.host]
        if callable(response):
            response = await response(request_body)
        code, content = (200, response) if isinstance(response, bytes) else response
        return httpx.Response(code, stream=httpx.ByteStream(content))

    def counts(self) -> dict[str, int]:
        return dict(Counter(host for _, host, _ in self.requests))


async def run_prober(engines: FakeEngines, *observations: tuple[Snapshot, Status, float]) -> EquivalenceResult | None:
    """Return the comparison of a prober that has tracked each observation for its number of seconds."""
    notified_keys: list[NamespacedName] = []
    prober = EquivalenceProber(notified_keys.append, engines.transport)
    running = asyncio.create_task(prober.run())
    try:
        for snapshot, deployment_status, seconds in observations:
            prober.track(CHAT, snapshot, deployment_status)
            await asyncio.sleep(seconds)
        comparison = prober.equivalence_result(CHAT)
        assert bool(notified_keys) == (comparison is not None), "a waiting reconcile is notified"
        return comparison
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------------- pods and rate
def test_one_pod_per_arm_gets_each_prompt_once_during_warm_up(run: Run) -> None:
    async def test() -> None:
        engines = FakeEngines()
        comparison = await run_prober(engines, (snapshot_of(), status(), 150.0))
        assert comparison == EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        assert engines.counts() == {CANARY: NUMBER, CONTROL: NUMBER, STABLE: NUMBER}
        assert [request_body["prompt"] for _, host, request_body in engines.requests if host == CANARY] == list(PROBE_PROMPTS)
        assert {request_body["model"] for _, _, request_body in engines.requests} == {"chat"}
        times = [at for at, host, _ in engines.requests if host == CANARY]
        assert [later - at for at, later in itertools.pairwise(times)] == [5.0] * (NUMBER - 1)

    run(test())


@pytest.mark.parametrize(("warmup", "seconds"), [("10s", 10 / 2 / NUMBER), ("0s", 0.2), ("24h", 5.0)])
def test_prompt_interval_follows_the_warm_up(warmup: str, seconds: float) -> None:
    assert equivalence.prompt_interval_seconds(
        snapshot_of(analysis={"warmupDuration": warmup, "maxDuration": "48h"}).resource, status()
    ) == pytest.approx(max(0.2, seconds))


def test_analysis_sends_at_most_two_prompts_per_block() -> None:
    assert equivalence.prompt_interval_seconds(snapshot_of().resource, status("Analyzing")) == 60.0
    analyzing = status("Analyzing")
    assert analyzing.analysis is not None
    parameters = AnalysisSpec.model_validate({"blockDuration": "10s"})
    with_short_blocks = analyzing.model_copy(
        update={"analysis": analyzing.analysis.model_copy(update={"parameters": parameters})}
    )
    assert equivalence.prompt_interval_seconds(snapshot_of().resource, with_short_blocks) == 5.0


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        (PODS, (CANARY, CONTROL, STABLE)),
        (PODS[:2], (CANARY, CONTROL, CONTROL)),
        ((PODS[0], PODS[2], PODS[3]), (CANARY, STABLE, OTHER)),
        ((PODS[0], PODS[3]), (CANARY, OTHER, OTHER)),
        ((PODS[0], pod("b", "chat-old-control", CONTROL, ready=False), *PODS[2:]), (CANARY, STABLE, OTHER)),
        ((PODS[0], PODS[1], pod("b2", "chat-old-control", "10.0.0.9"), PODS[2]), (CANARY, CONTROL, STABLE)),
        ((pod("a", "chat-new", CANARY, ready=False), *PODS[1:]), None),
        (PODS[:1], None),
    ],
)
def test_one_pod_per_arm_is_selected_for_probes(pods: tuple[dict[str, Any], ...], expected: tuple[str, str, str] | None) -> None:
    probe_urls = equivalence.find_probe_urls(snapshot_of(*pods), status())
    urls = expected and equivalence.ProbeUrls(*(f"http://{address}:8000/v1/completions" for address in expected))
    assert probe_urls == urls


def test_foreign_pods_are_not_probed() -> None:
    foreign_pod = pod("a", "chat-new", CANARY)
    foreign_pod["metadata"]["ownerReferences"] = []
    assert equivalence.find_probe_urls(snapshot_of(foreign_pod, *PODS[1:]), status()) is None


@pytest.mark.parametrize(
    ("snapshot", "deployment_status"),
    [
        (snapshot_of(), status("Starting")),
        (snapshot_of(), status("Held")),
        (snapshot_of(), status("Ramping")),
        (snapshot_of(), Status()),
        (snapshot_of(paused=True), status()),
        (snapshot_of(analysis={"outputEquivalence": "Disabled"}), status()),
        (snapshot_of(), status("Analyzing", probe_result=EquivalenceResult())),
        (snapshot_of(), status("Analyzing", skip_reason="because")),
    ],
)
def test_no_probe_is_sent_outside_warm_up_and_analysis(run: Run, snapshot: Snapshot, deployment_status: Status) -> None:
    async def test() -> None:
        engines = FakeEngines()
        assert await run_prober(engines, (snapshot, deployment_status, 600.0)) is None
        assert engines.requests == []

    run(test())


def test_probes_wait_until_all_arms_serve(run: Run) -> None:
    async def test() -> None:
        engines = FakeEngines()
        comparison = await run_prober(engines, (snapshot_of(PODS[0]), status(), 60.0), (snapshot_of(), status(), 130.0))
        assert comparison == EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        assert min(at for at, _, _ in engines.requests) >= 60.0

    run(test())


def test_remaining_prompts_are_sent_in_the_analysis(run: Run) -> None:
    async def test() -> None:
        engines = FakeEngines()
        comparison = EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        observations = [(snapshot_of(), status(), 48.0), (snapshot_of(), status("Analyzing"), 15 * 60.0)]
        assert await run_prober(engines, *observations) == comparison
        assert engines.counts()[CANARY] == NUMBER
        assert (
            await run_prober(engines, *observations, (snapshot_of(), status("Analyzing", probe_result=comparison), 1.0))
            == comparison
        )
        engines.requests.clear()
        prober = EquivalenceProber(lambda _: None, engines.transport)
        prober.track(CHAT, snapshot_of(), status())
        prober.track(CHAT, snapshot_of(), status("Ramping"))
        assert prober.equivalence_result(CHAT) is None

    run(test())


def test_new_canary_is_probed_again(run: Run) -> None:
    async def test() -> None:
        engines = FakeEngines()
        new_canary = status(start_time="2026-01-02T00:00:00Z")
        comparison = await run_prober(
            engines, (snapshot_of(), status(), 150.0), (snapshot_of(), new_canary, 0.0), (snapshot_of(), new_canary, 150.0)
        )
        assert comparison == EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        assert engines.counts()[CANARY] == 2 * NUMBER

    run(test())


# -------------------------------------------------------------------------------------------------------------------- comparison
def test_differences_are_stored_and_answers_are_not(run: Run) -> None:
    async def respond_with_difference(request_body: dict[str, Any]) -> bytes:
        return completion_body("abx") if request_body["prompt"] in PROBE_PROMPTS[:3] else completion_body("abc")

    async def respond_with_near_tie(request_body: dict[str, Any]) -> bytes:
        return (
            completion_body("abd", d=-0.1, c=-0.2)
            if request_body["prompt"] == PROBE_PROMPTS[5]
            else completion_body("azc")
            if request_body["prompt"] == PROBE_PROMPTS[7]
            else completion_body("abc")
        )

    async def test() -> None:
        comparison = await run_prober(
            FakeEngines(canary=respond_with_difference, stable=respond_with_near_tie), (snapshot_of(), status(), 150.0)
        )
        assert comparison is not None
        expected = (
            [PromptDifference(2)] * 3
            + [PromptDifference()] * 2
            + [PromptDifference(None, 2), PromptDifference(), PromptDifference(None, 1)]
        )
        assert comparison.compared_prompts == tuple(expected + [PromptDifference()] * (NUMBER - 8))

    run(test())


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ((401, b'{"error": "Unauthorized"}'), "status 401"),
        (
            (404, b'{"error": {"message": "The model `chat` does not exist.", "type": "NotFoundError"}}'),
            "status 404 with an error of vLLM",
        ),
        ((400, b"<html>"), "status 400"),
        (b"{}", "no log probabilities"),
        (b"x" * (MAX_COMPLETION_RESPONSE_BYTES + 1), "too large"),
    ],
)
def test_rejected_probe_is_not_retried_and_ends_the_comparison(run: Run, messages: Messages, answer: Any, name: str) -> None:
    async def test() -> None:
        engines = FakeEngines(canary=answer)
        comparison = await run_prober(engines, (snapshot_of(), status(), 150.0))
        assert comparison is not None
        assert (comparison.compared_prompts, comparison.prompt_count) == ((), NUMBER)
        messages.check(name, comparison.skip_reason)
        assert engines.counts() == {CANARY: 1}

    run(test())


def test_failed_prompt_is_retried_a_few_times_and_then_excluded(run: Run) -> None:
    attempts: Counter[str] = Counter()

    async def respond_sometimes(request_body: dict[str, Any]) -> Any:
        attempts[request_body["prompt"]] += 1
        fails = request_body["prompt"] == PROBE_PROMPTS[4] or (
            request_body["prompt"] == PROBE_PROMPTS[2] and attempts[PROBE_PROMPTS[2]] == 1
        )
        return (503, b"") if fails else completion_body("abc")

    async def test() -> None:
        comparison = await run_prober(FakeEngines(control=respond_sometimes), (snapshot_of(), status(), 400.0))
        assert comparison == EquivalenceResult(
            tuple([PromptDifference()] * (NUMBER - 1)), NUMBER, f"http://{CONTROL}:8000/v1/completions answered with status 503"
        )
        assert (attempts[PROBE_PROMPTS[4]], attempts[PROBE_PROMPTS[2]], attempts[PROBE_PROMPTS[0]]) == (
            MAX_ATTEMPTS_PER_PROMPT,
            2,
            1,
        )

    run(test())


def test_silent_engine_is_probed_at_growing_intervals_until_the_limit(run: Run) -> None:
    async def silent(_: dict[str, Any]) -> bytes:
        await asyncio.sleep(1e6)
        return b""

    async def test() -> None:
        engines = FakeEngines(canary=silent)
        comparison = await run_prober(engines, (snapshot_of(), status(), 12 * 3600.0))
        assert comparison == EquivalenceResult((), NUMBER, f"http://{CANARY}:8000/v1/completions did not answer in time")
        assert engines.counts() == {CANARY: MAX_ATTEMPTS_PER_PROMPT * NUMBER}
        times = [at for at, _, _ in engines.requests]
        assert times[-1] - times[-2] == 60.0 > PROMPT_TIMEOUT_SECONDS

    run(test())


def test_concurrent_probes_are_bounded_over_all_resources(run: Run) -> None:
    active = 0
    max_active = 0

    async def slow(_: dict[str, Any]) -> bytes:
        nonlocal active, max_active
        active += 1
        max_active = max(max_active, active)
        await asyncio.sleep(1.0)
        active -= 1
        return completion_body("abc")

    async def test() -> None:
        notified_keys: list[NamespacedName] = []
        prober = EquivalenceProber(notified_keys.append, FakeEngines(canary=slow).transport)
        running = asyncio.create_task(prober.run())
        keys = [NamespacedName("default", f"chat-{number}") for number in range(3 * MAX_CONCURRENT_PROBES)]
        for key in keys:
            prober.track(key, snapshot_of(), status())
        await asyncio.sleep(600)
        assert sorted(notified_keys) == sorted(keys)
        assert max_active == MAX_CONCURRENT_PROBES
        prober.forget(keys[0])
        assert prober.equivalence_result(keys[0]) is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test())


# ---------------------------------------------------------------------------------------------------------- over a real network
def send_to_server(handler: Handler) -> Any:
    """Return the completion of a server with this handler."""

    async def send() -> Any:
        async with serve_http("POST", "/v1/completions", handler) as url, create_http_client() as client:
            return await equivalence.send_prompt(client, f"{url}/v1/completions", build_completion_request("chat", "Hello"))

    return asyncio.run(send())


def test_probe_sends_json_and_reads_the_completion() -> None:
    async def handle(request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        assert (await request.json())["prompt"] == "Hello"
        return web.Response(body=completion_body("abc"), content_type="application/json")

    assert send_to_server(handle).tokens == ("a", "b", "c")


def test_endless_response_is_aborted() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        except ConnectionError:
            return response

    with pytest.raises(ProbeError, match="answered with more than") as failure:
        send_to_server(handle)
    assert failure.value.is_final


def test_a_redirect_is_not_followed() -> None:
    async def handle(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    with pytest.raises(ProbeError, match="status 302"):
        send_to_server(handle)


def test_closed_port_is_a_retryable_error() -> None:
    async def send() -> None:
        async with create_http_client() as client:
            await equivalence.send_prompt(client, "http://127.0.0.1:1/v1/completions", b"{}")

    with pytest.raises(ProbeError, match="cannot be reached") as failure:
        asyncio.run(send())
    assert not failure.value.is_final
