"""A parser for a complete command line of `vllm serve`: model and drafter besides what `arguments` parses.

Aerie writes these flags itself for its own engines. This module is for engines that somebody else started. Guarantees and limits
are those of `arguments`. The model has the name that vLLM would use, whether it is a repository or a path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.engine.arguments import ArgumentError, EngineArguments, ParsedFlag, interpret_flags, parse_flags


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The model, drafter and arguments of an engine with this command line."""

    model: str | None
    """A repository or a path; None: not named on the command line."""
    revision: str | None
    """The revision of the repository."""
    speculative_config: Mapping[str, Any]
    """The speculative config, whichever flags it was written with; empty without speculation."""
    arguments: EngineArguments
    multi_pod_flag: str
    """The flag that makes one engine span several pods; empty: it is one pod."""
    has_config_file: bool
    """Whether further flags are in a file inside the pod."""


def parse_serve_command(args: Sequence[str]) -> ServeCommand:
    """Parse the arguments behind `vllm serve`. Raises ArgumentError."""
    flags = parse_flags(args)
    positional = flags.pop(0) if flags and not flags[0].name else None
    if positional is not None and len(positional.values) > 1:
        raise ArgumentError(f"spec.engine.args begins with {len(positional.values)} words, but vLLM expects one model.")
    last_flags = {flag.name: flag for flag in flags}
    model_values = {name: _single_value(last_flags[name]) for name in ("--model", "--revision") if name in last_flags}
    # `interpret_flags` would reject `--model` as the beginning of another flag's name.
    arguments = interpret_flags([flag for flag in flags if flag.name not in ("--model", "--revision")])
    return ServeCommand(
        model=positional.values[0] if positional is not None else model_values.get("--model"),
        revision=model_values.get("--revision"),
        speculative_config=_parse_speculative_config(last_flags),
        arguments=arguments,
        multi_pod_flag=next((flag.raw_text for flag in last_flags.values() if _is_multi_pod_flag(flag)), ""),
        has_config_file="--config" in last_flags,
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


def _is_multi_pod_flag(flag: ParsedFlag) -> bool:
    if flag.name == "--distributed-executor-backend":
        return flag.values == ("ray",)
    return flag.name in _MULTI_POD_FLAGS and flag.values != ("1",)


_SPECULATIVE_CONFIG_KEY_BY_FLAG = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
"""Flags for single keys of the speculative config (vllm/engine/arg_utils.py, create_speculative_config)."""


def _parse_speculative_config(last_flags: Mapping[str, ParsedFlag]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if (flag := last_flags.get("--speculative-config")) is not None:
        text = _single_value(flag)
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"spec.engine.args sets {flag.name} to invalid JSON ({error}).") from None
        if not isinstance(document, dict):
            raise ArgumentError(f"spec.engine.args sets {flag.name} to {text[:80]}: vLLM expects an object.")
        config = {key.replace("-", "_"): value for key, value in document.items()}
    for name, key in _SPECULATIVE_CONFIG_KEY_BY_FLAG.items():
        if name not in last_flags:
            continue
        if key in config:
            raise ArgumentError(
                f"spec.engine.args has {name} and {key} in --speculative-config, but vLLM accepts only one of them."
            )
        config[key] = _single_value(last_flags[name])
    if (tokens := config.get("num_speculative_tokens")) is not None:
        config["num_speculative_tokens"] = _parse_num_speculative_tokens(tokens)
    for key in ("model", "revision", "method"):
        if not isinstance(config.get(key, ""), str):
            raise ArgumentError(f"spec.engine.args sets {key} in --speculative-config to {config[key]!r:.80}: set a string.")
    return config


def _parse_num_speculative_tokens(value: object) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is not int or value < 1:
        raise ArgumentError(
            f"spec.engine.args sets num_speculative_tokens to {value!r:.80}: vLLM expects a whole number above 0."
        )
    return value


def _single_value(flag: ParsedFlag) -> str:
    if len(flag.values) != 1:
        raise ArgumentError(f"spec.engine.args has {flag.name} with {len(flag.values)} values, but vLLM expects one.")
    return flag.values[0]
