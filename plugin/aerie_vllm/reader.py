"""Read drafters for a rank: the engine's own, which is the measure, and candidates, which are checked against it.

Runs in a thread beside the engine's loop and changes nothing of the engine.

Guarantees: what `read_candidate` returns was hashed, and fits the running drafter by everything that can be checked before it is
loaded; a copy of the target's own weights is compared with them and left out, because loading it would write into the target.

Not guaranteed: that the files of the engine's own drafter are what the engine loaded. They are read after its start, so mount
them read-only.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aerie_vllm import validation, weights
from aerie_vllm.checkpoint import CONFIG, SUFFIX, Checkpoint, CheckpointError, Tensor, open_checkpoint
from aerie_vllm.worker_protocol import Drafter, Problem, compute_digest

TORCH_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
MAP = "d2t"
ROWS = 4096
"""Rows of an embedding that are compared at a time."""


@dataclasses.dataclass(frozen=True)
class Own:
    """The drafter of the engine's arguments."""

    drafter: Drafter
    form: validation.Form


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A drafter that may be loaded."""

    drafter: Drafter
    tensors: dict[str, torch.Tensor]
    """What to load, by the checkpoint's names."""


class Reader:
    """Reads drafters for one rank."""

    def __init__(self, config: Any, layout: weights.Layout) -> None:
        """Read for an engine with this config (vLLM's) and drafter."""
        self._config = config
        self._layout = layout

    def read_own(self, is_cancelled: Callable[[], bool]) -> Own:
        """Read the drafter of the engine's arguments. Raises CheckpointError."""
        with open_checkpoint(find_folder(self._config.speculative_config.draft_model_config)) as checkpoint:
            form = read_form(checkpoint)
            return Own(self._describe(checkpoint.hash_files(is_cancelled), form), form)

    def read_candidate(self, own: Own, folder: Path, files: dict[str, str], is_cancelled: Callable[[], bool]) -> Candidate:
        """Read a drafter and check it. Raises CheckpointError, OSError and ReadingCancelledError."""
        drafter, shared = self._layout.drafter, self._layout.shared
        gates = frozenset(getattr(drafter, "aerie_gates", ()))
        engine = validation.Engine(
            method=self._config.speculative_config.method,
            gates=gates,
            shared=frozenset(name.rpartition(".")[2] for name in shared),
            same_class=find_same_class(type(drafter)),
        )
        with open_checkpoint(folder, list(files)) as checkpoint:
            form = read_form(checkpoint)
            raise_problem(validation.find_problem(own.form, form, engine))
            contents = checkpoint.load(files, is_cancelled)
        tensors = {name: create_tensor(tensor, contents[tensor.file]) for name, tensor in form.tensors.items()}
        for name, tensor in tensors.items():
            raise_problem(find_value_problem(name, tensor))
        if MAP in tensors:
            vocabulary = self._config.model_config.get_vocab_size()
            raise_problem(validation.find_map_problem(tensors[MAP].tolist(), vocabulary))
        for path, module in shared.items():
            name = f"{path.rpartition('.')[2]}.weight"
            if name in tensors:
                raise_problem(compare_shared(name, tensors.pop(name), module))
        flags = validation.read_flags(form.config)
        for name, (flag, shape) in validation.gated_tensors(form.config, gates).items():
            if not flags[flag]:
                tensors[name] = torch.ones(shape)  # behind a closed gate; vLLM would warn that nothing was loaded
        return Candidate(self._describe(files, form), tensors)

    def _describe(self, files: dict[str, str], form: validation.Form) -> Drafter:
        method = self._config.speculative_config.method
        flags = validation.read_flags(form.config) if method == "eagle3" else {}
        return Drafter(digest=compute_digest(files), files=dict(files), kind=validation.name_kind(method, flags), flags=flags)


def raise_problem(problem: Problem | None) -> None:
    """Raise CheckpointError for a problem."""
    if problem is not None:
        raise CheckpointError(**problem)


def find_unfit(config: Any, model: nn.Module | None, layout: weights.Layout) -> Problem | None:
    """Return why an engine can never change its drafter in place, or None.

    Args:
        config: vLLM's config.
        model: the drafter on this rank.
        layout: of the drafter.
    """
    speculative = config.speculative_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return Problem(reason="PipelineParallel", message="the stages of a pipeline have no drafter each: roll out by pods.")
    if model is None or speculative is None or speculative.draft_model_config is None:
        return Problem(reason="NoDrafter", message="the engine has no drafter with weights: set speculative-config's model.")
    if speculative.draft_model_config.model == config.model_config.model:
        return Problem(reason="PartOfTarget", message="the drafter's weights are in the target's checkpoint: roll out by pods.")
    if getattr(speculative, "draft_lm_head_quantization", None) is not None:  # since 0.33
        message = "draft-lm-head-quantization derives the drafter's head from the target's at the start: roll out by pods."
        return Problem(reason="DerivedHead", message=message)
    if hasattr(model, "mask_hidden"):
        return Problem(
            reason="ParallelDrafting",
            message="from mask_hidden vLLM calculates state outside the drafter, at the start only: roll out by pods.",
        )
    if any(getattr(module, "has_separate_mask_embedding", False) for module in layout.modules):
        message = "vLLM has loaded mask_embedding.pt, which is no safetensors file, for the masked tokens: roll out by pods."
        return Problem(reason="MaskEmbedding", message=message)
    if layout.has_tied_weights:
        message = "two modules of the drafter have one parameter, which vLLM's reload does not support: roll out by pods."
        return Problem(reason="TiedWeights", message=message)
    return None


def find_folder(draft_model_config: Any) -> Path:
    """Return the folder of the engine's own drafter; one of the Hub's is in the cache. Raises CheckpointError."""
    name = draft_model_config.model
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    patterns = [CONFIG, f"*{SUFFIX}"]  # without them, huggingface_hub 2 misses files that vLLM does not fetch, such as README.md
    revision = draft_model_config.revision
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns="*/*", local_files_only=True)
        )
    except Exception as error:  # noqa: BLE001 - its exceptions differ between releases
        raise CheckpointError("OwnDrafterUnreadable", f"{name} is neither a folder nor in the Hub's cache ({error}).") from None


def read_form(checkpoint: Checkpoint) -> validation.Form:
    """Return what is compared of a checkpoint: its config as vLLM understands it, and its tensors. Raises CheckpointError."""
    from vllm.transformers_utils.config import get_config

    with tempfile.TemporaryDirectory() as folder:  # the config that was hashed, not what the file may have become
        (Path(folder) / CONFIG).write_text(json.dumps(checkpoint.config))
        try:
            config = get_config(folder, trust_remote_code=False).to_dict()
        except Exception as error:  # noqa: BLE001 - transformers raises many types
            raise CheckpointError("InvalidConfig", f"vLLM does not understand {checkpoint.folder / CONFIG}: {error}") from None
    return validation.Form(config, checkpoint.tensors)


def find_same_class(model_class: type[nn.Module]) -> frozenset[str]:
    """Return the architectures that vLLM serves with a class."""
    from vllm import ModelRegistry

    return frozenset(
        name for name, entry in ModelRegistry.models.items() if getattr(entry, "class_name", None) == model_class.__name__
    )


def create_tensor(tensor: Tensor, content: memoryview) -> torch.Tensor:
    """Return a tensor of a file's content, without a copy."""
    dtype = TORCH_TYPES[tensor.dtype]
    if tensor.begin == tensor.end:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(content[tensor.begin : tensor.end], dtype=dtype).reshape(tensor.shape)


def find_value_problem(name: str, tensor: torch.Tensor) -> Problem | None:
    """Return a problem if a tensor has a NaN or an infinity, with which nothing that is drafted would be accepted."""
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and not torch.isfinite(tensor).all():
        return Problem(reason="NotFinite", message=f"{name} has values that are no finite numbers: train or export it again.")
    return None


def compare_shared(name: str, tensor: torch.Tensor, module: nn.Module) -> Problem | None:
    """Return why a checkpoint's copy of a module that is the target's own must not be loaded, or None if they are equal.

    Args:
        name: of the tensor.
        tensor: [vocabulary, width] of the checkpoint.
        module: the target's embedding, of which this rank may have a part of the rows.
    """
    weight = getattr(module, "weight", None)
    indices = getattr(module, "shard_indices", None)
    if weight is not None and indices is not None and weight.dim() == 2:
        first, last = indices.org_vocab_start_index, indices.org_vocab_end_index
        if tensor.shape == (module.org_vocab_size, weight.shape[1]) and all(
            torch.equal(
                tensor[row : min(row + ROWS, last)].to(weight.dtype), weight[row - first :][: min(ROWS, last - row)].cpu()
            )
            for row in range(first, last, ROWS)
        ):
            return None
    return Problem(
        reason="SharedWithTarget",
        message=(
            f"the engine's drafter uses the target's {name}, and the checkpoint has another one, which would change the target: "
            "roll it out by pods, or export it without."
        ),
    )
