"""Outputs of vLLM's own EAGLE 3 classes for a drafter; the tests of this folder run it with vLLM's interpreter.

    python oracle.py CASE...

A case is a folder with the models `target` and `drafter` and with `inputs.safetensors`; this adds `outputs.safetensors`, or
`error.txt` if vLLM does not load the drafter.
For round n the inputs have `n.aux` [columns, states of the target] and `n.tokens` [columns + steps]; the outputs of its step i
are `n.i.normed`, `n.i.feedback` and `n.i.logits`, step 0 for all columns, each later step for the one drafted token.

Guarantees: configuration, class, weight loading and all arithmetic outside attention are vLLM's, by the same calls as in a
server (vllm/v1/spec_decode/llm_base_proposer.py `load_model`, `propose`). Attention is the textbook formula over a cache that
is written and read by position, which equals a paged cache for one sequence. Not guaranteed: that vLLM's own
attention kernel computes that formula; served acceptance shows that.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.model_loader import get_model


class Cache:
    """Keys and values of the one sequence, by layer and position; `positions` is set before each call of the model."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.positions = torch.zeros(0, dtype=torch.long)
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Map [columns, heads, size] each to [columns, heads x size of a value]; a repeated position is overwritten."""
        last = int(self.positions.max()) + 1
        old = self._entries.get(layer.layer_name, (None, None))
        all_keys, all_values = (
            _write_positions(old_part, part, self.positions) for old_part, part in zip(old, (key, value), strict=True)
        )
        self._entries[layer.layer_name] = all_keys, all_values
        group = query.shape[1] // key.shape[1]
        keys = all_keys[:last].repeat_interleave(group, dim=1)
        values = all_values[:last].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        distance = self.positions.unsqueeze(-1) - torch.arange(last)
        hidden = (distance < 0) | (distance >= (layer.sliding_window or last))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def _write_positions(old: Tensor | None, new: Tensor, positions: Tensor) -> Tensor:
    size = max(int(positions.max()) + 1, 0 if old is None else old.shape[0])
    grown = torch.full((size, *new.shape[1:]), float("nan"))
    if old is not None:
        grown[: old.shape[0]] = old
    grown[positions] = new
    return grown


CACHE = Cache()


def grouped_attention(layer: Attention, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Compute attention instead of `Attention.forward`."""
    shaped = (
        query.view(-1, layer.num_heads, layer.head_size),
        key.view(-1, layer.num_kv_heads, layer.head_size),
        value.view(-1, layer.num_kv_heads, layer.head_size),
    )
    return CACHE.attend(layer, *shaped, layer.impl.scale)


def latent_attention_forward(
    layer: MLAAttention, query: Tensor, latents: Tensor, shared: Tensor, *_: object, **__: object
) -> Tensor:
    """Compute attention instead of `MLAAttention.forward`, with expanded latents (arXiv 2405.04434, section 2.1)."""
    both = layer.kv_b_proj(latents)[0].view(-1, layer.num_heads, layer.qk_nope_head_dim + layer.v_head_dim)
    key, value = both.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
    key = torch.cat([key, shared.expand(-1, layer.num_heads, -1)], dim=-1)
    return CACHE.attend(layer, query, key, value, layer.scale)


def run(case: Path) -> None:
    """Compute the outputs of one case."""
    CACHE.clear()
    latent_attention = "kv_lora_rank" in json.loads((case / "drafter" / "config.json").read_text())
    arguments = EngineArgs(
        model=str(case / "target"),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 26,
        # The backend for AMX, which is preferred on machines with AMX, rejects float32 weights.
        attention_backend="CPU_MLA" if latent_attention else None,
        # vLLM 0.32's C++ form for CPU rotates only part of a query by heads, which latent attention has.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]} if latent_attention else {},
        speculative_config={"method": "eagle3", "model": str(case / "drafter"), "num_speculative_tokens": 3},
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), torch.inference_mode():
        try:
            model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        except ValueError as error:
            (case / "error.txt").write_text(str(error))
            return
        outputs = compute_outputs(model, load_file(case / "inputs.safetensors"))
    save_file(outputs, case / "outputs.safetensors")


def compute_outputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the rounds in order: prefill, then drafting from the last column on, as `propose` does."""
    outputs: dict[str, Tensor] = {}
    rounds = 1 + max(int(name.split(".")[0]) for name in inputs)
    first = 0
    for number in range(rounds):
        aux, tokens = inputs[f"{number}.aux"], inputs[f"{number}.tokens"]
        length, steps = aux.shape[0], tokens.shape[0] - aux.shape[0]
        hidden = model.combine_hidden_states(aux)
        positions = torch.arange(first, first + length)
        ids = tokens[:length]
        for step in range(steps + 1):
            CACHE.positions = positions
            normed, feedback = model(input_ids=ids, positions=positions, hidden_states=hidden)
            name = f"{number}.{step}"
            outputs |= {f"{name}.normed": normed, f"{name}.feedback": feedback, f"{name}.logits": model.compute_logits(normed)}
            positions, hidden, ids = positions[-1:] + 1, feedback[-1:], tokens[length + step : length + step + 1]
        first += length
    return {name: tensor.contiguous().clone() for name, tensor in outputs.items()}


def main() -> None:
    Attention.forward, MLAAttention.forward = grouped_attention, latent_attention_forward
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/rendezvous"
        init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo")
        torch.set_default_dtype(torch.float32)
        with set_current_vllm_config(VllmConfig()):
            initialize_model_parallel(1)
        gc.freeze()  # vLLM collects garbage twice per model, and without this looks through all imported modules each time
        for case in sys.argv[1:]:
            run(Path(case))


if __name__ == "__main__":
    main()
