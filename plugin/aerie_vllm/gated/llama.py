"""The EAGLE 3 head of Llama's layers with gates (gates.py)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from aerie_vllm.gated.gates import all_optional_modules, install_gates


class GatedEagle3Llama(Eagle3LlamaForCausalLM):  # type: ignore[misc] # vLLM carries no types here
    """vLLM's class, with gates where heads differ."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.speculative_config.draft_model_config.hf_config
        with all_optional_modules(config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        install_gates(self, config)
