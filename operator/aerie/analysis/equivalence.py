"""Tests whether a canary still answers as the target alone would: speculation must not change outputs, whatever it accepts.

One pod each of canary, control and stable answers a fixed set of prompts greedily. Equal engines sometimes differ in that,
because sums in another order round differently. A canary rounds differently throughout, because another drafter is verified in
other steps, while control and stable pod round alike. vLLM's own tests let up to 40 % of greedy answers differ (tests/v1/e2e). So
two answers count as different only where rounding cannot be the cause:

    prompt ─► canary   t t t t x ...    the first difference: rounding may have decided it when each engine's own token was its
              control  t t t t y ...    likeliest, and the other's token nearly as likely; the rest cannot be compared then

An accepted draft token that is wrong is never its engine's likeliest, so it counts however near it is. The differences of canary
and control are then tested against those of control and stable pod, prompt by prompt. Only discordant prompts, on which the two
comparisons disagree, carry evidence. With equal arms either is as likely to be the odd one, so the canary's are binomial
(McNemar's exact test).

Guarantee: an equal canary is taken for lossy with probability at most alpha, because a set is evaluated once. Rejection takes ten
discordant answers, all of the canary. Of 24 answers of 64 tokens, a fault in every hundredth token changes some eleven. This test
does not detect a rarer fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.analysis.comparison import Comparison
from aerie.engine.completions import GreedyCompletion

EQUIVALENCE_ALPHA = 0.001
EQUIVALENCE_METRIC = "OutputEquivalence"
MAX_ROUNDING_LOGPROB_GAP = 1.0
"""Largest gap, in logarithms of probability, between a token and another that rounding put in its place. Rounding moves logits by
a few hundredths to tenths."""
MAX_TIE_LOGPROB_GAP = 0.01
"""Gap up to which an engine's likeliest tokens are equally likely, so that it may return either."""


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """Differences of the three answers to one prompt: the number of tokens before the first difference, or None without one.

    The order of the fields is the saved format.
    """

    canary_position: int | None = None
    """Position at which the canary differs from the control."""
    control_position: int | None = None
    """Position at which the control differs from the stable pod."""


@dataclass(frozen=True, slots=True)
class EquivalenceResult:
    """Result of a set of prompts; it is evaluated once."""

    compared_prompts: tuple[PromptDifference, ...] = ()
    """Differences of the prompts that all three pods answered."""
    prompt_count: int = 0
    """Prompts of the set."""
    skip_reason: str = ""
    """Reason why the other prompts were not answered, as a clause."""

    @property
    def canary_difference_count(self) -> int:
        """Number of the canary's answers that differ from the control's."""
        return sum(prompt.canary_position is not None for prompt in self.compared_prompts)

    @property
    def control_difference_count(self) -> int:
        """Number of the control's answers that differ from the stable pod's."""
        return sum(prompt.control_position is not None for prompt in self.compared_prompts)

    def is_lossy(self, alpha: float) -> bool:
        """Return whether the canary differs more often than equal engines do, by McNemar's exact test at this alpha."""
        canary_only = sum(
            prompt.canary_position is not None and prompt.control_position is None for prompt in self.compared_prompts
        )
        control_only = sum(
            prompt.control_position is not None and prompt.canary_position is None for prompt in self.compared_prompts
        )
        discordant = canary_only + control_only
        tail_combinations = sum(math.comb(discordant, count) for count in range(canary_only, discordant + 1))
        return canary_only > 0 and tail_combinations <= alpha * 2**discordant

    @property
    def message(self) -> str:
        """The result as a sentence."""
        if not self.compared_prompts:
            return f"Greedy answers were not compared: {self.skip_reason or 'there are none'}."
        positions = (prompt.canary_position for prompt in self.compared_prompts if prompt.canary_position is not None)
        first_position = min(positions, default=None)
        if first_position is None:
            position_clause = ""
        else:
            position_clause = f" (the first after {first_position} {'token' if first_position == 1 else 'tokens'})"
        skipped_clause = (
            f"; {self.prompt_count - len(self.compared_prompts)} more were not answered: {self.skip_reason}"
            if len(self.compared_prompts) < self.prompt_count
            else ""
        )
        canary_clause = (
            f"Greedy answers differ from the control's in {self.canary_difference_count} of {len(self.compared_prompts)} prompts"
        )
        control_clause = f"the control's differ from the stable pods' in {self.control_difference_count}"
        return f"{canary_clause}{position_clause}; {control_clause}{skipped_clause}."

    @property
    def comparison(self) -> Comparison:
        """The result as the status shows it."""
        return Comparison(metric=EQUIVALENCE_METRIC, sample_count=len(self.compared_prompts), message=self.message)

    def to_dict(self) -> dict[str, Any]:
        return {
            "compared_prompts": [[prompt.canary_position, prompt.control_position] for prompt in self.compared_prompts],
            "prompt_count": self.prompt_count,
            "skip_reason": self.skip_reason,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> EquivalenceResult:
        prompts = tuple(PromptDifference(*positions) for positions in document["compared_prompts"])
        return cls(prompts, document["prompt_count"], document["skip_reason"])


def compare_answers(canary: GreedyCompletion, control: GreedyCompletion, stable: GreedyCompletion) -> PromptDifference:
    """Return the differences of the three answers to one prompt."""
    return PromptDifference(find_first_difference(canary, control), find_first_difference(control, stable))


def find_first_difference(left: GreedyCompletion, right: GreedyCompletion) -> int | None:
    """Return the number of tokens before the answers differ; None where they do not, or rounding may be the cause.

    An answer that continues where the other one ends is no difference: the token that ends an answer is not always returned.
    """
    for position, (left_token, right_token) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        if left_token != right_token:
            is_rounding = _is_near_tie(left.top_logprobs[position], left_token, right_token) and _is_near_tie(
                right.top_logprobs[position], right_token, left_token
            )
            return None if is_rounding else position
    return None


def _is_near_tie(top_logprobs: Mapping[str, float], returned: str, other: str) -> bool:
    """Return whether the returned token was the engine's likeliest, and the other token nearly as likely.

    A token that is not among the top ones is no likelier than the last of them.
    """
    other_logprob = top_logprobs.get(other, min(top_logprobs.values()))
    return (
        max(top_logprobs.values()) - top_logprobs[returned] <= MAX_TIE_LOGPROB_GAP
        and top_logprobs[returned] - other_logprob <= MAX_ROUNDING_LOGPROB_GAP
    )
