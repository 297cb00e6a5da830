"""vLLM's command line: every flag of vLLM 0.32 or 0.33 is accepted, any other refused with vLLM's message and exit status.

The flags are data (vllm_flags.json, from vLLM's own parsers; tests/vllm compares them). The simulator obeys those in Arguments;
the others are read and checked, and change nothing. Not guaranteed: the flags of releases before 0.32, which get those of 0.32.
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

from aerie_lab.engine.serving.request_metrics import SpecDecodeMetrics

_PROGRAM_USAGE = """usage: vllm [-h] [-v]
            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}
            ...
"""
NEWEST_VLLM_VERSION = "0.33.0"
"""The newest release whose flags are known."""
DRAFTER_ENDPOINT, DRAFTER_WORKER = "aerie_vllm.endpoint.DrafterEndpoint", "aerie_vllm.worker.DrafterWorker"
"""The plugin's halves, as --middleware and --worker-extension-cls name them."""
_INT_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class SimulatorArguments:
    """Arguments with an effect on the simulator."""

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
    per_request_spec_decode_metrics: SpecDecodeMetrics = "none"
    enable_per_request_metrics: bool = False
    api_server_count: int = 1
    has_drafter_endpoint: bool = False
    """Whether the API server has the plugin's middleware, with which the drafter changes in place."""
    has_drafter_worker: bool = False
    """Whether the workers have the plugin's methods."""


class _ServeParser(argparse.ArgumentParser):
    """Fails with the usage line that `vllm serve` prints."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"usage: vllm serve [model_tag] [options]\nvllm serve: error: {message}\n")
        raise SystemExit(2)


class _SwitchWithInverse(argparse.BooleanOptionalAction):
    """A switch of 0.33: `--enable-x` is also turned off by `--disable-x`, and the reverse, beside the `--no-` of each.

    vllm/utils/argparse_utils.py, EnableDisableAction.
    """

    _INVERSES = (("--enable-", "--disable-"), ("--disable-", "--enable-"))

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        own = set(option_strings)
        inverses = [
            inverse + name.removeprefix(prefix)
            for name in option_strings
            for prefix, inverse in self._INVERSES
            if name.startswith(prefix)
        ]
        self._off = {name for name in self.option_strings if name not in own} | set(inverses)
        self.option_strings = [*self.option_strings, *inverses]

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, __: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, option_string not in self._off)


def parse_simulator_arguments(argv: Sequence[str], version: str = NEWEST_VLLM_VERSION) -> SimulatorArguments:
    """Return the arguments after `vllm serve` (or with `serve` first), as vLLM of this version reads them.

    Exits with 2 as vLLM does when they are wrong.
    """
    argv = [*argv[1:]] if argv[:1] == ["serve"] else list(argv)
    parser = _build_parser(version)
    namespace, unknown = parser.parse_known_args(_join_nested_options(_normalize_dashes(argv)))
    if unknown:
        sys.stderr.write(f"{_PROGRAM_USAGE}vllm: error: unrecognized arguments: {' '.join(unknown)}\n")
        raise SystemExit(2)
    model = namespace.model or namespace.model_tag
    if model is None:
        parser.error("the simulator needs a model: vllm serve MODEL")
    speculation = namespace.speculative_config
    try:
        speculation = json.loads(speculation) if isinstance(speculation, str) else speculation
    except ValueError:
        parser.error(f"argument --speculative-config/-sc: Value {speculation} cannot be converted to <function loads>.")
    return SimulatorArguments(
        model=model,
        served_model_names=tuple(namespace.served_model_name or [model]),
        revision=namespace.revision,
        host=namespace.host,
        port=namespace.port if namespace.port is not None else 8000,
        max_model_len=namespace.max_model_len,
        max_num_seqs=_parse_optional_int(parser, "--max-num-seqs", namespace.max_num_seqs),
        max_num_batched_tokens=_parse_optional_int(parser, "--max-num-batched-tokens", namespace.max_num_batched_tokens),
        block_size=_parse_optional_int(parser, "--block-size", namespace.block_size),
        num_gpu_blocks_override=_parse_optional_int(parser, "--num-gpu-blocks-override", namespace.num_gpu_blocks_override),
        enable_prefix_caching=namespace.enable_prefix_caching is not False,
        shutdown_timeout=_parse_optional_int(parser, "--shutdown-timeout", namespace.shutdown_timeout) or 0,
        api_keys=tuple(namespace.api_key or ()),
        disable_log_stats=namespace.disable_log_stats,
        speculative_config=speculation,
        per_request_spec_decode_metrics=namespace.per_request_spec_decode_metrics or "none",
        enable_per_request_metrics=bool(namespace.enable_per_request_metrics),
        api_server_count=namespace.api_server_count or 1,
        has_drafter_endpoint=DRAFTER_ENDPOINT in (namespace.middleware or ()),
        has_drafter_worker=namespace.worker_extension_cls == DRAFTER_WORKER,
    )


def load_known_flags(version: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of the flags of this version of vLLM, and whether its switches have inverses."""
    document = json.loads(resources.files("aerie_lab.engine.serving").joinpath("vllm_flags.json").read_text())
    requested_release = _parse_release(version)
    rows = [
        row
        for row in document["flags"]
        if _parse_release(row.get("since", "0")) <= requested_release
        and ("until" not in row or requested_release < _parse_release(row["until"]))
    ]
    return rows, _parse_release(document["inverses_since"]) <= requested_release


def _parse_release(version: str) -> tuple[int, ...]:
    """Major and minor, by which flags come and go: a pre-release is taken for its release."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _build_parser(version: str) -> argparse.ArgumentParser:
    parser = _ServeParser(prog="vllm serve", allow_abbrev=True)
    parser.add_argument("model_tag", nargs="?")
    converters: dict[str, Any] = {"int": int, "float": float, "human_int": _parse_human_int, "json": json.loads}
    rows, inverses = load_known_flags(version)
    switch = _SwitchWithInverse if inverses else argparse.BooleanOptionalAction
    actions = {"switch": switch, "true": "store_true", "append": "append", "value": "store"}
    for row in rows:
        options: dict[str, Any] = {"action": actions[row.get("kind", "value")]}
        if "type" in row:
            options["type"] = converters[row["type"]]
        for name in ("nargs", "choices"):
            if name in row:
                options[name] = row[name]
        parser.add_argument(*row["flags"], **options)
    return parser


def _parse_human_int(text: str) -> int:
    """1k is 1,000 and 1K is 1,024, as vLLM reads them; `auto` is -1."""
    if text in ("auto", "-1"):
        return -1
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip()):
        return int(float(match[1]) * _INT_SUFFIXES[match[2]])
    return int(text)


def _parse_optional_int(parser: argparse.ArgumentParser, flag: str, value: str | int | None) -> int | None:
    if value is None:
        return None
    try:
        return _parse_human_int(str(value))
    except ValueError:
        parser.error(f"argument {flag}: invalid int value: {value!r}")


def _normalize_dashes(words: list[str]) -> list[str]:
    """--max_model_len is --max-model-len."""
    return [
        re.sub(r"(?<=--)[^.=]*", lambda m: m[0].replace("_", "-"), argument, count=1) if argument[:2] == "--" else argument
        for argument in words
    ]


def _join_nested_options(words: list[str]) -> list[str]:
    """--speculative-config.method eagle3 is --speculative-config '{"method": "eagle3"}'."""
    remaining: list[str] = []
    documents: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for argument in rest:
        if not (match := re.fullmatch(r"(--?[a-z][a-z-]*)\.([\w.]+)(?:=(.*))?", argument, re.DOTALL)):
            remaining.append(argument)
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
        remaining += [flag, json.dumps(document)]
    return remaining
