"""What a whole command line of `vllm serve` says: the model and the drafter besides what `arguments` reads.

Aerie writes these flags itself for its own engines; this is for engines that somebody else started. Guarantees and limits are
those of `arguments`; the model is named as vLLM would take it, whether it is a repository or a path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.engine.arguments import ArgumentError, EngineArguments, ParsedFlag, interpret_flags, parse_flags


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What an engine with this command line serves."""

    model: str | None
    """A repository or a path; None: not named."""
    revision: str | None
    """Of the repository."""
    speculative_config: Mapping[str, Any]
    """The speculative config, whichever flags it was written with; empty without speculation."""
    arguments: EngineArguments
    multi_pod_flag: str
    """The flag by which one engine is more than one pod; empty: it is one."""
    has_config_file: bool
    """Whether further flags are in a file of the pod."""


def parse_serve_command(args: Sequence[str]) -> ServeCommand:
    """What the words behind `vllm serve` say. Raises ArgumentError."""
    found = parse_flags(args)
    positional = found.pop(0) if found and not found[0].name else None
    if positional is not None and len(positional.values) > 1:
        raise ArgumentError(f"spec.engine.args begins with {len(positional.values)} words, and vLLM takes one model there.")
    last = {option.name: option for option in found}
    own = {name: _single_value(last[name]) for name in ("--model", "--revision") if name in last}
    # `--model` is the beginning of another flag's name too, and no shortened one.
    arguments = interpret_flags([option for option in found if option.name not in ("--model", "--revision")])
    return ServeCommand(
        model=positional.values[0] if positional is not None else own.get("--model"),
        revision=own.get("--revision"),
        speculative_config=_parse_speculative_config(last),
        arguments=arguments,
        multi_pod_flag=next((option.raw_text for option in last.values() if _is_multi_pod_flag(option)), ""),
        has_config_file="--config" in last,
    )


_MULTI_POD_FLAGS = frozenset(
    {
        "--data-parallel-external-lb",
        "--data-parallel-hybrid-lb",
        "--data-parallel-rank",
        "--data-parallel-size-local",
        "--data-parallel-start-rank",
        "--headless",
        "--nnodes",
    }
)


def _is_multi_pod_flag(option: ParsedFlag) -> bool:
    if option.name == "--distributed-executor-backend":
        return option.values == ("ray",)
    return option.name in _MULTI_POD_FLAGS and option.values != ("1",)


_SPECULATIVE_CONFIG_KEY_BY_FLAG = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
"""Flags for single keys of the speculative config (vllm/engine/arg_utils.py, create_speculative_config)."""


def _parse_speculative_config(last: Mapping[str, ParsedFlag]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if (option := last.get("--speculative-config")) is not None:
        text = _single_value(option)
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"spec.engine.args sets {option.name} to what cannot be read as JSON ({error}).") from None
        if not isinstance(document, dict):
            raise ArgumentError(f"spec.engine.args sets {option.name} to {text[:80]}: vLLM takes an object there.")
        config = {key.replace("-", "_"): value for key, value in document.items()}
    for flag, key in _SPECULATIVE_CONFIG_KEY_BY_FLAG.items():
        if flag not in last:
            continue
        if key in config:
            raise ArgumentError(f"spec.engine.args has {flag} and {key} in --speculative-config, and vLLM takes one of them.")
        config[key] = _single_value(last[flag])
    if (tokens := config.get("num_speculative_tokens")) is not None:
        config["num_speculative_tokens"] = _parse_num_speculative_tokens(tokens)
    for key in ("model", "revision", "method"):
        if not isinstance(config.get(key, ""), str):
            raise ArgumentError(f"spec.engine.args sets {key} in --speculative-config to {config[key]!r:.80}: write a text.")
    return config


def _parse_num_speculative_tokens(value: object) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is not int or value < 1:
        raise ArgumentError(f"spec.engine.args sets num_speculative_tokens to {value!r:.80}: vLLM takes a whole number above 0.")
    return value


def _single_value(option: ParsedFlag) -> str:
    if len(option.values) != 1:
        raise ArgumentError(f"spec.engine.args has {option.name} with {len(option.values)} values, and vLLM takes one there.")
    return option.values[0]
