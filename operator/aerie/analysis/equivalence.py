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

from aerie.api.status import Comparison
from aerie.engine.completions import Answer

ALPHA = 0.001
METRIC = "GreedyAnswers"
NEAR = 1.0
"""By how much, in logarithms of probability, a token may be likelier than another that rounding put in its place. Rounding moves
logits by a few hundredths to tenths."""
SAME = 0.01
"""Below this, an engine's likeliest tokens are equally likely, and it may give either."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the three answers to one prompt showed: how many tokens came before the first difference, or None without one."""

    canary: int | None = None
    """Of the canary from the control."""
    control: int | None = None
    """Of the control from the stable pod."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a set of prompts showed; judged as it is, once."""

    prompts: tuple[Prompt, ...] = ()
    """Those that all three pods answered."""
    asked: int = 0
    why: str = ""
    """Why the others were not answered, as a clause."""

    @property
    def canary(self) -> int:
        """Answers of the canary that differ from the control's."""
        return sum(one.canary is not None for one in self.prompts)

    @property
    def control(self) -> int:
        """Answers of the control that differ from the stable pod's."""
        return sum(one.control is not None for one in self.prompts)

    def lossy(self, alpha: float) -> bool:
        """Whether the canary certainly differs more often than equal engines do."""
        odd = sum(one.canary is not None and one.control is None for one in self.prompts)
        usual = sum(one.control is not None and one.canary is None for one in self.prompts)
        more = sum(math.comb(odd + usual, count) for count in range(odd, odd + usual + 1))
        return odd > 0 and more <= alpha * 2 ** (odd + usual)

    @property
    def sentence(self) -> str:
        """What was found."""
        if not self.prompts:
            return f"Greedy answers were not compared: {self.why or 'there are none'}."
        soonest = min((one.canary for one in self.prompts if one.canary is not None), default=None)
        after = (
            "" if soonest is None else f" (the first after {soonest} tokens)" if soonest != 1 else " (the first after 1 token)"
        )
        missing = (
            f"; {self.asked - len(self.prompts)} more were not answered: {self.why}" if len(self.prompts) < self.asked else ""
        )
        mine = f"Greedy answers differ from the control's in {self.canary} of {len(self.prompts)} prompts{after}"
        return f"{mine}; the control's differ from the stable pods' in {self.control}{missing}."

    @property
    def comparison(self) -> Comparison:
        """As the status shows it."""
        return Comparison(metric=METRIC, blocks=len(self.prompts), message=self.sentence)

    def to_dict(self) -> dict[str, Any]:
        return {"prompts": [[one.canary, one.control] for one in self.prompts], "asked": self.asked, "why": self.why}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Answers:
        return cls(tuple(Prompt(*one) for one in found["prompts"]), found["asked"], found["why"])


def compared(canary: Answer, control: Answer, stable: Answer) -> Prompt:
    """The three answers to one prompt."""
    return Prompt(difference(canary, control), difference(control, stable))


def difference(one: Answer, other: Answer) -> int | None:
    """How many tokens come before the answers differ; None where they do not, or rounding may be why.

    An answer that goes on where the other one ends is not told apart: the token that ends an answer is not always returned.
    """
    for position, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if mine != theirs:
            rounded = _nearly(one.likely[position], mine, theirs) and _nearly(other.likely[position], theirs, mine)
            return None if rounded else position
    return None


def _nearly(likely: Mapping[str, float], given: str, other: str) -> bool:
    """Whether the engine that gave this token took it for the likeliest, and the other for nearly as likely.

    One that is not among those it told is no likelier than the last of them.
    """
    told = likely.get(other, min(likely.values()))
    return max(likely.values()) - likely[given] <= SAME and likely[given] - told <= NEAR
