"""One of several operators acts: leader election by a Lease, outside of Kopf.

Guarantees: `lead` is left before another operator may take the lease, as long as clocks run at about the same speed: a leader
counts its time from before it asked, and gives up `margin` seconds before the others may take over; others count from when they
last saw the lease change, by their own clock, never by the times written in it. A clock that jumps harms nobody, because only
durations on the monotonic clock are used. A leader that ends gives the lease back, so that the next need not wait. An API server
that takes seconds for each call costs nobody the lease: a renewal is one call.
Not guaranteed: mutual exclusion against a leader that is stopped (SIGSTOP) in the middle of a call and continues later; the
call has a time limit, and what it writes is idempotent.

The rules are those of client-go's tools/leaderelection; the Lease is a common one, so that kubectl shows who leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from aerie.controller.kubernetes.client import LEASES, ApiError, Kind, Object

_log = logging.getLogger(__name__)


class Leases(Protocol):
    """What election needs of the API server."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None."""

    async def create(self, wanted: Object) -> Object:
        """Create it."""

    async def replace(self, wanted: Object) -> Object:
        """Replace it, when its resourceVersion still is the one given."""


@dataclass(frozen=True)
class Timing:
    """Seconds. Others may take over `duration` after the last renewal that they saw."""

    duration: float = 12.0
    retry: float = 2.0
    """Between two attempts, to renew or to take over."""
    again: float = 0.5
    """After one to renew that failed: it may have taken `limit`, and most of the time that is left."""
    margin: float = 3.0
    """How long before `duration` is over a leader that cannot renew stops acting."""
    limit: float = 4.0
    """For one call."""


class Elector:
    """One candidate, `identity`, for the Lease `namespace`/`name`."""

    def __init__(self, leases: Leases, namespace: str, name: str, identity: str, timing: Timing | None = None) -> None:
        self._leases, self._namespace, self._name, self.identity = leases, namespace, name, identity
        self._timing = timing or Timing()
        self._seen: tuple[str, float] | None = None
        """Version of the lease that was last seen, and when it was first seen."""
        self._held: Object | None = None
        self._until = 0.0

    def leads(self) -> bool:
        """Whether nobody else may have taken over yet, by this process' own clock."""
        return _now() < self._until

    @contextlib.asynccontextmanager
    async def lead(self) -> AsyncIterator[asyncio.Event]:
        """Waits for the lease, keeps it while the block runs, and gives it back.

        The event is set when leadership is lost: whoever leads has to stop acting at once.
        """
        lost = asyncio.Event()
        began = await self._acquire()
        self._until = began + self._timing.duration - self._timing.margin
        keeper = asyncio.create_task(self._keep(began, lost), name="lease")
        try:
            yield lost
        finally:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
            if not lost.is_set():
                await self._give_back()

    async def _acquire(self) -> float:
        """When the lease was asked for."""
        while True:
            if (asked := await self._attempt()) is not None:
                _log.info("%s leads", self.identity)
                return asked
            await asyncio.sleep(self._timing.retry)

    async def _keep(self, renewed: float, lost: asyncio.Event) -> None:
        timing = self._timing
        pause = timing.retry
        while True:
            await asyncio.sleep(pause)
            deadline, asked = renewed + timing.duration - timing.margin, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - _now())):
                    asked = await self._attempt()
            if asked is not None:
                renewed, pause = asked, timing.retry
                self._until = renewed + timing.duration - timing.margin
                continue
            if self._held is None or _now() >= deadline:
                _log.error("%s leads no longer: the lease could not be renewed", self.identity)
                lost.set()
                return
            pause = timing.again

    async def _attempt(self) -> float | None:
        """When the lease that is ours now was asked for; None when it is not ours."""
        try:
            return await self._try()
        except TimeoutError:
            _log.warning("the lease: no answer within %g s", self._timing.limit)
        except ApiError as error:
            if error.status != 409:  # somebody else was quicker
                _log.warning("the lease: %s", error)
        return None

    async def _try(self) -> float | None:
        if self._held is not None:
            try:
                return await self._write(self._leases.replace, self._held)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        looked = _now()
        async with asyncio.timeout(self._timing.limit):
            found = await self._leases.get(LEASES, self._namespace, self._name)
        if found is None:
            return await self._write(self._leases.create, None)
        version, holder = found["metadata"]["resourceVersion"], found["spec"].get("holderIdentity") or ""
        if holder == self.identity:
            return await self._write(self._leases.replace, found)
        if self._held is not None:
            self._held = None  # it was taken from us
            return None
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, looked)
        duration = float(found["spec"].get("leaseDurationSeconds") or self._timing.duration)
        if holder and looked < self._seen[1] + duration:
            return None
        return await self._write(self._leases.replace, found)

    async def _write(self, how: Callable[[Object], Awaitable[Object]], found: Object | None) -> float:
        """Write the lease as ours over what was found. Others count from when they see that, which is after it was asked for."""
        asked = _now()
        async with asyncio.timeout(self._timing.limit):
            self._held = await how(self._lease(found))
        return asked

    async def _give_back(self) -> None:
        if self._held is None:
            return
        free = {**self._held, "spec": {**self._held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            async with asyncio.timeout(self._timing.limit):
                await self._leases.replace(free)
        except (ApiError, TimeoutError) as error:
            _log.info("the lease could not be given back, and runs out by itself: %s", error)

    def _lease(self, found: Object | None) -> Object:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old: dict[str, Any] = (found or {}).get("spec") or {}
        ours = old.get("holderIdentity") == self.identity
        changes = int(old.get("leaseTransitions") or 0)
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": (found or {}).get("metadata") or {"namespace": self._namespace, "name": self._name},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": round(self._timing.duration),
                "acquireTime": old["acquireTime"] if ours and old.get("acquireTime") else now,
                "renewTime": now,
                "leaseTransitions": changes if ours or found is None else changes + 1,
            },
        }


def _now() -> float:
    return asyncio.get_running_loop().time()
