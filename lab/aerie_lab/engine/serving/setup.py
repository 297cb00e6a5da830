"""Builds the engine that vLLM's arguments and the simulation's options describe, or raises vLLM's error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.engine.releases import Version
from aerie_lab.engine.performance_model.acceptance import Acceptance, conditionals_from_rates
from aerie_lab.engine.performance_model.request import EngineSettings
from aerie_lab.engine.serving.arguments import SimulatorArguments
from aerie_lab.engine.serving.drafter import DrafterProfile, inspect_drafter
from aerie_lab.engine.serving.files import EngineError, read_hub_files, read_model_config
from aerie_lab.engine.serving.options import SimulatorOptions

log = logging.getLogger("aerie_lab.engine")
_CONTEXT_CUT_VERSION = Version.parse("0.33.0")

# The fields of vllm/config/speculative.py, SpeculativeConfig (0.32.0), that a user may give.
_SPECULATION_FIELDS = """
enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization moe_backend
attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max
prompt_lookup_min parallel_drafting num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config
rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
draft_sample_method dspark_draft_topk
"""
_METHODS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp")
_PYDANTIC_ERRORS_URL_HINT = "For further information visit https://errors.pydantic.dev/2.14/v/"


@dataclass(frozen=True)
class EngineSetup:
    """An engine ready to be started."""

    settings: EngineSettings
    acceptance: Mapping[str, Acceptance]
    """Acceptance per traffic class, with the drafter's effect."""
    drafter: DrafterProfile | None
    cache_config: dict[str, str]
    """Labels of vllm:cache_config_info."""


def prepare_engine(arguments: SimulatorArguments, options: SimulatorOptions) -> EngineSetup:
    """Return the engine. Raises EngineError where vLLM ends with exit status 1."""
    longest = _read_max_positions(arguments.model, arguments.revision)
    if arguments.max_model_len not in (None, -1) and longest is not None and arguments.max_model_len > longest:
        raise EngineError(
            f"Value error, User-specified max_model_len ({arguments.max_model_len}) is greater than the derived max_model_len "
            f"(max_position_embeddings={longest} or model_max_length=None in model's config.json)."
        )
    requested_length = None if arguments.max_model_len == -1 else arguments.max_model_len
    speculation = arguments.speculative_config
    drafter = _read_drafter(speculation) if speculation is not None else None
    if arguments.per_request_spec_decode_metrics != "none" and speculation is None:
        raise _build_validation_error(
            "--per-request-spec-decode-metrics requires speculative decoding to be enabled (via --speculative-config).",
            "VllmConfig",
        )
    block = arguments.block_size or 16
    schedule = (speculation or {}).get("num_speculative_tokens_per_batch_size")
    try:
        settings = EngineSettings(
            max_num_seqs=arguments.max_num_seqs or 256,
            max_num_batched_tokens=arguments.max_num_batched_tokens or 8192,
            max_model_len=_max_context_tokens(requested_length or longest or 32768, drafter, options.version),
            block_size=block,
            num_blocks=arguments.num_gpu_blocks_override or max(options.kv_tokens // block, 2),
            num_speculative_tokens=int(speculation["num_speculative_tokens"]) if speculation is not None else None,
            k_schedule=tuple((int(a), int(b), int(k)) for a, b, k in schedule) if schedule else None,
            drops_last_block=drafter is not None and drafter.drops_last_block,
            enable_prefix_caching=arguments.enable_prefix_caching,
        )
    except ValueError as error:
        raise EngineError(f"ValueError: {error}") from error
    return EngineSetup(settings, compute_acceptance(options, drafter), drafter, _build_cache_config(settings))


def compute_acceptance(options: SimulatorOptions, drafter: DrafterProfile | None) -> Mapping[str, Acceptance]:
    """Return the acceptance per traffic class with a drafter."""
    if not options.apply_drafter_effect:
        return options.acceptance
    return {name: _apply_drafter(drafter, each) for name, each in options.acceptance.items()}


def _max_context_tokens(tokens: int, drafter: DrafterProfile | None, version: str) -> int:
    """Return the context length of a model of so many tokens: from 0.33 on it is limited to the drafter's positions.

    vLLM only logs a warning (`_limit_max_model_len_to_draft`).
    """
    if (
        drafter is None
        or drafter.max_positions is None
        or Version.parse(version) < _CONTEXT_CUT_VERSION
        or drafter.max_positions >= tokens
    ):
        return tokens
    log.warning(
        "The draft model's max_model_len (%d) is smaller than the target model's (%d) and the V2 model runner can't skip "
        "speculation for longer sequences; reducing max_model_len to %d.",
        *(drafter.max_positions, tokens, drafter.max_positions),
    )
    return drafter.max_positions


def _read_max_positions(model: str, revision: str | None) -> int | None:
    """Return max_position_embeddings of the model; None where neither files nor a Hub are available."""
    folder, files = Path(model), read_hub_files(model, revision)
    if files is None and not folder.is_absolute() and not folder.exists():
        return None
    config = read_model_config(folder) if files is None else files.config
    max_positions = config.get("text_config", config).get("max_position_embeddings")
    return int(max_positions) if max_positions else None


def _read_drafter(speculation: dict[str, Any]) -> DrafterProfile:
    for key in speculation:
        if key not in _SPECULATION_FIELDS.split():
            raise EngineError(
                f"pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n{key}\n"
                f"  Unexpected keyword argument [type=unexpected_keyword_argument, input_value={speculation[key]!r}, "
                f"input_type={type(speculation[key]).__name__}]\n    {_PYDANTIC_ERRORS_URL_HINT}unexpected_keyword_argument"
            )
    count, model = speculation.get("num_speculative_tokens"), speculation.get("model")
    method = speculation.get("method") or _guess_method(str(model or ""))
    if not isinstance(count, int) or count < 1:
        raise _build_validation_error(
            "num_speculative_tokens must be provided with speculative model unless the draft model config contains an "
            "n_predict parameter."
            if count is None
            else f"Expected num_speculative_tokens to be greater than zero ({count})."
        )
    if method in _METHODS_WITHOUT_MODEL:
        return DrafterProfile(method, method)
    if not model:
        raise _build_validation_error("num_speculative_tokens was provided but without speculative model.")
    return inspect_drafter(method, str(model), speculation.get("revision"))


def _guess_method(path: str) -> str:
    """Return the method that vLLM guesses from the model's path."""
    return next((method for method in ("eagle3", "eagle") if method in path.lower()), "draft_model")


def _build_validation_error(message: str, config: str = "SpeculativeConfig") -> EngineError:
    return EngineError(
        f"pydantic_core._pydantic_core.ValidationError: 1 validation error for {config}\n"
        f"  Value error, {message} [type=value_error]\n    {_PYDANTIC_ERRORS_URL_HINT}value_error"
    )


def _apply_drafter(drafter: DrafterProfile | None, acceptance: Acceptance) -> Acceptance:
    if drafter is None:
        return acceptance
    if drafter.acceptance_rates is not None:
        acceptance = Acceptance(conditionals_from_rates(drafter.acceptance_rates), acceptance.spread)
    return acceptance.shift_logits(*drafter.logit_shifts)


def _build_cache_config(settings: EngineSettings) -> dict[str, str]:
    """Return the labels as vLLM 0.32.0 on CPU has them; sizes are the simulation's."""
    size = settings.num_blocks * settings.block_size
    return {
        "_block_size_resolved": "True",
        "block_size": str(settings.block_size),
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": str(settings.block_size),
        "enable_mamba_shared_prefix_checkpoint": "False",
        "enable_prefix_caching": str(settings.enable_prefix_caching),
        "gpu_memory_utilization": "0.92",
        "hash_block_size": "None",
        "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_layout": "None",
        "kv_cache_max_concurrency": str(size / settings.max_model_len),
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(size),
        "kv_offloading_backend": "native",
        "kv_offloading_size": "None",
        "kv_sharing_fast_prefill": "False",
        "mamba_block_size": "None",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": "None",
        "mamba_ssm_cache_dtype": "float32",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(settings.num_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": "None",
        "replayssm_buffer_len": "16",
        "skip_page_size_padded": "None",
        "sliding_window": "None",
        "swa_bounded_replay": "True",
        "use_kda_recoverssm": "False",
        "use_replayssm": "False",
        "user_specified_block_size": "False",
    }
