"""Which pods are asked for greedy answers, how fast, and what becomes of what they say. Time is virtual, engines are made up."""

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

from .served import Answer, served

Run = Callable[[Coroutine[Any, Any, None]], None]
OLD = "2026-01-01T00:00:00Z"
CANARY, CONTROL, STABLE, OTHER = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
NUMBER = len(PROBE_PROMPTS)
CHAT = NamespacedName("default", "chat")


def body(tokens: str, **likely: float) -> bytes:
    """An answer of one token a letter; each is by far the likeliest, or as `likely` says."""
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


def observed(*found: dict[str, Any], **rollout: Any) -> Snapshot:
    document = {
        "metadata": {"name": "chat", "namespace": "default", "uid": "u"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "rollout": rollout,
        },
    }
    children = tuple(map(deployment, ("chat-new", "chat-old", "chat-old-control")))
    return build_snapshot(SpeculativeDeployment.from_dict(document), children, pods=found or PODS)


def status(phase: str = "WarmingUp", *, began: str = OLD, answers: EquivalenceResult | None = None, unasked: str = "") -> Status:
    canary = {"revision": "new", "change": "drafter", "startTime": began, "readyTime": began, "phase": phase}
    found = Status.model_validate({"stable": {"revision": "old"}, "canary": canary})
    if phase != "Analyzing":
        return found
    assert found.canary is not None
    assert found.stable is not None
    arms = (found.canary, found.stable)
    evidence = start_analysis(AnalysisSpec(), arms, (1, 1), None, 0, None, found.canary.start_time, unasked).with_probe_result(
        answers
    )
    analysis = {"parameters": AnalysisSpec().to_dict(), "verdict": "Continue", "state": evidence.pack()}
    return Status.model_validate({**found.to_dict(), "analysis": analysis})


class Engines:
    """Answers of the pods, by address; every request is recorded with its time."""

    def __init__(self, **special: Any) -> None:
        self.asked: list[tuple[float, str, dict[str, Any]]] = []
        self.special: dict[str, Any] = {CANARY: body("abc"), CONTROL: body("abc"), STABLE: body("abc"), OTHER: body("abc")}
        for name, answer in special.items():
            self.special[{"canary": CANARY, "control": CONTROL, "stable": STABLE}[name]] = answer
        self.transport = httpx.MockTransport(self.answer)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path, request.url.port) == ("POST", "/v1/completions", 8000)
        asked = json.loads(request.content)
        self.asked.append((asyncio.get_running_loop().time(), request.url.host, asked))
        answer = self.special[request.url.host]
        if callable(answer):
            answer = await answer(asked)
        code, content = (200, answer) if isinstance(answer, bytes) else answer
        return httpx.Response(code, stream=httpx.ByteStream(content))

    def counts(self) -> dict[str, int]:
        return dict(Counter(host for _, host, _ in self.asked))


async def told(engines: Engines, *looks: tuple[Snapshot, Status, float]) -> EquivalenceResult | None:
    """What a prober has after it has followed each look for so many seconds."""
    heard: list[NamespacedName] = []
    prober = EquivalenceProber(heard.append, engines.transport)
    running = asyncio.create_task(prober.run())
    try:
        for seen, state, seconds in looks:
            prober.track(CHAT, seen, state)
            await asyncio.sleep(seconds)
        found = prober.equivalence_result(CHAT)
        assert bool(heard) == (found is not None), "who waits is told"
        return found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------------- whom, and how fast
def test_one_pod_of_each_arm_is_asked_every_prompt_once_within_half_of_the_warm_up(run: Run) -> None:
    async def test() -> None:
        engines = Engines()
        found = await told(engines, (observed(), status(), 150.0))
        assert found == EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        assert engines.counts() == {CANARY: NUMBER, CONTROL: NUMBER, STABLE: NUMBER}
        assert [asked["prompt"] for _, host, asked in engines.asked if host == CANARY] == list(PROBE_PROMPTS)
        assert {asked["model"] for _, _, asked in engines.asked} == {"chat"}
        times = [at for at, host, _ in engines.asked if host == CANARY]
        assert [later - at for at, later in itertools.pairwise(times)] == [5.0] * (NUMBER - 1)

    run(test())


@pytest.mark.parametrize(("warmup", "seconds"), [("10s", 10 / 2 / NUMBER), ("0s", 0.2), ("24h", 5.0)])
def test_the_pace_follows_the_warm_up(warmup: str, seconds: float) -> None:
    assert equivalence.prompt_interval_seconds(
        observed(analysis={"warmupDuration": warmup, "maxDuration": "48h"}), status()
    ) == pytest.approx(max(0.2, seconds))


def test_in_the_analysis_two_are_asked_in_a_block_at_most() -> None:
    assert equivalence.prompt_interval_seconds(observed(), status("Analyzing")) == 60.0
    slow = status("Analyzing")
    assert slow.analysis is not None
    parameters = AnalysisSpec.model_validate({"blockDuration": "10s"})
    quick = slow.model_copy(update={"analysis": slow.analysis.model_copy(update={"parameters": parameters})})
    assert equivalence.prompt_interval_seconds(observed(), quick) == 5.0


@pytest.mark.parametrize(
    ("found", "expected"),
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
def test_whom(found: tuple[dict[str, Any], ...], expected: tuple[str, str, str] | None) -> None:
    pods = equivalence.find_probe_urls(observed(*found), status())
    urls = expected and equivalence.ProbeUrls(*(f"http://{address}:8000/v1/completions" for address in expected))
    assert pods == urls


def test_pods_that_the_resource_does_not_own_are_not_asked() -> None:
    strange = pod("a", "chat-new", CANARY)
    strange["metadata"]["ownerReferences"] = []
    assert equivalence.find_probe_urls(observed(strange, *PODS[1:]), status()) is None


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (observed(), status("Starting")),
        (observed(), status("Held")),
        (observed(), status("Ramping")),
        (observed(), Status()),
        (observed(paused=True), status()),
        (observed(analysis={"outputEquivalence": "Disabled"}), status()),
        (observed(), status("Analyzing", answers=EquivalenceResult())),
        (observed(), status("Analyzing", unasked="because")),
    ],
)
def test_nobody_is_asked_otherwise(run: Run, seen: Snapshot, state: Status) -> None:
    async def test() -> None:
        engines = Engines()
        assert await told(engines, (seen, state, 600.0)) is None
        assert engines.asked == []

    run(test())


def test_while_an_arm_does_not_serve_nothing_is_asked_and_nothing_lost(run: Run) -> None:
    async def test() -> None:
        engines = Engines()
        found = await told(engines, (observed(PODS[0]), status(), 60.0), (observed(), status(), 130.0))
        assert found == EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        assert min(at for at, _, _ in engines.asked) >= 60.0

    run(test())


def test_what_the_warm_up_leaves_is_asked_in_the_analysis_and_stays_until_it_ends(run: Run) -> None:
    async def test() -> None:
        engines = Engines()
        done = EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        looks = [(observed(), status(), 48.0), (observed(), status("Analyzing"), 15 * 60.0)]
        assert await told(engines, *looks) == done
        assert engines.counts()[CANARY] == NUMBER
        assert await told(engines, *looks, (observed(), status("Analyzing", answers=done), 1.0)) == done
        engines.asked.clear()
        prober = EquivalenceProber(lambda _: None, engines.transport)
        prober.track(CHAT, observed(), status())
        prober.track(CHAT, observed(), status("Ramping"))
        assert prober.equivalence_result(CHAT) is None

    run(test())


def test_another_canary_is_asked_anew(run: Run) -> None:
    async def test() -> None:
        engines = Engines()
        again = status(began="2026-01-02T00:00:00Z")
        found = await told(engines, (observed(), status(), 150.0), (observed(), again, 0.0), (observed(), again, 150.0))
        assert found == EquivalenceResult(tuple([PromptDifference()] * NUMBER), NUMBER)
        assert engines.counts()[CANARY] == 2 * NUMBER

    run(test())


# ------------------------------------------------------------------------------------------------------------------ what they say
def test_differences_are_kept_and_answers_are_not(run: Run) -> None:
    async def odd(asked: dict[str, Any]) -> bytes:
        return body("abx") if asked["prompt"] in PROBE_PROMPTS[:3] else body("abc")

    async def near(asked: dict[str, Any]) -> bytes:
        return (
            body("abd", d=-0.1, c=-0.2)
            if asked["prompt"] == PROBE_PROMPTS[5]
            else body("azc")
            if asked["prompt"] == PROBE_PROMPTS[7]
            else body("abc")
        )

    async def test() -> None:
        found = await told(Engines(canary=odd, stable=near), (observed(), status(), 150.0))
        assert found is not None
        expected = (
            [PromptDifference(2)] * 3
            + [PromptDifference()] * 2
            + [PromptDifference(None, 2), PromptDifference(), PromptDifference(None, 1)]
        )
        assert found.compared_prompts == tuple(expected + [PromptDifference()] * (NUMBER - 8))

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
def test_an_engine_that_refuses_is_not_asked_again_and_keeps_the_others_from_being_asked(
    run: Run, messages: Messages, answer: Any, name: str
) -> None:
    async def test() -> None:
        engines = Engines(canary=answer)
        found = await told(engines, (observed(), status(), 150.0))
        assert found is not None
        assert (found.compared_prompts, found.prompt_count) == ((), NUMBER)
        messages.check(name, found.skip_reason)
        assert engines.counts() == {CANARY: 1}

    run(test())


def test_what_was_not_answered_is_asked_again_a_few_times_and_then_left_out(run: Run) -> None:
    failed: Counter[str] = Counter()

    async def now_and_then(asked: dict[str, Any]) -> Any:
        failed[asked["prompt"]] += 1
        lost = asked["prompt"] == PROBE_PROMPTS[4] or (asked["prompt"] == PROBE_PROMPTS[2] and failed[PROBE_PROMPTS[2]] == 1)
        return (503, b"") if lost else body("abc")

    async def test() -> None:
        found = await told(Engines(control=now_and_then), (observed(), status(), 400.0))
        assert found == EquivalenceResult(
            tuple([PromptDifference()] * (NUMBER - 1)), NUMBER, f"http://{CONTROL}:8000/v1/completions answered with status 503"
        )
        assert (failed[PROBE_PROMPTS[4]], failed[PROBE_PROMPTS[2]], failed[PROBE_PROMPTS[0]]) == (MAX_ATTEMPTS_PER_PROMPT, 2, 1)

    run(test())


def test_engines_that_never_answer_are_given_up_after_a_while_and_are_asked_ever_slower(run: Run) -> None:
    async def silent(_: dict[str, Any]) -> bytes:
        await asyncio.sleep(1e6)
        return b""

    async def test() -> None:
        engines = Engines(canary=silent)
        found = await told(engines, (observed(), status(), 12 * 3600.0))
        assert found == EquivalenceResult((), NUMBER, f"http://{CANARY}:8000/v1/completions did not answer in time")
        assert engines.counts() == {CANARY: MAX_ATTEMPTS_PER_PROMPT * NUMBER}
        times = [at for at, _, _ in engines.asked]
        assert times[-1] - times[-2] == 60.0 > PROMPT_TIMEOUT_SECONDS

    run(test())


def test_many_resources_wait_for_each_other(run: Run) -> None:
    busy = 0
    most = 0

    async def slow(_: dict[str, Any]) -> bytes:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(1.0)
        busy -= 1
        return body("abc")

    async def test() -> None:
        heard: list[NamespacedName] = []
        prober = EquivalenceProber(heard.append, Engines(canary=slow).transport)
        running = asyncio.create_task(prober.run())
        keys = [NamespacedName("default", f"chat-{number}") for number in range(3 * MAX_CONCURRENT_PROBES)]
        for key in keys:
            prober.track(key, observed(), status())
        await asyncio.sleep(600)
        assert sorted(heard) == sorted(keys)
        assert most == MAX_CONCURRENT_PROBES
        prober.forget(keys[0])
        assert prober.equivalence_result(keys[0]) is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test())


# ---------------------------------------------------------------------------------------------------------- over a real network
def asked(answer: Answer) -> Any:
    """What is made of a server that answers so."""

    async def work() -> Any:
        async with served("POST", "/v1/completions", answer) as url, create_http_client() as through:
            return await equivalence.send_prompt(through, f"{url}/v1/completions", build_completion_request("chat", "Hello"))

    return asyncio.run(work())


def test_a_server_is_sent_json_and_its_answer_read() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        assert (await request.json())["prompt"] == "Hello"
        return web.Response(body=body("abc"), content_type="application/json")

    assert asked(answer).tokens == ("a", "b", "c")


def test_an_endless_answer_ends() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        except ConnectionError:
            return response

    with pytest.raises(ProbeError, match="answered with more than") as failure:
        asked(answer)
    assert failure.value.is_final


def test_a_redirect_is_not_followed() -> None:
    async def answer(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    with pytest.raises(ProbeError, match="status 302"):
        asked(answer)


def test_a_port_that_is_closed() -> None:
    async def work() -> None:
        async with create_http_client() as through:
            await equivalence.send_prompt(through, "http://127.0.0.1:1/v1/completions", b"{}")

    with pytest.raises(ProbeError, match="cannot be reached") as failure:
        asyncio.run(work())
    assert not failure.value.is_final
