"""An estimate of whether target, drafter and their KV caches fit a GPU, before one is requested, with every assumption as text.

Exact: the bytes of the weights, which the headers contain, and the KV cache's bytes per token, which follow from the configs.
Assumed, and printed: that weights split evenly over tensor and pipeline ranks, how they are stored once loaded, and the memory of
activations, CUDA graphs and the runtime, which only the engine's own profile run measures.
Experts (tensors with `.experts.` in their name) are split over data-parallel ranks too, as in vLLM with and without expert
parallelism (model_executor/layers/fused_moe/config.py, flatten_tp_across_dp). An argument may make the weights smaller than on
disk: it quantises them at the start, or keeps a part on the CPU. Then the estimate also has a lower bound.
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
from aerie.engine.models.config import AttentionConfig, TargetModel, parse_drafter_model, parse_target_model

GIB = 2**30
RESERVE_BYTES = 2 * GIB
"""Bytes for activations, CUDA graphs and the CUDA runtime. An assumption: the engine profiles the real value."""
DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
QUANTIZED_KV_CACHE_BYTES = {"fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "fp8_inc": 1.0, "fp8_per_token_head": 1.0,
                "int8_per_token_head": 1.0, "nvfp4": 0.5625, "nvfp4_4over6": 0.5625, "int4_per_token_head": 0.5}  # fmt: skip
"""Bytes of one cached element. nvfp4 has one 8-bit scale for 16 values; scales per token and head are not counted."""
_REPLICATED_TENSOR_PARTS = ("fc.", "fc_norm", "norm.", "layernorm", "hidden_norm", "d2t", "t2d")


@dataclass(frozen=True)
class DraftLogits:
    """The engine's buffer for the drafter's distribution while a draft is verified, of the shape tokens x vocabulary x requests.

    Model runner V2 keeps the logits of all request slots, complete on every GPU: float32 up to vLLM 0.27, the model's type from
    0.28 on (vllm/v1/worker/gpu/spec_decode/speculator.py, draft_logits). V1 keeps float32 probabilities of the running requests
    (vllm/v1/spec_decode/llm_base_proposer.py, _last_draft_probs).
    """

    num_speculative_tokens: int
    always_float32: bool
    """Whether an element has four bytes, independent of the model's type."""
    max_num_seqs: int | None = None
    """The value of --max-num-seqs; None: vLLM's default."""

    def resolve_max_num_seqs(self, gpu_memory_bytes: int | None) -> int:
        """Return the number of requests. vLLM's default depends on the GPU's memory (vllm/engine/arg_utils.py).

        A100 and GB10 have the smaller default.
        """
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return 1024 if gpu_memory_bytes is not None and gpu_memory_bytes >= 70 * GIB else 256


@dataclass(frozen=True)
class MemoryLayout:
    """The arguments that determine the memory: how the engine distributes the models and what it stores."""

    gpu_memory_bytes: int | None
    """Memory of one GPU. None: the user has not set it, so nothing can be rejected."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    quantization: str | None = None
    """The value of --quantization if the target's config has none: weights are quantised while they are loaded."""
    offload_flag: str | None = None
    """The flag that keeps a part of the target's weights on the CPU, if there is one."""
    draft_tensor_parallel: int | None = None
    """Tensor-parallel size of the drafter; None: that of the target."""
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    max_model_len: int | None = None
    """Tokens; None: the maximum of the target's config."""
    dtype: str | None = None
    """The value of --dtype, if it is not auto."""
    kv_cache_dtype: str | None = None
    draft_kv_cache_dtype: str | None = None
    draft_logits: DraftLogits | None = None
    """The buffer for draft logits, if drafts are sampled from the drafter's probabilities."""
    reserve_bytes: int = RESERVE_BYTES


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per GPU. None: the checkpoint lacks the information."""

    target_weight_bytes: int | None
    drafter_weight_bytes: int | None
    target_kv_bytes_per_token: float | None
    """Bytes for one more token of a sequence that is shorter than any sliding window."""
    drafter_kv_bytes_per_token: float | None
    max_sequence_tokens: int | None
    """Tokens of the longest sequence."""
    max_sequence_kv_bytes: float | None
    """Bytes for one sequence of that length, for target and drafter together; sliding windows are considered."""
    kv_cache_bytes: float | None
    """Bytes left for the KV cache; negative where the weights alone do not fit. None without a GPU's size or weights."""
    assumptions: tuple[str, ...]
    draft_logits_bytes: int = 0
    """Bytes of the buffer for sampled drafts."""
    min_target_weight_bytes: int | None = None
    """A lower bound of `target_weight_bytes` if arguments make the weights smaller than on disk; else equal to it."""

    @property
    def may_fit(self) -> bool:
        """Whether one sequence may fit if the target's weights need no more than their lower bound."""
        if self.kv_cache_bytes is None or self.target_weight_bytes is None or self.min_target_weight_bytes is None:
            return True
        max_kv_cache_bytes = self.kv_cache_bytes + self.target_weight_bytes - self.min_target_weight_bytes
        return max_kv_cache_bytes > 0 and max_kv_cache_bytes >= (self.max_sequence_kv_bytes or 0)

    @property
    def kv_cache_tokens(self) -> int | None:
        """The number of tokens that the KV cache holds; sliding windows are not considered."""
        if self.kv_cache_bytes is None or self.target_kv_bytes_per_token is None or self.drafter_kv_bytes_per_token is None:
            return None
        per_token = self.target_kv_bytes_per_token + self.drafter_kv_bytes_per_token
        return max(0, int(self.kv_cache_bytes / per_token)) if per_token else None

    @property
    def kv_cache_sequences(self) -> float | None:
        """The number of sequences of the longest length that the KV cache holds."""
        if self.kv_cache_bytes is None or not self.max_sequence_kv_bytes:
            return None
        return max(0.0, self.kv_cache_bytes / self.max_sequence_kv_bytes)


def estimate_memory(target: Checkpoint, drafter: Checkpoint | None, layout: MemoryLayout) -> MemoryEstimate:
    """Estimate the memory of one GPU of the last pipeline stage, which also holds the drafter. Never raises."""
    model = parse_target_model(target.config)
    target_weights = _target_weight_bytes(target, layout)
    assumptions = [_weight_assumption(target, layout)]
    draft = _estimate_drafter(drafter, layout, model)
    assumptions += draft.assumptions
    target_kv = _target_kv_bytes_per_token(model, layout)
    assumptions += _kv_cache_assumptions(model, layout)
    max_tokens = layout.max_model_len or model.max_position
    sequence_kv = None
    if max_tokens and target_kv is not None and draft.kv_bytes_per_token is not None:
        sequence_kv = _sequence_kv_bytes(model.attention, target_kv, max_tokens)
        sequence_kv += _sequence_kv_bytes(draft.attention, draft.kv_bytes_per_token, max_tokens) if draft.attention else 0.0
    kv_cache = None
    if layout.gpu_memory_bytes is not None and target_weights is not None and draft.weight_bytes is not None:
        usable = layout.gpu_memory_bytes * layout.gpu_memory_utilization
        kv_cache = usable - target_weights - draft.weight_bytes - draft.logits_bytes - layout.reserve_bytes
        assumptions.append(
            f"the engine may use {layout.gpu_memory_utilization:.0%} of {layout.gpu_memory_bytes / GIB:.1f} GiB, of which "
            f"{layout.reserve_bytes / GIB:g} GiB "
            "go to activations, CUDA graphs and the runtime"
        )
    return MemoryEstimate(
        target_weight_bytes=target_weights,
        drafter_weight_bytes=draft.weight_bytes,
        target_kv_bytes_per_token=target_kv,
        drafter_kv_bytes_per_token=draft.kv_bytes_per_token,
        max_sequence_tokens=max_tokens,
        max_sequence_kv_bytes=sequence_kv,
        kv_cache_bytes=kv_cache,
        assumptions=tuple(assumptions),
        draft_logits_bytes=draft.logits_bytes,
        min_target_weight_bytes=None if target_weights is None else _min_weight_bytes(target_weights, layout),
    )


def _weight_assumption(target: Checkpoint, layout: MemoryLayout) -> str:
    ranks = layout.tensor_parallel * layout.pipeline_parallel
    experts = f", experts over {ranks * layout.data_parallel}" if layout.data_parallel > 1 and _expert_bytes(target) else ""
    return (
        "weights take the bytes that they have on disk"
        + (f", split evenly over {ranks} GPU{'s' if ranks > 1 else ''}{experts}" if ranks > 1 or experts else "")
        + ("; the engine may store float32 weights as 16 bits" if _has_float32_tensors(target) else "")
    )


def _target_kv_bytes_per_token(model: TargetModel, layout: MemoryLayout) -> float | None:
    width = _element_bytes(layout.kv_cache_dtype, layout.dtype or model.dtype)
    return _kv_bytes_per_token(model.attention, layout.tensor_parallel, layout.pipeline_parallel, width)


def _kv_cache_assumptions(model: TargetModel, layout: MemoryLayout) -> list[str]:
    width = _element_bytes(layout.kv_cache_dtype, layout.dtype or model.dtype)
    dtype = layout.kv_cache_dtype or "auto"
    assumptions = [f"the KV cache has {width:g} bytes per element (--kv-cache-dtype {dtype}, model {model.dtype or 'unknown'})"]
    if model.attention.linear_layer_count:
        assumptions.append(f"the states of {model.attention.linear_layer_count} layers without a KV cache are not counted")
    return assumptions


@dataclass(frozen=True)
class _DrafterMemory:
    """The drafter's part of an estimate, per GPU; by default that of an engine without a drafter."""

    weight_bytes: int | None = 0
    kv_bytes_per_token: float | None = 0.0
    attention: AttentionConfig | None = None
    logits_bytes: int = 0
    assumptions: tuple[str, ...] = ()


def _estimate_drafter(drafter: Checkpoint | None, layout: MemoryLayout, target_model: TargetModel) -> _DrafterMemory:
    if drafter is None:
        return _DrafterMemory()
    draft_model = parse_drafter_model(drafter.config)
    ranks = layout.draft_tensor_parallel or layout.tensor_parallel
    # The drafter runs in the target's dtype. It caches in the target's cache type unless the user sets another one.
    width = _element_bytes(layout.draft_kv_cache_dtype or layout.kv_cache_dtype, layout.dtype or target_model.dtype)
    logits_bytes = 0
    assumptions: tuple[str, ...] = ()
    if layout.draft_logits is not None:
        vocab_size = draft_model.vocab_size or target_model.vocab_size or 0
        logits_bytes, assumption = _estimate_draft_logits(layout.draft_logits, layout, target_model.dtype, vocab_size)
        assumptions = (assumption,)
    return _DrafterMemory(
        weight_bytes=_drafter_weight_bytes(drafter, ranks),
        kv_bytes_per_token=_kv_bytes_per_token(draft_model.attention, ranks, 1, width),
        attention=draft_model.attention,
        logits_bytes=logits_bytes,
        assumptions=assumptions,
    )


def _estimate_draft_logits(logits: DraftLogits, layout: MemoryLayout, dtype: str | None, vocab_size: int) -> tuple[int, str]:
    """Return the bytes of the draft logits, and the calculation as text."""
    requests = logits.resolve_max_num_seqs(layout.gpu_memory_bytes)
    element_bytes = 4 if logits.always_float32 else DTYPE_BYTES.get(layout.dtype or dtype or "", 2)
    total = logits.num_speculative_tokens * vocab_size * element_bytes * requests
    source = "--max-num-seqs" if logits.max_num_seqs is not None else "vLLM's default of --max-num-seqs"
    return total, (
        f"drafts that are drawn keep {total / GIB:.2f} GiB of logits ({logits.num_speculative_tokens} tokens x {vocab_size} "
        f"entries x {element_bytes} bytes x {requests} requests, {source})"
    )


def _expert_bytes(target: Checkpoint) -> int:
    """Return the bytes of the routed experts; shared experts are split like other weights."""
    return sum(tensor.byte_size for name, tensor in (target.tensors or {}).items() if ".experts." in name)


def _target_weight_bytes(target: Checkpoint, layout: MemoryLayout) -> int | None:
    if target.weight_bytes is None:
        return None
    ranks = layout.tensor_parallel * layout.pipeline_parallel
    experts = _expert_bytes(target)
    return -(-(target.weight_bytes - experts) // ranks) + -(-experts // (ranks * layout.data_parallel))


def _min_weight_bytes(weight_bytes: int, layout: MemoryLayout) -> int:
    """Return a lower bound of the weights: four of 32 bits each if quantised, and 0 if any part may be offloaded."""
    if layout.offload_flag is not None:
        return 0
    return weight_bytes // 8 if layout.quantization is not None else weight_bytes


def _drafter_weight_bytes(drafter: Checkpoint, ranks: int) -> int | None:
    """Return the drafter's bytes per rank: t2d is never loaded; fc, norms and d2t are on every rank."""
    if drafter.tensors is None:
        return None
    total = 0
    for name, tensor in drafter.tensors.items():
        if name.startswith("t2d"):
            continue
        total += tensor.byte_size if any(part in name for part in _REPLICATED_TENSOR_PARTS) else -(-tensor.byte_size // ranks)
    return total


def _kv_bytes_per_token(
    attention: AttentionConfig, tensor_parallel: int, pipeline_parallel: int, element_bytes: float
) -> float | None:
    """Return the bytes on one GPU for one token over all layers of a stage, or None if the config lacks the sizes."""
    if attention.layer_count is None:
        return None
    layers = -(-(attention.layer_count - attention.linear_layer_count) // pipeline_parallel)
    if attention.kv_lora_rank is not None:
        # One latent vector for keys and values, the same on every tensor rank.
        return layers * (attention.kv_lora_rank + (attention.rope_dim or 0)) * element_bytes
    if attention.kv_heads is None or attention.head_dim is None:
        return None
    heads = max(1, -(-attention.kv_heads // tensor_parallel))
    return 2 * layers * heads * attention.head_dim * element_bytes


def _sequence_kv_bytes(attention: AttentionConfig, bytes_per_token: float, length: int) -> float:
    """Return the bytes for one sequence: a sliding layer caches no more than its window."""
    cached_layers = (attention.layer_count or 0) - attention.linear_layer_count
    if not attention.sliding_window or not attention.sliding_layer_count or not cached_layers:
        return bytes_per_token * length
    sliding_share = min(attention.sliding_layer_count, cached_layers) / cached_layers
    return bytes_per_token * ((1 - sliding_share) * length + sliding_share * min(length, attention.sliding_window))


def _element_bytes(kv_cache_dtype: str | None, dtype: str | None) -> float:
    if kv_cache_dtype in QUANTIZED_KV_CACHE_BYTES:
        return QUANTIZED_KV_CACHE_BYTES[kv_cache_dtype]
    if kv_cache_dtype in DTYPE_BYTES:
        return DTYPE_BYTES[kv_cache_dtype]
    return DTYPE_BYTES.get(dtype or "", 2)


def _has_float32_tensors(checkpoint: Checkpoint) -> bool:
    return any(tensor.dtype == "F32" for tensor in (checkpoint.tensors or {}).values())
