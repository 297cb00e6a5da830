"""Reads the counts of pairs from the evaluators of canaries, at intervals.

    reconcile ─ track(snapshot) ─► evaluators ─► GET /aerie/pairs, which acknowledges what the status has ─┐
    reconcile ◄─ observation ◄──────────────────────────────────────────────────────────────────────────────┘

Guarantees: a batch is acknowledged only after a status that has counted it was read from the API server. Until then, the
evaluator repeats it. So operator and evaluator may end at any moment, and no pair counts twice. The token is sent to the Service
that the resource owns, and appears in no message. A response has limits in time and size, and what is no batch is a problem of
the observation, not an error. An evaluator that does not respond is read again with growing delays. Not guaranteed: that pods
behind the Service are evaluators; who can write pods in the namespace can also change the engines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

import httpx

from aerie.analysis.paired.state import PairBatch
from aerie.api.status import CanaryArm, Status
from aerie.controller.clock import Clock
from aerie.controller.scraping.http_fetch import ScrapeError, create_http_client, send_request
from aerie.controller.tokens import ResourceTokens
from aerie.controller.work_queue import Backoff, NamespacedName, WorkQueue
from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.manifests import evaluator
from aerie.rollout.canary.evaluation import read_counted_batches
from aerie.rollout.facts.pairs import PairObservation
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by

_log = logging.getLogger(__name__)

MAX_CONCURRENT_READS = 16
"""Evaluators that are read at the same time."""
MAX_PAIRS_RESPONSE_BYTES = 64 * 1024
"""Size limit of a response; a batch takes about 12 KiB."""
MIN_READ_INTERVAL_SECONDS, MAX_READ_INTERVAL_SECONDS = 5.0, 30.0
"""Bounds of the seconds between two reads: each that has a batch writes the status."""
READ_INTERVAL_SHARE = 0.05
"""Seconds between two reads, as a share of the time since the evaluation began."""
MIN_REPORTED_FAILURES = 3
"""Failed reads in a row after which the observation has the problem: an evaluator takes some seconds to start."""
_PROCESS_PATTERN = re.compile(r"[0-9A-Za-z]{1,64}")


@dataclass(eq=False)
class _Reading:
    """Reads of one evaluation."""

    revision: str
    started_at: datetime
    owner_uid: str
    url: str | None = None
    """Address of the evaluator; None while it has none."""
    counted_batches: Mapping[str, int] = field(default_factory=dict)
    """Number of the last batch of each process that the stored status has counted."""
    failures: int = 0
    """Failed reads since the last response."""
    observation: PairObservation = field(default_factory=PairObservation)

    @property
    def cursor(self) -> tuple[str, int]:
        """Process and number of the last counted batch: what the next read acknowledges."""
        process = self.observation.process or next(reversed(list(self.counted_batches)), "")
        return process, self.counted_batches.get(process, 0)


class PairReader:
    """Reader of all evaluators. `enqueue` is called with a resource that has a new batch or problem."""

    def __init__(
        self,
        tokens: ResourceTokens,
        enqueue: Callable[[NamespacedName], None],
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._tokens, self._enqueue, self._clock, self._transport = tokens, enqueue, clock, transport
        self._queue = WorkQueue(Backoff(initial_seconds=1.0, max_seconds=MAX_READ_INTERVAL_SECONDS))
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_READS)
        self._readings: dict[NamespacedName, _Reading] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Read the resource's evaluator from now on, if its status calls for it."""
        canary = status.canary
        started_at = canary.evaluation.start_time if canary is not None and canary.evaluation is not None else None
        if (
            canary is None
            or started_at is None
            or (canary.phase, canary.is_isolated) != ("Evaluating", True)
            or snapshot.resource.spec.rollout.paused
        ):
            self._readings.pop(key, None)
            return
        reading = self._readings.get(key)
        if reading is None or (reading.revision, reading.started_at) != (canary.revision, started_at):
            reading = self._readings[key] = _Reading(canary.revision, started_at, snapshot.resource.metadata.uid or "")
            self._queue.forget(key)
            self._queue.add(key)
        stored = snapshot.resource.status.canary if snapshot.resource.status is not None else None
        reading.counted_batches = _read_stored_batches(stored, reading)
        reading.url = _find_evaluator_url(snapshot)

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        self._readings.pop(key, None)
        self._tokens.forget(key)

    def observation(self, key: NamespacedName) -> PairObservation | None:
        """Return what was last read from the resource's evaluator; None where none is read."""
        reading = self._readings.get(key)
        return None if reading is None else reading.observation

    async def run(self) -> None:
        """Read evaluators until cancelled."""
        async with create_http_client(self._transport) as http_client, asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                key, _ = await self._queue.get()
                group.create_task(self._read_evaluator(key, http_client))

    async def _read_evaluator(self, key: NamespacedName, http_client: httpx.AsyncClient) -> None:
        reading = self._readings.get(key)
        try:
            if reading is None:
                return
            try:
                problem = await self._update_observation(key, reading, http_client)
            except Exception:  # noqa: BLE001 - one resource's evaluator must not stop the reads of the others
                _log.exception("%s: reading its evaluator failed with an internal error", key)
                problem = "Aerie had an internal error, see its log"
            if self._readings.get(key) is not reading:
                return
            if problem:
                self._record_failure(key, reading, problem)
                self._queue.add_rate_limited(key)
            else:
                self._queue.forget(key)
                elapsed = (self._clock.now() - reading.started_at).total_seconds()
                interval = max(MIN_READ_INTERVAL_SECONDS, elapsed * READ_INTERVAL_SHARE)
                self._queue.add_after(key, min(interval, MAX_READ_INTERVAL_SECONDS))
        finally:
            self._queue.done(key)
            self._slots.release()

    async def _update_observation(self, key: NamespacedName, reading: _Reading, http_client: httpx.AsyncClient) -> str:
        """Read the evaluator once, and return the problem, as a clause; empty if it has responded."""
        token = await self._tokens.ensure(key, reading.owner_uid)
        if isinstance(token, EndpointProblem):
            return token.message
        if reading.url is None:
            return "it has no address yet"
        process, number = reading.cursor
        url = f"{reading.url}{evaluator.PAIRS_PATH}?process={process}&after={number}"
        try:
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            status, body = await send_request(http_client, "GET", url, headers, max_bytes=MAX_PAIRS_RESPONSE_BYTES)
            if status == 401:
                return self._tokens.explain_rejection(key, EndpointProblem("Unauthorized", "no valid token", 401)).message
            if status != 200:
                return f"it returned status {status}"
            observation = parse_pairs(body)
        except (ScrapeError, ValueError) as error:
            return str(error)
        reading.failures, reading.observation = 0, observation
        counted = reading.counted_batches.get(observation.process, 0)
        if any(batch.number > counted for batch in observation.batches):
            self._enqueue(key)
        return ""

    def _record_failure(self, key: NamespacedName, reading: _Reading, problem: str) -> None:
        reading.failures += 1
        if reading.failures == MIN_REPORTED_FAILURES:
            _log.warning("%s: its evaluator cannot be read: %s", key, problem)
            name = evaluator.evaluator_name(key.name)
            message = (
                f"The evaluator cannot be read: {problem.rstrip('.')}. Check the pod of Deployment {name}, and let the operator "
                "through to it in network policies."
            )
            reading.observation = replace(reading.observation, problem=message)
            self._enqueue(key)


def parse_pairs(body: bytes) -> PairObservation:
    """Return the observation of an evaluator's response. Raises ValueError, whose message quotes nothing of the response."""
    try:
        document = json.loads(body)
        process, batches = document["process"], document["batches"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ValueError("its response is none of an evaluator") from None
    if not isinstance(process, str) or not _PROCESS_PATTERN.fullmatch(process) or not isinstance(batches, list):
        raise ValueError("its response is none of an evaluator")
    return PairObservation(process, tuple(map(PairBatch.from_dict, batches)))


def _read_stored_batches(stored: CanaryArm | None, reading: _Reading) -> Mapping[str, int]:
    """Return what the canary of the stored status has counted of this evaluation."""
    if stored is None or stored.evaluation is None:
        return {}
    if (stored.revision, stored.evaluation.start_time) != (reading.revision, reading.started_at):
        return {}
    return read_counted_batches(stored.evaluation)


def _find_evaluator_url(snapshot: Snapshot) -> str | None:
    """Return `http://address` of the resource's own evaluator; None while it has no Service."""
    service = snapshot.cluster.child("Service", evaluator.evaluator_name(snapshot.resource.metadata.name))
    if service is None or not is_owned_by(service, snapshot.resource.metadata.uid):
        return None
    address = service["spec"].get("clusterIP") or ""
    if not address or address == "None":
        return None
    return f"http://[{address}]" if ":" in address else f"http://{address}"
