"""Sends real HTTP requests to an OpenAI-compatible server, checks every answer, and reports errors and latency percentiles.

Open loop: an arrival process starts requests, however slow the server is. Closed loop: a fixed number of clients, each of which
sends its next request as soon as it has its answer. A request is successful when its status is 200, its stream ends with [DONE],
and the server reports the requested number of tokens, or without `ignore_eos` at most that number. Prompts repeat what a prefix
cache can match: the class's system prompt and the session's earlier turns.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from aerie_lab.engine.load_generation.workload import Turn

LATENCY_PERCENTILES = (50, 90, 95, 99)
_PAUSE_AFTER_ERROR_SECONDS = 0.1
"""Pause of a client after an error: a server that is away refuses requests at once."""


@dataclass(frozen=True)
class TrafficTarget:
    """The server that gets the requests, and their form."""

    url: str
    """Up to the path, as http://127.0.0.1:8000."""
    model: str
    host: str | None = None
    """The Host header, for a gateway."""
    bytes_per_token: float = 4.0
    """How many bytes of text the server's tokenizer takes for a token."""
    stream: bool = True
    temperature: float = 0.0
    timeout_seconds: float = 300.0
    chats: Sequence[Sequence[Mapping[str, str]]] = ()
    """Messages to send in turn, as chat completions, where their content matters; otherwise filler of the turn's length."""
    chat_fields: Mapping[str, object] = field(default_factory=dict)
    """Further fields of each chat completion, such as `chat_template_kwargs`."""
    ignore_eos: bool = True
    """Whether answers have exactly the requested number of tokens; otherwise they end where the model ends them."""


MAX_ERROR_TEXT_CHARACTERS = 200
"""Characters of a wrong answer that are kept."""


@dataclass(frozen=True)
class RequestOutcome:
    """One request, as its client saw it. Seconds; None where it did not come so far."""

    class_name: str
    error: str | None
    tokens: int = 0
    time_to_first_token: float | None = None
    total_seconds: float = 0.0
    error_text: str = ""
    """Beginning of the error's body: it distinguishes a gateway's error from an engine's."""
    end_time: float = field(default_factory=time.time, compare=False)
    """Unix time in seconds."""

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds per token after the first."""
        if self.time_to_first_token is None or self.tokens < 2:
            return None
        return (self.total_seconds - self.time_to_first_token) / (self.tokens - 1)


@dataclass
class TrafficReport:
    """All outcomes of a run."""

    seconds: float = 0.0
    outcomes: list[RequestOutcome] = field(default_factory=list)

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)

    def summary(self) -> dict[str, dict[str, float]]:
        """Per class of traffic and for `all`: counts, rates, and percentiles in milliseconds."""
        kinds = sorted({outcome.class_name for outcome in self.outcomes})
        return {name: self._summarize([o for o in self.outcomes if name in (o.class_name, "all")]) for name in [*kinds, "all"]}

    def _summarize(self, outcomes: list[RequestOutcome]) -> dict[str, float]:
        good = [outcome for outcome in outcomes if outcome.error is None]
        row = {
            "requests": float(len(outcomes)),
            "errors": float(len(outcomes) - len(good)),
            "requests_per_s": len(good) / self.seconds if self.seconds else 0.0,
            "tokens_per_s": sum(outcome.tokens for outcome in good) / self.seconds if self.seconds else 0.0,
        }
        for name, values in (
            ("ttft", [o.time_to_first_token for o in good if o.time_to_first_token is not None]),
            ("tpot", [o.seconds_per_token for o in good if o.seconds_per_token is not None]),
            ("e2e", [o.total_seconds for o in good]),
        ):
            for percentile in LATENCY_PERCENTILES:
                row[f"{name}_p{percentile}_ms"] = 1000 * nearest_rank_percentile(values, percentile)
        return row


def nearest_rank_percentile(values: list[float], percentile: float) -> float:
    """Return the nearest-rank percentile; 0 without values.

    >>> nearest_rank_percentile([3.0, 1.0, 2.0], 50), nearest_rank_percentile([], 99)
    (2.0, 0.0)
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percentile / 100) - 1)]


async def run_open_loop(
    target: TrafficTarget, turns: Iterable[Turn], speed: float = 1.0, report: TrafficReport | None = None
) -> TrafficReport:
    """Send each turn at its time, `speed` times as fast, and wait for all answers. They are added to `report` as they come."""
    report, began = TrafficReport() if report is None else report, time.monotonic()
    async with _create_session(target) as session, asyncio.TaskGroup() as tasks:
        for turn in turns:
            await asyncio.sleep(max(0.0, began + turn.time / speed - time.monotonic()))
            tasks.create_task(_send_and_record(report, session, target, turn))
    report.seconds = time.monotonic() - began
    return report


async def run_closed_loop(
    target: TrafficTarget, turns: Iterator[Turn], clients: int, report: TrafficReport | None = None
) -> TrafficReport:
    """`clients` clients work the turns off, without regard to the turns' times. Answers are added to `report` as they come."""
    report, began = TrafficReport() if report is None else report, time.monotonic()

    async def work(session: aiohttp.ClientSession) -> None:
        for turn in turns:
            outcome = await send_request(session, target, turn)
            report.outcomes.append(outcome)
            if outcome.error is not None:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_SECONDS)

    async with _create_session(target) as session, asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(work(session))
    report.seconds = time.monotonic() - began
    return report


def _create_session(target: TrafficTarget) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=target.timeout_seconds), connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    )


async def _send_and_record(report: TrafficReport, session: aiohttp.ClientSession, target: TrafficTarget, turn: Turn) -> None:
    report.outcomes.append(await send_request(session, target, turn))


async def send_request(session: aiohttp.ClientSession, target: TrafficTarget, turn: Turn) -> RequestOutcome:
    """Send one request and check its answer."""
    path, prompt = _build_request(target, turn)
    body = {
        "model": target.model,
        **prompt,
        "max_tokens": turn.answer_tokens,
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
    }
    if target.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"x-traffic-class": turn.traffic_class.name} | ({"Host": target.host} if target.host else {})
    began = time.monotonic()
    first: float | None = None
    tokens, done = 0, not target.stream
    try:
        async with session.post(f"{target.url}/v1/{path}", json=body, headers=headers) as answer:
            if answer.status != 200:
                error_text = (await answer.text(errors="replace"))[:MAX_ERROR_TEXT_CHARACTERS]
                return RequestOutcome(
                    turn.traffic_class.name,
                    f"status {answer.status}",
                    total_seconds=time.monotonic() - began,
                    error_text=error_text,
                )
            if not target.stream:
                tokens = (await answer.json())["usage"]["completion_tokens"]
            else:
                async for event in _read_events(answer):
                    if event == "[DONE]":
                        done = True
                        continue
                    document = json.loads(event)
                    if "error" in document:
                        return RequestOutcome(
                            turn.traffic_class.name, "error in the stream", total_seconds=time.monotonic() - began
                        )
                    if document.get("choices") and first is None:
                        first = time.monotonic() - began
                    if usage := document.get("usage"):
                        tokens = usage["completion_tokens"]
    except TimeoutError:
        return RequestOutcome(turn.traffic_class.name, "timeout", total_seconds=time.monotonic() - began)
    except (aiohttp.ClientError, ValueError, KeyError) as error:
        return RequestOutcome(
            turn.traffic_class.name,
            type(error).__name__,
            total_seconds=time.monotonic() - began,
            error_text=str(error)[:MAX_ERROR_TEXT_CHARACTERS],
        )
    total = time.monotonic() - began
    wrong = None if done else "stream without [DONE]"
    if wrong is None and (tokens != turn.answer_tokens if target.ignore_eos else not 0 < tokens <= turn.answer_tokens):
        wrong = "wrong number of tokens"
    return RequestOutcome(turn.traffic_class.name, wrong, tokens, first, total)


def _build_request(target: TrafficTarget, turn: Turn) -> tuple[str, dict[str, object]]:
    """Return the end of the URL's path, and the prompt for it."""
    if target.chats:
        return "chat/completions", {"messages": target.chats[turn.number % len(target.chats)], **target.chat_fields}
    return "completions", {"prompt": build_prompt(turn, target.bytes_per_token)}


async def _read_events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the `data:` lines of a stream of server-sent events."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def build_prompt(turn: Turn, bytes_per_token: float) -> str:
    """Return a text of the turn's length; equal segments begin with equal text, whatever their length."""
    segments = turn.segments or ((turn.number, turn.prompt_tokens),)
    return "".join(_filler_text(key, round(tokens * bytes_per_token)) for key, tokens in segments)


_FILLER_VOCABULARY = """
a the of to in is are was it that this for on with as by from at be or an not which when each value list name file line text
function returns object if else used can may one two new first last call class module string number time data set key
"""
_FILLER_WORDS = _FILLER_VOCABULARY.split()


def _filler_text(key: Hashable, length: int) -> str:
    words = random.Random(str(key)).choices(_FILLER_WORDS, k=length // 2 + 1)  # noqa: S311 - filler, no secrets
    return " ".join(words)[: max(length - 1, 1)] + " "
