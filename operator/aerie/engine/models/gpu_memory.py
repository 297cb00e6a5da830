"""Estimates whether target, drafter and their KV caches fit a GPU, before one is asked for; with every assumption in words.

Exact: the bytes of the weights, because the headers give them, and the KV cache's bytes per token, because the configs do.
Assumed, and printed: that weights split evenly over tensor and pipeline ranks, how they are stored once loaded, and what
activations, CUDA graphs and the runtime take, which only the engine's own profile run knows.
Experts (tensors with `.experts.` in their name) are split over data-parallel ranks too, as vLLM does with and without expert
parallelism (model_executor/layers/fused_moe/config.py, flatten_tp_across_dp). Where an argument makes the weights smaller than on
disk, by quantising them at the start or by keeping a part on the CPU, the estimate has a lower bound beside it.
Not modelled: hybrid models' fixed states, multimodal encoders' activations, copies of experts (EPLB).

Per GPU of one pipeline stage, in bytes:

    |<------------------------------- gpu * utilization --------------------------------->|
    | target / (TP * PP) | drafter | draft logits | reserve | KV cache of target + drafter |

Sources: KV layouts vllm/v1/kv_cache_interface.py (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec); the drafter's `fc`
and norms are replicated over tensor ranks, the rest is split (vllm/model_executor/models/llama_eagle3.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.engine.arguments import DEFAULT_GPU_MEMORY_UTILIZATION
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.models.config import AttentionConfig, parse_drafter_model, parse_target_model

GIB = 2**30
RESERVE_BYTES = 2 * GIB
"""Bytes for activations, CUDA graphs and the CUDA runtime. An assumption, not a measurement: the engine profiles its own."""
DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
QUANTIZED_KV_CACHE_BYTES = {"fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "fp8_inc": 1.0, "fp8_per_token_head": 1.0,
                "int8_per_token_head": 1.0, "nvfp4": 0.5625, "nvfp4_4over6": 0.5625, "int4_per_token_head": 0.5}  # fmt: skip
"""Bytes of one cached element; nvfp4 has one 8-bit scale for 16 values, the scales per token and head are left out."""
_REPLICATED_TENSOR_PARTS = ("fc.", "fc_norm", "norm.", "layernorm", "hidden_norm", "d2t", "t2d")


@dataclass(frozen=True)
class DraftLogits:
    """What the engine keeps of the drafter's distribution while a draft is verified: numbers of tokens x vocabulary x requests.

    Model runner V2 keeps the logits of all places, on every GPU whole: float32 up to vLLM 0.27, the model's type from 0.28 on
    (vllm/v1/worker/gpu/spec_decode/speculator.py, draft_logits). V1 keeps float32 probabilities of the requests that run
    (vllm/v1/spec_decode/llm_base_proposer.py, _last_draft_probs).
    """

    num_speculative_tokens: int
    always_float32: bool
    """Whether a number takes four bytes whatever the model's type."""
    max_num_seqs: int | None = None
    """--max-num-seqs; None: vLLM's default."""

    def resolve_max_num_seqs(self, gpu_memory_bytes: int | None) -> int:
        """Requests; vLLM's default follows the GPU's memory (vllm/engine/arg_utils.py; A100 and GB10 have the smaller one)."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return 1024 if gpu_memory_bytes is not None and gpu_memory_bytes >= 70 * GIB else 256


@dataclass(frozen=True)
class MemoryLayout:
    """How the engine spreads the models and what it keeps: the arguments that decide about memory."""

    gpu_memory_bytes: int | None
    """Memory of one GPU. None: the user has named none, so nothing can be refused."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    quantization: str | None = None
    """--quantization, where the target's config has none: weights are quantised as they are loaded."""
    offload_flag: str | None = None
    """The flag that keeps a part of the target's weights on the CPU."""
    draft_tensor_parallel: int | None = None
    """None: as the target."""
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    max_model_len: int | None = None
    """None: what the target's config allows."""
    dtype: str | None = None
    """--dtype, where it is not auto."""
    kv_cache_dtype: str | None = None
    draft_kv_cache_dtype: str | None = None
    draft_logits: DraftLogits | None = None
    """Where drafts are drawn by the drafter's probabilities."""
    reserve_bytes: int = RESERVE_BYTES


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per GPU. None: the checkpoint does not say."""

    target_weight_bytes: int | None
    drafter_weight_bytes: int | None
    target_kv_bytes_per_token: float | None
    """Bytes for one more token of a sequence that is shorter than any window."""
    drafter_kv_bytes_per_token: float | None
    max_sequence_tokens: int | None
    """Tokens."""
    max_sequence_kv_bytes: float | None
    """Bytes for one sequence of that length, windows considered, target and drafter together."""
    kv_cache_bytes: float | None
    """Bytes left for the KV cache; negative where the weights alone do not fit. None without a GPU's size or weights."""
    assumptions: tuple[str, ...]
    draft_logits_bytes: int = 0
    """Bytes that drawn drafts keep."""
    min_target_weight_bytes: int | None = None
    """A lower bound of `target_weights`, where arguments make them smaller than on disk; else equal to it."""

    @property
    def may_fit(self) -> bool:
        """Whether one sequence may fit if the target's weights take no more than their lower bound."""
        if self.kv_cache_bytes is None or self.target_weight_bytes is None or self.min_target_weight_bytes is None:
            return True
        room = self.kv_cache_bytes + self.target_weight_bytes - self.min_target_weight_bytes
        return room > 0 and room >= (self.max_sequence_kv_bytes or 0)

    @property
    def kv_cache_tokens(self) -> int | None:
        """How many tokens the KV cache holds, windows not considered."""
        if self.kv_cache_bytes is None or self.target_kv_bytes_per_token is None or self.drafter_kv_bytes_per_token is None:
            return None
        per_token = self.target_kv_bytes_per_token + self.drafter_kv_bytes_per_token
        return max(0, int(self.kv_cache_bytes / per_token)) if per_token else None

    @property
    def kv_cache_sequences(self) -> float | None:
        """How many sequences of the longest length it holds."""
        if self.kv_cache_bytes is None or not self.max_sequence_kv_bytes:
            return None
        return max(0.0, self.kv_cache_bytes / self.max_sequence_kv_bytes)


def estimate_memory(target: Checkpoint, drafter: Checkpoint | None, layout: MemoryLayout) -> MemoryEstimate:
    """The estimate for one GPU of the last pipeline stage, which also holds the drafter. Never raises."""
    assumptions = []
    ranks = layout.tensor_parallel * layout.pipeline_parallel
    model = parse_target_model(target.config)
    target_weights = _target_weight_bytes(target, layout, ranks)
    least = None if target_weights is None else _min_weight_bytes(target_weights, layout)
    spread = f", experts over {ranks * layout.data_parallel}" if layout.data_parallel > 1 and _expert_bytes(target) else ""
    assumptions.append(
        "weights take the bytes that they have on disk"
        + (f", split evenly over {ranks} GPU{'s' if ranks > 1 else ''}{spread}" if ranks > 1 or spread else "")
        + ("; the engine may store float32 weights as 16 bits" if _has_float32_tensors(target) else "")
    )
    drafter_weights: int | None = 0
    draft_kv: float | None = 0.0
    draft_attention = None
    logits = 0
    if drafter is not None:
        draft_model = parse_drafter_model(drafter.config)
        draft_ranks = layout.draft_tensor_parallel or layout.tensor_parallel
        drafter_weights = _drafter_weight_bytes(drafter, draft_ranks)
        draft_attention = draft_model.attention
        # The drafter runs in the target's dtype, and caches in the target's type unless it is given its own.
        kind = layout.draft_kv_cache_dtype or layout.kv_cache_dtype
        draft_width = _element_bytes(kind, layout.dtype or model.dtype)
        draft_kv = _kv_bytes_per_token(draft_attention, draft_ranks, 1, draft_width)
        if layout.draft_logits is not None:
            logits, told = _estimate_draft_logits(
                layout.draft_logits, layout, model.dtype, draft_model.vocab_size or model.vocab_size or 0
            )
            assumptions.append(told)
    else:
        draft_width = 0.0
    width = _element_bytes(layout.kv_cache_dtype, layout.dtype or model.dtype)
    target_kv = _kv_bytes_per_token(model.attention, layout.tensor_parallel, layout.pipeline_parallel, width)
    kind = layout.kv_cache_dtype or "auto"
    assumptions.append(
        f"the KV cache has {width:g} bytes per element (--kv-cache-dtype {kind}, model {model.dtype or 'unknown'})"
    )
    if model.attention.linear_layer_count:
        assumptions.append(f"the states of {model.attention.linear_layer_count} layers without a KV cache are not counted")
    longest = layout.max_model_len or model.max_position
    sequence = None
    if longest and target_kv is not None and draft_kv is not None:
        sequence = _sequence_kv_bytes(model.attention, target_kv, longest)
        sequence += _sequence_kv_bytes(draft_attention, draft_kv, longest) if draft_attention else 0.0
    room = None
    if layout.gpu_memory_bytes is not None and target_weights is not None and drafter_weights is not None:
        room = (
            layout.gpu_memory_bytes * layout.gpu_memory_utilization
            - target_weights
            - drafter_weights
            - logits
            - layout.reserve_bytes
        )
        assumptions.append(
            f"the engine may use {layout.gpu_memory_utilization:.0%} of {layout.gpu_memory_bytes / GIB:.1f} GiB, of which "
            f"{layout.reserve_bytes / GIB:g} GiB "
            "go to activations, CUDA graphs and the runtime"
        )
    said = tuple(assumptions)
    return MemoryEstimate(target_weights, drafter_weights, target_kv, draft_kv, longest, sequence, room, said, logits, least)


def _estimate_draft_logits(drawn: DraftLogits, layout: MemoryLayout, dtype: str | None, vocabulary: int) -> tuple[int, str]:
    """Bytes, and how they were reckoned."""
    requests = drawn.resolve_max_num_seqs(layout.gpu_memory_bytes)
    element = 4 if drawn.always_float32 else DTYPE_BYTES.get(layout.dtype or dtype or "", 2)
    total = drawn.num_speculative_tokens * vocabulary * element * requests
    whose = "--max-num-seqs" if drawn.max_num_seqs is not None else "vLLM's default of --max-num-seqs"
    return total, (
        f"drafts that are drawn keep {total / GIB:.2f} GiB of logits ({drawn.num_speculative_tokens} tokens x {vocabulary} entries x {element} "
        f"bytes x {requests} requests, {whose})"
    )


def _expert_bytes(target: Checkpoint) -> int:
    """Bytes of the routed experts; shared ones are split like the rest."""
    return sum(tensor.byte_size for name, tensor in (target.tensors or {}).items() if ".experts." in name)


def _target_weight_bytes(target: Checkpoint, layout: MemoryLayout, ranks: int) -> int | None:
    if target.weight_bytes is None:
        return None
    experts = _expert_bytes(target)
    return -(-(target.weight_bytes - experts) // ranks) + -(-experts // (ranks * layout.data_parallel))


def _min_weight_bytes(weights: int, layout: MemoryLayout) -> int:
    """What the weights take at least: four bits of 32 for each once they are quantised, nothing that must stay if offloaded."""
    if layout.offload_flag is not None:
        return 0
    return weights // 8 if layout.quantization is not None else weights


def _drafter_weight_bytes(drafter: Checkpoint, ranks: int) -> int | None:
    """t2d is never loaded; fc, norms and d2t are on every rank."""
    if drafter.tensors is None:
        return None
    total = 0
    for name, tensor in drafter.tensors.items():
        if name.startswith("t2d"):
            continue
        total += tensor.byte_size if any(part in name for part in _REPLICATED_TENSOR_PARTS) else -(-tensor.byte_size // ranks)
    return total


def _kv_bytes_per_token(attention: AttentionConfig, tensor: int, pipeline: int, width: float) -> float | None:
    """Bytes on one GPU for one token over all layers of a stage, or None where the config does not tell."""
    if attention.layer_count is None:
        return None
    layers = -(-(attention.layer_count - attention.linear_layer_count) // pipeline)
    if attention.kv_lora_rank is not None:
        # One latent vector for keys and values, the same on every tensor rank.
        return layers * (attention.kv_lora_rank + (attention.rope_dim or 0)) * width
    if attention.kv_heads is None or attention.head_dim is None:
        return None
    heads = max(1, -(-attention.kv_heads // tensor))
    return 2 * layers * heads * attention.head_dim * width


def _sequence_kv_bytes(attention: AttentionConfig, per_token: float, length: int) -> float:
    """Bytes for one sequence: a sliding layer keeps no more than its window."""
    cached = (attention.layer_count or 0) - attention.linear_layer_count
    if not attention.sliding_window or not attention.sliding_layer_count or not cached:
        return per_token * length
    sliding = min(attention.sliding_layer_count, cached) / cached
    return per_token * ((1 - sliding) * length + sliding * min(length, attention.sliding_window))


def _element_bytes(kv_cache_dtype: str | None, dtype: str | None) -> float:
    if kv_cache_dtype in QUANTIZED_KV_CACHE_BYTES:
        return QUANTIZED_KV_CACHE_BYTES[kv_cache_dtype]
    if kv_cache_dtype in DTYPE_BYTES:
        return DTYPE_BYTES[kv_cache_dtype]
    return DTYPE_BYTES.get(dtype or "", 2)


def _has_float32_tensors(checkpoint: Checkpoint) -> bool:
    return any(tensor.dtype == "F32" for tensor in (checkpoint.tensors or {}).values())
