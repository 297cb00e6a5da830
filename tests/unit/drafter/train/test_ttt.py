"""The loss of training-time test, compared with a naive unroll, finite differences and a calculation by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims
from aerie_drafter.model import Drafter, ProjectedTokens
from aerie_drafter.train.losses import LossMixture
from aerie_drafter.train.ttt import (
    TrainingBatch,
    TrainingMetrics,
    TrainingTimeTest,
    count_surviving_columns,
    decaying_weights,
    simulate_speculation,
)
from tests.unit.drafter.sizes import UNEQUAL_SIZES

MLA = MlaDims(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, q_lora_rank=8)


def config(**changes: Any) -> DrafterConfig:
    return DrafterConfig(**{"family": DrafterFamily.LLAMA} | UNEQUAL_SIZES | changes)


def build_drafter(settings: DrafterConfig, seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(settings).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    draft_token_ids = torch.randperm(settings.vocab_size)[: settings.draft_vocab_size].sort().values
    drafter.set_draft_vocabulary(draft_token_ids)
    return drafter


def build_batch(settings: DrafterConfig, rows: int = 2, length: int = 9, seed: int = 1) -> tuple[TrainingBatch, Tensor]:
    torch.manual_seed(seed)
    wide = settings.target_hidden_size
    counted = torch.rand(rows, length) < 0.7
    counted[-1, -2:] = False  # padding
    batch = TrainingBatch(
        tokens=torch.randint(settings.vocab_size, (rows, length)),
        loss_mask=counted,
        aux_hidden_states=torch.randn(rows, length, len(settings.aux_layer_ids) * wide, dtype=torch.float64),
        final_hidden_states=torch.randn(rows, length, wide, dtype=torch.float64),
    )
    return batch, torch.randn(settings.vocab_size, wide, dtype=torch.float64)


def length_for(settings: DrafterConfig) -> int:
    """Return a length that exceeds the window, if there is one."""
    return 9 if settings.sliding_window is None else 40


class NaiveMemory:
    """One softmax over all keys of all steps side by side, under the mask that says which of them a query may see."""

    def __init__(self, num_layers: int = 1) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.later_layers = [NaiveMemory() for _ in range(num_layers - 1)]

    def positions(self, length: int, device: torch.device) -> Tensor:
        return torch.tensor([len(self.keys) + column for column in range(length)], device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        length, window = query.shape[2], window or 1000
        query_step = len(self.keys) - 1
        visible = torch.zeros(length, len(self.keys) * length, dtype=torch.bool)
        for t in range(length):
            for step in range(len(self.keys)):
                for j in range(length):
                    distance = t + query_step - (j + step)
                    visible[t, step * length + j] = (j <= t if step == 0 else j == t) and distance < window
        scores = query @ torch.cat(self.keys, 2).transpose(-1, -2) * scale
        return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ torch.cat(self.values, 2)


def compute_naive_loss(
    drafter: Drafter,
    batch: TrainingBatch,
    teacher: Tensor,
    weights: Sequence[float],
    mixture: LossMixture = LossMixture(),  # noqa: B008 (frozen)
    temperature: float = 1.0,
) -> tuple[Tensor, list[float], Tensor, Tensor]:
    """Return (weighted sum, columns counted per step, agreement [horizon, rows, columns], the four acceptances), one column at
    a time."""
    horizon = len(weights)
    rows, length = batch.tokens.shape
    memory, hidden = (
        NaiveMemory(drafter.config.num_hidden_layers),
        drafter.fuse_aux_hidden_states(batch.aux_hidden_states[:, :-1]),
    )
    total = torch.zeros((), dtype=torch.float64)
    counts = [0.0] * horizon
    agreed = torch.zeros(horizon, rows, length - 1, dtype=torch.bool)
    acceptance = torch.zeros(4, horizon, rows, length - 1, dtype=torch.float64)
    draft_token_ids = drafter.draft_token_ids.tolist()
    for step in range(horizon):
        read = torch.zeros(rows, length - 1, dtype=torch.long)
        for t in range(length - 1):
            if t + 1 + step < length:
                read[:, t] = batch.tokens[:, t + 1 + step]
        normed, hidden = drafter(read, hidden, memory)
        for row in range(rows):
            for t in range(length - 1):
                predicted = t + 2 + step
                if predicted >= length or not batch.loss_mask[row, predicted]:
                    continue
                full = teacher @ batch.final_hidden_states[row, t + 1 + step]
                logits = drafter.lm_head(normed[row, t])
                agreed[step, row, t] = draft_token_ids[int(logits.argmax())] == int(full.argmax())
                p, q = (full / temperature).softmax(0), torch.zeros(len(full), dtype=torch.float64)
                q[draft_token_ids] = (logits.detach() / temperature).softmax(0)
                text, drafted = int(batch.tokens[row, predicted]), draft_token_ids[int(logits.argmax())]
                acceptance[:, step, row, t] = torch.stack(
                    [torch.minimum(p, q).sum(), p[drafted], (q[text] / p[text]).clamp(max=1), torch.tensor(drafted == text)]
                )
                has_argmax = int(full.argmax()) in draft_token_ids
                if mixture.is_kl_only and not has_argmax:
                    continue
                r, q, p = full[draft_token_ids].softmax(0), logits.softmax(0), full.softmax(0)[draft_token_ids]
                kl, alpha = (r * (r.log() - q.log())).sum(), torch.minimum(p, q).sum()
                share = (-mixture.lk_eta * alpha.detach()).exp()
                value = mixture.total_variation * (1 - alpha) - mixture.lk_alpha * alpha.log()
                value = value + mixture.kl * kl * has_argmax + mixture.lk_lambda * (share * kl + (1 - share) * (1 - alpha))
                total = total + weights[step] * value
                counts[step] += 1
    return total, counts, agreed, acceptance


MIXED = LossMixture(kl=0.4, total_variation=0.3, lk_alpha=0.6, lk_lambda=0.5, lk_eta=2.0)

VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "qwen3": {"family": DrafterFamily.QWEN3, "fc_norm": True, "norm_output": True},
    "mla": {"family": DrafterFamily.MLA, "mla": MLA, "fc_norm": True, "norm_output": True},
    "whole vocabulary": {"draft_vocab_size": 23},
    "two layers": {"num_hidden_layers": 2, "norm_before_residual": True},
    "three layers, qwen3": {"num_hidden_layers": 3, "family": DrafterFamily.QWEN3, "fc_norm": True, "norm_output": True},
    "two layers, mla": {"num_hidden_layers": 2, "family": DrafterFamily.MLA, "mla": MLA, "norm_output": True},
    "window": {"sliding_window": 33},
    "two layers with a window": {"num_hidden_layers": 2, "sliding_window": 34, "fc_norm": True, "norm_output": True},
}


@pytest.mark.parametrize("slice_elements", [2**20, 23 * 3])
@pytest.mark.parametrize(
    ("variant", "mixture"), [*((name, LossMixture()) for name in VARIANTS), ("eagle3.1", MIXED), ("whole vocabulary", MIXED)]
)
def test_loss_and_all_gradients_equal_the_naive_unroll(variant: str, mixture: LossMixture, slice_elements: int) -> None:
    settings = config(**VARIANTS[variant])
    drafter, (batch, teacher) = build_drafter(settings), build_batch(settings, length=length_for(settings))
    weights = (1.0, 0.7, 0.0, 0.2)
    expected, counts, agreed, acceptance = compute_naive_loss(drafter, batch, teacher, weights, mixture)
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    drafter.zero_grad()

    output = TrainingTimeTest(drafter, teacher, step_weights=weights, mixture=mixture, slice_elements=slice_elements)(batch)
    output.weighted_sum.backward()

    torch.testing.assert_close(output.weighted_sum, expected, rtol=1e-10, atol=1e-10)
    assert output.metrics.sums[0].tolist() == counts
    assert torch.equal(output.argmax_matches, agreed)
    torch.testing.assert_close(torch.stack(output.acceptance[0]), acceptance)
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-10, msg=name)
    assert drafter.embed_tokens.weight.grad is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputed_activations_give_the_same_bits(variant: str) -> None:
    settings = config(**VARIANTS[variant])
    drafter, (batch, teacher) = build_drafter(settings), build_batch(settings, length=length_for(settings))
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    results, saved_sizes = [], []
    for recompute in (False, True):
        saved: list[int] = []

        def count(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = TrainingTimeTest(drafter, teacher, step_weights=decaying_weights(5), recompute=recompute)(batch)
            saved_sizes.append(sum(saved))
        gradients = torch.autograd.grad(output.weighted_sum, parameters)
        results.append((output.weighted_sum.detach(), *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert saved_sizes[1] < saved_sizes[0] / 2


def test_acceptance_at_other_temperatures_equals_the_naive_unroll() -> None:
    settings = config()
    drafter, (batch, teacher) = build_drafter(settings), build_batch(settings, length=length_for(settings))
    temperatures = (0.7, 0.0, 1.0)
    with torch.no_grad():
        output = TrainingTimeTest(drafter, teacher, step_weights=(1.0, 1.0), temperatures=temperatures)(batch)
    for temperature, measured in zip(temperatures, output.acceptance, strict=True):
        if temperature:
            expected = compute_naive_loss(drafter, batch, teacher, (1.0, 1.0), temperature=temperature)[-1]
        else:
            expected = output.argmax_matches.expand(4, -1, -1, -1).double()
        torch.testing.assert_close(torch.stack(measured), expected)
    first = output.acceptance[0]
    columns = [int(batch.loss_mask[:, 2 + step :].sum()) for step in range(2)]
    assert output.metrics.drawn_acceptance == pytest.approx([float(first.drawn[i].sum()) / columns[i] for i in range(2)])
    assert output.metrics.greedy_acceptance == pytest.approx([float(first.greedy[i].sum()) / columns[i] for i in range(2)])


def test_gradients_equal_finite_differences() -> None:
    settings = config(hidden_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=4, intermediate_size=4)
    settings = dataclasses.replace(settings, target_hidden_size=3, aux_layer_ids=(1,), vocab_size=6, draft_vocab_size=5)
    drafter = build_drafter(dataclasses.replace(settings, norm_output=True))
    batch, teacher = build_batch(settings, rows=1, length=6)
    loss = TrainingTimeTest(drafter, teacher, step_weights=decaying_weights(3))
    names = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]

    def total(*values: Tensor) -> Tensor:
        output = torch.func.functional_call(loss, dict(zip(names, values, strict=True)), (batch,))
        assert isinstance(output.weighted_sum, Tensor)
        return output.weighted_sum

    values = tuple(loss.get_parameter(name).detach().clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(total, values)


def test_without_gradients_the_metrics_are_the_same() -> None:
    settings = config()
    drafter, (batch, teacher) = build_drafter(settings), build_batch(settings, length=length_for(settings))
    loss = TrainingTimeTest(drafter, teacher, step_weights=decaying_weights(3))
    with torch.no_grad():
        quiet = loss(batch)
    assert not quiet.weighted_sum.requires_grad
    assert torch.equal(quiet.weighted_sum, loss(batch).weighted_sum)


def test_a_batch_without_counted_tokens_has_zero_loss_and_gradients() -> None:
    settings = config()
    drafter, (batch, teacher) = build_drafter(settings), build_batch(settings, length=length_for(settings))
    batch = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    output = TrainingTimeTest(drafter, teacher, step_weights=decaying_weights(3))(batch)
    output.weighted_sum.backward()
    assert output.weighted_sum.item() == 0
    assert output.metrics.position_count == 0
    assert output.metrics.conditional_acceptance == [0, 0, 0]
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters() if p.requires_grad)


class EchoDrafter(torch.nn.Module):
    """A drafter of two tokens that predicts the token it read: logits (0, ln 3) after token 1, (ln 3, 0) after token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=1)
        self.fc = torch.nn.Linear(1, 1, bias=False)
        self.lm_head = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.eye_(self.lm_head.weight)
        self.draft_token_ids = torch.arange(2)
        self.t2d = torch.ones(2, dtype=torch.bool)
        self.read: list[list[int]] = []

    def fuse_aux_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        return aux_hidden_states

    def project_tokens(self, tokens: Tensor) -> ProjectedTokens:
        return ProjectedTokens((tokens.unsqueeze(-1),), ())

    def run_step(self, projected: ProjectedTokens, hidden: Tensor, _: object) -> tuple[Tensor, Tensor]:
        tokens = projected.parts[0].squeeze(-1)
        self.read.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(tokens, 2).float() * torch.log(torch.tensor(3.0)), hidden


def test_position_shifts_equal_a_calculation_by_hand() -> None:
    """Tokens x0..x4 = 0 1 1 0 1, of which x3 and x4 are to be learnt; horizon 2, decay 0.5.

    The target is sure at once: its state at a place is 40 times the one-hot of the token it predicts, and its lm_head is the
    identity. At place 2 it predicts 1 (the text says x3 = 0), at place 3 it predicts 1 (x4 = 1); the other places predict 0.

    Columns t = 0..3. In step 0 they read x1 x2 x3 x4 = 1 1 0 1, in step 1 x2 x3 x4 - = 1 0 1 0 (the last ran out of text).
    x3 is predicted at place 2: taught in step 0 to column 1, which reads x2 = 1; in step 1 to column 0, which reads x2 = 1.
    x4 is predicted at place 3: taught in step 0 to column 2, which reads x3 = 0; in step 1 to column 1, which reads x3 = 0.

    After reading 1 the drafter gives token 1 the chance 3/4, after reading 0 it gives it 1/4. The target says 1 both times:
        step 0:  ln 4/3 + ln 4 = ln 16/3           step 1: the same, with weight 1/2
        total = 1.5 x ln 16/3 = 2.5110
    It agrees where it read 1: step 0 in column 1, step 1 in column 0.
    Columns counted in step 0: 1 and 2, of which 1 agrees. Counted in steps 0 and 1: only column 1, which agreed in step 0 and
    not in step 1. So per step: conditional 1/2 and 0/1, unconditional 1/2 and 0/1.
    """
    final = torch.zeros(1, 5, 2)
    for place, token in enumerate([0, 0, 1, 1, 0]):
        final[0, place, token] = 40.0
    batch = TrainingBatch(
        tokens=torch.tensor([[0, 1, 1, 0, 1]]),
        loss_mask=torch.tensor([[False, False, False, True, True]]),
        aux_hidden_states=torch.zeros(1, 5, 1),
        final_hidden_states=final,
    )
    echo = EchoDrafter()
    output = TrainingTimeTest(echo, torch.eye(2), step_weights=(1.0, 0.5))(batch)  # type: ignore[arg-type]
    assert echo.read == [[1, 1, 0, 1], [1, 0, 1, 0]]
    assert output.weighted_sum.item() == pytest.approx(2.5110, abs=1e-4)
    assert output.metrics.position_count == 2
    assert output.argmax_matches[:, 0].tolist() == [[False, True, False, False], [True, False, False, False]]
    assert output.metrics.conditional_acceptance == [0.5, 0.0]
    assert output.metrics.cumulative_acceptance == [0.5, 0.0]


def test_survival_counts_only_columns_whose_steps_are_all_counted() -> None:
    counted = torch.tensor([[False, False, True, True, True, False]])
    agreed = torch.ones(3, 1, 5, dtype=torch.bool)
    agreed[1, 0, 0] = False
    # Columns 0, 1 and 2 predict tokens 2, 3 and 4; with a second step only 0 and 1 stay inside, with a third only 0.
    assert count_surviving_columns(agreed, counted).tolist() == [[3, 2, 1], [3, 2, 0], [3, 1, 0]]


def test_a_walk_continues_after_accepted_tokens_and_the_bonus_token() -> None:
    # Tokens 2..9 counted; 2 is the prompt's. Column t drafts token t + 2.
    counted = torch.tensor([[False, False] + [True] * 8])
    agreed = torch.zeros(3, 1, 9, dtype=torch.bool)
    agreed[:2, 0, 1] = True  # drafts 3 and 4: both accepted, 5 is the bonus
    agreed[1, 0, 4] = True  # drafts 6: its first is rejected, so the second does not count; 6 is emitted by verification
    agreed[:, 0, 5] = True  # drafts 7, 8, 9: all accepted, and the bonus would be beyond the end
    assert simulate_speculation(agreed, counted, 3) == (3 + 1 + 3, 3)
    # K = 1: drafts at 3 (4 the bonus), 5, 6 (its draft is rejected), 7 (8 the bonus), 9
    assert simulate_speculation(agreed, counted, 1) == (2 + 1 + 1 + 2 + 1, 5)


def test_metrics_add_up() -> None:
    metrics = TrainingMetrics(torch.arange(16, dtype=torch.float64).view(8, 2))
    assert torch.equal((metrics + TrainingMetrics.zero(2) + metrics).sums, 2 * metrics.sums)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm then takes its plain form
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_in_bfloat16_is_nearly_the_same(variant: str) -> None:
    settings = config(**VARIANTS[variant])
    drafter, (batch, teacher) = build_drafter(settings).float(), build_batch(settings)
    exact = TrainingBatch(batch.tokens, batch.loss_mask, batch.aux_hidden_states.float(), batch.final_hidden_states.float())
    rounded = TrainingBatch(
        batch.tokens, batch.loss_mask, batch.aux_hidden_states.bfloat16(), batch.final_hidden_states.bfloat16()
    )
    expected = TrainingTimeTest(drafter, teacher.float(), step_weights=decaying_weights(4))(exact).weighted_sum.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = TrainingTimeTest(drafter, teacher.bfloat16(), step_weights=decaying_weights(4))(rounded)
    output.weighted_sum.backward()
    assert output.weighted_sum.dtype == torch.float32
    assert output.weighted_sum.item() == pytest.approx(expected, rel=0.03)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters() if p.requires_grad)


def test_the_order_of_the_draft_vocabulary_changes_nothing() -> None:
    settings = config()
    drafter, other = build_drafter(settings), build_drafter(settings)
    order = torch.randperm(settings.draft_vocab_size)
    other.lm_head.weight.data = drafter.lm_head.weight.data[order]
    other.d2t = drafter.draft_token_ids[order] - torch.arange(settings.draft_vocab_size)
    batch, teacher = build_batch(settings, rows=8, length=20)
    expected, reordered = (
        TrainingTimeTest(model, teacher, step_weights=decaying_weights(7))(batch) for model in (drafter, other)
    )
    assert expected.argmax_matches.any()
    assert torch.equal(reordered.argmax_matches, expected.argmax_matches)
    torch.testing.assert_close(reordered.weighted_sum, expected.weighted_sum)
