"""Checks of the effects of speculation on requests, caches, memory and cost."""

from __future__ import annotations

from collections.abc import Iterable

from aerie.engine.models.gpu_memory import GIB, MemoryEstimate
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, general_advice, info, pass_check, skip, warning
from aerie.engine.releases import Feature, Version, is_cpu_build

_CPU_SAMPLING_BUG_RELEASES = (Version.parse("0.32.0"), Version.parse("0.33.0"))
"""The oldest and the newest release whose sources were verified to have vLLM issue 55005."""


@register_check(
    "C15",
    "requests rejected with speculation",
    rationale="with speculation, requests with min_p or logit_bias get HTTP 400",
    max_severity=Severity.ERROR,
    source="vLLM sampling_params.py, _validate_spec_decode; v1/sample/logits_processor",
)
def check_rejected_requests(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
        return
    runner, reason = inputs.model_runner
    if inputs.arguments.has_logits_processors:
        if runner == 1:
            yield error(
                f"--logits-processors is set; with speculation, model runner V1 ({reason}) does not support custom "
                "logits processors",
                "remove --logits-processors, or disable speculation",
            )
            return
        yield warning(
            "--logits-processors is set; whether model runner V2 supports it with speculation is unknown",
            "test a request that needs them before the rollout",
        )
    yield general_advice(
        "with speculation, vLLM rejects requests with min_p or logit_bias (HTTP 400): the clients' requests could not be checked"
    )


@register_check(
    "C16",
    "structured output and tools",
    rationale="grammars that got out of step with draft tokens have failed requests and crashed engines",
    max_severity=Severity.ERROR,
    source="vLLM issues 44006, 53181, 51660",
)
def check_structured_output(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
        return
    backend = inputs.arguments.structured_outputs_backend
    is_kimi = (inputs.target_model.model_type or "").startswith("kimi")
    if backend == "lm-format-enforcer":
        yield error(
            "the structured-output backend is lm-format-enforcer, which vLLM does not support with speculation",
            "use xgrammar or guidance",
        )
    elif is_kimi and inputs.version.release[:2] == (0, 26):
        yield warning(
            f"grammars have crashed vLLM {inputs.version} with a Kimi target and EAGLE 3 (vLLM issue 51660)",
            "use a newer vLLM if clients use tools or JSON schemas",
        )
    elif (backend or inputs.arguments.has_tool_or_reasoning_parser) and inputs.version.release[:2] <= (0, 28):
        yield warning(
            f"tools or structured output are enabled; requests have failed with 'Failed to advance FSM' up to vLLM 0.28 "
            f"(the engine is {inputs.version})",
            "use a newer vLLM, or test such requests before the rollout",
        )
    else:
        yield general_advice("whether clients use tools or JSON schemas could not be checked: test such a request on the canary")


@register_check(
    "C18",
    "prefix caching",
    rationale="before 0.33, EAGLE drops the last cached block, and some targets with sliding-window layers had no cache hits",
    max_severity=Severity.WARNING,
    source="vLLM pull request 50897; issue 33270",
)
def check_prefix_caching(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
    elif inputs.arguments.enable_prefix_caching is False:
        yield pass_check("prefix caching is disabled")
    elif inputs.target_model.attention.sliding_layer_count or inputs.target_model.attention.linear_layer_count:
        yield warning(
            "the target has sliding-window or linear layers, whose prefix cache had no hits with EAGLE in older releases",
            "compare vllm:prefix_cache_hits before and after",
        )
    elif inputs.arguments.has_kv_transfer_config and inputs.supports(Feature.LOOKAHEAD_HASHES):
        yield warning(
            "with --kv-transfer-config the last block of each cached prefix is recomputed, and engines that share a "
            "store need the same disable_lookahead_block_hashes",
            "compare vllm:prefix_cache_hits before and after, and use the same value for all engines of a store",
        )
    elif not inputs.supports(Feature.LOOKAHEAD_HASHES):
        yield info(
            f"with EAGLE, vLLM {inputs.version} recomputes the last block of each cached prefix; "
            f"{Feature.LOOKAHEAD_HASHES.since} does not"
        )
    else:
        yield pass_check(f"vLLM {inputs.version} caches complete prefixes")


@register_check(
    "C21",
    "GPU memory",
    rationale="the drafter, its KV cache and its CUDA graphs take memory from the target's KV cache; with too little, the "
    "engine fails to start",
    max_severity=Severity.ERROR,
    source="vLLM v1/kv_cache_interface.py, config/cache.py; issue 57475",
)
def check_gpu_memory(inputs: PreflightInput) -> Iterable[CheckResult]:
    estimate = inputs.memory_estimate
    if estimate.target_weight_bytes is None or estimate.drafter_weight_bytes is None:
        model = "target" if estimate.target_weight_bytes is None else "drafter"
        yield info(f"the {model}'s weights are not safetensors: memory could not be checked")
        return
    weights = (
        f"target {_format_bytes(estimate.target_weight_bytes)}, drafter {_format_bytes(estimate.drafter_weight_bytes)} of "
        "weights "
        "per GPU"
    )
    if estimate.kv_cache_bytes is None:
        yield info(f"{weights}; the GPU memory is unknown: the fit could not be checked", "set it with --gpu-memory")
        return
    assumptions = f"assuming that {'; '.join(estimate.assumptions)}"
    fix = "use a larger GPU or more tensor parallelism, or lower --max-model-len"
    fix += ", lower --max-num-seqs, or draft greedily (draftSampling)" if estimate.draft_logits_bytes else ""
    fits = estimate.kv_cache_bytes > 0 and (estimate.kv_cache_sequences or 1) >= 1
    if not fits and estimate.min_target_weight_bytes != estimate.target_weight_bytes:
        yield _reduced_weights_result(inputs, weights, assumptions, fix)
    else:
        yield _kv_cache_result(estimate, estimate.kv_cache_bytes, weights, assumptions, fix)


def _reduced_weights_result(inputs: PreflightInput, weights: str, assumptions: str, fix: str) -> CheckResult:
    """Return the result if the weights on disk are too large for the GPU, and an argument makes them smaller."""
    reducing_flag = inputs.arguments.offload_flag or f"--quantization={inputs.arguments.quantization}"
    evidence = f"{weights} by their size on disk, too much for the GPU"
    if inputs.memory_estimate.may_fit:
        return warning(
            f"{evidence}; {reducing_flag} reduces the target's by an amount that is unknown before the start; {assumptions}",
            "test the start with one pod, or reduce memory: " + fix,
        )
    return error(f"{evidence}; {reducing_flag} cannot reduce them enough; {assumptions}", fix)


def _kv_cache_result(estimate: MemoryEstimate, kv_cache_bytes: float, weights: str, assumptions: str, fix: str) -> CheckResult:
    """Return the result from the memory that is left for the KV cache."""
    if kv_cache_bytes <= 0:
        return error(f"{weights}: {_format_bytes(-kv_cache_bytes)} more than available; {assumptions}", fix)
    evidence = f"{weights}, {_format_bytes(kv_cache_bytes)} left for the KV cache"
    if estimate.kv_cache_sequences is None or estimate.kv_cache_tokens is None:
        return info(f"{evidence}; its size per token is not in the configs; {assumptions}")
    if estimate.kv_cache_sequences < 1:
        return error(
            f"{evidence}; one sequence of {estimate.max_sequence_tokens} tokens needs "
            f"{_format_bytes(estimate.max_sequence_kv_bytes or 0)}; {assumptions}",
            fix,
        )
    drafter_bytes, target_bytes = estimate.drafter_kv_bytes_per_token or 0, estimate.target_kv_bytes_per_token or 0
    drafter_share = drafter_bytes / (drafter_bytes + target_bytes or 1)
    evidence += (
        f": {estimate.kv_cache_tokens} tokens, {estimate.kv_cache_sequences:.1f} sequences of {estimate.max_sequence_tokens}; "
        f"the drafter uses {drafter_share:.1%} of it; {assumptions}"
    )
    return warning(evidence, "expect preemptions; " + fix) if estimate.kv_cache_sequences < 2 else pass_check(evidence)


@register_check(
    "C23",
    "prompts and chat template",
    rationale="the system prompt alone has changed AL from 5.88 to 2.42; a drafter beyond its training length has been slower "
    "than none",
    max_severity=Severity.INFO,
    source="SGLang issues 4716 and 6783",
)
def check_prompts(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
    else:
        yield general_advice(
            "acceptance depends on chat template, system prompt and length, which could not be checked: the canary "
            "measures it on real traffic"
        )


@register_check(
    "C24",
    "LoRA",
    rationale="adapters do not apply to the drafter: requests with an adapter probably accept fewer draft tokens",
    max_severity=Severity.WARNING,
    source="vLLM config/vllm.py (0.33 rejects nothing); not measured",
)
def check_lora(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.arguments.enable_lora and inputs.speculative_config:
        yield warning(
            "LoRA is enabled; adapters do not apply to the drafter: requests with an adapter probably accept fewer draft tokens",
            "compare the acceptance length of requests with and without an adapter",
        )
    else:
        yield pass_check("LoRA is disabled")


@register_check(
    "C29",
    "GPU count",
    rationale="an engine with fewer GPUs than ranks does not start; one with more has idle GPUs",
    max_severity=Severity.ERROR,
    source="vLLM config/parallel.py, world_size",
)
def check_gpu_count(inputs: PreflightInput) -> Iterable[CheckResult]:
    resource, required = inputs.gpu_resource, inputs.arguments.gpus_per_replica
    parallelism = f"the engine needs {required} (tensor x pipeline x data parallel)"
    if resource is None:
        yield skip("there is no manifest of a pod")
    elif inputs.gpu_count is None:
        request = f"the pod requests GPUs by {resource}" if resource else "the pod requests no GPUs"
        yield info(f"{request}, and {parallelism}: the number could not be checked")
    elif inputs.gpu_count < required:
        yield error(
            f"the pod has {inputs.gpu_count} of {resource}, and {parallelism}",
            f"set {resource} to {required} in the limits of the engine's resources, or reduce the parallelism",
        )
    elif inputs.gpu_count > required:
        yield warning(f"the pod has {inputs.gpu_count} of {resource}, and {parallelism}", f"set {resource} to {required}")
    elif ".com/mig-" in resource and required > 1:
        yield warning(
            f"the pod has {inputs.gpu_count} of {resource}, and {parallelism}; NCCL cannot connect MIG instances",
            "use complete GPUs, or one MIG instance without parallelism",
        )
    else:
        yield pass_check(f"the pod has {inputs.gpu_count} of {resource}, and {parallelism}")


@register_check(
    "C31",
    "remote code",
    rationale="with --trust-remote-code the engine runs Python code that the drafter's config names, with the pod's rights",
    max_severity=Severity.WARNING,
    source="vLLM transformers_utils/config.py; auto_map of transformers",
)
def check_remote_code(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.drafter is None:
        yield skip("there is no drafter")
    elif not inputs.drafter.config.get("auto_map"):
        yield pass_check("the drafter's config has no auto_map")
    elif inputs.arguments.trust_remote_code:
        yield warning(
            "the drafter's config has auto_map, and with --trust-remote-code the engine runs the code that it names",
            "review that code at the pinned commit, or remove auto_map: vLLM's EAGLE 3 classes do not need it",
        )
    else:
        yield info("the drafter's config has auto_map, which vLLM ignores without --trust-remote-code")


@register_check(
    "C33",
    "sampling on CPU",
    rationale="with a drafter, vLLM's CPU backend verifies with uninitialised temperature, top_p and top_k: requests with a "
    "temperature above 0 get answers that differ from the target's, and one with top_k can crash the engine",
    max_severity=Severity.WARNING,
    source="vLLM issue 55005; vllm/utils/cpu_triton_utils.py, _expand_kernel_impl, 0.32 and 0.33; run on 0.32",
)
def check_cpu_sampling(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
        return
    variable = next((name for name in sorted(inputs.environment) if name.startswith("VLLM_CPU_")), None)
    if not is_cpu_build(inputs.image, inputs.version) and variable is None:
        yield pass_check("the engine does not run on CPU, as far as the image, the version and the environment show")
        return
    cpu_evidence = (
        f"{variable} is set" if variable else f"the image is {inputs.image}" if inputs.image else f"vLLM is {inputs.version}"
    )
    oldest, newest = _CPU_SAMPLING_BUG_RELEASES
    if oldest.release <= inputs.version.release <= newest.release:
        evidence = f"{cpu_evidence}; with a drafter, vLLM {inputs.version} on CPU samples incorrectly at temperatures above 0"
    else:
        evidence = (
            f"{cpu_evidence}; whether vLLM {inputs.version} on CPU samples correctly with a drafter (vLLM issue 55005) is unknown"
        )
    yield warning(
        evidence,
        "send only requests with temperature 0, run without a drafter, or use an image with a fix of vLLM issue 55005",
    )


def _format_bytes(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
