"""Leader election by a Lease, outside of Kopf: of several operators, one acts.

Guarantees: `hold_leadership` ends before another operator may take over the lease, as long as clocks run at about the same speed.
A leader counts its time from before its request, and stops `safety_margin_seconds` before others may take over. Others count from
when they last saw the lease change, by their own clock, never by the times written in it. A clock that jumps has no effect,
because only durations on the monotonic clock are used. A leader that ends releases the lease, so that the next one need not wait.
An API server that takes seconds for each call costs no operator its lease, because a renewal is one call.

Not guaranteed: mutual exclusion against a leader that is stopped (SIGSTOP) in the middle of a call and continues later. The call
has a timeout, and what it writes is idempotent.

The rules are those of client-go's tools/leaderelection. The Lease has the usual form, so kubectl shows the leader.
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
    """Calls of the API server that the election needs."""

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        """Return the object, or None."""

    async def create(self, desired: ObjectDict) -> ObjectDict:
        """Create the object, and return it."""

    async def replace(self, desired: ObjectDict) -> ObjectDict:
        """Replace the object if its resourceVersion is unchanged, and return the new one."""


@dataclass(frozen=True)
class LeaseTiming:
    """Times of the election in seconds. Others may take over `lease_duration_seconds` after the last renewal that they saw."""

    lease_duration_seconds: float = 12.0
    retry_period_seconds: float = 2.0
    """Time between two attempts to renew or to take over."""
    failed_renewal_retry_seconds: float = 0.5
    """Delay after a renewal that failed. The attempt may have taken `request_timeout_seconds`, most of the remaining time."""
    safety_margin_seconds: float = 3.0
    """Time before the lease expires at which a leader that cannot renew it stops acting."""
    request_timeout_seconds: float = 4.0
    """Timeout of one call."""


class LeaderElector:
    """Candidate `identity` for the Lease `namespace`/`name`."""

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
        """Return True while no other operator can have taken over yet, by this process' own clock."""
        return _loop_time() < self._leader_until

    @contextlib.asynccontextmanager
    async def hold_leadership(self) -> AsyncIterator[asyncio.Event]:
        """Wait for the lease, keep it while the block runs, and release it.

        The event is set when leadership is lost. The leader then has to stop acting immediately.
        """
        lost = asyncio.Event()
        acquired_at = await self._acquire()
        self._leader_until = acquired_at + self._timing.lease_duration_seconds - self._timing.safety_margin_seconds
        renewal = asyncio.create_task(self._renew(acquired_at, lost), name="lease-renewal")
        try:
            yield lost
        finally:
            renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewal
            if not lost.is_set():
                await self._release()

    async def _acquire(self) -> float:
        """Wait for the lease, and return when it was requested."""
        while True:
            if (requested_at := await self._try_acquire_or_renew()) is not None:
                _log.info("%s is the leader", self.identity)
                return requested_at
            await asyncio.sleep(self._timing.retry_period_seconds)

    async def _renew(self, renewed_at: float, lost: asyncio.Event) -> None:
        timing = self._timing
        delay = timing.retry_period_seconds
        while True:
            await asyncio.sleep(delay)
            deadline, requested_at = renewed_at + timing.lease_duration_seconds - timing.safety_margin_seconds, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - _loop_time())):
                    requested_at = await self._try_acquire_or_renew()
            if requested_at is not None:
                renewed_at, delay = requested_at, timing.retry_period_seconds
                self._leader_until = renewed_at + timing.lease_duration_seconds - timing.safety_margin_seconds
                continue
            if self._held_lease is None or _loop_time() >= deadline:
                _log.error("%s is no longer the leader: the Lease could not be renewed", self.identity)
                lost.set()
                return
            delay = timing.failed_renewal_retry_seconds

    async def _try_acquire_or_renew(self) -> float | None:
        """Return when the lease that is ours now was requested; None when it is not ours."""
        try:
            return await self._acquire_or_renew()
        except TimeoutError:
            _log.warning("the API server did not answer a Lease request within %g s", self._timing.request_timeout_seconds)
        except ApiError as error:
            if error.status != 409:  # somebody else was quicker
                _log.warning("the Lease could not be read or written: %s", error)
        return None

    async def _acquire_or_renew(self) -> float | None:
        if self._held_lease is not None:
            try:
                return await self._write_lease(self._lease_client.replace, self._held_lease)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        read_at = _loop_time()
        async with asyncio.timeout(self._timing.request_timeout_seconds):
            lease = await self._lease_client.get(LEASES, self._namespace, self._name)
        if lease is None:
            return await self._write_lease(self._lease_client.create, None)
        version, holder = lease["metadata"]["resourceVersion"], lease["spec"].get("holderIdentity") or ""
        if holder == self.identity:
            return await self._write_lease(self._lease_client.replace, lease)
        if self._held_lease is not None:
            self._held_lease = None  # it was taken from us
            return None
        if self._observed_version is None or self._observed_version[0] != version:
            self._observed_version = (version, read_at)
        duration = float(lease["spec"].get("leaseDurationSeconds") or self._timing.lease_duration_seconds)
        if holder and read_at < self._observed_version[1] + duration:
            return None
        return await self._write_lease(self._lease_client.replace, lease)

    async def _write_lease(self, write: Callable[[ObjectDict], Awaitable[ObjectDict]], current_lease: ObjectDict | None) -> float:
        """Write the lease as ours over the current one, and return when that was requested.

        Others count from when they see the lease change, which is later.
        """
        requested_at = _loop_time()
        async with asyncio.timeout(self._timing.request_timeout_seconds):
            self._held_lease = await write(self._build_lease(current_lease))
        return requested_at

    async def _release(self) -> None:
        if self._held_lease is None:
            return
        released_lease = {
            **self._held_lease,
            "spec": {**self._held_lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1},
        }
        try:
            async with asyncio.timeout(self._timing.request_timeout_seconds):
                await self._lease_client.replace(released_lease)
        except (ApiError, TimeoutError) as error:
            _log.info("the Lease could not be released and will expire: %s", error)

    def _build_lease(self, current_lease: ObjectDict | None) -> ObjectDict:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old_spec: dict[str, Any] = (current_lease or {}).get("spec") or {}
        is_ours = old_spec.get("holderIdentity") == self.identity
        transitions = int(old_spec.get("leaseTransitions") or 0)
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": (current_lease or {}).get("metadata") or {"namespace": self._namespace, "name": self._name},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": round(self._timing.lease_duration_seconds),
                "acquireTime": old_spec["acquireTime"] if is_ours and old_spec.get("acquireTime") else now,
                "renewTime": now,
                "leaseTransitions": transitions if is_ours or current_lease is None else transitions + 1,
            },
        }


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
