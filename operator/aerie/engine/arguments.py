"""A parser for the user's engine arguments that reads them as vLLM's own parser does.

vLLM's `FlexibleArgumentParser` (vllm/utils/argparse_utils.py) extends argparse, and so does this parser. It takes
`--flag=value` and `--flag value`, underscores for dashes, short names, and JSON spelled with dots
(`--compilation-config.mode 3`). It takes `--no-` and, from 0.33 on, `--disable-` before a switch. The last of several wins.

Guarantees: a value whose form vLLM would reject is an `ArgumentError` that names the flag and the value. A flag that this module
does not parse stays as it is. Not guaranteed: that vLLM knows every other flag, or that the values are compatible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

SHORT_FLAG_NAMES = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
"""vLLM's short names (vllm/engine/arg_utils.py, vllm/entrypoints/common/cli_args.py)."""


DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default (vllm/config/cache.py)."""


class ArgumentError(ValueError):
    """An argument that vLLM or Aerie rejects; the message is a sentence that begins with spec.engine.args."""


@dataclass(frozen=True, slots=True)
class ParsedFlag:
    """One flag of a command line with its values."""

    name: str
    """The full name with dashes, like `--max-model-len`; `""` for the words before the first flag."""
    values: tuple[str, ...]
    """Its values; a switch has none."""
    raw_text: str
    """The flag as the user wrote it, for messages."""


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Parsed engine arguments. Defaults are vLLM's; None: not set, so that vLLM decides by model and machine."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    api_server_count: int = 1
    """API-server processes of one pod; vLLM's default is the number of data-parallel ranks (vllm/entrypoints/cli/serve.py)."""
    enable_expert_parallel: bool = False
    max_model_len: int | None = None
    """Tokens; None also for `auto`."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes, in tokens, for which CUDA graphs are captured, where the user sets them; in ascending order."""
    max_cudagraph_capture_size: int | None = None
    """The largest of them, where only that is set."""
    enforce_eager: bool = False
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    dtype: str | None = None
    model_impl: str | None = None
    quantization: str | None = None
    offload_flag: str | None = None
    """The first flag that keeps a part of the weights in CPU memory, as the user wrote it."""
    kv_cache_dtype: str | None = None
    moe_backend: str | None = None
    enable_lora: bool = False
    async_scheduling: bool | None = None
    scheduler_cls: str | None = None
    enable_prefix_caching: bool | None = None
    trust_remote_code: bool = False
    enable_sleep_mode: bool = False
    sleep_preserve_parameter_names: tuple[str, ...] = ()
    """Patterns of the parameters that a sleep of level 2 keeps; the drafter's are called draft.NAME."""
    has_kv_transfer_config: bool = False
    """Whether there is a KV transfer config."""
    has_logits_processors: bool = False
    structured_outputs_backend: str | None = None
    """The backend of the structured outputs config."""
    has_tool_or_reasoning_parser: bool = False
    """Whether a tool or reasoning parser is on. Strict tools are structured output."""

    @property
    def gpus_per_replica(self) -> int:
        """The number of GPUs that one replica takes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


def parse_flags(args: Sequence[str]) -> list[ParsedFlag]:
    """Split arguments into flags with their values, in order; dotted flags are merged into one JSON value at the end.

    Dotted flags replace an undotted one of the same name at any position, as in vLLM. Raises ArgumentError.
    """
    flags: list[ParsedFlag] = []
    dotted: dict[str, tuple[dict[str, Any], str]] = {}
    for name, values, text in _split_words(args):
        base, dot, path = name.partition(".")
        if not dot:
            flags.append(ParsedFlag(_long_name(name), values, text))
            continue
        if len(values) != 1:
            raise ArgumentError(f"spec.engine.args has '{text}' with {len(values)} values: set {name}=VALUE.")
        tree, _ = dotted.setdefault(base, ({}, text))
        _set_dotted_value(tree, path, values[0])
    return [*flags, *(ParsedFlag(_long_name(base), (_dump_json(base, tree),), text) for base, (tree, text) in dotted.items())]


def parse_arguments(args: Sequence[str]) -> EngineArguments:
    """Parse the arguments. Raises ArgumentError for a value whose form vLLM would reject."""
    return interpret_flags(parse_flags(args))


def interpret_flags(flags: Sequence[ParsedFlag]) -> EngineArguments:
    """Do the second half of `parse_arguments`, for arguments that are split into flags. Raises ArgumentError."""
    last_flags: dict[str, ParsedFlag] = {}
    for flag in flags:
        last_flags.pop(flag.name, None)  # keeps the order of each name's last use
        last_flags[flag.name] = flag
        _reject_abbreviation(flag)
    return _FlagReader(last_flags).build_arguments()


def _reject_abbreviation(flag: ParsedFlag) -> None:
    """Raise ArgumentError for the beginning of a name, which argparse would complete."""
    if not flag.name or flag.name in _LONG_FLAG_NAMES:
        return
    if full_names := sorted(name for name in _LONG_FLAG_NAMES if name.startswith(flag.name)):
        raise ArgumentError(f"spec.engine.args has '{flag.raw_text}', short for {' or '.join(full_names)}: use the full name.")


def parse_human_readable_int(text: str) -> int:
    """Parse a number as vLLM writes it: 8192, 8k (8000), 8K (8192), 25.6k; likewise m, g, t. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    power = "kmgt".index(suffix.lower()) + 1
    try:
        return int(number) * 1024**power if suffix.isupper() else int(float(number) * 1000**power)
    except OverflowError:
        raise ValueError(f"a number of {len(number)} digits") from None


# ------------------------------------------------------------------------------------------------------------------ tokens
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse takes these as values


def _split_words(args: Sequence[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """Return (name with dashes before any dot, values, text) of each flag; "" names the words before the first flag."""
    flags: list[tuple[str, list[str], str]] = []
    for arg in args:
        if not arg.startswith("-") or _NEGATIVE_NUMBER.fullmatch(arg):
            if not flags:
                flags.append(("", [], arg))
            flags[-1][1].append(arg)
            continue
        name, equals, value = arg.partition("=")
        if not equals and name[:2] in SHORT_FLAG_NAMES:  # one letter, directly followed by its value: -qfp8
            flags.append((name[:2], [name[2:]] if name[2:] else [], arg))
            continue
        if name.startswith("--"):
            base, dot, path = name.partition(".")
            name = base.replace("_", "-") + dot + path
        flags.append((name, [value] if equals else [], arg))
    return [(name, tuple(values), text) for name, values, text in flags]


def _dump_json(name: str, tree: Mapping[str, Any]) -> str:
    try:
        return json.dumps(tree)
    except RecursionError:
        raise ArgumentError(f"spec.engine.args has {name} with too many dots in its name: set {name}=JSON.") from None


def _long_name(name: str) -> str:
    return SHORT_FLAG_NAMES.get(name, name)


def _set_dotted_value(tree: dict[str, Any], path: str, text: str) -> None:
    """Add one dotted value; `path+` holds list elements, separated by commas."""
    value: Any
    if path.endswith("+"):
        path, value = path[:-1], text.split(",")
    else:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            try:
                value = parse_human_readable_int(text)
            except ValueError:
                value = text
    *parents, key = path.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            child = tree[parent] = {}
        tree = child
    if isinstance(value, list) and isinstance(tree.get(key), list):
        tree[key] += value
    else:
        tree[key] = value


# ---------------------------------------------------------------------------------------------------------------- reading
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _FlagReader:
    """A reader of flags by name; `flags` holds the last use of each name, in order."""

    flags: Mapping[str, ParsedFlag]

    def build_arguments(self) -> EngineArguments:
        compilation = self.read_json("--compilation-config")
        structured = self.read_json("--structured-outputs-config")
        kernel = self.read_json("--kernel-config")
        data_parallel = self.read_count("--data-parallel-size", 1)
        sizes = self.read_capture_sizes(compilation)
        return EngineArguments(
            tensor_parallel=self.read_count("--tensor-parallel-size", 1),
            pipeline_parallel=self.read_count("--pipeline-parallel-size", 1),
            data_parallel=data_parallel,
            api_server_count=self.read_count("--api-server-count", data_parallel),
            enable_expert_parallel=self.read_switch("--enable-expert-parallel") or False,
            max_model_len=self.read_value("--max-model-len", _parse_token_count_or_auto, "tokens, such as 8192, 8k, 8K or auto"),
            max_num_seqs=self.read_value("--max-num-seqs", _parse_positive_int, "a whole number above 0"),
            max_num_batched_tokens=self.read_value(
                "--max-num-batched-tokens", _parse_token_count, "tokens, such as 8192, 8k or 8K"
            ),
            cudagraph_capture_sizes=tuple(sorted(set(sizes))) if sizes else None,
            max_cudagraph_capture_size=self.read_value(
                "--max-cudagraph-capture-size", _parse_positive_int, "a whole number above 0"
            )
            or _as_positive_int(compilation.get("max_cudagraph_capture_size")),
            enforce_eager=self.read_switch("--enforce-eager") or False,
            gpu_memory_utilization=self.read_value("--gpu-memory-utilization", _parse_fraction, "a share above 0 and up to 1")
            or DEFAULT_GPU_MEMORY_UTILIZATION,
            dtype=self.read_text("--dtype"),
            model_impl=self.read_text("--model-impl"),
            quantization=self.read_text("--quantization"),
            offload_flag=next((flag.raw_text for name, flag in self.flags.items() if name in _OFFLOAD_FLAGS), None),
            kv_cache_dtype=self.read_text("--kv-cache-dtype"),
            moe_backend=self.read_text("--moe-backend") or _as_text(kernel.get("moe_backend")),
            enable_lora=self.read_switch("--enable-lora") or False,
            async_scheduling=self.read_switch("--async-scheduling"),
            scheduler_cls=self.read_text("--scheduler-cls"),
            enable_prefix_caching=self.read_switch("--enable-prefix-caching"),
            trust_remote_code=self.read_switch("--trust-remote-code") or False,
            enable_sleep_mode=self.read_switch("--enable-sleep-mode") or False,
            sleep_preserve_parameter_names=self.flags[_SLEEP_PRESERVE_FLAG].values if _SLEEP_PRESERVE_FLAG in self.flags else (),
            has_kv_transfer_config="--kv-transfer-config" in self.flags,
            has_logits_processors="--logits-processors" in self.flags,
            structured_outputs_backend=_as_text(structured.get("backend")),
            has_tool_or_reasoning_parser=bool(self.read_switch("--enable-auto-tool-choice"))
            or any(name in self.flags for name in ("--tool-call-parser", "--reasoning-parser")),
        )

    def read_value(self, name: str, parse: Callable[[str], _Value], expected: str) -> _Value | None:
        """Return the value of a flag that takes one; None when the flag is absent or its value means none."""
        flag = self.flags.get(name)
        if flag is None:
            return None
        if len(flag.values) == 1:
            try:
                return parse(flag.values[0])
            except ValueError:
                pass
        actual = " ".join(flag.values) or "nothing"
        raise ArgumentError(f"spec.engine.args sets {name} to {actual}: vLLM expects {expected}.")

    def read_count(self, name: str, default: int) -> int:
        return self.read_value(name, _parse_positive_int, "a whole number above 0") or default

    def read_text(self, name: str) -> str | None:
        return self.read_value(name, str, "one word")

    def read_json(self, name: str) -> Mapping[str, Any]:
        """Return the object of a JSON flag. vLLM also takes a path or a level for some flags; those are {} here."""
        flag = self.flags.get(name)
        if flag is None or len(flag.values) != 1 or not flag.values[0].lstrip().startswith("{"):
            return {}
        try:
            value = json.loads(flag.values[0])
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"spec.engine.args sets {name} to invalid JSON ({error}): {flag.values[0]}") from None
        return value if isinstance(value, dict) else {}

    def read_switch(self, name: str) -> bool | None:
        """Return whether a switch is on; None when it is absent. The last of its spellings decides."""
        spellings = _switch_names(name)
        state = None
        for flag in self.flags.values():
            if flag.name in spellings:
                if flag.values:
                    value = " ".join(flag.values)
                    raise ArgumentError(f"spec.engine.args sets {flag.name} to {value}: it is a switch and takes no value.")
                state = spellings[flag.name]
        return state

    def read_capture_sizes(self, compilation: Mapping[str, Any]) -> list[int]:
        flag = self.flags.get("--cudagraph-capture-sizes")
        if flag is not None:
            numbers = [text for value in flag.values for text in value.replace(",", " ").split()]
            try:
                return [_parse_positive_int(text) for text in numbers]
            except ValueError:
                actual = " ".join(flag.values)
                raise ArgumentError(f"spec.engine.args sets {flag.name} to {actual}: vLLM expects whole numbers.") from None
        items = compilation.get("cudagraph_capture_sizes")
        sizes = [_as_positive_int(item) for item in items] if isinstance(items, list) else []
        return [size for size in sizes if size is not None]


def _switch_names(switch: str) -> dict[str, bool]:
    """Return all names of a switch, with whether each turns it on."""
    stem = switch.removeprefix("--")
    names = {switch: True, f"--no-{stem}": False}
    if stem.startswith("enable-"):
        inverse = stem.removeprefix("enable-")
        names |= {f"--disable-{inverse}": False, f"--no-disable-{inverse}": True}
    return names


_SWITCH_FLAGS = (
    "--async-scheduling",
    "--enable-auto-tool-choice",
    "--enable-expert-parallel",
    "--enable-lora",
    "--enable-prefix-caching",
    "--enable-sleep-mode",
    "--enforce-eager",
    "--trust-remote-code",
)
_OFFLOAD_FLAGS = ("--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--offload-group-size", "--offload-params")
_SLEEP_PRESERVE_FLAG = "--sleep-preserve-parameter-names"
_VALUE_FLAGS = (
    *_OFFLOAD_FLAGS,
    _SLEEP_PRESERVE_FLAG,
    "--api-server-count",
    "--compilation-config",
    "--cudagraph-capture-sizes",
    "--data-parallel-size",
    "--dtype",
    "--gpu-memory-utilization",
    "--kernel-config",
    "--kv-cache-dtype",
    "--kv-transfer-config",
    "--logits-processors",
    "--max-cudagraph-capture-size",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--moe-backend",
    "--model-impl",
    "--pipeline-parallel-size",
    "--quantization",
    "--reasoning-parser",
    "--scheduler-cls",
    "--structured-outputs-config",
    "--tensor-parallel-size",
    "--tool-call-parser",
)
_LONG_FLAG_NAMES = frozenset([*_VALUE_FLAGS, *(name for switch in _SWITCH_FLAGS for name in _switch_names(switch))])
"""Every long name that is read. argparse also takes an unambiguous beginning of a name; Aerie rejects it and does not guess."""


def _parse_positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _parse_token_count(text: str) -> int:
    number = parse_human_readable_int(text)
    if number < 1:
        raise ValueError
    return number


def _parse_token_count_or_auto(text: str) -> int | None:
    return None if text.strip().lower() in ("auto", "-1") else _parse_token_count(text)


def _parse_fraction(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise ValueError
    return number


def _as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _as_positive_int(value: object) -> int | None:
    """Return a whole number above 0, else None. List elements spelled with dots are strings, so strings count too."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
