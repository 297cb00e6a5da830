"""Every check with what passes and what does not, and the sentence that a person reads."""

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

Change = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""What is different from the small pair that fits: fields of the subject, or a function of the models that gives them."""

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
    return lambda small: {"target": small.target(**changes)}


def drafter(**changes: Any) -> Change:
    return lambda small: {"drafter": small.drafter(**changes)}


def speculators(**changes: Any) -> Change:
    return lambda small: {"drafter": small.speculators(**changes)}


def shards(part: str, *files: Mapping[str, tuple[str, tuple[int, ...]]], index: Mapping[str, str] | None = None) -> Change:
    """The model `part` with further weight files x1, x2, ... of these tensors, and an index."""

    def change(small: Any) -> Mapping[str, Any]:
        base = getattr(small, part)()
        more = [small.header_of(specs, file=f"x{number}.safetensors") for number, specs in enumerate(files, 1)]
        made = build_checkpoint(base.name, base.config, [SafetensorsHeader(base.tensors, base.metadata), *more], index)
        return {part: replace(made, d2t_offsets=base.d2t_offsets)}

    return change


def both(*changes: Change) -> Change:
    return lambda small: {key: value for change in changes for key, value in made(change, small).items()}


def made(change: Change, small: Any) -> Mapping[str, Any]:
    return change(small) if callable(change) else change


def top_only(ids: list[int], **config: Any) -> Change:
    return drafter(eagle_aux_hidden_state_layer_ids=ids, eagle_config={}, **config)


def nested_only(ids: list[int], **config: Any) -> Change:
    return drafter(drop=TOP, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}, **config)


def heavy(gib: int, **config: Any) -> Change:
    """A target whose weights take so much."""
    tensors = {"w": TensorInfo("BF16", (1,), "f", 0, gib * GIB)}
    return lambda small: {"target": replace(small.target(**config), tensors=tensors)}


OWN = {"eagle.format": "1"}
"""Metadata of Aerie's own trainer, which counts layers as vLLM does."""
MLA = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
}
V31_OFF = {"fc_norm": False, "norm_output": False}
V1 = {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]]}

CASES: list[tuple[str, Change, Severity, str]] = [
    ("C1", version("0.22.0"), PASS, "asks for fc_norm and norm_output; vLLM 0.22.0 has had it since 0.22.0"),
    ("C1", version("0.21.0"), ERROR, "vLLM 0.21.0 has no EAGLE 3.1 drafters of Llama form. Use vLLM 0.22.0 or newer."),
    ("C1", both(version("0.21.0"), drafter(**V31_OFF)), PASS, "the drafter is plain EAGLE 3"),
    ("C1", both(version("0.22.1"), drafter(**MLA)), ERROR, "0.22.0 and 0.22.1 load fc_norm and never apply it. Use vLLM 0.23.0"),
    ("C1", both(version("0.23.0"), drafter(architectures=["Eagle3Qwen3ForCausalLM"])), ERROR, "Use vLLM 0.24.0 or newer"),
    ("C1", both(version("0.24.0"), speculators()), ERROR, "drop fc_norm and norm_output in silence. Use vLLM 0.25.0"),
    ("C1", both(version("0.25.0"), speculators()), PASS, "since 0.25.0"),
    ("C1", drafter(architectures=["MyEagle3"]), INFO, "it is not known which vLLM gives it to MyEagle3. Compare its acceptance"),
    ("C2", {}, INFO, "[2, 3, 6] at the top level, read as they are; whether they count the layers' inputs"),
    ("C2", drafter(metadata=OWN), PASS, "[2, 3, 6] at the top level"),
    ("C2", top_only([2, 4, 5]), PASS, "[2, 4, 5] at the top level"),
    (
        "C2",
        top_only([1, 3, 4]),
        WARNING,
        (
            "[1, 3, 4] at the top level: these look like layers counted by their output; to vLLM they are [2, 4, 5], and vLLM "
            "reads [1, 3, 4], one layer too early. Convert the drafter with `aerie-drafter convert`, which writes "
            "eagle_aux_hidden_state_layer_ids: [2, 4, 5] to the top level."
        ),
    ),
    ("C2", nested_only([1, 3, 4]), INFO, "to vLLM they are [2, 4, 5], its default, and model runner V2"),
    (
        "C2",
        both(nested_only([1, 3, 4]), V1),
        WARNING,
        "model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0) reads [1, 3, 4], one layer too early",
    ),
    (
        "C2",
        nested_only([1, 3, 5]),
        ERROR,
        "ignores it there and reads [2, 4, 5]. Convert the drafter with `aerie-drafter convert`, which writes",
    ),
    (
        "C2",
        nested_only([3, 4, 6]),
        ERROR,
        "--layer-ids inputs` if vLLM's ids are [3, 4, 6], or with `--layer-ids outputs` if they are [4, 5, 7]",
    ),
    ("C2", both(nested_only([3, 4, 6]), V1), INFO, "[3, 4, 6] only inside eagle_config, read as they are"),
    ("C2", both(nested_only([3, 4, 6]), target(num_hidden_layers=None)), INFO, "what is read instead could not be checked"),
    (
        "C2",
        drafter(drop=TOP, eagle_config={"layer_ids": [2, 3, 6], "eagle_aux_hidden_state_layer_ids": [2, 3, 6]}),
        INFO,
        "read as they are",
    ),
    (
        "C2",
        drafter(eagle_aux_hidden_state_layer_ids=[2, 4, 5], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        PASS,
        "[2, 4, 5]",
    ),
    (
        "C2",
        drafter(drop=TOP, metadata=OWN),
        ERROR,
        (
            "[2, 3, 6] only inside eagle_config, and model runner V2 (the default of vLLM 0.33.0) ignores it there and reads "
            "[2, 4, 5]. Copy eagle_aux_hidden_state_layer_ids: [2, 3, 6] to the top level of the drafter's config.json."
        ),
    ),
    (
        "C2",
        both(drafter(drop=TOP, metadata=OWN), V1),
        WARNING,
        "model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0) reads it there, another would read [2, 4, 5]",
    ),
    ("C2", both(drafter(drop=TOP, metadata=OWN), version("0.24.0")), WARNING, "the default of vLLM 0.24.0"),
    (
        "C2",
        both(target(num_experts=8), drafter(drop=TOP, metadata=OWN), version("0.28.0")),
        WARNING,
        "model runner V1 (the default of vLLM 0.28.0)",
    ),
    (
        "C2",
        drafter(drop=TOP, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}),
        PASS,
        "they are the default, so both model runners agree",
    ),
    (
        "C2",
        drafter(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}),
        WARNING,
        "[2, 3, 6] at the top level and [2, 4, 6]",
    ),
    ("C2", drafter(drop=BOTH), SKIP, "names no layers: see C4"),
    ("C3", {}, PASS, "3 hidden states, and vLLM sizes fc for 3"),
    (
        "C3",
        top_only([1, 2, 4, 6], drop=("num_aux_hidden_states",)),
        ERROR,
        (
            "4 layers are named, but num_aux_hidden_states is missing, so vLLM sizes fc for 3. Write "
            "num_aux_hidden_states: 4 into the "
            "drafter's config.json."
        ),
    ),
    (
        "C3",
        top_only([1, 2, 4, 6], drop=("num_aux_hidden_states",), architectures=["Eagle3Qwen3ForCausalLM"]),
        PASS,
        "4 hidden states, and vLLM sizes fc for 4",
    ),
    (
        "C3",
        speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 6]),
        ERROR,
        "Write num_aux_hidden_states: 4 into transformer_layer_config of the drafter's config.json.",
    ),
    ("C3", drafter(num_aux_hidden_states=4), ERROR, "3 layers are named, but num_aux_hidden_states is 4"),
    (
        "C3",
        drafter(drop=TOP, eagle_config={}, num_aux_hidden_states=4),
        ERROR,
        "no layers are named, which means 3, but num_aux_hidden_states is 4",
    ),
    ("C3", drafter(eagle_config={"use_aux_hidden_state": False}), SKIP, "uses no auxiliary hidden states"),
    ("C4", {}, PASS, "[2, 3, 6] of 8 layers"),
    ("C4", top_only([2, 4, 8]), PASS, "[2, 4, 8] of 8 layers"),
    (
        "C4",
        drafter(drop=BOTH),
        WARNING,
        "names no eagle_aux_hidden_state_layer_ids, so vLLM reads [2, 4, 5]",
    ),
    (
        "C4",
        top_only([2, 4, 9]),
        ERROR,
        (
            "the drafter reads layer 9, and the target has layers 0 to 8. Use a drafter that was trained for this "
            "target: `aerie catalog` "
            "names them."
        ),
    ),
    ("C4", top_only([2, 2, 6]), ERROR, "name one twice"),
    ("C4", top_only([6, 2, 3]), WARNING, "the layer ids [6, 2, 3] do not rise, and vLLM sorts them"),
    ("C4", target(num_hidden_layers=None), INFO, "the range of the layer ids could not be checked"),
    ("C30", {}, PASS, "LlamaForCausalLM has EAGLE 3 in vLLM 0.33.0"),
    ("C30", target(architectures=["NoSuchClass"]), INFO, "whether NoSuchClass has EAGLE 3 in vLLM 0.33.0 is not known"),
    ("C30", target(architectures=None), INFO, "whether the target, which names no class, has EAGLE 3"),
    ("C30", target(architectures=["Glm4MoeForCausalLM"]), ERROR, "Glm4MoeForCausalLM has no EAGLE 3 in vLLM 0.33.0. Turn"),
    ("C30", both(target(architectures=["GraniteForCausalLM"]), version("0.31.0")), ERROR, "Use vLLM 0.32.0 or newer."),
    ("C30", both(target(architectures=["GraniteForCausalLM"]), version("0.32.0")), PASS, "GraniteForCausalLM has EAGLE 3"),
    ("C30", both(target(architectures=["Glm4MoeForCausalLM"]), version("0.34.0")), INFO, "is not known"),
    ("C30", both(target(architectures=["OlmoForCausalLM"])), INFO, "is not known"),  # 0.33 runs it through Transformers
    (
        "C30",
        both(target(architectures=["Glm4MoeForCausalLM"]), args(model_impl="transformers")),
        INFO,
        "--model-impl=transformers decides",
    ),
    ("C5", {}, PASS, "the drafter has 2048 positions, and the engine takes 2048 tokens"),
    ("C5", both(drafter(max_position_embeddings=512), args(max_model_len=512)), PASS, "512 tokens"),
    (
        "C5",
        both(drafter(max_position_embeddings=512), version("0.26.0")),
        ERROR,
        (
            "vLLM 0.26.0 fails or answers nonsense past the drafter's last position. Use vLLM 0.27.0 or newer, or set "
            "--max-model-len=512 "
            "or use another drafter."
        ),
    ),
    (
        "C5",
        drafter(max_position_embeddings=512, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        ERROR,
        "(RoPE yarn), and the engine takes 2048 tokens; vLLM 0.33.0 then cuts the engine's context",
    ),
    (
        "C5",
        both(drafter(max_position_embeddings=512, rope_scaling={"rope_type": "yarn", "factor": 4.0}), version("0.32.0")),
        WARNING,
        "vLLM 0.32.0 stretches the drafter, which was not trained there.",
    ),
    (
        "C5",
        drafter(max_position_embeddings=512, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
        WARNING,
        "vLLM 0.33.0 stretches the drafter",
    ),
    ("C5", drafter(max_position_embeddings=512), WARNING, "Watch the acceptance length of requests longer than 512 tokens."),
    ("C5", drafter(drop=("max_position_embeddings",)), INFO, "the drafter's context could not be checked"),
    ("C6", {}, PASS, "norm before fc: fc_norm"),
    ("C6", drafter(norm_before_fc=True), ERROR, "fc_norm and norm_before_fc are both true, and vLLM applies both. Keep the one"),
    ("C6", drafter(eagle_config={"norm_before_fc": True}), ERROR, "are both true"),
    (
        "C6",
        drafter(fc_norm=False, norm_before_fc=True, **MLA),
        ERROR,
        "ignores it. Use a drafter that was trained with fc_norm.",
    ),
    ("C7", drafter(metadata={"trainer": "aerie"}), PASS, "the checkpoint is from aerie, not from SpecForge"),
    ("C7", speculators(), PASS, "the checkpoint is from speculators, not from SpecForge"),
    ("C7", drafter(norm_output=False), PASS, "SpecForge's mismatch of 2026 cannot matter"),
    (
        "C7",
        drafter(name="lmsys/SGLang-EAGLE3-SpecForge"),
        WARNING,
        (
            "norm_output is true and the checkpoint names SpecForge, which from 2026-07-20 to 2026-09-15 wrote the flag "
            "and trained "
            "without it. If it was trained in that time, set norm_output: false in its config.json or train it again; "
            "if later, nothing "
            "is wrong."
        ),
    ),
    ("C7", {}, INFO, "that it was trained so could not be checked"),
    ("C8", {}, PASS, "norm_before_residual is false"),
    ("C8", drafter(drop=("norm_before_residual",)), INFO, "vLLM takes false for the native format. Write false into it if"),
    ("C8", speculators(), INFO, "vLLM takes true for the speculators format. Write true into it if"),
    ("C9", {}, PASS, "18 tensors have the names and shapes that vLLM looks for"),
    ("C9", drafter(**V31_OFF, without=("fc_norm",)), PASS, "15 tensors have"),
    (
        "C9",
        drafter(without=("fc_norm",)),
        ERROR,
        (
            "fc_norm is true, and there is no tensor fc_norm.N.weight: these are EAGLE 3 weights with a 3.1 config; "
            "vLLM loads them without "
            "an error and norms with ones (AL 1.58 instead of 2.51 at K = 3). Set fc_norm and norm_output to false in "
            "the drafter's "
            "config.json, or use the weights that belong to it."
        ),
    ),
    ("C9", drafter(without=("fc_norm.2",)), ERROR, "fc_norm is true, and fc_norm.2.weight is missing of 3"),
    (
        "C9",
        drafter(**V31_OFF),
        ERROR,
        (
            'vLLM\'s start ends with "no module or parameter named fc_norm" once the target is loaded. Write fc_norm: true and '
            "norm_output: true into its config.json."
        ),
    ),
    ("C9", drafter(add={"fc_norm.3.weight": ("BF16", (64,))}), ERROR, "fc_norm.3.weight is one norm too many for 3"),
    (
        "C9",
        drafter(add={"fc_norm.0.weight": ("BF16", (32,))}),
        ERROR,
        "fc_norm.0.weight has shape [32], and the config promises [64]",
    ),
    (
        "C9",
        drafter(add={"model.fc.weight": ("BF16", (1,))}),
        ERROR,
        "1 tensors begin with 'model.' (the first is model.fc.weight)",
    ),
    ("C9", drafter(without=("fc.weight",)), ERROR, "fc.weight is missing, which joins"),
    (
        "C9",
        drafter(add={"fc.weight": ("BF16", (64, 256))}),
        ERROR,
        "fc.weight has shape [64, 256], and the config promises [64, 192] (hidden size x 3 hidden states of 64)",
    ),
    ("C9", drafter(without=("norm.",)), ERROR, "norm.weight is missing, the norm before lm_head"),
    ("C9", drafter(norm_before_fc=True), ERROR, "norm_before_fc is true and there is no tensor input_norm.weight"),
    ("C9", drafter(add={"input_norm.weight": ("BF16", (192,))}), ERROR, "norm_before_fc is not true and there is a tensor"),
    ("C9", drafter(without=("midlayer",)), ERROR, "there is no layer: neither midlayer.* nor layers.0.*"),
    ("C9", drafter(without=("midlayer.self_attn.k", "midlayer.mlp.up")), ERROR, "has no mlp.up_proj and self_attn.k_proj, and"),
    ("C9", drafter(architectures=["Eagle3Qwen3ForCausalLM"]), ERROR, "the layer has no self_attn.q_norm and self_attn.k_norm"),
    (
        "C9",
        drafter(add={"midlayer.self_attn.q_norm.weight": ("BF16", (16,))}),
        ERROR,
        "only vLLM's Qwen3 class knows, and the class is LlamaForCausalLMEagle3. Write Eagle3Qwen3ForCausalLM into architectures",
    ),
    ("C9", drafter(**MLA), ERROR, "the layer has no self_attn.kv_a_proj_with_mqa and self_attn.kv_a_layernorm and"),
    (
        "C9",
        drafter(add={"aux_norm_low.weight": ("BF16", (64,))}),
        ERROR,
        "Rename aux_norm_low, aux_norm_mid and aux_norm_high to",
    ),
    ("C9", drafter(add={"head.weight": ("BF16", (64,))}), ERROR, "vLLM's EAGLE 3 classes have nothing called head.weight"),
    ("C9", drafter(without=("midlayer.hidden_norm",)), ERROR, "the layer has no hidden_norm, and vLLM would use what"),
    (
        "C9",
        drafter(add={"midlayer.self_attn.q_proj.weight": ("BF16", (64, 64))}),
        ERROR,
        "q_proj.weight has shape [64, 64], and the config promises [64, 128] (4 heads of 16 x twice the hidden size)",
    ),
    (
        "C9",
        drafter(add={"midlayer.self_attn.q_a_proj.weight": ("BF16", (8, 64))}, **MLA),
        ERROR,
        "must read twice the hidden size, 128",
    ),
    (
        "C9",
        drafter(add={"lm_head.weight": ("BF16", (256, 64))}),
        ERROR,
        "the config promises [128, 64] (draft vocabulary x hidden size)",
    ),
    ("C9", drafter(without=("lm_head",)), ERROR, "the target's cannot stand in: it has 256 tokens and the drafter 128"),
    ("C9", drafter(without=("lm_head", "d2t"), draft_vocab_size=256), PASS, "16 tensors"),
    ("C9", drafter(without=("d2t",)), ERROR, "d2t is missing, and the drafter has 128 tokens where the target has 256"),
    ("C9", target(vocab_size=512), PASS, "18 tensors"),
    ("C9", drafter(offsets=None), INFO, "the values of d2t could not be read"),
    ("C9", drafter(offsets=(0, 1)), ERROR, "d2t has 2 entries, and draft_vocab_size is 128"),
    (
        "C9",
        drafter(offsets=(*[0] * 127, 129)),
        ERROR,
        "d2t sends draft id 127 to 256, and the target has ids 0 to 255. Use the drafter",
    ),
    ("C9", drafter(offsets=(-1, *range(127))), ERROR, "d2t sends draft id 0 to -1"),
    ("C9", drafter(offsets=(0, -1, *range(126))), ERROR, "d2t sends draft ids 0 and 1 both to 0, and vLLM keeps the logit"),
    ("C9", drafter(offsets=(2, 0, -2, *range(3, 128))), PASS, "tensors have the names and shapes"),
    (
        "C9",
        drafter(offsets=tuple(range(0, 256, 2))),
        ERROR,
        "it looks like target ids, and vLLM expects offsets. Write d2t[i] = target id - i.",
    ),
    (
        "C9",
        lambda small: {"drafter": replace(small.drafter(), tensors=None)},
        INFO,
        "are not safetensors: their names, shapes and d2t could not",
    ),
    ("C10", {}, PASS, "eagle3"),
    ("C10", spec(method=None), ERROR, "has no method, and vLLM would guess it from the drafter's path. Name it"),
    ("C11", {}, PASS, "1 (target: 1)"),
    ("C11", both(spec(draft_tensor_parallel_size=1), args(tensor_parallel=4)), PASS, "1 (target: 4)"),
    (
        "C11",
        both(spec(draft_tensor_parallel_size=2), args(tensor_parallel=4)),
        ERROR,
        "is 2, and vLLM takes 1 or the target's, 4",
    ),
    ("C11", spec(tensor_parallel_size=1), ERROR, "where vLLM refuses it. Call it draft_tensor_parallel_size."),
    ("C12", {}, PASS, "the drafter is not quantised, and inherits nothing"),
    ("C12", args(moe_backend="cutlass"), WARNING, "inherits --moe-backend=cutlass and is not quantised"),
    ("C12", both(args(moe_backend="cutlass"), spec(moe_backend="triton")), PASS, "not quantised"),
    ("C12", args(kv_cache_dtype="fp8"), WARNING, "inherits --kv-cache-dtype=fp8"),
    (
        "C12",
        both(drafter(quantization_config={"quant_method": "fp8"}), spec(quantization="fp8")),
        WARNING,
        "names quantization fp8, and the drafter's config has its own",
    ),
    ("C13", {}, PASS, "one pipeline stage"),
    ("C13", args(pipeline_parallel=2), PASS, "2 pipeline stages with model type llama"),
    ("C13", both(args(pipeline_parallel=2), version("0.29.0")), ERROR, "vLLM 0.29.0 runs EAGLE 3 on one only. Use vLLM 0.30.0"),
    (
        "C13",
        both(args(pipeline_parallel=2), target(model_type="deepseek_v3")),
        ERROR,
        "vLLM does not hand hidden states of model type deepseek_v3 across them. Use tensor parallelism",
    ),
    ("C14", spec(**SCHEDULE), PASS, "a schedule on one data-parallel rank"),
    ("C14", both(spec(**SCHEDULE), args(data_parallel=2), version("0.25.0")), ERROR, "can deadlock vLLM 0.25.0. Use a fixed"),
    ("C14", both(spec(**SCHEDULE), args(data_parallel=2)), WARNING, "turns the schedule off with 2 data-parallel ranks"),
    ("C14", args(data_parallel=2), PASS, "does not follow the batch size"),
    ("C15", {}, INFO, "min_p or logit_bias with HTTP 400 under speculation: what clients send could not be checked"),
    (
        "C15",
        both(args(has_logits_processors=True), version("0.24.0")),
        ERROR,
        "V1 (the default of vLLM 0.24.0) refuses custom logits",
    ),
    ("C15", args(has_logits_processors=True), WARNING, "--logits-processors under speculation on model runner V2"),
    ("C15", {"speculative_config": {}}, SKIP, "there is no speculation"),
    ("C16", {"speculative_config": {}}, SKIP, "there is no speculation"),
    ("C16", {}, INFO, "whether clients use tools or JSON schemas could not be checked"),
    ("C16", args(structured_outputs_backend="lm-format-enforcer"), ERROR, "which vLLM refuses under speculation. Use xgrammar"),
    (
        "C16",
        both(args(has_tool_or_reasoning_parser=True), version("0.28.0")),
        WARNING,
        "'Failed to advance FSM' up to vLLM 0.28 (this is 0.28.0)",
    ),
    ("C16", both(target(model_type="kimi_k2"), version("0.26.0")), WARNING, "stopped vLLM 0.26.0 with a Kimi target"),
    ("C17", {}, PASS, "1 pipeline stage, model runner V2"),
    ("C17", args(pipeline_parallel=2, async_scheduling=True), PASS, "2 pipeline stages, model runner V2"),
    (
        "C17",
        both(args(pipeline_parallel=2, async_scheduling=True), V1),
        ERROR,
        "--async-scheduling with 2 pipeline stages, and model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0) refuses the two together",
    ),
    ("C18", {}, PASS, "vLLM 0.33.0 keeps whole prefixes"),
    ("C18", args(enable_prefix_caching=False), PASS, "prefix caching is off"),
    ("C18", version("0.32.0"), INFO, "computes the last block of each cached prefix again under EAGLE; 0.33.0 no longer does"),
    ("C18", args(has_kv_transfer_config=True), WARNING, "with --kv-transfer-config the last block"),
    ("C18", target(sliding_window=128), WARNING, "the target has windowed or linear layers"),
    ("C19", {}, PASS, "model runner V2: the default of vLLM 0.33.0"),
    ("C19", spec(parallel_drafting=True), PASS, "model runner V1: parallel drafting needs it"),
    ("C19", spec(parallel_drafting=True, **SCHEDULE), WARNING, "(parallel drafting needs it) has piecewise CUDA graphs only"),
    (
        "C20",
        {**version("0.23.0"), "is_version_from_tag": True},
        ERROR,
        "the version is from the tag of spec.engine.image. Use vLLM 0.24.0 or newer, or set spec.engine.version",
    ),
    ("C20", version("0.24.0"), PASS, "vLLM 0.24.0 is 0.24.0 or newer"),
    ("C20", version("0.23.0"), ERROR, "a request can stop vLLM 0.23.0 from afar when it speculates. Use vLLM 0.24.0 or newer."),
    ("C21", {}, PASS, "sequences of 2048"),
    ("C21", {"gpu_memory_bytes": None}, INFO, "no GPU memory was named, so that the fit could not be checked. Name it with"),
    ("C21", both(heavy(40), gpu(24), args(quantization="fp8")), WARNING, "--quantization=fp8 makes the target's smaller"),
    (
        "C21",
        both(heavy(40), gpu(24), args(offload_flag="--cpu-offload-gb=30")),
        WARNING,
        "--cpu-offload-gb=30 makes the target's smaller",
    ),
    ("C21", both(heavy(400), gpu(24), args(quantization="fp8")), ERROR, "cannot make them small enough"),
    ("C21", both(heavy(40, quantization_config={"a": 1}), gpu(24), args(quantization="fp8")), ERROR, "more than there is"),
    ("C21", both(heavy(40), gpu(24)), ERROR, "more than there is"),
    ("C21", gpu(2), ERROR, "more than there is, assuming that weights take the bytes that they have on disk"),
    (
        "C21",
        both(gpu(2.2), target(max_position_embeddings=10**6)),
        ERROR,
        "left for the KV cache, and one sequence of 1000000 tokens needs 1.07 GiB",
    ),
    (
        "C21",
        both(gpu(2.2), target(max_position_embeddings=15_000)),
        WARNING,
        "Expect preemptions; use a larger GPU",
    ),
    ("C21", lambda small: {"target": replace(small.target(), tensors=None)}, INFO, "the target's weights are not safetensors"),
    ("C22", speculators(), PASS, "trained for this target: example/target."),
    ("C22", drafter(metadata={"eagle.target": "Example/Target"}), PASS, "trained for this target: Example/Target."),
    ("C22", {}, INFO, "the drafter does not say which target it was trained for: only sizes could be compared"),
    (
        "C22",
        speculators(speculators_config={"verifier": {"name_or_path": "other/model"}}),
        WARNING,
        "the drafter was trained for other/model, and the target is example/target@abc. Make sure that the target is",
    ),
    ("C22", drafter(metadata={"eagle.target": "/data/model"}), INFO, "trained for the local folder /data/model, which"),
    ("C22", drafter(metadata={"eagle.target": "target"}), INFO, "trained for the local folder target, which cannot be compared"),
    ("C22", both(speculators(), target(name="/models/x")), INFO, "and the target is a folder: they could not be compared"),
    ("C23", {"speculative_config": {}, "drafter": None}, SKIP, "there is no speculation"),
    ("C23", {}, INFO, "acceptance depends on chat template, system prompt and length, which could not be checked"),
    ("C24", {}, PASS, "no LoRA adapters"),
    ("C24", args(enable_lora=True), WARNING, "LoRA adapters are on, and the drafter knows none of them"),
    ("C25", {}, PASS, "both 64"),
    (
        "C25",
        target(hidden_size=128),
        ERROR,
        "the drafter reads hidden states of 64 values, and the target's have 128. Use a drafter that was trained for this target",
    ),
    ("C25", target(hidden_size=None), INFO, "the target's config.json has no hidden_size"),
    ("C26", {}, PASS, "both 256, of which it drafts 128 (sizes only"),
    ("C26", target(vocab_size=512), ERROR, "the drafter's vocab_size is 256, and the target's is 512"),
    ("C26", drafter(draft_vocab_size=300), ERROR, "draft_vocab_size is 300, and the target has 256 tokens"),
    ("C26", drafter(drop=("vocab_size",)), INFO, "the drafter's config.json has no vocab_size"),
    ("C27", {}, PASS, "fc_norm and norm_output: the drafter is EAGLE 3.1"),
    ("C27", drafter(**V31_OFF, without=("fc_norm",)), PASS, "neither fc_norm nor norm_output: the drafter is plain EAGLE 3"),
    (
        "C27",
        drafter(drop=("norm_output",)),
        ERROR,
        (
            "there are weights fc_norm.N.weight, so the drafter is EAGLE 3.1, but its config does not say norm_output, "
            "which vLLM then takes "
            "for false; a 3.1 drafter served so lost more than a quarter of its accepted tokens (AL 2.08 instead of "
            "2.51 at K = 3) without "
            "an error. Write norm_output: true into its config.json, or false if it was trained without."
        ),
    ),
    ("C27", drafter(norm_output=False), WARNING, "fc_norm is there and norm_output is false: half of EAGLE 3.1. Leave it if"),
    ("C27", drafter(fc_norm=False, without=("fc_norm",)), WARNING, "norm_output is true without fc_norm or norm_before_fc"),
    ("C27", drafter(fc_norm=False, norm_before_fc=True, without=("fc_norm",)), PASS, "norm_before_fc and norm_output"),
    ("C28", {}, PASS, "eagle3, class LlamaForCausalLMEagle3"),
    ("C28", drafter(architectures=["LlamaForCausalLM"]), PASS, "class Eagle3LlamaForCausalLM"),
    (
        "C28",
        drafter(model_type="deepseek_v3", **MLA),
        ERROR,
        "vLLM takes for an MTP module whatever the method. Write model_type: deepseek_v2 into its config.json",
    ),
    ("C28", drafter(architectures=["DFlashDraftModel"]), ERROR, "the drafter is dflash, and the method is eagle3"),
    (
        "C28",
        drafter(architectures=["BertModel"]),
        ERROR,
        "the drafter's class is Eagle3BertModel, and vLLM has no such EAGLE 3 class",
    ),
    (
        "C28",
        both(spec(method="medusa"), drafter(architectures=["MedusaModel"])),
        ERROR,
        "vLLM 0.33.0 has no Medusa and MLP speculators. Use an EAGLE 3.1 drafter: `aerie catalog` names them.",
    ),
    (
        "C28",
        both(spec(method="dspark"), drafter(architectures=["Qwen3DSparkModel"]), version("0.24.0")),
        ERROR,
        "vLLM 0.24.0 has no DSpark drafters. Use vLLM 0.25.0 or newer.",
    ),
    ("C29", {}, PASS, "1 of nvidia.com/gpu for tensor x pipeline x data parallel = 1"),
    (
        "C29",
        args(tensor_parallel=4),
        ERROR,
        "the pod has 1 of nvidia.com/gpu, and tensor x pipeline x data parallel = 4. Set nvidia.com/gpu to 4",
    ),
    ("C29", {"gpu_count": 2}, WARNING, "the pod has 2 of nvidia.com/gpu"),
    ("C29", {"gpu_count": 2, "gpu_resource": "amd.com/gpu", **args(tensor_parallel=4)}, ERROR, "Set amd.com/gpu to 4"),
    (
        "C29",
        {"gpu_count": 2, "gpu_resource": "nvidia.com/mig-3g.40gb", **args(tensor_parallel=2)},
        WARNING,
        "no two instances of MIG",
    ),
    (
        "C29",
        {"gpu_count": None, "gpu_resource": "resourceClaims (DRA)"},
        INFO,
        "the pod asks for them by resourceClaims (DRA), and",
    ),
    ("C29", {"gpu_count": None, "gpu_resource": ""}, INFO, "the pod asks for no GPUs"),
    ("C31", {}, PASS, "the drafter's config names none"),
    ("C31", drafter(auto_map={"AutoModel": "x.Y"}), INFO, "which vLLM does not follow without --trust-remote-code"),
    (
        "C31",
        both(drafter(auto_map={"AutoModel": "x.Y"}), args(trust_remote_code=True)),
        WARNING,
        "--trust-remote-code has the engine run what it names. Read that code at the commit you pin",
    ),
    ("C28", both(drafter(model_type="qwen3_5"), version("0.22.0")), ERROR, "Write model_type: llama into its config.json"),
    ("C28", both(drafter(model_type="qwen4_exp"), version("0.29.0")), PASS, "eagle3, class"),
    ("C28", both(drafter(model_type="qwen4_exp"), version("0.30.0")), ERROR, "takes for an MTP module"),
    ("C29", {"gpu_count": None}, INFO, "whether that fits could not be checked"),
    ("C33", {}, PASS, "nothing says that the engine runs on CPU"),
    ("C33", {"image": "vllm/vllm-openai:v0.33.0"}, PASS, "nothing says"),
    (
        "C33",
        {"image": "me/vllm-openai-cpu:v0.33.0"},
        WARNING,
        "the image is me/vllm-openai-cpu:v0.33.0, and vLLM 0.33.0 on CPU draws",
    ),
    ("C33", {"environment": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, WARNING, "VLLM_CPU_KVCACHE_SPACE is set"),
    (
        "C33",
        version("0.32.0+cpu"),
        WARNING,
        "vLLM is 0.32.0+cpu, and vLLM 0.32.0+cpu on CPU draws wrong answers at temperatures above",
    ),
    ("C33", version("0.31.0+cpu"), WARNING, "(vLLM issue 55005) is not known. Send temperature 0 alone to this engine, run it"),
    ("C33", both({"speculative_config": {}}, version("0.32.0+cpu")), SKIP, "there is no speculation"),
    ("C34", {}, SKIP, "no further keys"),
    ("C34", spec(draft_sample_method="probabilistic"), PASS, "vLLM 0.33.0 knows draft_sample_method"),
    ("C34", both(spec(draft_sample_method="probabilistic"), version("0.20.2")), ERROR, "a key that vLLM 0.20.2"),
    ("C35", {}, PASS, "sleep mode is off"),
    ("C35", both({"drafter": None}, args(enable_sleep_mode=True)), SKIP, "there is no drafter"),
    (
        "C35",
        args(enable_sleep_mode=True),
        WARNING,
        "does not load the drafter's weights again after a sleep of level 2. Set --sleep-preserve-parameter-names=draft.*",
    ),
    ("C35", both(args(enable_sleep_mode=True), version("0.31.0")), WARNING, "Use level 1, or start pods again after level 2."),
    (
        "C35",
        args(enable_sleep_mode=True, sleep_preserve_parameter_names=("lm_head.*",)),
        WARNING,
        "does not load the drafter's weights again",
    ),
    (
        "C35",
        args(enable_sleep_mode=True, sleep_preserve_parameter_names=("lm_head.*", "draft.*")),
        PASS,
        "keeps the drafter's weights",
    ),
    ("C36", {}, PASS, "VLLM_USE_RUST_FRONTEND is not set"),
    ("C36", {"environment": {"VLLM_USE_RUST_FRONTEND": "0"}}, PASS, "is not set"),
    ("C36", {"environment": {"VLLM_USE_RUST_FRONTEND": "1"}}, INFO, "figures of single requests cannot be had"),
    ("C37", {}, PASS, "--kv-cache-dtype is auto"),
    ("C37", args(kv_cache_dtype="fp8"), PASS, "--kv-cache-dtype is fp8"),
    ("C37", both(args(kv_cache_dtype="float16", dtype="bfloat16"), version("0.32.0")), PASS, "--kv-cache-dtype is float16"),
    ("C37", args(kv_cache_dtype="float16", dtype="half"), PASS, "the model and its KV cache are float16"),
    (
        "C37",
        args(kv_cache_dtype="float16", dtype="bfloat16"),
        ERROR,
        "the model runs in bfloat16, which vLLM 0.33.0 refuses. Leave --kv-cache-dtype out, or set it to bfloat16.",
    ),
    ("C37", args(kv_cache_dtype="bfloat16", dtype="float"), ERROR, "runs in float32, which vLLM 0.33.0 refuses. Leave"),
    ("C37", both(target(dtype="bfloat16"), args(kv_cache_dtype="float16")), ERROR, "the model runs in bfloat16"),
    ("C37", both(target(dtype="bfloat16"), args(kv_cache_dtype="bfloat16")), PASS, "the model and its KV cache are bfloat16"),
    ("C37", both(target(dtype="float16"), args(kv_cache_dtype="bfloat16")), WARNING, "set --dtype=bfloat16 too"),
    ("C32", {}, PASS, "each tensor is in one file"),
    (
        "C32",
        shards("drafter", index={"fc.weight": "x1.safetensors", "gone.weight": "x1.safetensors", "lost": "x1.safetensors"}),
        ERROR,
        "the drafter's index says that 'gone.weight' is in x1.safetensors, and no file has it (nor 1 more). Download",
    ),
    (
        "C32",
        shards("drafter", index={"fc.weight": "x1.safetensors"}),
        INFO,
        "the drafter's index says that 'fc.weight' is in x1.safetensors, and it is in model.safetensors: vLLM reads both whole",
    ),
    (
        "C32",
        shards("target", {"lm_head.weight": ("BF16", (256, 64))}),
        WARNING,
        "model.safetensors and x1.safetensors both hold 'lm_head.weight', and vLLM keeps what it reads last. Remove the file",
    ),
    (
        "C32",
        shards("drafter", {"norm.weight": ("BF16", (64,))}, {"d2t": ("I64", (128,)), "norm.weight": ("BF16", (64,))}),
        WARNING,
        "files model.safetensors, x1.safetensors and x2.safetensors all hold 'norm.weight' (and files share 1 more)",
    ),
    (
        "C32",
        shards("target", {"lm_head.weight": ("BF16", (128, 64))}),
        ERROR,
        "both hold 'lm_head.weight', in the shapes [256, 64] and [128, 64], of which only one can be right. Remove",
    ),
    ("C32", lambda small: {"target": replace(small.target(), tensors=None)}, INFO, "the target's weights are not safetensors"),
    ("C32", shards("target", {"x": ("BF16", (1,))}), PASS, "each tensor is in one file"),
]


@pytest.mark.parametrize(("which", "change", "severity", "said"), CASES)
def test_what_it_says(small: Any, which: str, change: Change, severity: Severity, said: str) -> None:
    found = small.findings(which, **made(change, small))
    sentences = [finding.message for finding in found]
    matching = [finding for finding in found if said in finding.message]
    assert matching, sentences
    assert matching[0].severity is severity, sentences
    assert matching[0].message.startswith(f"{severity.glyph} {which} ")


def test_every_check_has_a_case_that_is_fine_and_one_that_is_not() -> None:
    for check in list_checks():
        severities = {severity for which, _, severity, _ in CASES if which == check.id}
        assert severities & {PASS, SKIP}, f"{check.id} has no case that passes"
        assert severities & {ERROR, WARNING, INFO}, f"{check.id} has no case that fails"
        assert check.max_severity in severities, f"{check.id} has no case of its worst"
    assert [check.id for check in list_checks()] == [f"C{number}" for number in range(1, 38)]


ORDER = [SKIP, PASS, INFO, WARNING, ERROR]


@pytest.mark.parametrize("change", [change for _, change, _, _ in CASES])
def test_every_report_is_complete(small: Any, change: Change) -> None:
    report = run_preflight(small.subject(**made(change, small)))
    worst = {check.id: check.max_severity for check in list_checks()}
    assert {finding.id for finding in report.findings} == worst.keys()
    for finding in report.findings:
        assert ORDER.index(finding.severity) <= ORDER.index(worst[finding.id])
        assert finding.evidence
        assert not finding.evidence.endswith(".")
        assert not finding.fix.endswith(".")
        assert finding.fix or finding.severity in (PASS, SKIP, INFO), f"{finding.id} names no way out"


def test_a_fitting_pair_is_let_through(small: Any) -> None:
    report = run_preflight(small.subject())
    assert report.passed
    assert not list(report.with_severity(WARNING))
    assert report.summary == "preflight passed: 6 notes, 30 passed"


def test_a_refusal_refuses_all(small: Any) -> None:
    report = run_preflight(small.subject(target=small.target(hidden_size=128)))
    assert not report.passed
    assert report.summary.startswith("preflight refused: 1 refused, ")
    assert report.to_json()["passed"] is False
    assert {"id": "C25", "title": "hidden size is the target's", "severity": "error"}.items() <= next(
        finding for finding in report.to_json()["findings"] if finding["id"] == "C25"
    ).items()


def test_without_a_drafter_what_is_about_one_is_skipped(small: Any) -> None:
    subject = PreflightInput(
        target=small.target(), drafter=None, version=Version.parse("0.33.0"), gpu_memory_bytes=80 * GIB, gpu_count=1
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


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONFIGS, CONFIGS, st.booleans(), SPECULATIVE)
def test_no_config_breaks_a_check(small: Any, target: Any, drafter: Any, over: bool, speculative: Any) -> None:
    base = small.subject(speculative_config=speculative)
    # On top of the sound ones, and alone.
    configs = ({**base.target.config, **target}, {**base.drafter.config, **drafter}) if over else (target, drafter)
    subject = replace(base, target=replace(base.target, config=configs[0]), drafter=replace(base.drafter, config=configs[1]))
    report = run_preflight(subject)
    assert {finding.id for finding in report.findings} == {check.id for check in list_checks()}
    assert all(finding.message for finding in report.findings)
