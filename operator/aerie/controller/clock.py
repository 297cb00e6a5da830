"""The time of day without its jumps, for the times in the status and all that is counted from them.

A machine's clock is set now and then: after its boot, by a person, when a virtual machine has been moved. A rollout's deadline is
counted from a time in the status, so a jump ahead would end a rollout that has just begun, and a jump back would let it run on.

Another operator takes over such times when it comes to lead. By a clock behind the last leader's it would pass over what is
measured until the times in the status are over, and by one ahead it would find deadlines passed. So a leader begins with the time
of the API server (`agree`), which is the same for all of them, where its machine's is another one.

Guarantee: between two looks, as much time passes as on the monotonic clock. Not guaranteed: that the time is right. It is as
wrong as the API server's was when the operator began to lead, and seconds off between API servers; a jump is logged, and taken
over with the next start.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta

_log = logging.getLogger(__name__)
_MIN_LOGGED_JUMP = timedelta(seconds=30)
_MIN_CORRECTED_OFFSET = timedelta(seconds=5)
"""From the API server, which names whole seconds and takes a moment to be heard."""


class Clock:
    """See the module."""

    def __init__(self) -> None:
        self._wall, self._monotonic = datetime.now(UTC), time.monotonic()
        self._logged_offset = timedelta()
        """By how much the machine's clock was ahead of this one when it was last told."""

    def synchronize(self, server_time: datetime, received_at: float) -> None:
        """Go by another clock, which showed this time when it was `heard` of on the monotonic one, if it differs by seconds."""
        ahead = self._wall + timedelta(seconds=received_at - self._monotonic) - server_time
        if abs(ahead) > _MIN_CORRECTED_OFFSET:
            self._wall, self._logged_offset = self._wall - ahead, self._logged_offset + ahead
            _log.warning(
                "the machine's clock is %+.0f s off that of the API server, by which Aerie goes until it restarts",
                ahead.total_seconds(),
            )

    def now(self) -> datetime:
        """The time."""
        now = self._wall + timedelta(seconds=time.monotonic() - self._monotonic)
        off = datetime.now(UTC) - now
        if abs(off - self._logged_offset) > _MIN_LOGGED_JUMP:
            self._logged_offset = off
            _log.warning(
                "the machine's clock has jumped; it is %+.0f s off the one that Aerie goes by until it restarts",
                off.total_seconds(),
            )
        return now
