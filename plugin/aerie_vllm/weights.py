"""The weights of a running drafter: replace them, save them in host memory, put them back.

A checkpoint gets into the engine by vLLM's layerwise reload, which shards, fuses, quantizes and repacks as at the start, and
copies the results into the memory that is in use. A snapshot has these results, so putting it back is plain copies; it is also
what undoes a reload that failed midway.

Guarantees: parameters and buffers stay the same tensors at the same addresses, because CUDA graphs and compiled graphs read them
there. A module that the drafter shares with the target (`embed_tokens`, `lm_head`, `rotary_emb`) is not changed by a reload.
`restore` also undoes an unfinished reload: tensors on the meta device, wrapped loaders.

Not guaranteed: state outside the modules (a proposer's own buffers); the worker rejects methods that have some.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

KV_CACHE = "kv_cache"
"""The one tensor attribute of modules that is not weights: the attention layers' cache."""
MASK_EMBEDDING = "mask_embedding"
"""The parameter that DFlash reads from a file of its own, if at all; engines that have read it are unfit."""


class ReloadError(Exception):
    """A reload did not do what it should; the message is a sentence."""


class Layout:
    """The modules of a drafter, and those of their tensors that hold weights; they stay the same while the engine runs."""

    def __init__(self, drafter: nn.Module, target: nn.Module) -> None:
        of_target = {id(module) for module in target.modules()}
        self.drafter = drafter
        self.modules = [module for module in drafter.modules() if id(module) not in of_target]
        """Modules that the target does not have."""
        own = {id(module) for module in self.modules}
        self.shared = {
            f"{prefix}.{name}".lstrip("."): child
            for prefix, module in drafter.named_modules()
            if id(module) in own
            for name, child in module.named_children()
            if id(child) in of_target
        }
        """Those that are the target's too, by path; the outermost of each."""
        self.tensors = list(_iter_tensors(self.modules))
        parameters = [id(parameter) for module in self.modules for parameter in module.parameters(recurse=False)]
        parameters_of_target = {id(parameter) for parameter in target.parameters()}
        self.has_tied_weights = len(set(parameters)) < len(parameters) or not parameters_of_target.isdisjoint(parameters)
        """Whether another module has one of the parameters too. vLLM's reload would process it for one of them only."""


@contextmanager
def detached(layout: Layout) -> Iterator[None]:
    """Take the shared modules out of the drafter until the end of the block, so that nothing in it can change them.

    Those without parameters remain attributes of their parents: DFlash's loader reads constants of its rotary embedding.
    """
    try:
        for path, module in layout.shared.items():
            layout.drafter.set_submodule(path, nn.Identity())
            if next(module.parameters(), None) is None:
                parent, _, name = path.rpartition(".")
                vars(layout.drafter.get_submodule(parent))[name] = module  # `set_submodule` below removes it
        yield
    finally:
        for path, module in layout.shared.items():
            layout.drafter.set_submodule(path, module)


class Snapshot:
    """The weights of one drafter in host memory, in the form that the engine calculates with."""

    def __init__(self, layout: Layout) -> None:
        """Allocate memory for the weights, pinned where they are on an accelerator. Reads none."""
        self._layout = layout
        self._copies = [
            torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda") for tensor in layout.tensors
        ]
        self._places: list[_Place] = []

    @torch.no_grad()
    def capture(self) -> None:
        """Copy the weights into this snapshot. Raises ReloadError if the drafter has other tensors than its layout."""
        tensors = self._layout.tensors
        if [id(tensor) for tensor in _iter_tensors(self._layout.modules)] != [id(tensor) for tensor in tensors]:
            raise ReloadError("the drafter has other tensors than at the start: roll out by pods.")
        for tensor, copy in zip(tensors, self._copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        _synchronize(tensors)
        self._places = [_Place(module) for module in self._layout.modules]

    @property
    def is_captured(self) -> bool:
        """Whether there is something to restore."""
        return bool(self._places)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back, and the tensors into their modules, whatever a reload has left there."""
        for place in self._places:
            place.restore()
        for tensor, copy in zip(self._layout.tensors, self._copies, strict=True):
            tensor.copy_(copy, non_blocking=True)
        _synchronize(self._layout.tensors)


class _Place:
    """Which tensors a module has, and its attributes that hold weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = dict(module._parameters)
        self.buffers = dict(module._buffers)
        self.non_persistent = set(module._non_persistent_buffers_set)
        self.attributes = _attributes(module)

    def restore(self) -> None:
        """Give the module these tensors, and end its part in a reload that did not finish."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        get_layerwise_info(self.module).reset()
        self.module._parameters.clear()
        self.module._parameters.update(self.parameters)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.non_persistent)
        vars(self.module).update(self.attributes)


@torch.no_grad()
def reload(drafter: Any, weights: dict[str, torch.Tensor], model_config: Any) -> None:
    """Load a checkpoint's tensors into the drafter, from which shared modules are detached.

    Args:
        drafter: vLLM's model.
        weights: CPU tensors by the checkpoint's names; without those of shared modules.
        model_config: vLLM's config of the drafter's model.

    Raises:
        ReloadError: a module got no weights, or tensors are at other addresses. The drafter is then undefined.
        Exception: whatever vLLM's loaders raise, likewise.
    """
    from vllm.model_executor.model_loader import reload as layerwise
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in _named_tensors(drafter)}
    attributes = {module: _tensor_attributes(module) for module in drafter.modules()}
    layerwise.initialize_layerwise_reload(drafter)
    drafter.load_weights(iter(weights.items()))
    for name, module in drafter.named_modules():
        info = get_layerwise_info(module)
        loadable = (parameter for key, parameter in module.named_parameters(recurse=False) if key != MASK_EMBEDDING)
        if info.can_load() and info.load_numel == 0 and any(parameter.numel() for parameter in loadable):
            raise ReloadError(f"vLLM loaded no weights into {name}: the checkpoint lacks them under the names that it reads.")
    layerwise.finalize_layerwise_reload(drafter, model_config)
    addresses = {address for _, address in before.values()}
    for module, tensors in attributes.items():
        _keep_addresses(module, tensors, addresses)
    for name, tensor in _named_tensors(drafter):
        if (id(tensor), tensor.data_ptr()) != before.pop(name, None):
            raise ReloadError(f"{name} is at another address after the reload: graphs would read the old weights.")
    if before:
        raise ReloadError(f"{min(before)} has disappeared in the reload.")


def _keep_addresses(module: nn.Module, tensors: dict[str, torch.Tensor], addresses: Container[int]) -> None:
    """Copy what a reload has put into new tensors (`W_UV` of latent attention, fused weights) to where graphs read it.

    Args:
        module: after the reload.
        tensors: its attributes before the reload.
        addresses: of the drafter's parameters and buffers.

    Raises ReloadError for weights that were calculated without values, or in another shape.
    """
    for name, tensor in tensors.items():
        replacement = module.__dict__.get(name)
        if replacement is tensor:
            continue
        if not isinstance(replacement, torch.Tensor) or replacement.shape != tensor.shape:
            raise ReloadError(f"{name} of {type(module).__name__} has another form after the reload: roll out by pods.")
        # The alias of a buffer that had no memory during the reload (DFlash's table of its rotary embedding) has it again.
        if not replacement.is_meta:
            tensor.copy_(replacement)
        elif tensor.data_ptr() not in addresses:
            raise ReloadError(f"{name} of {type(module).__name__} has no values after the reload: roll out by pods.")
        module.__dict__[name] = tensor


def _named_tensors(drafter: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from drafter.named_parameters()
    yield from drafter.named_buffers()


def _iter_tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield each tensor of the modules once: parameters, buffers, and what quantization and attention store as attributes."""
    handled: set[int] = set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values(), *_tensor_attributes(module).values()):
            if tensor is not None and id(tensor) not in handled:
                handled.add(id(tensor))
                yield tensor


def _tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor) and name != KV_CACHE}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that hold weights outside tensors: on CPU, a linear layer's function holds its packed weights."""
    names = ("cpu_linear", *_tensor_attributes(module))
    return {name: vars(module)[name] for name in names if name in vars(module)}


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until copies have ended; engines calculate on other streams."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
