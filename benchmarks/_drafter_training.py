"""One training of `benchmarks.drafter`, in a process of its own; prints what it measured as JSON.

    python _drafter_training.py aerie|speculators|specforge SHAPE_AS_JSON time      {"tokens_per_s": ..., "parameters": ...}
    python _drafter_training.py aerie|speculators|specforge SHAPE_AS_JSON memory    {"peak_mib": ...}

All sides get the same hidden states, tokens, sizes, horizon and one thread, all float32 on CPU, and do whole steps: forward,
backward, clipping, AdamW. Seconds are those of the processor, which on one thread are those of an idle machine and on a busy one
come near them.

The peak is that of the bytes of all tensors, temporary ones too, beyond those that exist before the first step: PyTorch's
profiler reports each allocation. So it repeats exactly. The resident memory of the process does not: it contains what malloc
keeps of freed blocks, and what is subtracted, its peak before the first step, contains what the imports have freed again. Not
counted: buffers inside of the kernels, which all sides use alike.

For Aerie, "time" also prints "necessary_share": the share of a step's time, by the profiler, in the operations that no
implementation omits (NECESSARY). If all others took no time, the step would be 1 / necessary_share times as fast. The script also
runs where Aerie is not installed.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

NECESSARY = {
    *("aten::mm", "aten::addmm_"),  # all matrix products but those inside of attention
    *("_JointAttention", "_JointAttentionBackward", "_Rotation", "_RotationBackward"),
    *("_CpuRmsNorm", "_CpuRmsNormBackward", "aten::silu", "aten::silu_backward"),
    *("aten::_softmax", "aten::exp_"),  # of the target's logits, and of the drafter's
    "Optimizer.step#AdamW.step",
}
"""Operations of Aerie's step, as the profiler names them, that every implementation needs in some form; none contains another."""


def main() -> None:
    side, shape, measured = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if measured == "memory":
        print(json.dumps({"peak_mib": measure_peak_mib(side, shape)}))
        return
    step, trained = build_step(side, shape)
    first = step()  # also fills the allocator and the optimizer's state: not timed
    seconds = [cpu_seconds(step) for _ in range(shape["steps"])]
    figures = {
        "tokens_per_s": shape["batch"] * shape["length"] / statistics.median(seconds),
        "loss": first,
        "parameters": sum(parameter.numel() for parameter in trained),
    }
    if side == "aerie":
        figures["necessary_share"] = measure_necessary_share(step)
    print(json.dumps(figures))


def build_step(side: str, shape: dict[str, int]) -> tuple[Callable[[], float], list[Tensor]]:
    """Return a function that does a step, and the trained weights."""
    size, hidden = (shape["batch"], shape["length"]), shape["hidden"]
    tokens = torch.randint(shape["vocabulary"], size)
    aux, final = torch.randn(*size, 3 * hidden), torch.randn(*size, hidden)
    build = {"aerie": aerie, "speculators": speculators, "specforge": specforge}[side]
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

    return step, trained


def cpu_seconds(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def measure_peak_mib(side: str, shape: dict[str, int]) -> float:
    """Do two steps, of which the first creates the optimizer's state, and return the peak."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step, _ = build_step(side, shape)
        with torch.profiler.record_function("all steps"):
            step()
            step()
    allocated, baseline, peak = 0, None, 0
    events: Any = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "all steps":
            baseline = allocated
        elif event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated) if baseline is not None else 0
    if baseline is None:
        raise RuntimeError("the profiler did not report the steps")
    return (peak - baseline) / 2**20


def measure_necessary_share(step: Callable[[], float]) -> float:
    """Return the share of a step's time that is spent in NECESSARY operations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        step()
    events = profile.key_averages()
    total: float = sum(event.self_cpu_time_total for event in events)
    necessary: dict[str, float] = {event.key: event.cpu_time_total for event in events if event.key in NECESSARY}
    if missing := NECESSARY - necessary.keys():
        raise RuntimeError(f"the profiler did not report {', '.join(sorted(missing))}")
    return sum(necessary.values()) / total


def aerie(shape: dict[str, int], tokens: Tensor, aux: Tensor, final: Tensor) -> tuple[Any, Callable[[], Tensor]]:
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
    """Build the speculators library's EAGLE 3, shifted as its own `shift_batch` does; it packs all texts into one row."""
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
        max_position_embeddings=shape["batch"] * shape["length"] + 64,
    )
    layer._attn_implementation = "sdpa"  # "eager" takes more time and memory; flex attention has no backward on CPU
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
    aux, tokens, final = aux[:, :-1].flatten(0, 1)[None], tokens[:, 1:].flatten()[None], final[:, 1:].flatten(0, 1)[None]
    documents = torch.arange(shape["batch"]).repeat_interleave(shape["length"] - 1)[None]
    positions = torch.arange(1, shape["length"]).repeat(shape["batch"])[None]

    def loss() -> Tensor:
        _, value, _ = model(
            hidden_states=aux,
            input_ids=tokens,
            document_ids=documents,
            position_ids=positions,
            loss_mask=torch.ones_like(tokens, dtype=torch.bool),
            verifier_last_hidden_states=final,
            ttt_steps=shape["horizon"],
            ttt_step_loss_decay=0.8,
            loss_config=chosen,
        )
        mean: Tensor = value
        return mean

    return model, loss


def specforge(shape: dict[str, int], tokens: Tensor, aux: Tensor, final: Tensor) -> tuple[Any, Callable[[], Tensor]]:
    """Build SpecForge's EAGLE 3 with attention "sdpa", the only form that it has on CPU.

    Its packages' own imports need sglang; the modules of the training do not, and are imported past them.
    Its loss is a Triton kernel, replaced by the reference of the same file. Its decorators compile for GPU: they are off.
    """
    spec = find_spec("specforge")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for name in ("specforge.algorithms", "specforge.algorithms.eagle3"):
        package = types.ModuleType(name)
        package.__path__ = [f"{spec.submodule_search_locations[0]}/{name.split('.', 1)[1].replace('.', '/')}"]
        sys.modules[name] = package
    training: Any = importlib.import_module("specforge.algorithms.eagle3.model")
    losses: Any = importlib.import_module("specforge.core.loss")
    draft: Any = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    transformers: Any = importlib.import_module("transformers")

    class ReferenceLoss:
        apply = staticmethod(losses._compute_loss)

    training.LogSoftmaxLoss = ReferenceLoss
    config = transformers.LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=1,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=shape["length"] + 64,
        pad_token_id=0,
    )
    config.draft_vocab_size, config.fc_norm, config.norm_output = shape["draft_vocabulary"], True, True
    drafter = draft.LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    drafter.embed_tokens.weight.requires_grad_(False)
    drafter.t2d.zero_()[: shape["draft_vocabulary"]] = True
    model = training.OnlineEagle3Model(drafter, length=shape["horizon"], attention_backend="sdpa")
    teacher = torch.randn(shape["vocabulary"], shape["hidden"]) * 0.02
    teacher[shape["draft_vocabulary"] :] *= 0.1
    # Shifted by one as its collator does: column t reads the state of t and token t + 1, and learns the distribution at t + 1.
    aux, tokens, final = aux[:, :-1], tokens[:, 1:], final[:, 1:]
    mask = torch.ones(*tokens.shape, 1, dtype=torch.long)

    def loss() -> Tensor:
        logits = final @ teacher.T
        by_step, *_ = model(input_ids=tokens, attention_mask=None, target=logits, loss_mask=mask, hidden_states=aux)
        total: Tensor = sum(0.8**step * value for step, value in enumerate(by_step))
        return total

    return model, loss


if __name__ == "__main__":
    main()
