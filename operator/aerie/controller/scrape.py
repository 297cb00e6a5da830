"""Reads the engines' metrics, in the background of the passes: from their pages, or where a resource says so from Prometheus.

    pass ─ follow(what was observed) ─► pods to read ─► two lanes ─► fetch ─► Readings ─► figures ─► next pass
                                        or resources ─► two lanes ─► ask ──┘
                                                  urgent: of resources with a rollout under way, each spec.metrics.interval
                                                  calm:   of all others, four times slower, up to a minute
                                                           and often enough for two readings in a block

Guarantees: only pods that the resource owns are read, on the port that their engine names; a page has limits in time and size,
a lane one in pages at once; first readings are spread over an interval, so that a thousand resources make no burst; a pod that
does not answer is asked less and less often, and those of stable resources keep no canary waiting. A failure is counted by
reason, and never reaches a pass: what is not known is missing in the figures. A resource is looked at again only when its
figures have moved (aerie.rollout.figures). Prometheus is asked for all pods of a resource at once; what it has of a pod is a
reading only when it is of a scrape that was not seen before, and has failed otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field

import httpx

from aerie.api.metrics import Prometheus
from aerie.api.status import Arm, Status
from aerie.controller.clock import Clock
from aerie.controller.compare import Comparison, subject
from aerie.controller.fetch import ScrapeError, client, fetch
from aerie.controller.histories import Histories
from aerie.controller.prometheus import Access, Servers, Standing
from aerie.controller.queue import Key, WorkQueue
from aerie.controller.readings import Readings
from aerie.controller.targets import Target, targets
from aerie.engine.page import PageError, parse
from aerie.engine.samples import Counters, Sample
from aerie.engine.series import Scrape
from aerie.resources import names
from aerie.rollout.analysis.blocks import LATE, Block
from aerie.rollout.analysis.memory import Memory
from aerie.rollout.figures import Figures, figures_of, settled, shown_by
from aerie.rollout.observed import Observed

_log = logging.getLogger(__name__)

AT_ONCE = 32
"""Pages at once, in each lane."""
SLOWER, SLOWEST = 4.0, 60.0
"""Calm pods are read this many times slower, up to so many seconds apart where the interval is not longer itself."""
LONGEST_WAIT, LONGEST_URGENT_WAIT = 600.0, 60.0
"""Seconds between two readings of a pod that does not answer."""
UNBELIEVABLE = 3
"""Pages in a row that say what cannot be, after which it is no accident."""
ABSENT = 4
"""Readings in a row in which Prometheus has nothing of a pod, after which it is no pod that has just begun."""
STALE = 5.0
"""Intervals after which a pod that does not answer counts for nothing."""


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
    scraped_at: float = 0.0
    """When Prometheus had scraped that, by its clock."""
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


@dataclass(eq=False)
class _Asked:
    """A resource whose metrics a Prometheus server has."""

    server: Prometheus
    lane: _Lane
    interval: float
    shortest: float
    """The interval of a rollout: what the server's scrapes are held against."""
    failures: int = 0
    gap: float = 0.0
    """Seconds between the latest two scrapes of a pod, the least of all pods."""
    standing: Standing = field(default_factory=Standing)

    def wait(self) -> float:
        """Seconds until it is asked again."""
        longest = max(self.interval, self.lane.longest_wait)
        return float(min(longest, self.interval * 2.0 ** min(self.failures, 30)))


_Turn = Callable[[_Lane, Key], Coroutine[None, None, None]]


class Scraper:
    """See the module. `tell` is called with a resource whose figures have moved, `count` with how each reading ended."""

    def __init__(
        self,
        tell: Callable[[Key], None],
        count: Callable[[str, float], None],
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self._tell, self._count, self._transport = tell, count, transport
        self._clock = clock or Clock()
        self._access = access or Access()
        self._urgent, self._calm = _Lane(LONGEST_URGENT_WAIT), _Lane(LONGEST_WAIT)
        self._urgent_asks, self._calm_asks = _Lane(LONGEST_URGENT_WAIT), _Lane(LONGEST_WAIT)
        self._asked: dict[Key, _Asked] = {}
        self._pods: dict[Key, _Pod] = {}
        self._of: dict[Key, frozenset[Key]] = {}
        self._shown: dict[Key, Mapping[str, Figures]] = {}
        self._comparisons: dict[Key, Comparison] = {}
        self._histories = Histories()

    def follow(self, key: Key, observed: Observed, status: Status) -> None:
        """Read the resource's pods from now on, as was observed, and tell when their figures leave those of its status."""
        resource = observed.resource
        metrics, rolling = resource.spec.metrics, status.canary is not None or status.previous is not None
        interval = shortest = metrics.interval.total_seconds()
        if not rolling:
            half = resource.spec.rollout.analysis.block.total_seconds() / 2
            interval = max(interval, min(SLOWEST, SLOWER * interval, half))
        if metrics.source is None:
            self._asked.pop(key, None)
            lane = self._urgent if rolling else self._calm
        else:
            lane = self._urgent_asks if rolling else self._calm_asks
            self._ask_from_now(key, _Asked(metrics.source.prometheus, lane, interval, shortest))
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
            if metrics.source is None:
                lane.queue.add_after(name, interval * _share(name))
        self._of[key] = frozenset(found)
        compared = subject(key.name, status, shortest) or self._histories.follow(key, observed, status, interval)
        if compared is None:
            self._comparisons.pop(key, None)
        elif key not in self._comparisons or self._comparisons[key].subject != compared:
            self._comparisons[key] = Comparison(compared)
        self._shown[key] = {
            names.deployment(key.name, arm.revision, control=control): shown_by(arm) for arm, control in _arms(status)
        }

    def _ask_from_now(self, key: Key, wanted: _Asked) -> None:
        known = self._asked.get(key)
        if known is not None and known.server == wanted.server:
            if (known.lane, known.interval, known.shortest) == (wanted.lane, wanted.interval, wanted.shortest):
                return
            wanted.standing = known.standing
        self._asked[key] = wanted
        wanted.lane.queue.add_after(key, wanted.interval * _share(key))

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._asked.pop(key, None)
        for name in self._of.pop(key, frozenset()):
            del self._pods[name]
        self._shown.pop(key, None)
        self._comparisons.pop(key, None)
        self._histories.forget(key)

    def memory(self, key: Key, uid: str | None) -> Memory | None:
        """What is held of the stable pods of the resource with this uid."""
        return self._histories.memory(key, uid)

    def blocks(self, key: Key) -> tuple[Block, ...]:
        """The latest closed blocks of the resource's analysis."""
        comparison = self._comparisons.get(key)
        return () if comparison is None else tuple(comparison.blocks)

    def unreadable(self, key: Key) -> Mapping[str, str]:
        """Pods whose pages could not be believed for a while, by name, and why."""
        pods = {name.name: self._pods[name] for name in self._of.get(key, frozenset())}
        return {name: pod.why for name, pod in pods.items() if pod.unbelievable >= UNBELIEVABLE}

    def trouble(self, key: Key) -> str | None:
        """What keeps the resource's Prometheus from being of use; empty when nothing does, None while that is not known."""
        if key not in self._of:
            return None
        asked = self._asked.get(key)
        return "" if asked is None else asked.standing.told

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
        servers = Servers(self._access, self._transport)
        try:
            async with client(self._transport) as through, asyncio.TaskGroup() as group:
                for lane in (self._urgent, self._calm):
                    group.create_task(self._serve(lane, functools.partial(self._turn, through), group))
                for lane in (self._urgent_asks, self._calm_asks):
                    group.create_task(self._serve(lane, functools.partial(self._asking_turn, servers), group))
        finally:
            await servers.close()

    async def _serve(self, lane: _Lane, turn: _Turn, group: asyncio.TaskGroup) -> None:
        while True:
            await lane.free.acquire()
            name, _ = await lane.queue.get()
            group.create_task(turn(lane, name))

    async def _turn(self, through: httpx.AsyncClient, lane: _Lane, name: Key) -> None:
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

    async def _asking_turn(self, servers: Servers, lane: _Lane, key: Key) -> None:
        try:
            asked = self._asked.get(key)
            if asked is None or asked.lane is not lane:
                return
            await self._ask(key, asked, servers)
            if self._asked.get(key) is asked:
                lane.queue.add_after(key, asked.wait())
        finally:
            lane.queue.done(key)
            lane.free.release()

    async def _read(self, name: Key, pod: _Pod, through: httpx.AsyncClient) -> None:
        loop, target = asyncio.get_running_loop(), pod.target
        began, outcome, told = loop.time(), "done", ""
        try:
            page = await fetch(through, target.url)
            outcome, told = self._take(pod, target, functools.partial(parse, page))
        except ScrapeError as error:
            outcome, told = error.reason, str(error)
        except Exception:  # noqa: BLE001 - one pod's page must not end the reading of the others
            outcome = "error"
            _log.exception("pod %s: its page ended the reading with an error of Aerie's own", name)
        self._count(outcome, loop.time() - began)
        _note(name, pod, outcome, told)
        if self._pods.get(name) is not pod:
            return
        closed = self._round(pod.owner)
        if closed or pod.unbelievable == UNBELIEVABLE or (outcome == "done" and self._has_moved(pod.owner)):
            self._tell(pod.owner)

    def _take(self, pod: _Pod, target: Target, sample_of: Callable[[], Sample]) -> tuple[str, str]:
        """What was read of the pod; how that went, and why."""
        try:
            sample = sample_of()
        except PageError as error:
            pod.unbelievable, pod.why = pod.unbelievable + 1, str(error)
            return "unreadable", str(error)
        pod.readings.add(target.run, sample, asyncio.get_running_loop().time(), pod.stale_after)
        pod.latest, pod.read_at = sample, self._clock.now().timestamp()
        pod.unbelievable = 0
        return "done", ""

    async def _ask(self, key: Key, asked: _Asked, servers: Servers) -> None:
        """All pods of the resource, from its server."""
        loop = asyncio.get_running_loop()
        began, outcome = loop.time(), "done"
        pods = {name.name: self._pods[name] for name in sorted(self._of.get(key, frozenset()))}
        runs = {name: pod.target for name, pod in pods.items()}
        trouble: tuple[str, str] | None = None
        news = False
        try:
            found = await servers.ask(asked.server, key.namespace, list(pods), asked.shortest) if pods else {}
            gaps = []
            for name, pod in pods.items():
                before = pod.unbelievable
                gap = self._taken(Key(key.namespace, name), pod, runs[name], found[name])
                gaps += [gap] if gap else []
                news = news or before < pod.unbelievable == UNBELIEVABLE
            asked.gap = min(gaps, default=asked.gap)
            trouble = _seen(asked, pods, found)
            asked.failures = 0
        except ScrapeError as error:
            outcome, trouble = error.reason, (error.reason, str(error))
            asked.failures += 1
        except Exception:  # noqa: BLE001 - one resource's server must not end the reading of the others
            outcome = "error"
            asked.failures += 1
            _log.exception("%s: an answer of %s ended the reading with an error of Aerie's own", key, asked.server.address)
        self._count(outcome, loop.time() - began)
        if self._asked.get(key) is not asked:
            return
        if trouble is not None:
            news = asked.standing.ill(*trouble, loop.time()) or news
        elif outcome == "done":
            news = asked.standing.well() or news
        if self._round(key) or news or (outcome == "done" and self._has_moved(key)):
            self._tell(key)

    def _taken(self, name: Key, pod: _Pod, target: Target, found: Scrape | str) -> float:
        """What the server has of the pod; the seconds between its last two scrapes, where there was a new one."""
        if isinstance(found, str):
            _note(name, pod, "absent", found)
            return 0.0
        if found.at <= pod.scraped_at:  # the scrape of before: no other reading
            return 0.0
        gap, pod.scraped_at = found.at - pod.scraped_at if pod.scraped_at else 0.0, found.at
        _note(name, pod, *self._take(pod, target, found.sample))
        return gap

    def _round(self, key: Key) -> bool:
        """A round of the resource's comparison, if one is due; whether it has closed a block that is worth a pass."""
        comparison, now = self._comparisons.get(key), self._clock.now().timestamp()
        if comparison is None or not comparison.wants(now):
            return False
        pods = {name.name: self._pods[name] for name in self._of.get(key, frozenset())}
        alone = comparison.subject.alone
        if alone and all(pod.latest is None for pod in pods.values()):
            return False  # nothing to remember, and it would take memory
        if not comparison.round(now, ((name, pod.target.group, pod.read_at, pod.latest) for name, pod in pods.items())):
            return False
        return not alone or self._histories.count(key, comparison.blocks.pop(), comparison.subject)

    def _has_moved(self, key: Key) -> bool:
        found = self.figures(key)
        return any(settled(shown, found[group]) != shown for group, shown in self._shown[key].items() if group in found)


def _note(name: Key, pod: _Pod, outcome: str, told: str) -> None:
    """How a reading of the pod went."""
    pod.failures = 0 if outcome == "done" else pod.failures + 1
    if pod.failures == 1:
        _log.info("pod %s: %s", name, told)


def _seen(asked: _Asked, pods: Mapping[str, _Pod], found: Mapping[str, Scrape | str]) -> tuple[str, str] | None:
    """What is wrong with what the server has: the kind of it, and the sentence."""
    for name, pod in pods.items():
        one = found[name]
        if isinstance(one, str) and pod.failures >= ABSENT:
            return "absent", f"pod {name} {one}"
    if asked.interval == asked.shortest and asked.gap > LATE * asked.shortest:
        told = (
            f"{asked.server.address} scrapes the pods each {asked.gap:.0f} s, and spec.metrics.interval is {asked.shortest:g} s"
        )
        return "sparse", f"{told}, by which blocks are counted: raise it to the time between two scrapes"
    return None


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
