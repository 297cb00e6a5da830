"""vLLM's command line from Aerie's side: what Aerie writes itself, what it therefore refuses, and what a release cannot run.

Guarantees: the speculative config always names its method, since vLLM would else guess it from the drafter's path; what a release
is known to refuse, or to change without a word, is refused here with a sentence. Not guaranteed: that the model runs; the
checkpoints are `preflight`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.engine import speculative_config as keys
from aerie.engine.arguments import ArgumentError, Arguments, options
from aerie.engine.releases import Feature, Version, missing, supports
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, max_tokens


# ------------------------------------------------------------------------------------------------------------ owned flags
@dataclass(frozen=True, slots=True)
class Owned:
    """Flags that users leave to Aerie, and what to do instead."""

    flags: tuple[str, ...]
    """Full names; a name that ends in `*` stands for all with that beginning."""
    instead: str


_ONE_POD = (
    "a replica is one pod: give it more GPUs in spec.engine.resources and use --tensor-parallel-size or --data-parallel-size"
)
_ADDRESS = "engines listen where Aerie puts them, and clients use the Service that bears the name of the resource"

OWNED = (
    Owned(("--model",), "the model belongs in spec.model.source"),
    Owned(("--revision",), "the commit belongs in spec.model.source.huggingFace.revision"),
    Owned(("--served-model-name",), "the name belongs in spec.model.servedName"),
    Owned(
        ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"),
        "the drafter belongs in spec.drafter, the number of tokens in spec.speculation.tokens",
    ),
    Owned(("--host", "--port", "--uds"), _ADDRESS),
    Owned(("--shutdown-timeout",), "it follows spec.engine.podTemplate.spec.terminationGracePeriodSeconds"),
    Owned(("--hf-token",), "a token does not belong on a command line, its Secret belongs in spec.engine.tokenSecret"),
    Owned(("--config",), "Aerie does not see what is in a file of the pod, its flags belong in spec.engine.args one by one"),
    Owned(("--disable-log-stats",), "without the engine's metrics no drafter can be judged"),
    Owned(("--ssl-*",), "probes and metrics use plain HTTP, TLS belongs at the gateway"),
    Owned(("--grpc",), "clients, probes and metrics use HTTP"),
    Owned(
        (
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
        ),
        _ONE_POD,
    ),
)


def refused(args: Sequence[str]) -> tuple[str, ...]:
    """One sentence for each of the user's arguments that Aerie does not take. Raises ArgumentError for what cannot be read.

    The beginning of a name, which argparse takes for the whole, is refused like the whole.
    """
    return tuple(_refusals(args))


def _refusals(args: Sequence[str]) -> Iterator[str]:
    for option in options(args):
        if not option.name:
            yield f"spec.engine.args begins with '{option.text}', which is no flag: the model belongs in spec.model.source."
            continue
        owner = next((owned for owned in OWNED if any(_means(option.name, flag) for flag in owned.flags)), None)
        if owner is None:
            continue
        yield f"spec.engine.args has '{option.text}', which is Aerie's to set: leave it out; {owner.instead}."
        if option.name == "--speculative-config" and len(option.values) == 1 and (sentence := _lossy_json(option.values[0])):
            yield sentence


def _means(name: str, flag: str) -> bool:
    """Whether vLLM may take `name` for `flag`: itself, or its beginning."""
    if flag.endswith("*"):
        return name.startswith(flag[:-1])
    return name == flag or (name not in _WHOLE and flag.startswith(name))


_WHOLE = frozenset({"--data-parallel-size"})
"""Flags of vLLM that are the beginning of an owned one and are the user's."""


# ------------------------------------------------------------------------------------------------------- lossy verification
LOSSLESS = frozenset({"standard", "block", "strict", "probabilistic"})
"""Rejection sampling methods whose output is distributed as the target's own; strict and probabilistic are older names of
standard (vllm/config/speculative.py). All others, `synthetic` and `fly` among them, change what the model answers."""

_LOSSY_KEYS = ("synthetic_", "fly_", "relaxed_", "typical_", "posterior_")


def lossy(config: Mapping[str, Any]) -> str | None:
    """A sentence if a speculative config makes the engine answer other than its target would, else None.

    A drafter's acceptance says nothing then: anything can be accepted.
    """
    method = config.get("rejection_sample_method", config.get("acceptance_method"))
    if method is not None and method not in LOSSLESS:
        return (
            f"the speculative config verifies by '{method}', which lets the drafter change what the model answers: "
            "leave rejection_sample_method out, or use 'standard' or 'block'."
        )
    found = sorted(key for key in config if key.startswith(_LOSSY_KEYS))
    if found:
        return (
            f"the speculative config has {', '.join(found)}, which lets the drafter change what the model answers: leave it out."
        )
    return None


def _lossy_json(text: str) -> str | None:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return lossy(config) if isinstance(config, dict) else None


# ----------------------------------------------------------------------------------------------------------- what Aerie writes
@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter as the engine's command line names it."""

    model: str
    """A folder in the pod, or a repository's name."""
    method: str = "eagle3"
    """vLLM's method; `eagle3` for EAGLE 3.1 too."""
    revision: str | None = None
    """Of the repository."""
    sampling: str | None = None
    """spec.speculation.draftSampling: Greedy or Probabilistic; None: as the engine does."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """spec.speculation.engineOptions: further keys of the speculative config."""


METHODS = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "medusa", "mlp_speculator"})
"""Methods with a drafter of their own that Aerie writes a config for."""

_METHOD_FEATURES = {
    "dflash": Feature.DFLASH,
    "dspark": Feature.DSPARK,
    "medusa": Feature.MEDUSA,
    "mlp_speculator": Feature.MEDUSA,
}
_SCHEDULED = frozenset({"eagle", "eagle3", "mtp", "dflash", "draft_model"})
"""Methods that take a schedule on model runner V1 too (vllm/config/vllm.py, _maybe_disable_dynamic_sd_for_v1)."""


def unsupported(setting: Setting, drafter: Drafter, version: Version, arguments: Arguments) -> tuple[str, ...]:
    """Why the engine cannot run the setting as it is meant: one sentence a reason, none when it can."""
    return tuple(_reasons(setting, drafter, version, arguments))


def _reasons(setting: Setting, drafter: Drafter, version: Version, arguments: Arguments) -> Iterator[str]:
    if isinstance(setting, Off):
        return
    method = drafter.method
    if method not in METHODS:
        yield f"the drafter's method is '{method}': Aerie knows {', '.join(sorted(METHODS))}."
    feature = _METHOD_FEATURES.get(method)
    if feature is not None and not supports(version, feature):
        yield missing(version, feature)
    yield from (misplaced := keys.misplaced(drafter.options))
    if not misplaced:
        config = _config(setting, drafter)
        yield from map(keys.sentence, keys.faults(config, version, tensor_parallel=arguments.tensor_parallel))
    if arguments.pipeline_parallel > 1 and method == "eagle3" and not supports(version, Feature.PIPELINE_PARALLEL):
        yield missing(version, Feature.PIPELINE_PARALLEL)
    if isinstance(setting, Schedule):
        yield from _schedule_reasons(method, version, arguments)
    if isinstance(setting, Adaptive):
        yield from _adaptive_reasons(method, version, arguments)


def _schedule_reasons(method: str, version: Version, arguments: Arguments) -> Iterator[str]:
    if not supports(version, Feature.SCHEDULE):
        yield missing(version, Feature.SCHEDULE)
    if arguments.data_parallel > 1:
        does = "ignores a schedule" if supports(version, Feature.SCHEDULE_DATA_PARALLEL_GUARD) else "may deadlock on a schedule"
        yield f"vLLM {version} {does} with data parallel size {arguments.data_parallel}: use a fixed number of tokens."
    if method in METHODS - _SCHEDULED:
        yield f"a schedule does not go with the method '{method}': use a fixed number of tokens, or one of {_listed(_SCHEDULED)}."


def _adaptive_reasons(method: str, version: Version, arguments: Arguments) -> Iterator[str]:
    feature = Feature.ADAPTIVE_DSPARK if method == "dspark" else Feature.ADAPTIVE
    if not supports(version, feature):
        yield missing(version, feature)
    if method in ("medusa", "mlp_speculator"):
        yield f"adaptive verification does not go with the method '{method}'."
    # vllm/config/vllm.py, _validate_adaptive_verification
    for given, what in (
        (arguments.lora, "LoRA (--enable-lora)"),
        (arguments.pipeline_parallel > 1, "pipeline parallelism (--pipeline-parallel-size)"),
        (arguments.enforce_eager, "eager execution (--enforce-eager)"),
    ):
        if given:
            yield f"adaptive verification does not go with {what}: leave one of them out."


def model_runner(
    version: Version,
    method: str | None,
    environment: Mapping[str, str],
    *,
    experts: bool | None,
    parallel_drafting: bool = False,
    foreign_vocabulary: bool = False,
) -> tuple[int, str]:
    """1 or 2, and why: which of vLLM's two model runners will run (vllm/config/vllm.py, use_v2_model_runner).

    `experts`: whether the target is a mixture of experts; None: not known, and then taken for one.
    """
    setting = environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if setting is not None:
        return (1 if setting.strip().lower() in ("0", "false") else 2), f"VLLM_USE_V2_MODEL_RUNNER={setting}"
    if parallel_drafting or method in ("suffix", "custom_class", "medusa", "mlp_speculator"):
        return 1, f"{'parallel drafting' if parallel_drafting else method} needs it"
    if foreign_vocabulary:
        return 1, "use_heterogeneous_vocab needs it"
    if supports(version, Feature.V2_RUNNER_ALL):
        return 2, f"the default of vLLM {version}"
    if supports(version, Feature.V2_RUNNER_DENSE) and experts is False:
        return 2, f"the default of vLLM {version} for models without experts"
    return 1, f"the default of vLLM {version}"


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def speculative_config(setting: Setting, drafter: Drafter, version: Version, arguments: Arguments) -> dict[str, Any] | None:
    """The object for `--speculative-config`; None without speculation. The same input gives the same keys in the same order.

    Raises ArgumentError with every reason of `unsupported`.
    """
    if reasons := unsupported(setting, drafter, version, arguments):
        raise ArgumentError(" ".join(reasons))
    return None if isinstance(setting, Off) else _config(setting, drafter)


def _config(setting: Setting, drafter: Drafter) -> dict[str, Any]:
    config: dict[str, Any] = {"method": drafter.method, "model": drafter.model}
    if drafter.revision is not None:
        config["revision"] = drafter.revision
    config["num_speculative_tokens"] = max_tokens(setting)
    if isinstance(setting, Schedule):
        config["num_speculative_tokens_per_batch_size"] = [[tier.first, tier.last, tier.tokens] for tier in setting.tiers]
    if isinstance(setting, Adaptive):
        config["enable_adaptive_verification"] = True
    if drafter.sampling is not None:
        config["draft_sample_method"] = keys.SAMPLING[drafter.sampling]
    return config | {name: drafter.options[name] for name in sorted(drafter.options)}


@dataclass(frozen=True, slots=True)
class Server:
    """What Aerie sets of the server itself."""

    model: str
    """A folder in the pod, or a repository's name."""
    served_name: str
    port: int
    shutdown_timeout: int
    """Seconds that open streams get to finish (`--shutdown-timeout`)."""
    revision: str | None = None
    """Of the repository."""


def serve_arguments(server: Server, user: Sequence[str], speculative: Mapping[str, Any] | None) -> list[str]:
    """All arguments behind `vllm serve`. Raises ArgumentError when the user's include one of Aerie's."""
    if sentences := refused(user):
        raise ArgumentError(" ".join(sentences))
    own = [server.model, "--served-model-name", server.served_name, "--port", str(server.port)]
    if server.revision is not None:
        own += ["--revision", server.revision]
    own += ["--shutdown-timeout", str(server.shutdown_timeout), *user]
    if speculative is not None:
        own += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    return own
