"""Checks of parallelism: whether this engine supports the drafter on several ranks and stages.

Guarantees: what this release rejects, or can deadlock on, is an error. Not guaranteed: that the node has so many GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable

from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import eagle3_only, register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, pass_check, skip, warning
from aerie.engine.releases import Feature

_PIPELINE_PARALLEL_MODEL_TYPES = frozenset(
    {"llama", "qwen2", "qwen3", "sarvam", "sarvam_moe", "minimax_m3", "deepseek_v4", "kimi_k3"}
)
"""Values of model_type for targets that pass hidden states from one pipeline stage to the next."""


@register_check(
    "C11",
    "drafter tensor parallelism",
    rationale="vLLM accepts only 1 or the target's size, in the key draft_tensor_parallel_size",
    max_severity=Severity.ERROR,
    source="vLLM config/speculative.py, _verify_and_get_draft_tp and _verify_args",
)
def check_draft_tensor_parallel(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.drafter is None:
        yield skip("there is no drafter")
        return
    target = inputs.arguments.tensor_parallel
    draft_size = inputs.speculative_config.get("draft_tensor_parallel_size")
    if "tensor_parallel_size" in inputs.speculative_config:
        yield error(
            "--speculative-config has tensor_parallel_size, which vLLM rejects there", "rename it to draft_tensor_parallel_size"
        )
    elif draft_size not in (None, 1, target):
        yield error(
            f"draft_tensor_parallel_size is {draft_size}, and vLLM accepts only 1 or the target's, {target}",
            f"set it to 1 or {target}",
        )
    else:
        yield pass_check(f"{target if draft_size is None else draft_size} (target: {target})")


@register_check(
    "C13",
    "pipeline parallelism",
    rationale="hidden states must be passed between stages, which older engines and most models cannot: the engine fails "
    "to start",
    max_severity=Severity.ERROR,
    source="vLLM pull request 50514; supports_aux_hidden_states_over_pp in vllm/model_executor/models",
)
@eagle3_only
def check_pipeline_parallel(inputs: PreflightInput) -> Iterable[CheckResult]:
    stages, model = inputs.arguments.pipeline_parallel, inputs.target_model.model_type
    if stages <= 1:
        yield pass_check("one pipeline stage")
    elif not inputs.supports(Feature.PIPELINE_PARALLEL):
        yield error(
            f"there are {stages} pipeline stages, and vLLM {inputs.version} supports EAGLE 3 on one only",
            f"use vLLM {Feature.PIPELINE_PARALLEL.since} or newer, or tensor parallelism",
        )
    elif model not in _PIPELINE_PARALLEL_MODEL_TYPES:
        yield error(
            f"there are {stages} pipeline stages, and vLLM cannot pass hidden states of model type {model} between them",
            "use tensor parallelism (model types that support pipeline stages: "
            f"{', '.join(sorted(_PIPELINE_PARALLEL_MODEL_TYPES))})",
        )
    else:
        yield pass_check(f"{stages} pipeline stages with model type {model}")


@register_check(
    "C14",
    "schedule and data parallelism",
    rationale="ranks that draft different numbers of tokens can deadlock (0.24, 0.25); later engines disable the schedule",
    max_severity=Severity.ERROR,
    source="vLLM config/vllm.py, _maybe_disable_dynamic_sd_for_data_parallel",
)
def check_schedule_data_parallel(inputs: PreflightInput) -> Iterable[CheckResult]:
    ranks = inputs.arguments.data_parallel
    if not inputs.has_schedule:
        yield pass_check("there is no schedule")
    elif ranks <= 1:
        yield pass_check("one data-parallel rank")
    elif not inputs.supports(Feature.SCHEDULE_DATA_PARALLEL_GUARD):
        yield error(
            f"a schedule with {ranks} data-parallel ranks can deadlock vLLM {inputs.version}",
            "use a fixed number of tokens, or more replicas instead of data parallelism",
        )
    else:
        yield warning(
            f"vLLM {inputs.version} disables the schedule with {ranks} data-parallel ranks",
            "use a fixed number of tokens, or more replicas instead of data parallelism",
        )


@register_check(
    "C17",
    "asynchronous scheduling and pipeline parallelism",
    rationale="model runner V1 does not support the combination",
    max_severity=Severity.ERROR,
    source="vLLM config/vllm.py, _validate_v1_model_runner",
)
def check_async_scheduling(inputs: PreflightInput) -> Iterable[CheckResult]:
    stages, (runner, reason) = inputs.arguments.pipeline_parallel, inputs.model_runner
    if stages > 1 and runner == 1 and inputs.arguments.async_scheduling:
        yield error(
            f"--async-scheduling is set with {stages} pipeline stages; model runner V1 ({reason}) does not support "
            "the combination",
            "remove --async-scheduling",
        )
    else:
        yield pass_check(f"{stages} pipeline stage{'s' if stages > 1 else ''}, model runner V{runner}")
