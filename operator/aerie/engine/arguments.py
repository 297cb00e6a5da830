"""What a user's engine arguments say, read as vLLM's own parser reads them.

vLLM's `FlexibleArgumentParser` (vllm/utils/argparse_utils.py) is argparse with liberties, and so is this: `--flag=value` and
`--flag value`, underscores for dashes, short names, JSON spelled with dots (`--compilation-config.mode 3`), `--no-` and, from
0.33 on, `--disable-` before a switch; the last of several wins.

Guarantees: a value that vLLM would refuse for its form is an `ArgumentError` that names the flag and the value; a flag that is
not read here is left as it is. Not guaranteed: that vLLM knows every other flag, or that the values go together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

SHORT = {
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


GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default (vllm/config/cache.py)."""


class ArgumentError(ValueError):
    """An argument that vLLM would refuse, or that Aerie does; the message is a sentence that begins with spec.engine.args."""


@dataclass(frozen=True, slots=True)
class Option:
    """One flag of a command line with what belongs to it."""

    name: str
    """In full and with dashes, like `--max-model-len`; `""` for words before the first flag."""
    values: tuple[str, ...]
    """None for a switch."""
    text: str
    """As the user wrote it, for sentences."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What arguments imply. Defaults are vLLM's; None: not given, so that vLLM decides by model and machine."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    api_servers: int = 1
    """API-server processes of one pod; as many as data-parallel ranks unless given (vllm/entrypoints/cli/serve.py)."""
    expert_parallel: bool = False
    max_model_len: int | None = None
    """Tokens; None also for `auto`."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    capture_sizes: tuple[int, ...] | None = None
    """Batch sizes, in tokens, for which CUDA graphs are captured, where the user sets them; rising."""
    max_capture_size: int | None = None
    """The largest of them, where only that is set."""
    enforce_eager: bool = False
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    dtype: str | None = None
    model_impl: str | None = None
    quantization: str | None = None
    offload: str | None = None
    """The first flag that keeps a part of the weights in the CPU's memory, as the user wrote it."""
    kv_cache_dtype: str | None = None
    moe_backend: str | None = None
    lora: bool = False
    async_scheduling: bool | None = None
    scheduler_cls: str | None = None
    prefix_caching: bool | None = None
    trust_remote_code: bool = False
    sleep_mode: bool = False
    sleep_preserves: tuple[str, ...] = ()
    """Patterns of the parameters that a sleep of level 2 keeps; those of the drafter are called draft.NAME."""
    kv_transfer: bool = False
    """Whether there is a KV transfer config."""
    logits_processors: bool = False
    structured_backend: str | None = None
    """Of the structured outputs config."""
    tool_calls: bool = False
    """Whether a tool or reasoning parser is on, whose strict tools are structured output."""

    @property
    def gpus(self) -> int:
        """GPUs that one replica takes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


def options(args: Sequence[str]) -> list[Option]:
    """Split arguments into flags with their values, in order; dotted flags are gathered into one JSON value at the end.

    Like vLLM, flags with dots replace an undotted one of the same name wherever it stands. Raises ArgumentError.
    """
    found: list[Option] = []
    dotted: dict[str, tuple[dict[str, Any], str]] = {}
    for name, values, text in _words(args):
        base, dot, path = name.partition(".")
        if not dot:
            found.append(Option(_full(name), values, text))
            continue
        if len(values) != 1:
            raise ArgumentError(f"spec.engine.args has '{text}' with {len(values)} values: write {name}=VALUE.")
        tree, _ = dotted.setdefault(base, ({}, text))
        _put(tree, path, values[0])
    return [*found, *(Option(_full(base), (_written(base, tree),), text) for base, (tree, text) in dotted.items())]


def read(args: Sequence[str]) -> Arguments:
    """What the arguments imply. Raises ArgumentError for a value whose form vLLM would refuse."""
    return imply(options(args))


def imply(found: Sequence[Option]) -> Arguments:
    """`read`, for arguments that have been split. Raises ArgumentError."""
    last: dict[str, Option] = {}
    for option in found:
        last.pop(option.name, None)  # so that the order is that of each name's last use
        last[option.name] = option
        if option.name not in _NAMES and (meant := [name for name in _NAMES if name.startswith(option.name)]) and option.name:
            raise ArgumentError(
                f"spec.engine.args has '{option.text}', short for {' or '.join(sorted(meant))}: write it in full."
            )
    return _Reader(last).arguments()


def human_int(text: str) -> int:
    """vLLM's numbers: 8192, 8k (8000), 8K (8192), 25.6k; likewise m, g, t. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    power = "kmgt".index(suffix.lower()) + 1
    try:
        return int(number) * 1024**power if suffix.isupper() else int(float(number) * 1000**power)
    except OverflowError:
        raise ValueError(f"a number of {len(number)} digits") from None


# ------------------------------------------------------------------------------------------------------------------ words
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse takes these for values


def _words(args: Sequence[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """(name with dashes before any dot, values, text) of each flag; the first may be "" with the words before any flag."""
    found: list[tuple[str, list[str], str]] = []
    for arg in args:
        if not arg.startswith("-") or _NEGATIVE_NUMBER.fullmatch(arg):
            if not found:
                found.append(("", [], arg))
            found[-1][1].append(arg)
            continue
        name, equals, value = arg.partition("=")
        if not equals and name[:2] in SHORT:  # one letter, and its value right behind it: -qfp8
            found.append((name[:2], [name[2:]] if name[2:] else [], arg))
            continue
        if name.startswith("--"):
            base, dot, path = name.partition(".")
            name = base.replace("_", "-") + dot + path
        found.append((name, [value] if equals else [], arg))
    return [(name, tuple(values), text) for name, values, text in found]


def _written(name: str, tree: Mapping[str, Any]) -> str:
    try:
        return json.dumps(tree)
    except RecursionError:
        raise ArgumentError(f"spec.engine.args has {name} with a name of too many dots: write {name}=JSON.") from None


def _full(name: str) -> str:
    return SHORT.get(name, name)


def _put(tree: dict[str, Any], path: str, text: str) -> None:
    """Add one dotted value; `path+` holds list elements, separated by commas."""
    value: Any
    if path.endswith("+"):
        path, value = path[:-1], text.split(",")
    else:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            try:
                value = human_int(text)
            except ValueError:
                value = text
    *parents, key = path.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if not isinstance(below, dict):
            below = tree[parent] = {}
        tree = below
    if isinstance(value, list) and isinstance(tree.get(key), list):
        tree[key] += value
    else:
        tree[key] = value


# ---------------------------------------------------------------------------------------------------------------- reading
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads flags by name; `last` has the last of each, in the order given."""

    last: Mapping[str, Option]

    def arguments(self) -> Arguments:
        compilation = self.json("--compilation-config")
        structured = self.json("--structured-outputs-config")
        kernel = self.json("--kernel-config")
        data_parallel = self.count("--data-parallel-size", 1)
        sizes = self.capture_sizes(compilation)
        return Arguments(
            tensor_parallel=self.count("--tensor-parallel-size", 1),
            pipeline_parallel=self.count("--pipeline-parallel-size", 1),
            data_parallel=data_parallel,
            api_servers=self.count("--api-server-count", data_parallel),
            expert_parallel=self.switch("--enable-expert-parallel") or False,
            max_model_len=self.one("--max-model-len", _tokens_or_auto, "tokens like 8192, 8k, 8K or auto"),
            max_num_seqs=self.one("--max-num-seqs", _positive, "a whole number above 0"),
            max_num_batched_tokens=self.one("--max-num-batched-tokens", _tokens, "tokens like 8192, 8k or 8K"),
            capture_sizes=tuple(sorted(set(sizes))) if sizes else None,
            max_capture_size=self.one("--max-cudagraph-capture-size", _positive, "a whole number above 0")
            or _number(compilation.get("max_cudagraph_capture_size")),
            enforce_eager=self.switch("--enforce-eager") or False,
            gpu_memory_utilization=self.one("--gpu-memory-utilization", _share, "a share above 0 and up to 1")
            or GPU_MEMORY_UTILIZATION,
            dtype=self.word("--dtype"),
            model_impl=self.word("--model-impl"),
            quantization=self.word("--quantization"),
            offload=next((option.text for name, option in self.last.items() if name in _OFFLOAD), None),
            kv_cache_dtype=self.word("--kv-cache-dtype"),
            moe_backend=self.word("--moe-backend") or _word(kernel.get("moe_backend")),
            lora=self.switch("--enable-lora") or False,
            async_scheduling=self.switch("--async-scheduling"),
            scheduler_cls=self.word("--scheduler-cls"),
            prefix_caching=self.switch("--enable-prefix-caching"),
            trust_remote_code=self.switch("--trust-remote-code") or False,
            sleep_mode=self.switch("--enable-sleep-mode") or False,
            sleep_preserves=self.last[_PRESERVED].values if _PRESERVED in self.last else (),
            kv_transfer="--kv-transfer-config" in self.last,
            logits_processors="--logits-processors" in self.last,
            structured_backend=_word(structured.get("backend")),
            tool_calls=bool(self.switch("--enable-auto-tool-choice"))
            or any(name in self.last for name in ("--tool-call-parser", "--reasoning-parser")),
        )

    def one(self, name: str, read: Callable[[str], _Value], expected: str) -> _Value | None:
        """The value of a flag that takes one. None when it is not given or its value stands for none."""
        option = self.last.get(name)
        if option is None:
            return None
        if len(option.values) == 1:
            try:
                return read(option.values[0])
            except ValueError:
                pass
        given = " ".join(option.values) or "nothing"
        raise ArgumentError(f"spec.engine.args sets {name} to {given}: vLLM takes {expected} there.")

    def count(self, name: str, default: int) -> int:
        return self.one(name, _positive, "a whole number above 0") or default

    def word(self, name: str) -> str | None:
        return self.one(name, str, "one word")

    def json(self, name: str) -> Mapping[str, Any]:
        """The object of a JSON flag; vLLM also takes a path or a level for some, which say nothing here."""
        option = self.last.get(name)
        if option is None or len(option.values) != 1 or not option.values[0].lstrip().startswith("{"):
            return {}
        try:
            value = json.loads(option.values[0])
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                f"spec.engine.args sets {name} to what cannot be read as JSON ({error}): {option.values[0]}"
            ) from None
        return value if isinstance(value, dict) else {}

    def switch(self, name: str) -> bool | None:
        """Whether a switch is on; None when it is not given. The last of its spellings decides."""
        spellings = _spellings(name)
        state = None
        for option in self.last.values():
            if option.name in spellings:
                if option.values:
                    given = " ".join(option.values)
                    raise ArgumentError(f"spec.engine.args sets {option.name} to {given}: it is a switch and takes no value.")
                state = spellings[option.name]
        return state

    def capture_sizes(self, compilation: Mapping[str, Any]) -> list[int]:
        option = self.last.get("--cudagraph-capture-sizes")
        if option is not None:
            words = [word for value in option.values for word in value.replace(",", " ").split()]
            try:
                return [_positive(word) for word in words]
            except ValueError:
                given = " ".join(option.values)
                raise ArgumentError(f"spec.engine.args sets {option.name} to {given}: vLLM takes whole numbers there.") from None
        sizes = compilation.get("cudagraph_capture_sizes")
        found = [_number(size) for size in sizes] if isinstance(sizes, list) else []
        return [size for size in found if size is not None]


def _spellings(switch: str) -> dict[str, bool]:
    """All names of a switch, and whether each turns it on."""
    stem = switch.removeprefix("--")
    found = {switch: True, f"--no-{stem}": False}
    if stem.startswith("enable-"):
        inverse = stem.removeprefix("enable-")
        found |= {f"--disable-{inverse}": False, f"--no-disable-{inverse}": True}
    return found


_SWITCHES = (
    "--async-scheduling",
    "--enable-auto-tool-choice",
    "--enable-expert-parallel",
    "--enable-lora",
    "--enable-prefix-caching",
    "--enable-sleep-mode",
    "--enforce-eager",
    "--trust-remote-code",
)
_OFFLOAD = ("--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--offload-group-size", "--offload-params")
_PRESERVED = "--sleep-preserve-parameter-names"
_VALUED = (
    *_OFFLOAD,
    _PRESERVED,
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
_NAMES = frozenset([*_VALUED, *(name for switch in _SWITCHES for name in _spellings(switch))])
"""Every long name that is read. argparse also takes the beginning of a name that is no other's: such are refused, not guessed."""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _tokens(text: str) -> int:
    number = human_int(text)
    if number < 1:
        raise ValueError
    return number


def _tokens_or_auto(text: str) -> int | None:
    return None if text.strip().lower() in ("auto", "-1") else _tokens(text)


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise ValueError
    return number


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    """A whole number above 0, also as a string, as list elements spelled with dots are."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
