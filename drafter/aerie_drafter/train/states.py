"""Hidden states of the target for a training: auxiliary states as input, final states for the loss.

There are two sources: a Hugging Face target in this process, or vLLM's `extract_hidden_states`, by files or on demand
(`aerie_drafter.train.state_server`).
Layer ids are vLLM's: k is the input of layer k, and the number of layers is the output of the last one, before the final norm.

Guarantee: both sources return the same states for the same text, up to the target's arithmetic. Not guaranteed for files without
a manifest: that they come from this target; only their shapes and tokens are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aerie_drafter.errors import CheckpointError, DataError, TargetError
from aerie_drafter.weights import read_headers, read_tensors


class TargetHiddenStates(NamedTuple):
    """[batch, length, parts x hidden] and [batch, length, hidden]: see `aerie_drafter.train.ttt.TrainingBatch`."""

    aux_hidden_states: Tensor
    final_hidden_states: Tensor


class HiddenStateSource(Protocol):
    """Source of hidden states."""

    def prefetch(self, conversations: Sequence[Tensor]) -> None:
        """Announce conversations that will be fetched soon."""

    def discard_prefetched(self) -> None:
        """Drop what was announced and not fetched, so that the process can end."""

    def fetch_hidden_states(self, tokens: Tensor, conversations_by_row: Sequence[Sequence[Tensor]]) -> TargetHiddenStates:
        """Return the states of a padded batch [batch, length]; each row is a list of one conversation."""


class TargetParts(NamedTuple):
    """Parts of a target that a training needs besides its hidden states."""

    config: Any
    """The text model's Hugging Face configuration."""
    embedding: Tensor
    """[vocabulary, hidden]"""
    lm_head: Tensor
    """[vocabulary, hidden]: the weight of lm_head."""
    final_norm: nn.Module
    """The final norm."""


class InProcessTarget:
    """A frozen Hugging Face target in this process."""

    def __init__(self, model: Any, aux_layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder = get_text_decoder(model)
        self.layers = list(self.decoder.layers)
        check_layers(aux_layer_ids, len(self.layers))
        self.aux_layer_ids = tuple(aux_layer_ids)

    def prefetch(self, conversations: Sequence[Tensor]) -> None:
        """Do nothing: the states are computed with the batch."""

    def discard_prefetched(self) -> None:
        """Do nothing: nothing is announced."""

    @torch.no_grad()
    def fetch_hidden_states(self, tokens: Tensor, conversations_by_row: Sequence[Sequence[Tensor]] = ()) -> TargetHiddenStates:  # noqa: ARG002 (needed by StoredHiddenStates)
        """Run the target. Padding at the end needs no mask, because attention is causal."""
        with _capture_inputs([*self.layers, self.decoder.norm], self.aux_layer_ids) as inputs_by_layer:
            final = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return TargetHiddenStates(torch.cat([inputs_by_layer[layer] for layer in self.aux_layer_ids], dim=-1), final)


@contextmanager
def _capture_inputs(modules: Sequence[nn.Module], layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Capture the input hidden states of the modules while the block runs."""
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [modules[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in layer_ids]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


class StateLayout(NamedTuple):
    """What one conversation's stored states contain: [tokens, layers, hidden], the layers in this order."""

    layer_ids: tuple[int, ...]
    hidden_size: int


LoadStates = Callable[[Tensor], Tensor]
"""Return the states [tokens, layers, hidden] of a conversation's tokens. Raises DrafterError."""


class StoredHiddenStates:
    """States of whole conversations that are loaded, from files or a server, by threads while a step is computed.

    `layout` has the ids of vLLM's configuration. They must contain the number of the target's layers, for the final states.
    """

    def __init__(
        self, load: LoadStates, target_parts: TargetParts, aux_layer_ids: Sequence[int], layout: StateLayout, *, workers: int = 4
    ) -> None:
        check_layout(layout.layer_ids, aux_layer_ids, target_parts)
        self.aux_indices = [layout.layer_ids.index(layer) for layer in aux_layer_ids]
        self.final_index = layout.layer_ids.index(int(target_parts.config.num_hidden_layers))
        self.load, self.layout, self.final_norm = load, layout, target_parts.final_norm
        self.dtype = target_parts.embedding.dtype
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="hidden-states")
        self._pending: dict[str, Future[Tensor]] = {}

    def prefetch(self, conversations: Sequence[Tensor]) -> None:
        """Begin to load the states of conversations, which `fetch_hidden_states` will request."""
        for tokens in conversations:
            digest = compute_token_digest(tokens)
            if digest not in self._pending:
                self._pending[digest] = self._pool.submit(self.load, tokens)

    def discard_prefetched(self) -> None:
        """Cancel all loads that have not begun. Python waits for the others when it ends, and so they remove their files."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()

    @torch.no_grad()
    def fetch_hidden_states(self, tokens: Tensor, conversations_by_row: Sequence[Sequence[Tensor]]) -> TargetHiddenStates:
        """Return the states of rows with one conversation each."""
        self.prefetch([conversation for (conversation,) in conversations_by_row])
        shape = (*tokens.shape, len(self.layout.layer_ids), self.layout.hidden_size)
        states = torch.zeros(shape, dtype=self.dtype, device=tokens.device)
        loaded = {
            digest: self._pending.pop(digest).result()
            for digest in {compute_token_digest(row) for (row,) in conversations_by_row}
        }
        for row, (conversation,) in enumerate(conversations_by_row):
            states[row, : len(conversation)] = loaded[compute_token_digest(conversation)].to(states)
        return TargetHiddenStates(states[:, :, self.aux_indices].flatten(2), self.final_norm(states[:, :, self.final_index]))


MANIFEST_FILE = "states.json"
"""Beside files of `aerie-drafter states`: target, layers and hidden size. Their names are digests of tokens."""


class HiddenStateFiles:
    """Files of vLLM's ExampleHiddenStatesConnector: `token_ids` [tokens] and `hidden_states` [tokens, layers, hidden].

    A conversation's file is identified by its tokens. With a manifest, target and layers are compared with it, and files have
    the names that `state_file_path` returns. Without one, files can have any names, and all are opened first.
    """

    def __init__(self, folder: Path, layout: StateLayout, target_id: str = "") -> None:
        self.folder, self.layout = folder, layout
        self.file_by_token_digest: dict[str, Path] | None = None
        if (folder / MANIFEST_FILE).exists():
            check_manifest(folder, layout, target_id)
        else:
            self.file_by_token_digest = self._index_files(sorted(folder.glob("**/*.safetensors")))

    def _index_files(self, paths: Sequence[Path]) -> dict[str, Path]:
        if not paths:
            raise DataError(
                f"{self.folder}: no *.safetensors files; write them with `aerie-drafter states`, or set the folder of vLLM's "
                "shared_storage_path."
            )
        files = {}
        for file in paths:
            try:
                with safe_open(file, framework="pt") as opened:
                    files[compute_token_digest(opened.get_tensor("token_ids"))] = file
                    shape = tuple(opened.get_slice("hidden_states").get_shape())
            except (SafetensorError, OSError) as error:
                raise DataError(f"{file}: not a complete file of hidden states ({error}); write it again with vLLM.") from error
            if shape[1:] != (len(self.layout.layer_ids), self.layout.hidden_size):
                raise DataError(f"{file}: {_describe_shape(shape, self.layout)}")
        return files

    def __contains__(self, tokens: Tensor) -> bool:
        return self._find(tokens) is not None

    def check_complete(self, conversations: Sequence[Tensor]) -> None:
        """Check that each conversation has a file. Raises DataError with the number of those that have none."""
        digests = self.file_by_token_digest
        if digests is None:
            digests = {path.stem: path for path in self.folder.glob("??/*.safetensors")}  # faster than one check of each
        missing = [tokens for tokens in conversations if compute_token_digest(tokens) not in digests]
        if missing:
            first = missing[0]
            raise DataError(
                f"{self.folder}: {len(missing)} of {len(conversations)} conversations have no file of hidden states, such as "
                f"that of {len(first)} tokens that begins with {first[:8].tolist()}; repeat `aerie-drafter states` with the same "
                "settings, or set target.hidden_states_endpoint."
            )

    def _find(self, tokens: Tensor) -> Path | None:
        digest = compute_token_digest(tokens)
        if self.file_by_token_digest is not None:
            return self.file_by_token_digest.get(digest)
        path = state_file_path(self.folder, digest)
        return path if path.exists() else None

    def load(self, tokens: Tensor) -> Tensor:
        """Return the states of a conversation. Raises DataError."""
        path = self._find(tokens)
        if path is None:
            raise DataError(
                f"{self.folder}: no file contains the hidden states of a conversation of {len(tokens)} tokens that begins "
                f"with {tokens[:8].tolist()}; write the states of the same data, chat template and max_length."
            )
        return read_state_file(path, tokens, self.layout)


def read_state_file(path: Path, tokens: Tensor, layout: StateLayout) -> Tensor:
    """Return the states in a file, if they are those of the tokens and fit the layout. Raises DataError."""
    try:
        with safe_open(path, framework="pt") as opened:
            token_ids = opened.get_tensor("token_ids")
            states: Tensor = opened.get_tensor("hidden_states")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: not a complete file of hidden states ({error}); write it again with vLLM.") from error
    if not torch.equal(token_ids.long(), tokens.long()):
        raise DataError(
            f"{path}: its {len(token_ids)} tokens are not those of the conversation of {len(tokens)}; write it again."
        )
    if tuple(states.shape) != (len(tokens), len(layout.layer_ids), layout.hidden_size):
        raise DataError(f"{path}: {_describe_shape(tuple(states.shape), layout)}")
    if not states.is_floating_point():
        raise DataError(f"{path}: hidden_states is {states.dtype}; expected: floating point.")
    return states


def _describe_shape(shape: Sequence[int], layout: StateLayout) -> str:
    return (
        f"hidden_states is {' x '.join(map(str, shape))}; expected: tokens x {len(layout.layer_ids)} x {layout.hidden_size}. "
        "hidden_state_layer_ids or the target differs."
    )


def state_file_path(folder: Path, token_digest: str) -> Path:
    """Return the file of a conversation, in one of 256 folders."""
    return folder / token_digest[:2] / f"{token_digest}.safetensors"


def check_manifest(folder: Path, layout: StateLayout, target_id: str) -> None:
    """Compare the manifest of a folder with what a training needs. Raises DataError, TargetError."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        layers, target = list(manifest["layer_ids"]), str(manifest["target"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); write the states into a new folder.") from error
    if layers != list(layout.layer_ids):
        raise TargetError(
            f"{path}: the files have the layers {layers}, and {list(layout.layer_ids)} are required; set a new folder."
        )
    if target_id and target != target_id:
        raise TargetError(f"{path}: the states are of the target {target}, and the target is {target_id}; set a new folder.")


def check_layout(stored_layer_ids: Sequence[int], aux_layer_ids: Sequence[int], target_parts: TargetParts) -> None:
    """Check that stored states contain what a drafter needs. Raises TargetError."""
    last = int(target_parts.config.num_hidden_layers)
    check_layers(aux_layer_ids, last)
    missing = [layer for layer in (*aux_layer_ids, last) if layer not in stored_layer_ids]
    if missing:
        raise TargetError(
            f"the hidden states contain the layers {list(stored_layer_ids)}, but layer {missing[0]} is required: write them with "
            f"eagle_aux_hidden_state_layer_ids {sorted({*aux_layer_ids, last})}."
        )


def compute_token_digest(tokens: Tensor) -> str:
    """Return a digest of a conversation's tokens."""
    return hashlib.sha256(tokens.to(torch.int64).cpu().numpy().tobytes()).hexdigest()


def get_text_decoder(model: Any) -> Any:
    """Return the text model of a Hugging Face causal language model, with `layers` and `norm`. Raises TargetError."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name in ("layers", "norm"):
        if not hasattr(inner, name):
            raise TargetError(
                f"{type(model).__name__}: its text model has no `{name}`, so its hidden states cannot be captured; "
                "write them with vLLM's extract_hidden_states."
            )
    return inner


def check_logits(config: Any) -> None:
    """Check in a target's text configuration that its logits are lm_head(state). Raises TargetError."""
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        value = getattr(config, name, None)
        if value not in (None, 1, 1.0):
            raise TargetError(f"the target's {name} is {value}: only targets whose logits are lm_head(state) are supported.")


def extract_target_parts(model: Any) -> TargetParts:
    """Return the parts of a loaded model. Raises TargetError."""
    config = model.config.get_text_config()
    check_logits(config)
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise TargetError(f"{type(model).__name__}: expected: an lm_head without bias.")
    return TargetParts(config, model.get_input_embeddings().weight.detach(), head.weight.detach(), get_text_decoder(model).norm)


def load_model(name: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a target with its weights. Raises TargetError."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=dtype)
        return model.to(device)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.model {name}: cannot be loaded: {_first_line(error)}") from error


def load_tokenizer(name: str, revision: str | None) -> Any:
    """Load the target's tokenizer. Raises TargetError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.model {name}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise TargetError(f"target.model {name}: its tokenizer is not a fast tokenizer, which is required for offsets of tokens.")
    return tokenizer


def load_target_parts(folder: Path, dtype: torch.dtype, device: torch.device) -> TargetParts:
    """Read only the embedding, lm_head and final norm of a target's folder. Raises TargetError."""
    try:
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
        header = read_headers(folder)
    except (OSError, ValueError, CheckpointError) as error:
        raise TargetError(f"target.model {folder}: cannot be read: {_first_line(error)}") from error
    names: dict[int, list[str]] = {}  # a tied weight has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for module in (model.get_input_embeddings(), model.get_output_embeddings(), get_text_decoder(model).norm):
        for name, parameter in list(module.named_parameters()):
            tensor_names = names[id(parameter)]
            stored = next((alias for alias in tensor_names if alias in header.tensors), None)
            if stored is None:
                raise TargetError(f"{folder}: its weights do not contain {tensor_names[0]}; set the folder of the target itself.")
            tensor = read_tensors(header, [stored])[stored].to(device=device, dtype=dtype)
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return extract_target_parts(model)


def check_layers(aux_layer_ids: Sequence[int], layer_count: int) -> None:
    """Check that a target of `layer_count` layers has the layers. Raises TargetError."""
    invalid = [layer for layer in aux_layer_ids if not 0 <= layer <= layer_count]
    if invalid:
        raise TargetError(
            f"aux_layer_ids contains layer {invalid[0]}, but the target has {layer_count} layers: 0 to {layer_count} are valid."
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
