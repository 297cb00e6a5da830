"""The losses of a column, and the probabilities that rejection sampling accepts a draft token.

p is the target's distribution over its vocabulary, q the drafter's over the draft vocabulary D, r = p / c on D, with the coverage
c = p(D). A token outside of D has q = 0: the target's mass there is lost to every loss but the first.

    acceptance          a = sum of min(p, q) over D              chance that a token drawn from q is accepted (arXiv 2211.17192)
    kl                  KL(r || q)                               EAGLE-3 (arXiv 2503.01840): soft cross entropy without the mass
                                                                 outside of D; only where the target's likeliest token is in D
    total_variation     1 - a                                    the distance between p and q: the chance of a rejection
    lk_alpha            -log a                                   LK losses (arXiv 2602.23881): gradient of 1 - a, divided by a
    lk_lambda           w KL(r || q) + (1 - w) (1 - a)           the same paper, with w = exp(-eta a), which has no gradient:
                                                                 KL while little is accepted, later the distance

The gradient by the logits of q is u (q - r) - v q ([q < p] - q([q < p])), where u and v follow from the formulas above. At a tie
q = p the minimum has two derivatives; here it is that of p, which is 0.

Guarantee: values and gradients equal autograd's of the plain definitions, to rounding (tests). No tensor with a row per column
is kept; the arguments are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossMixture:
    """Weights of the losses; their sum is minimized."""

    kl: float = 1.0
    total_variation: float = 0.0
    lk_alpha: float = 0.0
    lk_lambda: float = 0.0
    lk_eta: float = 3.0

    @property
    def is_kl_only(self) -> bool:
        """Return whether no loss uses the acceptance, so that columns outside of the draft vocabulary do not count."""
        return not (self.total_variation or self.lk_alpha or self.lk_lambda)


class TargetSlice(NamedTuple):
    """The target's distribution at some positions."""

    restricted: Tensor
    """[positions, draft vocabulary]: r, which adds up to 1."""
    probabilities: Tensor
    """[positions, draft vocabulary]: p, which adds up to the coverage; the same tensor if that is 1."""
    entropy: Tensor
    """[positions]: that of r, in nats."""
    log_normalizer: Tensor
    """[positions]: log of the sum of exponentials of all logits."""

    @classmethod
    def from_logits(cls, logits: Tensor, draft_token_ids: Tensor | None) -> TargetSlice:
        """Compute the distribution of [positions, vocabulary]; without `draft_token_ids` every token can be drafted."""
        inside = logits if draft_token_ids is None else logits[:, draft_token_ids]
        restricted = inside.softmax(-1)
        # The log of the sum of exponentials follows from the probability of the most likely token.
        log_inside = inside.amax(-1) - restricted.amax(-1).log()
        entropy = log_inside - torch.linalg.vecdot(restricted, inside)
        if draft_token_ids is None:
            return cls(restricted, restricted, entropy, log_inside)
        log_all = logits.logsumexp(-1)
        return cls(restricted, restricted * (log_inside - log_all).exp().unsqueeze(-1), entropy, log_all)


def sum_of_minima(target_probabilities: Tensor, draft_probabilities: Tensor) -> Tensor:
    """Return the acceptance of drawn tokens, [...], for p and q over the draft vocabulary, [..., draft vocabulary]."""
    return torch.minimum(target_probabilities, draft_probabilities).sum(-1)


def mixture_value_and_gradient(
    mixture: LossMixture,
    target: TargetSlice,
    draft_probabilities: Tensor,
    kl: Tensor,
    acceptance: Tensor,
    weights: Tensor,
    has_draft_argmax: Tensor,
    *,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return `weights` times the loss of each column, [columns], and its gradient by the logits.

    `draft_probabilities` is q, [columns, draft vocabulary], and its memory becomes the gradient; `kl` is KL(r || q) and
    `acceptance` the sum of minima, [columns]. `has_draft_argmax` [columns] is 1 where the target's most likely token is in the
    draft vocabulary, else 0.
    """
    restricted_weight = weights * mixture.kl * has_draft_argmax
    value = restricted_weight * kl
    if mixture.is_kl_only:
        if not needs_gradient:
            return value, None
        return value, draft_probabilities.sub_(target.restricted).mul_(restricted_weight.unsqueeze(-1))
    positive = acceptance.clamp(min=torch.finfo(acceptance.dtype).tiny)
    distance = 1 - acceptance
    share_of_kl = (acceptance * -mixture.lk_eta).exp()
    value = value + weights * (mixture.total_variation * distance - mixture.lk_alpha * positive.log())
    value = value + weights * mixture.lk_lambda * (share_of_kl * kl + (1 - share_of_kl) * distance)
    if not needs_gradient:
        return value, None
    kl_weight = (restricted_weight + weights * mixture.lk_lambda * share_of_kl).unsqueeze(-1)
    distance_weight = mixture.total_variation + mixture.lk_alpha / positive + mixture.lk_lambda * (1 - share_of_kl)
    distance_weight = (weights * distance_weight).unsqueeze(-1)
    smaller = torch.where(draft_probabilities < target.probabilities, draft_probabilities, 0.0)
    gradient = draft_probabilities.mul_(kl_weight + distance_weight * smaller.sum(-1, keepdim=True))
    gradient.sub_(smaller.mul_(distance_weight))
    return value, gradient.addcmul_(target.restricted, kl_weight, value=-1)
