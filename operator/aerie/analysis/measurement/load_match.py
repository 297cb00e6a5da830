"""Whether canary and control met a like load, so that their latencies can be compared.

What is compared is the demand: requests begun on a pod. Requests in flight are no measure of it, because a canary that is twice
as fast has half as many. Begun is what got its first token, and by how many the waiting ones grew: an arm that cannot keep up
still counts all that it was asked for.

Two arms of one demand differ by chance, the more the fewer requests there are: by three standard errors, which are 20 % with 450
requests on each of two pods. So what is looked at is not a block but the requests of late, as many as tell 20 % from chance:

    few requests     the blocks before count too, the older the less     a difference that lasts shows, chance does not
    many requests    the last block alone                                each block for itself

What each way of routing does to it:

* at random, by turns, by weights: a pod's share does not depend on its speed. Demand is alike.
* by fewest requests: the faster arm gets more of them and has as many in flight. So arms that are alike in flight are alike too:
  each token is made in a batch of the same size.
* by session or prefix: an arm may have more than its share for as long as a session lasts. Those blocks do not count.
* an arm with several pods has as many times the demand of one: all of it is for a pod, of those with a whole window.

Not guaranteed: that requests are of one kind. A tenant with long prompts may sit on one arm, and no count of requests shows it;
how far that makes blocks scatter is in the history of stable pods, as it is for acceptance lengths. Nor anything about the blocks
before a difference could be told from chance, but that what they said is forgotten when it shows in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aerie.analysis.measurement.blocks import ArmCounts

LOAD_TOLERANCE = 0.2
"""By how much the arms may differ, relative to their level."""
LOAD_TOLERANCE_STANDARD_ERRORS = 3.0
"""Standard errors by which they may differ in any case."""
MIN_REQUEST_COUNT_VARIANCE = (LOAD_TOLERANCE_STANDARD_ERRORS / LOAD_TOLERANCE) ** 2
"""The variance of a count of requests from which on the tolerance is as wide as so many standard errors."""


@dataclass(frozen=True, slots=True)
class LoadMatch:
    """The requests of late. The difference of the arms is `surplus / variance`, of which 1 / variance is the squared error: the
    logarithm of the ratio of two rates, by Peto's one-step estimate."""

    request_surplus: float = 0.0
    """Requests begun on the canary beyond its share."""
    variance: float = 0.0
    """Of that, were demand alike."""
    in_flight_surplus: float = 0.0
    """The relative difference in requests in flight, weighed by the variance of each block."""

    def add_block(self, canary: ArmCounts, control: ArmCounts) -> LoadMatch:
        """With one more block; what came before weighs as much as is needed to have enough."""
        share = canary.pod_count / (canary.pod_count + control.pod_count)
        begun = canary.arrived_requests + control.arrived_requests
        surplus, variance = canary.arrived_requests - share * begun, max(0.0, begun) * share * (1 - share)
        flight = surplus
        if canary.mean_load is not None and control.mean_load is not None:
            flight = 2 * variance * (canary.mean_load - control.mean_load) / ((canary.mean_load + control.mean_load) or 1.0)
        room = max(0.0, MIN_REQUEST_COUNT_VARIANCE - variance)
        kept = room / self.variance if self.variance > room else 1.0
        return LoadMatch(
            kept * self.request_surplus + surplus, kept * self.variance + variance, kept * self.in_flight_surplus + flight
        )

    @property
    def has_enough_requests(self) -> bool:
        """Whether a difference of more than the tolerance is told from chance."""
        return self.variance >= 0.999 * MIN_REQUEST_COUNT_VARIANCE  # a sum of parts of it, rounded

    @property
    def relative_difference(self) -> float:
        """By how much the canary's pods got more requests than the control's, relative to their level."""
        return self.request_surplus / self.variance if self.variance > 0 else 0.0

    @property
    def is_matched(self) -> bool:
        """Whether the arms were alike, in requests begun or in those in flight; not when no request began."""
        return self._is_within_tolerance(min(abs(self.request_surplus), abs(self.in_flight_surplus)))

    @property
    def is_matched_in_flight(self) -> bool:
        """Whether the arms were alike in requests in flight; where no page tells these, in those begun."""
        return self._is_within_tolerance(abs(self.in_flight_surplus))

    def _is_within_tolerance(self, difference: float) -> bool:
        if self.variance <= 0:
            return False
        return difference <= max(LOAD_TOLERANCE, LOAD_TOLERANCE_STANDARD_ERRORS / math.sqrt(self.variance)) * self.variance
