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

from aerie.controller.kubernetes.client import LEASES, ApiError, ObjectDict, ResourceKind

_log = logging.getLogger(__name__)


class LeaseClient(Protocol):
    """What election needs of the API server."""

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        """The object, or None."""

    async def create(self, desired: ObjectDict) -> ObjectDict:
        """Create it."""

    async def replace(self, desired: ObjectDict) -> ObjectDict:
        """Replace it, when its resourceVersion still is the one given."""


@dataclass(frozen=True)
class LeaseTiming:
    """Seconds. Others may take over `duration` after the last renewal that they saw."""

    lease_duration_seconds: float = 12.0
    retry_period_seconds: float = 2.0
    """Between two attempts, to renew or to take over."""
    failed_renewal_retry_seconds: float = 0.5
    """After one to renew that failed: it may have taken `limit`, and most of the time that is left."""
    safety_margin_seconds: float = 3.0
    """How long before `duration` is over a leader that cannot renew stops acting."""
    request_timeout_seconds: float = 4.0
    """For one call."""


class LeaderElector:
    """One candidate, `identity`, for the Lease `namespace`/`name`."""

    def __init__(
        self, lease_client: LeaseClient, namespace: str, name: str, identity: str, timing: LeaseTiming | None = None
    ) -> None:
        self._lease_client, self._namespace, self._name, self.identity = lease_client, namespace, name, identity
        self._timing = timing or LeaseTiming()
        self._observed_version: tuple[str, float] | None = None
        """Version of the lease that was last seen, and when it was first seen."""
        self._held_lease: ObjectDict | None = None
        self._leader_until = 0.0

    def is_leader(self) -> bool:
        """Whether nobody else may have taken over yet, by this process' own clock."""
        return _loop_time() < self._leader_until

    @contextlib.asynccontextmanager
    async def hold_leadership(self) -> AsyncIterator[asyncio.Event]:
        """Waits for the lease, keeps it while the block runs, and gives it back.

        The event is set when leadership is lost: whoever leads has to stop acting at once.
        """
        lost = asyncio.Event()
        began = await self._acquire()
        self._leader_until = began + self._timing.lease_duration_seconds - self._timing.safety_margin_seconds
        keeper = asyncio.create_task(self._renew(began, lost), name="lease")
        try:
            yield lost
        finally:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
            if not lost.is_set():
                await self._release()

    async def _acquire(self) -> float:
        """When the lease was asked for."""
        while True:
            if (asked := await self._try_acquire_or_renew()) is not None:
                _log.info("%s leads", self.identity)
                return asked
            await asyncio.sleep(self._timing.retry_period_seconds)

    async def _renew(self, renewed: float, lost: asyncio.Event) -> None:
        timing = self._timing
        pause = timing.retry_period_seconds
        while True:
            await asyncio.sleep(pause)
            deadline, asked = renewed + timing.lease_duration_seconds - timing.safety_margin_seconds, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - _loop_time())):
                    asked = await self._try_acquire_or_renew()
            if asked is not None:
                renewed, pause = asked, timing.retry_period_seconds
                self._leader_until = renewed + timing.lease_duration_seconds - timing.safety_margin_seconds
                continue
            if self._held_lease is None or _loop_time() >= deadline:
                _log.error("%s leads no longer: the lease could not be renewed", self.identity)
                lost.set()
                return
            pause = timing.failed_renewal_retry_seconds

    async def _try_acquire_or_renew(self) -> float | None:
        """When the lease that is ours now was asked for; None when it is not ours."""
        try:
            return await self._acquire_or_renew()
        except TimeoutError:
            _log.warning("the lease: no answer within %g s", self._timing.request_timeout_seconds)
        except ApiError as error:
            if error.status != 409:  # somebody else was quicker
                _log.warning("the lease: %s", error)
        return None

    async def _acquire_or_renew(self) -> float | None:
        if self._held_lease is not None:
            try:
                return await self._write_lease(self._lease_client.replace, self._held_lease)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        looked = _loop_time()
        async with asyncio.timeout(self._timing.request_timeout_seconds):
            found = await self._lease_client.get(LEASES, self._namespace, self._name)
        if found is None:
            return await self._write_lease(self._lease_client.create, None)
        version, holder = found["metadata"]["resourceVersion"], found["spec"].get("holderIdentity") or ""
        if holder == self.identity:
            return await self._write_lease(self._lease_client.replace, found)
        if self._held_lease is not None:
            self._held_lease = None  # it was taken from us
            return None
        if self._observed_version is None or self._observed_version[0] != version:
            self._observed_version = (version, looked)
        duration = float(found["spec"].get("leaseDurationSeconds") or self._timing.lease_duration_seconds)
        if holder and looked < self._observed_version[1] + duration:
            return None
        return await self._write_lease(self._lease_client.replace, found)

    async def _write_lease(self, write: Callable[[ObjectDict], Awaitable[ObjectDict]], current_lease: ObjectDict | None) -> float:
        """Write the lease as ours over what was found. Others count from when they see that, which is after it was asked for."""
        asked = _loop_time()
        async with asyncio.timeout(self._timing.request_timeout_seconds):
            self._held_lease = await write(self._build_lease(current_lease))
        return asked

    async def _release(self) -> None:
        if self._held_lease is None:
            return
        free = {**self._held_lease, "spec": {**self._held_lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            async with asyncio.timeout(self._timing.request_timeout_seconds):
                await self._lease_client.replace(free)
        except (ApiError, TimeoutError) as error:
            _log.info("the lease could not be given back, and runs out by itself: %s", error)

    def _build_lease(self, current_lease: ObjectDict | None) -> ObjectDict:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old: dict[str, Any] = (current_lease or {}).get("spec") or {}
        ours = old.get("holderIdentity") == self.identity
        changes = int(old.get("leaseTransitions") or 0)
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": (current_lease or {}).get("metadata") or {"namespace": self._namespace, "name": self._name},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": round(self._timing.lease_duration_seconds),
                "acquireTime": old["acquireTime"] if ours and old.get("acquireTime") else now,
                "renewTime": now,
                "leaseTransitions": changes if ours or current_lease is None else changes + 1,
            },
        }


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
