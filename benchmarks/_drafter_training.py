"""One training of `benchmarks.drafter`, in a process of its own: prints {"tokens_per_s": ..., "peak_mib": ...}.

    python _drafter_training.py ours|speculators SHAPE_AS_JSON

Both sides get the same hidden states, tokens, sizes, horizon and number of threads, all float32 on CPU, and do whole steps:
forward, backward, clipping, AdamW. Seconds are those of the processor, which on one thread are those of an idle machine and on a
busy one come near them. The peak is the process's resident memory beyond what it had when libraries, weights and
data were in place; the optimizer's state and the gradients are part of it. The script also runs where Aerie is not installed.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def main() -> None:
    side, shape = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(shape["threads"])
    torch.manual_seed(0)
    length, hidden = shape["length"], shape["hidden"]
    tokens = torch.randint(shape["vocabulary"], (1, length))
    aux, final = torch.randn(1, length, 3 * hidden), torch.randn(1, length, hidden)
    build = {"ours": ours, "speculators": speculators}[side]
    model, loss = build(shape, tokens, aux, final)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        return float(value.detach())

    baseline, seconds, first = peak_mib(), [], 0.0
    for index in range(shape["steps"] + 1):
        began = time.process_time()
        value = step()
        if index == 0:
            first = value  # also fills the allocator and the optimizer's state: not timed
        else:
            seconds.append(time.process_time() - began)
    figures = {
        "tokens_per_s": length / statistics.median(seconds),
        "peak_mib": peak_mib() - baseline,
        "loss": first,
        "parameters": sum(parameter.numel() for parameter in trained),
    }
    print(json.dumps(figures))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(shape: dict[str, int], tokens: Tensor, aux: Tensor, final: Tensor) -> tuple[Any, Callable[[], Tensor]]:
    """Build Aerie's drafter and its loss."""
    from aerie_drafter.config import DrafterConfig, DrafterFamily
    from aerie_drafter.model import Drafter
    from aerie_drafter.train.ttt import TrainingBatch, TrainingTimeTest, decaying_weights

    config = DrafterConfig(
        family=DrafterFamily.LLAMA,
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["hidden"] // shape["heads"],
        vocab_size=shape["vocabulary"],
        draft_vocab_size=shape["draft_vocabulary"],
        target_hidden_size=shape["hidden"],
        aux_layer_ids=(1, 2, 3),
        fc_norm=True,
        norm_output=True,
        max_position_embeddings=shape["length"] + 64,
    )
    drafter = Drafter(config)
    teacher = torch.randn(shape["vocabulary"], shape["hidden"]) * 0.02
    teacher[shape["draft_vocabulary"] :] *= 0.1  # so that, as in use, its likeliest token is nearly always one of the draft's
    test = TrainingTimeTest(drafter, teacher, step_weights=decaying_weights(shape["horizon"]))
    batch = TrainingBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), aux, final)

    def loss() -> Tensor:
        outcome = test(batch)
        mean: Tensor = outcome.weighted_sum / outcome.metrics.position_count
        return mean

    return drafter, loss


def speculators(shape: dict[str, int], tokens: Tensor, aux: Tensor, final: Tensor) -> tuple[Any, Callable[[], Tensor]]:
    """Build the speculators library's EAGLE 3, shifted as its own `shift_batch` does."""
    eagle3: Any = importlib.import_module("speculators.models.eagle3")
    losses: Any = importlib.import_module("speculators.losses")
    transformers: Any = importlib.import_module("transformers")
    layer = transformers.LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=1,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=shape["length"] + 64,
    )
    layer._attn_implementation = shape["attention"]
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocabulary"],
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        fc_norm=True,
        norm_output=True,
    )
    model = eagle3.Eagle3DraftModel(config).float()
    model.lm_head.weight.requires_grad_(True)  # Aerie's is trained too
    for weight in (model.lm_head.weight, model.embed_tokens.weight, model.verifier_lm_head.weight):
        torch.nn.init.normal_(weight, std=0.02)  # they wait for those of a target
    model.t2d[: shape["draft_vocabulary"]] = True
    chosen = losses.resolve_loss_config("kl_div", "eager")  # the fused one is a GPU kernel

    def loss() -> Tensor:
        _, value, _ = model(
            hidden_states=aux[:, :-1],
            input_ids=tokens[:, 1:],
            document_ids=torch.zeros_like(tokens[:, 1:]),
            loss_mask=torch.ones_like(tokens[:, 1:], dtype=torch.bool),
            verifier_last_hidden_states=final[:, 1:],
            ttt_steps=shape["horizon"],
            ttt_step_loss_decay=0.8,
            loss_config=chosen,
        )
        mean: Tensor = value
        return mean

    return model, loss


if __name__ == "__main__":
    main()
