"""Many engines in virtual time: requests are routed, pods restart, scrapes are late or lost.

A replica-day takes seconds. `SimulatedFleet.run` yields the scrapes in order of time; `SimulatedFleet.finished_requests` has what
users saw. The same seeds give the same run.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from aerie_lab.engine.core.replica import Replica
from aerie_lab.engine.load_generation.workload import ArrivalProcess, TrafficClass, Turn, generate_turns
from aerie_lab.engine.metrics.counters import Counters
from aerie_lab.engine.performance_model.acceptance import NO_DRIFT, Acceptance, Drift
from aerie_lab.engine.performance_model.request import EngineSettings, Request
from aerie_lab.engine.performance_model.step import ScaledStepTime, StepTime

Routing = Literal["random", "session", "least"]


@dataclass(frozen=True)
class PodRestart:
    """Restart of a pod at `time`: it loses counters and cache, and is ready again after `down_seconds`."""

    time: float
    down_seconds: float = 60.0


@dataclass(frozen=True)
class SimulatedPod:
    """One engine of the fleet, and in what it differs from the others."""

    name: str
    settings: EngineSettings
    step_time: StepTime
    step_time_factor: float = 1.0
    """Factor on every step time; pods of one fleet differ by some per cent."""
    logit_shift: float = 0.0
    """Shift of all its acceptance on the logit scale: its drafter is better or worse than that of the classes."""
    drift: Drift = NO_DRIFT
    weight: float = 1.0
    """Its share of the traffic, relative to the others'."""
    restarts: tuple[PodRestart, ...] = ()


@dataclass(frozen=True)
class ScrapeSettings:
    """Settings of the scraper."""

    interval_seconds: float = 15.0
    delay_sd_seconds: float = 0.5
    """Standard deviation of a scrape's delay, seconds (half normal)."""
    loss_probability: float = 0.0
    """Chance that a scrape is lost."""


class Scrape(NamedTuple):
    """One scrape: `counters` is None when it was lost or the pod was away."""

    time: float
    pod: str
    counters: Counters | None


class FinishedRequest(NamedTuple):
    """A finished request, as its user saw it."""

    pod: str
    class_name: str
    session: int
    request: Request


class _ScrapeEvent(NamedTuple):
    pod: int
    lost: bool


class _RestartEvent(NamedTuple):
    pod: int
    restart: PodRestart


_Event = tuple[float, int, Turn | _ScrapeEvent | _RestartEvent]
"""Time, rank among events at one time, and what happens."""


class SimulatedFleet:
    """The pods, the traffic and the scraper."""

    def __init__(
        self,
        pods: Sequence[SimulatedPod],
        classes: Sequence[TrafficClass],
        arrivals: ArrivalProcess,
        *,
        routing: Routing = "session",
        scrape_settings: ScrapeSettings = ScrapeSettings(),
        seed: int = 0,
    ) -> None:
        if len({pod.name for pod in pods}) != len(pods) or not pods:
            raise ValueError(f"pods are {[pod.name for pod in pods]}: give at least one, each with a name of its own.")
        self.pods = list(pods)
        self.classes = tuple(classes)
        self.arrivals = arrivals
        self.routing = routing
        self.scrape_settings = scrape_settings
        self.seed = seed
        self.finished_requests: list[FinishedRequest] = []
        """Requests of each pod that finished before its last scrape; at the end of a run all of them."""
        self.lost_requests = 0
        """Requests that a restart cut off, or that found no pod."""
        self.replicas = [self._create_replica(index, 0.0) for index in range(len(pods))]
        self._ready_times = [0.0] * len(pods)
        self._turns_by_request: list[dict[str, Turn]] = [{} for _ in pods]
        self._acceptance: dict[tuple[int, str], Acceptance] = {}
        self._random = np.random.default_rng((seed, 1))

    def run(self, seconds: float) -> Iterator[Scrape]:
        """Let the fleet work from 0 to `seconds`; yields the scrapes. May be called once."""
        requests = ((turn.time, 0, turn) for turn in generate_turns(self.classes, self.arrivals, 0.0, seconds, self.seed))
        scrapes = [self._scrape_times(index, seconds) for index in range(len(self.pods))]
        restarts = [
            [(restart.time, 2, _RestartEvent(index, restart)) for restart in pod.restarts] for index, pod in enumerate(self.pods)
        ]
        events: Iterator[_Event] = heapq.merge(requests, *scrapes, *restarts)
        for time, _, what in events:
            if isinstance(what, Turn):
                self._route(what)
            elif isinstance(what, _RestartEvent):
                self._restart(what.pod, what.restart)
            else:
                self._advance(what.pod, time)
                away = what.lost or time < self._ready_times[what.pod]
                yield Scrape(time, self.pods[what.pod].name, None if away else self.replicas[what.pod].counters.copy())
        for index in range(len(self.pods)):
            self._advance(index, seconds)

    def _scrape_times(self, index: int, end: float) -> Iterator[_Event]:
        random = np.random.default_rng((self.seed, 2, index))
        due, last = random.uniform(0, self.scrape_settings.interval_seconds), 0.0
        while due < end:
            last = max(last, due + abs(random.normal(0.0, self.scrape_settings.delay_sd_seconds)))
            yield last, 1, _ScrapeEvent(index, bool(random.random() < self.scrape_settings.loss_probability))
            due += self.scrape_settings.interval_seconds

    def _create_replica(self, index: int, start_time: float) -> Replica:
        pod = self.pods[index]
        step_time = pod.step_time if pod.step_time_factor == 1.0 else ScaledStepTime(pod.step_time, pod.step_time_factor)
        # A restarted pod is not the old one again: its start is part of the seed.
        seed = zlib.crc32(f"{self.seed}/{pod.name}/{start_time}".encode())
        return Replica(pod.settings, step_time, seed=seed, drift=pod.drift, start_time=start_time)

    def _restart(self, index: int, restart: PodRestart) -> None:
        self._advance(index, restart.time)
        self.lost_requests += self.replicas[index].unfinished_count
        self._ready_times[index] = restart.time + restart.down_seconds
        self._turns_by_request[index].clear()
        self.replicas[index] = self._create_replica(index, self._ready_times[index])

    def _advance(self, index: int, until: float) -> None:
        for request in self.replicas[index].advance(until):
            turn = self._turns_by_request[index].pop(request.name)
            self.finished_requests.append(FinishedRequest(self.pods[index].name, turn.traffic_class.name, turn.session, request))

    def _route(self, turn: Turn) -> None:
        ready = [index for index, since in enumerate(self._ready_times) if since <= turn.time]
        if not ready:
            self.lost_requests += 1
            return
        index = self._choose_pod(ready, turn)
        acceptance = self._acceptance.get((index, turn.traffic_class.name))
        if acceptance is None:
            acceptance = self._acceptance[index, turn.traffic_class.name] = turn.traffic_class.acceptance.shift_logits(
                self.pods[index].logit_shift
            )
        name = str(turn.number)
        self._turns_by_request[index][name] = turn
        prompt = min(turn.prompt_tokens, self.pods[index].settings.max_model_len - 1)
        # The model ends most answers before `max_tokens`, which clients set well above that.
        request = Request(name, prompt, 2 * turn.answer_tokens, acceptance, stop_after=turn.answer_tokens, segments=turn.segments)
        self.replicas[index].submit(request, turn.time)

    def _choose_pod(self, ready: list[int], turn: Turn) -> int:
        if len(ready) == 1:
            return ready[0]
        if self.routing == "least":
            for index in ready:
                self._advance(index, turn.time)
            loads = [self.replicas[i].unfinished_count for i in ready]
            return ready[loads.index(min(loads))]
        if self.routing == "session":  # the same pod for a session as long as the same pods are ready
            point = zlib.crc32(f"{self.seed}/{turn.session}".encode()) / 2**32
        else:
            point = float(self._random.random())
        weights = [self.pods[i].weight for i in ready]
        left = point * sum(weights)
        for index, weight in zip(ready, weights, strict=True):
            left -= weight
            if left < 0:
                return index
        return ready[-1]
