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

from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE, Acceptance
from aerie_lab.engine.prefix import PromptSegments

TimeArray = npt.NDArray[np.floating[Any]]
_ARRIVAL_WINDOW_SECONDS = 3600.0  # seconds of arrivals drawn at once


@dataclass(frozen=True)
class LengthDistribution:
    """A log-normal number of tokens, cut to [least, most]."""

    median: float
    spread: float = 0.0
    """Standard deviation of the logarithm; 0: always the median."""
    min_tokens: int = 1
    max_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.max_tokens or self.median <= 0 or self.spread < 0:
            raise ValueError(f"{self}: give a median above 0, a spread of 0 or more, and 1 <= least <= most.")

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        values = self.median * np.exp(self.spread * random.standard_normal(count))
        found: list[int] = np.clip(np.rint(values), self.min_tokens, self.max_tokens).astype(int).tolist()
        return found


@dataclass(frozen=True)
class TrafficClass:
    """One kind of request."""

    name: str
    acceptance: Acceptance
    prompt_lengths: LengthDistribution
    """New tokens of a turn, without what the session and the system prompt bring along."""
    answer_lengths: LengthDistribution
    share: float = 1.0
    system_prompt_tokens: int = 0
    """Tokens of a system prompt that all requests of the class begin with."""
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
        """Arrival times in [start, end), ascending. Windows that follow one another are independent."""
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
    """rate * (1 + amplitude * cos(2 pi (t - peak) / day)): one peak a day."""

    mean_rate: float
    amplitude: float = 0.7
    peak_seconds: float = 15 * 3600.0
    day_seconds: float = 86400.0

    def draw_times(self, random: np.random.Generator, start: float, end: float) -> TimeArray:
        candidates = PoissonArrivals(self.mean_rate * (1 + self.amplitude)).draw_times(random, start, end)
        chance = (1 + self.amplitude * np.cos(2 * math.pi * (candidates - self.peak_seconds) / self.day_seconds)) / (
            1 + self.amplitude
        )
        kept: TimeArray = candidates[random.random(len(candidates)) < chance]
        return kept


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
    """The requests in [start, end), in order of time. A session ends early when its history would pass `longest` tokens."""
    random = np.random.default_rng(seed)
    shares = np.array([kind.share for kind in classes])
    open_sessions: list[list[_Session]] = [[] for _ in classes]
    number = sessions = 0
    while start < end:
        until = min(start + _ARRIVAL_WINDOW_SECONDS, end)
        times = arrivals.draw_times(random, start, until)
        start = until
        kinds = random.choice(len(classes), len(times), p=shares / shares.sum()).tolist()
        prompts = [iter(kind.prompt_lengths.draw(random, kinds.count(i))) for i, kind in enumerate(classes)]
        answers = [iter(kind.answer_lengths.draw(random, kinds.count(i))) for i, kind in enumerate(classes)]
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
            if kind.system + session.history + new + answer > max_session_tokens and session.history:
                session.history = 0
            own = session.history + new
            segments = (((kind.name, kind.system),) if kind.system else ()) + ((session.number, own),)
            yield Turn(number, time, kind, session.number, kind.system + own, answer, segments)
            number += 1
            session.history = own + answer
