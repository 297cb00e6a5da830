"""Whether a refreshed drafter may replace the served one, from paired gains of acceptance length on prompts held back.

    new domain   lower bound of the gain above limits.min_new_gain
    old domain   lower bound of the gain above -limits.max_old_loss; without old prompts it cannot be shown

Guarantees: pure. An interval that does not exist, because there are too few prompts, is never taken for a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aerie_drafter.evaluate.expected import Interval


@dataclass(frozen=True)
class Decision:
    """The outcome, with a sentence for each domain."""

    is_accepted: bool
    reasons: tuple[str, ...]


def decide(new_gain: Interval, old_gain: Interval | None, *, min_new_gain: float, max_old_loss: float) -> Decision:
    """Compare relative gains with the limits. `old_gain` is None without old prompts, which then have no limit."""
    new_is_met, new_reason = _check_bound("the new prompts", new_gain, min_new_gain)
    if old_gain is None:
        return Decision(new_is_met, (new_reason, "the old prompts were not measured: what the drafter forgot is unknown"))
    old_is_met, old_reason = _check_bound("the old prompts", old_gain, -max_old_loss)
    return Decision(new_is_met and old_is_met, (new_reason, old_reason))


def recovered_share(old_before: float, new_before: float, new_after: float) -> float | None:
    """Return the share of the lost acceptance length that is back; None if the served drafter lost none."""
    lost = old_before - new_before
    return (new_after - new_before) / lost if lost > 0 else None


def _check_bound(domain: str, gain: Interval, required: float) -> tuple[bool, str]:
    if not math.isfinite(gain.low):
        return False, f"{domain}: too few held-back prompts for a confidence interval"
    measured = f"{domain}: {gain.estimate:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"
    if gain.low > required:
        return True, f"{measured}, above {required:+.1%}"
    if gain.high <= required:
        return False, f"{measured}, not above {required:+.1%}"
    return False, f"{measured}, not shown to be above {required:+.1%}: more held-back prompts narrow it"
