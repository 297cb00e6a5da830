"""Checks of the effects of speculation on requests, caches, memory and cost."""

from __future__ import annotations

from collections.abc import Iterable

from aerie.engine.models.gpu_memory import GIB, MemoryEstimate
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, info, pass_check, skip, warning
from aerie.engine.releases import Feature, Version, is_cpu_build

_CPU_SAMPLING_BUG_RELEASES = (Version.parse("0.32.0"), Version.parse("0.33.0"))
"""The oldest and the newest release whose sources were verified to have vLLM issue 55005."""


@register_check(
    "C15",
    "requests that speculation refuses",
    rationale="clients that send min_p or logit_bias get HTTP 400 as soon as speculation is on",
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
                f"--logits-processors, and model runner V1 ({reason}) refuses custom logits processors under speculation",
                "leave --logits-processors out, or turn speculation off",
            )
            return
        yield warning(
            "--logits-processors under speculation on model runner V2, which Aerie knows nothing of",
            "try a request that needs them before you roll out",
        )
    yield info(
        "vLLM answers requests with min_p or logit_bias with HTTP 400 under speculation: what clients send could not be checked"
    )


@register_check(
    "C16",
    "structured output and tools",
    rationale="grammars that lose step with drafted tokens have failed requests and stopped engines",
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
            "the structured-output backend is lm-format-enforcer, which vLLM refuses under speculation",
            "use xgrammar or guidance",
        )
    elif is_kimi and inputs.version.release[:2] == (0, 26):
        yield warning(
            f"grammars have stopped vLLM {inputs.version} with a Kimi target and EAGLE 3 (vLLM issue 51660)",
            "use a newer vLLM where clients use tools or JSON schemas",
        )
    elif (backend or inputs.arguments.has_tool_or_reasoning_parser) and inputs.version.release[:2] <= (0, 28):
        yield warning(
            f"tools or structured output are on, and requests have failed with 'Failed to advance FSM' up to vLLM 0.28 "
            f"(this is {inputs.version})",
            "use a newer vLLM, or try such requests before you roll out",
        )
    else:
        yield info("whether clients use tools or JSON schemas could not be checked; try such a request on the canary")


@register_check(
    "C18",
    "prefix caching",
    rationale="EAGLE drops the last cached block before 0.33, and some targets with windowed layers have had no hits at all",
    max_severity=Severity.WARNING,
    source="vLLM pull request 50897; issue 33270",
)
def check_prefix_caching(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
    elif inputs.arguments.enable_prefix_caching is False:
        yield pass_check("prefix caching is off")
    elif inputs.target_model.attention.sliding_layer_count or inputs.target_model.attention.linear_layer_count:
        yield warning(
            "the target has windowed or linear layers, whose prefix cache has had no hits under EAGLE in older releases",
            "compare vllm:prefix_cache_hits before and after",
        )
    elif inputs.arguments.has_kv_transfer_config and inputs.supports(Feature.LOOKAHEAD_HASHES):
        yield warning(
            "with --kv-transfer-config the last block of each cached prefix is computed again, and engines that share a "
            "store must "
            "agree on disable_lookahead_block_hashes",
            "compare vllm:prefix_cache_hits before and after, and use one setting for all engines of a store",
        )
    elif not inputs.supports(Feature.LOOKAHEAD_HASHES):
        yield info(
            f"vLLM {inputs.version} computes the last block of each cached prefix again under EAGLE; "
            f"{Feature.LOOKAHEAD_HASHES.since} no longer does"
        )
    else:
        yield pass_check(f"vLLM {inputs.version} keeps whole prefixes")


@register_check(
    "C21",
    "memory",
    rationale="the drafter, its KV cache and its CUDA graphs take memory from the target's KV cache; too little ends the start",
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
        yield info(f"{weights}; no GPU memory was named, so that the fit could not be checked", "name it with --gpu-memory")
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
    evidence = f"{weights} as they are on disk, too much for the GPU"
    if inputs.memory_estimate.may_fit:
        return warning(
            f"{evidence}; {reducing_flag} makes the target's smaller, and by how much could not be checked; {assumptions}",
            "try the start on one pod, or name less: " + fix,
        )
    return error(f"{evidence}, and {reducing_flag} cannot make them small enough, {assumptions}", fix)


def _kv_cache_result(estimate: MemoryEstimate, kv_cache_bytes: float, weights: str, assumptions: str, fix: str) -> CheckResult:
    """Return the result from the memory that is left for the KV cache."""
    if kv_cache_bytes <= 0:
        return error(f"{weights}: {_format_bytes(-kv_cache_bytes)} more than there is, {assumptions}", fix)
    evidence = f"{weights}, {_format_bytes(kv_cache_bytes)} left for the KV cache"
    if estimate.kv_cache_sequences is None or estimate.kv_cache_tokens is None:
        return info(f"{evidence}, whose size the configs do not tell; {assumptions}")
    if estimate.kv_cache_sequences < 1:
        return error(
            f"{evidence}, and one sequence of {estimate.max_sequence_tokens} tokens needs "
            f"{_format_bytes(estimate.max_sequence_kv_bytes or 0)}, {assumptions}",
            fix,
        )
    drafter_bytes, target_bytes = estimate.drafter_kv_bytes_per_token or 0, estimate.target_kv_bytes_per_token or 0
    drafter_share = drafter_bytes / (drafter_bytes + target_bytes or 1)
    evidence += (
        f": {estimate.kv_cache_tokens} tokens, {estimate.kv_cache_sequences:.1f} sequences of {estimate.max_sequence_tokens}; "
        f"{drafter_share:.1%} of it is the drafter's; {assumptions}"
    )
    return warning(evidence, "expect preemptions; " + fix) if estimate.kv_cache_sequences < 2 else pass_check(evidence)


@register_check(
    "C23",
    "prompts and chat template",
    rationale="the system prompt alone has moved AL from 5.88 to 2.42, and a drafter past its training length has been slower "
    "than none",
    max_severity=Severity.INFO,
    source="SGLang issues 4716 and 6783",
)
def check_prompts(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
    else:
        yield info(
            "acceptance depends on chat template, system prompt and length, which could not be checked; the canary "
            "measures it on "
            "real traffic"
        )


@register_check(
    "C24",
    "LoRA",
    rationale="the drafter is not adapted, so that adapted requests are likely to accept less",
    max_severity=Severity.WARNING,
    source="vLLM config/vllm.py (0.33 refuses nothing); not measured",
)
def check_lora(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.arguments.enable_lora and inputs.speculative_config:
        yield warning(
            "LoRA adapters are on, and the drafter knows none of them: adapted requests are likely to accept less",
            "compare the acceptance length of adapted and plain requests",
        )
    else:
        yield pass_check("no LoRA adapters")


@register_check(
    "C29",
    "GPUs for the parallelism",
    rationale="an engine with fewer GPUs than ranks does not start, one with more pays for idle ones",
    max_severity=Severity.ERROR,
    source="vLLM config/parallel.py, world_size",
)
def check_gpu_count(inputs: PreflightInput) -> Iterable[CheckResult]:
    resource, required = inputs.gpu_resource, inputs.arguments.gpus_per_replica
    parallelism = f"tensor x pipeline x data parallel = {required}"
    if inputs.gpu_count is None:
        request = f"the pod asks for them by {resource}" if resource else "the pod asks for no GPUs"
        yield info(f"{request}, and {parallelism}: whether that fits could not be checked")
    elif inputs.gpu_count < required:
        yield error(
            f"the pod has {inputs.gpu_count} of {resource}, and {parallelism}",
            f"set {resource} to {required} in the limits of the engine's resources, or lower the parallelism",
        )
    elif inputs.gpu_count > required:
        yield warning(f"the pod has {inputs.gpu_count} of {resource}, and {parallelism}", f"set {resource} to {required}")
    elif ".com/mig-" in resource and required > 1:
        yield warning(
            f"{required} of {resource} for {parallelism}, and NCCL joins no two instances of MIG",
            "use whole GPUs, or one instance without parallelism",
        )
    else:
        yield pass_check(f"{inputs.gpu_count} of {resource} for {parallelism}")


@register_check(
    "C31",
    "code of the drafter's repository",
    rationale="with --trust-remote-code the engine runs Python code that the drafter's config names, with the pod's rights",
    max_severity=Severity.WARNING,
    source="vLLM transformers_utils/config.py; auto_map of transformers",
)
def check_remote_code(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.drafter is None:
        yield skip("there is no drafter")
    elif not inputs.drafter.config.get("auto_map"):
        yield pass_check("the drafter's config names none")
    elif inputs.arguments.trust_remote_code:
        yield warning(
            "the drafter's config has auto_map, and --trust-remote-code has the engine run what it names",
            "read that code at the commit you pin, or take auto_map out: vLLM's EAGLE 3 classes do not need it",
        )
    else:
        yield info("the drafter's config has auto_map, which vLLM does not follow without --trust-remote-code")


@register_check(
    "C33",
    "sampled requests on CPU",
    rationale="with a drafter vLLM's CPU backend verifies with uninitialised temperature, top_p and top_k: requests with a "
    "temperature "
    "above 0 get answers that are not the target's, and one with top_k can end the engine",
    max_severity=Severity.WARNING,
    source="vLLM issue 55005; vllm/utils/cpu_triton_utils.py, _expand_kernel_impl, 0.32 and 0.33; run on 0.32",
)
def check_cpu_sampling(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
        return
    variable = next((name for name in sorted(inputs.environment) if name.startswith("VLLM_CPU_")), None)
    if not is_cpu_build(inputs.image, inputs.version) and variable is None:
        yield pass_check("nothing says that the engine runs on CPU")
        return
    cpu_evidence = (
        f"{variable} is set" if variable else f"the image is {inputs.image}" if inputs.image else f"vLLM is {inputs.version}"
    )
    oldest, newest = _CPU_SAMPLING_BUG_RELEASES
    if oldest.release <= inputs.version.release <= newest.release:
        evidence = f"{cpu_evidence}, and vLLM {inputs.version} on CPU draws wrong answers at temperatures above 0 with a drafter"
    else:
        evidence = (
            f"{cpu_evidence}, and whether vLLM {inputs.version} on CPU draws right with a drafter (vLLM issue 55005) is not known"
        )
    yield warning(
        evidence,
        "send temperature 0 alone to this engine, run it without a drafter, or put a mend of vLLM issue 55005 into the image",
    )


def _format_bytes(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
