"""What both ways to generate training data share: sampling, the exact tokens of a conversation, and the run file of an output.

Answers are the target's only if all of them come from it. An interrupted run would otherwise be continued with another target or
another sampling without a message, and the file would have both. So `OUTPUT.run.json` has what a run has to have in common with
its continuation.

Guarantee: a run that differs from it is rejected. Not guaranteed: that a server has the same weights under the same name.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_drafter import files
from aerie_drafter.chat_template import ChatMessage, TemplateArguments
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.train.conversations import Conversation, TokenSequence


@dataclass(frozen=True)
class TemperatureMix:
    """Temperatures with their shares of the conversations. A drafter serves requests of several temperatures."""

    shares: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """(temperature, share)"""

    @classmethod
    def constant(cls, temperature: float) -> TemperatureMix:
        """Return a mix of a single temperature."""
        return cls(((temperature, 1.0),))

    @classmethod
    def parse(cls, text: str) -> TemperatureMix:
        """Parse `0.7`, or `0:0.5,0.7:0.25,1:0.25`. Raises ConfigError."""
        shares = []
        for part in text.split(","):
            temperature, colon, share = part.partition(":")
            try:
                shares.append((float(temperature), float(share) if colon else 1.0))
            except ValueError:
                shares = []
                break
        if not shares or not all(0 <= temperature < 100 and 0 < share < 1e9 for temperature, share in shares):
            raise ConfigError(f"--temperature is {text!r}; expected: a number, or TEMPERATURE:SHARE,... such as 0:0.5,1:0.5.")
        return cls(tuple(shares))

    def draw(self, seed: int, index: int) -> float:
        """Return the temperature of a conversation or batch; it depends only on the arguments."""
        generator = random.Random(f"temperature {seed} {index}")  # noqa: S311 (no secret)
        temperatures, weights = zip(*self.shares, strict=True)
        return float(generator.choices(temperatures, weights)[0])

    def __str__(self) -> str:
        if len(self.shares) == 1:
            return f"{self.shares[0][0]:g}"
        return ",".join(f"{temperature:g}:{share:g}" for temperature, share in self.shares)


@dataclass(frozen=True)
class GenerationParameters:
    """Sampling parameters of the target. Temperature 0 is greedy."""

    max_tokens: int = 1024
    temperatures: TemperatureMix = TemperatureMix()
    top_p: float | None = None
    """Default: 1; of a server, its own."""
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the values for a run file."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": str(self.temperatures),
            "top_p": self.top_p,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Turn:
    """One answer: the prompt that the engine processed, and the tokens that it generated, with the one that ended the turn."""

    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]


def join_turns(turns: Sequence[Turn]) -> tuple[TokenSequence, ...]:
    """Return the sequences of a conversation's turns.

    A turn extends the sequence before it if its prompt begins with that. Otherwise it is a sequence of its own: the template
    changed an earlier turn, for example removed its thinking, or an answer has other tokens when its text is encoded.
    """
    sequences: list[TokenSequence] = []
    for turn in turns:
        begin = len(turn.prompt_token_ids)
        span = (begin, begin + len(turn.answer_token_ids))
        earlier = sequences[-1] if sequences else TokenSequence((), ())
        if turn.prompt_token_ids[: len(earlier.token_ids)] == earlier.token_ids:
            sequences[-1:] = []
            spans = (*earlier.answer_spans, span)
        else:
            spans = (span,)
        sequences.append(TokenSequence(turn.prompt_token_ids + turn.answer_token_ids, spans))
    return tuple(sequences)


def render_record(
    messages: Sequence[ChatMessage], template: TemplateArguments, temperature: float, turns: Sequence[Turn], **extra: Any
) -> str:
    """Return the line of an answered conversation."""
    record = {
        **extra,
        "messages": list(messages),
        **template.to_json(),
        "temperature": temperature,
        "sequences": [sequence.to_json() for sequence in join_turns(turns)],
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def add_answer_turn(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with a last turn of the assistant."""
    return [*messages] if messages[-1]["role"] == "assistant" else [*messages, {"role": "assistant", "content": ""}]


def prompt_messages(conversation: Conversation) -> list[ChatMessage]:
    """Return the messages that are not answers."""
    return [message for message in conversation.messages if message["role"] != "assistant"]


def describe_template(chat_template: str, arguments: TemplateArguments) -> dict[str, Any]:
    """Return the chat template and its arguments for a run file."""
    digest = hashlib.sha256(chat_template.encode()).hexdigest()
    return {"chat_template": f"sha256:{digest}", "template_arguments": arguments.to_json()}


def read_run_file(output: Path) -> dict[str, Any]:
    """Return what a run recorded beside its output; empty for other files. Raises DataError."""
    path = _run_file_path(output)
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); generate the answers again, into a new file.") from error
    return run if isinstance(run, dict) else {}


def _run_file_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.run.json")


def check_run_file(output: Path, run: Mapping[str, Any]) -> None:
    """Compare a run with the one that began `output`; record it if there is none. Raises DataError."""
    path = _run_file_path(output)
    run = json.loads(json.dumps(run))
    if not output.exists() or output.stat().st_size == 0:
        files.replace_file(path, json.dumps(run, indent=1) + "\n")
        return
    before = read_run_file(output)
    if not before:
        raise DataError(
            f"{output}: has answers, but {path.name} does not exist, which says what wrote them; set a new output file."
        )
    for name in run:
        if before.get(name) != run[name]:
            raise DataError(
                f"{output}: its answers were generated with {name} {before.get(name)!r}, and now it is {run[name]!r}; "
                "set a new output file, or the earlier value to continue this one."
            )
