"""The loss of training-time test (TTT): the drafter unrolled over its own states, against the target's distributions.

    tokens            x0  x1  x2  x3  x4 ...      column t of step i
    column t, step 0  reads x[t+1] and the fused state of t, learns the target's distribution at t+1   (of token t+2)
    column t, step i  reads x[t+1+i] and its own state of step i-1, learns the one at t+1+i            (of token t+2+i)

The input tokens are those of the text (teacher forcing); the states are the drafter's own, as in serving. The loss of a column is
a mixture of those in `aerie_drafter.train.losses`; by default KL(target || drafter), as in EAGLE-3 (arXiv 2503.01840) and the
training code of SafeAILab/EAGLE, TorchSpec and SpecForge. A position counts if the loss mask contains the token that it predicts
(the assistant's). With KL alone, the target's most likely token has to be in the draft vocabulary too.

One column of each step learns the same position of the target. So the loss processes the positions in slices: the target's logits
of a slice are computed once from its final states, used for all steps, and freed. The gradients of the drafter's states and of
its lm_head are computed in the same pass, so no tensor [positions, vocabulary] outlives a slice or is computed twice.

Guarantee: loss and gradients equal those of the naive unroll, to rounding. Not guaranteed: second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aerie_drafter.model import Drafter, ProjectedTokens, UnrolledCache
from aerie_drafter.train.losses import LossMixture, TargetSlice, mixture_value_and_gradient, sum_of_minima

LOGIT_SLICE_ELEMENTS = 2**24
"""Elements of one slice of logits: 64 MiB in float32."""
CPU_SLICE_POSITIONS = 256
"""Most positions of a slice on CPU: larger products are not faster there, and the slice would leave the cache."""


def count_slice_positions(elements: int, vocabulary: int, device_type: str) -> int:
    """Return the number of positions of a slice with at most that many logits."""
    positions = max(1, elements // vocabulary)
    return min(positions, CPU_SLICE_POSITIONS) if device_type == "cpu" else positions


@dataclass(frozen=True)
class TrainingBatch:
    """Texts with the target's states. Shorter rows are padded at their end, where `loss_mask` is False."""

    tokens: Tensor
    """[batch, length], ids of the target."""
    loss_mask: Tensor
    """[batch, length], bool: tokens that the drafter learns to predict."""
    aux_hidden_states: Tensor
    """[batch, length, parts x target_hidden]: the auxiliary states side by side, lowest layer first."""
    final_hidden_states: Tensor
    """[batch, length, target_hidden]: the state that the target's lm_head reads, after the final norm."""
    text_starts: Tensor | None = None
    """[batch, length], int: the index of the first token of each token's text, if a row contains several texts, which do not see
    each other (`aerie_drafter.train.packing`). None: a row is one text."""


@dataclass(frozen=True)
class TrainingMetrics:
    """Sums over columns for each step, [8, horizon] in float64; those of batches and processes can be added."""

    sums: Tensor

    def __add__(self, other: TrainingMetrics) -> TrainingMetrics:
        return TrainingMetrics(self.sums + other.sums)

    @classmethod
    def zero(cls, horizon: int, device: torch.device | str = "cpu") -> TrainingMetrics:
        """Return metrics without columns."""
        return cls(torch.zeros(8, horizon, dtype=torch.float64, device=device))

    @property
    def position_count(self) -> float:
        """Return the number of positions of step 0; `LossOutput.weighted_sum` divided by it is the mean loss."""
        return float(self.sums[0, 0])

    @property
    def mean_kl(self) -> list[float]:
        """Return the mean KL per step, in nats."""
        return _ratio(self.sums[1], self.sums[0])

    @property
    def conditional_acceptance(self) -> list[float]:
        """Return the share of columns that match the target's most likely token, per step, if all earlier steps matched."""
        return _ratio(self.sums[4], self.sums[3])

    @property
    def cumulative_acceptance(self) -> list[float]:
        """Return the share of columns where this step and all earlier ones matched, per step."""
        return _ratio(self.sums[4], self.sums[2])

    @property
    def drawn_acceptance(self) -> list[float]:
        """Return the chance that a drawn draft token is accepted, per step: mean of the sum of min(p, q)."""
        return _ratio(self.sums[6], self.sums[5])

    @property
    def greedy_acceptance(self) -> list[float]:
        """Return the chance that a greedy draft token is accepted, per step: mean of the target's p(argmax q)."""
        return _ratio(self.sums[7], self.sums[5])


def _ratio(above: Tensor, below: Tensor) -> list[float]:
    return [float(a / b) if b else 0.0 for a, b in zip(above.tolist(), below.tolist(), strict=True)]


class ColumnAcceptance(NamedTuple):
    """Acceptance of each column at one temperature of target and drafter, [horizon, batch, length - 1].

    A step is reached only if the earlier draft tokens equal the text's, because those are its input. Columns that learn nothing
    are 0. At temperature 0 all four are whether the drafter's most likely token is the target's.
    """

    drawn: Tensor
    """Chance that a token drawn from q is accepted: the sum of min(p, q), over the target's whole vocabulary."""
    greedy: Tensor
    """Chance that the drafter's most likely token is accepted: p(argmax q)."""
    drawn_text: Tensor
    """Chance that the text's token was an accepted one, with drawn drafts: min(1, q / p)."""
    greedy_text: Tensor
    """The same with greedy drafts: 1 where the drafter's most likely token is the text's, else 0."""


class LossOutput(NamedTuple):
    """Loss of one batch."""

    weighted_sum: Tensor
    """Weighted sum over steps and positions, with gradient; divided by `metrics.position_count` it is the loss."""
    metrics: TrainingMetrics
    argmax_matches: Tensor
    """[horizon, batch, length - 1], bool: whether the drafter's most likely token is the target's; a tie is a match."""
    acceptance: tuple[ColumnAcceptance, ...]
    """The acceptance at each of the temperatures."""


class TrainingTimeTest(nn.Module):
    """The loss as a module, so that DistributedDataParallel sees one forward per batch.

    `target_lm_head` is the weight of the target's lm_head, [vocabulary, target_hidden]; it is not a parameter. `step_weights`
    has a weight for each of the horizon's steps. The metrics are those of the first of `temperatures`. `recompute` saves
    memory in exchange for time (`unroll_drafter`).
    """

    def __init__(
        self,
        drafter: Drafter,
        target_lm_head: Tensor,
        *,
        step_weights: Sequence[float],
        mixture: LossMixture | None = None,
        temperatures: Sequence[float] = (1.0,),
        slice_elements: int = LOGIT_SLICE_ELEMENTS,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.target_lm_head = target_lm_head.detach()
        self.step_weights, self.horizon = tuple(step_weights), len(step_weights)
        self.mixture, self.temperatures = mixture or LossMixture(), tuple(temperatures)
        self.slice_elements, self.recompute = slice_elements, recompute

    def forward(self, batch: TrainingBatch) -> LossOutput:
        """Compute the loss of a batch; without gradients, only the metrics."""
        drafter = self.drafter
        recompute = self.recompute and torch.is_grad_enabled()
        states = unroll_drafter(
            drafter, batch.tokens, batch.aux_hidden_states, self.horizon, batch.text_starts, recompute=recompute
        )
        starts = torch.zeros_like(batch.tokens) if batch.text_starts is None else batch.text_starts
        # Column t predicts token t + 2 first, so no column of a text predicts its first two tokens.
        loss_mask = batch.loss_mask & (torch.arange(starts.shape[1], device=starts.device) - starts >= 2)
        rows, positions = _loss_positions(loss_mask)
        columns_before = positions - starts[rows, positions]
        total, counts, divergence, argmax_matches, acceptance = _SlicedLoss.apply(  # type: ignore[no-untyped-call]
            _LossInputs(
                final_hidden_states=batch.final_hidden_states,
                target_lm_head=self.target_lm_head,
                draft_token_ids=drafter.draft_token_ids,
                t2d=drafter.t2d,
                rows=rows,
                positions=positions,
                columns_before=columns_before,
                next_tokens=batch.tokens[rows, positions + 1],
                step_weights=self.step_weights,
                mixture=self.mixture,
                temperatures=self.temperatures,
                slice_elements=self.slice_elements,
                needs_gradients=torch.is_grad_enabled(),
            ),
            drafter.lm_head.weight,
            *states,
        )
        acceptance = tuple(ColumnAcceptance(*at_temperature) for at_temperature in acceptance)
        columns = torch.stack([(columns_before > step).sum() for step in range(self.horizon)])
        sums = torch.cat(
            [
                torch.stack([counts, divergence]),
                count_surviving_columns(argmax_matches, loss_mask),
                torch.stack([columns, *(part.sum((1, 2), dtype=torch.float64) for part in acceptance[0][:2])]),
            ]
        )
        return LossOutput(total, TrainingMetrics(sums), argmax_matches, acceptance)


def decaying_weights(horizon: int, decay: float = 0.8) -> tuple[float, ...]:
    """Return the weights decay^0, decay^1, ... of a loss's steps."""
    return tuple(decay**step for step in range(horizon))


def unroll_drafter(
    drafter: Drafter,
    tokens: Tensor,
    aux_hidden_states: Tensor,
    horizon: int,
    text_starts: Tensor | None = None,
    *,
    recompute: bool = False,
) -> list[Tensor]:
    """Return the states of each step after the final norm: `horizon` tensors [batch, length - 1, hidden].

    Columns past the end of the text read token 0, or tokens of the next text; only their own later steps see them. With
    `recompute` the backward pass computes the activations of a step again; only its input, keys and values are kept.
    """
    columns = tokens.shape[1] - 1
    starts = None if text_starts is None else text_starts[:, :columns]
    kv_cache = UnrolledCache(starts, num_layers=drafter.config.num_hidden_layers)
    hidden = drafter.fuse_aux_hidden_states(aux_hidden_states[:, :-1].to(drafter.fc.weight.dtype))
    read_tokens = nn.functional.pad(tokens[:, 1:], (0, horizon - 1))
    states = []
    for step_tokens in drafter.project_tokens(read_tokens).windows(columns, horizon):
        if recompute:
            normed, hidden, *entries = checkpoint(
                _run_step, drafter, step_tokens, hidden, kv_cache, *kv_cache.entries, use_reentrant=False
            )
            kv_cache = kv_cache.with_entries(entries)
        else:
            normed, hidden = drafter.run_step(step_tokens, hidden, kv_cache)
        states.append(normed)
    return states


def _run_step(
    drafter: Drafter, tokens: ProjectedTokens, hidden: Tensor, kv_cache: UnrolledCache, *entries: Tensor
) -> tuple[Tensor, ...]:
    """Run a step after the `entries` of the earlier ones: (state after the final norm, next state, all entries)."""
    step_cache = kv_cache.with_entries(entries)
    normed, next_hidden = drafter.run_step(tokens, hidden, step_cache)
    return normed, next_hidden, *step_cache.entries


def count_surviving_columns(argmax_matches: Tensor, loss_mask: Tensor) -> Tensor:
    """Return rows 2 to 4 of the metrics, [3, horizon]: columns whose steps 0..i are all in the loss mask; of these, columns
    where all earlier steps matched; of these, columns where step i matched."""
    horizon, columns = argmax_matches.shape[0], argmax_matches.shape[2]
    ahead = nn.functional.pad(loss_mask, (0, horizon))
    reached = torch.stack([ahead[:, 2 + step : 2 + step + columns] for step in range(horizon)]).cumprod(0).bool()
    through = (argmax_matches & reached).cumprod(0).bool()
    before = torch.cat([reached[:1], through[:-1] & reached[1:]])
    return torch.stack([part.sum((1, 2), dtype=torch.float64) for part in (reached, before, through)])


def simulate_speculation(argmax_matches: Tensor, loss_mask: Tensor, num_speculative_tokens: int) -> tuple[int, int]:
    """Simulate greedy speculation over the text: (emitted tokens, verification steps), for K <= horizon.

    A draft is accepted up to the first mismatch, and the next one starts after the accepted tokens and the bonus token. The
    result is exact for greedy texts of the target, otherwise an estimate. In each span of the loss mask the prefill emits the
    first token, so drafts start with the second. Tokens beyond the span's end do not count.
    """
    emitted = steps = 0
    lengths = argmax_matches[:num_speculative_tokens].long().cumprod(0).sum(0).tolist()
    for row, mask in zip(lengths, loss_mask.tolist(), strict=True):
        position = 2  # first token of the next verification; column t drafts token t + 2
        while position < len(mask):
            if not (mask[position] and mask[position - 1]):
                position += 1
                continue
            emitted_tokens = 1
            while (
                emitted_tokens <= row[position - 2] and position + emitted_tokens < len(mask) and mask[position + emitted_tokens]
            ):
                emitted_tokens += 1
            emitted, steps, position = emitted + emitted_tokens, steps + 1, position + emitted_tokens
    return emitted, steps


def _loss_positions(counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows, positions) of the target's states that predict a token of the loss mask, [positions] each."""
    rows, predicted = counted.nonzero(as_tuple=True)
    return rows, predicted - 1


class _LossInputs(NamedTuple):
    """Inputs of the loss without gradient."""

    final_hidden_states: Tensor
    target_lm_head: Tensor
    draft_token_ids: Tensor
    t2d: Tensor
    rows: Tensor
    positions: Tensor
    columns_before: Tensor
    """[positions]: number of columns of the same text before each position, which is the number of steps that learn it."""
    next_tokens: Tensor
    """[positions]: the text's token that each position predicts."""
    step_weights: Sequence[float]
    mixture: LossMixture
    temperatures: Sequence[float]
    slice_elements: int
    needs_gradients: bool


class _Sampling(NamedTuple):
    """The target's distribution at some positions, at a temperature; at temperature 0 the tensors have no meaning."""

    temperature: float
    probabilities: Tensor
    """[positions, draft vocabulary]"""
    text_probability: Tensor
    """[positions]: that of the text's token."""

    @classmethod
    def of_target(
        cls, temperature: float, logits: Tensor, target: TargetSlice, draft_token_ids: Tensor | None, next_tokens: Tensor
    ) -> _Sampling:
        """Compute the distribution from the target's logits, [positions, vocabulary]."""
        text_logit = logits.gather(-1, next_tokens.unsqueeze(-1)).squeeze(-1)
        if temperature in (0, 1):
            return cls(temperature, target.probabilities, (text_logit - target.log_normalizer).exp())
        log_normalizer = (logits / temperature).logsumexp(-1, keepdim=True)
        inside = logits if draft_token_ids is None else logits[:, draft_token_ids]
        return cls(
            temperature,
            (inside / temperature - log_normalizer).exp_(),
            (text_logit / temperature - log_normalizer.squeeze(-1)).exp(),
        )

    def scale(self, logits: Tensor) -> Tensor | None:
        """Return the drafter's probabilities at the temperature; None at 0 and 1, where the loss has what is needed."""
        return None if self.temperature in (0, 1) else (logits / self.temperature).softmax(-1)

    def accept(self, draft_probabilities: Tensor, best_id: Tensor, text_id: Tensor, is_text_drafted: Tensor) -> Tensor:
        """Return the four chances of ColumnAcceptance, [4, positions]; `best_id` and `text_id` [positions, 1] are draft ids."""
        of_text = draft_probabilities.gather(-1, text_id).squeeze(-1)
        ratio = torch.where(of_text < self.text_probability, of_text / self.text_probability, 1.0)
        return torch.stack(
            [
                sum_of_minima(self.probabilities, draft_probabilities),
                self.probabilities.gather(-1, best_id).squeeze(-1),
                ratio * is_text_drafted,
                ((best_id == text_id).squeeze(-1) & is_text_drafted).to(ratio.dtype),
            ]
        )


class _SlicedLoss(torch.autograd.Function):
    """The loss and its gradients, computed together slice by slice of positions."""

    @staticmethod
    def forward(ctx: Any, fixed: _LossInputs, head: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        batch, columns, _ = states[0].shape
        device, horizon = head.device, len(states)
        device_type = device.type
        compute_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else head.dtype
        accumulation_dtype = torch.promote_types(head.dtype, torch.float32)
        weight = head.to(compute_dtype)
        draft_token_ids = None if len(fixed.draft_token_ids) == len(fixed.t2d) else fixed.draft_token_ids
        draft_ids = torch.zeros(len(fixed.t2d), dtype=torch.long, device=device)  # by token; 0 outside of the draft vocabulary
        draft_ids[fixed.draft_token_ids] = torch.arange(len(fixed.draft_token_ids), device=device)
        flat = [state.reshape(batch * columns, -1) for state in states]
        to_states = [torch.zeros_like(state) for state in flat] if fixed.needs_gradients else []
        to_head = torch.zeros_like(head, dtype=accumulation_dtype) if fixed.needs_gradients else None
        total = torch.zeros((), dtype=accumulation_dtype, device=device)
        counts = torch.zeros(horizon, dtype=torch.float64, device=device)
        divergence = torch.zeros(horizon, dtype=torch.float64, device=device)
        # By column; the last element collects invalid columns.
        argmax_matches = torch.zeros(horizon, batch * columns + 1, dtype=torch.bool, device=device)
        acceptance = torch.zeros(
            len(fixed.temperatures), 4, horizon, batch * columns + 1, dtype=accumulation_dtype, device=device
        )
        size = count_slice_positions(fixed.slice_elements, len(fixed.t2d), device_type)
        by_position = (fixed.rows, fixed.positions, fixed.columns_before, fixed.next_tokens)
        slices = zip(*(torch.split(part, size) for part in by_position), strict=True)
        with torch.autocast(device_type, enabled=False):
            for rows, positions, columns_before, next_tokens in slices:
                target_logits = (
                    fixed.final_hidden_states[rows, positions].to(fixed.target_lm_head.dtype) @ fixed.target_lm_head.T
                ).to(accumulation_dtype)
                best = target_logits.max(-1).indices  # argmax is slower on CPU
                target = TargetSlice.from_logits(target_logits, draft_token_ids)
                samplings = [
                    _Sampling.of_target(temperature, target_logits, target, draft_token_ids, next_tokens)
                    for temperature in fixed.temperatures
                ]
                del target_logits
                has_draft_argmax = fixed.t2d[best]
                draft_id, text_id = draft_ids[best].unsqueeze(-1), draft_ids[next_tokens].unsqueeze(-1)
                is_text_drafted = fixed.t2d[next_tokens]
                for step, state in enumerate(flat):
                    valid = columns_before > step
                    column = rows * columns + (positions - 1 - step).clamp(min=0)  # clamped columns have weight 0
                    written = column.masked_fill(~valid, batch * columns)
                    inputs = state[column].to(compute_dtype)
                    logits = (inputs @ weight.T).to(accumulation_dtype)
                    top, best_draft_id = logits.max(-1, keepdim=True)
                    matches = (logits.gather(-1, draft_id) == top).squeeze(-1) & has_draft_argmax
                    argmax_matches[step, written] = matches
                    cross = torch.linalg.vecdot(target.restricted, logits)
                    scaled = [sampling.scale(logits) for sampling in samplings]
                    total_chance = logits.sub_(top).exp_().sum(-1, keepdim=True)
                    kl = (top + total_chance.log()).squeeze(-1) - cross - target.entropy
                    draft_probabilities = logits.div_(total_chance)
                    drawn_acceptance = None
                    for number, (sampling, other_probabilities) in enumerate(zip(samplings, scaled, strict=True)):
                        if sampling.temperature == 0:
                            acceptance[number, :, step, written] = matches.to(accumulation_dtype).expand(4, -1)
                            continue
                        q = draft_probabilities if other_probabilities is None else other_probabilities
                        accepted = sampling.accept(q, best_draft_id, text_id, is_text_drafted)
                        acceptance[number, :, step, written] = accepted
                        if sampling.temperature == 1:
                            drawn_acceptance = accepted[0]
                    if drawn_acceptance is None:
                        drawn_acceptance = sum_of_minima(target.probabilities, draft_probabilities)
                    counted = valid & has_draft_argmax if fixed.mixture.is_kl_only else valid
                    counts[step] += counted.sum()
                    divergence[step] += (kl * counted).sum()
                    value, grad = mixture_value_and_gradient(
                        fixed.mixture,
                        target,
                        draft_probabilities,
                        kl,
                        drawn_acceptance,
                        valid.to(accumulation_dtype) * fixed.step_weights[step],
                        has_draft_argmax,
                        needs_gradient=to_head is not None,
                    )
                    total += value.sum()
                    if to_head is not None and grad is not None:
                        grad = grad.to(compute_dtype)
                        to_states[step].index_add_(0, column, (grad @ weight).to(state.dtype))
                        _add_product(to_head, grad.T, inputs)
        if to_head is not None:
            ctx.save_for_backward(to_head.to(head.dtype), *to_states)
            ctx.shape = states[0].shape
        argmax_matches = argmax_matches[:, :-1].reshape(horizon, batch, columns)
        acceptance = acceptance[..., :-1].reshape(-1, 4, horizon, batch, columns)
        ctx.mark_non_differentiable(counts, divergence, argmax_matches, acceptance)
        return total, counts, divergence, argmax_matches, acceptance

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
