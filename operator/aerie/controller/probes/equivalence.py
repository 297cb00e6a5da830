"""Asks the engines of a rollout the fixed prompts, in the background of the passes: one pod each of canary, control and stable.

    pass ─ follow(what was observed) ─► pods to ask ─► a prompt now and then ─► canary ─► control and stable ─► Prompt
    pass ◄─ answers, once all prompts have been asked, or there is no use in asking ◄───────────────────────────────┘

In WarmingUp, where nothing is counted, within half of its time; what is left of them in Analyzing, at most twice in a block. So
clients hardly wait for it, and what is counted does not hang on it: each arm gets the same requests.

Guarantees: only pods are asked that the resource owns; an answer has limits in time and size, and so has the number of resources
whose engines are asked at once, each one prompt at a time; control and stable are asked only what the canary has answered, so
that a request which does not become an engine with the new drafter meets no other. Of an answer nothing is kept but where it
differs, and what is said of one that is none has no word of it. Not guaranteed: anything over a restart of the operator; while
the answers are not in the status, another one asks anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

import httpx

from aerie.analysis.equivalence import EquivalenceResult, PromptDifference, compare_answers
from aerie.api.status import Status
from aerie.controller.scraping.http_fetch import create_http_client
from aerie.controller.scraping.targets import find_engine_endpoints
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.engine import completions as engines
from aerie.engine.completions import CompletionError, GreedyCompletion
from aerie.manifests import naming
from aerie.rollout.canary.analysis_run import AnalysisRun
from aerie.rollout.canary.equivalence_probe import find_probe_skip_reason
from aerie.rollout.facts import pod_failures as pods
from aerie.rollout.facts.snapshot import Snapshot

_log = logging.getLogger(__name__)

PROMPT_TIMEOUT_SECONDS = 30.0
"""For one answer, all in all: of 64 tokens, on an engine under load."""
MAX_COMPLETION_RESPONSE_BYTES = 256 * 1024
"""Bytes of one answer; 64 tokens take about 15 KiB."""
MAX_CONCURRENT_PROBES = 16
"""Resources whose engines are asked at the same time."""
MAX_ATTEMPTS_PER_PROMPT = 3
"""Of a prompt, before it is left out."""
MIN_PROMPT_INTERVAL_SECONDS, MAX_WARMUP_PROMPT_INTERVAL_SECONDS, MAX_PROMPT_INTERVAL_SECONDS = 0.2, 5.0, 60.0
"""Seconds: from an answer to the next question at least; from one question to the next at most, in WarmingUp and ever."""


class ProbeError(Exception):
    """A question was not answered; the message is a clause. `final`: there is no use in asking this engine again."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


async def send_prompt(http_client: httpx.AsyncClient, url: str, request_body: bytes) -> GreedyCompletion:
    """The engine's answer. Raises QuestionError."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    body = bytearray()
    try:
        async with (
            asyncio.timeout(PROMPT_TIMEOUT_SECONDS),
            http_client.stream("POST", url, content=request_body, headers=headers, timeout=PROMPT_TIMEOUT_SECONDS) as response,
        ):
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_COMPLETION_RESPONSE_BYTES:
                    raise ProbeError(f"{url} answered with more than {MAX_COMPLETION_RESPONSE_BYTES} bytes", is_final=True)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ProbeError(f"{url} did not answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProbeError(f"{url} cannot be reached, or does not answer as a server of HTTP does") from error
    if response.status_code in (401, 403):
        raise ProbeError("the engines ask for an API key, and Aerie has none", is_final=True)
    if response.status_code != 200:
        said = engines.read_error_type(bytes(body))
        told = f"{url} answered with status {response.status_code}" + (f" ({said})" if said else "")
        raise ProbeError(told, is_final=400 <= response.status_code < 500 and response.status_code not in (408, 429))
    try:
        return engines.parse_completion(bytes(body))
    except CompletionError as error:
        raise ProbeError(f"{url} does not answer as vLLM does: {error}", is_final=True) from error


# -------------------------------------------------------------------------------------------------------------- what is asked
@dataclass(frozen=True)
class ProbeRequest:
    """Of which canary; it is another when any of this is another."""

    revision: str
    started_at: datetime
    model: str
    """Name by which the engines serve it."""


@dataclass(frozen=True)
class ProbeUrls:
    """Where to ask."""

    canary: str
    control: str
    stable: str
    """Another pod of the stable revision; where there is only one, the same."""


def build_probe_request(snapshot: Snapshot, status: Status) -> ProbeRequest | None:
    """The canary that is to be asked for; None where there is none, or it is not to be asked."""
    canary, stable = status.canary, status.stable
    if canary is None or stable is None or canary.phase not in ("WarmingUp", "Analyzing"):
        return None
    if snapshot.resource.spec.rollout.paused or find_probe_skip_reason(snapshot, stable, canary):
        return None
    return ProbeRequest(canary.revision, canary.started_at, snapshot.resource.served_name)


def has_probe_result(status: Status) -> bool:
    """Whether the status has the answers, or what is asked for in it needs none."""
    if status.analysis is None or status.canary is None or status.canary.phase != "Analyzing":
        return False
    evidence = AnalysisRun.unpack(status.analysis.state)
    return evidence is None or evidence.state.answers is not None or bool(evidence.plan.unasked)


def find_probe_urls(snapshot: Snapshot, status: Status, path: str = engines.COMPLETIONS_PATH) -> ProbeUrls | None:
    """The first serving pod of each arm, by name, as addresses with this path; None while an arm has none."""
    if status.canary is None or status.stable is None:
        return None
    name = snapshot.resource.metadata.name
    serving = {pod["metadata"]["name"] for pod in snapshot.pods if pods.is_pod_ready(pod)}
    urls: dict[str, list[str]] = {}
    for pod, target in sorted(find_engine_endpoints(snapshot)):
        if pod in serving:
            urls.setdefault(target.deployment, []).append(target.url.removesuffix("/metrics") + path)
    mine = urls.get(naming.deployment_name(name, status.canary.revision, control=False))
    others = [
        url
        for control in (True, False)
        for url in urls.get(naming.deployment_name(name, status.stable.revision, control=control), [])
    ]
    # With control pods, the stable one is none of them.
    controls = len(urls.get(naming.deployment_name(name, status.stable.revision, control=True), []))
    return ProbeUrls(mine[0], others[0], (others[max(1, controls) :] or others)[0]) if mine and others else None


def prompt_interval_seconds(snapshot: Snapshot, status: Status) -> float:
    """Seconds from one question to the next."""
    analysis = snapshot.resource.spec.rollout.analysis
    if status.canary is not None and status.canary.phase == "WarmingUp":
        return min(
            MAX_WARMUP_PROMPT_INTERVAL_SECONDS,
            max(MIN_PROMPT_INTERVAL_SECONDS, analysis.warmup.total_seconds() / 2 / len(engines.PROBE_PROMPTS)),
        )
    if status.analysis is not None:
        analysis = status.analysis.parameters
    return min(MAX_PROMPT_INTERVAL_SECONDS, analysis.block.total_seconds() / 2)


# ----------------------------------------------------------------------------------------------------------------- the asking
@dataclass(eq=False)
class _ProbeProgress:
    """Of one canary."""

    request: ProbeRequest
    urls: ProbeUrls | None = None
    interval_seconds: float = MAX_PROMPT_INTERVAL_SECONDS
    remaining_prompts: deque[int] = field(default_factory=lambda: deque(range(len(engines.PROBE_PROMPTS))))
    attempts: dict[int, int] = field(default_factory=dict)
    consecutive_failures: int = 0
    """In a row."""
    results: list[PromptDifference] = field(default_factory=list)
    last_error: str = ""
    """Why the last question that failed did."""

    @property
    def final_result(self) -> EquivalenceResult | None:
        """What is known, once nothing is left to be asked."""
        return (
            None
            if self.remaining_prompts
            else EquivalenceResult(tuple(self.results), len(engines.PROBE_PROMPTS), self.last_error)
        )

    def next_delay(self, elapsed_seconds: float) -> float:
        """Seconds until the next question, after one that took so many."""
        return max(
            MIN_PROMPT_INTERVAL_SECONDS,
            min(MAX_PROMPT_INTERVAL_SECONDS, self.interval_seconds * 2.0 ** min(self.consecutive_failures, 30)) - elapsed_seconds,
        )

    def record_answer(self, prompt: int, result: PromptDifference) -> None:
        self.remaining_prompts.remove(prompt)
        self.results.append(result)
        self.consecutive_failures = 0

    def record_failure(self, prompt: int, error: ProbeError) -> None:
        self.last_error = str(error)
        self.consecutive_failures += 1
        self.attempts[prompt] = self.attempts.get(prompt, 0) + 1
        if error.is_final:
            self.remaining_prompts.clear()
        else:  # again, after the others
            self.remaining_prompts.remove(prompt)
            if self.attempts[prompt] < MAX_ATTEMPTS_PER_PROMPT:
                self.remaining_prompts.append(prompt)


class EquivalenceProber:
    """See the module. `tell` is called with a resource whose answers are there."""

    def __init__(self, enqueue: Callable[[NamespacedName], None], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._enqueue, self._transport = enqueue, transport
        self._queue = WorkQueue()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PROBES)
        self._probes: dict[NamespacedName, _ProbeProgress] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Ask the resource's engines from now on, as its status wants it."""
        wanted = build_probe_request(snapshot, status)
        if wanted is None:
            self._probes.pop(key, None)
            return
        asking = self._probes.get(key)
        if asking is None or asking.request != wanted:
            if has_probe_result(status):
                self._probes.pop(key, None)
                return
            asking = self._probes[key] = _ProbeProgress(wanted)
            self._queue.add(key)
        asking.urls, asking.interval_seconds = find_probe_urls(snapshot, status), prompt_interval_seconds(snapshot, status)

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone."""
        self._probes.pop(key, None)

    def equivalence_result(self, key: NamespacedName) -> EquivalenceResult | None:
        """What the answers of the resource's engines show, once all have been asked for."""
        asking = self._probes.get(key)
        return None if asking is None else asking.final_result

    async def run(self) -> None:
        """Ask until cancelled."""
        async with create_http_client(self._transport) as through, asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                key, _ = await self._queue.get()
                group.create_task(self._probe_engines(key, through))

    async def _probe_engines(self, key: NamespacedName, http_client: httpx.AsyncClient) -> None:
        asking, began = self._probes.get(key), asyncio.get_running_loop().time()
        try:
            if asking is None or not asking.remaining_prompts:
                return
            if asking.urls is not None:
                await self._send_next_prompt(key, asking, asking.urls, http_client)
            if asking.remaining_prompts:
                self._queue.add_after(key, asking.next_delay(asyncio.get_running_loop().time() - began))
            elif self._probes.get(key) is asking:
                self._enqueue(key)
        finally:
            self._queue.done(key)
            self._slots.release()

    async def _send_next_prompt(
        self, key: NamespacedName, probe: _ProbeProgress, urls: ProbeUrls, http_client: httpx.AsyncClient
    ) -> None:
        prompt = probe.remaining_prompts[0]
        question = engines.build_completion_request(probe.request.model, engines.PROBE_PROMPTS[prompt])
        try:
            canary = await send_prompt(http_client, urls.canary, question)
            others = (send_prompt(http_client, url, question) for url in (urls.control, urls.stable))
            control, stable = await asyncio.gather(*others, return_exceptions=True)
            for found in (control, stable):
                if isinstance(found, BaseException):
                    raise found
            assert isinstance(control, GreedyCompletion)
            assert isinstance(stable, GreedyCompletion)
            probe.record_answer(prompt, compare_answers(canary, control, stable))
        except ProbeError as error:
            probe.record_failure(prompt, error)
            if probe.consecutive_failures == 1:
                _log.info("%s: greedy answers: %s", key, error)
        except Exception:  # noqa: BLE001 - one resource's engines must not end the asking of the others
            probe.record_failure(prompt, ProbeError("Aerie has a fault of its own, see its log"))
            _log.exception("%s: greedy answers ended with an error of Aerie's own", key)
