"""The losses of a column against their definitions: by example, by autograd, and by properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aerie_drafter.train.losses import LossMixture, TargetSlice, mixture_value_and_gradient, sum_of_minima

MIXTURES = {
    "kl": LossMixture(),
    "total variation": LossMixture(kl=0, total_variation=1),
    "lk alpha": LossMixture(kl=0, lk_alpha=1),
    "lk lambda": LossMixture(kl=0, lk_lambda=1),
    "lk lambda, another eta": LossMixture(kl=0, lk_lambda=1, lk_eta=0.5),
    "a mixture": LossMixture(kl=0.3, total_variation=0.5, lk_alpha=0.2, lk_lambda=0.7),
}


def plain_loss(mixture: LossMixture, target_logits: Tensor, draft_logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the loss of each column as the definitions say, with autograd."""
    p = target_logits.softmax(-1)[:, ids]
    r, q = target_logits[:, ids].softmax(-1), draft_logits.softmax(-1)
    kl = (r * (r.log() - draft_logits.log_softmax(-1))).sum(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    share = (-mixture.lk_eta * acceptance.detach()).exp()
    has_argmax = torch.isin(target_logits.argmax(-1), ids)
    return (
        mixture.kl * kl * has_argmax
        + mixture.total_variation * (1 - acceptance)
        - mixture.lk_alpha * acceptance.log()
        + mixture.lk_lambda * (share * kl + (1 - share) * (1 - acceptance))
    )


def compute(
    mixture: LossMixture, target_logits: Tensor, draft_logits: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute value and gradient with the code under test."""
    whole = len(ids) == target_logits.shape[-1]
    target = TargetSlice.from_logits(target_logits, None if whole else ids)
    q = draft_logits.softmax(-1)
    kl = draft_logits.logsumexp(-1) - (target.restricted * draft_logits).sum(-1) - target.entropy
    value, gradient = mixture_value_and_gradient(
        mixture,
        target,
        q,
        kl,
        sum_of_minima(target.probabilities, q),
        weights,
        torch.isin(target_logits.argmax(-1), ids),
        needs_gradient=True,
    )
    assert gradient is not None
    return value, gradient


@pytest.mark.parametrize("name", MIXTURES)
@given(seed=st.integers(0, 10_000), draft_size=st.integers(1, 9), sharpness=st.floats(0.1, 6))
def test_values_and_gradients_equal_the_plain_definitions(name: str, seed: int, draft_size: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    target_logits = torch.randn(5, 9, generator=generator, dtype=torch.float64) * sharpness
    draft_logits = torch.randn(5, draft_size, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randperm(9, generator=generator)[:draft_size].sort().values
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    expected = weights * plain_loss(MIXTURES[name], target_logits, draft_logits, ids)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), draft_logits)
    value, gradient = compute(MIXTURES[name], target_logits, draft_logits.detach().clone(), ids, weights)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


def test_losses_equal_a_calculation_by_hand() -> None:
    """The target gives its three tokens 1/2, 1/4 and 1/4; tokens 0 and 1 can be drafted, and q is 1/4 and 3/4.

    a = min(1/2, 1/4) + min(1/4, 3/4) = 1/2. r = 2/3, 1/3, so KL = 2/3 ln(8/3) + 1/3 ln(4/9) = 0.38358.
    lk_lambda with eta 2: w = exp(-1) = 0.36788, so w KL + (1 - w) / 2 = 0.45717.
    """
    target_logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    draft_logits = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log()
    ids, unit = torch.tensor([0, 1]), torch.ones(1, dtype=torch.float64)

    def value(mixture: LossMixture) -> float:
        return compute(mixture, target_logits, draft_logits, ids, unit)[0].item()

    assert value(LossMixture()) == pytest.approx(0.38358, abs=1e-5)
    assert value(LossMixture(kl=0, total_variation=1)) == pytest.approx(0.5)
    assert value(LossMixture(kl=0, lk_alpha=1)) == pytest.approx(math.log(2))
    assert value(LossMixture(kl=0, lk_lambda=1, lk_eta=2)) == pytest.approx(0.45717, abs=1e-5)
    assert value(LossMixture(kl=2, total_variation=4)) == pytest.approx(2 * 0.38358 + 2, abs=1e-4)


def test_mass_outside_of_the_draft_vocabulary_is_lost_to_acceptance_and_not_to_kl() -> None:
    target_logits = torch.tensor([[2.0, 1.0, 0.0, 1.5]], dtype=torch.float64)
    ids = torch.tensor([0, 1])
    best = target_logits[:, ids]  # the drafter that KL asks for: r
    coverage = target_logits.softmax(-1)[:, ids].sum().item()
    unit = torch.ones(1, dtype=torch.float64)
    assert compute(LossMixture(), target_logits, best, ids, unit)[0].item() == pytest.approx(0, abs=1e-12)
    lost = compute(LossMixture(kl=0, total_variation=1), target_logits, best, ids, unit)[0].item()
    assert lost == pytest.approx(1 - coverage)


@given(seed=st.integers(0, 10_000))
def test_the_distance_is_half_the_sum_of_differences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(3, 8, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))
    torch.testing.assert_close(1 - sum_of_minima(p, q), (p - q).abs().sum(-1) / 2)


def test_a_column_without_acceptance_has_finite_loss_and_gradient() -> None:
    target_logits, draft_logits = torch.tensor([[0.0, 400.0]]), torch.tensor([[400.0, 0.0]])
    value, gradient = compute(MIXTURES["a mixture"], target_logits, draft_logits, torch.tensor([0, 1]), torch.ones(1))
    assert value.isfinite().all()
    assert gradient.isfinite().all()
