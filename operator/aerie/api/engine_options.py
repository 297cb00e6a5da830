"""Keys of vLLM's speculative config, as data: the keys that spec.speculation.engineOptions allows, and why it rejects the
others.

A row is a key of `SpeculativeConfig` in vllm/config/speculative.py, read from the published wheels of vLLM 0.15.1 to 0.33.0.
0.21.0 has no such wheel, and counts as lacking what 0.22.0 adds. The schema of the field is generated from the rows, and
docs/reference/resource.md from the schema. `aerie.engine.speculative_config` checks the user's options against a version of vLLM.

Guarantees: an allowed key can change neither the model's answers nor anything that another field of the resource sets. The
schema preserves unknown keys, so that the operator rejects them by name; the API server would drop them silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from aerie.api.types.base import JsonObject, ValidationRule, schema_extra

JsonSchemaType = Literal["boolean", "integer", "number", "string", "array", "object"]
"""Type of a value, in the words of JSON Schema."""


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One key of the speculative config."""

    name: str
    json_type: JsonSchemaType
    since_version: str
    """First release with the key; 0.15.1 is the oldest release that was read."""
    description: str = ""
    """Description in full sentences; empty for a rejected key."""
    rejection_reason: str = ""
    """Why the key is rejected and what to do instead, as a part of a sentence; empty for an allowed key."""
    allowed_values: tuple[str, ...] = ()
    """All allowed values, where they are few."""
    minimum: int | None = None
    pattern: str = ""
    """Regular expression of a string value."""
    model_runner: Literal[1, 2] | None = None
    """The only model runner of vLLM that obeys the key; None: both do, or the drafter decides."""


_FILLED_BY_VLLM = "vLLM sets it: leave it out"
_LOSSY_VERIFICATION = "it lets the drafter change the model's outputs: leave it out"
_DRAFTERLESS_METHOD = "it is for speculation without a drafter, which Aerie does not run: leave it out"

ENGINE_OPTIONS = (
    EngineOption(
        "attention_backend",
        "string",
        "0.22.0",
        "Attention backend of the drafter, such as FLASH_ATTN. Default: the engine chooses.",
        pattern="^[A-Za-z0-9_]+$",
    ),
    EngineOption(
        "code_revision",
        "string",
        "0.15.1",
        "Commit of the code in the drafter's repository, all 40 digits.",
        pattern="^[0-9a-f]{40}$",
    ),
    EngineOption(
        "disable_eagle_block_drop",
        "boolean",
        "0.30.0",
        "Keeps the last block of each cached prefix, which the drafter cannot read completely, to measure what dropping costs.",
    ),
    EngineOption(
        "disable_lookahead_block_hashes",
        "boolean",
        "0.33.0",
        "Drops the last block of each cached prefix, as releases before 0.33 do. Engines with a shared KV store need one value.",
    ),
    EngineOption(
        "disable_padded_drafter_batch",
        "boolean",
        "0.15.1",
        "Drafts without padding, on model runner V1.",
        model_runner=1,
    ),
    EngineOption(
        "draft_lm_head_quantization",
        "string",
        "0.33.0",
        "Quantises the drafter's copy of a head that it shares with the target, on model runner V2.",
        allowed_values=("fp8", "nvfp4"),
        model_runner=2,
    ),
    EngineOption(
        "draft_tensor_parallel_size",
        "integer",
        "0.15.1",
        "Tensor parallel size of the drafter: 1 or the target's. Default: the target's.",
        minimum=1,
    ),
    EngineOption("enforce_eager", "boolean", "0.15.1", "Runs the drafter without CUDA graphs. Default: as the target."),
    EngineOption(
        "kv_cache_dtype",
        "string",
        "0.26.0",
        "Type of the drafter's KV cache, such as auto or fp8. Default: the target's.",
        pattern="^[A-Za-z0-9_]+$",
    ),
    EngineOption(
        "max_model_len",
        "integer",
        "0.15.1",
        "Maximum length of sequences with drafts, in tokens. Default: the target's, or the drafter's if that is shorter.",
        minimum=1,
    ),
    EngineOption(
        "moe_backend",
        "string",
        "0.19.0",
        "Mixture-of-experts backend of the drafter, such as triton. Default: the target's.",
        pattern="^[A-Za-z0-9_]+$",
    ),
    EngineOption(
        "parallel_drafting",
        "boolean",
        "0.16.0",
        "Drafts all tokens in one pass, for drafters that are trained for it (P-EAGLE).",
        model_runner=1,
    ),
    EngineOption(
        "quantization",
        "string",
        "0.15.1",
        "Quantisation of the drafter's weights, if its config does not name it.",
        pattern="^[A-Za-z0-9_-]+$",
    ),
    EngineOption(
        "rejection_sample_method",
        "string",
        "0.22.0",
        "Verification of drafts: standard, token by token, or block, several at once (0.25 or newer, on model runner V2). "
        "Both are lossless. Default: standard.",
        allowed_values=("standard", "block"),
    ),
    EngineOption(
        "use_local_argmax_reduction",
        "boolean",
        "0.17.0",
        "Finds the best draft on each tensor rank instead of gathering all logits. Not with draftSampling Probabilistic.",
    ),
    # ------------------------------------------------------------------------------------------- set by other fields
    EngineOption("draft_sample_method", "string", "0.22.0", rejection_reason="it belongs in spec.speculation.draftSampling"),
    EngineOption(
        "enable_adaptive_verification",
        "boolean",
        "0.28.0",
        rejection_reason="tuning sets it: leave it out, and see spec.speculation.tuning",
    ),
    EngineOption("method", "string", "0.15.1", rejection_reason="it belongs in spec.drafter.method"),
    EngineOption("model", "string", "0.15.1", rejection_reason="it belongs in spec.drafter.source"),
    EngineOption(
        "num_speculative_tokens", "integer", "0.15.1", rejection_reason="it belongs in spec.speculation.numSpeculativeTokens"
    ),
    EngineOption(
        "num_speculative_tokens_per_batch_size",
        "array",
        "0.24.0",
        rejection_reason="tuning sets it: leave it out, and see spec.speculation.tuning",
    ),
    EngineOption("revision", "string", "0.15.1", rejection_reason="it belongs in spec.drafter.source.huggingFace.revision"),
    EngineOption(
        "tensor_parallel_size", "integer", "0.15.1", rejection_reason="vLLM rejects it: use draft_tensor_parallel_size instead"
    ),
    # -------------------------------------------------------------------------------------------------- lossy verification
    EngineOption("fly_entropy_threshold", "number", "0.33.0", rejection_reason=_LOSSY_VERIFICATION),
    EngineOption("fly_entropy_top_k", "integer", "0.33.0", rejection_reason=_LOSSY_VERIFICATION),
    EngineOption("fly_window_size", "integer", "0.33.0", rejection_reason=_LOSSY_VERIFICATION),
    EngineOption("synthetic_acceptance_length", "number", "0.20.0", rejection_reason=_LOSSY_VERIFICATION),
    EngineOption("synthetic_acceptance_rates", "array", "0.20.0", rejection_reason=_LOSSY_VERIFICATION),
    # ----------------------------------------------------------------------- methods that spec.drafter does not offer
    EngineOption(
        "dspark_draft_topk",
        "integer",
        "0.28.0",
        rejection_reason="it is for DSpark drafters, which Aerie does not run: leave it out",
    ),
    EngineOption(
        "index_share_for_mtp_iteration",
        "boolean",
        "0.29.0",
        rejection_reason="it is for MTP, which Aerie does not run: leave it out",
    ),
    EngineOption("prompt_lookup_max", "integer", "0.15.1", rejection_reason=_DRAFTERLESS_METHOD),
    EngineOption("prompt_lookup_min", "integer", "0.15.1", rejection_reason=_DRAFTERLESS_METHOD),
    EngineOption("suffix_decoding_max_cached_requests", "integer", "0.15.1", rejection_reason=_DRAFTERLESS_METHOD),
    EngineOption("suffix_decoding_max_spec_factor", "number", "0.15.1", rejection_reason=_DRAFTERLESS_METHOD),
    EngineOption("suffix_decoding_max_tree_depth", "integer", "0.15.1", rejection_reason=_DRAFTERLESS_METHOD),
    EngineOption("suffix_decoding_min_token_prob", "number", "0.15.1", rejection_reason=_DRAFTERLESS_METHOD),
    EngineOption(
        "use_heterogeneous_vocab",
        "boolean",
        "0.25.0",
        rejection_reason="it is for whole draft models, which Aerie does not run: leave it out",
    ),
    EngineOption(
        "xpress_topc", "integer", "0.33.0", rejection_reason="it is for XPress drafters, which Aerie does not run: leave it out"
    ),
    # ---------------------------------------------------------------------------------------------- set by the engine itself
    EngineOption(
        "draft_load_config",
        "object",
        "0.17.0",
        rejection_reason="drafter and target are loaded in the same way: leave it out, and set --load-format in spec.engine.args",
    ),
    EngineOption("draft_model_config", "object", "0.15.1", rejection_reason=_FILLED_BY_VLLM),
    EngineOption("draft_parallel_config", "object", "0.15.1", rejection_reason=_FILLED_BY_VLLM),
    EngineOption("target_model_config", "object", "0.15.1", rejection_reason=_FILLED_BY_VLLM),
    EngineOption("target_parallel_config", "object", "0.15.1", rejection_reason=_FILLED_BY_VLLM),
)
"""All keys of vLLM 0.26.0 to 0.33.0, the allowed ones first."""

ENGINE_OPTIONS_BY_NAME = {option.name: option for option in ENGINE_OPTIONS}


def _option_schema(option: EngineOption) -> JsonObject:
    bounds: JsonObject = {"enum": list(option.allowed_values), "pattern": option.pattern, "minimum": option.minimum}
    keywords = {name: value for name, value in bounds.items() if value not in ([], "", None)}
    if option.json_type == "string" and not option.allowed_values:
        keywords["maxLength"] = 253
    if option.rejection_reason:
        return {
            "type": option.json_type,
            **keywords,
            "description": "Rejected.",
            **schema_extra(ValidationRule("false", option.rejection_reason)),
        }
    since = "" if option.since_version == "0.15.1" else f" vLLM {option.since_version} or newer."
    return {"type": option.json_type, **keywords, "description": option.description + since}


EngineOptions = Annotated[
    dict[str, Any],
    Field(max_length=64),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 64,
            "x-kubernetes-preserve-unknown-fields": True,
            # The operator rejects lists and objects: a rule on one would need a schema of its content.
            "properties": {
                option.name: _option_schema(option) for option in ENGINE_OPTIONS if option.json_type not in ("array", "object")
            },
        }
    ),
]
"""Further keys of the speculative config, with vLLM's names."""
