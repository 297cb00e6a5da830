"""The entry point: vLLM calls `register` in each of its processes, before it builds a model.

It finds the plugin by the entry point `vllm.general_plugins` in the folder that is on PYTHONPATH. The classes with gates stand in
for vLLM's own for every architecture that vLLM's registry maps to them, so also for those of future releases.

Guarantees: a class that another plugin has registered stays; without a drafter of these classes nothing changes.
"""

from __future__ import annotations

import logging

STOCK_CLASSES = {
    ("vllm.model_executor.models.llama_eagle3", "Eagle3LlamaForCausalLM"): "aerie_vllm.gated.llama:GatedEagle3Llama",
    ("vllm.model_executor.models.qwen3_eagle3", "Eagle3Qwen3ForCausalLM"): "aerie_vllm.gated.qwen3:GatedEagle3Qwen3",
    ("vllm.model_executor.models.deepseek_eagle3", "Eagle3DeepseekV2ForCausalLM"): (
        "aerie_vllm.gated.deepseek:GatedEagle3Deepseek"
    ),
}
"""The class with gates for a module and class of vLLM; names, because importing a model in every process would be slow."""


def register() -> None:
    """Register the classes with gates; called more than once, it changes nothing more."""
    from vllm import ModelRegistry

    architectures = {}
    for architecture, entry in list(ModelRegistry.models.items()):
        key = (getattr(entry, "module_name", ""), getattr(entry, "class_name", ""))
        if key in STOCK_CLASSES:
            architectures[architecture] = STOCK_CLASSES[key]
    for architecture, gated_class in architectures.items():
        ModelRegistry.register_model(architecture, gated_class)
    if architectures:
        logging.getLogger(f"vllm.{__name__}").info("drafters with gates: %s", ", ".join(sorted(architectures)))
