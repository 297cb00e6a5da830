"""Whether a canary still answers as the target alone would: speculation must not change outputs, whatever it accepts.

The arms answer a small fixed set of prompts greedily. Greedy answers of equal engines differ now and then too, because sums in
another order round differently; so the canary against the control is held against the control against a stable pod, prompt by
prompt. Only prompts on which the two comparisons disagree tell anything: with equal arms either is as likely the odd one (as in
McNemar's test), and the e-value of `sequential.Events` at share 1/2 says when the canary is it too often.

Guarantee: an equal canary is taken for lossy with probability at most `ALPHA`, if each prompt counts once. It takes some 14 odd
answers of the canary's alone; a fault that changes fewer of them goes unseen here, and may show in output lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aerie.rollout.analysis.sequential import Events

ALPHA = 0.001


@dataclass(frozen=True, slots=True)
class Answers:
    """What the three pods answered to one prompt."""

    canary: str
    control: str
    stable: str


@dataclass(frozen=True, slots=True)
class Losslessness:
    """What the answers say together."""

    prompts: int
    canary_differs: int
    """Prompts on which the canary differs from the control."""
    control_differs: int
    """Prompts on which the control differs from the stable pod."""
    lossy: bool
    """Whether the canary certainly differs more often."""

    @property
    def sentence(self) -> str:
        found = (
            f"To {self.prompts} prompts, answered greedily, the canary differs from the control in {self.canary_differs}, the "
            f"control from a stable pod in {self.control_differs}"
        )
        return f"{found}: the canary changes what the target says." if self.lossy else f"{found}."


def losslessness(answers: Iterable[Answers]) -> Losslessness:
    """Judge the answers to a set of prompts, each given once."""
    pairs = [(one.canary != one.control, one.control != one.stable) for one in answers]
    odd, usual = sum(mine and not theirs for mine, theirs in pairs), sum(theirs and not mine for mine, theirs in pairs)
    lossy = Events().add(odd, usual, 0.5).more(ALPHA)
    return Losslessness(len(pairs), sum(mine for mine, _ in pairs), sum(theirs for _, theirs in pairs), lossy)
