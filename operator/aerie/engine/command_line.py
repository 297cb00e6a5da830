"""vLLM's command line as Aerie writes it: the flags that are reserved for Aerie, and what a release cannot run.

Guarantees: the speculative config always names its method, since vLLM would otherwise guess it from the drafter's path. A setting
that a release is known to reject, or to change silently, is rejected here with a message. Not guaranteed: that the model runs.
`preflight` checks the checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.api.engine import RESERVED_FLAG_FIXES
from aerie.engine.arguments import ArgumentError, EngineArguments, parse_flags
from aerie.engine.releases import Feature, Version, describe_missing_feature, supports
from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, max_speculative_tokens
from aerie.engine.speculative_config import (
    DRAFT_SAMPLING_METHODS,
    find_config_problems,
    format_problem,
    validate_engine_options,
)


# ------------------------------------------------------------------------------------------------------------ reserved flags
@dataclass(frozen=True, slots=True)
class ReservedFlags:
    """Flags that are reserved for Aerie, and what users do instead."""

    flags: tuple[str, ...]
    """Full names; a name that ends in `*` stands for all names with that beginning."""
    fix: str


_SHORT_FORMS = {"--speculative-config": ("--spec-method", "--spec-model", "--spec-tokens")}
"""Flags that set a part of another flag's value; they are reserved with it."""
_SINGLE_POD_FLAGS = (
    "--headless",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--data-parallel-address",
    "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb",
    "--data-parallel-multi-port-external-lb",
    "--data-parallel-rank",
    "--data-parallel-rpc-port",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
)
_SINGLE_POD_HINT = (
    "a replica is one pod: request more GPUs in spec.engine.resources and use --tensor-parallel-size or --data-parallel-size"
)

RESERVED_FLAGS = (
    *(ReservedFlags((flag, *_SHORT_FORMS.get(flag, ())), fix) for flag, fix in RESERVED_FLAG_FIXES.items()),
    ReservedFlags(("--grpc",), "clients, probes and metrics use HTTP"),
    ReservedFlags(_SINGLE_POD_FLAGS, _SINGLE_POD_HINT),
)
"""The flags that the API rejects, and those of which it has no rule."""


def validate_user_arguments(args: Sequence[str]) -> tuple[str, ...]:
    """Return one message for each of the user's arguments that Aerie reserves. Raises ArgumentError for unparsable arguments.

    argparse completes the beginning of a name, so the beginning is rejected like the whole name.
    """
    return tuple(_reserved_flag_errors(args))


def _reserved_flag_errors(args: Sequence[str]) -> Iterator[str]:
    for flag in parse_flags(args):
        if not flag.name:
            yield f"spec.engine.args begins with '{flag.raw_text}', which is not a flag: the model belongs in spec.model.source."
            continue
        reserved = next((row for row in RESERVED_FLAGS if any(_may_match_flag(flag.name, name) for name in row.flags)), None)
        if reserved is None:
            continue
        yield f"spec.engine.args has '{flag.raw_text}', which is reserved for Aerie: remove it; {reserved.fix}."
        if flag.name == "--speculative-config" and len(flag.values) == 1 and (message := _check_lossless_json(flag.values[0])):
            yield message


def _may_match_flag(name: str, reserved_name: str) -> bool:
    """Return whether vLLM may take `name` as `reserved_name`: the name itself, or its beginning."""
    if reserved_name.endswith("*"):
        return name.startswith(reserved_name[:-1])
    return name == reserved_name or (name not in _USER_FLAG_NAMES and reserved_name.startswith(name))


_USER_FLAG_NAMES = frozenset({"--data-parallel-size"})
"""Flags of vLLM that users may set although they are the beginning of a reserved name."""


# ------------------------------------------------------------------------------------------------------- lossy verification
LOSSLESS_SAMPLING_METHODS = frozenset({"standard", "block", "strict", "probabilistic"})
"""Rejection sampling methods whose output has the target's own distribution. strict and probabilistic are older names of
standard (vllm/config/speculative.py). All others, `synthetic` and `fly` among them, change the model's output."""

_LOSSY_KEY_PREFIXES = ("synthetic_", "fly_", "relaxed_", "typical_", "posterior_")


def check_lossless(config: Mapping[str, Any]) -> str | None:
    """Return a message if a speculative config makes the engine's output differ from its target's, else None.

    With such a config a drafter's acceptance means nothing: anything can be accepted.
    """
    method = config.get("rejection_sample_method", config.get("acceptance_method"))
    if method is not None and method not in LOSSLESS_SAMPLING_METHODS:
        return (
            f"the speculative config verifies by '{method}', which lets the drafter change the model's outputs: "
            "remove rejection_sample_method, or use 'standard' or 'block'."
        )
    lossy_keys = sorted(key for key in config if key.startswith(_LOSSY_KEY_PREFIXES))
    if lossy_keys:
        return (
            f"the speculative config has {', '.join(lossy_keys)}, which lets the drafter change the model's outputs: remove them."
        )
    return None


def _check_lossless_json(text: str) -> str | None:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return check_lossless(config) if isinstance(config, dict) else None


# ----------------------------------------------------------------------------------------------------------- serve arguments
@dataclass(frozen=True, slots=True)
class DrafterArguments:
    """A drafter on the engine's command line."""

    model: str
    """A folder in the pod, or the name of a repository."""
    method: str = "eagle3"
    """vLLM's method; `eagle3` for EAGLE 3.1 too."""
    revision: str | None = None
    """The revision of the repository."""
    draft_sampling: str | None = None
    """spec.speculation.draftSampling: Greedy or Probabilistic; None: the engine's default."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """spec.speculation.engineOptions: further keys of the speculative config."""


DRAFTER_METHODS = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "medusa", "mlp_speculator"})
"""Methods with a drafter for which Aerie writes a config."""

_FEATURE_BY_METHOD = {
    "dflash": Feature.DFLASH,
    "dspark": Feature.DSPARK,
    "medusa": Feature.MEDUSA,
    "mlp_speculator": Feature.MEDUSA,
}
_SCHEDULABLE_METHODS = frozenset({"eagle", "eagle3", "mtp", "dflash", "draft_model"})
"""Methods that support a schedule on model runner V1 too (vllm/config/vllm.py, _maybe_disable_dynamic_sd_for_v1)."""


def find_unsupported_reasons(
    setting: SpeculationSetting, drafter: DrafterArguments, version: Version, arguments: EngineArguments
) -> tuple[str, ...]:
    """Return the reasons why the engine cannot run the setting as it is meant, one message each; empty when it can."""
    return tuple(_unsupported_reasons(setting, drafter, version, arguments))


def _unsupported_reasons(
    setting: SpeculationSetting, drafter: DrafterArguments, version: Version, arguments: EngineArguments
) -> Iterator[str]:
    if isinstance(setting, Off):
        return
    method = drafter.method
    if method not in DRAFTER_METHODS:
        yield f"the drafter's method is '{method}': Aerie knows {', '.join(sorted(DRAFTER_METHODS))}."
    feature = _FEATURE_BY_METHOD.get(method)
    if feature is not None and not supports(version, feature):
        yield describe_missing_feature(version, feature)
    option_errors = validate_engine_options(drafter.engine_options)
    yield from option_errors
    if not option_errors:
        config = _build_config(setting, drafter)
        yield from map(format_problem, find_config_problems(config, version, tensor_parallel=arguments.tensor_parallel))
    if arguments.pipeline_parallel > 1 and method == "eagle3" and not supports(version, Feature.PIPELINE_PARALLEL):
        yield describe_missing_feature(version, Feature.PIPELINE_PARALLEL)
    if isinstance(setting, Schedule):
        yield from _unsupported_schedule_reasons(method, version, arguments)
    if isinstance(setting, Adaptive):
        yield from _unsupported_adaptive_reasons(method, version, arguments)


def _unsupported_schedule_reasons(method: str, version: Version, arguments: EngineArguments) -> Iterator[str]:
    if not supports(version, Feature.SCHEDULE):
        yield describe_missing_feature(version, Feature.SCHEDULE)
    if arguments.data_parallel > 1:
        behaviour = (
            "ignores a schedule" if supports(version, Feature.SCHEDULE_DATA_PARALLEL_GUARD) else "may deadlock on a schedule"
        )
        yield f"vLLM {version} {behaviour} with data parallel size {arguments.data_parallel}: use a fixed number of tokens."
    if method in DRAFTER_METHODS - _SCHEDULABLE_METHODS:
        yield (
            f"a schedule cannot be used with the method '{method}': use a fixed number of tokens, or one of "
            f"{_join_sorted(_SCHEDULABLE_METHODS)}."
        )


def _unsupported_adaptive_reasons(method: str, version: Version, arguments: EngineArguments) -> Iterator[str]:
    feature = Feature.ADAPTIVE_DSPARK if method == "dspark" else Feature.ADAPTIVE
    if not supports(version, feature):
        yield describe_missing_feature(version, feature)
    if method in ("medusa", "mlp_speculator"):
        yield f"adaptive verification cannot be used with the method '{method}'."
    # vllm/config/vllm.py, _validate_adaptive_verification
    for is_enabled, feature_name in (
        (arguments.enable_lora, "LoRA (--enable-lora)"),
        (arguments.pipeline_parallel > 1, "pipeline parallelism (--pipeline-parallel-size)"),
        (arguments.enforce_eager, "eager execution (--enforce-eager)"),
    ):
        if is_enabled:
            yield f"adaptive verification cannot be used with {feature_name}: remove one of them."


def resolve_model_runner(
    version: Version,
    method: str | None,
    environment: Mapping[str, str],
    *,
    is_moe: bool | None,
    parallel_drafting: bool = False,
    uses_heterogeneous_vocab: bool = False,
) -> tuple[int, str]:
    """Return the version of vLLM's model runner that will run, 1 or 2, and why (vllm/config/vllm.py, use_v2_model_runner).

    `is_moe`: whether the target is a mixture of experts; None: unknown, and treated as one.
    """
    setting = environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if setting is not None:
        return (1 if setting.strip().lower() in ("0", "false") else 2), f"VLLM_USE_V2_MODEL_RUNNER={setting}"
    if parallel_drafting or method in ("suffix", "custom_class", "medusa", "mlp_speculator"):
        return 1, f"{'parallel drafting' if parallel_drafting else method} needs it"
    if uses_heterogeneous_vocab:
        return 1, "use_heterogeneous_vocab needs it"
    if supports(version, Feature.V2_RUNNER_ALL):
        return 2, f"the default of vLLM {version}"
    if supports(version, Feature.V2_RUNNER_DENSE) and is_moe is False:
        return 2, f"the default of vLLM {version} for models without experts"
    return 1, f"the default of vLLM {version}"


def _join_sorted(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def build_speculative_config(
    setting: SpeculationSetting, drafter: DrafterArguments, version: Version, arguments: EngineArguments
) -> dict[str, Any] | None:
    """Return the object for `--speculative-config`; None without speculation. Equal input gives equal keys in equal order.

    Raises ArgumentError with every reason of `find_unsupported_reasons`.
    """
    if reasons := find_unsupported_reasons(setting, drafter, version, arguments):
        raise ArgumentError(" ".join(reasons))
    return None if isinstance(setting, Off) else _build_config(setting, drafter)


def _build_config(setting: SpeculationSetting, drafter: DrafterArguments) -> dict[str, Any]:
    config: dict[str, Any] = {"method": drafter.method, "model": drafter.model}
    if drafter.revision is not None:
        config["revision"] = drafter.revision
    config["num_speculative_tokens"] = max_speculative_tokens(setting)
    if isinstance(setting, Schedule):
        config["num_speculative_tokens_per_batch_size"] = [[tier.first, tier.last, tier.tokens] for tier in setting.tiers]
    if isinstance(setting, Adaptive):
        config["enable_adaptive_verification"] = True
    if drafter.draft_sampling is not None:
        config["draft_sample_method"] = DRAFT_SAMPLING_METHODS[drafter.draft_sampling]
    return config | {name: drafter.engine_options[name] for name in sorted(drafter.engine_options)}


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """The flags of the server itself that Aerie sets."""

    model: str
    """A folder in the pod, or the name of a repository."""
    served_name: str
    port: int
    shutdown_timeout_seconds: int
    """Seconds that open streams have to finish (`--shutdown-timeout`)."""
    revision: str | None = None
    """The revision of the repository."""


def build_serve_arguments(
    server: ServerArguments, user_arguments: Sequence[str], speculative_config: Mapping[str, Any] | None
) -> list[str]:
    """Return all arguments behind `vllm serve`. Raises ArgumentError when the user's include a reserved flag."""
    if errors := validate_user_arguments(user_arguments):
        raise ArgumentError(" ".join(errors))
    arguments = [server.model, "--served-model-name", server.served_name, "--port", str(server.port)]
    if server.revision is not None:
        arguments += ["--revision", server.revision]
    arguments += ["--shutdown-timeout", str(server.shutdown_timeout_seconds), *user_arguments]
    if speculative_config is not None:
        arguments += ["--speculative-config", json.dumps(speculative_config, separators=(",", ":"))]
    return arguments
