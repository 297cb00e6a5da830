"""The target for evaluation: next-token logits and auxiliary states of a Hugging Face causal language model.

Auxiliary layer k is the input of decoder layer k; with k = the number of layers, the output of the last one before the final
norm. vLLM gives these states to a drafter (`eagle_aux_hidden_state_layer_ids`). `output_hidden_states` differs in the last id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aerie_drafter.errors import TargetError
from aerie_drafter.train.states import get_text_decoder


class TargetOutput(NamedTuple):
    """Output of the target for tokens."""

    logits: Tensor
    """[batch, length, vocabulary] of the next token."""
    aux_hidden_states: Tensor
    """[batch, length, parts x hidden]: auxiliary states side by side, lowest layer first."""


class TargetRunner:
    """A frozen causal language model of `transformers`."""

    def __init__(self, model: Any, aux_layer_ids: Sequence[int]) -> None:
        """Raises TargetError for an unsupported model, or for layers that it does not have."""
        self.model = model.eval()
        self.device = torch.device(model.device)
        decoder = get_text_decoder(model)
        modules = [*decoder.layers, decoder.norm]
        if max(aux_layer_ids) >= len(modules):
            raise TargetError(
                f"the drafter reads layer {max(aux_layer_ids)}, and the target has {len(modules) - 1}: "
                "it was trained for another target."
            )
        self._aux_modules = [modules[number] for number in sorted(aux_layer_ids)]

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cache: Any = None, attention_mask: Tensor | None = None) -> TargetOutput:
        """Run [batch, length] after the content of `cache`. `attention_mask` [batch, cached + length] is 0 for left padding."""
        positions = None if attention_mask is None else (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        with self._capture_aux_states() as states:
            output = self.model(
                input_ids=tokens,
                attention_mask=attention_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return TargetOutput(output.logits, torch.cat(states, dim=-1))

    @contextmanager
    def _capture_aux_states(self) -> Iterator[list[Tensor]]:
        states: list[Tensor] = []

        def hook(_: nn.Module, positional: tuple[Tensor, ...], keyword: dict[str, Tensor]) -> None:
            states.append(positional[0] if positional else keyword["hidden_states"])

        with ExitStack() as stack:
            for module in self._aux_modules:
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield states
