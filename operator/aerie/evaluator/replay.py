"""Sends a request to both engines, and pairs their answers.

Both get it at the same time, in random order, so that their load is the same and neither is always the first. Each request has a
connection of its own: a connection that the engine just closes would otherwise look like an engine that fails.

Guarantees: an answer has limits in time and size. Once one engine has answered, the other one's limit is a multiple of its time:
an engine that hangs is known in half a minute, and holds no place for minutes. Of an error only its kind remains, not its text.
The only header that names anybody is the key of the engines, if there is one. Not guaranteed: a second attempt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import aiohttp

from aerie.evaluator.answers import Answer, AnswerProblem, parse_answer
from aerie.evaluator.pairs import Pair
from aerie.evaluator.requests import ReplayRequest
from aerie.evaluator.skip_reasons import SkipReason

MAX_ANSWER_BYTES = 2 * 1024 * 1024
"""Size limit of an answer: a token takes some 1,000 bytes with its log-probabilities."""
MIN_SECOND_ANSWER_SECONDS, SECOND_ANSWER_RATIO = 30.0, 10.0
"""Once an engine has answered, the other one fails if it takes this much longer: in seconds, or relative to the answer's time."""
_CHUNK_BYTES = 64 * 1024
_NO_ANSWER = (AnswerProblem.FAILED, AnswerProblem.REJECTED, AnswerProblem.UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of both arms, by their base URLs; a request goes to one of each arm."""

    canary: tuple[str, ...]
    control: tuple[str, ...]
    api_key: str = field(default="", repr=False)
    """Key that the engines require; empty if they require none."""
    timeout_seconds: float = 120.0
    """Limit of an answer, from sending the request on."""


class _TimedAnswer(NamedTuple):
    answer: Answer
    seconds: float
    """Seconds from sending the request to the end of the answer."""


def create_session() -> aiohttp.ClientSession:
    """Return the HTTP session of all requests; it keeps neither connections nor cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def replay_request(
    session: aiohttp.ClientSession, engines: Engines, request: ReplayRequest, *, repeats: bool = False
) -> Pair | SkipReason:
    """Return both answers to the request, or why they are no pair. `repeats`: send it twice, and to both for equal load."""
    pair = combine_answers(request, *await _send_to_both(session, engines, request))
    if isinstance(pair, SkipReason) or not repeats:
        return pair
    _, repeat = await _send_to_both(session, engines, request)
    return pair if isinstance(repeat, AnswerProblem) else replace(pair, control_repeat=repeat.answer.completion)


def combine_answers(
    request: ReplayRequest, canary: _TimedAnswer | AnswerProblem, control: _TimedAnswer | AnswerProblem
) -> Pair | SkipReason:
    """Return the pair of two answers, or why they are none."""
    problems = {outcome for outcome in (canary, control) if isinstance(outcome, AnswerProblem)}
    is_unavailable = AnswerProblem.UNAVAILABLE in problems
    if canary in _NO_ANSWER and control in _NO_ANSWER:
        if is_unavailable:
            return SkipReason.UNAVAILABLE
        return SkipReason.REJECTED if problems == {AnswerProblem.REJECTED} else SkipReason.BOTH_FAILED
    if canary in _NO_ANSWER:
        return SkipReason.CANARY_UNAVAILABLE if is_unavailable else SkipReason.CANARY_FAILED
    if control in _NO_ANSWER:
        return SkipReason.CONTROL_UNAVAILABLE if is_unavailable else SkipReason.CONTROL_FAILED
    if isinstance(canary, AnswerProblem) or isinstance(control, AnswerProblem):
        return SkipReason.STOP_STRING if AnswerProblem.STOP_STRING in problems else SkipReason.WITHOUT_METRICS
    if canary.answer.drafted_tokens + control.answer.drafted_tokens == 0:
        return SkipReason.TOO_SHORT
    canary_seconds, control_seconds = canary.answer.engine_seconds, control.answer.engine_seconds
    if canary_seconds is None or control_seconds is None:  # two clocks would not be comparable
        canary_seconds, control_seconds = canary.seconds, control.seconds
    return Pair(request, canary.answer, control.answer, canary_seconds, control_seconds)


async def _send_to_both(
    session: aiohttp.ClientSession, engines: Engines, request: ReplayRequest
) -> tuple[_TimedAnswer | AnswerProblem, _TimedAnswer | AnswerProblem]:
    arms = [engines.canary, engines.control]
    reverse = secrets.randbelow(2) == 1
    tasks = [
        asyncio.create_task(_send(session, engines, secrets.choice(urls), request)) for urls in (arms[::-1] if reverse else arms)
    ]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        answers = [task.result() for task in finished]
        seconds = next((answer.seconds for answer in answers if isinstance(answer, _TimedAnswer)), None)
        if seconds is not None:
            await asyncio.wait(tasks, timeout=max(MIN_SECOND_ANSWER_SECONDS, SECOND_ANSWER_RATIO * seconds))
        else:
            await asyncio.wait(tasks)
        canary, control = (task.result() if task.done() else AnswerProblem.FAILED for task in (tasks[::-1] if reverse else tasks))
    finally:
        for task in tasks:
            task.cancel()
    return canary, control


async def _send(
    session: aiohttp.ClientSession, engines: Engines, url: str, request: ReplayRequest
) -> _TimedAnswer | AnswerProblem:
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if engines.api_key:
        headers["Authorization"] = f"Bearer {engines.api_key}"
    started = time.monotonic()
    body = bytearray()
    try:
        async with (
            asyncio.timeout(engines.timeout_seconds),
            session.post(url + request.path, data=request.body, headers=headers, allow_redirects=False) as response,
        ):
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    return AnswerProblem.FAILED
    except (TimeoutError, aiohttp.ClientError, OSError):
        return AnswerProblem.FAILED
    seconds = time.monotonic() - started
    if response.status != 200:
        return _find_problem(response.status)
    answer = parse_answer(bytes(body))
    return answer if isinstance(answer, AnswerProblem) else _TimedAnswer(answer, seconds)


def _find_problem(status: int) -> AnswerProblem:
    """Return what a status other than 200 means. 401 and 403: a key that the evaluator lacks, not the request."""
    if status in (429, 503):
        return AnswerProblem.UNAVAILABLE
    return AnswerProblem.REJECTED if 400 <= status < 500 and status not in (401, 403, 408) else AnswerProblem.FAILED
