"""Generation of training data by a running vLLM: concurrent requests to its OpenAI interface.

The server renders the prompt, so the answers are those of the deployment: its chat template, its parsers of tools and reasoning,
and its defaults for what a request does not set. It returns the tokens of prompt and answer (`return_token_ids`), which the line
keeps.

Guarantees: a line is complete or missing, and a run that was killed continues with the conversations that have no line. The
seeds and temperatures of a conversation depend only on its place in the source. A finished file has the order of the source. A
run with another model name, template or sampling is rejected. Not guaranteed: equal answers of two runs, because rounding
depends on what else the server computes; nor that other weights under the same name are noticed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from aerie_drafter.chat_template import NO_TEMPLATE_ARGUMENTS, ChatMessage, TemplateArguments
from aerie_drafter.errors import DataError
from aerie_drafter.train.answers import (
    GenerationParameters,
    Turn,
    add_answer_turn,
    check_run_file,
    prompt_messages,
    render_record,
)
from aerie_drafter.train.conversations import Conversation, parse_conversation, parse_json_line, read_conversations

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})

FATAL_STATUSES = frozenset({401, 403, 404})
"""Statuses that no other conversation would change: credentials, model name, address."""

MAX_PAUSE_SECONDS = 30.0
SYNC_SECONDS = 2.0


@dataclass(frozen=True)
class EndpointOptions:
    """Limits of the requests to a server."""

    concurrency: int = 32
    attempts: int = 5
    """Attempts of a request that fails for a reason that may pass."""
    max_failures: int = 20
    """Failed conversations that end a run; fewer are reported at its end."""
    timeout_seconds: float = 3600.0
    first_pause_seconds: float = 0.5
    """Pause after the first failure of a request; each further pause is twice as long, up to 30 s."""


class ConversationError(DataError):
    """The server has no answer to one conversation."""


class VllmEndpoint:
    """Client of a vLLM server for requests with retries."""

    def __init__(self, client: httpx.AsyncClient, options: EndpointOptions) -> None:
        """`client` has the base address."""
        self.client, self.options = client, options

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, options: EndpointOptions) -> AsyncIterator[VllmEndpoint]:
        """Connect to an address; OPENAI_API_KEY is sent if it is set."""
        key = os.environ.get("OPENAI_API_KEY")
        async with httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(options.timeout_seconds, connect=10),
            limits=httpx.Limits(max_connections=options.concurrency),
        ) as client:
            yield cls(client, options)

    async def read_model_root(self, model: str) -> str:
        """Return the folder or repository that the server has loaded as `model`. Raises DataError."""
        body = await self.request("GET", "/v1/models")
        roots = {str(entry.get("id")): str(entry.get("root") or "") for entry in body.get("data") or []}
        if model not in roots:
            raise DataError(f"{self.client.base_url}: no model {model!r}; its models are {', '.join(roots) or 'none'}.")
        return roots[model]

    async def request(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON body of an answer. Raises ConversationError, or DataError if no request can succeed."""
        reason = ""
        for attempt in range(self.options.attempts):
            if attempt:
                pause = min(self.options.first_pause_seconds * 2 ** (attempt - 1), MAX_PAUSE_SECONDS)
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 (no secret)
            try:
                answer = await self.client.request(method, route, json=body)
            except httpx.HTTPError as error:
                reason = f"no response ({type(error).__name__}: {error})"
                continue
            if answer.is_success:
                return self._parse_body(answer)
            reason = f"status {answer.status_code}: {answer.text[:300]}"
            if answer.status_code in FATAL_STATUSES:
                raise DataError(f"{self.client.base_url}{route}: {reason}")
            if answer.status_code not in RETRIED_STATUSES:
                raise ConversationError(reason)
        raise ConversationError(f"{reason}, {self.options.attempts} attempts")

    def _parse_body(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise DataError(f"{answer.url}: the answer is no JSON object; expected: the address of a vLLM server.")
        return body


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
) -> int:
    """Write the server's answers to `output`, and return the number of new ones. Raises DataError.

    Conversations that the server rejects are reported at the end, and the same command tries them again.
    """
    options = options or EndpointOptions()
    conversations = list(read_conversations(source))
    async with VllmEndpoint.connect(url, options) as endpoint:
        try:
            root = await endpoint.read_model_root(model)
        except ConversationError as error:
            raise DataError(f"{url}: {error}") from None
        output.parent.mkdir(parents=True, exist_ok=True)
        target = f"{model} ({root}), answered by a server"
        check_run_file(output, {"target": target, "template_arguments": template.to_json(), **parameters.to_json()})
        done = _keep_complete_lines(output, conversations)
        run = _Run(endpoint, model, parameters, template, conversations, len(done), on_progress)
        with output.open("ab") as stream:
            await run.answer_all((index for index in range(len(conversations)) if index not in done), stream)
    _sort_lines(output)
    if run.failures:
        location, reason = run.failures[0]
        raise DataError(
            f"{output}: {len(run.failures)} of {len(conversations)} conversations have no answer; the first is {location}: "
            f"{reason}. The same command tries them again."
        )
    return run.written


class _Run:
    """One run: workers that take the next conversation, and write its line when it is answered."""

    def __init__(
        self,
        endpoint: VllmEndpoint,
        model: str,
        parameters: GenerationParameters,
        template: TemplateArguments,
        conversations: Sequence[Conversation],
        done_count: int,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.endpoint, self.model, self.parameters, self.template = endpoint, model, parameters, template
        self.conversations, self.done_count, self.on_progress = conversations, done_count, on_progress
        self.written = 0
        self.failures: list[tuple[str, str]] = []
        """(location, reason)"""

    async def answer_all(self, indices: Iterator[int], stream: IO[bytes]) -> None:
        """Answer the conversations with these indices. Raises DataError."""
        last_sync = time.monotonic()

        async def work() -> None:
            nonlocal last_sync
            for index in indices:
                try:
                    line = await self._answer(index)
                except ConversationError as error:
                    self._add_failure(index, str(error))
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

    def _add_failure(self, index: int, reason: str) -> None:
        self.failures.append((self.conversations[index].location, reason))
        if len(self.failures) > self.endpoint.options.max_failures:
            location, first = self.failures[0]
            raise DataError(
                f"{self.endpoint.client.base_url}: more than {self.endpoint.options.max_failures} conversations have no answer; "
                f"the first is {location}: {first}. Answered ones are kept: the same command continues."
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
            raise ConversationError("a tool's result comes before any answer")
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
