"""What the tensors of a checkpoint have to be, said in sentences: pure functions over names, shapes and values.

`checkpoint.load` raises the first sentence, `inspect` prints all of them. Names and shapes are those that vLLM loads:
llama_eagle3.py, qwen3_eagle3.py and deepseek_eagle3.py of vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from aerie_drafter.config import DrafterConfig
from aerie_drafter.model import Drafter

TensorShape = tuple[int, ...]

MALFORMED_VALUE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError)
"""What is raised where a configuration holds values of a kind that nobody expects."""


def format_error(error: Exception) -> str:
    """What such an error, or one of this package's, says in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[-1]} is missing" if isinstance(error, KeyError) else lines[-1]


def expected_tensor_shapes(config: DrafterConfig) -> dict[str, TensorShape]:
    """Shape by name of every tensor of such a drafter, all optional ones included."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def optional_tensor_names(config: DrafterConfig) -> set[str]:
    """Tensors that may be absent: the embedding is then the target's, t2d follows from d2t, a full vocabulary has neither."""
    full = config.draft_vocab_size == config.vocab_size
    return {"embed_tokens.weight", "t2d"} | ({"d2t"} if full else set())


def find_shape_errors(config: DrafterConfig, shapes: Mapping[str, TensorShape]) -> list[str]:
    """How the names and shapes `found` contradict the configuration, a sentence each without the file's name."""
    expected = expected_tensor_shapes(config)
    missing = [name for name in expected if name not in shapes and name not in optional_tensor_names(config)]
    extra = [name for name in shapes if name not in expected]
    faults, explained = _find_norm_switch_errors(config, missing, extra)
    if extra and all(name.startswith("model.") for name in extra if name not in explained):
        prefixed = next((name for name in extra if name not in explained), None)
        if prefixed is not None:
            fault = f"{prefixed} has the prefix `model.`, which vLLM adds once more and then does not find"
            return [f"{fault}; bring the checkpoint in with `aerie-drafter convert`."]
    for name in missing:
        if name not in explained:
            faults.append(f"{name} is missing; expected is a tensor of shape {_format_shape(expected[name])}.")
    for name in extra:
        if name not in explained:
            faults.append(
                f"{name} is a tensor that a drafter of this configuration does not have; `aerie-drafter convert` may know it."
            )
    for name, shape in shapes.items():
        if name in expected and shape != expected[name]:
            faults.append(
                f"{name} has shape {_format_shape(shape)}, and the configuration makes it {_format_shape(expected[name])}."
            )
    return faults


def _find_norm_switch_errors(config: DrafterConfig, missing: list[str], extra: list[str]) -> tuple[list[str], set[str]]:
    """Sentences on norm switches that contradict the weights, and the tensors that they explain."""
    faults: list[str] = []
    explained: set[str] = set()
    for switch, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        lacking = [name for name in missing if name.startswith(prefix)]
        beyond = [name for name in extra if name.startswith(prefix)]
        if getattr(config, switch) and lacking:
            faults.append(
                f"{lacking[0]} is missing, and the configuration has {switch} true: one of the two is wrong; only the one who "
                "trained it can say which."
            )
            explained |= set(lacking)
        elif not getattr(config, switch) and beyond:
            faults.append(
                f"{beyond[0]} is there, and the configuration has {switch} false, so vLLM would not apply it: "
                f"set {switch} to true if the drafter was trained with it."
            )
            explained |= set(beyond)
        elif beyond:
            faults.append(
                f"{beyond[0]} is there, and the configuration has {len(config.aux_layer_ids)} auxiliary layers: "
                "name in eagle_aux_hidden_state_layer_ids all layers that it was trained on."
            )
            explained |= set(beyond)
    return faults, explained


def find_vocabulary_mapping_errors(config: DrafterConfig, d2t: Tensor, t2d: Tensor | None) -> list[str]:
    """How the draft vocabulary is wrong; `d2t` [draft_vocab_size], `t2d` [vocab_size] or None.

    Tokens may stand in any order: vLLM scatters the logits by d2t, so that each needs a place of its own and no more.
    """
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        return [f"d2t holds {d2t.dtype}; whole numbers are expected."]
    size = config.vocab_size
    if len(d2t) == size and d2t.any():
        return [f"d2t moves tokens, and draft_vocab_size and vocab_size are both {size}: one of the sizes is wrong."]
    tokens = d2t.long() + torch.arange(len(d2t))
    outside = torch.nonzero((tokens < 0) | (tokens >= size)).flatten()
    if len(outside):
        at = int(outside[0])
        sends = f"d2t sends draft id {at} to token {int(tokens[at])}, and the target's vocabulary is 0 to {size - 1}."
        return [f"{sends} d2t is an offset: token of the target = draft id + d2t[draft id]."]
    reached, uses = torch.unique(tokens, return_counts=True)  # as many as the file has, whatever size the configuration says
    if (uses > 1).any():
        token = int(reached[uses > 1][0])
        first, second = torch.nonzero(tokens == token).flatten()[:2].tolist()
        return [f"d2t sends draft ids {first} and {second} both to token {token}, and vLLM keeps the logit of one."]
    if t2d is None:
        return []
    if len(t2d) != size:
        return [f"t2d has {len(t2d)} entries, and vocab_size is {size}."]
    expected = torch.zeros(len(t2d), dtype=torch.bool)
    expected[reached] = True
    if len(wrong := torch.nonzero(expected != t2d.bool()).flatten()):
        at = int(wrong[0])
        return [f"t2d says {bool(t2d[at])} for token {at}, and by d2t it is {bool(expected[at])}."]
    return []


def _format_shape(shape: TensorShape) -> str:
    return " x ".join(map(str, shape)) or "()"
