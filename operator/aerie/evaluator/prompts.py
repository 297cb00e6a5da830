"""Requests from a file: JSON lines in the format of OpenAI's chat or completion requests.

    {"messages": [{"role": "user", "content": "..."}], "temperature": 0.7}
    {"prompt": "...", "max_tokens": 200, "user": "tenant-3"}

The order is random, and another one each time that all were sent: files are often sorted, and a verdict may need a part only.
`model` is left out, so that engines answer with the model that they serve.

Guarantees: every line is checked before the first request is sent; an error names file, line, field and fix, and quotes no
prompt. Memory holds one prompt and 8 bytes for each line. Not guaranteed: what follows from a file that changes while it is open.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aerie.evaluator.keyed_hash import KeyedHash
from aerie.evaluator.requests import CHAT_PATH, COMPLETIONS_PATH, SEED_BITS, ReplayRequest, ReplayRules, build_replay
from aerie.evaluator.skip_reasons import SkipReason

MAX_LINE_BYTES = 1024 * 1024
"""Size limit of a line."""
_FIXES = {
    SkipReason.INVALID: "a field has a wrong type: set messages to a list of objects, prompt to a text or token ids, and "
    "max_tokens to an integer.",
    SkipReason.SEVERAL_ANSWERS: "n, best_of, use_beam_search or prompt requires several answers: write a line for each prompt, "
    "without n, best_of and use_beam_search.",
    SkipReason.MEDIA_URL: "messages has an image, audio or video at an address: use a data: URL.",
    SkipReason.TOO_SHORT: "max_tokens or max_completion_tokens is below 2: set 2 or more, because the first token has no draft.",
}


class PromptError(ValueError):
    """A file of prompts that cannot be used; the message is a full sentence, without any prompt."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """An open file of prompts, all of which can be replayed."""

    stream: BinaryIO
    offsets: array[int]
    """Where the lines with a prompt begin, in bytes."""
    rules: ReplayRules
    keyed_hash: KeyedHash

    def requests(self) -> Iterator[ReplayRequest | SkipReason]:
        """Yield all prompts in random order, again and again."""
        order = list(range(len(self.offsets)))
        while True:
            secrets.SystemRandom().shuffle(order)
            for number in order:
                try:
                    self.stream.seek(self.offsets[number])
                    path, body = _read_prompt(self.stream.readline(MAX_LINE_BYTES + 1))
                except (PromptError, OSError):  # the file has changed
                    yield SkipReason.INVALID
                    continue
                yield build_replay(path, body, "", secrets.randbits(SEED_BITS), self.rules, self.keyed_hash)


def open_prompts(path: Path, rules: ReplayRules, keyed_hash: KeyedHash) -> PromptFile:
    """Return the file, checked line by line. Raises PromptError."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise PromptError(f"{path} cannot be read ({error.strerror}): mount the file, or correct --prompts.") from None
    offsets = array("Q")
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not line.strip():
            continue
        try:
            prompt_path, body = _read_prompt(line)
            replay = build_replay(prompt_path, body, "", 0, rules, keyed_hash)
            if isinstance(replay, SkipReason):
                raise PromptError(_FIXES[replay])
        except PromptError as error:
            stream.close()
            raise PromptError(f"{path}, line {number}: {error}") from None
        offsets.append(stream.tell() - len(line))
    if not offsets:
        stream.close()
        raise PromptError(f"{path} has no prompt: write a JSON object with messages or prompt on each line.")
    return PromptFile(stream, offsets, rules, keyed_hash)


def _read_prompt(line: bytes) -> tuple[str, bytes]:
    """Return the endpoint and the request of a line. Raises PromptError."""
    if len(line) > MAX_LINE_BYTES:
        raise PromptError(f"it is longer than {MAX_LINE_BYTES} bytes: shorten the prompt.")
    try:
        document: Any = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise PromptError('it is no JSON object: write a request such as {"messages": [...]} or {"prompt": "..."} on one line.')
    if ("messages" in document) == ("prompt" in document):
        raise PromptError("it needs messages or prompt, and not both: write one request on each line.")
    document.pop("model", None)
    return (CHAT_PATH if "messages" in document else COMPLETIONS_PATH), json.dumps(document).encode()
