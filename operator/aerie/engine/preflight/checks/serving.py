"""What speculation means for those who use and pay for the engine: requests, caches, memory."""

from __future__ import annotations

from collections.abc import Iterable

from aerie.engine.models.gpu_memory import GIB
from aerie.engine.preflight.input import Subject
from aerie.engine.preflight.registry import check
from aerie.engine.preflight.report import Outcome, Severity, note, passed, refuse, skip, warn
from aerie.engine.releases import Feature, Version, for_cpu


@check(
    "C15",
    "requests that speculation refuses",
    why="clients that send min_p or logit_bias get HTTP 400 as soon as speculation is on",
    worst=Severity.REFUSE,
    source="vLLM sampling_params.py, _validate_spec_decode; v1/sample/logits_processor",
)
def refused_requests(subject: Subject) -> Iterable[Outcome]:
    if not subject.speculative:
        yield skip("there is no speculation")
        return
    runner, reason = subject.model_runner
    if subject.arguments.logits_processors:
        if runner == 1:
            yield refuse(
                f"--logits-processors, and model runner V1 ({reason}) refuses custom logits processors under speculation",
                "leave --logits-processors out, or turn speculation off",
            )
            return
        yield warn(
            "--logits-processors under speculation on model runner V2, which Aerie knows nothing of",
            "try a request that needs them before you roll out",
        )
    yield note(
        "vLLM answers requests with min_p or logit_bias with HTTP 400 under speculation: what clients send could not be checked"
    )


@check(
    "C16",
    "structured output and tools",
    why="grammars that lose step with drafted tokens have failed requests and stopped engines",
    worst=Severity.REFUSE,
    source="vLLM issues 44006, 53181, 51660",
)
def structured_output(subject: Subject) -> Iterable[Outcome]:
    if not subject.speculative:
        yield skip("there is no speculation")
        return
    backend = subject.arguments.structured_backend
    kimi = (subject.target_model.model_type or "").startswith("kimi")
    if backend == "lm-format-enforcer":
        yield refuse(
            "the structured-output backend is lm-format-enforcer, which vLLM refuses under speculation",
            "use xgrammar or guidance",
        )
    elif kimi and subject.version.release[:2] == (0, 26):
        yield warn(
            f"grammars have stopped vLLM {subject.version} with a Kimi target and EAGLE 3 (vLLM issue 51660)",
            "use a newer vLLM where clients use tools or JSON schemas",
        )
    elif (backend or subject.arguments.tool_calls) and subject.version.release[:2] <= (0, 28):
        yield warn(
            f"tools or structured output are on, and requests have failed with 'Failed to advance FSM' up to vLLM 0.28 "
            f"(this is {subject.version})",
            "use a newer vLLM, or try such requests before you roll out",
        )
    else:
        yield note("whether clients use tools or JSON schemas could not be checked; try such a request on the canary")


@check(
    "C18",
    "prefix caching",
    why="EAGLE drops the last cached block before 0.33, and some targets with windowed layers have had no hits at all",
    worst=Severity.WARN,
    source="vLLM pull request 50897; issue 33270",
)
def prefix_caching(subject: Subject) -> Iterable[Outcome]:
    if not subject.speculative:
        yield skip("there is no speculation")
    elif subject.arguments.prefix_caching is False:
        yield passed("prefix caching is off")
    elif subject.target_model.attention.sliding_layers or subject.target_model.attention.linear_layers:
        yield warn(
            "the target has windowed or linear layers, whose prefix cache has had no hits under EAGLE in older releases",
            "compare vllm:prefix_cache_hits before and after",
        )
    elif subject.arguments.kv_transfer and subject.supports(Feature.LOOKAHEAD_HASHES):
        yield warn(
            "with --kv-transfer-config the last block of each cached prefix is computed again, and engines that share a "
            "store must "
            "agree on disable_lookahead_block_hashes",
            "compare vllm:prefix_cache_hits before and after, and use one setting for all engines of a store",
        )
    elif not subject.supports(Feature.LOOKAHEAD_HASHES):
        yield note(
            f"vLLM {subject.version} computes the last block of each cached prefix again under EAGLE; "
            f"{Feature.LOOKAHEAD_HASHES.since} no longer does"
        )
    else:
        yield passed(f"vLLM {subject.version} keeps whole prefixes")


@check(
    "C21",
    "memory",
    why="the drafter, its KV cache and its CUDA graphs take memory from the target's KV cache; too little ends the start",
    worst=Severity.REFUSE,
    source="vLLM v1/kv_cache_interface.py, config/cache.py; issue 57475",
)
def memory(subject: Subject) -> Iterable[Outcome]:
    found = subject.memory
    if found.target_weights is None or found.drafter_weights is None:
        whose = "target" if found.target_weights is None else "drafter"
        yield note(f"the {whose}'s weights are not safetensors: memory could not be checked")
        return
    weights = f"target {_gib(found.target_weights)}, drafter {_gib(found.drafter_weights)} of weights per GPU"
    if found.kv_room is None:
        yield note(f"{weights}; no GPU memory was named, so that the fit could not be checked", "name it with --gpu-memory")
        return
    assumed = f"assuming that {'; '.join(found.assumptions)}"
    smaller = "use a larger GPU or more tensor parallelism, or lower --max-model-len"
    smaller += ", lower --max-num-seqs, or draft greedily (draftSampling)" if found.draft_logits else ""
    smaller_weights = subject.arguments.offload or f"--quantization={subject.arguments.quantization}"
    if (found.kv_room <= 0 or (found.sequences or 1) < 1) and found.least_target_weights != found.target_weights:
        least = f"{weights} as they are on disk, too much for the GPU"
        if found.fits_at_least:
            yield warn(
                f"{least}; {smaller_weights} makes the target's smaller, and by how much could not be checked; {assumed}",
                "try the start on one pod, or name less: " + smaller,
            )
        else:
            yield refuse(f"{least}, and {smaller_weights} cannot make them small enough, {assumed}", smaller)
    elif found.kv_room <= 0:
        yield refuse(f"{weights}: {_gib(-found.kv_room)} more than there is, {assumed}", smaller)
    elif found.sequences is None or found.tokens is None:
        yield note(f"{weights}, {_gib(found.kv_room)} left for the KV cache, whose size the configs do not tell; {assumed}")
    elif found.sequences < 1:
        yield refuse(
            f"{weights}, {_gib(found.kv_room)} left for the KV cache, and one sequence of {found.longest_sequence} tokens needs "
            f"{_gib(found.longest_sequence_kv or 0)}, {assumed}",
            smaller,
        )
    else:
        share = (found.drafter_kv_per_token or 0) / ((found.drafter_kv_per_token or 0) + (found.target_kv_per_token or 0) or 1)
        seen = (
            f"{weights}, {_gib(found.kv_room)} left for the KV cache: {found.tokens} tokens, {found.sequences:.1f} sequences of "
            f"{found.longest_sequence}; {share:.1%} of it is the drafter's; {assumed}"
        )
        if found.sequences < 2:
            yield warn(seen, "expect preemptions; " + smaller)
        else:
            yield passed(seen)


@check(
    "C23",
    "prompts and chat template",
    why="the system prompt alone has moved AL from 5.88 to 2.42, and a drafter past its training length has been slower "
    "than none",
    worst=Severity.NOTE,
    source="SGLang issues 4716 and 6783",
)
def prompts(subject: Subject) -> Iterable[Outcome]:
    if not subject.speculative:
        yield skip("there is no speculation")
    else:
        yield note(
            "acceptance depends on chat template, system prompt and length, which could not be checked; the canary "
            "measures it on "
            "real traffic"
        )


@check(
    "C24",
    "LoRA",
    why="the drafter is not adapted, so that adapted requests are likely to accept less",
    worst=Severity.WARN,
    source="vLLM config/vllm.py (0.33 refuses nothing); not measured",
)
def lora(subject: Subject) -> Iterable[Outcome]:
    if subject.arguments.lora and subject.speculative:
        yield warn(
            "LoRA adapters are on, and the drafter knows none of them: adapted requests are likely to accept less",
            "compare the acceptance length of adapted and plain requests",
        )
    else:
        yield passed("no LoRA adapters")


@check(
    "C29",
    "GPUs for the parallelism",
    why="an engine with fewer GPUs than ranks does not start, one with more pays for idle ones",
    worst=Severity.REFUSE,
    source="vLLM config/parallel.py, world_size",
)
def gpus(subject: Subject) -> Iterable[Outcome]:
    arguments, name = subject.arguments, subject.gpu_resource
    needed = arguments.gpus
    product = f"tensor x pipeline x data parallel = {needed}"
    if subject.gpus is None:
        how = f"the pod asks for them by {name}" if name else "the pod asks for no GPUs"
        yield note(f"{how}, and {product}: whether that fits could not be checked")
    elif subject.gpus < needed:
        yield refuse(
            f"the pod has {subject.gpus} of {name}, and {product}",
            f"set {name} to {needed} in the limits of the engine's resources, or lower the parallelism",
        )
    elif subject.gpus > needed:
        yield warn(f"the pod has {subject.gpus} of {name}, and {product}", f"set {name} to {needed}")
    elif ".com/mig-" in name and needed > 1:
        yield warn(
            f"{needed} of {name} for {product}, and NCCL joins no two instances of MIG",
            "use whole GPUs, or one instance without parallelism",
        )
    else:
        yield passed(f"{subject.gpus} of {name} for {product}")


@check(
    "C31",
    "code of the drafter's repository",
    why="with --trust-remote-code the engine runs Python code that the drafter's config names, with the pod's rights",
    worst=Severity.WARN,
    source="vLLM transformers_utils/config.py; auto_map of transformers",
)
def remote_code(subject: Subject) -> Iterable[Outcome]:
    if subject.drafter is None:
        yield skip("there is no drafter")
    elif not subject.drafter.config.get("auto_map"):
        yield passed("the drafter's config names none")
    elif subject.arguments.trust_remote_code:
        yield warn(
            "the drafter's config has auto_map, and --trust-remote-code has the engine run what it names",
            "read that code at the commit you pin, or take auto_map out: vLLM's EAGLE 3 classes do not need it",
        )
    else:
        yield note("the drafter's config has auto_map, which vLLM does not follow without --trust-remote-code")


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


_WRONG_ON_CPU = (Version.parse("0.32.0"), Version.parse("0.33.0"))
"""The oldest and the newest release whose sources were seen to have vLLM issue 55005."""


@check(
    "C33",
    "sampled requests on CPU",
    why="with a drafter vLLM's CPU backend verifies with uninitialised temperature, top_p and top_k: requests with a temperature "
    "above 0 get answers that are not the target's, and one with top_k can end the engine",
    worst=Severity.WARN,
    source="vLLM issue 55005; vllm/utils/cpu_triton_utils.py, _expand_kernel_impl, 0.32 and 0.33; run on 0.32",
)
def sampled_on_cpu(subject: Subject) -> Iterable[Outcome]:
    if not subject.speculative:
        yield skip("there is no speculation")
        return
    named = next((name for name in sorted(subject.environment) if name.startswith("VLLM_CPU_")), None)
    if not for_cpu(subject.image, subject.version) and named is None:
        yield passed("nothing says that the engine runs on CPU")
        return
    seen = f"{named} is set" if named else f"the image is {subject.image}" if subject.image else f"vLLM is {subject.version}"
    oldest, newest = _WRONG_ON_CPU
    if oldest.release <= subject.version.release <= newest.release:
        evidence = f"{seen}, and vLLM {subject.version} on CPU draws wrong answers at temperatures above 0 with a drafter"
    else:
        evidence = f"{seen}, and whether vLLM {subject.version} on CPU draws right with a drafter (vLLM issue 55005) is not known"
    yield warn(
        evidence,
        "send temperature 0 alone to this engine, run it without a drafter, or put a mend of vLLM issue 55005 into the image",
    )
