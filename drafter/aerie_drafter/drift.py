"""Drift of a drafter over its steps: state norm, attention to the first and to its own tokens, and acceptance.

Attention drift ("Attention Drift: What Autoregressive Speculative Decoding Models Learn", arXiv 2605.09992): in EAGLE 3 the
state that is fed back grows from step to step, and attention moves from the first token of the text (the attention sink) to the
drafter's own tokens. Of several layers, the attention is that of the first.
EAGLE 3.1 feeds back the state after the final norm, whose size stays constant.

All columns of an answer draft at once, each from its own tokens. Every column counts whose K draft tokens the text can confirm or
reject. `cumulative_acceptance` is therefore the mean over all columns, not over those that a server would visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from aerie_drafter.evaluate.acceptance import AnsweredText
from aerie_drafter.evaluate.offline import ModelPair
from aerie_drafter.model import Drafter, UnrolledCache

DEFAULT_DRIFT_STEPS = 8


@dataclass(frozen=True)
class DriftProfile:
    """Means per step 1..K over `columns` columns."""

    columns: int
    state_norm: list[float]
    """Mean norm of the state that the step feeds to the next."""
    first_token_attention: list[float]
    """Mean attention mass on the first token of the text, over heads."""
    draft_token_attention: list[float]
    """Mean attention mass on the drafter's own tokens; 0 in step 1, which reads a token of the target."""
    cumulative_acceptance: list[float]
    """Share of drafts whose tokens 1..k are all accepted."""

    @property
    def state_norm_ratio(self) -> float:
        """Norm of the state in the last step divided by that in the first; about 1 without drift."""
        return self.state_norm[-1] / self.state_norm[0]


class _DriftStep(NamedTuple):
    """Values of one step, [batch, columns] each, in the order of DriftProfile."""

    state_norm: Tensor
    first_token_attention: Tensor
    draft_token_attention: Tensor
    is_accepted: Tensor


@torch.no_grad()
def compute_drift_steps(drafter: Drafter, tokens: Tensor, aux_hidden_states: Tensor, k: int) -> list[_DriftStep]:
    """Compute k steps from every column of `tokens` [batch, length]."""
    kv_cache, columns = UnrolledCache(num_layers=drafter.config.num_hidden_layers), tokens.shape[1] - 1
    input_tokens, hidden = tokens[:, 1:], drafter.fuse_aux_hidden_states(aux_hidden_states[:, :-1])
    expected_tokens = torch.nn.functional.pad(tokens[:, 2:], (0, k + 1), value=-1)
    is_accepted = torch.ones_like(input_tokens, dtype=torch.bool)
    steps = []
    for step in range(k):
        normed, hidden = drafter(input_tokens, hidden, kv_cache)
        input_tokens = drafter.argmax_tokens(normed)
        is_accepted = is_accepted & (input_tokens == expected_tokens[:, step : step + columns])
        first_token_mass, draft_tokens_mass = compute_attention_masses(kv_cache)
        steps.append(_DriftStep(hidden.norm(dim=-1), first_token_mass, draft_tokens_mass, is_accepted))
    return steps


def compute_attention_masses(kv_cache: UnrolledCache) -> tuple[Tensor, Tensor]:
    """Return the attention mass of the last step on the first token and on draft tokens: mean over heads, [batch, columns]."""
    query, first, logsum = kv_cache.last_query, kv_cache.first_keys, kv_cache.last_logsum
    if query is None or first is None or logsum is None:
        raise ValueError("nothing has been attended yet.")

    def mass(key: Tensor) -> Tensor:
        return ((query * key).sum(-1) * kv_cache.attention_scale - logsum).exp().mean(1)

    sink = mass(first[:, :, :1])
    if kv_cache.window is not None:
        sink[:, max(0, kv_cache.window - len(kv_cache.later_keys)) :] = 0  # their window begins after the first token
    return sink, torch.stack([mass(key) for key in kv_cache.later_keys]).sum(0) if kv_cache.later_keys else torch.zeros_like(sink)


def measure_drift(
    pair: ModelPair, answered_texts: Sequence[AnsweredText], k: int = DEFAULT_DRIFT_STEPS, batch_size: int = 16
) -> DriftProfile:
    """Measure drift over answered texts (`evaluate.offline.answer_prompts`). Raises ValueError if no column counts."""
    sums, column_count = torch.zeros(4, k, dtype=torch.float64), 0
    ordered = sorted(answered_texts, key=lambda text: len(text.tokens))
    for begin in range(0, len(ordered), batch_size):
        batch = ordered[begin : begin + batch_size]
        tokens = torch.nn.utils.rnn.pad_sequence([text.tokens for text in batch], batch_first=True, padding_value=0)
        tokens = tokens.to(pair.target.device)
        column = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        first = torch.tensor([[text.prompt_length - 1] for text in batch], device=tokens.device)
        last = torch.tensor([[len(text.tokens) - 2 - k] for text in batch], device=tokens.device)
        used = (column >= first) & (column <= last)
        column_count += int(used.sum())
        for number, step in enumerate(compute_drift_steps(pair.drafter, tokens, pair.target(tokens).aux_hidden_states, k)):
            sums[:, number] += torch.stack([part[used].double().sum() for part in step]).cpu()
    if not column_count:
        raise ValueError(f"no answer is longer than {k} tokens.")
    return DriftProfile(column_count, *(sums / column_count).tolist())


def plot_drift(drift_by_drafter: dict[str, DriftProfile], file: Path) -> None:
    """Plot the four values of each drafter over the steps. The file's suffix selects the format (svg, png)."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = (
        ("state_norm", "norm of the fed-back state"),
        ("first_token_attention", "attention on the first token"),
        ("draft_token_attention", "attention on own tokens"),
        ("cumulative_acceptance", "drafts accepted up to here"),
    )
    with mpl.rc_context({"svg.hashsalt": "drift", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 2.9), layout="constrained")
        for axes, (name, title) in zip(figure.subplots(1, 4), panels, strict=True):
            for (label, drift), marker in zip(drift_by_drafter.items(), "osd^v<>", strict=False):
                values = getattr(drift, name)
                axes.plot(range(1, len(values) + 1), values, marker=marker, markersize=4, linewidth=1.5, label=label)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.25)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(drift_by_drafter), frameon=False)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)
