"""Workloads drawn from a seed: traffic classes, lengths, sessions and arrival processes.

Used by the simulated fleet in virtual time and by the traffic generator over HTTP. Lengths are tokens, rates are requests per
second, times are seconds. Not modelled: users who wait for an answer before their next request. The arrival process
alone determines the time of a session's next turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE, Acceptance
from aerie_lab.engine.performance_model.prefix import PromptSegments

TimeArray = npt.NDArray[np.floating[Any]]
_ARRIVAL_WINDOW_SECONDS = 3600.0  # arrivals of so many seconds are drawn together
_MAX_OPEN_SESSIONS = 64  # per class


@dataclass(frozen=True)
class LengthDistribution:
    """A log-normal number of tokens, clipped to [min_tokens, max_tokens]."""

    median: float
    spread: float = 0.0
    """Standard deviation of the logarithm; 0: always the median."""
    min_tokens: int = 1
    max_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.max_tokens or self.median <= 0 or self.spread < 0:
            raise ValueError(f"{self}: give a median above 0, a spread of 0 or more, and 1 <= min_tokens <= max_tokens.")

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        values = self.median * np.exp(self.spread * random.standard_normal(count))
        lengths: list[int] = np.clip(np.rint(values), self.min_tokens, self.max_tokens).astype(int).tolist()
        return lengths


@dataclass(frozen=True)
class TrafficClass:
    """One kind of request."""

    name: str
    acceptance: Acceptance
    prompt_lengths: LengthDistribution
    """New tokens of a turn, without the history of the session and the system prompt."""
    answer_lengths: LengthDistribution
    share: float = 1.0
    system_prompt_tokens: int = 0
    """Tokens of the system prompt that all requests of the class share."""
    mean_turns: float = 1.0
    """Mean number of turns of a session."""


DEFAULT_TRAFFIC_CLASSES = (
    # Shares and lengths are assumptions; acceptance is published (acceptance.py).
    TrafficClass(
        "chat",
        CLASS_ACCEPTANCE["chat"],
        LengthDistribution(200, 0.8, 4, 4000),
        LengthDistribution(180, 0.7, 4, 1500),
        0.5,
        system_prompt_tokens=256,
        mean_turns=3,
    ),
    TrafficClass(
        "code",
        CLASS_ACCEPTANCE["code"],
        LengthDistribution(900, 0.8, 16, 8000),
        LengthDistribution(250, 0.7, 4, 2000),
        0.3,
        system_prompt_tokens=512,
        mean_turns=2,
    ),
    TrafficClass(
        "math", CLASS_ACCEPTANCE["math"], LengthDistribution(150, 0.5, 16, 2000), LengthDistribution(500, 0.6, 16, 3000), 0.2
    ),
)


class ArrivalProcess(Protocol):
    """An arrival process."""

    def draw_times(self, random: np.random.Generator, start: float, end: float) -> TimeArray:
        """Return arrival times in [start, end), ascending. Consecutive windows are independent."""
        ...


@dataclass(frozen=True)
class PoissonArrivals:
    """A constant rate."""

    rate: float

    def draw_times(self, random: np.random.Generator, start: float, end: float) -> TimeArray:
        return np.sort(random.uniform(start, end, random.poisson(self.rate * (end - start))))


@dataclass(frozen=True)
class BurstArrivals:
    """A rate that jumps between calm and burst; the periods are exponential with the given means."""

    calm_rate: float
    burst_rate: float
    mean_calm_seconds: float = 300.0
    mean_burst_seconds: float = 30.0

    def draw_times(self, random: np.random.Generator, start: float, end: float) -> TimeArray:
        pieces = []
        bursting = random.random() < self.mean_burst_seconds / (self.mean_burst_seconds + self.mean_calm_seconds)
        while start < end:
            until = min(start + random.exponential(self.mean_burst_seconds if bursting else self.mean_calm_seconds), end)
            pieces.append(PoissonArrivals(self.burst_rate if bursting else self.calm_rate).draw_times(random, start, until))
            start, bursting = until, not bursting
        return np.concatenate(pieces) if pieces else np.empty(0)


@dataclass(frozen=True)
class DiurnalArrivals:
    """mean_rate * (1 + amplitude * cos(2 pi (t - peak_seconds) / day_seconds)): one peak a day."""

    mean_rate: float
    amplitude: float = 0.7
    peak_seconds: float = 15 * 3600.0
    day_seconds: float = 86400.0

    def draw_times(self, random: np.random.Generator, start: float, end: float) -> TimeArray:
        candidates = PoissonArrivals(self.mean_rate * (1 + self.amplitude)).draw_times(random, start, end)
        chance = (1 + self.amplitude * np.cos(2 * math.pi * (candidates - self.peak_seconds) / self.day_seconds)) / (
            1 + self.amplitude
        )
        times: TimeArray = candidates[random.random(len(candidates)) < chance]
        return times


class Turn(NamedTuple):
    """One request to be made."""

    number: int
    time: float
    traffic_class: TrafficClass
    session: int
    prompt_tokens: int
    answer_tokens: int
    segments: PromptSegments


@dataclass(slots=True)
class _Session:
    number: int
    history_tokens: int


def generate_turns(
    classes: Sequence[TrafficClass],
    arrivals: ArrivalProcess,
    start: float,
    end: float,
    seed: int = 0,
    max_session_tokens: int = 30_000,
) -> Iterator[Turn]:
    """Yield the requests in [start, end), ordered by time. A session ends when it would exceed `max_session_tokens`."""
    random = np.random.default_rng(seed)
    shares = np.array([traffic_class.share for traffic_class in classes])
    open_sessions: list[list[_Session]] = [[] for _ in classes]
    number = sessions = 0
    while start < end:
        until = min(start + _ARRIVAL_WINDOW_SECONDS, end)
        times = arrivals.draw_times(random, start, until)
        start = until
        drawn: list[int] = random.choice(len(classes), len(times), p=shares / shares.sum()).tolist()
        prompts = [iter(each.prompt_lengths.draw(random, drawn.count(i))) for i, each in enumerate(classes)]
        answers = [iter(each.answer_lengths.draw(random, drawn.count(i))) for i, each in enumerate(classes)]
        picks = random.random((len(times), 2)).tolist()
        for time, i, (continues, which) in zip(times.tolist(), drawn, picks, strict=True):
            traffic_class, sessions_of_class = classes[i], open_sessions[i]
            new, answer, system = next(prompts[i]), next(answers[i]), traffic_class.system_prompt_tokens
            if sessions_of_class and continues < 1 - 1 / traffic_class.mean_turns:
                session = sessions_of_class[int(which * len(sessions_of_class))]
            else:
                sessions += 1
                session = _Session(sessions, 0)
                if traffic_class.mean_turns > 1:
                    sessions_of_class.append(session)
                    if len(sessions_of_class) > _MAX_OPEN_SESSIONS:
                        del sessions_of_class[0]
            if system + session.history_tokens + new + answer > max_session_tokens and session.history_tokens:
                session.history_tokens = 0
            own = session.history_tokens + new
            segments = (((traffic_class.name, system),) if system else ()) + ((session.number, own),)
            yield Turn(number, time, traffic_class, session.number, system + own, answer, segments)
            number += 1
            session.history_tokens = own + answer
