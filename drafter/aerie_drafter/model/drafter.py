"""The drafter: decoder layers that read the target's hidden states and propose its next tokens.

    aux states of the target ─► [fc_norm per part | norm over all] ─► fc ─► hidden
    token ─► embed ─► input_layernorm ─┐
    hidden ──────────► hidden_norm ────┴► attention + MLP ─► norm ─┬► lm_head: logits over the draft vocabulary
                 ▲                                     │           │
                 └──────── EAGLE 3: before norm ───────┘           │
                 └──────── EAGLE 3.1 (norm_output): after norm ────┘     the hidden state of the next step

That is one layer. Further layers are between its MLP and the norm: each reads the state of the layer before, without the token.

Guarantees: logits and fed-back states are those of vLLM's drafter of the same configuration, to rounding (tests/vllm); the
final norm is applied exactly once to what is predicted from. Parameters are named as the tensors that vLLM loads.
The EAGLE 3.1 switches: vLLM pull request 42764; "Attention Drift", arXiv 2605.09992.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from aerie_drafter.config import DrafterConfig
from aerie_drafter.model.layers import GroupedAttention, LatentAttention, Mlp, ProjectedTokens, RmsNorm
from aerie_drafter.model.memory import KeyValueCache


class DrafterOutput(NamedTuple):
    """Output of one step, both [batch, length, hidden]."""

    normed_hidden: Tensor
    """State after the final norm, the input of `logits`."""
    next_hidden: Tensor
    """The hidden state of the next step."""


class DrafterLayer(nn.Module):
    """The first decoder layer; `midlayer` in checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RmsNorm(hidden, eps=eps)  # of the embedding
        self.hidden_norm = RmsNorm(hidden, eps=eps)
        self.self_attn = build_attention(config, 2 * hidden)
        self.post_attention_layernorm = RmsNorm(hidden, eps=eps)
        self.mlp = Mlp(hidden, config.intermediate_size)

    def project_tokens(self, embedded: Tensor) -> ProjectedTokens:
        """Compute what the embedding contributes to attention."""
        return ProjectedTokens.compute(self.input_layernorm(embedded), self.self_attn.input_projections)

    def forward(self, tokens: ProjectedTokens, hidden: Tensor, kv_cache: KeyValueCache) -> Tensor:
        """Return the state before the final norm, [batch, length, hidden]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        residual = residual + self.self_attn(tokens.add_hidden(normed), kv_cache)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class LaterLayer(nn.Module):
    """A decoder layer after the first; `layers.1`, `layers.2`, ... in checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(hidden, eps=eps)
        self.self_attn = build_attention(config, hidden)
        self.post_attention_layernorm = RmsNorm(hidden, eps=eps)
        self.mlp = Mlp(hidden, config.intermediate_size)

    def forward(self, hidden: Tensor, kv_cache: KeyValueCache) -> Tensor:
        """Return the state after the layer, [batch, length, hidden]."""
        normed = self.input_layernorm(hidden)
        residual = hidden + self.self_attn([project(normed) for project in self.self_attn.input_projections], kv_cache)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


def build_attention(config: DrafterConfig, input_size: int) -> GroupedAttention | LatentAttention:
    """Build the attention of the configuration's family."""
    return GroupedAttention(config, input_size) if config.mla is None else LatentAttention(config, config.mla, input_size)


class Drafter(nn.Module):
    """An EAGLE 3 or 3.1 drafter. Its embedding is the target's and is never trained."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, parts, eps = config.hidden_size, len(config.aux_layer_ids), config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(parts * config.target_hidden_size, hidden, bias=False)
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(config.target_hidden_size, eps=eps) for _ in range(parts))
        self.input_norm = RmsNorm(parts * config.target_hidden_size, eps=eps) if config.norm_before_fc else None
        self.midlayer = DrafterLayer(config)
        self.layers = nn.ModuleDict({str(number): LaterLayer(config) for number in range(1, config.num_hidden_layers)})
        self.norm = RmsNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        # An offset, not an id: token of the target = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        reachable = torch.zeros(config.vocab_size, dtype=torch.bool)
        reachable[: config.draft_vocab_size] = True
        self.register_buffer("t2d", reachable)

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Set the draft vocabulary: ids of the target, ascending, [draft_vocab_size]. Raises ValueError."""
        size, last = self.config.draft_vocab_size, self.config.vocab_size
        if token_ids.shape != (size,) or (token_ids[1:] <= token_ids[:-1]).any() or token_ids[0] < 0 or token_ids[-1] >= last:
            raise ValueError(f"the draft vocabulary must be {size} ids below {last}, ascending, each once.")
        self.d2t = token_ids.to(self.d2t.device) - torch.arange(size, device=self.d2t.device)
        self.t2d = torch.zeros_like(self.t2d)
        self.t2d[token_ids] = True

    @property
    def draft_token_ids(self) -> Tensor:
        """Return the target's ids of the draft vocabulary, by draft id, [draft_vocab_size]."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def fuse_aux_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        """Project the concatenated auxiliary states, lowest layer first, [..., parts x target_hidden], to [..., hidden]."""
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            parts = aux_hidden_states.chunk(len(self.fc_norm), dim=-1)
            aux_hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(aux_hidden_states)
        return fused

    def forward(self, tokens: Tensor, hidden: Tensor, kv_cache: KeyValueCache) -> DrafterOutput:
        """Compute one step for `tokens` [batch, length] and `hidden` [batch, length, hidden].

        In the first step column t contains token t + 1 and the fused state of t; its output predicts token t + 2. In a later
        step it contains the next token and the `next_hidden` of the previous step. `kv_cache` has a cache for each layer.
        """
        return self.run_step(self.project_tokens(tokens), hidden, kv_cache)

    def project_tokens(self, tokens: Tensor) -> ProjectedTokens:
        """Compute the part of `run_step` that depends on `tokens` alone."""
        return self.midlayer.project_tokens(self.embed_tokens(tokens))

    def run_step(self, tokens: ProjectedTokens, hidden: Tensor, kv_cache: KeyValueCache) -> DrafterOutput:
        """Compute one step; see `forward`."""
        output = self.midlayer(tokens, hidden, kv_cache)
        for layer, layer_cache in zip(self.layers.values(), kv_cache.later_layers, strict=True):
            output = layer(output, layer_cache)
        normed = self.norm(output)
        return DrafterOutput(normed, normed if self.config.norm_output else output)

    def logits(self, normed_hidden: Tensor) -> Tensor:
        """Return the logits over the draft vocabulary, [..., draft_vocab_size]."""
        logits: Tensor = self.lm_head(normed_hidden)
        return logits

    def argmax_tokens(self, normed_hidden: Tensor) -> Tensor:
        """Return the most likely token per column, as ids of the target, [...]."""
        best = self.logits(normed_hidden).argmax(dim=-1)
        return best + self.d2t[best]
