"""Checks of the speculative config's further keys against a version of vLLM: keys that it lacks, rejects, or silently ignores.

The keys themselves are data (`aerie.api.engine_options`). Guarantees: a key of `spec.speculation.engineOptions` that is unknown,
or that users may not set, is rejected by a message with field, value and fix. Not guaranteed: that the image has a backend or
type that a key names; the engine reports that when it starts.

Sources, 0.22 to 0.33: vllm/config/speculative.py (_verify_args, __post_init__), vllm/config/vllm.py
(_get_v1_model_runner_unsupported_features, _get_v2_model_runner_unsupported_features),
vllm/v1/worker/gpu/spec_decode/speculator.py (_validate_local_argmax_reduction), vllm/v1/spec_decode/llm_base_proposer.py
(_enable_probabilistic_draft_probs: model runner V1 samples drafts only if the rejection sampling method is standard).
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
"""Methods whose drafts are not sampled, whatever draft_sample_method is (vllm/v1/spec_decode)."""
_LM_HEAD_QUANTIZATION_METHODS = frozenset({"eagle", "eagle3", "mtp"})
"""Methods that support draft_lm_head_quantization."""
_SETTING_KEYS = frozenset({"num_speculative_tokens_per_batch_size", "enable_adaptive_verification"})
"""Keys of a speculation setting: `command_line` checks which version runs it."""


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A part of the speculative config that an engine does not apply as written."""

    description: str
    """The problem with key and value, as a part of a sentence."""
    fix: str
    prevents_start: bool = True
    """Whether the engine does not start; else it starts and ignores something."""


def validate_engine_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one message for each of `spec.speculation.engineOptions` that is invalid with every version."""
    return tuple(message for name, value in options.items() if (message := _validate_engine_option(name, value)))


def _validate_engine_option(name: str, value: object) -> str:
    value_text, option = _format_value(value), ENGINE_OPTIONS_BY_NAME.get(name)
    if option is None:
        return (
            f"{_FIELD_PATH} has {name}: {value_text}, which is unknown to Aerie as a key of vLLM's speculative config: "
            "correct its "
            "name, or remove it; docs/reference/resource.md lists the keys of vLLM 0.26 to 0.33."
        )
    if option.rejection_reason:
        return f"{_FIELD_PATH} has {name}: {value_text}: {option.rejection_reason}."
    if expected := _describe_expected_value(option, value):
        return f"{_FIELD_PATH} has {name}: {value_text}: set {expected}."
    return ""


def _describe_expected_value(option: EngineOption, value: object) -> str:
    """Describe the values that are valid if `value` is not; empty if it is."""
    if type(value) not in _TYPES_BY_KIND[option.json_type]:
        return {"boolean": "true or false", "integer": "a whole number"}.get(option.json_type, "a string")
    if option.allowed_values and value not in option.allowed_values:
        return f"one of {', '.join(option.allowed_values)}"
    if option.minimum is not None and isinstance(value, int) and value < option.minimum:
        return f"{option.minimum} or more"
    if option.pattern and isinstance(value, str) and re.fullmatch(option.pattern, value) is None:
        return f"a string that matches {option.pattern}"
    return ""


def find_config_problems(config: Mapping[str, Any], version: Version, *, tensor_parallel: int) -> Iterator[ConfigProblem]:
    """Find what keeps an engine with this speculative config from starting, or is ignored, with every model runner."""
    yield from _missing_keys(config, version)
    yield from _verification_problems(config, version)
    yield from _draft_sampling_problems(config)
    yield from _drafter_problems(config, tensor_parallel)


def _missing_keys(config: Mapping[str, Any], version: Version) -> Iterator[ConfigProblem]:
    for name, value in config.items():
        option = ENGINE_OPTIONS_BY_NAME.get(name)
        if option is None or name in _SETTING_KEYS or version >= (since := Version.parse(option.since_version)):
            continue
        yield ConfigProblem(
            f"{_describe_option(name, value)}, which vLLM {version} does not support",
            f"use vLLM {since} or newer, or {_leave_out_fix(name)}",
        )


def _verification_problems(config: Mapping[str, Any], version: Version) -> Iterator[ConfigProblem]:
    if config.get("rejection_sample_method") == "block" and not supports(version, Feature.BLOCK_VERIFICATION):
        since = Feature.BLOCK_VERIFICATION.since
        alternative = _leave_out_fix("rejection_sample_method")
        yield ConfigProblem(
            f"rejection_sample_method is block, which vLLM {version} does not support",
            f"use vLLM {since} or newer, or {alternative}",
        )


def _draft_sampling_problems(config: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    method = config.get("method")
    if _is_probabilistic(config) and method in _GREEDY_ONLY_METHODS:
        yield ConfigProblem(
            f"{_describe_option('draft_sample_method', 'probabilistic')}, and the method {method} does not sample its drafts",
            _leave_out_fix("draft_sample_method"),
            prevents_start=method == "extract_hidden_states",
        )
    for other, reason in (
        ("use_local_argmax_reduction", "which leaves no draft logits to sample from"),
        ("use_heterogeneous_vocab", "which vLLM supports only with greedy drafts"),
    ):
        if _is_probabilistic(config) and config.get(other) is True:
            yield ConfigProblem(
                f"{_describe_option('draft_sample_method', 'probabilistic')} and {other} is true, {reason}", f"remove {other}"
            )
    if (
        config.get("enable_adaptive_verification") is True
        and config.get("use_local_argmax_reduction") is True
        and method != "dspark"
    ):
        yield ConfigProblem(
            "use_local_argmax_reduction is true, and adaptive verification needs the draft logits, which are then missing",
            _leave_out_fix("use_local_argmax_reduction"),
        )


def _drafter_problems(config: Mapping[str, Any], tensor_parallel: int) -> Iterator[ConfigProblem]:
    method = config.get("method")
    quantization = config.get("draft_lm_head_quantization")
    if quantization is not None and method not in (None, *_LM_HEAD_QUANTIZATION_METHODS):
        description = (
            f"{_describe_option('draft_lm_head_quantization', quantization)}, which the method {method} does not support"
        )
        yield ConfigProblem(description, _leave_out_fix("draft_lm_head_quantization"))
    if (size := config.get("draft_tensor_parallel_size")) not in (None, 1, tensor_parallel):
        yield ConfigProblem(
            f"draft_tensor_parallel_size is {size}, and vLLM accepts only 1 or the target's, {tensor_parallel}", "set one of them"
        )


def find_runner_problems(config: Mapping[str, Any], model_runner: int, runner_reason: str) -> Iterator[ConfigProblem]:
    """Find what model runner V1 or V2 does not apply as written; `runner_reason`: why the engine uses this one."""
    runner = f"model runner V{model_runner} ({runner_reason})"
    if model_runner == 1 and config.get("rejection_sample_method") == "block":
        effect = " and then drafts greedily" if _is_probabilistic(config) else ""
        yield ConfigProblem(
            f"rejection_sample_method is block, but {runner} verifies token by token{effect}",
            _leave_out_fix("rejection_sample_method"),
            prevents_start=False,
        )
    for name, value in config.items():
        option = ENGINE_OPTIONS_BY_NAME.get(name)
        # P-EAGLE and heterogeneous vocabularies determine their runner themselves.
        if option is None or option.model_runner in (None, model_runner) or name == "parallel_drafting" or value in (False, None):
            continue
        prevents_start = name == "draft_lm_head_quantization"
        reaction = "rejects" if prevents_start else "ignores"
        description = f"{_describe_option(name, value)}, which {runner} {reaction}"
        yield ConfigProblem(description, _leave_out_fix(name), prevents_start=prevents_start)


def format_problem(problem: ConfigProblem) -> str:
    """Return the problem as a message about spec.speculation."""
    return f"spec.speculation: {problem.description}: {problem.fix}."


def _is_probabilistic(config: Mapping[str, Any]) -> bool:
    return config.get("draft_sample_method") == "probabilistic"


def _describe_option(name: str, value: object) -> str:
    """Return key and value, or field and value where spec.speculation has a field for the key."""
    if name == "draft_sample_method":
        field = next((field for field, method in DRAFT_SAMPLING_METHODS.items() if method == value), None)
        return f"draftSampling is {field} (draft_sample_method)" if field else f"draft_sample_method is {_format_value(value)}"
    return f"{name} is {_format_value(value)}"


def _leave_out_fix(name: str) -> str:
    return f"remove {'draftSampling' if name == 'draft_sample_method' else name}"


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
