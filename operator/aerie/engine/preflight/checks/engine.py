"""Whether this engine, started with these arguments, will run this drafter."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from aerie.engine.preflight.input import Subject
from aerie.engine.preflight.registry import check, eagle3_only
from aerie.engine.preflight.report import Outcome, Severity, note, passed, refuse, skip, warn
from aerie.engine.releases import SECURITY_FLOOR, Feature, Version

_RAISED = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
"""RoPE types whose table vLLM makes longer for a drafter."""

_CUTS = Version.parse("0.33.0")
"""The first release that leaves the tables of other RoPE types as they are, and shortens the engine's context instead."""

_PRESERVES = Version.parse("0.32.0")
"""The first release that was seen to keep parameters over a sleep of level 2."""

_HALVES = frozenset({"float16", "bfloat16"})
_DTYPES = {"half": "float16", "float": "float32"}
"""Other names that --dtype takes."""

_ACROSS_STAGES = frozenset({"llama", "qwen2", "qwen3", "sarvam", "sarvam_moe", "minimax_m3", "deepseek_v4", "kimi_k3"})
"""model_type of targets that hand hidden states from one pipeline stage to the next."""


@check(
    "C5",
    "drafter's context reaches as far as the target's",
    why="past the drafter's last position: a device assertion or nonsense up to 0.26, a shorter engine context with "
    "YaRN from 0.33",
    worst=Severity.REFUSE,
    source="vLLM issues 48894, 23072, 21986; pull request 49343; config/speculative.py",
)
@eagle3_only
def context(subject: Subject) -> Iterable[Outcome]:
    wanted, drafter = subject.max_model_len, subject.drafter_model
    if wanted is None or drafter.max_position is None:
        whose = "drafter" if drafter.max_position is None else "target"
        yield note(f"the {whose}'s config.json has no max_position_embeddings: the drafter's context could not be checked")
        return
    if drafter.max_position >= wanted:
        yield passed(f"the drafter has {drafter.max_position} positions, and the engine takes {wanted} tokens")
        return
    seen = f"the drafter has {drafter.max_position} positions (RoPE {drafter.rope_type}), and the engine takes {wanted} tokens"
    shorter = f"set --max-model-len={drafter.max_position} or use another drafter"
    if not subject.supports(Feature.DRAFT_CONTEXT_RAISED):
        yield refuse(
            f"{seen}; vLLM {subject.version} fails or answers nonsense past the drafter's last position",
            f"use vLLM {Feature.DRAFT_CONTEXT_RAISED.since} or newer, or {shorter}",
        )
    elif drafter.rope_type not in _RAISED and subject.version >= _CUTS:
        yield refuse(
            f"{seen}; vLLM {subject.version} then cuts the engine's context to the drafter's",
            f"{shorter}, or give the drafter's config the RoPE settings and max_position_embeddings of the target",
        )
    else:
        yield warn(
            f"{seen}; vLLM {subject.version} stretches the drafter, which was not trained there",
            f"watch the acceptance length of requests longer than {drafter.max_position} tokens",
        )


@check(
    "C10",
    "method is named",
    why="vLLM otherwise guesses it from the drafter's path, and a volume's path says nothing",
    worst=Severity.REFUSE,
    source="vLLM config/speculative.py, __post_init__",
)
def method_named(subject: Subject) -> Iterable[Outcome]:
    if subject.drafter is None:
        yield skip("there is no drafter")
    elif subject.method is None:
        yield refuse(
            "--speculative-config has no method, and vLLM would guess it from the drafter's path",
            "name it, for EAGLE 3 and 3.1 as eagle3",
        )
    else:
        yield passed(f"{subject.method}")


@check(
    "C11",
    "drafter's tensor parallelism",
    why="vLLM takes 1 or the target's, under the name draft_tensor_parallel_size, and refuses anything else",
    worst=Severity.REFUSE,
    source="vLLM config/speculative.py, _verify_and_get_draft_tp and _verify_args",
)
def draft_tensor_parallel(subject: Subject) -> Iterable[Outcome]:
    if subject.drafter is None:
        yield skip("there is no drafter")
        return
    target = subject.arguments.tensor_parallel
    named = subject.speculative.get("draft_tensor_parallel_size")
    if "tensor_parallel_size" in subject.speculative:
        yield refuse(
            "tensor_parallel_size is in --speculative-config, where vLLM refuses it", "call it draft_tensor_parallel_size"
        )
    elif named not in (None, 1, target):
        yield refuse(
            f"draft_tensor_parallel_size is {named}, and vLLM takes 1 or the target's, {target}", f"set it to 1 or {target}"
        )
    else:
        yield passed(f"{target if named is None else named} (target: {target})")


@check(
    "C12",
    "kernels and cache types of the drafter's own",
    why="a drafter inherits the target's MoE backend and KV cache type, which may not run an unquantised drafter",
    worst=Severity.WARN,
    source="vLLM config/speculative.py, _DRAFT_VLLM_CONFIG_OVERRIDES; pull request 25883; issues 24505, 40849",
)
def inherited(subject: Subject) -> Iterable[Outcome]:
    if subject.drafter is None:
        yield skip("there is no drafter")
        return
    arguments, drafter, own = subject.arguments, subject.drafter_model, subject.speculative
    faults = []
    backend = arguments.moe_backend
    if backend not in (None, "auto") and not drafter.quantized and "moe_backend" not in own:
        faults.append(
            warn(
                f"the drafter inherits --moe-backend={backend} and is not quantised, which that backend may not run",
                "name a moe_backend for the drafter (vLLM 0.19 or newer), or leave --moe-backend out",
            )
        )
    cache = arguments.kv_cache_dtype
    if cache not in (None, "auto") and "kv_cache_dtype" not in own:
        faults.append(
            warn(
                f"the drafter inherits --kv-cache-dtype={cache}, which its attention backend may not support and which "
                "can cost acceptance",
                f"compare its acceptance length with --kv-cache-dtype=auto; vLLM {Feature.DRAFT_KV_CACHE_DTYPE.since} "
                "or newer can "
                "cache for the drafter in a type of its own",
            )
        )
    if own.get("quantization") is not None and drafter.quantized:
        faults.append(
            warn(
                f"--speculative-config names quantization {own['quantization']}, and the drafter's config has its own",
                "leave quantization out of --speculative-config",
            )
        )
    yield from faults
    if not faults:
        form = "quantised by its own config" if drafter.quantized else "not quantised"
        yield passed(f"the drafter is {form}, and inherits nothing that was chosen for the target")


@check(
    "C13",
    "EAGLE across pipeline stages",
    why="hidden states have to travel between stages, which older engines and most models do not do: the engine refuses to start",
    worst=Severity.REFUSE,
    source="vLLM pull request 50514; supports_aux_hidden_states_over_pp in vllm/model_executor/models",
)
@eagle3_only
def pipeline_parallel(subject: Subject) -> Iterable[Outcome]:
    stages, model = subject.arguments.pipeline_parallel, subject.target_model.model_type
    if stages <= 1:
        yield passed("one pipeline stage")
    elif not subject.supports(Feature.PIPELINE_PARALLEL):
        yield refuse(
            f"there are {stages} pipeline stages, and vLLM {subject.version} runs EAGLE 3 on one only",
            f"use vLLM {Feature.PIPELINE_PARALLEL.since} or newer, or tensor parallelism",
        )
    elif model not in _ACROSS_STAGES:
        yield refuse(
            f"there are {stages} pipeline stages, and vLLM does not hand hidden states of model type {model} across them",
            f"use tensor parallelism (targets that may: {', '.join(sorted(_ACROSS_STAGES))})",
        )
    else:
        yield passed(f"{stages} pipeline stages with model type {model}")


@check(
    "C14",
    "schedule without data parallelism",
    why="ranks that draft different numbers of tokens can wait for each other for ever (0.24, 0.25); later engines drop "
    "the schedule",
    worst=Severity.REFUSE,
    source="vLLM config/vllm.py, _maybe_disable_dynamic_sd_for_data_parallel",
)
def schedule_data_parallel(subject: Subject) -> Iterable[Outcome]:
    ranks = subject.arguments.data_parallel
    if not subject.scheduled:
        yield passed("the number of speculative tokens does not follow the batch size")
    elif ranks <= 1:
        yield passed("a schedule on one data-parallel rank")
    elif not subject.supports(Feature.SCHEDULE_DATA_PARALLEL_GUARD):
        yield refuse(
            f"a schedule with {ranks} data-parallel ranks can deadlock vLLM {subject.version}",
            "use a fixed number of tokens, or more replicas instead of data parallelism",
        )
    else:
        yield warn(
            f"vLLM {subject.version} turns the schedule off with {ranks} data-parallel ranks",
            "use a fixed number of tokens, or more replicas instead of data parallelism",
        )


@check(
    "C17",
    "asynchronous scheduling across pipeline stages",
    why="model runner V1 refuses the two together",
    worst=Severity.REFUSE,
    source="vLLM config/vllm.py, _validate_v1_model_runner",
)
def async_scheduling(subject: Subject) -> Iterable[Outcome]:
    stages, (runner, reason) = subject.arguments.pipeline_parallel, subject.model_runner
    if stages > 1 and runner == 1 and subject.arguments.async_scheduling:
        yield refuse(
            f"--async-scheduling with {stages} pipeline stages, and model runner V1 ({reason}) refuses the two together",
            "leave --async-scheduling out",
        )
    else:
        yield passed(f"{stages} pipeline stage{'s' if stages > 1 else ''}, model runner V{runner}")


@check(
    "C19",
    "model runner of the method",
    why="P-EAGLE, suffix and custom drafters run on model runner V1, where a schedule has no full CUDA graphs",
    worst=Severity.WARN,
    source="vLLM config/vllm.py, _get_v2_model_runner_unsupported_features; pull request 45953",
)
def runner_of_method(subject: Subject) -> Iterable[Outcome]:
    if not subject.speculative:
        yield skip("there is no speculation")
        return
    runner, reason = subject.model_runner
    if subject.scheduled and runner == 1:
        yield warn(
            f"a schedule on model runner V1 ({reason}) has piecewise CUDA graphs only",
            "measure the time per output token against a fixed number of tokens",
        )
    else:
        yield passed(f"model runner V{runner}: {reason}")


@check(
    "C20",
    "security floor",
    why="a request can stop an engine that speculates from afar",
    worst=Severity.REFUSE,
    source="vLLM pull request 44744",
)
def security_floor(subject: Subject) -> Iterable[Outcome]:
    if subject.version < SECURITY_FLOOR:
        seen = f"a request can stop vLLM {subject.version} from afar when it speculates"
        way_out = f"use vLLM {SECURITY_FLOOR} or newer"
        if subject.version_from_tag:
            seen += "; the version is from the tag of spec.engine.image"
            way_out += ", or set spec.engine.version to the vLLM version inside if that is another"
        yield refuse(seen, way_out)
    else:
        yield passed(f"vLLM {subject.version} is {SECURITY_FLOOR} or newer")


@check(
    "C28",
    "engine knows the drafter's method",
    why="a drafter of another method, or of a class that vLLM does not have, ends the start after the target is loaded",
    worst=Severity.REFUSE,
    source="vLLM config/speculative.py, hf_config_override; model_executor/models/registry.py",
)
def method_known(subject: Subject) -> Iterable[Outcome]:
    if subject.drafter is None:
        yield skip("there is no drafter")
        return
    drafter, method = subject.drafter_model, subject.method or "eagle3"
    feature = _METHODS.get("peagle" if subject.parallel_drafting else method)
    serves = {"eagle3", "peagle"} if method == "eagle3" else {method}
    if feature is not None and not subject.supports(feature):
        gone = feature.until is not None and subject.version >= feature.until
        way_out = "use an EAGLE 3.1 drafter: `aerie catalog` names them" if gone else f"use vLLM {feature.since} or newer"
        yield refuse(f"vLLM {subject.version} has no {feature.what}", way_out)
    elif drafter.kind != "unknown" and drafter.kind not in serves:
        yield refuse(
            f"the drafter is {drafter.kind}, and the method is {method}", "use an EAGLE 3 or 3.1 drafter, or its own method"
        )
    elif method == "eagle3" and drafter.family == "other":
        yield refuse(
            f"the drafter's class is {drafter.architecture}, and vLLM has no such EAGLE 3 class",
            "write the class that it was exported as into architectures of its config.json, such as LlamaForCausalLMEagle3",
        )
    elif method == "eagle3" and _taken_for_mtp(drafter.model_type, subject.version):
        own = "deepseek_v2" if drafter.family == "mla" else "qwen3" if drafter.family == "qwen3" else "llama"
        yield refuse(
            f"the drafter's model_type is {drafter.model_type}, which vLLM takes for an MTP module whatever the method",
            f"write model_type: {own} into its config.json, which has the same attention",
        )
    else:
        yield passed(f"{method}, class {drafter.architecture}")


@check(
    "C35",
    "drafter's weights after sleep",
    why="reload_weights after a sleep of level 2 loads the target's weights only: the drafter then proposes noise, and the "
    "acceptance length stays at 1 without an error until the pod is started again",
    worst=Severity.WARN,
    source="vLLM issue 52479, pull request 52487 (open); 0.33 v1/worker/gpu/model_runner.py, reload_weights; "
    "v1/worker/gpu_worker.py, _save_sleep_parameters",
)
def sleep(subject: Subject) -> Iterable[Outcome]:
    if subject.drafter is None:
        yield skip("there is no drafter")
    elif not subject.arguments.sleep_mode:
        yield passed("sleep mode is off")
    elif any(fnmatchcase("draft.model.weight", pattern) for pattern in subject.arguments.sleep_preserves):
        yield passed("a sleep of level 2 keeps the drafter's weights")
    else:
        keep = "set --sleep-preserve-parameter-names=draft.*, which keeps them in the CPU's memory, or "
        yield warn(
            f"sleep mode is on, and vLLM {subject.version} does not load the drafter's weights again after a sleep of level 2",
            f"{keep if subject.version >= _PRESERVES else ''}use level 1, or start pods again after level 2",
        )


@check(
    "C36",
    "front end in Rust",
    why="it lacks what the Python one has: figures of single requests, the time at which the process began, "
    "vllm:cache_config_info, and answers to probes and scrapes while it drains",
    worst=Severity.NOTE,
    source="vLLM 0.33 envs.py, VLLM_USE_RUST_FRONTEND; seen on 0.33.0",
)
def rust_front_end(subject: Subject) -> Iterable[Outcome]:
    value = subject.environment.get("VLLM_USE_RUST_FRONTEND", "0").strip()
    if value in ("", "0"):
        yield passed("VLLM_USE_RUST_FRONTEND is not set")
    else:
        yield note(
            f"VLLM_USE_RUST_FRONTEND is {value}: figures of single requests cannot be had, the KV cache's size is not on the "
            "metrics page, and while a pod drains it answers neither probes nor scrapes",
            "leave VLLM_USE_RUST_FRONTEND out where these are needed",
        )


@check(
    "C37",
    "KV cache in the model's own type",
    why="from 0.33 on the engine refuses to start with a KV cache in the other of float16 and bfloat16",
    worst=Severity.REFUSE,
    source="vLLM 0.33 config/vllm.py, _reject_mismatched_float_kv_cache",
)
def float_kv_cache(subject: Subject) -> Iterable[Outcome]:
    kind, named = subject.arguments.kv_cache_dtype, subject.arguments.dtype
    if kind not in _HALVES or subject.version < _CUTS:
        yield passed(f"--kv-cache-dtype is {kind or 'auto'}")
        return
    explicit = named not in (None, "auto")
    model = _DTYPES.get(named or "", named) if explicit else subject.target_model.dtype
    if model == kind:
        yield passed(f"the model and its KV cache are {kind}")
    elif explicit or model == "bfloat16":
        yield refuse(
            f"--kv-cache-dtype is {kind} and the model runs in {model}, which vLLM {subject.version} refuses",
            "leave --kv-cache-dtype out" + (f", or set it to {model}" if model in _HALVES else ""),
        )
    else:  # vLLM then chooses by model and GPU
        yield warn(
            f"--kv-cache-dtype is {kind}, the target's config has dtype {model or 'none'}, and vLLM {subject.version} refuses to "
            "start unless the two are the same",
            f"leave --kv-cache-dtype out, or set --dtype={kind} too",
        )


_TAKEN_FOR_MTP = {
    "0.22.0": "deepseek_v3 deepseek_v32 deepseek_v4 ernie4_5_moe exaone_moe gemma4_assistant glm_moe_dsa hy_v3 intern_s2_preview "
    "longcat_flash pangu_ultra_moe qwen3_5 qwen3_5_moe qwen3_next step3p5",
    "0.24.0": "gemma4_unified_assistant minimax_m3_vl step3p7",
    "0.26.0": "bailing_hybrid inkling_mm_model inkling_model",
    "0.28.0": "dots3_note interns2_mobius kimi_k3 qwen3_5_moe_text qwen3_5_text",
    "0.30.0": "deepseek_v41 glm5_next hy_v4 qwen4_exp qwen4_exp_text",
    "0.33.0": "step5 step5_vl",
}
"""model_type that hf_config_override of config/speculative.py turns into that of an MTP module, by the first even release, or
0.33, that was seen to do so. Left out: nemotron_h, which it only turns with num_nextn_predict_layers."""


def _taken_for_mtp(model_type: str | None, version: Version) -> bool:
    return any(version >= Version.parse(since) and model_type in names.split() for since, names in _TAKEN_FOR_MTP.items())


_METHODS = {
    "peagle": Feature.P_EAGLE,
    "dflash": Feature.DFLASH,
    "dspark": Feature.DSPARK,
    "medusa": Feature.MEDUSA,
    "mlp_speculator": Feature.MEDUSA,
}
