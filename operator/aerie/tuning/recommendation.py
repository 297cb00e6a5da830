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

from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static

RecommendedAction = Literal["Hold", "Change", "Explore", "Insufficient"]


class RecommendationError(ValueError):
    """What was read is no advice; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do about the setting of one revision's pods."""

    revision: str
    """The stable revision that it is for; for any other one it says nothing."""
    decision_time: float
    """When it was given, in seconds of Unix time."""
    action: RecommendedAction
    """Hold: the current setting stays. Change: to `setting`. Explore: a canary runs `setting` for a while. Insufficient: the
    data identify nothing."""
    setting: SpeculationSetting | None
    """What to change to, or what a canary is to run; of Hold, what would be better but for something else."""
    predicted_gain: tuple[float, float, float] | None
    """Predicted gain of `setting` over the current one: the 5 %, 50 % and 95 % points."""
    reason: str
    """Why, as a sentence."""
    blocked_reason: str = ""
    """What keeps the tuner from acting until somebody does something, in one word: CannotProbe. Empty where nothing does."""
    traffic_changed_at: float | None = None
    """When traffic became what it is now, in seconds of Unix time; None where no change was seen."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "revision": self.revision,
            "at": self.decision_time,
            "action": self.action,
            "setting": None if self.setting is None else setting_to_dict(self.setting),
            "gain": None if self.predicted_gain is None else list(self.predicted_gain),
            "reason": self.reason,
            "obstacle": self.blocked_reason,
            "since": self.traffic_changed_at,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Recommendation:
        """What `to_dict` made. Raises AdviceError."""
        try:
            setting = None if document["setting"] is None else setting_from_dict(document["setting"])
            gain = None
            if document["gain"] is not None:
                low, middle, high = document["gain"]
                gain = (float(low), float(middle), float(high))
            since = None if document.get("since") is None else float(document["since"])
            revision, at, action = str(document["revision"]), float(document["at"]), document["action"]
            advice = cls(revision, at, action, setting, gain, str(document["reason"]), str(document.get("obstacle", "")), since)
        except (KeyError, TypeError, ValueError) as error:
            raise RecommendationError(f"this is no advice of a tuner ({type(error).__name__}: {error}).") from None
        advice.validate()
        return advice

    def validate(self) -> None:
        """Raises AdviceError where it contradicts itself."""
        if self.action not in get_args(RecommendedAction):
            raise RecommendationError(
                f"an advice's action is one of {', '.join(get_args(RecommendedAction))}, not {self.action!r}."
            )
        if self.action in ("Change", "Explore") and self.setting is None:
            raise RecommendationError(f"an advice with the action {self.action} names a setting.")
        if self.predicted_gain is not None and not all(map(math.isfinite, self.predicted_gain)):
            raise RecommendationError(f"a gain is three finite numbers (5 %, 50 %, 95 %), not {self.predicted_gain}.")


def setting_to_dict(setting: SpeculationSetting) -> dict[str, Any]:
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


def setting_from_dict(document: Mapping[str, Any]) -> SpeculationSetting:
    """What `setting_to_dict` made. Raises ValueError, KeyError or TypeError for anything else."""
    match document["mode"]:
        case "Off":
            return Off()
        case "Static":
            return Static(int(document["tokens"]))
        case "Adaptive":
            return Adaptive(int(document["tokens"]))
        case "Schedule":
            return Schedule(tuple(ScheduleTier(*map(int, tier)) for tier in document["tiers"]), int(document["tokens"]))
    raise ValueError(f"a setting's mode is Off, Static, Schedule or Adaptive, not {document['mode']!r}")
