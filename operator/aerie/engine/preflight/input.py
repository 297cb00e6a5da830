"""The input of preflight: two checkpoints, an engine version, its arguments and its GPUs. Plain data, no resource, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aerie.engine.arguments import EngineArguments
from aerie.engine.command_line import resolve_model_runner
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.models.config import DrafterModel, TargetModel, parse_drafter_model, parse_target_model
from aerie.engine.models.gpu_memory import DraftLogits, MemoryEstimate, MemoryLayout, estimate_memory
from aerie.engine.models.layer_ids import LayerIds, LayerNumbering, detect_layer_numbering, resolve_layer_ids
from aerie.engine.models.origin import detect_origin
from aerie.engine.releases import Feature, Version, supports


@dataclass(frozen=True)
class PreflightInput:
    """One deployment before its start."""

    target: Checkpoint
    drafter: Checkpoint | None
    """None: the engine runs without one."""
    version: Version
    is_version_from_tag: bool = field(default=False, kw_only=True)
    """Whether the version comes from the image's tag and not from the user."""
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    """The object for --speculative-config; empty without speculation."""
    arguments: EngineArguments = field(default_factory=EngineArguments)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the engine's container, as far as known."""
    image: str = field(default="", kw_only=True)
    """The engine's image; empty if unknown."""
    gpu_memory_bytes: int | None = None
    """Memory of one GPU, as set by the user."""
    gpu_count: int | None = None
    """GPUs of one pod. None: it requests none, or an unknown number."""
    gpu_resource: str | None = "nvidia.com/gpu"
    """The resource that the pod requests: the name of an extended resource, or the description of a claim. Empty: none. None:
    no pod is known."""

    @cached_property
    def target_model(self) -> TargetModel:
        return parse_target_model(self.target.config)

    @cached_property
    def drafter_model(self) -> DrafterModel:
        """The drafter as vLLM sees it. Requires a drafter."""
        assert self.drafter is not None
        return parse_drafter_model(self.drafter.config)

    @property
    def method(self) -> str | None:
        method = self.speculative_config.get("method")
        return method if isinstance(method, str) else None

    @property
    def parallel_drafting(self) -> bool:
        """Whether all tokens are drafted in one forward pass (P-EAGLE)."""
        is_p_eagle = self.drafter is not None and self.drafter_model.kind == "peagle"
        return is_p_eagle or self.speculative_config.get("parallel_drafting") is True

    @property
    def has_schedule(self) -> bool:
        """Whether K depends on the batch size."""
        return bool(self.speculative_config.get("num_speculative_tokens_per_batch_size"))

    @property
    def model_runner(self) -> tuple[int, str]:
        """The version of vLLM's model runner that will run, 1 or 2, and why."""
        return resolve_model_runner(
            self.version,
            self.method,
            self.environment,
            is_moe=self.target_model.is_moe,
            parallel_drafting=self.parallel_drafting,
            uses_heterogeneous_vocab=self.speculative_config.get("use_heterogeneous_vocab") is True,
        )

    @cached_property
    def effective_aux_layer_ids(self) -> LayerIds | None:
        """The auxiliary layers that this engine will read. None if they depend on the target's number of layers, which is
        absent."""
        drafter, (runner, _) = self.drafter_model, self.model_runner
        return resolve_layer_ids(
            drafter.top_level_aux_layer_ids,
            drafter.nested_aux_layer_ids,
            drafter.v2_runner_aux_layer_ids if self.supports(Feature.EAGLE_CONFIG_LAYER_IDS) else None,
            model_runner=runner,
            default_ids=self.target_model.default_aux_layer_ids,
        )

    @cached_property
    def declared_aux_layer_ids(self) -> tuple[LayerNumbering | None, LayerIds] | None:
        """The layer numbering of the drafter's config, and its ids, which are vLLM's only if the numbering is vLLM's."""
        assert self.drafter is not None
        ids = self.drafter_model.aux_layer_ids
        if ids is None:
            return None
        tensors = self.drafter.tensors or {}
        origin, _ = detect_origin(self.drafter.config, tensors.keys(), self.drafter.metadata)
        numbering = detect_layer_numbering(
            ids,
            origin,
            has_vllm_tensor_names=any(name.startswith("layers.0.") for name in tensors),
            model_type=self.drafter_model.model_type,
            layer_count=self.target_model.layer_count,
        )
        return numbering, ids

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence that the engine supports."""
        return self.arguments.max_model_len or self.target_model.max_position

    def supports(self, feature: Feature) -> bool:
        return supports(self.version, feature)

    @property
    def _draft_logits(self) -> DraftLogits | None:
        tokens = self.speculative_config.get("num_speculative_tokens")
        if self.speculative_config.get("draft_sample_method") != "probabilistic" or not isinstance(tokens, int):
            return None
        always_float32 = self.model_runner[0] == 1 or not self.supports(Feature.DRAFT_LOGITS_NARROW)
        return DraftLogits(tokens, always_float32, self.arguments.max_num_seqs)

    @cached_property
    def memory_estimate(self) -> MemoryEstimate:
        draft_tp = self.speculative_config.get("draft_tensor_parallel_size")
        draft_kv = self.speculative_config.get("kv_cache_dtype")
        arguments = self.arguments
        layout = MemoryLayout(
            gpu_memory_bytes=self.gpu_memory_bytes,
            tensor_parallel=arguments.tensor_parallel,
            pipeline_parallel=arguments.pipeline_parallel,
            data_parallel=arguments.data_parallel,
            quantization=None if self.target_model.is_quantized else arguments.quantization,
            offload_flag=arguments.offload_flag,
            draft_tensor_parallel=draft_tp if isinstance(draft_tp, int) else None,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            max_model_len=arguments.max_model_len,
            dtype=arguments.dtype,
            kv_cache_dtype=arguments.kv_cache_dtype,
            draft_kv_cache_dtype=draft_kv if isinstance(draft_kv, str) else None,
            draft_logits=self._draft_logits,
        )
        return estimate_memory(self.target, self.drafter, layout)
