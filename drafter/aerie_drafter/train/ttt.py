"""The loss of training-time test (TTT): the drafter unrolled over its own states, against the target's distributions.

    tokens            x0  x1  x2  x3  x4 ...      column t of step i
    column t, step 0  reads x[t+1] and the fused state of t, is taught the target's distribution at t+1   (of token t+2)
    column t, step i  reads x[t+1+i] and its own state of step i-1, is taught the one at t+1+i            (of token t+2+i)

The tokens read are those of the text (teacher forcing); the states are the drafter's own, as they will be in serving. The loss
of a column is KL(target || drafter), the target's distribution restricted to the draft vocabulary and normalised again; its
gradient is that of the soft cross entropy. A position counts where the token it predicts is one to learn (the assistant's)
and where the target's likeliest token is in the draft vocabulary. Steps are weighted with decay^i. Source: EAGLE-3
(arXiv 2503.01840) and the trainings of SafeAILab/EAGLE, TorchSpec and SpecForge, which agree on this.

The same position of the target is taught to one column of each step. So the loss goes through the counted positions a slice
at a time: the target's logits of a slice are made once from its final states, serve all steps, and are gone. The gradients of
the drafter's states and of its lm_head are made in the same pass, so nothing of [positions, vocabulary] outlives a slice or
is made twice.

Guarantee: loss and gradients equal those of the naive unroll, to rounding. Not guaranteed: second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aerie_drafter.model import Drafter, Unroll

SLICE_ELEMENTS = 2**24
"""Numbers in one slice of logits: 64 MiB in float32."""


@dataclass(frozen=True)
class Batch:
    """Texts and what the target made of them. Rows shorter than the longest are padded at their end, with `counted` False."""

    tokens: Tensor
    """[batch, length], ids of the target."""
    counted: Tensor
    """[batch, length], bool: tokens that the drafter is to learn to predict."""
    aux: Tensor
    """[batch, length, parts x target_hidden]: the auxiliary states side by side, lowest layer first."""
    final: Tensor
    """[batch, length, target_hidden]: the state that the target's lm_head reads, after the final norm."""


@dataclass(frozen=True)
class Tally:
    """Sums over columns, for each step; tallies of batches and processes add up. `values` is [5, horizon] in float64."""

    values: Tensor

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.values + other.values)

    @classmethod
    def empty(cls, horizon: int, device: torch.device | str = "cpu") -> Tally:
        """Of no columns."""
        return cls(torch.zeros(5, horizon, dtype=torch.float64, device=device))

    @property
    def positions(self) -> float:
        """Positions that the loss counts in step 0; what `total` is divided by to be a mean."""
        return float(self.values[0, 0])

    @property
    def divergence(self) -> list[float]:
        """Mean KL per step, in nats."""
        return _ratio(self.values[1], self.values[0])

    @property
    def conditional(self) -> list[float]:
        """Per step: the share of columns where the drafter's likeliest token is the target's, of those where all earlier
        steps agreed."""
        return _ratio(self.values[4], self.values[3])

    @property
    def unconditional(self) -> list[float]:
        """Per step: the share of columns where this step and all earlier ones agreed."""
        return _ratio(self.values[4], self.values[2])


def _ratio(above: Tensor, below: Tensor) -> list[float]:
    return [float(a / b) if b else 0.0 for a, b in zip(above.tolist(), below.tolist(), strict=True)]


class Outcome(NamedTuple):
    """What the loss of one batch gives."""

    total: Tensor
    """The weighted sum over steps and counted positions, with gradient; divided by `tally.positions` it is the loss."""
    tally: Tally
    agreed: Tensor
    """[horizon, batch, length - 1], bool: the drafter's likeliest token is the target's, where counted; a tie for the first
    place counts as agreement."""


class TrainingTimeTest(nn.Module):
    """The loss as a module, so that DistributedDataParallel sees one forward per batch.

    `teacher` is the weight of the target's lm_head, [vocabulary, target_hidden]; it is kept as it is, outside the parameters.
    """

    def __init__(
        self, drafter: Drafter, teacher: Tensor, *, horizon: int = 7, decay: float = 0.8, slice_elements: int = SLICE_ELEMENTS
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.teacher = teacher.detach()
        self.horizon, self.decay, self.slice_elements = horizon, decay, slice_elements

    def forward(self, batch: Batch) -> Outcome:
        """The loss of a batch; with gradients off, only the figures."""
        drafter, horizon = self.drafter, self.horizon
        states = unroll(drafter, batch.tokens, batch.aux, horizon)
        rows, places = _positions(batch.counted)
        total, counts, divergence, agreed = _Loss.apply(  # type: ignore[no-untyped-call]
            _Fixed(
                final=batch.final,
                teacher=self.teacher,
                tokens=drafter.draft_tokens,
                reachable=drafter.t2d,
                rows=rows,
                places=places,
                weights=tuple(self.decay**step for step in range(horizon)),
                slice_elements=self.slice_elements,
                gradients=torch.is_grad_enabled(),
            ),
            drafter.lm_head.weight,
            *states,
        )
        values = torch.cat([torch.stack([counts, divergence]), survival(agreed, batch.counted)])
        return Outcome(total, Tally(values), agreed)


def unroll(drafter: Drafter, tokens: Tensor, aux: Tensor, horizon: int) -> list[Tensor]:
    """What each step predicts from: `horizon` tensors [batch, length - 1, hidden], after the final norm.

    Columns that run out of text read token 0; nothing but their own later steps sees them.
    """
    memory, columns = Unroll(), tokens.shape[1] - 1
    hidden = drafter.fuse(aux[:, :-1].to(drafter.fc.weight.dtype))
    ahead = nn.functional.pad(tokens, (0, horizon))
    states = []
    for step in range(horizon):
        normed, hidden = drafter(ahead[:, 1 + step : 1 + step + columns], hidden, memory)
        states.append(normed)
    return states


def survival(agreed: Tensor, counted: Tensor) -> Tensor:
    """Rows 2 to 4 of a tally, [3, horizon]: columns whose steps 0..i are all counted; of these, where all earlier steps
    agreed; of these, where step i agreed too."""
    horizon, columns = agreed.shape[0], agreed.shape[2]
    ahead = nn.functional.pad(counted, (0, horizon))
    reached = torch.stack([ahead[:, 2 + step : 2 + step + columns] for step in range(horizon)]).cumprod(0).bool()
    through = (agreed & reached).cumprod(0).bool()
    before = torch.cat([reached[:1], through[:-1] & reached[1:]])
    return torch.stack([part.sum((1, 2), dtype=torch.float64) for part in (reached, before, through)])


def walk(agreed: Tensor, counted: Tensor, tokens: int) -> tuple[int, int]:
    """Greedy speculation over the text: (tokens emitted, verification steps), for K = `tokens` <= horizon.

    A draft begins at a column, is accepted as far as steps agree, and the next one begins after the accepted tokens and the
    bonus token. Exact for texts that the target itself wrote greedily; for others an estimate. In a run of counted tokens the
    first is the prompt's, so drafts begin with the second; what a draft would emit beyond the run's end does not count.
    """
    emitted = steps = 0
    lengths = agreed[:tokens].long().cumprod(0).sum(0).tolist()
    for row, marks in zip(lengths, counted.tolist(), strict=True):
        place = 2  # the token that the next verification emits first; column t drafts token t + 2
        while place < len(marks):
            if not (marks[place] and marks[place - 1]):
                place += 1
                continue
            left = 1
            while left <= row[place - 2] and place + left < len(marks) and marks[place + left]:
                left += 1
            emitted, steps, place = emitted + left, steps + 1, place + left
    return emitted, steps


def _positions(counted: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, places) of the target's states that predict a counted token and that some column is taught, [positions] each."""
    predicts = counted[:, 2:].nonzero(as_tuple=True)  # place 0 is taught to no column
    return predicts[0], predicts[1] + 1


class _Fixed(NamedTuple):
    """What the loss reads without gradient."""

    final: Tensor
    teacher: Tensor
    tokens: Tensor
    reachable: Tensor
    rows: Tensor
    places: Tensor
    weights: Sequence[float]
    slice_elements: int
    gradients: bool


class _Loss(torch.autograd.Function):
    """The loss and its gradients in one pass over slices of positions."""

    @staticmethod
    def forward(ctx: Any, fixed: _Fixed, head: Tensor, *states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, columns, _ = states[0].shape
        device, horizon = head.device, len(states)
        kind = device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        exact = torch.promote_types(head.dtype, torch.float32)
        weight = head.to(compute)
        whole = len(fixed.tokens) == len(fixed.reachable)
        draft_ids = torch.zeros(len(fixed.reachable), dtype=torch.long, device=device)  # by token; 0 for those outside
        draft_ids[fixed.tokens] = torch.arange(len(fixed.tokens), device=device)
        flat = [state.reshape(batch * columns, -1) for state in states]
        to_states = [torch.zeros_like(state) for state in flat] if fixed.gradients else []
        to_head = torch.zeros_like(head, dtype=exact) if fixed.gradients else None
        total = torch.zeros((), dtype=exact, device=device)
        counts = torch.zeros(horizon, dtype=torch.float64, device=device)
        divergence = torch.zeros(horizon, dtype=torch.float64, device=device)
        agreed = torch.zeros(horizon, batch * columns + 1, dtype=torch.bool, device=device)  # the last takes what is no column
        size = max(1, fixed.slice_elements // len(fixed.reachable))
        with torch.autocast(kind, enabled=False):
            for rows, places in zip(torch.split(fixed.rows, size), torch.split(fixed.places, size), strict=True):
                taught = (fixed.final[rows, places].to(fixed.teacher.dtype) @ fixed.teacher.T).to(exact)
                best = taught.argmax(-1)
                inside = fixed.reachable[best]
                if not whole:
                    taught = taught[:, fixed.tokens]
                chance = taught.softmax(-1)
                # The log of the sum of exponentials, from what the likeliest token got.
                entropy = taught.amax(-1) - chance.amax(-1).log() - torch.linalg.vecdot(chance, taught)
                del taught
                known = draft_ids[best].unsqueeze(-1)
                for step, state in enumerate(flat):
                    valid = places >= step + 1
                    column = rows * columns + (places - 1 - step).clamp(min=0)  # those clamped weigh nothing
                    read = state[column].to(compute)
                    logits = (read @ weight.T).to(exact)
                    top = logits.amax(-1, keepdim=True)
                    agrees = (logits.gather(-1, known) == top).squeeze(-1) & inside
                    agreed[step, column.masked_fill(~valid, batch * columns)] = agrees
                    cross = torch.linalg.vecdot(chance, logits)
                    total_chance = logits.sub_(top).exp_().sum(-1, keepdim=True)
                    apart = (top + total_chance.log()).squeeze(-1) - cross - entropy
                    used = (inside & valid).to(exact)
                    counts[step] += used.sum()
                    apart = (apart * used).sum()
                    divergence[step] += apart
                    total += fixed.weights[step] * apart
                    if to_head is not None:
                        grad = logits.div_(total_chance).sub_(chance)
                        grad = grad.mul_((used * fixed.weights[step]).unsqueeze(-1)).to(compute)
                        to_states[step].index_add_(0, column, (grad @ weight).to(state.dtype))
                        _add_product(to_head, grad.T, read)
        if to_head is not None:
            ctx.save_for_backward(to_head.to(head.dtype), *to_states)
            ctx.shape = states[0].shape
        agreed = agreed[:, :-1].reshape(horizon, batch, columns)
        ctx.mark_non_differentiable(counts, divergence, agreed)
        return total, counts, divergence, agreed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        to_head, *to_states = ctx.saved_tensors
        return None, to_head * grad, *((part * grad).view(ctx.shape) for part in to_states)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a temporary where the types allow."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
