"""Checks that this engine, with these arguments, will run this drafter."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import eagle3_only, register_check
from aerie.engine.preflight.report import CheckResult, Severity, error, info, pass_check, skip, warning
from aerie.engine.releases import MIN_SECURE_VERSION, Feature, Version

_EXTENDABLE_ROPE_TYPES = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
"""RoPE types whose table vLLM extends for a drafter."""

_CONTEXT_CUT_SINCE = Version.parse("0.33.0")
"""The first release that does not extend the tables of other RoPE types, and shortens the engine's context instead."""

_SLEEP_PRESERVE_SINCE = Version.parse("0.32.0")
"""The first release in which parameters were verified to survive a sleep of level 2."""

_HALF_PRECISION_DTYPES = frozenset({"float16", "bfloat16"})
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
"""Other names for values of --dtype."""


@register_check(
    "C5",
    "drafter context length",
    rationale="past the drafter's last position: a device assertion or wrong output up to 0.26, a shorter engine context with "
    "YaRN from 0.33",
    max_severity=Severity.ERROR,
    source="vLLM issues 48894, 23072, 21986; pull request 49343; config/speculative.py",
)
@eagle3_only
def check_drafter_context(inputs: PreflightInput) -> Iterable[CheckResult]:
    max_model_len, drafter = inputs.max_model_len, inputs.drafter_model
    if max_model_len is None or drafter.max_position is None:
        model = "drafter" if drafter.max_position is None else "target"
        yield info(f"the {model}'s config.json has no max_position_embeddings: the context length could not be checked")
        return
    if drafter.max_position >= max_model_len:
        yield pass_check(f"the drafter has {drafter.max_position} positions, and the engine's context is {max_model_len} tokens")
        return
    evidence = (
        f"the drafter has {drafter.max_position} positions (RoPE {drafter.rope_type}), and the engine's context is "
        f"{max_model_len} tokens"
    )
    shorter_context_fix = f"set --max-model-len={drafter.max_position} or use another drafter"
    if not inputs.supports(Feature.DRAFT_CONTEXT_RAISED):
        yield error(
            f"{evidence}; past the drafter's last position, vLLM {inputs.version} crashes or returns wrong output",
            f"use vLLM {Feature.DRAFT_CONTEXT_RAISED.since} or newer, {shorter_context_fix}",
        )
    elif drafter.rope_type not in _EXTENDABLE_ROPE_TYPES and inputs.version >= _CONTEXT_CUT_SINCE:
        yield error(
            f"{evidence}; vLLM {inputs.version} then shortens the engine's context to the drafter's",
            f"{shorter_context_fix}, or set RoPE and max_position_embeddings in the drafter's config as in the target's",
        )
    else:
        yield warning(
            f"{evidence}; vLLM {inputs.version} extends the drafter beyond the positions it was trained on",
            f"monitor the acceptance length of requests longer than {drafter.max_position} tokens",
        )


@register_check(
    "C10",
    "method is set",
    rationale="vLLM otherwise infers it from the drafter's path, and the path of a volume does not contain it",
    max_severity=Severity.ERROR,
    source="vLLM config/speculative.py, __post_init__",
)
def check_method_present(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.drafter is None:
        yield skip("there is no drafter")
    elif inputs.method is None:
        yield error(
            "--speculative-config has no method; vLLM would infer it from the drafter's path",
            "set method, for EAGLE 3 and 3.1 to eagle3",
        )
    else:
        yield pass_check(f"{inputs.method}")


@register_check(
    "C12",
    "options inherited from the target",
    rationale="a drafter inherits the target's MoE backend and KV cache type, which may not run an unquantised drafter",
    max_severity=Severity.WARNING,
    source="vLLM config/speculative.py, _DRAFT_VLLM_CONFIG_OVERRIDES; pull request 25883; issues 24505, 40849",
)
def check_inherited_options(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.drafter is None:
        yield skip("there is no drafter")
        return
    arguments, drafter, config = inputs.arguments, inputs.drafter_model, inputs.speculative_config
    warnings = []
    backend = arguments.moe_backend
    if backend not in (None, "auto") and not drafter.is_quantized and "moe_backend" not in config:
        warnings.append(
            warning(
                f"the drafter inherits --moe-backend={backend}, which may not support an unquantised drafter",
                "set moe_backend in --speculative-config (vLLM 0.19 or newer), or remove --moe-backend",
            )
        )
    kv_cache_dtype = arguments.kv_cache_dtype
    if kv_cache_dtype not in (None, "auto") and "kv_cache_dtype" not in config:
        warnings.append(
            warning(
                f"the drafter inherits --kv-cache-dtype={kv_cache_dtype}, which its attention backend may not support and which "
                "can reduce acceptance",
                f"compare its acceptance length with --kv-cache-dtype=auto; from vLLM {Feature.DRAFT_KV_CACHE_DTYPE.since} on, "
                "kv_cache_dtype in --speculative-config sets the drafter's own type",
            )
        )
    if config.get("quantization") is not None and drafter.is_quantized:
        warnings.append(
            warning(
                f"--speculative-config has quantization {config['quantization']}, and the drafter's config has its own",
                "remove quantization from --speculative-config",
            )
        )
    yield from warnings
    if not warnings:
        state = "quantised by its own config" if drafter.is_quantized else "not quantised"
        yield pass_check(f"the drafter is {state}, and inherits no option that was set for the target")


@register_check(
    "C19",
    "model runner",
    rationale="P-EAGLE, suffix and custom drafters run on model runner V1, where a schedule has no full CUDA graphs",
    max_severity=Severity.WARNING,
    source="vLLM config/vllm.py, _get_v2_model_runner_unsupported_features; pull request 45953",
)
def check_model_runner(inputs: PreflightInput) -> Iterable[CheckResult]:
    if not inputs.speculative_config:
        yield skip("there is no speculation")
        return
    runner, reason = inputs.model_runner
    if inputs.has_schedule and runner == 1:
        yield warning(
            f"with a schedule, model runner V1 ({reason}) has piecewise CUDA graphs only",
            "compare the time per output token with that of a fixed number of tokens",
        )
    else:
        yield pass_check(f"model runner V{runner}: {reason}")


@register_check(
    "C20",
    "minimum secure version",
    rationale="a remote request can crash an engine with speculation",
    max_severity=Severity.ERROR,
    source="vLLM pull request 44744",
)
def check_min_secure_version(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.version < MIN_SECURE_VERSION:
        evidence = f"with speculation, a remote request can crash vLLM {inputs.version}"
        fix = f"use vLLM {MIN_SECURE_VERSION} or newer"
        if inputs.is_version_from_tag:
            evidence += "; the version is from the tag of spec.engine.image"
            fix += ", or set spec.engine.version if the image contains another vLLM version"
        yield error(evidence, fix)
    else:
        yield pass_check(f"vLLM {inputs.version} is {MIN_SECURE_VERSION} or newer")


@register_check(
    "C28",
    "method support",
    rationale="with a drafter of another method, or of a class that vLLM lacks, the engine fails after it has loaded the target",
    max_severity=Severity.ERROR,
    source="vLLM config/speculative.py, hf_config_override; model_executor/models/registry.py",
)
def check_method_supported(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.drafter is None:
        yield skip("there is no drafter")
        return
    drafter, method = inputs.drafter_model, inputs.method or "eagle3"
    feature = _FEATURE_BY_METHOD.get("peagle" if inputs.parallel_drafting else method)
    compatible_kinds = {"eagle3", "peagle"} if method == "eagle3" else {method}
    if feature is not None and not inputs.supports(feature):
        is_removed = feature.removed_in is not None and inputs.version >= feature.removed_in
        fix = "use an EAGLE 3.1 drafter (see `aerie catalog`)" if is_removed else f"use vLLM {feature.since} or newer"
        yield error(f"vLLM {inputs.version} does not support {feature.description}", fix)
    elif drafter.kind != "unknown" and drafter.kind not in compatible_kinds:
        yield error(
            f"the drafter's method is {drafter.kind}, and the configured method is {method}",
            "use an EAGLE 3 or 3.1 drafter, or set the drafter's method",
        )
    elif method == "eagle3" and drafter.family == "other":
        yield error(
            f"the drafter's class is {drafter.architecture}, which is not an EAGLE 3 class of vLLM",
            "set architectures in its config.json to the exported class, such as LlamaForCausalLMEagle3",
        )
    elif method == "eagle3" and _is_mtp_model_type(drafter.model_type, inputs.version):
        model_type = "deepseek_v2" if drafter.family == "mla" else "qwen3" if drafter.family == "qwen3" else "llama"
        yield error(
            f"the drafter's model_type is {drafter.model_type}, which vLLM treats as an MTP module with any method",
            f"set model_type: {model_type} in its config.json, which has the same attention",
        )
    else:
        yield pass_check(f"{method}, class {drafter.architecture}")


@register_check(
    "C35",
    "drafter weights after sleep",
    rationale="reload_weights after a sleep of level 2 loads only the target's weights: the drafter proposes noise, and the "
    "acceptance length stays at 1 without an error until the pod is restarted",
    max_severity=Severity.WARNING,
    source="vLLM issue 52479, pull request 52487 (open); 0.33 v1/worker/gpu/model_runner.py, reload_weights; "
    "v1/worker/gpu_worker.py, _save_sleep_parameters",
)
def check_sleep_mode(inputs: PreflightInput) -> Iterable[CheckResult]:
    if inputs.drafter is None:
        yield skip("there is no drafter")
    elif not inputs.arguments.enable_sleep_mode:
        yield pass_check("sleep mode is disabled")
    elif any(fnmatchcase("draft.model.weight", pattern) for pattern in inputs.arguments.sleep_preserve_parameter_names):
        yield pass_check("a sleep of level 2 keeps the drafter's weights")
    else:
        preserve_fix = "set --sleep-preserve-parameter-names=draft.*, which keeps them in CPU memory, "
        yield warning(
            f"sleep mode is enabled, and vLLM {inputs.version} does not reload the drafter's weights after a sleep of level 2",
            f"{preserve_fix if inputs.version >= _SLEEP_PRESERVE_SINCE else ''}use level 1, or restart pods after level 2",
        )


@register_check(
    "C36",
    "Rust front end",
    rationale="it lacks features of the Python front end: per-request metrics, the process start time, "
    "vllm:cache_config_info, and responses to probes and scrapes during draining",
    max_severity=Severity.INFO,
    source="vLLM 0.33 envs.py, VLLM_USE_RUST_FRONTEND; seen on 0.33.0",
)
def check_rust_frontend(inputs: PreflightInput) -> Iterable[CheckResult]:
    value = inputs.environment.get("VLLM_USE_RUST_FRONTEND", "0").strip()
    if value in ("", "0"):
        yield pass_check("VLLM_USE_RUST_FRONTEND is not set")
    else:
        yield info(
            f"VLLM_USE_RUST_FRONTEND is {value}: metrics of single requests and the KV cache's size are missing, and during "
            "draining a pod responds neither to probes nor to scrapes",
            "remove VLLM_USE_RUST_FRONTEND if these are needed",
        )


@register_check(
    "C37",
    "KV cache dtype matches the model",
    rationale="from 0.33 on, the engine does not start if one is float16 and the other bfloat16",
    max_severity=Severity.ERROR,
    source="vLLM 0.33 config/vllm.py, _reject_mismatched_float_kv_cache",
)
def check_kv_cache_dtype(inputs: PreflightInput) -> Iterable[CheckResult]:
    kv_cache_dtype, dtype = inputs.arguments.kv_cache_dtype, inputs.arguments.dtype
    if kv_cache_dtype not in _HALF_PRECISION_DTYPES or inputs.version < _CONTEXT_CUT_SINCE:
        yield pass_check(f"--kv-cache-dtype is {kv_cache_dtype or 'auto'}")
        return
    is_explicit = dtype not in (None, "auto")
    model_dtype = _DTYPE_ALIASES.get(dtype or "", dtype) if is_explicit else inputs.target_model.dtype
    if model_dtype == kv_cache_dtype:
        yield pass_check(f"model and KV cache are both {kv_cache_dtype}")
    elif is_explicit or model_dtype == "bfloat16":
        yield error(
            f"--kv-cache-dtype is {kv_cache_dtype} and the model runs in {model_dtype}; vLLM {inputs.version} rejects "
            "the combination",
            "remove --kv-cache-dtype" + (f", or set it to {model_dtype}" if model_dtype in _HALF_PRECISION_DTYPES else ""),
        )
    else:  # vLLM then selects the dtype by model and GPU
        yield warning(
            f"--kv-cache-dtype is {kv_cache_dtype}, the target's config has dtype {model_dtype or 'none'}, and vLLM "
            f"{inputs.version} does not start unless they are equal",
            f"remove --kv-cache-dtype, or set --dtype={kv_cache_dtype} as well",
        )


_MTP_MODEL_TYPES_BY_RELEASE = {
    "0.22.0": "deepseek_v3 deepseek_v32 deepseek_v4 ernie4_5_moe exaone_moe gemma4_assistant glm_moe_dsa hy_v3 intern_s2_preview "
    "longcat_flash pangu_ultra_moe qwen3_5 qwen3_5_moe qwen3_next step3p5",
    "0.24.0": "gemma4_unified_assistant minimax_m3_vl step3p7",
    "0.26.0": "bailing_hybrid inkling_mm_model inkling_model",
    "0.28.0": "dots3_note interns2_mobius kimi_k3 qwen3_5_moe_text qwen3_5_text",
    "0.30.0": "deepseek_v41 glm5_next hy_v4 qwen4_exp qwen4_exp_text",
    "0.33.0": "step5 step5_vl",
}
"""Values of model_type that hf_config_override in config/speculative.py changes to that of an MTP module, by the first release
that was verified to do so (an even one, or 0.33). Not listed: nemotron_h, which it only changes with num_nextn_predict_layers."""


def _is_mtp_model_type(model_type: str | None, version: Version) -> bool:
    return any(
        version >= Version.parse(since) and model_type in names.split() for since, names in _MTP_MODEL_TYPES_BY_RELEASE.items()
    )


_FEATURE_BY_METHOD = {
    "peagle": Feature.P_EAGLE,
    "dflash": Feature.DFLASH,
    "dspark": Feature.DSPARK,
    "medusa": Feature.MEDUSA,
    "mlp_speculator": Feature.MEDUSA,
}
