"""How a drafter changes as it drafts on by itself: three drift numbers and the acceptance of each step.

Attention drift ("Attention Drift: What Autoregressive Speculative Decoding Models Learn", arXiv 2605.09992): in EAGLE 3 the
state that is fed back grows from step to step, and attention moves from the first token of the text, the sink, to the tokens
that the drafter made itself. EAGLE 3.1 feeds back the state after the final norm, which holds its size.

    norm        mean length of the state that the step feeds to the next
    sink        mean attention mass on the first token of the text, over heads
    own         mean attention mass on the tokens that the drafter made itself; 0 in step 1, which reads a token of the target
    accepted    share of drafts whose tokens 1..k are all accepted

All columns of an answer draft at once, each from its own tokens; every column whose K drafted tokens the text can confirm or
refuse counts alike. `accepted` is therefore the mean over columns, not over the columns that a server would visit.
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
    norm: list[float]
    sink: list[float]
    own: list[float]
    accepted: list[float]

    @property
    def norm_ratio(self) -> float:
        """Length of the fed-back state in the last step over that in the first; about 1 where nothing drifts."""
        return self.norm[-1] / self.norm[0]


class _DriftStep(NamedTuple):
    """Of one step, [batch, columns] each."""

    norm: Tensor
    sink: Tensor
    own: Tensor
    is_accepted: Tensor


@torch.no_grad()
def compute_drift_steps(drafter: Drafter, tokens: Tensor, aux_hidden_states: Tensor, k: int) -> list[_DriftStep]:
    """The numbers of every column of `tokens` [batch, length], for k steps."""
    memory, columns = UnrolledCache(), tokens.shape[1] - 1
    read, hidden = tokens[:, 1:], drafter.fuse_aux_hidden_states(aux_hidden_states[:, :-1])
    ahead = torch.nn.functional.pad(tokens[:, 2:], (0, k + 1), value=-1)
    agrees = torch.ones_like(read, dtype=torch.bool)
    found = []
    for step in range(k):
        normed, hidden = drafter(read, hidden, memory)
        read = drafter.argmax_tokens(normed)
        agrees = agrees & (read == ahead[:, step : step + columns])
        sink, own = compute_attention_masses(memory)
        found.append(_DriftStep(hidden.norm(dim=-1), sink, own, agrees))
    return found


def compute_attention_masses(kv_cache: UnrolledCache) -> tuple[Tensor, Tensor]:
    """Attention mass of the latest step on the first token and on the later steps' tokens: mean over heads, [batch, columns]."""
    query, first, logsum = kv_cache.last_query, kv_cache.first_keys, kv_cache.last_logsum
    if query is None or first is None or logsum is None:
        raise ValueError("nothing has been attended yet.")

    def mass(key: Tensor) -> Tensor:
        return ((query * key).sum(-1) * kv_cache.attention_scale - logsum).exp().mean(1)

    sink = mass(first[:, :, :1])
    return sink, torch.stack([mass(key) for key in kv_cache.later_keys]).sum(0) if kv_cache.later_keys else torch.zeros_like(sink)


def measure_drift(
    pair: ModelPair, answered_texts: Sequence[AnsweredText], k: int = DEFAULT_DRIFT_STEPS, batch_size: int = 16
) -> DriftProfile:
    """Drift of a drafter over answered texts (`aerie_drafter.evaluate.offline.texts`). Raises ValueError where no column counts."""
    sums, counted = torch.zeros(4, k, dtype=torch.float64), 0
    ordered = sorted(answered_texts, key=lambda text: len(text.tokens))
    for begin in range(0, len(ordered), batch_size):
        some = ordered[begin : begin + batch_size]
        tokens = torch.nn.utils.rnn.pad_sequence([text.tokens for text in some], batch_first=True, padding_value=0)
        tokens = tokens.to(pair.target.device)
        column = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        first = torch.tensor([[text.prompt_length - 1] for text in some], device=tokens.device)
        last = torch.tensor([[len(text.tokens) - 2 - k] for text in some], device=tokens.device)
        used = (column >= first) & (column <= last)
        counted += int(used.sum())
        for number, step in enumerate(compute_drift_steps(pair.drafter, tokens, pair.target(tokens).aux_hidden_states, k)):
            sums[:, number] += torch.stack([part[used].double().sum() for part in step]).cpu()
    if not counted:
        raise ValueError(f"no answer is longer than {k} tokens.")
    norm, sink, own, accepted = (sums / counted).tolist()
    return DriftProfile(counted, norm, sink, own, accepted)


def plot_drift(drift_by_drafter: dict[str, DriftProfile], file: Path) -> None:
    """Draw the four numbers of some drafters over the step; the file's ending says the form (svg, png)."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = (
        ("norm", "length of the fed-back state"),
        ("sink", "attention on the first token"),
        ("own", "attention on own tokens"),
        ("accepted", "drafts accepted up to here"),
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
