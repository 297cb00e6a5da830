"""Swaps in one engine of real vLLM on CPU: pauses and answers under load, and acceptance afterwards against fresh engines.

    fresh engines   each drafter serves all prompts in an engine of its own: answers, and acceptance length by kind of prompts
    load            users without pause; one engine swaps after each 20 requests
    changes         the same engine, without requests in progress: one drafter serves the prompts, a swap, the other does so

Prompts are those of the bundle, and some behind a shared prefix. Blocks of a prefix stay cached for a long time, and the plugin
separates them by drafter. So prompts with the prefix are sent twice after each swap: with what is cached, and after it was
evicted. The change with the greatest difference is repeated, to measure its duration. Without the separation 0.33 had the greater
differences: 0.32 recomputes the last cached block of a prompt for EAGLE drafters.

Guarantees: acceptance lengths are of the same prompts with the same greedy answers, so a ratio has no sampling error.
Not guaranteed: pauses without the load of the users and of their client, which share the cores with the engine.
"""

from __future__ import annotations

import itertools
import operator
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from aerie.analysis.switchback.design import MIN_CARRYOVER_SECONDS
from aerie_drafter.bundle import find_bundle_path
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_vllm.counters import ACCEPTED_TOKENS, DRAFTS, Counts, subtract
from tests.vllm.inplace_server import InPlaceServer, Users, serve_in_place, users_of

OWN = "eagle31"
CYCLE = ("eagle3", "eagle31", "weak", "eagle3", "weak", "eagle31")
"""Order of the swaps: beginning with the own drafter, each change from one of the three to another once."""
USERS, REQUESTS_PER_SWAP, MAX_TOKENS = 4, 20, 64
CLIENTS = 12
"""Requests at a time while acceptance is measured."""
LEASE_SECONDS = 1800.0
COUNTING_SECONDS = 0.3
"""vLLM counts the last step after it has sent the last answer."""
TOLERANCE = 0.005
"""Difference from a fresh engine above which its duration is measured."""
EVICTING_PROMPTS = 80
"""Prompts of three blocks each that none shares with another, for a cache of 102 blocks. Prompts shorter than a block evict none:
vLLM uses free blocks without cached content first."""

Message = Mapping[str, str]


@cache
def prompts_by_kind() -> Mapping[str, Sequence[Sequence[Message]]]:
    """Return the bundle's prompts, and some of them behind a prefix of 300 tokens."""
    prompts = _read_questions()
    return {
        "short": _build_prompts(prompts),
        "prefix": _build_prompts(f"{_join_questions(0)}\n{question}" for question in prompts[30:110]),
    }


def evicting_prompts() -> Sequence[Sequence[Message]]:
    """Return prompts that each need blocks of their own."""
    return _build_prompts(f"{first}. {_join_questions(first)}" for first in range(EVICTING_PROMPTS))


def _build_prompts(texts: Iterable[str]) -> Sequence[Sequence[Message]]:
    return [[{"role": "user", "content": text}] for text in texts]


def _read_questions() -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in read_prompts(find_bundle_path("prompts.jsonl"))]


def _join_questions(first: int) -> str:
    return "\n".join(_read_questions()[first : first + 24])


@dataclass(frozen=True)
class Served:
    """What an engine made of all prompts of a kind."""

    acceptance_length: float
    answers: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Change:
    """Acceptance lengths after a swap, over those of a fresh engine with the same prompts."""

    previous: str
    drafter: str
    short: float
    prefix: float
    """Ratio with the cached blocks of the previous drafter."""
    recomputed_prefix: float

    @property
    def worst(self) -> float:
        """The ratio that is farthest from 1."""
        return _farthest_from_1((self.short, self.prefix, self.recomputed_prefix))


def _farthest_from_1(ratios: Iterable[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def measure_engine(vllm: Path, swaps: int) -> dict[str, float]:
    """Return the measured values, without the prefix of their keys, and print the measurements behind them."""
    fresh: dict[tuple[str, str], Served] = {}
    for drafter in ("eagle3", "weak"):
        with _serve(vllm, drafter) as server:
            fresh |= {(drafter, kind): serve_prompts(server, kind) for kind in prompts_by_kind()}
    with _serve(vllm, OWN) as server:
        fresh |= {(OWN, kind): serve_prompts(server, kind) for kind in prompts_by_kind()}
        for (drafter, kind), served in fresh.items():
            print(f"fresh engine, {drafter}, {kind}: acceptance length {served.acceptance_length:.4f}, {served.seconds:.0f} s")
        answers = {kind: fresh[OWN, kind].answers for kind in prompts_by_kind()}
        values = measure_load(server, swaps, answers)
        changes = Changes(server, {key: served.acceptance_length for key, served in fresh.items()}, answers)
        measured = changes.measure()
        worst = max(measured, key=lambda change: abs(change.worst - 1))
        if abs(worst.worst - 1) > TOLERANCE:
            changes.follow(worst)
    values["different_answers"] += changes.different_answers
    without_old_blocks = [ratio for change in measured for ratio in (change.short, change.recomputed_prefix)]
    return values | {
        "al_after_swap_ratio_worst": round(worst.worst, 5),
        "al_ratio_without_old_blocks_worst": round(_farthest_from_1(without_old_blocks), 5),
    }


@contextmanager
def _serve(vllm: Path, drafter: str) -> Iterator[InPlaceServer]:
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder, serve_in_place(vllm, Path(folder), drafter) as server:
        yield server


def change_drafter(server: InPlaceServer, drafter: str) -> float:
    """Swap, and return the seconds of the pause. Raises AssertionError if the endpoint rejects it."""
    response = server.put(drafter, LEASE_SECONDS)
    assert response.status_code == 200, response.text
    return float(response.json()["durations"]["pause"])


# ------------------------------------------------------------------------------------------------------------------- load
def measure_load(server: InPlaceServer, swaps: int, answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Swap while users send all prompts in turn. `answers`: those of a fresh engine, by kind of prompts."""
    pauses, began = [], time.monotonic()
    expected = list(itertools.chain(*answers.values()))
    with users_of(server, list(itertools.chain(*prompts_by_kind().values())), USERS, MAX_TOKENS) as users:
        for number, drafter in zip(range(swaps), itertools.cycle(CYCLE), strict=False):
            _wait_for_requests(users, REQUESTS_PER_SWAP * number + REQUESTS_PER_SWAP // 2)
            pauses.append(1000 * change_drafter(server, drafter))
        _wait_for_requests(users, REQUESTS_PER_SWAP * swaps)
    seconds = time.monotonic() - began
    print(f"load: {users.completed / seconds:.1f} requests/s for {seconds:.0f} s")
    print(f"pauses of {swaps} swaps in ms, sorted: {' '.join(f'{pause:.0f}' for pause in sorted(pauses))}", flush=True)
    median, p99 = np.quantile(pauses, (0.5, 0.99))
    # The users compare the later answers to a prompt with its first.
    first_different = sum(expected[number] != text for number, text in users.answers.items())
    return {
        "pause_ms_median": round(float(median), 1),
        "pause_ms_p99": round(float(p99), 1),
        "requests": users.completed + len(users.failures),
        "failed": len(users.failures),
        "different_answers": first_different + len(users.different),
    }


def _wait_for_requests(users: Users, count: int) -> None:
    while users.completed + len(users.failures) < count:
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------- acceptance
def serve_prompts(server: InPlaceServer, kind: str) -> Served:
    """Send all prompts of a kind, and return what the engine counted for them."""
    began, before = time.monotonic(), _read_counts(server)
    answers = _answer(server, prompts_by_kind()[kind], MAX_TOKENS)
    seconds = time.monotonic() - began
    counts = subtract(_read_counts(server), before)
    return Served(1 + counts[ACCEPTED_TOKENS][""] / counts[DRAFTS][""], answers, seconds)


def evict_prefix(server: InPlaceServer) -> None:
    """Fill the cache with blocks that no other prompt uses."""
    _answer(server, evicting_prompts(), max_tokens=1)


def _answer(server: InPlaceServer, prompts: Sequence[Sequence[Message]], max_tokens: int) -> list[str]:
    """Return the greedy answers. Raises httpx.HTTPStatusError."""

    def send(messages: Sequence[Message]) -> str:
        body = {"model": "target", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        response = server.client.post("/v1/chat/completions", json=body).raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(send, prompts))


def _read_counts(server: InPlaceServer) -> Counts:
    """Return the counts of the current window once they no longer change."""
    before: Counts | None = None
    counts: Counts = server.state()["windows"][-1]["counts"]
    while counts != before:
        time.sleep(COUNTING_SECONDS)
        before, counts = counts, server.state()["windows"][-1]["counts"]
    return counts


class Changes:
    """Changes of the drafter in an engine without requests in progress."""

    def __init__(
        self, server: InPlaceServer, lengths: Mapping[tuple[str, str], float], answers: Mapping[str, Sequence[str]]
    ) -> None:
        """Take the acceptance lengths of fresh engines, by drafter and kind of prompts, and their answers."""
        self._server, self._lengths, self._answers = server, lengths, answers
        self.different_answers = 0

    def measure(self) -> list[Change]:
        """Return each change from one drafter to another, and print them as a table."""
        print("| change | short | prefix, old blocks | prefix, recomputed |\n|---|---|---|---|")
        changes, previous = [], OWN
        self._fill_cache(OWN)
        for drafter in CYCLE:
            change_drafter(self._server, drafter)
            short, prefix = self._serve(drafter, "short"), self._serve(drafter, "prefix")
            evict_prefix(self._server)
            changes.append(change := Change(previous, drafter, short, prefix, self._serve(drafter, "prefix")))
            print(f"| {previous} to {drafter} | {short:.4f} | {prefix:.4f} | {change.recomputed_prefix:.4f} |", flush=True)
            previous = drafter
        return changes

    def follow(self, change: Change) -> None:
        """Print the acceptance with the prefix after a change, until a trial at this rate assumes no carry-over."""
        self._fill_cache(change.previous)
        change_drafter(self._server, change.drafter)
        swapped = time.monotonic()
        seconds = 0.0
        while seconds < MIN_CARRYOVER_SECONDS:
            ratio = self._serve(change.drafter, "prefix")
            seconds = time.monotonic() - swapped
            print(f"{change.previous} to {change.drafter}, prefix: {ratio:.4f} until {seconds:.0f} s after the swap", flush=True)

    def _fill_cache(self, drafter: str) -> None:
        """Let a drafter compute the blocks of the prefix."""
        change_drafter(self._server, drafter)
        evict_prefix(self._server)
        self._serve(drafter, "prefix")

    def _serve(self, drafter: str, kind: str) -> float:
        """Send all prompts of a kind, and return the acceptance length over that of a fresh engine."""
        served = serve_prompts(self._server, kind)
        self.different_answers += sum(map(operator.ne, served.answers, self._answers[kind]))
        return served.acceptance_length / self._lengths[drafter, kind]
