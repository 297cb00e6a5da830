"""Who asks for what, and when: classes of traffic, lengths, sessions and arrival processes, drawn from a seed.

Used by the simulated fleet in virtual time and by the traffic generator over HTTP. Lengths are tokens, rates are requests per
second, times are seconds. Not modelled: users who wait for an answer before they ask again; a session's next turn comes when
the arrival process says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aerie_lab.engine.acceptance import CLASSES, Acceptance
from aerie_lab.engine.prefix import Segments

Times = npt.NDArray[np.floating[Any]]
_WINDOW = 3600.0  # seconds of arrivals drawn at once


@dataclass(frozen=True)
class Lengths:
    """A log-normal number of tokens, cut to [least, most]."""

    median: float
    spread: float = 0.0
    """Standard deviation of the logarithm; 0: always the median."""
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most or self.median <= 0 or self.spread < 0:
            raise ValueError(f"{self}: give a median above 0, a spread of 0 or more, and 1 <= least <= most.")

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        values = self.median * np.exp(self.spread * random.standard_normal(count))
        found: list[int] = np.clip(np.rint(values), self.least, self.most).astype(int).tolist()
        return found


@dataclass(frozen=True)
class TrafficClass:
    """One kind of request."""

    name: str
    acceptance: Acceptance
    prompt: Lengths
    """New tokens of a turn, without what the session and the system prompt bring along."""
    answer: Lengths
    share: float = 1.0
    system: int = 0
    """Tokens of a system prompt that all requests of the class begin with."""
    turns: float = 1.0
    """Mean number of turns of a session."""


DEFAULT_CLASSES = (
    # Shares and lengths are assumptions; acceptance is published (acceptance.py).
    TrafficClass("chat", CLASSES["chat"], Lengths(200, 0.8, 4, 4000), Lengths(180, 0.7, 4, 1500), 0.5, system=256, turns=3),
    TrafficClass("code", CLASSES["code"], Lengths(900, 0.8, 16, 8000), Lengths(250, 0.7, 4, 2000), 0.3, system=512, turns=2),
    TrafficClass("math", CLASSES["math"], Lengths(150, 0.5, 16, 2000), Lengths(500, 0.6, 16, 3000), 0.2),
)


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, random: np.random.Generator, start: float, end: float) -> Times:
        """Arrival times in [start, end), ascending. Windows that follow one another are independent."""
        ...


@dataclass(frozen=True)
class Poisson:
    """A constant rate."""

    rate: float

    def times(self, random: np.random.Generator, start: float, end: float) -> Times:
        return np.sort(random.uniform(start, end, random.poisson(self.rate * (end - start))))


@dataclass(frozen=True)
class Bursts:
    """A rate that jumps between calm and burst; the periods are exponential with the given means."""

    rate: float
    burst_rate: float
    calm: float = 300.0
    burst: float = 30.0

    def times(self, random: np.random.Generator, start: float, end: float) -> Times:
        pieces = []
        bursting = random.random() < self.burst / (self.burst + self.calm)
        while start < end:
            until = min(start + random.exponential(self.burst if bursting else self.calm), end)
            pieces.append(Poisson(self.burst_rate if bursting else self.rate).times(random, start, until))
            start, bursting = until, not bursting
        return np.concatenate(pieces) if pieces else np.empty(0)


@dataclass(frozen=True)
class Diurnal:
    """rate * (1 + amplitude * cos(2 pi (t - peak) / day)): one peak a day."""

    rate: float
    amplitude: float = 0.7
    peak: float = 15 * 3600.0
    day: float = 86400.0

    def times(self, random: np.random.Generator, start: float, end: float) -> Times:
        candidates = Poisson(self.rate * (1 + self.amplitude)).times(random, start, end)
        chance = (1 + self.amplitude * np.cos(2 * math.pi * (candidates - self.peak) / self.day)) / (1 + self.amplitude)
        kept: Times = candidates[random.random(len(candidates)) < chance]
        return kept


class Turn(NamedTuple):
    """One request to be made."""

    number: int
    time: float
    kind: TrafficClass
    session: int
    prompt_tokens: int
    answer_tokens: int
    segments: Segments


@dataclass(slots=True)
class _Session:
    number: int
    history: int


def turns(
    classes: Sequence[TrafficClass], arrivals: Arrivals, start: float, end: float, seed: int = 0, longest: int = 30_000
) -> Iterator[Turn]:
    """The requests in [start, end), in order of time. A session ends early when its history would pass `longest` tokens."""
    random = np.random.default_rng(seed)
    shares = np.array([kind.share for kind in classes])
    open_sessions: list[list[_Session]] = [[] for _ in classes]
    number = sessions = 0
    while start < end:
        until = min(start + _WINDOW, end)
        times = arrivals.times(random, start, until)
        start = until
        kinds = random.choice(len(classes), len(times), p=shares / shares.sum()).tolist()
        prompts = [iter(kind.prompt.draw(random, kinds.count(i))) for i, kind in enumerate(classes)]
        answers = [iter(kind.answer.draw(random, kinds.count(i))) for i, kind in enumerate(classes)]
        picks = random.random((len(times), 2)).tolist()
        for time, i, (again, which) in zip(times.tolist(), kinds, picks, strict=True):
            kind, waiting = classes[i], open_sessions[i]
            new, answer = next(prompts[i]), next(answers[i])
            if waiting and again < 1 - 1 / kind.turns:
                session = waiting[int(which * len(waiting))]
            else:
                sessions += 1
                session = _Session(sessions, 0)
                if kind.turns > 1:
                    waiting.append(session)
                    if len(waiting) > 64:
                        del waiting[0]
            if kind.system + session.history + new + answer > longest and session.history:
                session.history = 0
            own = session.history + new
            segments = (((kind.name, kind.system),) if kind.system else ()) + ((session.number, own),)
            yield Turn(number, time, kind, session.number, kind.system + own, answer, segments)
            number += 1
            session.history = own + answer
