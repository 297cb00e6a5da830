"""Requests and answers as vLLM's OpenAI-compatible server reads and writes them: plain data, no I/O.

Shapes and sentences were taken from answers of vLLM 0.32.0. An answer's text is made up: one word per token. Not offered: several
answers to one request (n, best_of), several prompts in one request, log probabilities, tools, structured output.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["completion", "chat"]
_TEXT = "the eyrie stands high above a river and watches over what comes up from below"
_WORDS = _TEXT.split()


class ApiError(Exception):
    """An answer other than 200: the message is vLLM's."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class Ask:
    """One request, checked."""

    kind: Kind
    model: str
    prompt_tokens: int
    segments: tuple[tuple[Hashable, int], ...]
    """The prompt in whole blocks and a rest, each with a hash, for the prefix cache."""
    max_tokens: int
    stream: bool
    usage_in_stream: bool
    ignore_eos: bool


@dataclass(frozen=True)
class Limits:
    """What requests are checked against."""

    models: tuple[str, ...]
    max_model_len: int
    block_size: int
    bytes_per_token: float
    speculation: bool


def read(kind: Kind, raw: bytes, limits: Limits) -> Ask:
    """The request in `raw`. Raises ApiError."""
    body = _json(raw)
    model = body.get("model") or limits.models[0]
    if model not in limits.models:
        raise ApiError(
            404, f"The model `{model}` does not exist. Valid aliases: {', '.join(limits.models)}.", "NotFoundError", "model"
        )
    if limits.speculation and (body.get("min_p") or body.get("logit_bias")):
        raise ApiError(400, "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding.")
    for name, least in (("n", 1), ("best_of", 1)):
        if body.get(name, least) not in (least, None):
            raise ApiError(400, f"{name}={body[name]} is not offered by the simulator: send one request per answer.", param=name)
    tokens, segments = _prompt(kind, body, limits)
    if tokens >= limits.max_model_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains {tokens} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={tokens})",
            param="input_tokens",
        )
    room = limits.max_model_len - tokens
    wanted = body.get("max_completion_tokens") if kind == "chat" else None
    wanted = wanted if wanted is not None else body.get("max_tokens", 16 if kind == "completion" else None)
    if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
        raise ApiError(
            400, f"max_tokens must be at least 1, got {wanted}. (parameter=max_tokens, value={wanted})", param="max_tokens"
        )
    if wanted is not None and wanted > limits.max_model_len:
        raise ApiError(
            400,
            f"max_tokens={wanted} cannot be greater than max_model_len={limits.max_model_len}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={wanted})",
            param="max_tokens",
        )
    options = body.get("stream_options") or {}
    return Ask(
        kind,
        model,
        tokens,
        segments,
        min(room, wanted if wanted is not None else room),
        bool(body.get("stream")),
        bool(options.get("include_usage")),
        bool(body.get("ignore_eos")),
    )


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        reason = getattr(error, "msg", "invalid")
        detail = {"type": "json_invalid", "loc": "body.1", "msg": "JSON decode error", "ctx": {"error": reason}}
        raise ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", "body.1") from error
    if not isinstance(body, dict):
        raise ApiError(400, "1 validation error:\n  the body is no JSON object", "Bad Request", "body")
    return body


def _prompt(kind: Kind, body: dict[str, Any], limits: Limits) -> tuple[int, tuple[tuple[Hashable, int], ...]]:
    """Number of tokens, and the segments: by token ids when there are some, else by bytes of text."""
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            detail = {"type": "missing", "loc": "body.messages", "msg": "Field required"}
            raise ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", "body.messages")
        prompt: Any = "".join(f"{m.get('role', 'user')}: {_text(m.get('content'))}\n" for m in messages)
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
    if not prompt:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", param="prompt")
    if isinstance(prompt, list):
        if not all(isinstance(token, int) for token in prompt):
            raise ApiError(400, "several prompts in one request are not offered by the simulator: send one each.", param="prompt")
        units, per_block = b"".join(token.to_bytes(8, "little", signed=True) for token in prompt), 8.0 * limits.block_size
        tokens = len(prompt)
    else:
        units, per_block = str(prompt).encode(), limits.bytes_per_token * limits.block_size
        tokens = max(1, round(len(units) / limits.bytes_per_token))
    segments: list[tuple[Hashable, int]] = []
    for block in range(tokens // limits.block_size):
        part = units[round(block * per_block) : round((block + 1) * per_block)]
        segments.append((hashlib.blake2b(part, digest_size=8).digest(), limits.block_size))
    if rest := tokens % limits.block_size:
        segments.append((hashlib.blake2b(units[-64:], digest_size=8).digest(), rest))
    return tokens, tuple(segments)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def text(first: int, count: int) -> str:
    """The words of tokens `first` to `first + count` of an answer."""
    return "".join(
        f" {word}" for word in itertools.islice(itertools.cycle(_WORDS), first % len(_WORDS), first % len(_WORDS) + count)
    )


def usage(prompt: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def answer(ask: Ask, name: str, created: int, generated: int, reason: str, version: str) -> dict[str, Any]:
    """The whole body of an answer that is not streamed."""
    content = text(0, generated)
    common: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None, "token_ids": None}
    if ask.kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "reasoning": None}
        choice, kind = common | {"message": message, "routed_experts": None}, "chat.completion"
    else:
        more = {"text": content, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
        choice, kind = common | more, "text_completion"
    return {
        "id": name,
        "object": kind,
        "created": created,
        "model": ask.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": f"vllm-{version}-simulator",
        "usage": usage(ask.prompt_tokens, generated) | {"prompt_tokens_details": None, "completion_tokens_details": None},
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def chunk(ask: Ask, name: str, created: int, first: int, count: int, reason: str | None) -> dict[str, Any]:
    """One event of a stream: tokens `first` to `first + count`."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
    if ask.kind == "chat":
        choice |= {"delta": {"content": text(first, count)}, "token_ids": None}
    else:
        choice |= {"text": text(first, count), "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
    return _event(ask, name, created, [choice])


def opening(ask: Ask, name: str, created: int) -> dict[str, Any]:
    """The first event of a chat's stream."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return _event(ask, name, created, [choice]) | {"prompt_token_ids": None}


def closing(ask: Ask, name: str, created: int, generated: int, version: str) -> dict[str, Any]:
    """The event that carries the usage, when the client asks for it."""
    more = {"usage": usage(ask.prompt_tokens, generated), "system_fingerprint": f"vllm-{version}-simulator"}
    return _event(ask, name, created, []) | more


def _event(ask: Ask, name: str, created: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    kind = "chat.completion.chunk" if ask.kind == "chat" else "text_completion"
    return {"id": name, "object": kind, "created": created, "model": ask.model, "choices": choices}


def models(names: tuple[str, ...], root: str, created: int, max_model_len: int) -> dict[str, Any]:
    """The answer of /v1/models."""
    permission = {
        "id": "modelperm-simulator",
        "object": "model_permission",
        "created": created,
        **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False),
        **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
        "organization": "*",
        "group": None,
    }
    common = {"object": "model", "created": created, "owned_by": "vllm", "root": root, "parent": None}
    return {
        "object": "list",
        "data": [{"id": name, **common, "max_model_len": max_model_len, "permission": [permission]} for name in names],
    }
