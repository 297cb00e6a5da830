"""Decide whether a checkpoint may be loaded in place of the drafter that an engine was started with.

The measure is the engine's own drafter: the other one must have the same tensors and the same config, except for what a gate
switches (EAGLE 3 against 3.1) and for what vLLM's drafters do not read. vLLM itself checks neither when it loads weights:
EAGLE 3's weights in an engine of EAGLE 3.1 give no error and a third less acceptance.

Guarantees: pure functions; whatever is not known to be harmless is a problem, which names the tensor or key, both values, and
what to do. Not guaranteed: that the drafter is a good one for the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aerie_vllm.checkpoint import Tensor
from aerie_vllm.worker_protocol import Problem

FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
"""What differs between the heads of one class in vLLM 0.26 to 0.33; a gate each."""
SHARED = ("embed_tokens", "lm_head")
"""Modules for which vLLM gives a drafter the target's own, if its checkpoint has none or an equal one."""
FLOATS = frozenset({"F16", "BF16", "F32"})
"""Types that vLLM converts into the target's when it loads them."""

INVERSE_MAP = "t2d"
"""The inverse of d2t, which vLLM does not read."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
UNREAD_KEYS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "add_cross_attention",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "simulator",
        "speculators_version",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a config that vLLM's drafters do not read; "simulator" is for Aerie's simulated engines."""


@dataclass(frozen=True)
class Form:
    """A checkpoint without its values."""

    config: Mapping[str, Any]
    """config.json as vLLM understands it, so with defaults and in one format."""
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Engine:
    """What of the engine decides."""

    method: str
    """vLLM's name of the method."""
    gates: frozenset[str]
    """Flags that can be switched."""
    shared: frozenset[str]
    """Those of SHARED that are the target's own modules."""
    same_class: frozenset[str]
    """Architectures that vLLM serves with the class of the running drafter."""


def read_flags(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return the flags of an EAGLE 3 head, from where vLLM's classes read them."""
    eagle_config = config.get("eagle_config") or {}
    flags = {name: bool(config.get(name, False)) for name in FLAGS}
    flags["norm_before_fc"] = bool(eagle_config.get("norm_before_fc", flags["norm_before_fc"]))
    return flags


def name_kind(method: str, flags: Mapping[str, bool]) -> str:
    """Return `eagle3.1` for an EAGLE 3 head with both of its norms, else the method's name."""
    return "eagle3.1" if method == "eagle3" and flags["fc_norm"] and flags["norm_output"] else method


def canonical_name(name: str, method: str) -> str:
    """Return a tensor's name; EAGLE 3's `midlayer` is vLLM's `layers.0`."""
    return name.replace("midlayer.", "layers.0.") if method == "eagle3" else name


def find_problem(own: Form, candidate: Form, engine: Engine) -> Problem | None:
    """Return the first reason why the candidate does not fit the engine that was started with `own`, or None."""
    return next(iter_problems(own, candidate, engine), None)


def iter_problems(own: Form, candidate: Form, engine: Engine) -> Iterator[Problem]:
    """Yield every reason why the candidate does not fit, the most telling first."""
    yield from _compare_architectures(own, candidate, engine)
    yield from _compare_flags(own, candidate, engine)
    yield from _compare_configs(own, candidate, engine)
    yield from _compare_tensors(own, candidate, engine)


def find_map_problem(offsets: Iterable[int], vocabulary: int) -> Problem | None:
    """Return why a vocabulary map is invalid, or None.

    Draft token i is the target's token i + offsets[i] (`draft_id_to_target_id` in vLLM's EAGLE 3 classes, `d2t` in checkpoints).
    An index beyond the target's vocabulary would end the engine.
    """
    tokens = [index + offset for index, offset in enumerate(offsets)]
    for index, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            message = (
                f"d2t maps draft token {index} to {token}, and the target's vocabulary has {vocabulary} tokens: "
                "the drafter was made for another target."
            )
            return Problem(reason="VocabularyMap", message=message)
    if len(set(tokens)) < len(tokens):
        return Problem(reason="VocabularyMap", message="d2t maps two draft tokens to one token: export the drafter again.")
    return None


def _compare_architectures(own: Form, candidate: Form, engine: Engine) -> Iterator[Problem]:
    present, other = own.config.get("architectures") or [], candidate.config.get("architectures") or []
    classes = {
        name if "Eagle3" in name or engine.method != "eagle3" else f"Eagle3{name}" for name in other
    }  # as EAGLEConfig does
    if present != other and not (classes and classes <= engine.same_class):
        yield Problem(
            reason="Architecture",
            message=f"the drafter's architectures are {other}, and the engine was built for {present}: roll it out by pods.",
        )


def _compare_flags(own: Form, candidate: Form, engine: Engine) -> Iterator[Problem]:
    present, other = read_flags(own.config), read_flags(candidate.config)
    for flag in FLAGS:
        if flag not in engine.gates and present[flag] != other[flag]:
            yield Problem(
                reason="Flag",
                message=(
                    f"the drafter has {flag} {str(other[flag]).lower()}, the engine was built with {str(present[flag]).lower()}, "
                    "and its class has no gate for it: roll it out by pods."
                ),
            )


def _compare_configs(own: Form, candidate: Form, engine: Engine) -> Iterator[Problem]:
    present, other = _flatten(own.config), _flatten(candidate.config)
    for key in sorted(present.keys() | other.keys()):
        if present.get(key) != other.get(key):
            reason = "Quantization" if key == "quantization_config" else "Config"
            yield Problem(
                reason=reason,
                message=(
                    f"the drafter's {key} is {other.get(key)!r}, and the engine was built with {present.get(key)!r}: "
                    f"roll it out by pods. Its method is {engine.method}."
                ),
            )


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that decide, in one place where vLLM's classes read them from two, with the defaults of these classes."""
    eagle_config = config.get("eagle_config") or {}
    keys = {
        "draft_vocab_size": config.get("vocab_size"),
        "target_hidden_size": config.get("hidden_size"),
        "logit_scale": 1.0,
        **eagle_config,
        **{key: value for key, value in config.items() if value is not None},
        "use_aux_hidden_state": eagle_config.get("use_aux_hidden_state", True),
    }
    keys["num_aux_hidden_states"] = _count_aux_states(keys)
    ignored = UNREAD_KEYS | {*FLAGS, "architectures", "eagle_config", "model"}
    return {key: value for key, value in keys.items() if key not in ignored and value is not None}


def _count_aux_states(keys: Mapping[str, Any]) -> int:
    """Return how many of the target's hidden states an EAGLE 3 head takes (`LlamaModel.__init__` in vLLM's llama_eagle3.py)."""
    for key in ("num_aux_layers", "num_aux_hidden_states"):
        if keys.get(key) is not None:
            return int(keys[key])
    return len(keys.get(AUX_LAYERS) or ()) or 3


def _compare_tensors(own: Form, candidate: Form, engine: Engine) -> Iterator[Problem]:
    flags = read_flags(candidate.config)
    gated = gated_tensors(own.config, engine.gates)
    optional = {f"{module}.weight" for module in engine.shared}
    present = {canonical_name(name, engine.method): tensor for name, tensor in own.tensors.items()}
    actual = {canonical_name(name, engine.method): tensor for name, tensor in candidate.tensors.items()}
    required = {name: tensor for name, tensor in present.items() if name not in gated and name != INVERSE_MAP}
    needed = (required.keys() - optional) | {name for name, (flag, _) in gated.items() if flags[flag]}
    for name in sorted(needed - actual.keys()):
        yield Problem(
            reason="TensorMissing",
            message=f"the checkpoint has no {name}, which the engine's drafter needs: export it with it, or roll it out by pods.",
        )
    for name, tensor in sorted(actual.items()):
        if name == INVERSE_MAP:
            continue
        if name not in needed | optional:
            yield Problem(
                reason="TensorUnknown",
                message=f"the checkpoint has {name}, for which the engine's drafter has no place: roll it out by pods.",
            )
            continue
        shape = gated[name][1] if name in gated else present[name].shape if name in present else tensor.shape
        dtype = present[name].dtype if name in present else "F32"
        if tensor.shape != shape:
            yield Problem(
                reason="Shape",
                message=f"{name} has the shape {list(tensor.shape)}, and the engine needs {list(shape)}: roll it out by pods.",
            )
        elif tensor.dtype != dtype and not {tensor.dtype, dtype} <= FLOATS:
            yield Problem(
                reason="Type",
                message=f"{name} is of type {tensor.dtype}, and the engine needs {dtype}: export it in that type.",
            )


def gated_tensors(config: Mapping[str, Any], gates: frozenset[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the gate and shape of each tensor that only heads with that flag have (`LlamaModel.__init__` in llama_eagle3.py)."""
    states = _flatten(config)["num_aux_hidden_states"]
    width = config.get("target_hidden_size") or config.get("hidden_size", 0)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    if "fc_norm" in gates:
        tensors |= {f"fc_norm.{index}.weight": ("fc_norm", (width,)) for index in range(states)}
    if "norm_before_fc" in gates:
        tensors["input_norm.weight"] = ("norm_before_fc", (width * states,))
    return tensors
