"""What the engines of one arm achieve, as the status shows it: three figures, and when they are worth a write.

A status that followed every reading would be written with every reading. So a figure stays as it is until it has moved by
more than its tolerance, which lies above the noise of the windows that the scraper keeps; then all of them are written anew.
Where nothing is known, the last figures stay: an arm without traffic shows what it did when it had some.

Guarantee: figures are of one revision alone; another revision in the same place starts without any. Not guaranteed: that a
figure is fresh, or that two of them may be compared: what decides about a canary reads counters, not these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

from aerie.api.status import Arm
from aerie.engine.samples import Counters
from aerie.rollout.analysis.counting import SPOKEN
from aerie.rollout.analysis.drift import NOISE


@dataclass(frozen=True, slots=True)
class Figures:
    """Each None where the counters do not tell it. Rounded to what a person reads."""

    acceptance_length: float | None = None
    """vLLM's own: 1 + accepted / drafts. None without a drafter, and where too few drafts to tell were all rejected."""
    time_per_output_token: float | None = None
    """Seconds, averaged over tokens."""
    time_to_first_token: float | None = None
    """Seconds, averaged over requests."""


_TOLERANCES: Mapping[str, float] = {"acceptance_length": 0.03, "time_per_output_token": 0.1, "time_to_first_token": 0.2}
"""By figure, the share by which it may move without a write. Over the 500 requests that a window holds once it has the traffic,
these are four standard errors or more, where requests differ in acceptance by 15 % of it and in latency by 50 to 100 %."""

SILENT = 1.0
"""The acceptance length, as it is shown, of a drafter of which next to nothing is accepted."""

_A = TypeVar("_A", bound=Arm)


class Sums(NamedTuple):
    """What the figures of a window are made of: a few numbers, so that those of a thousand pods are added up in a millisecond."""

    positions: int | None
    """Draft positions; None without a drafter."""
    drafts: float
    accepted: float
    step_seconds: float
    later_tokens: float
    """Output tokens without first tokens."""
    first_seconds: float
    first_tokens: float

    @classmethod
    def of(cls, window: Counters) -> Sums:
        speculation = window.speculation
        return cls(
            None if speculation is None else len(speculation.accepted_per_position),
            0.0 if speculation is None else speculation.drafts,
            0.0 if speculation is None else speculation.accepted,
            window.step_seconds,
            window.generation_tokens - window.first_tokens,
            window.time_to_first_token.sum,
            window.first_tokens,
        )

    def plus(self, other: Sums) -> Sums | None:
        """Both together; None where one has a drafter and the other none, or they draft otherwise."""
        if self.positions != other.positions:
            return None
        return Sums(self.positions, *(mine + theirs for mine, theirs in zip(self[1:], other[1:], strict=True)))

    @property
    def figures(self) -> Figures:
        """Where nothing was counted, the figure is not known."""
        length = None
        if self.positions is not None and self.drafts > 0 and (self.drafts >= SPOKEN or self.accepted > NOISE * self.drafts):
            length = round(min(1.0 + max(1, self.positions), 1 + self.accepted / self.drafts), 2)
        return Figures(length, _seconds(self.step_seconds, self.later_tokens), _seconds(self.first_seconds, self.first_tokens))


def figures_of(window: Counters) -> Figures:
    """The figures of a window, or of several pods' windows together."""
    return Sums.of(window).figures


def settled(shown: Figures, found: Figures) -> Figures:
    """What to show after `shown` when `found` is measured: `shown` itself until one figure has moved beyond its tolerance, or the
    acceptance length has come down to 1.00, which is a fault however near it was before."""
    pairs = [(field.name, getattr(shown, field.name), getattr(found, field.name)) for field in fields(Figures)]
    silent = found.acceptance_length == SILENT != shown.acceptance_length
    moved = silent or any(_moved(before, after, _TOLERANCES[name]) for name, before, after in pairs)
    return latest(shown, found) if moved else shown


def latest(shown: Figures, found: Figures) -> Figures:
    """What was found, and what was shown where nothing was."""
    pairs = [(getattr(shown, field.name), getattr(found, field.name)) for field in fields(Figures)]
    return Figures(*(before if after is None else after for before, after in pairs))


def shown_by(arm: Arm) -> Figures:
    """The figures that a status shows of an arm."""
    return Figures(arm.acceptance_length, arm.time_per_output_token, arm.time_to_first_token)


def with_figures(arm: _A, before: Arm | None, found: Figures | None, *, written: bool = False) -> _A:
    """The arm with its figures; `before` is what the status said of the same place, of whatever revision.

    `written`: the status is written in any case. Figures of arms that are compared should not contradict the comparison, which
    two that are each within their tolerance can.
    """
    known = shown_by(before) if before is not None and before.revision == arm.revision else Figures()
    shown = known if found is None else (latest if written else settled)(known, found)
    return arm.model_copy(update={field.name: getattr(shown, field.name) for field in fields(Figures)})


def _moved(before: float | None, after: float | None, tolerance: float) -> bool:
    if after is None:
        return False
    return before is None or abs(after - before) > tolerance * abs(before)


def _seconds(seconds: float, of: float) -> float | None:
    if not of > 0:
        return None
    found = seconds / of
    return round(found, 2 - math.floor(math.log10(found))) if found > 0 else 0.0  # three digits
