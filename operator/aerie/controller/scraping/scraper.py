"""Reads the engines' metrics, in the background of the passes: from their pages, or where a resource says so from Prometheus.

    pass ─ follow(what was observed) ─► pods to read ─► two lanes ─► fetch ─► Readings ─► figures ─► next pass
                                        or resources ─► two lanes ─► ask ──┘
                                                  urgent: of resources with a rollout under way, each spec.metrics.interval
                                                  calm:   of all others, four times slower, up to a minute
                                                           and often enough for two readings in a block

Guarantees: only pods that the resource owns are read, on the port that their engine names; a page has limits in time and size,
a lane one in pages at once; first readings are spread over an interval, so that a thousand resources make no burst; a pod that
does not answer is asked less and less often. Turns are shared among namespaces and resources (fair.py), so that slow or hostile
pods keep no canary of somebody else waiting. One page at a time is parsed, with a pause after it that grows with the page, so
that the event loop is held up by one page and no more, and by all pages for half of the time at most. A page costs the same with
one pod of a resource as with a thousand: what goes over all of them (figures, rounds of a comparison) is done some eight times in
an interval, and the interval of a resource with more than `PER_SECOND` pages a second is doubled until it has fewer
(lanes.paced). A failure is counted by reason, and never reaches a pass: what is not known is missing in the figures. A resource
is looked at again only when its figures have moved (aerie.rollout.facts.arm_metrics). Prometheus is asked for all pods of a resource at
once, for one resource of a namespace at a time; what it has of a pod is a reading only when it is of a scrape that was not seen
before, and has failed otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import httpx

from aerie.analysis.baseline import Memory
from aerie.analysis.measurement.blocks import Block
from aerie.api.status import Arm, Status
from aerie.controller.clock import Clock
from aerie.controller.collection.blocks import Comparison, subject
from aerie.controller.collection.calibration import Histories
from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.http_fetch import ScrapeError, client, fetch
from aerie.controller.scraping.prometheus import Access, Servers
from aerie.controller.scraping.scrape_pool import (
    ASKED_AT_ONCE,
    AT_ONCE,
    LONGEST_URGENT_WAIT,
    LONGEST_WAIT,
    OF_NAMESPACE,
    SLOWER,
    SLOWEST,
    SPEED,
    UNBELIEVABLE,
    Asked,
    Lane,
    Pod,
    note,
    paced,
    seen,
    share,
)
from aerie.controller.scraping.targets import Target, targets
from aerie.controller.work_queue import Key
from aerie.engine.metrics.exposition import PageError, parse
from aerie.engine.metrics.promql import Scrape
from aerie.engine.metrics.sample import Sample
from aerie.manifests import naming
from aerie.rollout.facts.arm_metrics import Figures, Sums, settled, shown_by
from aerie.rollout.facts.snapshot import Observed

_log = logging.getLogger(__name__)

Turn = Callable[[Lane, Key], Coroutine[None, None, None]]


class Listener(Protocol):
    """Who hears of each reading that is believed."""

    def hear(self, owner: Key, pod: str, target: Target, at: float, sample: Sample, interval: float) -> None:
        """`sample` was read at `at`, seconds since the epoch; the pod is read each `interval` seconds."""


class _Nobody:
    def hear(self, owner: Key, pod: str, target: Target, at: float, sample: Sample, interval: float) -> None:
        pass


class Scraper:
    """See the module. `tell` is called with a resource whose figures have moved, `count` with how each reading ended, and
    `listener` with each one that is believed."""

    def __init__(
        self,
        tell: Callable[[Key], None],
        count: Callable[[str, float], None],
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        access: Access | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._tell, self._count, self._transport = tell, count, transport
        self._clock = clock or Clock()
        self._access = access or Access()
        self._listener = listener or _Nobody()
        self._urgent, self._calm = (
            Lane(longest, FairQueue(self._owner, OF_NAMESPACE), AT_ONCE) for longest in (LONGEST_URGENT_WAIT, LONGEST_WAIT)
        )
        self._urgent_asks, self._calm_asks = (
            Lane(longest, FairQueue(lambda key: key, 1), ASKED_AT_ONCE) for longest in (LONGEST_URGENT_WAIT, LONGEST_WAIT)
        )
        self._turn_to_parse = asyncio.Lock()
        self._asked: dict[Key, Asked] = {}
        self._pods: dict[Key, Pod] = {}
        self._of: dict[Key, frozenset[Key]] = {}
        self._shown: dict[Key, _Shown] = {}
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
            interval, shortest = (paced(one, resource.spec.replicas) for one in (interval, shortest))
            self._asked.pop(key, None)
            lane = self._urgent if rolling else self._calm
        else:
            lane = self._urgent_asks if rolling else self._calm_asks
            self._ask_from_now(key, Asked(metrics.source.prometheus, lane, interval, shortest))
        found = {Key(key.namespace, name): target for name, target in targets(observed)}
        for gone in self._of.get(key, frozenset()) - found.keys():
            del self._pods[gone]
        for name, target in found.items():
            pod = self._pods.get(name)
            if pod is None:
                pod = self._pods[name] = Pod(key, target, lane, interval)
            elif (pod.lane, pod.interval) == (lane, interval):
                pod.target = target
                continue
            pod.target, pod.lane, pod.interval = target, lane, interval
            if metrics.source is None:
                lane.queue.add_after(name, interval * share(name))
        self._of[key] = frozenset(found)
        compared = subject(key.name, status, shortest) or self._histories.follow(key, observed, status, interval)
        if compared is None:
            self._comparisons.pop(key, None)
        elif key not in self._comparisons or self._comparisons[key].subject != compared:
            self._comparisons[key] = Comparison(compared)
        self._shown.setdefault(key, _Shown()).figures = {
            naming.deployment(key.name, arm.revision, control=control): shown_by(arm) for arm, control in _arms(status)
        }

    def _owner(self, name: Key) -> Key:
        pod = self._pods.get(name)
        return name if pod is None else pod.owner

    def _ask_from_now(self, key: Key, wanted: Asked) -> None:
        known = self._asked.get(key)
        if known is not None and known.server == wanted.server:
            if (known.lane, known.interval, known.shortest) == (wanted.lane, wanted.interval, wanted.shortest):
                return
            wanted.standing = known.standing
        self._asked[key] = wanted
        wanted.lane.queue.add_after(key, wanted.interval * share(key))

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

    def silence(self, key: Key) -> str:
        """Why nothing is read of the resource's pods; empty where something is, or nothing is known against it."""
        asked = self._asked.get(key)
        if asked is not None and asked.standing.told:
            return asked.standing.told
        pods = [(name, self._pods[name]) for name in sorted(self._of.get(key, frozenset()))]
        if not pods or any(not pod.failed for _, pod in pods):
            return ""
        name, pod = pods[0]
        return f"pod {name.name}: {pod.failed}"

    def figures(self, key: Key) -> Mapping[str, Figures]:
        """What is known of the resource's arms, by the name of their Deployment."""
        now = asyncio.get_running_loop().time()
        sums: dict[str, Sums] = {}
        for name in sorted(self._of.get(key, frozenset())):
            pod = self._pods[name]
            found = pod.readings.sums(now, pod.stale_after)
            if found is not None:
                known = sums.get(pod.target.group)
                together = found if known is None else known.plus(found)
                sums[pod.target.group] = together or known or found  # one that drafts otherwise: the first stand for the group
        return {group: found.figures for group, found in sums.items()}

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

    async def _serve(self, lane: Lane, turn: Turn, group: asyncio.TaskGroup) -> None:
        while True:
            await lane.free.acquire()
            try:
                key, _ = await lane.queue.get()
            except asyncio.CancelledError:
                lane.free.release()
                raise
            # A task that is cancelled before it begins runs none of its own clean-up.
            group.create_task(turn(lane, key)).add_done_callback(functools.partial(_over, lane, key))

    async def _turn(self, through: httpx.AsyncClient, lane: Lane, name: Key) -> None:
        pod = self._pods.get(name)
        if pod is None or pod.lane is not lane:
            return
        await self._read(name, pod, through)
        if self._pods.get(name) is pod and pod.lane is lane:
            lane.queue.add_after(name, pod.wait())

    async def _asking_turn(self, servers: Servers, lane: Lane, key: Key) -> None:
        asked = self._asked.get(key)
        if asked is None or asked.lane is not lane:
            return
        await self._ask(key, asked, servers)
        if self._asked.get(key) is asked:
            lane.queue.add_after(key, asked.wait())

    async def _read(self, name: Key, pod: Pod, through: httpx.AsyncClient) -> None:
        loop, target = asyncio.get_running_loop(), pod.target
        began, outcome, told = loop.time(), "done", ""
        try:
            page = await fetch(through, target.url)
            pod.size = len(page)
            async with self._turn_to_parse:
                outcome, told = self._take(name, pod, target, functools.partial(parse, page), None)
                await asyncio.sleep(len(page) / SPEED)
        except ScrapeError as error:
            outcome, told = error.reason, str(error)
        except Exception:  # noqa: BLE001 - one pod's page must not end the reading of the others
            outcome = "error"
            _log.exception("pod %s: its page ended the reading with an error of Aerie's own", name)
        pod.took = loop.time() - began
        self._count(outcome, pod.took)
        note(name, pod, outcome, told)
        if self._pods.get(name) is not pod:
            return
        closed = self._round(pod.owner)
        if closed or pod.unbelievable == UNBELIEVABLE or (outcome == "done" and self._has_moved(pod.owner, 1)):
            self._tell(pod.owner)

    def _take(self, name: Key, pod: Pod, target: Target, sample_of: Callable[[], Sample], at: float | None) -> tuple[str, str]:
        """What was read of the pod, as it was then; how that went, and why."""
        try:
            sample = sample_of()
        except PageError as error:
            pod.unbelievable, pod.why = pod.unbelievable + 1, str(error)
            return "unreadable", str(error)
        if sample.started is None:  # several API servers, or the front end in Rust: the container's own start stands for it
            sample = replace(sample, started=target.started)
        pod.readings.add(target.run, sample, asyncio.get_running_loop().time(), pod.stale_after)
        pod.latest, pod.read_at = sample, self._clock.now().timestamp()
        pod.unbelievable = 0
        self._listener.hear(pod.owner, name.name, target, pod.read_at if at is None else at, sample, pod.interval)
        return "done", ""

    async def _ask(self, key: Key, asked: Asked, servers: Servers) -> None:
        """All pods of the resource, from its server."""
        loop = asyncio.get_running_loop()
        began, outcome = loop.time(), "done"
        pods = {name.name: self._pods[name] for name in sorted(self._of.get(key, frozenset()))}
        runs = {name: pod.target for name, pod in pods.items()}
        trouble: tuple[str, str] | None = None
        news = False
        try:
            gaps: list[float] = []
            missing: dict[str, str] = {}
            async for some in servers.ask(asked.server, key.namespace, list(pods), asked.shortest):
                for name, found in some.items():
                    before = pods[name].unbelievable
                    gap = self._taken(Key(key.namespace, name), pods[name], runs[name], found)
                    gaps += [gap] if gap else []
                    missing |= {name: found} if isinstance(found, str) else {}
                    news = news or before < pods[name].unbelievable == UNBELIEVABLE
            asked.gap = min(gaps, default=asked.gap)
            trouble = seen(asked, pods, missing)
            asked.failures = 0
        except ScrapeError as error:
            outcome, trouble = error.reason, (error.reason, str(error))
            asked.failures += 1
        except Exception:  # noqa: BLE001 - one resource's server must not end the reading of the others
            outcome = "error"
            asked.failures += 1
            _log.exception("%s: an answer of %s ended the reading with an error of Aerie's own", key, asked.server.address)
        asked.took = loop.time() - began
        self._count(outcome, asked.took)
        if self._asked.get(key) is not asked:
            return
        if trouble is not None:
            news = asked.standing.ill(*trouble, loop.time()) or news
        elif outcome == "done":
            news = asked.standing.well() or news
        if self._round(key) or news or (outcome == "done" and self._has_moved(key, len(pods))):
            self._tell(key)

    def _taken(self, name: Key, pod: Pod, target: Target, found: Scrape | str) -> float:
        """What the server has of the pod; the seconds between its last two scrapes, where there was a new one."""
        if isinstance(found, str):
            note(name, pod, "absent", found)
            return 0.0
        if found.at <= pod.scraped_at:  # the scrape of before: no other reading
            return 0.0
        gap, pod.scraped_at = found.at - pod.scraped_at if pod.scraped_at else 0.0, found.at
        note(name, pod, *self._take(name, pod, target, found.sample, found.at))
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

    def _has_moved(self, key: Key, pages: int) -> bool:
        """Whether the figures have left those that are shown, looked at after so many more pages of the resource.

        All of its pods are in a look, so that it is made after an eighth of them were read, or an interval.
        """
        now, shown, pods = asyncio.get_running_loop().time(), self._shown[key], self._of.get(key, frozenset())
        shown.pages += pages
        if shown.pages < len(pods) / 8 and now < shown.due:
            return False
        shown.pages, shown.due = 0, now + min((self._pods[name].interval for name in pods), default=0.0)
        found = self.figures(key)
        return any(settled(known, found[group]) != known for group, known in shown.figures.items() if group in found)


@dataclass(eq=False)
class _Shown:
    """The figures in a resource's status, and when they were last held against those that are read."""

    figures: Mapping[str, Figures] = field(default_factory=dict)
    """By Deployment."""
    pages: int = 0
    """That were read since."""
    due: float = 0.0


def _over(lane: Lane, key: Key, turn: asyncio.Task[None]) -> None:
    """A turn has ended. One that was cut short is due again, for whoever reads after this."""
    lane.queue.done(key)
    lane.free.release()
    if turn.cancelled():
        lane.queue.add(key)


def _arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """The arms that the status shows, and whether each is control."""
    if status.stable is not None:
        yield status.stable, False
    if status.canary is not None:
        yield status.canary, False
        if status.canary.control is not None:
            yield status.canary.control, True
