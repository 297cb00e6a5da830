"""Whether a canary still answers as the target alone would: speculation must not change outputs, whatever it accepts.

One pod each of canary, control and stable answers a fixed set of prompts greedily. Equal engines differ in that now and then,
because sums in another order round differently; and a canary rounds differently for good, because another drafter is verified in
other steps, while control and stable pod round alike. vLLM's own tests let up to 40 % of greedy answers differ (tests/v1/e2e).
So two answers count as different only where rounding cannot be why:

    prompt ─► canary   t t t t x ...    the first difference: rounding may have decided it when each engine took its own token
              control  t t t t y ...    for the likeliest, and the other's for nearly as likely; then nothing more can be told

A drafter's token that was let through is never its engine's likeliest, so that it counts however near it is. The canary against
the control is then held against the control against the stable pod, prompt by prompt. Only prompts on which the two disagree
tell anything: with equal arms either is as likely the odd one, so the canary's are binomial (McNemar's exact test).

Guarantee: an equal canary is taken for lossy with probability at most alpha, because a set is judged once. It takes ten odd
answers of the canary's alone; of 24 answers of 64 tokens, a fault in each hundredth token changes some eleven. A rarer one goes
unseen here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.api.status import MetricComparison
from aerie.engine.completions import GreedyCompletion

EQUIVALENCE_ALPHA = 0.001
EQUIVALENCE_METRIC = "GreedyAnswers"
MAX_ROUNDING_LOGPROB_GAP = 1.0
"""By how much, in logarithms of probability, a token may be likelier than another that rounding put in its place. Rounding moves
logits by a few hundredths to tenths."""
MAX_TIE_LOGPROB_GAP = 0.01
"""Below this, an engine's likeliest tokens are equally likely, and it may give either."""


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """What the three answers to one prompt showed: how many tokens came before the first difference, or None without one."""

    canary_position: int | None = None
    """Of the canary from the control."""
    control_position: int | None = None
    """Of the control from the stable pod."""


@dataclass(frozen=True, slots=True)
class EquivalenceResult:
    """What a set of prompts showed; judged as it is, once."""

    compared_prompts: tuple[PromptDifference, ...] = ()
    """Those that all three pods answered."""
    prompt_count: int = 0
    skip_reason: str = ""
    """Why the others were not answered, as a clause."""

    @property
    def canary_difference_count(self) -> int:
        """Answers of the canary that differ from the control's."""
        return sum(one.canary_position is not None for one in self.compared_prompts)

    @property
    def control_difference_count(self) -> int:
        """Answers of the control that differ from the stable pod's."""
        return sum(one.control_position is not None for one in self.compared_prompts)

    def is_lossy(self, alpha: float) -> bool:
        """Whether the canary certainly differs more often than equal engines do."""
        odd = sum(one.canary_position is not None and one.control_position is None for one in self.compared_prompts)
        usual = sum(one.control_position is not None and one.canary_position is None for one in self.compared_prompts)
        more = sum(math.comb(odd + usual, count) for count in range(odd, odd + usual + 1))
        return odd > 0 and more <= alpha * 2 ** (odd + usual)

    @property
    def message(self) -> str:
        """What was found."""
        if not self.compared_prompts:
            return f"Greedy answers were not compared: {self.skip_reason or 'there are none'}."
        soonest = min((one.canary_position for one in self.compared_prompts if one.canary_position is not None), default=None)
        after = (
            "" if soonest is None else f" (the first after {soonest} tokens)" if soonest != 1 else " (the first after 1 token)"
        )
        missing = (
            f"; {self.prompt_count - len(self.compared_prompts)} more were not answered: {self.skip_reason}"
            if len(self.compared_prompts) < self.prompt_count
            else ""
        )
        mine = f"Greedy answers differ from the control's in {self.canary_difference_count} of {len(self.compared_prompts)} prompts{after}"
        return f"{mine}; the control's differ from the stable pods' in {self.control_difference_count}{missing}."

    @property
    def comparison(self) -> MetricComparison:
        """As the status shows it."""
        return MetricComparison(metric=EQUIVALENCE_METRIC, blocks=len(self.compared_prompts), message=self.message)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompts": [[one.canary_position, one.control_position] for one in self.compared_prompts],
            "asked": self.prompt_count,
            "why": self.skip_reason,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> EquivalenceResult:
        return cls(tuple(PromptDifference(*one) for one in document["prompts"]), document["asked"], document["why"])


def compare_answers(canary: GreedyCompletion, control: GreedyCompletion, stable: GreedyCompletion) -> PromptDifference:
    """The three answers to one prompt."""
    return PromptDifference(find_first_difference(canary, control), find_first_difference(control, stable))


def find_first_difference(left: GreedyCompletion, right: GreedyCompletion) -> int | None:
    """How many tokens come before the answers differ; None where they do not, or rounding may be why.

    An answer that goes on where the other one ends is not told apart: the token that ends an answer is not always returned.
    """
    for position, (mine, theirs) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        if mine != theirs:
            rounded = _is_near_tie(left.top_logprobs[position], mine, theirs) and _is_near_tie(
                right.top_logprobs[position], theirs, mine
            )
            return None if rounded else position
    return None


def _is_near_tie(likely: Mapping[str, float], given: str, other: str) -> bool:
    """Whether the engine that gave this token took it for the likeliest, and the other for nearly as likely.

    One that is not among those it told is no likelier than the last of them.
    """
    told = likely.get(other, min(likely.values()))
    return max(likely.values()) - likely[given] <= MAX_TIE_LOGPROB_GAP and likely[given] - told <= MAX_ROUNDING_LOGPROB_GAP
