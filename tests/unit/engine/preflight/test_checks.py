"""Every check with cases that pass and cases that fail, and the messages for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.engine.arguments import EngineArguments
from aerie.engine.models.checkpoint import SafetensorsHeader, TensorInfo, build_checkpoint
from aerie.engine.models.gpu_memory import GIB
from aerie.engine.preflight import PreflightInput, Severity, list_checks, run_preflight
from aerie.engine.releases import Version
from tests.golden import Messages

Change = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""Difference from the small pair that fits: fields of the preflight input, or a function that returns them for the models."""

PASS, INFO, WARNING, ERROR, SKIP = Severity.PASS, Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.SKIP
TOP = ("eagle_aux_hidden_state_layer_ids",)
BOTH = (*TOP, "eagle_config")


def version(text: str) -> dict[str, Any]:
    return {"version": Version.parse(text)}


def args(**values: Any) -> dict[str, Any]:
    return {"arguments": EngineArguments(**values)}


def spec(**values: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3, **values}}


def gpu(gib: float) -> dict[str, Any]:
    return {"gpu_memory_bytes": int(gib * GIB)}


def target(**changes: Any) -> Change:
    return lambda small_models: {"target": small_models.target(**changes)}


def drafter(**changes: Any) -> Change:
    return lambda small_models: {"drafter": small_models.drafter(**changes)}


def speculators(**changes: Any) -> Change:
    return lambda small_models: {"drafter": small_models.speculators(**changes)}


def shards(part: str, *files: Mapping[str, tuple[str, tuple[int, ...]]], index: Mapping[str, str] | None = None) -> Change:
    """Return the model `part` with further weight files x1, x2, ... of these tensors, and an index."""

    def change(small_models: Any) -> Mapping[str, Any]:
        base = getattr(small_models, part)()
        headers = [small_models.build_header(specs, file=f"x{number}.safetensors") for number, specs in enumerate(files, 1)]
        checkpoint = build_checkpoint(base.name, base.config, [SafetensorsHeader(base.tensors, base.metadata), *headers], index)
        return {part: replace(checkpoint, d2t_offsets=base.d2t_offsets)}

    return change


def both(*changes: Change) -> Change:
    return lambda small_models: {key: value for change in changes for key, value in resolve_change(change, small_models).items()}


def resolve_change(change: Change, small_models: Any) -> Mapping[str, Any]:
    return change(small_models) if callable(change) else change


def top_only(ids: list[int], **config: Any) -> Change:
    return drafter(eagle_aux_hidden_state_layer_ids=ids, eagle_config={}, **config)


def nested_only(ids: list[int], **config: Any) -> Change:
    return drafter(drop=TOP, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}, **config)


def target_of_size(gib: int, **config: Any) -> Change:
    """Return a target whose weights take so many GiB."""
    tensors = {"w": TensorInfo("BF16", (1,), "f", 0, gib * GIB)}
    return lambda small_models: {"target": replace(small_models.target(**config), tensors=tensors)}


OWN = {"eagle.format": "1"}
"""Metadata of Aerie's own trainer, which counts layers as vLLM does."""
MLA = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 16, "qk_rope_head_dim": 4}
V31_OFF = {"fc_norm": False, "norm_output": False}
V1 = {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]]}

LATER_LAYER = {
    **{f"layers.1.{norm}_layernorm.weight": ("BF16", (64,)) for norm in ("input", "post_attention")},
    "layers.1.self_attn.q_proj.weight": ("BF16", (64, 64)),
    "layers.1.self_attn.k_proj.weight": ("BF16", (32, 64)),
    "layers.1.self_attn.v_proj.weight": ("BF16", (32, 64)),
    "layers.1.self_attn.o_proj.weight": ("BF16", (64, 64)),
    **{f"layers.1.mlp.{name}_proj.weight": ("BF16", (96, 64)) for name in ("gate", "up")},
    "layers.1.mlp.down_proj.weight": ("BF16", (64, 96)),
}
TWO_LAYERS = {"num_hidden_layers": 2, "sliding_window": 64}
SLIDING, FULL = "sliding_attention", "full_attention"

CASES: list[tuple[str, Change, Severity]] = [
    ("C1", version("0.22.0"), PASS),
    ("C1", version("0.21.0"), ERROR),
    ("C1", both(version("0.21.0"), drafter(**V31_OFF)), PASS),
    ("C1", both(version("0.22.1"), drafter(**MLA)), ERROR),
    ("C1", both(version("0.23.0"), drafter(architectures=["Eagle3Qwen3ForCausalLM"])), ERROR),
    ("C1", both(version("0.24.0"), speculators()), ERROR),
    ("C1", both(version("0.25.0"), speculators()), PASS),
    ("C1", drafter(architectures=["MyEagle3"]), INFO),
    ("C2", {}, INFO),
    ("C2", drafter(metadata=OWN), PASS),
    ("C2", top_only([2, 4, 5]), PASS),
    ("C2", top_only([1, 3, 4]), WARNING),
    ("C2", nested_only([1, 3, 4]), INFO),
    ("C2", both(nested_only([1, 3, 4]), V1), WARNING),
    ("C2", nested_only([1, 3, 5]), ERROR),
    ("C2", nested_only([3, 4, 6]), ERROR),
    ("C2", both(nested_only([3, 4, 6]), V1), INFO),
    ("C2", both(nested_only([3, 4, 6]), target(num_hidden_layers=None)), INFO),
    ("C2", drafter(drop=TOP, eagle_config={"layer_ids": [2, 3, 6], "eagle_aux_hidden_state_layer_ids": [2, 3, 6]}), INFO),
    (
        "C2",
        drafter(eagle_aux_hidden_state_layer_ids=[2, 4, 5], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        PASS,
    ),
    ("C2", drafter(drop=TOP, metadata=OWN), ERROR),
    ("C2", both(drafter(drop=TOP, metadata=OWN), V1), WARNING),
    ("C2", both(drafter(drop=TOP, metadata=OWN), version("0.24.0")), WARNING),
    ("C2", both(target(num_experts=8), drafter(drop=TOP, metadata=OWN), version("0.28.0")), WARNING),
    ("C2", drafter(drop=TOP, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}), PASS),
    ("C2", drafter(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}), WARNING),
    ("C2", drafter(drop=BOTH), SKIP),
    ("C3", {}, PASS),
    ("C3", top_only([1, 2, 4, 6], drop=("num_aux_hidden_states",)), ERROR),
    ("C3", top_only([1, 2, 4, 6], drop=("num_aux_hidden_states",), architectures=["Eagle3Qwen3ForCausalLM"]), PASS),
    ("C3", speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 6]), ERROR),
    ("C3", drafter(num_aux_hidden_states=4), ERROR),
    ("C3", drafter(drop=TOP, eagle_config={}, num_aux_hidden_states=4), ERROR),
    ("C3", drafter(eagle_config={"use_aux_hidden_state": False}), SKIP),
    ("C4", {}, PASS),
    ("C4", top_only([2, 4, 8]), PASS),
    ("C4", drafter(drop=BOTH), WARNING),
    ("C4", top_only([2, 4, 9]), ERROR),
    ("C4", top_only([2, 2, 6]), ERROR),
    ("C4", top_only([6, 2, 3]), WARNING),
    ("C4", target(num_hidden_layers=None), INFO),
    ("C30", {}, PASS),
    ("C30", target(architectures=["NoSuchClass"]), INFO),
    ("C30", target(architectures=None), INFO),
    ("C30", target(architectures=["Glm4MoeForCausalLM"]), ERROR),
    ("C30", both(target(architectures=["GraniteForCausalLM"]), version("0.31.0")), ERROR),
    ("C30", both(target(architectures=["GraniteForCausalLM"]), version("0.32.0")), PASS),
    ("C30", both(target(architectures=["Glm4MoeForCausalLM"]), version("0.34.0")), INFO),
    ("C30", both(target(architectures=["OlmoForCausalLM"])), INFO),  # 0.33 runs it through Transformers
    ("C30", both(target(architectures=["Glm4MoeForCausalLM"]), args(model_impl="transformers")), INFO),
    ("C5", {}, PASS),
    ("C5", both(drafter(max_position_embeddings=512), args(max_model_len=512)), PASS),
    ("C5", both(drafter(max_position_embeddings=512), version("0.26.0")), ERROR),
    ("C5", drafter(max_position_embeddings=512, rope_scaling={"rope_type": "yarn", "factor": 4.0}), ERROR),
    (
        "C5",
        both(drafter(max_position_embeddings=512, rope_scaling={"rope_type": "yarn", "factor": 4.0}), version("0.32.0")),
        WARNING,
    ),
    ("C5", drafter(max_position_embeddings=512, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}), WARNING),
    ("C5", drafter(max_position_embeddings=512), WARNING),
    ("C5", drafter(drop=("max_position_embeddings",)), INFO),
    ("C6", {}, PASS),
    ("C6", drafter(norm_before_fc=True), ERROR),
    ("C6", drafter(eagle_config={"norm_before_fc": True}), ERROR),
    ("C6", drafter(fc_norm=False, norm_before_fc=True, **MLA), ERROR),
    ("C7", drafter(metadata={"trainer": "aerie"}), PASS),
    ("C7", speculators(), PASS),
    ("C7", drafter(norm_output=False), PASS),
    ("C7", drafter(name="lmsys/SGLang-EAGLE3-SpecForge"), WARNING),
    ("C7", {}, INFO),
    ("C8", {}, PASS),
    ("C8", drafter(drop=("norm_before_residual",)), INFO),
    ("C8", speculators(), INFO),
    ("C9", {}, PASS),
    ("C9", drafter(**V31_OFF, without=("fc_norm",)), PASS),
    ("C9", drafter(without=("fc_norm",)), ERROR),
    ("C9", drafter(without=("fc_norm.2",)), ERROR),
    ("C9", drafter(**V31_OFF), ERROR),
    ("C9", drafter(add={"fc_norm.3.weight": ("BF16", (64,))}), ERROR),
    ("C9", drafter(add={"fc_norm.0.weight": ("BF16", (32,))}), ERROR),
    ("C9", drafter(add={"model.fc.weight": ("BF16", (1,))}), ERROR),
    ("C9", drafter(without=("fc.weight",)), ERROR),
    ("C9", drafter(add={"fc.weight": ("BF16", (64, 256))}), ERROR),
    ("C9", drafter(without=("norm.",)), ERROR),
    ("C9", drafter(norm_before_fc=True), ERROR),
    ("C9", drafter(add={"input_norm.weight": ("BF16", (192,))}), ERROR),
    ("C9", drafter(without=("midlayer",)), ERROR),
    ("C9", drafter(without=("midlayer.self_attn.k", "midlayer.mlp.up")), ERROR),
    ("C9", drafter(architectures=["Eagle3Qwen3ForCausalLM"]), ERROR),
    ("C9", drafter(add={"midlayer.self_attn.q_norm.weight": ("BF16", (16,))}), ERROR),
    ("C9", drafter(**MLA), ERROR),
    ("C9", drafter(add={"aux_norm_low.weight": ("BF16", (64,))}), ERROR),
    ("C9", drafter(add={"head.weight": ("BF16", (64,))}), ERROR),
    ("C9", drafter(without=("midlayer.hidden_norm",)), ERROR),
    ("C9", drafter(add={"midlayer.self_attn.q_proj.weight": ("BF16", (64, 64))}), ERROR),
    ("C9", drafter(add={"midlayer.self_attn.q_a_proj.weight": ("BF16", (8, 64))}, **MLA), ERROR),
    ("C9", drafter(add={"lm_head.weight": ("BF16", (256, 64))}), ERROR),
    ("C9", drafter(without=("lm_head",)), ERROR),
    ("C9", drafter(without=("lm_head", "d2t"), draft_vocab_size=256), PASS),
    ("C9", drafter(without=("d2t",)), ERROR),
    ("C9", target(vocab_size=512), PASS),
    ("C9", drafter(offsets=None), INFO),
    ("C9", drafter(offsets=(0, 1)), ERROR),
    ("C9", drafter(offsets=(*[0] * 127, 129)), ERROR),
    ("C9", drafter(offsets=(-1, *range(127))), ERROR),
    ("C9", drafter(offsets=(0, -1, *range(126))), ERROR),
    ("C9", drafter(offsets=(2, 0, -2, *range(3, 128))), PASS),
    ("C9", drafter(offsets=tuple(range(0, 256, 2))), ERROR),
    ("C9", lambda small_models: {"drafter": replace(small_models.drafter(), tensors=None)}, INFO),
    ("C9", drafter(num_hidden_layers=2, add=LATER_LAYER), PASS),
    ("C9", drafter(num_hidden_layers=2), ERROR),
    ("C9", drafter(num_hidden_layers=3, add=LATER_LAYER), ERROR),
    ("C9", drafter(add=LATER_LAYER), ERROR),
    ("C9", drafter(num_hidden_layers=2, add={**LATER_LAYER, "layers.1.self_attn.q_proj.weight": ("BF16", (64, 128))}), ERROR),
    (
        "C9",
        drafter(num_hidden_layers=2, add={k: v for k, v in LATER_LAYER.items() if "down_proj" not in k}),
        ERROR,
    ),
    ("C10", {}, PASS),
    ("C10", spec(method=None), ERROR),
    ("C11", {}, PASS),
    ("C11", both(spec(draft_tensor_parallel_size=1), args(tensor_parallel=4)), PASS),
    ("C11", both(spec(draft_tensor_parallel_size=2), args(tensor_parallel=4)), ERROR),
    ("C11", spec(tensor_parallel_size=1), ERROR),
    ("C12", {}, PASS),
    ("C12", args(moe_backend="cutlass"), WARNING),
    ("C12", both(args(moe_backend="cutlass"), spec(moe_backend="triton")), PASS),
    ("C12", args(kv_cache_dtype="fp8"), WARNING),
    ("C12", both(drafter(quantization_config={"quant_method": "fp8"}), spec(quantization="fp8")), WARNING),
    ("C13", {}, PASS),
    ("C13", args(pipeline_parallel=2), PASS),
    ("C13", both(args(pipeline_parallel=2), version("0.29.0")), ERROR),
    ("C13", both(args(pipeline_parallel=2), target(model_type="deepseek_v3")), ERROR),
    ("C14", spec(**SCHEDULE), PASS),
    ("C14", both(spec(**SCHEDULE), args(data_parallel=2), version("0.25.0")), ERROR),
    ("C14", both(spec(**SCHEDULE), args(data_parallel=2)), WARNING),
    ("C14", args(data_parallel=2), PASS),
    ("C15", {}, INFO),
    ("C15", both(args(has_logits_processors=True), version("0.24.0")), ERROR),
    ("C15", args(has_logits_processors=True), WARNING),
    ("C15", {"speculative_config": {}}, SKIP),
    ("C16", {"speculative_config": {}}, SKIP),
    ("C16", {}, INFO),
    ("C16", args(structured_outputs_backend="lm-format-enforcer"), ERROR),
    ("C16", both(args(has_tool_or_reasoning_parser=True), version("0.28.0")), WARNING),
    ("C16", both(target(model_type="kimi_k2"), version("0.26.0")), WARNING),
    ("C17", {}, PASS),
    ("C17", args(pipeline_parallel=2, async_scheduling=True), PASS),
    ("C17", both(args(pipeline_parallel=2, async_scheduling=True), V1), ERROR),
    ("C18", {}, PASS),
    ("C18", args(enable_prefix_caching=False), PASS),
    ("C18", version("0.32.0"), INFO),
    ("C18", args(has_kv_transfer_config=True), WARNING),
    ("C18", target(sliding_window=128), WARNING),
    ("C19", {}, PASS),
    ("C19", spec(parallel_drafting=True), PASS),
    ("C19", spec(parallel_drafting=True, **SCHEDULE), WARNING),
    ("C20", {**version("0.23.0"), "is_version_from_tag": True}, ERROR),
    ("C20", version("0.24.0"), PASS),
    ("C20", version("0.23.0"), ERROR),
    ("C21", {}, PASS),
    ("C21", {"gpu_memory_bytes": None}, INFO),
    ("C21", both(target_of_size(40), gpu(24), args(quantization="fp8")), WARNING),
    ("C21", both(target_of_size(40), gpu(24), args(offload_flag="--cpu-offload-gb=30")), WARNING),
    ("C21", both(target_of_size(400), gpu(24), args(quantization="fp8")), ERROR),
    ("C21", both(target_of_size(40, quantization_config={"a": 1}), gpu(24), args(quantization="fp8")), ERROR),
    ("C21", both(target_of_size(40), gpu(24)), ERROR),
    ("C21", gpu(2), ERROR),
    ("C21", both(gpu(2.2), target(max_position_embeddings=10**6)), ERROR),
    ("C21", both(gpu(2.2), target(max_position_embeddings=15_000)), WARNING),
    ("C21", lambda small_models: {"target": replace(small_models.target(), tensors=None)}, INFO),
    ("C22", speculators(), PASS),
    ("C22", drafter(metadata={"eagle.target": "Example/Target"}), PASS),
    ("C22", {}, INFO),
    ("C22", speculators(speculators_config={"verifier": {"name_or_path": "other/model"}}), WARNING),
    ("C22", drafter(metadata={"eagle.target": "/data/model"}), INFO),
    ("C22", drafter(metadata={"eagle.target": "target"}), INFO),
    ("C22", both(speculators(), target(name="/models/x")), INFO),
    ("C23", {"speculative_config": {}, "drafter": None}, SKIP),
    ("C23", {}, INFO),
    ("C24", {}, PASS),
    ("C24", args(enable_lora=True), WARNING),
    ("C25", {}, PASS),
    ("C25", target(hidden_size=128), ERROR),
    ("C25", target(hidden_size=None), INFO),
    ("C26", {}, PASS),
    ("C26", target(vocab_size=512), ERROR),
    ("C26", drafter(draft_vocab_size=300), ERROR),
    ("C26", drafter(drop=("vocab_size",)), INFO),
    ("C27", {}, PASS),
    ("C27", drafter(**V31_OFF, without=("fc_norm",)), PASS),
    ("C27", drafter(drop=("norm_output",)), ERROR),
    ("C27", drafter(norm_output=False), WARNING),
    ("C27", drafter(fc_norm=False, without=("fc_norm",)), WARNING),
    ("C27", drafter(fc_norm=False, norm_before_fc=True, without=("fc_norm",)), PASS),
    ("C28", {}, PASS),
    ("C28", drafter(architectures=["LlamaForCausalLM"]), PASS),
    ("C28", drafter(model_type="deepseek_v3", **MLA), ERROR),
    ("C28", drafter(architectures=["DFlashDraftModel"]), ERROR),
    ("C28", drafter(architectures=["BertModel"]), ERROR),
    ("C28", both(spec(method="medusa"), drafter(architectures=["MedusaModel"])), ERROR),
    ("C28", both(spec(method="dspark"), drafter(architectures=["Qwen3DSparkModel"]), version("0.24.0")), ERROR),
    ("C29", {}, PASS),
    ("C29", args(tensor_parallel=4), ERROR),
    ("C29", {"gpu_count": 2}, WARNING),
    ("C29", {"gpu_count": 2, "gpu_resource": "amd.com/gpu", **args(tensor_parallel=4)}, ERROR),
    ("C29", {"gpu_count": 2, "gpu_resource": "nvidia.com/mig-3g.40gb", **args(tensor_parallel=2)}, WARNING),
    ("C29", {"gpu_count": None, "gpu_resource": "resourceClaims (DRA)"}, INFO),
    ("C29", {"gpu_count": None, "gpu_resource": ""}, INFO),
    ("C31", {}, PASS),
    ("C31", drafter(auto_map={"AutoModel": "x.Y"}), INFO),
    ("C31", both(drafter(auto_map={"AutoModel": "x.Y"}), args(trust_remote_code=True)), WARNING),
    ("C28", both(drafter(model_type="qwen3_5"), version("0.22.0")), ERROR),
    ("C28", both(drafter(model_type="qwen4_exp"), version("0.29.0")), PASS),
    ("C28", both(drafter(model_type="qwen4_exp"), version("0.30.0")), ERROR),
    ("C29", {"gpu_count": None}, INFO),
    ("C33", {}, PASS),
    ("C33", {"image": "vllm/vllm-openai:v0.33.0"}, PASS),
    ("C33", {"image": "me/vllm-openai-cpu:v0.33.0"}, WARNING),
    ("C33", {"environment": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, WARNING),
    ("C33", version("0.32.0+cpu"), WARNING),
    ("C33", version("0.31.0+cpu"), WARNING),
    ("C33", both({"speculative_config": {}}, version("0.32.0+cpu")), SKIP),
    ("C34", {}, SKIP),
    ("C34", spec(draft_sample_method="probabilistic"), PASS),
    ("C34", both(spec(draft_sample_method="probabilistic"), version("0.20.2")), ERROR),
    ("C35", {}, PASS),
    ("C35", both({"drafter": None}, args(enable_sleep_mode=True)), SKIP),
    ("C35", args(enable_sleep_mode=True), WARNING),
    ("C35", both(args(enable_sleep_mode=True), version("0.31.0")), WARNING),
    ("C35", args(enable_sleep_mode=True, sleep_preserve_parameter_names=("lm_head.*",)), WARNING),
    ("C35", args(enable_sleep_mode=True, sleep_preserve_parameter_names=("lm_head.*", "draft.*")), PASS),
    ("C36", {}, PASS),
    ("C36", {"environment": {"VLLM_USE_RUST_FRONTEND": "0"}}, PASS),
    ("C36", {"environment": {"VLLM_USE_RUST_FRONTEND": "1"}}, INFO),
    ("C38", {}, PASS),
    ("C38", drafter(**TWO_LAYERS, layer_types=[SLIDING] * 2), PASS),
    ("C38", drafter(**TWO_LAYERS, layer_types=[SLIDING, FULL]), INFO),
    ("C38", both(V1, drafter(**TWO_LAYERS, layer_types=[SLIDING, FULL])), ERROR),
    ("C38", drafter(**MLA, **TWO_LAYERS, layer_types=[SLIDING] * 2), WARNING),
    ("C37", {}, PASS),
    ("C37", args(kv_cache_dtype="fp8"), PASS),
    ("C37", both(args(kv_cache_dtype="float16", dtype="bfloat16"), version("0.32.0")), PASS),
    ("C37", args(kv_cache_dtype="float16", dtype="half"), PASS),
    ("C37", args(kv_cache_dtype="float16", dtype="bfloat16"), ERROR),
    ("C37", args(kv_cache_dtype="bfloat16", dtype="float"), ERROR),
    ("C37", both(target(dtype="bfloat16"), args(kv_cache_dtype="float16")), ERROR),
    ("C37", both(target(dtype="bfloat16"), args(kv_cache_dtype="bfloat16")), PASS),
    ("C37", both(target(dtype="float16"), args(kv_cache_dtype="bfloat16")), WARNING),
    ("C32", {}, PASS),
    (
        "C32",
        shards("drafter", index={"fc.weight": "x1.safetensors", "gone.weight": "x1.safetensors", "lost": "x1.safetensors"}),
        ERROR,
    ),
    ("C32", shards("drafter", index={"fc.weight": "x1.safetensors"}), INFO),
    ("C32", shards("target", {"lm_head.weight": ("BF16", (256, 64))}), WARNING),
    (
        "C32",
        shards("drafter", {"norm.weight": ("BF16", (64,))}, {"d2t": ("I64", (128,)), "norm.weight": ("BF16", (64,))}),
        WARNING,
    ),
    ("C32", shards("target", {"lm_head.weight": ("BF16", (128, 64))}), ERROR),
    ("C32", lambda small_models: {"target": replace(small_models.target(), tensors=None)}, INFO),
    ("C32", shards("target", {"x": ("BF16", (1,))}), PASS),
]


CASE_NAMES = [f"{which} {[row[0] for row in CASES[: index + 1]].count(which):02}" for index, (which, _, _) in enumerate(CASES)]
"""Names in the golden file: the check, and the number of the case among those of the check."""


@pytest.mark.parametrize(("name", "case"), list(zip(CASE_NAMES, CASES, strict=True)), ids=CASE_NAMES)
def test_findings_of_each_case(small_models: Any, messages: Messages, name: str, case: tuple[str, Change, Severity]) -> None:
    check_id, change, severity = case
    findings = small_models.findings(check_id, **resolve_change(change, small_models))
    assert severity in {finding.severity for finding in findings}
    assert all(finding.message.startswith(f"{finding.severity.glyph} {check_id} ") for finding in findings)
    messages.check(f"{name} {severity.value}", "\n".join(finding.message for finding in findings))


def test_every_check_has_a_case_that_passes_and_one_that_fails() -> None:
    for check in list_checks():
        severities = {severity for which, _, severity in CASES if which == check.id}
        assert severities & {PASS, SKIP}, f"{check.id} has no case that passes"
        assert severities & {ERROR, WARNING, INFO}, f"{check.id} has no case that fails"
        assert check.max_severity in severities, f"{check.id} has no case of its maximum severity"
    assert [check.id for check in list_checks()] == [f"C{number}" for number in range(1, 39)]


ORDER = [SKIP, PASS, INFO, WARNING, ERROR]


@pytest.mark.parametrize("change", [change for _, change, _ in CASES])
def test_every_report_is_complete(small_models: Any, change: Change) -> None:
    report = run_preflight(small_models.subject(**resolve_change(change, small_models)))
    max_severities = {check.id: check.max_severity for check in list_checks()}
    assert {finding.id for finding in report.findings} == max_severities.keys()
    for finding in report.findings:
        assert ORDER.index(finding.severity) <= ORDER.index(max_severities[finding.id])
        assert finding.evidence
        assert not finding.evidence.endswith(".")
        assert not finding.fix.endswith(".")
        assert finding.fix or finding.severity in (PASS, SKIP, INFO), f"{finding.id} names no fix"


def test_a_fitting_pair_passes(small_models: Any) -> None:
    report = run_preflight(small_models.subject())
    assert report.passed
    assert not list(report.with_severity(WARNING))
    assert report.summary == "preflight passed: 6 notes, 31 passed"


def test_one_error_fails_the_report(small_models: Any) -> None:
    report = run_preflight(small_models.subject(target=small_models.target(hidden_size=128)))
    assert not report.passed
    assert report.summary.startswith("preflight failed: 1 error, ")
    assert report.to_json()["passed"] is False
    assert {"id": "C25", "title": "hidden size matches the target", "severity": "error"}.items() <= next(
        finding for finding in report.to_json()["findings"] if finding["id"] == "C25"
    ).items()


def test_without_a_drafter_its_checks_are_skipped(small_models: Any) -> None:
    subject = PreflightInput(
        target=small_models.target(), drafter=None, version=Version.parse("0.33.0"), gpu_memory_bytes=80 * GIB, gpu_count=1
    )
    report = run_preflight(subject)
    assert report.passed
    assert {finding.id for finding in report.with_severity(SKIP)} >= {"C1", "C9", "C10", "C25", "C27", "C28"}


KEYS = (
    *("architectures", "model_type", "text_config", "speculators_model_type", "transformer_layer_config", "speculators_config"),
    *("hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "kv_lora_rank", "sliding_window", "layer_types", "max_position_embeddings", "dtype"),
    *("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "num_aux_hidden_states", "eagle_config"),
    *("eagle_aux_hidden_state_layer_ids", "rope_scaling", "rope_parameters", "rope_type", "quantization_config", "num_experts"),
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.sampled_from(["eagle3", "llama", "yarn", "x"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)
CONFIGS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8)

SPECULATIVE = st.dictionaries(
    st.sampled_from(["method", "draft_tensor_parallel_size", "tensor_parallel_size", "parallel_drafting", "kv_cache_dtype"])
    | st.sampled_from(["moe_backend", "quantization", "num_speculative_tokens_per_batch_size"]),
    VALUES,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONFIGS, CONFIGS, st.booleans(), SPECULATIVE)
def test_any_config_gives_a_complete_report(
    small_models: Any, target: Any, drafter: Any, is_merged: bool, speculative: Any
) -> None:
    base = small_models.subject(speculative_config=speculative)
    # Merged into the valid configs, and alone.
    configs = ({**base.target.config, **target}, {**base.drafter.config, **drafter}) if is_merged else (target, drafter)
    subject = replace(base, target=replace(base.target, config=configs[0]), drafter=replace(base.drafter, config=configs[1]))
    report = run_preflight(subject)
    assert {finding.id for finding in report.findings} == {check.id for check in list_checks()}
    assert all(finding.message for finding in report.findings)
