"""Validation of a checkpoint's tensors: pure functions over names, shapes and values that return error messages.

`checkpoint.read_checkpoint` raises the first error, `inspect` reports all of them. Names and shapes are those that vLLM loads:
llama_eagle3.py, qwen3_eagle3.py and deepseek_eagle3.py of vLLM 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from aerie_drafter.config import DrafterConfig
from aerie_drafter.model import Drafter

TensorShape = tuple[int, ...]

MALFORMED_VALUE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError)
"""Exceptions that values of unexpected types in a configuration raise."""


def format_error(error: Exception) -> str:
    """Return the message of an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[-1]} is missing" if isinstance(error, KeyError) else lines[-1]


def expected_tensor_shapes(config: DrafterConfig) -> dict[str, TensorShape]:
    """Return the shape of each tensor of a drafter by name, with the optional ones."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def optional_tensor_names(config: DrafterConfig) -> set[str]:
    """Return the tensors that may be absent: a shared embedding, t2d (it follows from d2t), and both for a full vocabulary."""
    full = config.draft_vocab_size == config.vocab_size
    return {"embed_tokens.weight", "t2d"} | ({"d2t"} if full else set())


def find_shape_errors(config: DrafterConfig, shapes: Mapping[str, TensorShape]) -> list[str]:
    """Return where names and shapes contradict the configuration; messages without the file's name."""
    expected = expected_tensor_shapes(config)
    missing = [name for name in expected if name not in shapes and name not in optional_tensor_names(config)]
    unexpected = [name for name in shapes if name not in expected]
    errors, explained = _find_norm_switch_errors(config, missing, unexpected)
    if unexpected and all(name.startswith("model.") for name in unexpected if name not in explained):
        prefixed = next((name for name in unexpected if name not in explained), None)
        if prefixed is not None:
            message = f"{prefixed} has the prefix `model.`, which vLLM adds again and then does not find"
            return [f"{message}; import the checkpoint with `aerie-drafter convert`."]
    layers = {match[1] for name in shapes if (match := re.match(r"(midlayer|layers\.\d+)\.", name))}
    if layers and len(layers) != config.num_hidden_layers:
        errors.append(
            f"it has tensors of {len(layers)} layers, and num_hidden_layers is {config.num_hidden_layers}: set it to the number "
            "of layers that were trained."
        )
        explained |= {name for name in (*missing, *unexpected) if re.match(r"layers\.\d+\.", name)}
    for name in missing:
        if name not in explained:
            errors.append(f"{name} is missing; expected: a tensor of shape {_format_shape(expected[name])}.")
    for name in unexpected:
        if name not in explained:
            errors.append(f"{name} is not a tensor of this configuration; `aerie-drafter convert` may be able to convert it.")
    for name, shape in shapes.items():
        if name in expected and shape != expected[name]:
            errors.append(
                f"{name} has shape {_format_shape(shape)}, and the configuration makes it {_format_shape(expected[name])}."
            )
    return errors


def _find_norm_switch_errors(config: DrafterConfig, missing: list[str], extra: list[str]) -> tuple[list[str], set[str]]:
    """Return messages about norm switches that contradict the weights, and the tensors that they explain."""
    errors: list[str] = []
    explained: set[str] = set()
    for switch, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        missing_norms = [name for name in missing if name.startswith(prefix)]
        extra_norms = [name for name in extra if name.startswith(prefix)]
        if getattr(config, switch) and missing_norms:
            errors.append(
                f"{missing_norms[0]} is missing, and the configuration has {switch} true: one of the two is wrong, and only "
                "the training settings tell which."
            )
            explained |= set(missing_norms)
        elif not getattr(config, switch) and extra_norms:
            errors.append(
                f"{extra_norms[0]} exists, and the configuration has {switch} false, so vLLM would not apply it: "
                f"set {switch} to true if the drafter was trained with it."
            )
            explained |= set(extra_norms)
        elif extra_norms:
            errors.append(
                f"{extra_norms[0]} exists, and the configuration has {len(config.aux_layer_ids)} auxiliary layers: "
                "list all layers that it was trained on in eagle_aux_hidden_state_layer_ids."
            )
            explained |= set(extra_norms)
    return errors, explained


def find_vocabulary_mapping_errors(config: DrafterConfig, d2t: Tensor, t2d: Tensor | None) -> list[str]:
    """Return errors of the draft vocabulary; `d2t` [draft_vocab_size], `t2d` [vocab_size] or None.

    Tokens may have any order: vLLM distributes the logits by d2t, so each only needs a token of its own.
    """
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        return [f"d2t contains {d2t.dtype}; expected: integers."]
    size = config.vocab_size
    if len(d2t) == size and d2t.any():
        return [f"d2t moves tokens, and draft_vocab_size and vocab_size are both {size}: one of the sizes is wrong."]
    tokens = d2t.long() + torch.arange(len(d2t))
    outside = torch.nonzero((tokens < 0) | (tokens >= size)).flatten()
    if len(outside):
        at = int(outside[0])
        mapping = f"d2t maps draft id {at} to token {int(tokens[at])}, and the target's vocabulary is 0 to {size - 1}."
        return [f"{mapping} d2t is an offset: token of the target = draft id + d2t[draft id]."]
    reached, uses = torch.unique(tokens, return_counts=True)  # the size of the file's d2t, not of the configuration
    if (uses > 1).any():
        token = int(reached[uses > 1][0])
        first, second = torch.nonzero(tokens == token).flatten()[:2].tolist()
        return [f"d2t maps draft ids {first} and {second} both to token {token}, and vLLM keeps only one of the logits."]
    if t2d is None:
        return []
    if len(t2d) != size:
        return [f"t2d has {len(t2d)} entries, and vocab_size is {size}."]
    expected = torch.zeros(len(t2d), dtype=torch.bool)
    expected[reached] = True
    if len(wrong := torch.nonzero(expected != t2d.bool()).flatten()):
        at = int(wrong[0])
        return [f"t2d is {bool(t2d[at])} for token {at}, but {bool(expected[at])} according to d2t."]
    return []


def _format_shape(shape: TensorShape) -> str:
    return " x ".join(map(str, shape)) or "()"
