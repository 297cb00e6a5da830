"""Builds the request that both engines get from a user's request, or finds the reason why they get none.

Both engines get the same bytes. The user's own messages, tools, formats, model and sampling parameters stay. What would make the
two answers differ, cause an effect outside the engine, or hide the counts of speculation is set or left out. Fields are those of
vLLM 0.29 to 0.33 (vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py).

Guarantees: the seed is the pair's own, whatever the request says: pairs with the same seed share their random numbers. The length
has a limit. No field names the user. A `cache_salt` separates tenants as before, under another name. Not guaranteed: that the
engines accept the request; what both reject is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aerie.evaluator.keyed_hash import KeyedHash
from aerie.evaluator.skip_reasons import SkipReason

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
PATHS = frozenset((CHAT_PATH, COMPLETIONS_PATH))
"""Endpoints whose answers have counts of speculation."""

SEED_BITS = 63
"""Bits of a seed: vLLM accepts signed integers of 64 bits."""
MAX_ANSWER_TOKENS = 1024
"""Most tokens that an answer may have: its log-probabilities have to fit in memory."""
TOP_TOKENS = 5
"""Likeliest tokens at a position by which answers are checked."""
_TOP_LOGPROBS = TOP_TOKENS + 1
"""Log-probabilities that are requested for a position: of /v1/chat/completions, the generated token takes the place of one."""
_DEFAULT_COMPLETION_TOKENS = 16
"""Tokens that vLLM generates for a request of /v1/completions without `max_tokens`."""
_OMITTED_FIELDS = frozenset(
    (
        # Counts are in whole answers; streams would have them in the last chunk at most.
        *("stream", "stream_options", "stream_interval"),
        # One answer, as checked, by the seed and the length that are set here.
        *("n", "best_of", "use_beam_search", "max_tokens", "max_completion_tokens", "seed"),
        # Names of the user, the session or the request: engines must not mistake the replay for the request.
        *("user", "safety_identifier", "metadata", "store", "session_id", "request_id", "prompt_cache_key"),
        # Scheduling and transfers that belong to the original request.
        *("priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
        # Parts of an answer that nobody reads here; those that are read are set.
        *("echo", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids"),
        *("return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text", "return_weight_versions"),
    )
)
_ANSWER_FIELDS: Mapping[str, dict[str, Any]] = {
    CHAT_PATH: {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": _TOP_LOGPROBS},
    COMPLETIONS_PATH: {"return_tokens_as_token_ids": True, "logprobs": _TOP_LOGPROBS},
}
"""Fields by which an answer has the counts that are read, by endpoint."""
_PLAIN_FIELDS = _OMITTED_FIELDS | {
    *("messages", "prompt", "model", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("reasoning_effort", "include_reasoning", "truncate_prompt_tokens", "truncation_side"),
}
"""Fields that do not make the target's unlikely tokens likelier, with a temperature of at most 1."""
_NEUTRAL_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_NEUTRAL_SAMPLING = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, **_NEUTRAL_PENALTIES}
_MEDIA_FIELDS = ("image_url", "audio_url", "video_url")


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """Rules by which requests are replayed."""

    max_tokens: int
    """Most tokens of an answer, from 2 to MAX_ANSWER_TOKENS."""
    reads_answers: bool = True
    """Whether counts are read from the answers, and not from the engine."""
    priority: int = 0
    """Priority of the replay: higher is later. 0 for engines without priority scheduling, which may reject any other."""
    has_neutral_defaults: bool = False
    """Whether the engines sample by default as the target says, not as the model's generation_config says."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A request as both engines get it."""

    path: str
    body: bytes = field(repr=False)
    bucket: int
    """Bucket of the request's cluster."""
    is_greedy: bool
    """Whether its answer is free of chance, so that equal targets give equal answers."""
    is_plain: bool
    """Whether it samples unlikely tokens at most as often as the target's probabilities say: neither penalties nor formats."""
    is_exact: bool
    """Whether it samples each token as often as the target's probabilities say: plain, at temperature 1, from all tokens."""


def build_replay(
    path: str, body: bytes, cluster_header: str, seed: int, rules: ReplayRules, keyed_hash: KeyedHash
) -> ReplayRequest | SkipReason:
    """Return the request for both engines, or why there is none.

    `cluster_header`: value of the header that names the cluster; empty without one. `seed`: another one for each pair, also with
    the same request.
    """
    if path not in PATHS:
        return SkipReason.UNSUPPORTED_PATH
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):  # also bytes that are no text
        return SkipReason.INVALID
    if not isinstance(document, dict):
        return SkipReason.INVALID
    skip_reason = _find_skip_reason(path, document)
    if skip_reason is not None:
        return skip_reason
    length = _answer_length(path, document, rules.max_tokens)
    if isinstance(length, SkipReason):
        return length
    replay = {name: value for name, value in document.items() if name not in _OMITTED_FIELDS}
    if isinstance(replay.get("min_tokens"), int):
        replay["min_tokens"] = min(replay["min_tokens"], length)
    if isinstance(salt := document.get("cache_salt"), str):
        replay["cache_salt"] = keyed_hash.cache_salt(salt)
    if rules.priority:
        replay["priority"] = rules.priority
    replay |= {"stream": False, "max_completion_tokens" if path == CHAT_PATH else "max_tokens": length}
    if rules.reads_answers:
        replay |= _ANSWER_FIELDS[path]
    is_plain = _is_plain(document, rules)
    cluster = _find_cluster_name(cluster_header, document).encode(errors="replace") or _encode(replay)
    return ReplayRequest(
        path,
        _encode(replay | {"seed": seed}),
        keyed_hash.bucket(cluster),
        is_greedy=document.get("temperature") == 0,
        is_plain=is_plain,
        is_exact=is_plain and _is_exact(document, rules),
    )


def _find_skip_reason(path: str, document: Mapping[str, Any]) -> SkipReason | None:
    if any(document.get(name) not in (None, 1) for name in ("n", "best_of")) or document.get("use_beam_search"):
        return SkipReason.SEVERAL_ANSWERS
    if path == COMPLETIONS_PATH:
        prompt = document.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            return SkipReason.SEVERAL_ANSWERS
        return None if isinstance(prompt, str | list) and prompt else SkipReason.INVALID
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return SkipReason.INVALID
    return SkipReason.MEDIA_URL if any(map(_has_remote_media, messages)) else None


def _has_remote_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    for value in (part.get(name) for part in parts for name in _MEDIA_FIELDS):
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str) and not url.startswith("data:"):
            return True
    return False


def _answer_length(path: str, document: Mapping[str, Any], max_tokens: int) -> int | SkipReason:
    """Return the most tokens of the answer."""
    default = max_tokens if path == CHAT_PATH else _DEFAULT_COMPLETION_TOKENS
    names = ("max_completion_tokens", "max_tokens") if path == CHAT_PATH else ("max_tokens",)
    length = next((document[name] for name in names if document.get(name) is not None), default)
    if type(length) is not int:
        return SkipReason.INVALID
    return min(length, max_tokens) if length > 1 else SkipReason.TOO_SHORT


def _is_plain(document: Mapping[str, Any], rules: ReplayRules) -> bool:
    temperature, *penalties = _sampling_values(document, rules, "temperature", *_NEUTRAL_PENALTIES)
    if not isinstance(temperature, int | float) or not 0 < temperature <= 1 or penalties != list(_NEUTRAL_PENALTIES.values()):
        return False
    return document.keys() <= _PLAIN_FIELDS | _NEUTRAL_PENALTIES.keys()


def _is_exact(document: Mapping[str, Any], rules: ReplayRules) -> bool:
    temperature, top_p, top_k, min_p = _sampling_values(document, rules, "temperature", "top_p", "top_k", "min_p")
    return temperature == 1 and top_p == 1 and top_k in (0, -1) and min_p == 0


def _sampling_values(document: Mapping[str, Any], rules: ReplayRules, *names: str) -> list[Any]:
    """Return the values by which the engine samples; None for those that are unknown."""
    defaults = _NEUTRAL_SAMPLING if rules.has_neutral_defaults else {}
    stated = {name: value for name, value in document.items() if value is not None}
    return [(defaults | stated).get(name) for name in names]


def _find_cluster_name(header: str, document: Mapping[str, Any]) -> str:
    """Return the name of the request's tenant or conversation; empty if it names none."""
    names = (header, document.get("user"), document.get("session_id"))
    return next((name for name in names if isinstance(name, str) and name), "")


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
