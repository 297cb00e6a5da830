"""Time of day without jumps, for the times in the status and all durations measured from them.

A machine's clock is sometimes set: after boot, by an administrator, or when a virtual machine has been moved. A rollout's
deadline is measured from a time in the status. A jump ahead would therefore end a rollout that has just started, and a jump back
would let it run on.

Another operator takes over these times when it becomes the leader. If its clock were behind the last leader's, it would ignore
measurements until the times in the status have passed. If its clock were ahead, it would find deadlines exceeded. So a leader
whose machine's clock differs starts with the API server's time (`synchronize`), which is the same for all operators.

Guarantee: between two reconciles, as much time passes as on the monotonic clock. Not guaranteed: that the time is correct. Its
error is that of the API server's clock when the operator became the leader, and API servers differ by seconds. A jump is logged,
and takes effect with the next start.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta

_log = logging.getLogger(__name__)
_MIN_LOGGED_JUMP = timedelta(seconds=30)
_MIN_CORRECTED_OFFSET = timedelta(seconds=5)
"""Smallest offset from the API server's time that is corrected. That time has a resolution of a second and arrives with a delay.
"""


class Clock:
    """Clock that is set once from the API server and then follows the monotonic clock."""

    def __init__(self) -> None:
        self._wall, self._monotonic = datetime.now(UTC), time.monotonic()
        self._logged_offset = timedelta()
        """Offset of the machine's clock from this clock when it was last logged; positive when the machine's clock is ahead."""

    def synchronize(self, server_time: datetime, received_at: float) -> None:
        """Set the clock to the API server's time if the two differ by more than 5 s.

        `server_time` was the API server's time at `received_at` on the monotonic clock.
        """
        ahead = self._wall + timedelta(seconds=received_at - self._monotonic) - server_time
        if abs(ahead) > _MIN_CORRECTED_OFFSET:
            self._wall, self._logged_offset = self._wall - ahead, self._logged_offset + ahead
            _log.warning(
                "the machine's clock is %+.0f s off the API server's clock; Aerie uses the API server's time until it restarts",
                ahead.total_seconds(),
            )

    def now(self) -> datetime:
        """Return the current time in UTC."""
        now = self._wall + timedelta(seconds=time.monotonic() - self._monotonic)
        offset = datetime.now(UTC) - now
        if abs(offset - self._logged_offset) > _MIN_LOGGED_JUMP:
            self._logged_offset = offset
            _log.warning(
                "the machine's clock has jumped; it is now %+.0f s off the clock that Aerie uses until it restarts",
                offset.total_seconds(),
            )
        return now
