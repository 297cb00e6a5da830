"""Sends fixed prompts to the engines of a rollout, in the background: to one pod each of canary, control and stable.

    reconcile ─ track(snapshot) ─► pods to query ─► a prompt now and then ─► canary ─► control and stable ─► PromptDifference
    reconcile ◄─ result, once all prompts have been sent, or no further one would help ◄────────────────────────────────┘

In WarmingUp, where no requests are counted, the prompts are sent within half of the warm-up. The remaining ones are sent in
Analyzing, at most two per block. So clients are hardly delayed, and the counts do not depend on the prompts: each arm gets the
same requests.

Guarantees: only pods that the resource owns are queried. An answer has limits in time and size, and the number of resources whose
engines are queried at the same time has one; each receives one prompt at a time. Control and stable receive only prompts that the
canary has answered, so that a request that harms an engine with the new drafter reaches no other engine. Of an answer only the
position of a difference is kept, and no error message quotes an answer. Not guaranteed: persistence over a restart of the
operator; while the result is not in the status, the next operator sends the prompts again.
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
from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.scraping.http_fetch import create_http_client
from aerie.controller.scraping.targets import find_engine_endpoints
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.engine import completions
from aerie.engine.completions import CompletionError, GreedyCompletion
from aerie.manifests import naming
from aerie.rollout.canary.analysis_run.equivalence_probe import find_probe_skip_reason
from aerie.rollout.canary.analysis_run.run import AnalysisRun
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Snapshot

_log = logging.getLogger(__name__)

PROMPT_TIMEOUT_SECONDS = 30.0
"""Total timeout of one answer: of 64 tokens, on an engine under load."""
MAX_COMPLETION_RESPONSE_BYTES = 256 * 1024
"""Size limit of one answer in bytes; 64 tokens take about 15 KiB."""
MAX_CONCURRENT_PROBES = 16
"""Resources whose engines are queried at the same time."""
MAX_ATTEMPTS_PER_PROMPT = 3
"""Attempts with a prompt before it is left out."""
MIN_PROMPT_INTERVAL_SECONDS = 0.2
"""Minimum seconds from an answer to the next prompt."""
MAX_WARMUP_PROMPT_INTERVAL_SECONDS = 5.0
"""Maximum seconds from one prompt to the next in WarmingUp."""
MAX_PROMPT_INTERVAL_SECONDS = 60.0
"""Maximum seconds from one prompt to the next in any phase."""


class ProbeError(Exception):
    """Error for a prompt that was not answered; the message is a clause.

    `is_final`: a further prompt to this engine would fail too.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


async def send_prompt(http_client: httpx.AsyncClient, url: str, request_body: bytes) -> GreedyCompletion:
    """Return the engine's answer. Raises ProbeError."""
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
        raise ProbeError(f"{url} cannot be reached, or its response is not valid HTTP") from error
    if response.status_code in (401, 403):
        raise ProbeError("the engines require an API key, and Aerie has none", is_final=True)
    if response.status_code != 200:
        error_type = completions.read_error_type(bytes(body))
        message = f"{url} returned status {response.status_code}" + (f" ({error_type})" if error_type else "")
        raise ProbeError(message, is_final=400 <= response.status_code < 500 and response.status_code not in (408, 429))
    try:
        return completions.parse_completion(bytes(body))
    except CompletionError as error:
        raise ProbeError(f"the response of {url} is not that of vLLM: {error}", is_final=True) from error


# ------------------------------------------------------------------------------------------------------------------- requests
@dataclass(frozen=True)
class ProbeRequest:
    """Canary that the prompts are for. A change of any field starts another probe."""

    revision: str
    started_at: datetime
    model: str
    """Model name that the engines serve."""


@dataclass(frozen=True)
class ProbeUrls:
    """Addresses of the three pods that receive the prompts."""

    canary: str
    control: str
    stable: str
    """Another pod of the stable revision; the same as `control` when there is only one."""


def build_probe_request(snapshot: Snapshot, status: Status) -> ProbeRequest | None:
    """Return the canary to probe; None when there is none, or it is not to be probed."""
    canary, stable = status.canary, status.stable
    if canary is None or stable is None or canary.phase not in ("WarmingUp", "Analyzing") or canary.is_extended:
        return None
    if snapshot.resource.spec.rollout.paused or find_probe_skip_reason(snapshot, stable, canary):
        return None
    return ProbeRequest(canary.revision, canary.start_time, snapshot.resource.served_name)


def has_probe_result(status: Status) -> bool:
    """Return True when the status has the result, or its analysis needs none."""
    if status.analysis is None or status.canary is None or status.canary.phase != "Analyzing":
        return False
    run = AnalysisRun.unpack(status.analysis.state)
    return run is None or run.state.equivalence is not None or bool(run.plan.equivalence_skip_reason)


def find_probe_urls(snapshot: Snapshot, status: Status, path: str = completions.COMPLETIONS_PATH) -> ProbeUrls | None:
    """Return the first ready pod of each arm, by name, as addresses with this path; None while an arm has none."""
    if status.canary is None or status.stable is None:
        return None
    name = snapshot.resource.metadata.name
    ready_pods = {pod["metadata"]["name"] for pod in snapshot.cluster.pods if pod_failures.is_pod_ready(pod)}
    urls: dict[str, list[str]] = {}
    for pod, endpoint in sorted(find_engine_endpoints(snapshot)):
        if pod in ready_pods:
            urls.setdefault(endpoint.deployment, []).append(endpoint.url.removesuffix("/metrics") + path)
    canary_urls = urls.get(naming.deployment_name(name, status.canary.revision, control=False))
    stable_urls = [
        url
        for control in (True, False)
        for url in urls.get(naming.deployment_name(name, status.stable.revision, control=control), [])
    ]
    # When there are control pods, the stable pod has to be another pod than these.
    control_count = len(urls.get(naming.deployment_name(name, status.stable.revision, control=True), []))
    return (
        ProbeUrls(canary_urls[0], stable_urls[0], (stable_urls[max(1, control_count) :] or stable_urls)[0])
        if canary_urls and stable_urls
        else None
    )


def prompt_interval_seconds(resource: SpeculativeDeployment, status: Status) -> float:
    """Return the seconds from one prompt to the next."""
    analysis = resource.spec.rollout.analysis
    if status.canary is not None and status.canary.phase == "WarmingUp":
        return min(
            MAX_WARMUP_PROMPT_INTERVAL_SECONDS,
            max(MIN_PROMPT_INTERVAL_SECONDS, analysis.warmup_duration.total_seconds() / 2 / len(completions.PROBE_PROMPTS)),
        )
    if status.analysis is not None:
        analysis = status.analysis.parameters
    return min(MAX_PROMPT_INTERVAL_SECONDS, analysis.block_duration.total_seconds() / 2)


# ------------------------------------------------------------------------------------------------------------------- probing
@dataclass(eq=False)
class _ProbeProgress:
    """Progress of the prompts for one canary."""

    request: ProbeRequest
    urls: ProbeUrls | None = None
    interval_seconds: float = MAX_PROMPT_INTERVAL_SECONDS
    remaining_prompts: deque[int] = field(default_factory=lambda: deque(range(len(completions.PROBE_PROMPTS))))
    attempts: dict[int, int] = field(default_factory=dict)
    consecutive_failures: int = 0
    """Failed prompts since the last answer."""
    results: list[PromptDifference] = field(default_factory=list)
    last_error: str = ""
    """Reason why the latest prompt that failed did."""

    @property
    def final_result(self) -> EquivalenceResult | None:
        """Result once no prompt remains; None before."""
        return (
            None
            if self.remaining_prompts
            else EquivalenceResult(tuple(self.results), len(completions.PROBE_PROMPTS), self.last_error)
        )

    def next_delay(self, elapsed_seconds: float) -> float:
        """Return the seconds until the next prompt, after one that took `elapsed_seconds`."""
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
        else:  # retry after the others
            self.remaining_prompts.remove(prompt)
            if self.attempts[prompt] < MAX_ATTEMPTS_PER_PROMPT:
                self.remaining_prompts.append(prompt)


class EquivalenceProber:
    """Probes of all resources. `enqueue` is called with a resource whose result is complete."""

    def __init__(self, enqueue: Callable[[NamespacedName], None], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._enqueue, self._transport = enqueue, transport
        self._queue = WorkQueue()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PROBES)
        self._probes: dict[NamespacedName, _ProbeProgress] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Probe the resource's engines from now on, if its status calls for it."""
        request = build_probe_request(snapshot, status)
        if request is None:
            self._probes.pop(key, None)
            return
        probe = self._probes.get(key)
        if probe is None or probe.request != request:
            if has_probe_result(status):
                self._probes.pop(key, None)
                return
            probe = self._probes[key] = _ProbeProgress(request)
            self._queue.add(key)
        probe.urls, probe.interval_seconds = find_probe_urls(snapshot, status), prompt_interval_seconds(snapshot.resource, status)

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        self._probes.pop(key, None)

    def equivalence_result(self, key: NamespacedName) -> EquivalenceResult | None:
        """Return the result of the resource's probe; None while prompts remain."""
        probe = self._probes.get(key)
        return None if probe is None else probe.final_result

    async def run(self) -> None:
        """Send prompts until cancelled."""
        async with create_http_client(self._transport) as http_client, asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                key, _ = await self._queue.get()
                group.create_task(self._probe_engines(key, http_client))

    async def _probe_engines(self, key: NamespacedName, http_client: httpx.AsyncClient) -> None:
        probe, started = self._probes.get(key), asyncio.get_running_loop().time()
        try:
            if probe is None or not probe.remaining_prompts:
                return
            if probe.urls is not None:
                await self._send_next_prompt(key, probe, probe.urls, http_client)
            if probe.remaining_prompts:
                self._queue.add_after(key, probe.next_delay(asyncio.get_running_loop().time() - started))
            elif self._probes.get(key) is probe:
                self._enqueue(key)
        finally:
            self._queue.done(key)
            self._slots.release()

    async def _send_next_prompt(
        self, key: NamespacedName, probe: _ProbeProgress, urls: ProbeUrls, http_client: httpx.AsyncClient
    ) -> None:
        prompt = probe.remaining_prompts[0]
        request_body = completions.build_completion_request(probe.request.model, completions.PROBE_PROMPTS[prompt])
        try:
            canary = await send_prompt(http_client, urls.canary, request_body)
            others = (send_prompt(http_client, url, request_body) for url in (urls.control, urls.stable))
            control, stable = await asyncio.gather(*others, return_exceptions=True)
            for answer in (control, stable):
                if isinstance(answer, BaseException):
                    raise answer
            assert isinstance(control, GreedyCompletion)
            assert isinstance(stable, GreedyCompletion)
            probe.record_answer(prompt, compare_answers(canary, control, stable))
        except ProbeError as error:
            probe.record_failure(prompt, error)
            if probe.consecutive_failures == 1:
                _log.info("%s: output equivalence: %s", key, error)
        except Exception:  # noqa: BLE001 - one resource's engines must not stop the probes of the others
            probe.record_failure(prompt, ProbeError("Aerie had an internal error, see its log"))
            _log.exception("%s: the output-equivalence probe failed with an internal error", key)
