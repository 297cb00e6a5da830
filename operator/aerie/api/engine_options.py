"""The keys of vLLM's speculative config, as data: which of them spec.speculation.engineOptions takes, and why not the others.

A row is a key of `SpeculativeConfig` in vllm/config/speculative.py, looked up in the published wheels of vLLM 0.15.1 to 0.33.0:
0.21.0, of which there is no such wheel, counts as lacking what 0.22.0 brings. The schema of the field is made of the rows, and
docs/reference.md of the schema; `aerie.engine.speculative_config` holds what is given against a version of vLLM.

Guarantees: a key that is taken cannot change what the model answers, nor anything that another field of the resource says. The
schema keeps keys that it does not know, so that the operator refuses them by name; the API server would drop them in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from aerie.api.types.base import Json, Rule, rules

SOURCE = "vllm/config/speculative.py, SpeculativeConfig"
Kind = Literal["boolean", "integer", "number", "string", "array", "object"]
"""As JSON schema calls it."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the speculative config."""

    name: str
    kind: Kind
    since: str
    """The first release that has it; 0.15.1 is the oldest that was read."""
    what: str = ""
    """What it does, as sentences; empty where it is refused."""
    refused: str = ""
    """Why it is not taken and what to do instead, as a part of a sentence; empty where it is taken."""
    words: tuple[str, ...] = ()
    """Its values, where they are few."""
    least: int | None = None
    pattern: str = ""
    """Of its text."""
    runner: Literal[1, 2] | None = None
    """The only model runner of vLLM that obeys it; None: both do, or the drafter decides."""


_FIXED = "vLLM fills it in itself: leave it out"
_LOSSY = "it lets the drafter change what the model answers: leave it out"
_NO_MODEL = "it is for drafts without a drafter, which Aerie does not run: leave it out"

KEYS = (
    Key(
        "attention_backend",
        "string",
        "0.22.0",
        "Attention backend of the drafter, such as FLASH_ATTN. Default: the engine chooses.",
        pattern="^[A-Za-z0-9_]+$",
    ),
    Key(
        "code_revision",
        "string",
        "0.15.1",
        "Commit of the code that the drafter's repository brings, all 40 digits.",
        pattern="^[0-9a-f]{40}$",
    ),
    Key(
        "disable_eagle_block_drop",
        "boolean",
        "0.30.0",
        "Keeps the last block of each cached prefix, which the drafter cannot read whole: to measure what that costs.",
    ),
    Key(
        "disable_lookahead_block_hashes",
        "boolean",
        "0.33.0",
        "Drops the last block of each cached prefix, as releases before 0.33 do. Engines that share a KV store set it alike.",
    ),
    Key(
        "disable_padded_drafter_batch",
        "boolean",
        "0.15.1",
        "Drafts without padding, on model runner V1.",
        runner=1,
    ),
    Key(
        "draft_lm_head_quantization",
        "string",
        "0.33.0",
        "Quantises the drafter's copy of a head that it shares with the target, on model runner V2.",
        words=("fp8", "nvfp4"),
        runner=2,
    ),
    Key(
        "draft_tensor_parallel_size",
        "integer",
        "0.15.1",
        "Tensor parallel size of the drafter: 1 or the target's. Default: the target's.",
        least=1,
    ),
    Key("enforce_eager", "boolean", "0.15.1", "Runs the drafter without CUDA graphs. Default: as the target."),
    Key(
        "kv_cache_dtype",
        "string",
        "0.26.0",
        "Type of the drafter's KV cache, such as auto or fp8. Default: the target's.",
        pattern="^[A-Za-z0-9_]+$",
    ),
    Key(
        "max_model_len",
        "integer",
        "0.15.1",
        "Longest sequence, in tokens, that is drafted for. Default: the target's, or the drafter's if that is shorter.",
        least=1,
    ),
    Key(
        "moe_backend",
        "string",
        "0.19.0",
        "Mixture-of-experts backend of the drafter, such as triton. Default: the target's.",
        pattern="^[A-Za-z0-9_]+$",
    ),
    Key(
        "parallel_drafting", "boolean", "0.16.0", "All tokens in one pass, for drafters that are trained so (P-EAGLE).", runner=1
    ),
    Key(
        "quantization",
        "string",
        "0.15.1",
        "How the drafter's weights are quantised, where its config does not say.",
        pattern="^[A-Za-z0-9_-]+$",
    ),
    Key(
        "rejection_sample_method",
        "string",
        "0.22.0",
        "How drafts are verified: standard, token by token, or block, several at once (0.25 or newer, on model runner V2). "
        "Both are lossless. Default: standard.",
        words=("standard", "block"),
    ),
    Key(
        "use_local_argmax_reduction",
        "boolean",
        "0.17.0",
        "Finds the best draft on each tensor rank instead of gathering all logits. Not with draftSampling Probabilistic.",
    ),
    # ------------------------------------------------------------------------------------------- what other fields say
    Key("draft_sample_method", "string", "0.22.0", refused="it belongs in spec.speculation.draftSampling"),
    Key(
        "enable_adaptive_verification",
        "boolean",
        "0.28.0",
        refused="tuning decides on it: leave it out, and see spec.speculation.tuning",
    ),
    Key("method", "string", "0.15.1", refused="it belongs in spec.drafter.method"),
    Key("model", "string", "0.15.1", refused="it belongs in spec.drafter.source"),
    Key("num_speculative_tokens", "integer", "0.15.1", refused="it belongs in spec.speculation.tokens"),
    Key(
        "num_speculative_tokens_per_batch_size",
        "array",
        "0.24.0",
        refused="tuning decides on it: leave it out, and see spec.speculation.tuning",
    ),
    Key("revision", "string", "0.15.1", refused="it belongs in spec.drafter.source.huggingFace.revision"),
    Key("tensor_parallel_size", "integer", "0.15.1", refused="vLLM refuses it: call it draft_tensor_parallel_size"),
    # -------------------------------------------------------------------------------------------------- lossy verification
    Key("fly_entropy_threshold", "number", "0.33.0", refused=_LOSSY),
    Key("fly_entropy_top_k", "integer", "0.33.0", refused=_LOSSY),
    Key("fly_window_size", "integer", "0.33.0", refused=_LOSSY),
    Key("synthetic_acceptance_length", "number", "0.20.0", refused=_LOSSY),
    Key("synthetic_acceptance_rates", "array", "0.20.0", refused=_LOSSY),
    # ----------------------------------------------------------------------- other methods than those of spec.drafter
    Key("dspark_draft_topk", "integer", "0.28.0", refused="it is for DSpark drafters, which Aerie does not run: leave it out"),
    Key("index_share_for_mtp_iteration", "boolean", "0.29.0", refused="it is for MTP, which Aerie does not run: leave it out"),
    Key("prompt_lookup_max", "integer", "0.15.1", refused=_NO_MODEL),
    Key("prompt_lookup_min", "integer", "0.15.1", refused=_NO_MODEL),
    Key("suffix_decoding_max_cached_requests", "integer", "0.15.1", refused=_NO_MODEL),
    Key("suffix_decoding_max_spec_factor", "number", "0.15.1", refused=_NO_MODEL),
    Key("suffix_decoding_max_tree_depth", "integer", "0.15.1", refused=_NO_MODEL),
    Key("suffix_decoding_min_token_prob", "number", "0.15.1", refused=_NO_MODEL),
    Key(
        "use_heterogeneous_vocab",
        "boolean",
        "0.25.0",
        refused="it is for whole draft models, which Aerie does not run: leave it out",
    ),
    Key("xpress_topc", "integer", "0.33.0", refused="it is for XPress drafters, which Aerie does not run: leave it out"),
    # ---------------------------------------------------------------------------------------------- the engine's own
    Key(
        "draft_load_config",
        "object",
        "0.17.0",
        refused="drafter and target are loaded alike: leave it out, and set --load-format in spec.engine.args",
    ),
    Key("draft_model_config", "object", "0.15.1", refused=_FIXED),
    Key("draft_parallel_config", "object", "0.15.1", refused=_FIXED),
    Key("target_model_config", "object", "0.15.1", refused=_FIXED),
    Key("target_parallel_config", "object", "0.15.1", refused=_FIXED),
)
"""All keys that vLLM 0.26.0 to 0.33.0 have; first those that are taken."""

BY_NAME = {key.name: key for key in KEYS}


def _schema(key: Key) -> Json:
    bounds: Json = {"enum": list(key.words), "pattern": key.pattern, "minimum": key.least}
    found = {name: value for name, value in bounds.items() if value not in ([], "", None)}
    if key.kind == "string" and not key.words:
        found["maxLength"] = 253
    if key.refused:
        return {"type": key.kind, **found, "description": "Refused.", **rules(Rule("false", key.refused))}
    since = "" if key.since == "0.15.1" else f" vLLM {key.since} or newer."
    return {"type": key.kind, **found, "description": key.what + since}


EngineOptions = Annotated[
    dict[str, Any],
    Field(max_length=64),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 64,
            "x-kubernetes-preserve-unknown-fields": True,
            # Lists and objects are refused by the operator: a rule at one would have to know what is in it.
            "properties": {key.name: _schema(key) for key in KEYS if key.kind not in ("array", "object")},
        }
    ),
]
"""Further keys of the speculative config, as vLLM calls them."""
