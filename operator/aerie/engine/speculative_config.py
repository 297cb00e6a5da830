"""The speculative config's further keys against a version of vLLM: what it lacks, what it refuses, what it ignores in silence.

The keys themselves are data (`aerie.api.engine_options`). Guarantees: every key of `spec.speculation.engineOptions` that is not
the user's to set, or is not known, is refused by a sentence with field, value and way out. Not guaranteed: that a backend or a
type that is named exists in the image; the engine says so when it starts.

Sources, 0.22 to 0.33: vllm/config/speculative.py (_verify_args, __post_init__), vllm/config/vllm.py
(_get_v1_model_runner_unsupported_features, _get_v2_model_runner_unsupported_features),
vllm/v1/worker/gpu/spec_decode/speculator.py (_validate_local_argmax_reduction), vllm/v1/spec_decode/llm_base_proposer.py
(_enable_probabilistic_draft_probs: model runner V1 draws drafts only where the rejection sampling method is standard).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aerie.api.engine_options import ENGINE_OPTIONS_BY_NAME, EngineOption
from aerie.engine.releases import Feature, Version, supports

DRAFT_SAMPLING_METHODS = {"Greedy": "greedy", "Probabilistic": "probabilistic"}
"""Values of spec.speculation.draftSampling and of `draft_sample_method`."""
_FIELD_PATH = "spec.speculation.engineOptions"
_TYPES_BY_KIND: dict[str, tuple[type, ...]] = {"boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,)}
_GREEDY_ONLY_METHODS = frozenset(
    {"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states"}
)
"""Methods whose drafts are not drawn, whatever draft_sample_method says (vllm/v1/spec_decode)."""
_LM_HEAD_QUANTIZATION_METHODS = frozenset({"eagle", "eagle3", "mtp"})
"""Methods that take draft_lm_head_quantization."""
_SETTING_KEYS = frozenset({"num_speculative_tokens_per_batch_size", "enable_adaptive_verification"})
"""Keys of a setting: `flags` knows which version runs it."""


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """What an engine does not do as it is written."""

    description: str
    """With key and value, as a part of a sentence."""
    fix: str
    prevents_start: bool = True
    """Whether the engine refuses to start; else it starts and ignores something."""


def validate_engine_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence for each of `spec.speculation.engineOptions` that is not taken, whatever the version."""
    return tuple(sentence for name, value in options.items() if (sentence := _validate_engine_option(name, value)))


def _validate_engine_option(name: str, value: object) -> str:
    given, key = _format_value(value), ENGINE_OPTIONS_BY_NAME.get(name)
    if key is None:
        return (
            f"{_FIELD_PATH} has {name}: {given}, and Aerie knows no such key of vLLM's speculative config: correct its name, or leave "
            "it out; docs/reference.md lists those of vLLM 0.26 to 0.33."
        )
    if key.rejection_reason:
        return f"{_FIELD_PATH} has {name}: {given}: {key.rejection_reason}."
    if expected := _describe_expected_value(key, value):
        return f"{_FIELD_PATH} has {name}: {given}: write {expected}."
    return ""


def _describe_expected_value(key: EngineOption, value: object) -> str:
    """What would be right where the value is not; else nothing."""
    if type(value) not in _TYPES_BY_KIND[key.json_type]:
        return {"boolean": "true or false", "integer": "a whole number"}.get(key.json_type, "a text")
    if key.allowed_values and value not in key.allowed_values:
        return f"one of {', '.join(key.allowed_values)}"
    if key.minimum is not None and isinstance(value, int) and value < key.minimum:
        return f"{key.minimum} or more"
    if key.pattern and isinstance(value, str) and re.fullmatch(key.pattern, value) is None:
        return f"a text that matches {key.pattern}"
    return ""


def find_config_problems(config: Mapping[str, Any], version: Version, *, tensor_parallel: int) -> Iterator[ConfigProblem]:
    """What an engine with this speculative config refuses at its start, as far as its model runner does not decide."""
    for name, value in config.items():
        key = ENGINE_OPTIONS_BY_NAME.get(name)
        if key is None or name in _SETTING_KEYS or version >= (since := Version.parse(key.since_version)):
            continue
        yield ConfigProblem(
            f"{_describe_option(name, value)}, a key that vLLM {version} does not have",
            f"use vLLM {since} or newer, or {_leave_out_fix(name)}",
        )
    method = config.get("method")
    if config.get("rejection_sample_method") == "block" and not supports(version, Feature.BLOCK_VERIFICATION):
        newer = Feature.BLOCK_VERIFICATION.since
        out = _leave_out_fix("rejection_sample_method")
        yield ConfigProblem(
            f"rejection_sample_method is block, which vLLM {version} does not know", f"use vLLM {newer} or newer, or {out}"
        )
    if _is_probabilistic(config) and method in _GREEDY_ONLY_METHODS:
        yield ConfigProblem(
            f"{_describe_option('draft_sample_method', 'probabilistic')}, and the method {method} does not draw its drafts",
            _leave_out_fix("draft_sample_method"),
            prevents_start=method == "extract_hidden_states",
        )
    for other, why in (
        ("use_local_argmax_reduction", "which leaves no draft logits to draw from"),
        ("use_heterogeneous_vocab", "which vLLM runs with greedy drafts alone"),
    ):
        if _is_probabilistic(config) and config.get(other) is True:
            yield ConfigProblem(
                f"{_describe_option('draft_sample_method', 'probabilistic')} and {other} is true, {why}", f"leave {other} out"
            )
    if (
        config.get("enable_adaptive_verification") is True
        and config.get("use_local_argmax_reduction") is True
        and method != "dspark"
    ):
        yield ConfigProblem(
            "use_local_argmax_reduction is true, and adaptive verification needs the draft logits that it never makes",
            _leave_out_fix("use_local_argmax_reduction"),
        )
    head = config.get("draft_lm_head_quantization")
    if head is not None and method not in (None, *_LM_HEAD_QUANTIZATION_METHODS):
        what = f"{_describe_option('draft_lm_head_quantization', head)}, which the method {method} does not take"
        yield ConfigProblem(what, _leave_out_fix("draft_lm_head_quantization"))
    if (size := config.get("draft_tensor_parallel_size")) not in (None, 1, tensor_parallel):
        yield ConfigProblem(
            f"draft_tensor_parallel_size is {size}, and vLLM takes 1 or the target's, {tensor_parallel}", "write one of them"
        )


def find_runner_problems(config: Mapping[str, Any], model_runner: int, runner_reason: str) -> Iterator[ConfigProblem]:
    """What model runner V1 or V2 does not do as it is written; `why`: why it is this one."""
    this = f"model runner V{model_runner} ({runner_reason})"
    if model_runner == 1 and config.get("rejection_sample_method") == "block":
        drawn = " and then drafts greedily" if _is_probabilistic(config) else ""
        yield ConfigProblem(
            f"rejection_sample_method is block, and {this} verifies token by token all the same{drawn}",
            _leave_out_fix("rejection_sample_method"),
            prevents_start=False,
        )
    for name, value in config.items():
        key = ENGINE_OPTIONS_BY_NAME.get(name)
        # P-EAGLE and foreign vocabularies choose their runner themselves.
        if key is None or key.model_runner in (None, model_runner) or name == "parallel_drafting" or value in (False, None):
            continue
        ends = name == "draft_lm_head_quantization"
        does = "refuses it" if ends else "ignores it"
        yield ConfigProblem(f"{_describe_option(name, value)}, and {this} {does}", _leave_out_fix(name), prevents_start=ends)


def format_problem(problem: ConfigProblem) -> str:
    """Return the fault as a sentence about spec.speculation."""
    return f"spec.speculation: {problem.description}: {problem.fix}."


def _is_probabilistic(config: Mapping[str, Any]) -> bool:
    return config.get("draft_sample_method") == "probabilistic"


def _describe_option(name: str, value: object) -> str:
    """Key and value, and for what has a field of its own that field."""
    if name == "draft_sample_method":
        field = next((field for field, word in DRAFT_SAMPLING_METHODS.items() if word == value), None)
        return f"draftSampling is {field} (draft_sample_method)" if field else f"draft_sample_method is {_format_value(value)}"
    return f"{name} is {_format_value(value)}"


def _leave_out_fix(name: str) -> str:
    return f"leave {'draftSampling' if name == 'draft_sample_method' else name} out"


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
