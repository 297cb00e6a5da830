"""Requests and answers as vLLM's OpenAI-compatible server reads and writes them: plain data, no I/O.

Shapes and messages were taken from answers of vLLM 0.32.0. An answer's text is generated: one word per token, the same words on
every engine, as for one target. A drafter that changes answers changes some of them (`GenerationRequest.changes_token`). Not
supported: several answers to one request (n, best_of), several prompts in one request, log probabilities of streams and of
prompts, tools, structured output.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from aerie_lab.engine.serving.request_metrics import drop_nulls

RequestKind = Literal["completion", "chat"]
_TEXT = "the eyrie stands high above a river and watches over what comes up from below"
_WORDS = _TEXT.split()
_WORDS_TWICE = "".join(f" {text}" for text in _WORDS) * 2
_WORD_OFFSETS = [0, *itertools.accumulate(len(text) + 1 for text in _WORDS * 2)]
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # json.dumps would make one for every event
MAX_LOGPROBS = 20
"""vLLM's default of --max-logprobs."""


class ApiError(Exception):
    """An answer other than 200: the message is vLLM's."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class GenerationRequest:
    """One request, checked."""

    kind: RequestKind
    model: str
    prompt_tokens: int
    segments: tuple[tuple[Hashable, int], ...]
    """The prompt in whole blocks and a rest, each with a hash, for the prefix cache."""
    max_tokens: int
    stream: bool
    include_usage: bool
    ignore_eos: bool
    greedy: bool = False
    logprobs: int | None = None
    """Number of likely tokens reported for each."""
    tokens_as_ids: bool = False
    """Whether log probabilities name tokens by their ids."""
    prompt_digest: bytes = b""
    """Tells the prompt from others."""
    cache_salt: str | None = None
    """Separates cached prompts from those with another salt."""

    def _prompt_uniform(self, what: str) -> float:
        """Return a number from 0 to below 1 that is always the same for this prompt."""
        digest = hashlib.blake2b(f"{what} ".encode() + self.prompt_digest, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2**53

    def changes_token(self, index: int, altered_share: float) -> bool:
        """Return whether a drafter that changes this share of the tokens changes this one."""
        return altered_share > 0 and self._prompt_uniform(str(index)) < altered_share

    def draw_answer_length(self, mean: float) -> int:
        """Tokens after which the model ends the answer, so many in the mean (geometric), and for this prompt always the same."""
        return 1 if mean <= 1 else max(1, math.ceil(math.log1p(-self._prompt_uniform("end")) / math.log1p(-1 / mean)))


@dataclass(frozen=True)
class RequestLimits:
    """Limits that requests are checked against."""

    models: tuple[str, ...]
    max_model_len: int
    block_size: int
    bytes_per_token: float
    has_speculation: bool


def parse_request(kind: RequestKind, raw: bytes, limits: RequestLimits) -> GenerationRequest:
    """Return the request in `raw`. Raises ApiError."""
    body = _parse_json(raw)
    model = body.get("model") or limits.models[0]
    if model not in limits.models:
        raise ApiError(
            404, f"The model `{model}` does not exist. Valid aliases: {', '.join(limits.models)}.", "NotFoundError", "model"
        )
    if limits.has_speculation and (body.get("min_p") or body.get("logit_bias")):
        raise ApiError(400, "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding.")
    for name, least in (("n", 1), ("best_of", 1)):
        if body.get(name, least) not in (least, None):
            raise ApiError(
                400, f"{name}={body[name]} is not supported by the simulator: send one request per answer.", param=name
            )
    tokens, segments = _parse_prompt(kind, body, limits)
    if tokens >= limits.max_model_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains {tokens} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={tokens})",
            param="input_tokens",
        )
    room = limits.max_model_len - tokens
    requested_tokens = body.get("max_completion_tokens") if kind == "chat" else None
    if requested_tokens is None:
        requested_tokens = body.get("max_tokens", 16 if kind == "completion" else None)
    if requested_tokens is not None and (not isinstance(requested_tokens, int) or requested_tokens < 1):
        raise ApiError(
            400,
            f"max_tokens must be at least 1, got {requested_tokens}. (parameter=max_tokens, value={requested_tokens})",
            param="max_tokens",
        )
    if requested_tokens is not None and requested_tokens > limits.max_model_len:
        raise ApiError(
            400,
            f"max_tokens={requested_tokens} cannot be greater than max_model_len={limits.max_model_len}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={requested_tokens})",
            param="max_tokens",
        )
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ApiError(400, "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    options = body.get("stream_options") or {}
    likely = body.get("logprobs") if kind == "completion" else _parse_chat_logprobs(body)
    if likely is not None and not (isinstance(likely, int) and 0 <= likely <= MAX_LOGPROBS):
        raise ApiError(
            400, f"Requested sample logprobs of {likely}, which is greater than max allowed: {MAX_LOGPROBS}", param="logprobs"
        )
    return GenerationRequest(
        kind,
        model,
        tokens,
        segments,
        min(room, requested_tokens if requested_tokens is not None else room),
        bool(body.get("stream")),
        bool(options.get("include_usage")),
        bool(body.get("ignore_eos")),
        body.get("temperature") == 0,
        likely,
        bool(body.get("return_tokens_as_token_ids")),
        hashlib.blake2b(repr(body.get("prompt") or body.get("messages")).encode(), digest_size=8).digest(),
        salt,
    )


def _parse_chat_logprobs(body: dict[str, Any]) -> Any:
    """Return the number of likely tokens of a chat; None without log probabilities."""
    return (body.get("top_logprobs") or 0) if body.get("logprobs") else None


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        reason = getattr(error, "msg", "invalid")
        detail = {"type": "json_invalid", "loc": "body.1", "msg": "JSON decode error", "ctx": {"error": reason}}
        raise ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", "body.1") from error
    if not isinstance(body, dict):
        raise ApiError(400, "1 validation error:\n  the body is no JSON object", "Bad Request", "body")
    return body


def _parse_prompt(kind: RequestKind, body: dict[str, Any], limits: RequestLimits) -> tuple[int, tuple[tuple[Hashable, int], ...]]:
    """Return the number of tokens, and the segments: by token ids if there are any, otherwise by bytes of text."""
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            detail = {"type": "missing", "loc": "body.messages", "msg": "Field required"}
            raise ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", "body.messages")
        prompt: Any = "".join(f"{m.get('role', 'user')}: {_content_text(m.get('content'))}\n" for m in messages)
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


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def filler_text(first: int, count: int) -> str:
    """Return the words of tokens `first` to `first + count` of an answer."""
    start, (cycles, rest) = first % len(_WORDS), divmod(count, len(_WORDS))
    begin = _WORD_OFFSETS[start]
    return _WORDS_TWICE[begin : _WORD_OFFSETS[start + len(_WORDS)]] * cycles + _WORDS_TWICE[begin : _WORD_OFFSETS[start + rest]]


def answer_text(request: GenerationRequest, first: int, count: int, altered_share: float) -> str:
    """Return the words of one answer with a drafter that changes this share of the tokens."""
    if not altered_share:
        return filler_text(first, count)
    return "".join(f" {_WORDS[_token_id(request, index, altered_share)]}" for index in range(first, first + count))


def _token_id(request: GenerationRequest, index: int, altered_share: float) -> int:
    """Return the id of a token: its word's place."""
    return (index + request.changes_token(index, altered_share)) % len(_WORDS)


def _build_logprobs(request: GenerationRequest, count: int, altered_share: float) -> dict[str, list[Any]]:
    """The target's own, of all tokens: it holds the right word for the likeliest, and the next ones for less and less so."""

    def token_text(token: int) -> str:
        return f"token_id:{token}" if request.tokens_as_ids else f" {_WORDS[token]}"

    logprobs: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for index in range(count):
        token_id = _token_id(request, index, altered_share)
        ranks = [(index + rank) % len(_WORDS) for rank in range(min(max(request.logprobs or 0, 2), len(_WORDS)))]
        likely = {token: -0.125 - 2.0 * rank for rank, token in enumerate(ranks)}
        logprobs["text_offset"].append(sum(map(len, logprobs["tokens"])))
        logprobs["token_logprobs"].append(likely[token_id])
        logprobs["tokens"].append(token_text(token_id))
        shown = dict.fromkeys([token_id, *ranks[: request.logprobs]])
        logprobs["top_logprobs"].append({token_text(token): likely[token] for token in shown})
    return logprobs


def _build_chat_logprobs(request: GenerationRequest, count: int, altered_share: float) -> dict[str, list[Any]]:
    """The same in the form of a chat: with as many of the likeliest tokens as requested, the generated one among them or not."""

    def build_entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    logprobs, content = _build_logprobs(request, count, altered_share), []
    for token, logprob, row in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        likeliest = sorted(row.items(), key=lambda item: -item[1])[: request.logprobs]
        content.append({**build_entry(token, logprob), "top_logprobs": [build_entry(*item) for item in likeliest]})
    return {"content": content}


def build_usage(prompt: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def build_response(
    request: GenerationRequest,
    request_id: str,
    created: int,
    generated: int,
    reason: str,
    version: str,
    altered_share: float = 0.0,
    metrics: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the whole body of an answer that is not streamed. `metrics`: those of the request (`request_metrics`)."""
    content = answer_text(request, 0, generated, altered_share)
    common: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None, "token_ids": None}
    if request.kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "reasoning": None}
        choice, kind = common | {"message": message, "routed_experts": None}, "chat.completion"
        if request.logprobs is not None:
            choice["logprobs"] = _build_chat_logprobs(request, generated, altered_share)
    else:
        more: dict[str, Any] = {"text": content, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
        if request.logprobs is not None:
            more["logprobs"] = _build_logprobs(request, generated, altered_share)
        choice, kind = common | more, "text_completion"
    return {
        "id": request_id,
        "object": kind,
        "created": created,
        "model": request.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": f"vllm-{version}-simulator",
        "usage": build_usage(request.prompt_tokens, generated)
        | {"prompt_tokens_details": None, "completion_tokens_details": None},
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": metrics,
    }


def build_chunk(
    request: GenerationRequest,
    request_id: str,
    created: int,
    first: int,
    count: int,
    reason: str | None,
    altered_share: float = 0.0,
) -> dict[str, Any]:
    """One event of a stream: tokens `first` to `first + count`."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
    content = answer_text(request, first, count, altered_share)
    if request.kind == "chat":
        choice |= {"delta": {"content": content}, "token_ids": None}
    else:
        choice |= {"text": content, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
    return _build_chunk_event(request, request_id, created, [choice])


def encode_event(body: object) -> bytes:
    """Encode a document as an event of a stream."""
    return f"data: {_ENCODER.encode(body)}\n\n".encode()


class ChunkEncoder:
    """The events of one stream, those without an end: all but the text is encoded once."""

    def __init__(self, request: GenerationRequest, request_id: str, created: int, altered_share: float) -> None:
        self._request, self._altered_share = request, altered_share
        encoded = encode_event(build_chunk(request, request_id, created, 0, 1, None)).decode()
        self._before, _, self._after = encoded.rpartition(_ENCODER.encode(filler_text(0, 1)))

    def encode(self, first: int, count: int) -> bytes:
        """Return tokens `first` to `first + count`, which have no character that JSON writes otherwise."""
        return f'{self._before}"{answer_text(self._request, first, count, self._altered_share)}"{self._after}'.encode()


def build_first_chunk(request: GenerationRequest, request_id: str, created: int) -> dict[str, Any]:
    """Return the first event of a chat's stream."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return _build_chunk_event(request, request_id, created, [choice]) | {"prompt_token_ids": None}


def build_usage_chunk(
    request: GenerationRequest,
    request_id: str,
    created: int,
    generated: int,
    version: str,
    metrics: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the event that carries the usage and the request's `metrics`, when the client requests it."""
    more: dict[str, Any] = {"usage": build_usage(request.prompt_tokens, generated)}
    more["system_fingerprint"] = f"vllm-{version}-simulator"
    if metrics is not None:
        more["metrics"] = drop_nulls(metrics)
    return _build_chunk_event(request, request_id, created, []) | more


def _build_chunk_event(
    request: GenerationRequest, request_id: str, created: int, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    kind = "chat.completion.chunk" if request.kind == "chat" else "text_completion"
    return {"id": request_id, "object": kind, "created": created, "model": request.model, "choices": choices}


def build_models_response(names: tuple[str, ...], root: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return the answer of /v1/models."""
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
