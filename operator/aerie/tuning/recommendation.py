"""What a tuner advises the operator to do about one resource: the little of a decision that the rollout goes by.

The decision itself is made elsewhere and takes numpy (`decide`); this has none, so that the operator's process may load it.

Guarantee: an advice goes through `to_dict` and `from_dict` unchanged, and what `from_dict` cannot read is refused by a sentence.
Not guaranteed: that the advice is of the present: whoever takes it looks at `revision` and `at`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, Tier

Action = Literal["Hold", "Change", "Explore", "Insufficient"]


class AdviceError(ValueError):
    """What was read is no advice; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about the setting of one revision's pods."""

    revision: str
    """The stable revision that it is for; for any other one it says nothing."""
    at: float
    """When it was given, in seconds of Unix time."""
    action: Action
    """Hold: the current setting stays. Change: to `setting`. Explore: a canary runs `setting` for a while. Insufficient: the
    data identify nothing."""
    setting: Setting | None
    """What to change to, or what a canary is to run; of Hold, what would be better but for something else."""
    gain: tuple[float, float, float] | None
    """Predicted gain of `setting` over the current one: the 5 %, 50 % and 95 % points."""
    reason: str
    """Why, as a sentence."""
    obstacle: str = ""
    """What keeps the tuner from acting until somebody does something, in one word: CannotProbe. Empty where nothing does."""
    since: float | None = None
    """When traffic became what it is now, in seconds of Unix time; None where no change was seen."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "revision": self.revision,
            "at": self.at,
            "action": self.action,
            "setting": None if self.setting is None else setting_to_dict(self.setting),
            "gain": None if self.gain is None else list(self.gain),
            "reason": self.reason,
            "obstacle": self.obstacle,
            "since": self.since,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Advice:
        """What `to_dict` made. Raises AdviceError."""
        try:
            setting = None if found["setting"] is None else setting_from_dict(found["setting"])
            gain = None
            if found["gain"] is not None:
                low, middle, high = found["gain"]
                gain = (float(low), float(middle), float(high))
            since = None if found.get("since") is None else float(found["since"])
            revision, at, action = str(found["revision"]), float(found["at"]), found["action"]
            advice = cls(revision, at, action, setting, gain, str(found["reason"]), str(found.get("obstacle", "")), since)
        except (KeyError, TypeError, ValueError) as error:
            raise AdviceError(f"this is no advice of a tuner ({type(error).__name__}: {error}).") from None
        advice.check()
        return advice

    def check(self) -> None:
        """Raises AdviceError where it contradicts itself."""
        if self.action not in get_args(Action):
            raise AdviceError(f"an advice's action is one of {', '.join(get_args(Action))}, not {self.action!r}.")
        if self.action in ("Change", "Explore") and self.setting is None:
            raise AdviceError(f"an advice with the action {self.action} names a setting.")
        if self.gain is not None and not all(map(math.isfinite, self.gain)):
            raise AdviceError(f"a gain is three finite numbers (5 %, 50 %, 95 %), not {self.gain}.")


def setting_to_dict(setting: Setting) -> dict[str, Any]:
    """A setting as JSON takes it."""
    match setting:
        case Off():
            return {"mode": "Off"}
        case Static(tokens):
            return {"mode": "Static", "tokens": tokens}
        case Adaptive(tokens):
            return {"mode": "Adaptive", "tokens": tokens}
        case Schedule(tiers, tokens):
            return {"mode": "Schedule", "tokens": tokens, "tiers": [[tier.first, tier.last, tier.tokens] for tier in tiers]}


def setting_from_dict(found: Mapping[str, Any]) -> Setting:
    """What `setting_to_dict` made. Raises ValueError, KeyError or TypeError for anything else."""
    match found["mode"]:
        case "Off":
            return Off()
        case "Static":
            return Static(int(found["tokens"]))
        case "Adaptive":
            return Adaptive(int(found["tokens"]))
        case "Schedule":
            return Schedule(tuple(Tier(*map(int, tier)) for tier in found["tiers"]), int(found["tokens"]))
    raise ValueError(f"a setting's mode is Off, Static, Schedule or Adaptive, not {found['mode']!r}")
