"""Whether a drafter fits engines that run another one, so that it can change in place: from configs and weight headers.

The rules are the plugin's own (`aerie_vllm.validation`), by which a pod checks the drafter again before it loads it. A pod reads
configs through vLLM, which adds defaults and has one format; `_read_config` does the same as far as it matters here.

Guarantees: pure and total; whatever is not known to fit is a problem, with its reason, both values and what to do. Not
guaranteed: that a pod accepts the drafter. Only a pod compares a copy of the target's embeddings with the target's own, hashes
the files, and knows what else prevents changes in its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.models.config import DrafterFamily, list_architectures, parse_drafter_model
from aerie_vllm.checkpoint import Tensor
from aerie_vllm.validation import FLAGS, SHARED, Engine, Form, find_map_problem, iter_problems
from aerie_vllm.worker_protocol import Problem

MAX_PROBLEMS = 8
MAX_MESSAGE_CHARACTERS = 600
"""Longest message: a value of a config may be long."""
_GATES: Mapping[DrafterFamily, frozenset[str]] = {
    "llama": frozenset(FLAGS),
    "qwen3": frozenset(FLAGS),
    "mla": frozenset(FLAGS) - {"norm_before_fc"},
}
"""Flags with a gate in the plugin's classes (aerie_vllm/gated)."""
_LLAMA_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Defaults of transformers' LlamaConfig that checkpoints leave out."""
_DEFAULT_ROPE_THETA = 10000.0
_MAX_AUX_STATES = 64


def find_in_place_problems(
    running: Checkpoint, candidate: Checkpoint, method: str, vocabulary_size: int | None = None
) -> tuple[Problem, ...]:
    """Return why the candidate cannot replace the running drafter in place, the most telling reason first; empty if it fits.

    Args:
        running: the drafter in the arguments of the running engines.
        method: vLLM's name of the method.
        vocabulary_size: tokens of the target; None if unknown.
    """
    problems = islice(_iter_problems(running, candidate, method, vocabulary_size), MAX_PROBLEMS)
    return tuple(Problem(reason=problem["reason"], message=_shorten(problem["message"])) for problem in problems)


def find_cache_problem(limit_bytes: int, cached: Sequence[Checkpoint]) -> Problem | None:
    """Return why a pod's cache cannot hold all of the models that are fetched into it, or None if it can, or sizes are unknown.

    The kubelet evicts a pod that exceeds the limit of one of its volumes.

    Args:
        limit_bytes: size limit of the cache.
        cached: the models of the Hub: target, running drafter, promoted drafter, candidate.
    """
    sizes = {model.name: model.weight_bytes or 0 for model in cached}
    if sum(sizes.values()) <= limit_bytes:
        return None
    contents = " and ".join(f"{name} ({size} bytes)" for name, size in sizes.items())
    message = (
        f"spec.engine.cache.sizeLimit is {limit_bytes} bytes, and the cache would have {contents}, so the pods would be evicted: "
        "raise it, or roll the drafter out by pods."
    )
    return Problem(reason="CacheTooSmall", message=message)


def _iter_problems(running: Checkpoint, candidate: Checkpoint, method: str, vocabulary_size: int | None) -> Iterator[Problem]:
    unreadable = [problem for checkpoint in (running, candidate) for problem in _find_unreadable_parts(checkpoint)]
    if unreadable:
        yield from unreadable
        return
    own, form = _read_form(running), _read_form(candidate)
    family = parse_drafter_model(running.config).family if method == "eagle3" else "other"
    engine = Engine(
        method=method,
        gates=_GATES.get(family, frozenset()),
        shared=frozenset(module for module in SHARED if f"{module}.weight" not in own.tensors),
        same_class=list_architectures(family),
    )
    yield from iter_problems(own, form, engine)
    if vocabulary_size is not None and candidate.d2t_offsets is not None:
        problem = find_map_problem(candidate.d2t_offsets, vocabulary_size)
        if problem is not None:
            yield problem


def _find_unreadable_parts(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield what prevents a comparison, whatever the other drafter is."""
    name = checkpoint.name
    if checkpoint.tensors is None:
        yield Problem(
            reason="FileMissing", message=f"{name} has no safetensors files: export it as safetensors, or roll it out by pods."
        )
    if checkpoint.duplicate_tensors:
        tensor = min(checkpoint.duplicate_tensors)
        yield Problem(reason="InvalidHeader", message=f"several files of {name} have {tensor}: export it again.")
    if parse_drafter_model(checkpoint.config).kind == "peagle" or "mask_hidden" in (checkpoint.tensors or {}):
        message = f"{name} drafts in parallel, with state that vLLM calculates at the start only: roll it out by pods."
        yield Problem(reason="ParallelDrafting", message=message)
    for key, value in _iter_malformed_keys(_read_config(checkpoint.config)):
        yield Problem(reason="InvalidConfig", message=f"config.json of {name} has {key} {value!r}: export it again.")


def _iter_malformed_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    eagle_config = config.get("eagle_config")
    if eagle_config is not None and not isinstance(eagle_config, Mapping):
        yield "eagle_config", eagle_config
        eagle_config = None
    for part in (config, eagle_config or {}):
        for key, is_valid in _FORMS.items():
            if part.get(key) is not None and not is_valid(part[key]):
                yield key, part[key]


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_aux_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _MAX_AUX_STATES


_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "architectures": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "eagle_aux_hidden_state_layer_ids": lambda value: isinstance(value, list) and len(value) <= _MAX_AUX_STATES,
    "hidden_size": _is_size,
    "num_attention_heads": _is_size,
    "num_aux_hidden_states": _is_aux_count,
    "num_aux_layers": _is_aux_count,
    "target_hidden_size": _is_size,
}
"""Keys with which the rules calculate, and the form that they need."""


def _read_form(checkpoint: Checkpoint) -> Form:
    """Return what the rules compare."""
    return Form(_read_config(checkpoint.config), {name: Tensor(*info) for name, info in (checkpoint.tensors or {}).items()})


def _read_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config as vLLM understands it: the library speculators' format unpacked, and Llama's defaults filled in.

    Sources: vllm/transformers_utils/configs/speculators/algos.py, update_eagle3; transformers' LlamaConfig.
    """
    if config.get("speculators_model_type") == "eagle3":
        layer = config.get("transformer_layer_config")
        layer = layer if isinstance(layer, Mapping) else {}
        flags: dict[str, Any] = dict.fromkeys(FLAGS, False) | {"norm_before_residual": True}
        taken = (*FLAGS, "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
        overrides = {key: config[key] for key in taken if config.get(key) is not None}
        # vLLM gives it a class of its own, so a drafter in the other format differs.
        names = [parse_drafter_model(config).architecture]
        return {**layer, **flags, **overrides, "architectures": names, "model_type": "speculators"}
    if config.get("model_type") != "llama":
        return config
    filled = {**_LLAMA_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    heads, width = filled.get("num_attention_heads"), filled.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        filled = {"num_key_value_heads": heads, "head_dim": width // heads, **filled}
    theta, scaling = filled.pop("rope_theta", _DEFAULT_ROPE_THETA), filled.pop("rope_scaling", None)
    scaling = filled.get("rope_parameters", scaling)
    if scaling is None or isinstance(scaling, Mapping):
        scaling = scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        others = {key: value for key, value in scaling.items() if key != "type"}
        filled["rope_parameters"] = {"rope_theta": theta, **others, "rope_type": kind}
    return filled


def _shorten(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[: MAX_MESSAGE_CHARACTERS - 1]}…"
