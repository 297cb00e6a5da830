"""vLLM's command line: every flag of vLLM 0.32.0 is accepted, any other refused with vLLM's message and exit status.

The flags are data (vllm_flags.json, from vLLM's own help). The simulator obeys those in Arguments; the others are read and
checked, and change nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NoReturn

_PROGRAM_USAGE = """usage: vllm [-h] [-v]
            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}
            ...
"""
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Arguments:
    """What the simulator obeys."""

    model: str
    served_model_names: tuple[str, ...]
    revision: str | None = None
    host: str | None = None
    port: int = 8000
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    shutdown_timeout: int = 0
    api_keys: tuple[str, ...] = ()
    disable_log_stats: bool = False
    speculative_config: dict[str, Any] | None = field(default=None)


class _Parser(argparse.ArgumentParser):
    """Fails with the usage line that `vllm serve` prints."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"usage: vllm serve [model_tag] [options]\nvllm serve: error: {message}\n")
        raise SystemExit(2)


def parse(words: Sequence[str]) -> Arguments:
    """The arguments after `vllm serve` (or with `serve` first). Exits with 2 as vLLM does when they are wrong."""
    words = [*words[1:]] if words[:1] == ["serve"] else list(words)
    parser = _parser()
    found, unknown = parser.parse_known_args(_nested(_dashes(words)))
    if unknown:
        sys.stderr.write(f"{_PROGRAM_USAGE}vllm: error: unrecognized arguments: {' '.join(unknown)}\n")
        raise SystemExit(2)
    model = found.model or found.model_tag
    if model is None:
        parser.error("the simulator needs a model: vllm serve MODEL")
    speculation = found.speculative_config
    try:
        speculation = json.loads(speculation) if isinstance(speculation, str) else speculation
    except ValueError:
        parser.error(f"argument --speculative-config/-sc: Value {speculation} cannot be converted to <function loads>.")
    return Arguments(
        model=model,
        served_model_names=tuple(found.served_model_name or [model]),
        revision=found.revision,
        host=found.host,
        port=found.port if found.port is not None else 8000,
        max_model_len=found.max_model_len,
        max_num_seqs=_whole(parser, "--max-num-seqs", found.max_num_seqs),
        max_num_batched_tokens=_whole(parser, "--max-num-batched-tokens", found.max_num_batched_tokens),
        block_size=_whole(parser, "--block-size", found.block_size),
        num_gpu_blocks_override=_whole(parser, "--num-gpu-blocks-override", found.num_gpu_blocks_override),
        enable_prefix_caching=found.enable_prefix_caching is not False,
        shutdown_timeout=_whole(parser, "--shutdown-timeout", found.shutdown_timeout) or 0,
        api_keys=tuple(found.api_key or ()),
        disable_log_stats=found.disable_log_stats,
        speculative_config=speculation,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm serve", allow_abbrev=True)
    parser.add_argument("model_tag", nargs="?")
    text = resources.files("aerie_lab.engine").joinpath("vllm_flags.json").read_text()
    converters: dict[str, Any] = {"int": int, "float": float, "human_int": _human_int, "json": json.loads}
    actions = {"switch": argparse.BooleanOptionalAction, "true": "store_true", "append": "append", "value": "store"}
    for row in json.loads(text)["flags"]:
        options: dict[str, Any] = {"action": actions[row.get("kind", "value")]}
        if "type" in row:
            options["type"] = converters[row["type"]]
        for name in ("nargs", "choices"):
            if name in row:
                options[name] = row[name]
        parser.add_argument(*row["flags"], **options)
    return parser


def _human_int(text: str) -> int:
    """1k is 1,000 and 1K is 1,024, as vLLM reads them; `auto` is -1."""
    if text in ("auto", "-1"):
        return -1
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip()):
        return int(float(match[1]) * _SUFFIXES[match[2]])
    return int(text)


def _whole(parser: argparse.ArgumentParser, flag: str, value: str | int | None) -> int | None:
    if value is None:
        return None
    try:
        return _human_int(str(value))
    except ValueError:
        parser.error(f"argument {flag}: invalid int value: {value!r}")


def _dashes(words: list[str]) -> list[str]:
    """--max_model_len is --max-model-len."""
    return [
        re.sub(r"(?<=--)[^.=]*", lambda m: m[0].replace("_", "-"), word, count=1) if word[:2] == "--" else word for word in words
    ]


def _nested(words: list[str]) -> list[str]:
    """--speculative-config.method eagle3 is --speculative-config '{"method": "eagle3"}'."""
    kept: list[str] = []
    documents: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        if not (match := re.fullmatch(r"(--?[a-z][a-z-]*)\.([\w.]+)(?:=(.*))?", word, re.DOTALL)):
            kept.append(word)
            continue
        value = match[3] if match[3] is not None else next(rest, "")
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        inner = documents.setdefault(match[1], {})
        *path, last = match[2].split(".")
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    for flag, document in documents.items():
        kept += [flag, json.dumps(document)]
    return kept
