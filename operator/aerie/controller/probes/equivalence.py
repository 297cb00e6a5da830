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

from aerie.analysis.equivalence import Answers, Prompt, compared
from aerie.api.status import Status
from aerie.controller.scraping.http_fetch import client
from aerie.controller.scraping.targets import targets
from aerie.controller.work_queue import Key, WorkQueue
from aerie.engine import completions as engines
from aerie.engine.completions import Answer, AnswerError
from aerie.manifests import naming
from aerie.rollout.canary.analysis_run import Evidence
from aerie.rollout.canary.equivalence_probe import unasked
from aerie.rollout.facts import pod_failures as pods
from aerie.rollout.facts.snapshot import Observed

_log = logging.getLogger(__name__)

SECONDS = 30.0
"""For one answer, all in all: of 64 tokens, on an engine under load."""
LARGEST = 256 * 1024
"""Bytes of one answer; 64 tokens take about 15 KiB."""
AT_ONCE = 16
"""Resources whose engines are asked at the same time."""
TRIES = 3
"""Of a prompt, before it is left out."""
SHORTEST, LONGEST_WARM, LONGEST = 0.2, 5.0, 60.0
"""Seconds: from an answer to the next question at least; from one question to the next at most, in WarmingUp and ever."""


class QuestionError(Exception):
    """A question was not answered; the message is a clause. `final`: there is no use in asking this engine again."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


async def ask(through: httpx.AsyncClient, url: str, question: bytes) -> Answer:
    """The engine's answer. Raises QuestionError."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    body = bytearray()
    try:
        async with (
            asyncio.timeout(SECONDS),
            through.stream("POST", url, content=question, headers=headers, timeout=SECONDS) as response,
        ):
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > LARGEST:
                    raise QuestionError(f"{url} answered with more than {LARGEST} bytes", final=True)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise QuestionError(f"{url} did not answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise QuestionError(f"{url} cannot be reached, or does not answer as a server of HTTP does") from error
    if response.status_code in (401, 403):
        raise QuestionError("the engines ask for an API key, and Aerie has none", final=True)
    if response.status_code != 200:
        said = engines.complaint(bytes(body))
        told = f"{url} answered with status {response.status_code}" + (f" ({said})" if said else "")
        raise QuestionError(told, final=400 <= response.status_code < 500 and response.status_code not in (408, 429))
    try:
        return engines.read(bytes(body))
    except AnswerError as error:
        raise QuestionError(f"{url} does not answer as vLLM does: {error}", final=True) from error


# -------------------------------------------------------------------------------------------------------------- what is asked
@dataclass(frozen=True)
class Subject:
    """Of which canary; it is another when any of this is another."""

    revision: str
    started_at: datetime
    model: str
    """Name by which the engines serve it."""


@dataclass(frozen=True)
class Pods:
    """Where to ask."""

    canary: str
    control: str
    stable: str
    """Another pod of the stable revision; where there is only one, the same."""


def subject(observed: Observed, status: Status) -> Subject | None:
    """The canary that is to be asked for; None where there is none, or it is not to be asked."""
    canary, stable = status.canary, status.stable
    if canary is None or stable is None or canary.phase not in ("WarmingUp", "Analyzing"):
        return None
    if observed.resource.spec.rollout.paused or unasked(observed, stable, canary):
        return None
    return Subject(canary.revision, canary.started_at, observed.resource.served_name)


def answered(status: Status) -> bool:
    """Whether the status has the answers, or what is asked for in it needs none."""
    if status.analysis is None or status.canary is None or status.canary.phase != "Analyzing":
        return False
    evidence = Evidence.unpack(status.analysis.state)
    return evidence is None or evidence.state.answers is not None or bool(evidence.terms.unasked)


def whom(observed: Observed, status: Status, path: str = engines.PATH) -> Pods | None:
    """The first serving pod of each arm, by name, as addresses with this path; None while an arm has none."""
    if status.canary is None or status.stable is None:
        return None
    name = observed.resource.metadata.name
    serving = {pod["metadata"]["name"] for pod in observed.pods if pods.ready(pod)}
    urls: dict[str, list[str]] = {}
    for pod, target in sorted(targets(observed)):
        if pod in serving:
            urls.setdefault(target.group, []).append(target.url.removesuffix("/metrics") + path)
    mine = urls.get(naming.deployment(name, status.canary.revision, control=False))
    others = [
        url for control in (True, False) for url in urls.get(naming.deployment(name, status.stable.revision, control=control), [])
    ]
    # With control pods, the stable one is none of them.
    controls = len(urls.get(naming.deployment(name, status.stable.revision, control=True), []))
    return Pods(mine[0], others[0], (others[max(1, controls) :] or others)[0]) if mine and others else None


def pace(observed: Observed, status: Status) -> float:
    """Seconds from one question to the next."""
    analysis = observed.resource.spec.rollout.analysis
    if status.canary is not None and status.canary.phase == "WarmingUp":
        return min(LONGEST_WARM, max(SHORTEST, analysis.warmup.total_seconds() / 2 / len(engines.PROMPTS)))
    if status.analysis is not None:
        analysis = status.analysis.parameters
    return min(LONGEST, analysis.block.total_seconds() / 2)


# ----------------------------------------------------------------------------------------------------------------- the asking
@dataclass(eq=False)
class _Asking:
    """Of one canary."""

    subject: Subject
    pods: Pods | None = None
    pace: float = LONGEST
    left: deque[int] = field(default_factory=lambda: deque(range(len(engines.PROMPTS))))
    tries: dict[int, int] = field(default_factory=dict)
    failures: int = 0
    """In a row."""
    prompts: list[Prompt] = field(default_factory=list)
    why: str = ""
    """Why the last question that failed did."""

    @property
    def answers(self) -> Answers | None:
        """What is known, once nothing is left to be asked."""
        return None if self.left else Answers(tuple(self.prompts), len(engines.PROMPTS), self.why)

    def wait(self, spent: float) -> float:
        """Seconds until the next question, after one that took so many."""
        return max(SHORTEST, min(LONGEST, self.pace * 2.0 ** min(self.failures, 30)) - spent)

    def answered(self, prompt: int, found: Prompt) -> None:
        self.left.remove(prompt)
        self.prompts.append(found)
        self.failures = 0

    def failed(self, prompt: int, error: QuestionError) -> None:
        self.why = str(error)
        self.failures += 1
        self.tries[prompt] = self.tries.get(prompt, 0) + 1
        if error.final:
            self.left.clear()
        else:  # again, after the others
            self.left.remove(prompt)
            if self.tries[prompt] < TRIES:
                self.left.append(prompt)


class Prober:
    """See the module. `tell` is called with a resource whose answers are there."""

    def __init__(self, tell: Callable[[Key], None], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._tell, self._transport = tell, transport
        self._queue = WorkQueue()
        self._free = asyncio.Semaphore(AT_ONCE)
        self._asking: dict[Key, _Asking] = {}

    def follow(self, key: Key, observed: Observed, status: Status) -> None:
        """Ask the resource's engines from now on, as its status wants it."""
        wanted = subject(observed, status)
        if wanted is None:
            self._asking.pop(key, None)
            return
        asking = self._asking.get(key)
        if asking is None or asking.subject != wanted:
            if answered(status):
                self._asking.pop(key, None)
                return
            asking = self._asking[key] = _Asking(wanted)
            self._queue.add(key)
        asking.pods, asking.pace = whom(observed, status), pace(observed, status)

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._asking.pop(key, None)

    def answers(self, key: Key) -> Answers | None:
        """What the answers of the resource's engines show, once all have been asked for."""
        asking = self._asking.get(key)
        return None if asking is None else asking.answers

    async def run(self) -> None:
        """Ask until cancelled."""
        async with client(self._transport) as through, asyncio.TaskGroup() as group:
            while True:
                await self._free.acquire()
                key, _ = await self._queue.get()
                group.create_task(self._turn(key, through))

    async def _turn(self, key: Key, through: httpx.AsyncClient) -> None:
        asking, began = self._asking.get(key), asyncio.get_running_loop().time()
        try:
            if asking is None or not asking.left:
                return
            if asking.pods is not None:
                await self._question(key, asking, asking.pods, through)
            if asking.left:
                self._queue.add_after(key, asking.wait(asyncio.get_running_loop().time() - began))
            elif self._asking.get(key) is asking:
                self._tell(key)
        finally:
            self._queue.done(key)
            self._free.release()

    async def _question(self, key: Key, asking: _Asking, where: Pods, through: httpx.AsyncClient) -> None:
        prompt = asking.left[0]
        question = engines.question(asking.subject.model, engines.PROMPTS[prompt])
        try:
            canary = await ask(through, where.canary, question)
            others = (ask(through, url, question) for url in (where.control, where.stable))
            control, stable = await asyncio.gather(*others, return_exceptions=True)
            for found in (control, stable):
                if isinstance(found, BaseException):
                    raise found
            assert isinstance(control, Answer)
            assert isinstance(stable, Answer)
            asking.answered(prompt, compared(canary, control, stable))
        except QuestionError as error:
            asking.failed(prompt, error)
            if asking.failures == 1:
                _log.info("%s: greedy answers: %s", key, error)
        except Exception:  # noqa: BLE001 - one resource's engines must not end the asking of the others
            asking.failed(prompt, QuestionError("Aerie has a fault of its own, see its log"))
            _log.exception("%s: greedy answers ended with an error of Aerie's own", key)
