"""Generation of training data by a running vLLM: concurrent requests to its OpenAI interface.

The server renders the prompt, so the answers are those of the deployment: its chat template, its parsers of tools and reasoning,
and its defaults for what a request does not set. It returns the tokens of prompt and answer (`return_token_ids`), which the line
keeps.

A failure that may pass is tried again until no request has succeeded for `retry_timeout_seconds`. A conversation that the server
rejects for its content, such as one that is too long, is recorded in `OUTPUT.rejected.jsonl`, and later runs omit it.

Guarantees: a line is complete or missing, and a run that was killed continues with the conversations that have no line. The
seeds and temperatures of a conversation depend only on its place in the source. A finished file has the order of the source. A
run with another model name, template or sampling is rejected. Not guaranteed: equal answers of two runs, because rounding
depends on what else the server computes; nor that other weights under the same name are noticed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

import httpx

from aerie_drafter import files
from aerie_drafter.chat_template import NO_TEMPLATE_ARGUMENTS, ChatMessage, TemplateArguments
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.train.answers import (
    GenerationParameters,
    Turn,
    add_answer_turn,
    check_run_file,
    prompt_messages,
    render_record,
)
from aerie_drafter.train.conversations import Conversation, parse_conversation, parse_json_line, read_texts

RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""Statuses that may pass, beside those of 500 and above (`is_retried`)."""

FATAL_STATUSES = frozenset({401, 403, 404, 405})
"""Statuses that no other conversation would change: credentials, model name, address."""

MAX_PAUSE_SECONDS = 30.0
START_TIMEOUT_SECONDS = 30.0
"""Limit of the first request, so that a wrong address is reported soon."""
SYNC_SECONDS = 2.0

TOLERATED_REJECTIONS = 20
"""Rejections that do not end a run before the other conversations are answered."""


def is_retried(status: int) -> bool:
    """Return whether a request with this status may succeed later."""
    return status in RETRIED_STATUSES or status >= 500


@dataclass(frozen=True)
class EndpointOptions:
    """Limits of the requests to a server."""

    concurrency: int = 32
    retry_timeout_seconds: float = 600.0
    """Time without a successful request after which a run ends; also the time for which a single failing request is retried."""
    max_rejected_share: float = 0.05
    """Share of the conversations that the server may reject."""
    retry_rejected: bool = False
    """Whether conversations that an earlier run recorded as rejected are tried again."""
    timeout_seconds: float = 3600.0
    first_pause_seconds: float = 0.5
    """Pause after the first failure of a request; each further pause is twice as long, up to 30 s. Retry-After extends it."""


@dataclass(frozen=True)
class Rejection:
    """A conversation that the server cannot answer, also not later."""

    index: int
    """Place in the source, from 0."""
    location: str
    reason: str


@dataclass(frozen=True)
class EndpointAnswers:
    """What a run has written."""

    written: int
    """Number of new lines."""
    rejected: tuple[Rejection, ...] = ()
    """Conversations that have no answer and get none by a repeat, in the order of the source; also those of earlier runs."""


class ConversationError(DataError):
    """The server has no answer to one conversation now."""


class RejectedError(ConversationError):
    """The server has no answer to one conversation, also not later."""


class VllmEndpoint:
    """Client of a vLLM server for requests with retries."""

    def __init__(self, client: httpx.AsyncClient, options: EndpointOptions) -> None:
        """`client` has the base address."""
        self.client, self.options = client, options
        self._last_success = -math.inf

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, options: EndpointOptions) -> AsyncIterator[VllmEndpoint]:
        """Connect to an address; OPENAI_API_KEY is sent if it is set. Raises ConfigError."""
        key = os.environ.get("OPENAI_API_KEY")
        async with httpx.AsyncClient(
            base_url=_parse_address(url),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(options.timeout_seconds, connect=10),
            limits=httpx.Limits(max_connections=options.concurrency),
        ) as client:
            yield cls(client, options)

    async def read_model_root(self, model: str) -> str:
        """Return the folder or repository that the server has loaded as `model`. Raises DataError."""
        retry_timeout_seconds = min(self.options.retry_timeout_seconds, START_TIMEOUT_SECONDS)
        body = await self.request("GET", "/v1/models", retry_timeout_seconds=retry_timeout_seconds)
        roots = {str(entry.get("id")): str(entry.get("root") or "") for entry in body.get("data") or []}
        if model not in roots:
            raise DataError(f"{self.client.base_url}: no model {model!r}; its models are {', '.join(roots) or 'none'}.")
        return roots[model]

    async def request(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, retry_timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """Return the JSON body of an answer.

        Raises RejectedError; ConversationError if only this request keeps failing; DataError if no request succeeds.
        """
        retry_timeout_seconds = self.options.retry_timeout_seconds if retry_timeout_seconds is None else retry_timeout_seconds
        failing_since = math.inf
        for attempt in count():
            retry_after = 0.0
            try:
                answer = await self.client.request(method, route, json=body)
            except httpx.HTTPError as error:
                reason = f"no response ({type(error).__name__}: {error})"
            else:
                if answer.is_success:
                    self._last_success = time.monotonic()
                    return self._parse_body(answer)
                reason = f"status {answer.status_code}: {answer.text[:300]}"
                self._check_may_pass(answer.status_code, route, reason)
                retry_after = _parse_retry_after(answer.headers.get("Retry-After", ""))
            now = time.monotonic()
            failing_since = min(failing_since, now)
            if now - failing_since >= retry_timeout_seconds:
                if self._last_success > failing_since:
                    raise ConversationError(f"{reason}, {attempt + 1} attempts in {now - failing_since:.0f} s")
                raise DataError(
                    f"{self.client.base_url}{route}: no request has succeeded for {now - failing_since:.0f} s; the last failure: "
                    f"{reason}. The same command continues."
                )
            pause = min(self.options.first_pause_seconds * 2**attempt, MAX_PAUSE_SECONDS)
            pause = max(pause * random.uniform(0.5, 1.5), retry_after)  # noqa: S311 (no secret)
            await asyncio.sleep(min(pause, max(0.0, failing_since + retry_timeout_seconds - now)))
        raise AssertionError("unreachable")

    def _check_may_pass(self, status: int, route: str, reason: str) -> None:
        """Raise RejectedError or DataError for a status that is no success and cannot pass."""
        if is_retried(status):
            return
        if status in FATAL_STATUSES or status < 400:
            raise DataError(f"{self.client.base_url}{route}: {reason}")
        raise RejectedError(reason)

    def _parse_body(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise DataError(f"{answer.url}: the answer is no JSON object; expected: the address of a vLLM server.")
        return body


def _parse_address(url: str) -> str:
    """Return the address without the path of the interface. Raises ConfigError."""
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"endpoint {url!r}: {error}; expected: an address such as http://localhost:8000.") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"endpoint {url!r}: expected: an address such as http://localhost:8000.")
    return url.rstrip("/").removesuffix("/v1")


def _parse_retry_after(value: str) -> float:
    """Return the seconds of the header `Retry-After`, which has a number or a date; 0 without one."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a time zone
        return 0.0


async def generate_from_endpoint(
    url: str,
    model: str,
    source: Path,
    output: Path,
    *,
    parameters: GenerationParameters,
    template: TemplateArguments = NO_TEMPLATE_ARGUMENTS,
    options: EndpointOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> EndpointAnswers:
    """Write the server's answers to `output`. Raises DataError, ConfigError.

    Conversations that the server rejects are part of the result, unless they are more than `max_rejected_share`.
    """
    options = options or EndpointOptions()
    conversations = list(read_texts(source))
    async with VllmEndpoint.connect(url, options) as endpoint:
        try:
            root = await endpoint.read_model_root(model)
        except ConversationError as error:
            raise DataError(f"{url}: {error}") from None
        output.parent.mkdir(parents=True, exist_ok=True)
        target = f"{model} ({root}), answered by a server"
        check_run_file(output, {"target": target, "template_arguments": template.to_json(), **parameters.to_json()})
        done = _keep_complete_lines(output, conversations)
        rejections = RejectionFile(output, conversations, keep=bool(done) and not options.retry_rejected)
        run = _Run(endpoint, model, parameters, template, conversations, rejections, len(done), on_progress)
        omitted = done | rejections.entries.keys()
        with output.open("ab") as stream:
            await run.answer_all((index for index in range(len(conversations)) if index not in omitted), stream)
    _sort_lines(output)
    run.check_rejections(final=True)
    if run.failures:
        location, reason = run.failures[0]
        raise DataError(
            f"{output}: {len(run.failures)} of {len(conversations)} conversations have no answer; the first is {location}: "
            f"{reason}. The same command tries them again."
        )
    return EndpointAnswers(run.written, rejections.sorted_entries)


class RejectionFile:
    """The rejected conversations of an output, in `OUTPUT.rejected.jsonl`.

    A line has a digest of its conversation: one that was changed since is tried again.
    """

    def __init__(self, output: Path, conversations: Sequence[Conversation], *, keep: bool) -> None:
        """Read the entries of earlier runs, or with `keep=False` begin without any. Raises DataError."""
        self.path, self._conversations = output.with_name(f"{output.name}.rejected.jsonl"), conversations
        self.entries: dict[int, Rejection] = {}
        """Entries by the place in the source."""
        if keep and self.path.exists():
            for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
                if line.endswith(b"\n"):  # otherwise a kill has left an incomplete one
                    self._read_line(line, f"{self.path}:{number}")
        if self.entries:
            files.replace_file(self.path, "".join(map(self._render_line, self.entries.values())))
        else:
            self.path.unlink(missing_ok=True)

    def _read_line(self, line: bytes, location: str) -> None:
        record = parse_json_line(line, location)
        index = record.get("source_index") if isinstance(record, dict) else None
        if not isinstance(index, int) or not 0 <= index < len(self._conversations):
            raise DataError(f"{location}: source_index is {index!r}, which is no conversation of the input; remove the line.")
        if record.get("conversation") == _digest_conversation(self._conversations[index]):
            self.entries[index] = Rejection(index, self._conversations[index].location, str(record.get("reason")))

    def _render_line(self, entry: Rejection) -> str:
        digest = _digest_conversation(self._conversations[entry.index])
        return json.dumps({"source_index": entry.index, "reason": entry.reason, "conversation": digest}) + "\n"

    def add(self, index: int, reason: str) -> None:
        """Record a rejected conversation."""
        entry = self.entries[index] = Rejection(index, self._conversations[index].location, reason)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(self._render_line(entry))

    @property
    def sorted_entries(self) -> tuple[Rejection, ...]:
        """Return the entries in the order of the source."""
        return tuple(self.entries[index] for index in sorted(self.entries))


def _digest_conversation(conversation: Conversation) -> str:
    content = json.dumps([conversation.messages, conversation.template.to_json()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


class _Run:
    """One run: workers that take the next conversation, and write its line when it is answered."""

    def __init__(
        self,
        endpoint: VllmEndpoint,
        model: str,
        parameters: GenerationParameters,
        template: TemplateArguments,
        conversations: Sequence[Conversation],
        rejections: RejectionFile,
        done_count: int,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.endpoint, self.model, self.parameters, self.template = endpoint, model, parameters, template
        self.conversations, self.rejections = conversations, rejections
        self.done_count, self.on_progress = done_count, on_progress
        self.written = 0
        self.failures: list[tuple[str, str]] = []
        """(location, reason) of conversations that a later run may answer."""

    async def answer_all(self, indices: Iterator[int], stream: IO[bytes]) -> None:
        """Answer the conversations with these indices. Raises DataError."""
        last_sync = time.monotonic()

        async def work() -> None:
            nonlocal last_sync
            for index in indices:
                try:
                    line = await self._answer(index)
                except RejectedError as error:
                    self.rejections.add(index, str(error))
                    self.check_rejections()
                    continue
                except ConversationError as error:
                    self.failures.append((self.conversations[index].location, str(error)))
                    continue
                stream.write(line.encode())
                stream.flush()  # now a kill does not lose the line; a power failure may lose those of two seconds
                self.written += 1
                if time.monotonic() - last_sync > SYNC_SECONDS:
                    os.fsync(stream.fileno())
                    last_sync = time.monotonic()
                if self.on_progress is not None:
                    self.on_progress(self.done_count + self.written)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.endpoint.options.concurrency):
                    group.create_task(work())
        except* DataError as errors:
            raise errors.exceptions[0] from None
        finally:
            os.fsync(stream.fileno())

    def check_rejections(self, *, final: bool = False) -> None:
        """Raise DataError if the server has rejected too many conversations; before the end, only if more cannot help."""
        rejected, answered = len(self.rejections.entries), self.done_count + self.written
        share = self.endpoint.options.max_rejected_share
        limit = share * len(self.conversations)
        if not final:
            limit = max(limit, TOLERATED_REJECTIONS) if answered else TOLERATED_REJECTIONS
        if rejected > limit:
            first = self.rejections.sorted_entries[0]
            raise DataError(
                f"{self.endpoint.client.base_url}: rejects {rejected} of {len(self.conversations)} conversations, with "
                f"{answered} answered; allowed: {share:.1%}. The first is {first.location}: {first.reason}. All are in "
                f"{self.rejections.path}. Change or remove them, or allow a larger share."
            )

    async def _answer(self, index: int) -> str:
        """Return the line of a conversation, answered turn by turn."""
        conversation = self.conversations[index]
        template = conversation.template.with_defaults(self.template)
        temperature = self.parameters.temperatures.draw(self.parameters.seed, index)
        answered: list[ChatMessage] = []
        turns: list[Turn] = []
        for message in add_answer_turn(conversation.messages):
            if message["role"] == "tool":
                calls = _find_open_tool_calls(answered)
                if not calls:
                    break  # the target called no tool here, or fewer: the recorded results answer nothing
                message = {**message, "tool_call_id": calls[0]}
            if message["role"] != "assistant":
                answered.append(message)
                continue
            if _find_open_tool_calls(answered):
                break  # the target called more tools than there are results
            turn, answer = await self._complete(
                answered, template, temperature, _derive_seed(self.parameters.seed, index, len(turns))
            )
            turns.append(turn)
            answered.append(answer)
        if not turns:
            raise RejectedError("a tool's result comes before any answer")
        while answered[-1]["role"] != "assistant":
            answered.pop()  # results of tools that nothing follows
        return render_record(answered, template, temperature, turns, source_index=index)

    async def _complete(
        self, messages: Sequence[ChatMessage], template: TemplateArguments, temperature: float, seed: int
    ) -> tuple[Turn, ChatMessage]:
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.parameters.max_tokens,
            "temperature": temperature,
            "seed": seed,
            "return_token_ids": True,
            **template.to_json(),
        }
        if self.parameters.top_p is not None:
            body["top_p"] = self.parameters.top_p
        answer = await self.endpoint.request("POST", "/v1/chat/completions", body)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        prompt_ids, answer_ids, message = answer.get("prompt_token_ids"), choice.get("token_ids"), choice.get("message")
        if not isinstance(prompt_ids, list) or not isinstance(answer_ids, list) or not isinstance(message, dict):
            raise DataError(
                f"{self.endpoint.client.base_url}: the answer has no token ids, without which a drafter would be trained on "
                "other tokens than the target generated; expected: a vLLM server with `return_token_ids`."
            )
        extra_fields = {name: message[name] for name in ("reasoning", "tool_calls") if message.get(name)}
        return Turn(tuple(prompt_ids), tuple(answer_ids)), {
            "role": "assistant",
            "content": message.get("content") or "",
            **extra_fields,
        }


def _find_open_tool_calls(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the ids of the last answer's tool calls that have no result yet."""
    results = 0
    for message in reversed(messages):
        if message["role"] == "assistant":
            return [str(call.get("id")) for call in message.get("tool_calls") or []][results:]
        results += message["role"] == "tool"
    return []


def _derive_seed(seed: int, index: int, turn: int) -> int:
    """Return a seed of its own for each request: with a common one, all answers would be drawn with the same random numbers."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _keep_complete_lines(output: Path, conversations: Sequence[Conversation]) -> set[int]:
    """Remove an incomplete last line of an earlier run, and return the indices of answered conversations. Raises DataError."""
    done: set[int] = set()
    if not output.exists():
        return done
    with output.open("rb+") as stream:
        complete = 0
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            index = _check_line(line, f"{output}:{number}", conversations)
            if index in done:
                raise DataError(f"{output}:{number}: a second answer to {conversations[index].location}; remove the line.")
            done.add(index)
            complete += len(line)
        stream.truncate(complete)
    return done


def _check_line(line: bytes, location: str, conversations: Sequence[Conversation]) -> int:
    record = parse_json_line(line, location)
    index = record.get("source_index") if isinstance(record, dict) else None
    if not isinstance(index, int) or not 0 <= index < len(conversations):
        raise DataError(
            f"{location}: source_index is {index!r}, and the input has {len(conversations)} conversations; set a new file."
        )
    answered, expected = parse_conversation(record, location), conversations[index]
    prompts = [_without_call_id(message) for message in prompt_messages(answered)]
    if prompts != [_without_call_id(message) for message in prompt_messages(expected)][: len(prompts)]:
        raise DataError(f"{location}: answers another conversation than {expected.location}; set a new file.")
    return index


def _without_call_id(message: ChatMessage) -> ChatMessage:
    return {name: value for name, value in message.items() if name != "tool_call_id"}


def _sort_lines(output: Path) -> None:
    """Give the lines the order of the source, in a file that takes the place of the output when it is complete."""
    places = []
    with output.open("rb") as stream:
        offset = 0
        for line in stream:
            places.append((int(json.loads(line)["source_index"]), offset, len(line)))
            offset += len(line)
        if places == sorted(places):
            return
        new = output.with_name(f".{output.name}.writing")
        with new.open("wb") as ordered:
            for _, begin, length in sorted(places):
                stream.seek(begin)
                ordered.write(stream.read(length))
            ordered.flush()
            os.fsync(ordered.fileno())
    new.replace(output)
