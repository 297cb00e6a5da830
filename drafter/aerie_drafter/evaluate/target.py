"""The target as evaluation needs it: next-token logits and auxiliary states of a Hugging Face causal language model.

Auxiliary layer k is the input of decoder layer k; with k = the number of layers, the output of the last one before the final
norm. That is what vLLM hands to a drafter (`eagle_aux_hidden_state_layer_ids`), and not what `output_hidden_states` gives for
the last id.
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
    """What the target makes of tokens."""

    logits: Tensor
    """[batch, length, vocabulary] of the next token."""
    aux_hidden_states: Tensor
    """[batch, length, parts x hidden]: auxiliary states side by side, lowest layer first."""


class TargetRunner:
    """A causal language model of `transformers`, frozen."""

    def __init__(self, model: Any, aux_layer_ids: Sequence[int]) -> None:
        """Raises TargetError for a model of another build, or layers that it has not."""
        self.model = model.eval()
        self.device = torch.device(model.device)
        inner = get_text_decoder(model)
        places = [*inner.layers, inner.norm]
        if max(aux_layer_ids) >= len(places):
            raise TargetError(
                f"the drafter reads layer {max(aux_layer_ids)}, and the target has {len(places) - 1}: "
                "it was trained for another one."
            )
        self._aux_modules = [places[number] for number in sorted(aux_layer_ids)]

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cache: Any = None, attention_mask: Tensor | None = None) -> TargetOutput:
        """Run [batch, length]; with `cache` after what it holds. `mask` [batch, held + length] is 0 for padding before a text."""
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

        def keep(_: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            states.append(positional[0] if positional else named["hidden_states"])

        with ExitStack() as stack:
            for place in self._aux_modules:
                stack.callback(place.register_forward_pre_hook(keep, with_kwargs=True).remove)
            yield states
