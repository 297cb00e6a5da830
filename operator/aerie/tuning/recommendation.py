"""The tuner's recommendation to the operator for one resource: the part of a decision that the rollout needs.

`aerie.tuning.decision.recommend` makes the decision and needs numpy. This module does not, so the operator's process may load it.

Guarantee: a recommendation goes through `to_dict` and `from_dict` unchanged, and `from_dict` rejects unreadable input with a
message. Not guaranteed: that the recommendation is current. The caller checks `revision` and `decision_time`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static

RecommendedAction = Literal["Hold", "Change", "Explore", "Insufficient"]
BlockedReason = Literal["", "CannotProbe"]


class RecommendationError(ValueError):
    """Input that is no recommendation; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended action on the setting of one revision's pods."""

    revision: str
    """The stable revision that it is for. It applies to no other revision."""
    decision_time: float
    """Time of the decision, in seconds of Unix time."""
    action: RecommendedAction
    """Hold: the current setting stays. Change: to `setting`. Explore: a canary runs `setting` for a while. Insufficient: the
    data identify nothing."""
    setting: SpeculationSetting | None
    """Setting to change to, or that a canary is to run. With Hold: a setting that would be better, but that something else
    blocks."""
    predicted_gain: tuple[float, float, float] | None
    """Predicted gain of `setting` over the current one: the 5 %, 50 % and 95 % quantiles."""
    reason: str
    """Reason for the action, as a sentence."""
    blocked_reason: BlockedReason = ""
    """Reason in one word why the tuner cannot act until a user changes something: CannotProbe. Empty if it can."""
    traffic_changed_at: float | None = None
    """Time of the newest change in traffic, in seconds of Unix time; None if no change was detected."""

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as a JSON object."""
        return {
            "revision": self.revision,
            "decision_time": self.decision_time,
            "action": self.action,
            "setting": None if self.setting is None else setting_to_dict(self.setting),
            "predicted_gain": None if self.predicted_gain is None else list(self.predicted_gain),
            "reason": self.reason,
            "blocked_reason": self.blocked_reason,
            "traffic_changed_at": self.traffic_changed_at,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Recommendation:
        """Parse the result of `to_dict`. Raises RecommendationError."""
        try:
            setting = None if document["setting"] is None else setting_from_dict(document["setting"])
            gain = None
            if document["predicted_gain"] is not None:
                low, median, high = document["predicted_gain"]
                gain = (float(low), float(median), float(high))
            traffic_changed_at = None if document["traffic_changed_at"] is None else float(document["traffic_changed_at"])
            revision, decision_time, action = str(document["revision"]), float(document["decision_time"]), document["action"]
            recommendation = cls(
                revision,
                decision_time,
                action,
                setting,
                gain,
                str(document["reason"]),
                document["blocked_reason"],
                traffic_changed_at,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RecommendationError(f"this is no recommendation of the tuner ({type(error).__name__}: {error}).") from None
        recommendation.validate()
        return recommendation

    def validate(self) -> None:
        """Raise RecommendationError if the fields contradict each other."""
        if self.action not in get_args(RecommendedAction):
            raise RecommendationError(
                f"the action of a recommendation is one of {', '.join(get_args(RecommendedAction))}, not {self.action!r}."
            )
        if self.blocked_reason not in get_args(BlockedReason):
            raise RecommendationError(
                f"the blocked_reason of a recommendation is CannotProbe or empty, not {self.blocked_reason!r}."
            )
        if self.action in ("Change", "Explore") and self.setting is None:
            raise RecommendationError(f"a recommendation with the action {self.action} needs a setting.")
        if self.predicted_gain is not None and not all(map(math.isfinite, self.predicted_gain)):
            raise RecommendationError(
                f"a predicted gain has three finite numbers (5 %, 50 % and 95 % quantiles), not {self.predicted_gain}."
            )


def setting_to_dict(setting: SpeculationSetting) -> dict[str, Any]:
    """Return a setting as a JSON object."""
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
    """Parse the result of `setting_to_dict`. Raises ValueError, KeyError or TypeError for anything else."""
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
