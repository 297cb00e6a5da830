"""Reference acceptance length: what the acceptance length of the same revision is compared with later.

A comparison gives it where there was one. Otherwise the pods that serve give it, as soon as enough of their traffic is counted.
The drop that is looked for is 15 %, so the reference may have a standard error of 2 %. Requests differ by about 15 % of their
acceptance length, and drafts by about 50 %. Hence `MIN_REFERENCE_REQUESTS` and `MIN_REFERENCE_DRAFTS`. Counts are
sums over all pods, so the rule is the same for one pod and for a thousand.

What is compared with the reference may be of fewer requests. So a regression begins beyond the margin of 15 % and three standard
errors of the compared acceptance length, and ends within the margin. Too few requests neither begin nor end one.

Guarantee: no reference where next to no draft token is accepted: from that level nothing can drop, and it is a fault. Not
guaranteed: that the requests are those of other hours. Hence the margin of 15 %.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MAX_ACCEPTANCE_LENGTH_DROP = 0.15
"""Share by which the acceptance length may drop below the reference before it causes a warning. No other pods serve the same
requests, and requests of another hour may cause a difference of some percent."""
_STANDARD_ERRORS = 3.0
"""Standard errors by which a drop has to exceed the margin: windows are compared all day, and none may report noise."""
_REQUEST_DEVIATION, _DRAFT_DEVIATION = 0.15, 0.5
"""Standard deviations of one request's and of one draft's acceptance length, relative to the mean."""
MIN_COMPARED_REQUESTS = 30.0
"""Requests from which an acceptance length is compared with the reference."""
MIN_COMPARED_DRAFTS = 300.0
"""Drafts from which an acceptance length is compared with the reference."""

MIN_REFERENCE_REQUESTS = 100.0
"""Requests from which a reference is known: 15 % / sqrt(100) is 1.5 %."""
MIN_REFERENCE_DRAFTS = 1000.0
"""Drafts from which a reference is known: 50 % / sqrt(1000) is 1.6 %. They are more than 100 requests have only for answers of a
few tokens."""


class AcceptanceCounts(NamedTuple):
    """Sums over pods or windows from which a reference follows. The order of the fields is the saved format."""

    requests: float = 0.0
    """Requests that got their first token."""
    drafts: float = 0.0
    accepted_tokens: float = 0.0

    def add(self, other: AcceptanceCounts) -> AcceptanceCounts:
        """Return the sum of both."""
        return AcceptanceCounts(
            self.requests + other.requests, self.drafts + other.drafts, self.accepted_tokens + other.accepted_tokens
        )

    @property
    def standard_error(self) -> float:
        """Standard error of the acceptance length, relative to it; infinite where too little is counted for a comparison."""
        if self.requests < MIN_COMPARED_REQUESTS or self.drafts < MIN_COMPARED_DRAFTS:
            return math.inf
        return math.hypot(_REQUEST_DEVIATION / math.sqrt(self.requests), _DRAFT_DEVIATION / math.sqrt(self.drafts))

    @property
    def reference_length(self) -> float | None:
        """Reference acceptance length, rounded for the status; None where too little is counted, or nothing is accepted."""
        if self.requests < MIN_REFERENCE_REQUESTS or self.drafts < MIN_REFERENCE_DRAFTS:
            return None
        length = round(1 + self.accepted_tokens / self.drafts, 2)
        return length if length > 1 else None


def has_regressed(length: float | None, reference: float | None, standard_error: float, *, before: bool) -> bool:
    """Return whether an acceptance length has regressed from the reference. `before`: whether it had until now."""
    if length is None or reference is None or math.isinf(standard_error):
        return before and reference is not None
    margin = MAX_ACCEPTANCE_LENGTH_DROP + (0.0 if before else _STANDARD_ERRORS * standard_error)
    return 1 - length / reference > margin
