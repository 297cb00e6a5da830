"""The keys of vLLM's speculative config: the table against the published releases, and the messages for rejected values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.api.engine_options import ENGINE_OPTIONS, ENGINE_OPTIONS_BY_NAME
from aerie.api.validation.admission import find_manifest_errors
from aerie.engine.arguments import parse_arguments
from aerie.engine.command_line import DrafterArguments, build_speculative_config, check_lossless, find_unsupported_reasons
from aerie.engine.releases import Version
from aerie.engine.speculation import Adaptive, Off, Static
from aerie.engine.speculative_config import ConfigProblem, find_config_problems, find_runner_problems, validate_engine_options
from aerie.manifests.revision_hash import compute_revision

PUBLISHED: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "data" / "speculative_config.json").read_text())
"""Annotation of each key by release, from 0.26.0 to 0.33.0 (data/README.md)."""
VALID_VALUES = {
    "attention_backend": "FLASH_ATTN",
    "code_revision": "0" * 40,
    "draft_tensor_parallel_size": 1,
    "kv_cache_dtype": "fp8",
    "max_model_len": 4096,
    "moe_backend": "triton",
    "quantization": "fp8",
    "rejection_sample_method": "block",
    "draft_lm_head_quantization": "nvfp4",
}
VALUE_BY_TYPE: dict[str, Any] = {"boolean": True, "integer": 3, "number": 0.5, "string": "x", "array": [1.0], "object": {}}


def format_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def manifest(**speculation: Any) -> dict[str, Any]:
    source = {"huggingFace": {"repo": "me/model", "revision": "0" * 40}}
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat", "namespace": "default", "uid": "1"},
        "spec": {
            "replicas": 1,
            "model": {"source": source},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "drafter": {"source": source},
            "speculation": speculation,
        },
    }


# -------------------------------------------------------------------------------------------------------------- the table
def test_the_table_has_the_keys_of_every_release_and_no_others() -> None:
    assert {key.name for key in ENGINE_OPTIONS} == PUBLISHED.keys()
    assert len(ENGINE_OPTIONS_BY_NAME) == len(ENGINE_OPTIONS)
    for name, by_version in PUBLISHED.items():
        first, since = Version.parse(next(iter(by_version))), Version.parse(ENGINE_OPTIONS_BY_NAME[name].since_version)
        assert since == first if first > Version.parse("0.26.0") else since <= first, name


@pytest.mark.parametrize("key", ENGINE_OPTIONS, ids=lambda key: key.name)
def test_types_values_and_bounds_are_those_of_the_release(key: Any) -> None:
    latest = [annotation for annotation in PUBLISHED[key.name].values() if annotation][-1]
    kinds = {
        "bool": "boolean",
        "int": "integer",
        "float": "number",
        "list": "array",
        "SkipValidation": "object",
        "LoadConfig": "object",
    }
    assert key.json_type == next((kind for prefix, kind in kinds.items() if latest.startswith(prefix)), "string")
    if key.allowed_values:
        assert set(key.allowed_values) <= set(re.findall(r"'(\w+)'", latest))
    if key.minimum is not None:
        assert latest.endswith(f">= {key.minimum}")
    assert bool(key.description) != bool(key.rejection_reason)


def test_no_accepted_value_is_lossy() -> None:
    for key in ENGINE_OPTIONS:
        if not key.rejection_reason:
            assert all(
                check_lossless({key.name: value}) is None for value in key.allowed_values or (VALUE_BY_TYPE[key.json_type],)
            ), key.name
        elif "what the model answers" in key.rejection_reason:
            assert check_lossless({key.name: VALUE_BY_TYPE[key.json_type]}) is not None


# -------------------------------------------------------------------------------------------------------------- validation
@pytest.mark.parametrize("key", ENGINE_OPTIONS, ids=lambda key: key.name)
def test_each_key_is_accepted_or_rejected_with_a_fix(key: Any) -> None:
    value = VALID_VALUES.get(key.name, VALUE_BY_TYPE[key.json_type])
    messages = validate_engine_options({key.name: value})
    admission_errors = find_manifest_errors(manifest(engineOptions={key.name: value}))
    if not key.rejection_reason:
        assert messages == ()
        assert admission_errors == []
        return
    assert messages == (f"spec.speculation.engineOptions has {key.name}: {format_value(value)}: {key.rejection_reason}.",)
    if key.json_type not in ("array", "object"):
        assert admission_errors == [f"spec.speculation.engineOptions.{key.name}: {key.rejection_reason}."]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fly_windows": 3}, "unknown to Aerie as a key"),
        ({"disable_by_batch_size": 3}, "unknown to Aerie as a key"),
        ({"enforce_eager": "yes"}, "set true or false"),
        ({"max_model_len": True}, "set a whole number"),
        ({"max_model_len": 0}, "set 1 or more"),
        ({"quantization": 8}, "set a string"),
        ({"rejection_sample_method": "fly"}, "set one of standard, block"),
        ({"rejection_sample_method": "synthetic"}, "set one of standard, block"),
        ({"code_revision": "main"}, "set a string that matches"),
    ],
)
def test_unknown_keys_and_invalid_values_are_rejected(options: dict[str, Any], reason: str) -> None:
    (message,) = validate_engine_options(options)
    ((name, value),) = options.items()
    assert message.startswith(f"spec.speculation.engineOptions has {name}: {format_value(value)}")
    assert reason in message
    assert find_unsupported_reasons(
        Static(3), DrafterArguments("x", engine_options=options), Version.parse("0.33.0"), parse_arguments([])
    ) == (message,)


def test_admission_accepts_unknown_keys() -> None:
    document = manifest(engineOptions={"fly_windows": 3})
    assert find_manifest_errors(document) == []
    assert SpeculativeDeployment.from_dict(document).spec.speculation.engine_options == {"fly_windows": 3}


# ------------------------------------------------------------------------------------------------------ against a version
def find_problems(config: dict[str, Any], version: str) -> list[ConfigProblem]:
    return list(find_config_problems(config, Version.parse(version), tensor_parallel=2))


@pytest.mark.parametrize(
    ("config", "version", "description", "fix"),
    [
        (
            {"draft_sample_method": "probabilistic"},
            "0.20.2",
            "draftSampling is Probabilistic (draft_sample_method), which vLLM 0.20.2 does not support",
            "use vLLM 0.22.0 or newer, or remove draftSampling",
        ),
        ({"kv_cache_dtype": "fp8"}, "0.25.1", "which vLLM 0.25.1 does not support", "use vLLM 0.26.0 or newer"),
        ({"rejection_sample_method": "block"}, "0.24.0", "does not support", "use vLLM 0.25.0 or newer"),
        (
            {"draft_sample_method": "probabilistic", "use_local_argmax_reduction": True},
            "0.33.0",
            "no draft logits to sample from",
            "remove use_local_argmax_reduction",
        ),
        (
            {"draft_sample_method": "probabilistic", "use_heterogeneous_vocab": True},
            "0.33.0",
            "only with greedy drafts",
            "remove use_heterogeneous_vocab",
        ),
        ({"method": "medusa", "draft_sample_method": "probabilistic"}, "0.32.0", "does not sample", "remove draftSampling"),
        ({"method": "dflash", "draft_lm_head_quantization": "fp8"}, "0.33.0", "method dflash does not support", "remove"),
        ({"draft_tensor_parallel_size": 3}, "0.33.0", "vLLM accepts only 1 or the target's, 2", "set one of them"),
    ],
)
def test_keys_that_a_version_does_not_support(config: dict[str, Any], version: str, description: str, fix: str) -> None:
    (problem,) = find_problems(config, version)
    assert description in problem.description
    assert problem.fix.startswith(fix)


def test_supported_keys_have_no_problem() -> None:
    sampled = {"method": "eagle3", "draft_sample_method": "probabilistic"}
    assert find_problems(sampled | {"rejection_sample_method": "block", "draft_tensor_parallel_size": 2}, "0.33.0") == []
    assert find_problems(sampled | {"use_local_argmax_reduction": False}, "0.22.0") == []
    assert find_problems({"draft_sample_method": "greedy", "use_local_argmax_reduction": True}, "0.33.0") == []


def test_keys_that_a_model_runner_ignores_or_rejects() -> None:
    sampled = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    (problem,) = find_runner_problems(sampled, 1, "asked for")
    assert "then drafts greedily" in problem.description
    assert not problem.prevents_start
    assert list(find_runner_problems(sampled, 2, "asked for")) == []
    (problem,) = find_runner_problems({"draft_lm_head_quantization": "fp8"}, 1, "asked for")
    assert problem.prevents_start
    (problem,) = find_runner_problems({"disable_padded_drafter_batch": True}, 2, "asked for")
    assert not problem.prevents_start
    assert list(find_runner_problems({"disable_padded_drafter_batch": False, "parallel_drafting": True}, 2, "asked for")) == []


# --------------------------------------------------------------------------------------------------------------- the config
def test_the_speculative_config_has_the_options_last_and_sorted() -> None:
    drafter = DrafterArguments("x", draft_sampling="Probabilistic", engine_options={"quantization": "fp8", "enforce_eager": True})
    config = build_speculative_config(Static(3), drafter, Version.parse("0.33.0"), parse_arguments([]))
    assert list(config or {}) == [
        "method",
        "model",
        "num_speculative_tokens",
        "draft_sample_method",
        "enforce_eager",
        "quantization",
    ]
    assert (config or {})["draft_sample_method"] == "probabilistic"
    assert (
        find_unsupported_reasons(
            Off(), DrafterArguments("x", engine_options={"nothing": 1}), Version.parse("0.33.0"), parse_arguments([])
        )
        == ()
    )


def test_adaptive_verification_needs_the_draft_logits() -> None:
    drafter = DrafterArguments("x", engine_options={"use_local_argmax_reduction": True})
    (reason,) = find_unsupported_reasons(Adaptive(3), drafter, Version.parse("0.33.0"), parse_arguments([]))
    assert "adaptive verification needs the draft logits" in reason
    assert find_unsupported_reasons(Static(3), drafter, Version.parse("0.33.0"), parse_arguments([])) == ()


def test_changed_options_change_the_revision() -> None:
    def revision_of(setting: Static | Off, **speculation: Any) -> str:
        return compute_revision(SpeculativeDeployment.from_dict(manifest(**speculation)), setting)

    base_revision = revision_of(Static(3))
    assert base_revision == revision_of(Static(3), engineOptions={})
    changed_revisions = [
        revision_of(Static(3), draftSampling="Greedy"),
        revision_of(Static(3), draftSampling="Probabilistic"),
        revision_of(Static(3), engineOptions={"enforce_eager": True}),
    ]
    assert len({base_revision, *changed_revisions}) == 4
    assert revision_of(Off(), draftSampling="Probabilistic") == revision_of(Off())
