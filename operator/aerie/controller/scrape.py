"""Reads the engines' metrics pages, in the background of the passes.

    pass ─ follow(what was observed) ─► pods to read ─► two lanes ─► fetch ─► Readings ─► figures ─► next pass
                                                  urgent: of resources with a rollout under way, each spec.metrics.interval
                                                  calm:   of all others, four times slower, up to a minute

Guarantees: only pods that the resource owns are read, on the port that their engine names; a page has limits in time and size,
a lane one in pages at once; first readings are spread over an interval, so that a thousand resources make no burst; a pod that
does not answer is asked less and less often, and those of stable resources keep no canary waiting. A failure is counted by
reason, and never reaches a pass: what is not known is missing in the figures. A resource is looked at again only when its
figures have moved (aerie.rollout.figures).

Ownership is told by labels and by the chain of owners: resource, Deployment, and a ReplicaSet that bears the Deployment's name
and the pod's template hash. Not guaranteed: that nobody in the namespace forges these; who can do that can change the engines.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import httpx

from aerie.api.status import Arm, Status
from aerie.controller.clock import Clock
from aerie.controller.compare import Comparison, subject
from aerie.controller.queue import Key, WorkQueue
from aerie.controller.readings import Readings
from aerie.engine.page import PageError, parse
from aerie.engine.samples import Counters, Sample
from aerie.resources import names
from aerie.rollout.analysis.blocks import Block
from aerie.rollout.figures import Figures, figures_of, settled, shown_by
from aerie.rollout.observed import Object, Observed, labels, owned

_log = logging.getLogger(__name__)

SECONDS = 5.0
"""For one page, all in all."""
CONNECT_SECONDS = 2.0
LARGEST = 2 * 1024 * 1024
"""Bytes of one page; one engine's has about 50 KiB."""
AT_ONCE = 32
"""Pages at once, in each lane."""
SLOWER, SLOWEST = 4.0, 60.0
"""Calm pods are read this many times slower, up to so many seconds apart where the interval is not longer itself."""
LONGEST_WAIT, LONGEST_URGENT_WAIT = 600.0, 60.0
"""Seconds between two readings of a pod that does not answer."""
UNBELIEVABLE = 3
"""Pages in a row that say what cannot be, after which it is no accident."""
STALE = 5.0
"""Intervals after which a pod that does not answer counts for nothing."""


class ScrapeError(Exception):
    """A page could not be had; `reason` is one of timeout, unreachable, broken, status, too_large."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


# ------------------------------------------------------------------------------------------------------------------- one page
def client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """A client that goes nowhere but where it is told, and keeps no connection."""
    return httpx.AsyncClient(
        transport=transport,
        timeout=httpx.Timeout(SECONDS, connect=CONNECT_SECONDS, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # OpenMetrics is another format, and a compressed page's size shows too late.
        headers={"Accept": "text/plain", "Accept-Encoding": "identity"},
        follow_redirects=False,
        trust_env=False,
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # plain HTTP only: reading the machine's authorities takes time
    )


async def fetch(through: httpx.AsyncClient, url: str) -> bytes:
    """The page. Raises ScrapeError."""
    try:
        async with asyncio.timeout(SECONDS), through.stream("GET", url) as answer:
            if answer.status_code != 200:
                raise ScrapeError("status", f"{url} answered with status {answer.status_code}")
            page = bytearray()
            async for chunk in answer.aiter_raw():
                page += chunk
                if len(page) > LARGEST:
                    raise ScrapeError("too_large", f"{url} has more than {LARGEST} bytes")
            return bytes(page)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ScrapeError("timeout", f"{url} did not answer in time") from error
    except httpx.ConnectError as error:
        raise ScrapeError("unreachable", f"{url} cannot be reached: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ScrapeError("broken", f"{url} did not answer as a server does: {error!r}") from error


# ---------------------------------------------------------------------------------------------------------------- which pods
@dataclass(frozen=True, slots=True)
class Target:
    """A pod to read."""

    url: str
    group: str
    """Name of its Deployment."""
    run: str
    """Tells one run of its engine from the next."""


def targets(observed: Observed) -> Iterator[tuple[str, Target]]:
    """Pods of the resource whose engine has started, by name."""
    resource = observed.resource
    groups = {item["metadata"]["name"]: labels(item) for item in observed.of("Deployment") if owned(item, resource.metadata.uid)}
    for pod in observed.pods:
        group = _owner(pod)
        if group not in groups or pod["metadata"].get("deletionTimestamp"):
            continue
        wanted = {key: groups[group].get(key) for key in (names.NAME, names.REVISION, names.CONTROL)}
        if not wanted.items() <= labels(pod).items() or labels(pod).get(names.NAME) != resource.metadata.name:
            continue
        address, port = _address(pod), _port(pod)
        status = _engine((pod.get("status") or {}).get("containerStatuses"))
        if address and port and (status.get("started") or status.get("ready")):
            run = f"{status.get('containerID')} {status.get('restartCount')}"
            yield pod["metadata"]["name"], Target(f"http://{address}:{port}/metrics", group, run)


def _owner(pod: Object) -> str:
    """Name of the Deployment whose ReplicaSet controls the pod; empty when none does."""
    references = pod["metadata"].get("ownerReferences") or []
    found = next((one for one in references if one.get("controller")), None)
    if found is None or (found.get("apiVersion"), found.get("kind")) != ("apps/v1", "ReplicaSet"):
        return ""
    name, _, template = found["name"].rpartition("-")
    return name if template and template == labels(pod).get("pod-template-hash") else ""


def _engine(containers: list[Object] | None) -> Object:
    return next((one for one in containers or [] if one["name"] == names.ENGINE), {})


def _port(pod: Object) -> int | None:
    ports = _engine(pod["spec"].get("containers")).get("ports") or []
    return next((one["containerPort"] for one in ports if one.get("name") == names.PORT_NAME), None)


def _address(pod: Object) -> str:
    address = (pod.get("status") or {}).get("podIP") or ""
    return f"[{address}]" if ":" in address else address


# --------------------------------------------------------------------------------------------------------------- all of them
@dataclass(eq=False)
class _Lane:
    longest_wait: float
    queue: WorkQueue = field(default_factory=WorkQueue)
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


@dataclass(eq=False)
class _Pod:
    owner: Key
    target: Target
    lane: _Lane
    interval: float
    readings: Readings = field(default_factory=Readings)
    failures: int = 0
    latest: Sample | None = None
    read_at: float = 0.0
    """Seconds since the epoch."""
    unbelievable: int = 0
    """Pages in a row that were read and say what cannot be."""
    why: str = ""

    @property
    def stale_after(self) -> float:
        return STALE * self.interval

    def wait(self) -> float:
        """Seconds until it is read again."""
        longest = max(self.interval, self.lane.longest_wait)
        return float(min(longest, self.interval * 2.0 ** min(self.failures, 30)))


class Scraper:
    """See the module. `tell` is called with a resource whose figures have moved, `count` with how each reading ended."""

    def __init__(
        self,
        tell: Callable[[Key], None],
        count: Callable[[str, float], None],
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._tell, self._count, self._transport = tell, count, transport
        self._clock = clock or Clock()
        self._urgent, self._calm = _Lane(LONGEST_URGENT_WAIT), _Lane(LONGEST_WAIT)
        self._pods: dict[Key, _Pod] = {}
        self._of: dict[Key, frozenset[Key]] = {}
        self._shown: dict[Key, Mapping[str, Figures]] = {}
        self._comparisons: dict[Key, Comparison] = {}

    def follow(self, key: Key, observed: Observed, status: Status) -> None:
        """Read the resource's pods from now on, as was observed, and tell when their figures leave those of its status."""
        resource = observed.resource
        interval = resource.spec.metrics.interval.total_seconds()
        lane = self._urgent if status.canary is not None or status.previous is not None else self._calm
        if lane is self._calm:
            interval = max(interval, min(SLOWEST, SLOWER * interval))
        found = {Key(key.namespace, name): target for name, target in targets(observed)}
        for gone in self._of.get(key, frozenset()) - found.keys():
            del self._pods[gone]
        for name, target in found.items():
            pod = self._pods.get(name)
            if pod is None:
                pod = self._pods[name] = _Pod(key, target, lane, interval)
            elif (pod.lane, pod.interval) == (lane, interval):
                pod.target = target
                continue
            pod.target, pod.lane, pod.interval = target, lane, interval
            lane.queue.add_after(name, interval * _share(name))
        self._of[key] = frozenset(found)
        compared = subject(key.name, status, resource.spec.metrics.interval.total_seconds())
        if compared is None:
            self._comparisons.pop(key, None)
        elif key not in self._comparisons or self._comparisons[key].subject != compared:
            self._comparisons[key] = Comparison(compared)
        self._shown[key] = {
            names.deployment(key.name, arm.revision, control=control): shown_by(arm) for arm, control in _arms(status)
        }

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        for name in self._of.pop(key, frozenset()):
            del self._pods[name]
        self._shown.pop(key, None)
        self._comparisons.pop(key, None)

    def blocks(self, key: Key) -> tuple[Block, ...]:
        """The latest closed blocks of the resource's analysis."""
        comparison = self._comparisons.get(key)
        return () if comparison is None else tuple(comparison.blocks)

    def unreadable(self, key: Key) -> Mapping[str, str]:
        """Pods whose pages could not be believed for a while, by name, and why."""
        pods = {name.name: self._pods[name] for name in self._of.get(key, frozenset())}
        return {name: pod.why for name, pod in pods.items() if pod.unbelievable >= UNBELIEVABLE}

    def figures(self, key: Key) -> Mapping[str, Figures]:
        """What is known of the resource's arms, by the name of their Deployment."""
        now = asyncio.get_running_loop().time()
        sums: dict[str, Counters] = {}
        for name in sorted(self._of.get(key, frozenset())):
            pod = self._pods[name]
            window = pod.readings.window(now, pod.stale_after)
            if window is None:
                continue
            known = sums.get(pod.target.group)
            try:
                sums[pod.target.group] = window if known is None else known + window
            except ValueError as error:  # an engine of another build: the first ones stand for the group
                _log.warning("the figures of pod %s are left out: %s", name, error)
        return {group: figures_of(window) for group, window in sums.items()}

    async def run(self) -> None:
        """Read until cancelled."""
        async with client(self._transport) as through, asyncio.TaskGroup() as group:
            for lane in (self._urgent, self._calm):
                group.create_task(self._serve(lane, through, group))

    async def _serve(self, lane: _Lane, through: httpx.AsyncClient, group: asyncio.TaskGroup) -> None:
        while True:
            await lane.free.acquire()
            name, _ = await lane.queue.get()
            group.create_task(self._turn(lane, name, through))

    async def _turn(self, lane: _Lane, name: Key, through: httpx.AsyncClient) -> None:
        try:
            pod = self._pods.get(name)
            if pod is None or pod.lane is not lane:
                return
            await self._read(name, pod, through)
            if self._pods.get(name) is pod and pod.lane is lane:
                lane.queue.add_after(name, pod.wait())
        finally:
            lane.queue.done(name)
            lane.free.release()

    async def _read(self, name: Key, pod: _Pod, through: httpx.AsyncClient) -> None:
        loop, target = asyncio.get_running_loop(), pod.target
        began, outcome, told = loop.time(), "done", ""
        try:
            sample = parse(await fetch(through, target.url))
            pod.readings.add(target.run, sample, loop.time(), pod.stale_after)
            pod.latest, pod.read_at = sample, self._clock.now().timestamp()
            pod.unbelievable = 0
        except ScrapeError as error:
            outcome, told = error.reason, str(error)
        except PageError as error:
            outcome, told = "unreadable", str(error)
            pod.unbelievable, pod.why = pod.unbelievable + 1, str(error)
        except Exception:  # noqa: BLE001 - one pod's page must not end the reading of the others
            outcome = "error"
            _log.exception("pod %s: its page ended the reading with an error of Aerie's own", name)
        self._count(outcome, loop.time() - began)
        if outcome != "done":
            pod.failures += 1
            if pod.failures == 1:
                _log.info("pod %s: %s", name, told)
        else:
            pod.failures = 0
        if self._pods.get(name) is not pod:
            return
        closed = self._round(pod.owner)
        if closed or pod.unbelievable == UNBELIEVABLE or (outcome == "done" and self._has_moved(pod.owner)):
            self._tell(pod.owner)

    def _round(self, key: Key) -> bool:
        """A round of the resource's comparison, if one is due; whether it has closed a block."""
        comparison, now = self._comparisons.get(key), self._clock.now().timestamp()
        if comparison is None or not comparison.wants(now):
            return False
        pods = ((name, self._pods[name]) for name in self._of.get(key, frozenset()))
        return comparison.round(now, ((name.name, pod.target.group, pod.read_at, pod.latest) for name, pod in pods))

    def _has_moved(self, key: Key) -> bool:
        found = self.figures(key)
        return any(settled(shown, found[group]) != shown for group, shown in self._shown[key].items() if group in found)


def _arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """The arms that the status shows, and whether each is control."""
    if status.stable is not None:
        yield status.stable, False
    if status.canary is not None:
        yield status.canary, False
        if status.canary.control is not None:
            yield status.canary.control, True


def _share(name: Key) -> float:
    """A number from 0 to 1 that is the pod's own, so that pods are read at different moments."""
    return zlib.crc32(str(name).encode()) / 2**32
