"""Tests whether canary and control received the same load, so that their latencies can be compared.

The load compared is the number of arrived requests on a pod. Requests in flight do not measure it, because a canary that is twice
as fast has half as many. Arrived requests are those that got their first token, plus the growth of the waiting ones. So an arm
that cannot keep up still counts every request that it received.

Two arms under one load differ by chance, the more the fewer requests there are: by three standard errors, which are 20 % with 450
requests on each of two pods. So the test covers the recent requests and not one block: as many as distinguish 20 % from chance.

    few requests     earlier blocks count too, the older the less        a difference that lasts shows, chance does not
    many requests    the last block alone                                each block alone

Effect of each kind of routing:

* random, round robin, weighted: a pod's share does not depend on its speed. The loads match.
* fewest requests: the faster arm gets more requests and has as many in flight. So arms that match in flight are comparable too:
  each token is made in a batch of the same size.
* session or prefix: an arm may have more than its share for as long as a session lasts. Those blocks do not count.
* an arm with several pods receives as many times the load of one: all numbers are per pod, of the pods with a whole window.

Not guaranteed: that requests are of one kind. A tenant with long prompts may be on one arm, and no count of requests shows it.
The calibration of stable pods contains the dispersion that this causes, as it does for acceptance lengths. Nor is anything
guaranteed about the blocks before a difference can be distinguished from chance; their counts are discarded when it shows in
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aerie.analysis.measurement.blocks import ArmCounts

LOAD_TOLERANCE = 0.2
"""Largest difference of the arms that counts as the same load, relative to their level."""
LOAD_TOLERANCE_STANDARD_ERRORS = 3.0
"""Standard errors by which the arms may differ in any case."""
MIN_REQUEST_COUNT_VARIANCE = (LOAD_TOLERANCE_STANDARD_ERRORS / LOAD_TOLERANCE) ** 2
"""Variance of a count of requests from which on the tolerance is as wide as `LOAD_TOLERANCE_STANDARD_ERRORS`."""


@dataclass(frozen=True, slots=True)
class LoadMatch:
    """Sums over the recent requests of both arms, which compare their loads.

    The relative difference of the arms is `request_surplus / variance`, and 1 / variance is its squared error. It is the
    logarithm of the ratio of two rates, by Peto's one-step estimate. The order of the fields is the saved format.
    """

    request_surplus: float = 0.0
    """Requests that arrived on the canary beyond its share."""
    variance: float = 0.0
    """Variance of the surplus under equal load."""
    in_flight_surplus: float = 0.0
    """Relative difference in requests in flight, weighted by the variance of each block."""

    def add_block(self, canary: ArmCounts, control: ArmCounts) -> LoadMatch:
        """Return the sums with one more block; earlier blocks keep as much weight as is needed to have enough requests."""
        canary_share = canary.pod_count / (canary.pod_count + control.pod_count)
        arrived_requests = canary.arrived_requests + control.arrived_requests
        surplus = canary.arrived_requests - canary_share * arrived_requests
        variance = max(0.0, arrived_requests) * canary_share * (1 - canary_share)
        in_flight_surplus = surplus
        if canary.mean_load is not None and control.mean_load is not None:
            total_load = (canary.mean_load + control.mean_load) or 1.0
            in_flight_surplus = 2 * variance * (canary.mean_load - control.mean_load) / total_load
        missing_variance = max(0.0, MIN_REQUEST_COUNT_VARIANCE - variance)
        past_weight = missing_variance / self.variance if self.variance > missing_variance else 1.0
        return LoadMatch(
            past_weight * self.request_surplus + surplus,
            past_weight * self.variance + variance,
            past_weight * self.in_flight_surplus + in_flight_surplus,
        )

    @property
    def has_enough_requests(self) -> bool:
        """True if a difference of more than the tolerance can be distinguished from chance."""
        return self.variance >= 0.999 * MIN_REQUEST_COUNT_VARIANCE  # the sum of its parts is rounded

    @property
    def relative_difference(self) -> float:
        """Requests that the canary's pods got more than the control's, relative to their level."""
        return self.request_surplus / self.variance if self.variance > 0 else 0.0

    @property
    def is_matched(self) -> bool:
        """True if the loads of the arms match, in arrived requests or in those in flight; False when no request arrived."""
        return self._is_within_tolerance(min(abs(self.request_surplus), abs(self.in_flight_surplus)))

    @property
    def is_matched_in_flight(self) -> bool:
        """True if the arms match in requests in flight; where no exposition has these, in arrived requests."""
        return self._is_within_tolerance(abs(self.in_flight_surplus))

    def _is_within_tolerance(self, difference: float) -> bool:
        if self.variance <= 0:
            return False
        return difference <= max(LOAD_TOLERANCE, LOAD_TOLERANCE_STANDARD_ERRORS / math.sqrt(self.variance)) * self.variance
