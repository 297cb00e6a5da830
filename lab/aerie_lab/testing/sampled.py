"""Sampled answers of real engines, and whether two engines draw them from the same distribution.

Lossless speculation changes how many tokens a step brings, never what is drawn. So an engine with a drafter is compared with the
same target without one: the same prompts and settings, hundreds of short answers each.

    samples of two engines ─► chi-square of tokens by position and of neighbours ─► p-value by permutation

Guarantees: the p-value is exact whatever the counts, because answers change sides by chance instead of a table being looked up;
it is at least 1 / (PERMUTATIONS + 1). Each request has a seed of its own, derived from its identity: with one seed for all, model
runner V1 gives every request the same stream of random numbers, and answers are not independent. Not guaranteed: that a
difference is seen that neither tokens by position nor pairs of neighbours show.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from aerie_lab.testing.agreement import START_TIMEOUT_SECONDS, RunningEngine

NUM_PERMUTATIONS = 9999
MAX_FREQUENT_CELLS = 24
"""The most frequent values of a feature have a cell of their own; the others share the last."""
MAX_CONCURRENT_REQUESTS = 12
"""Requests under way at a time: fewer than `agreement.command` lets into one batch."""
UNPATCHED_ENVIRONMENT = {"VLLM_PLUGINS": ""}
"""The environment of an engine as it was released, without the lab's mend of its sampling (aerie_lab.binaries.addons)."""

Message = Mapping[str, str]


def derive_seed(*identity: object) -> int:
    """A request's seed, from what tells it from all others: 31 bits of SHA-256.

    >>> seed("off", 1) == seed("off", 1), seed("off", 1) == seed("off", 2)
    (True, False)
    """
    digest = hashlib.sha256("/".join(map(str, identity)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class ChatRequest:
    """A request of a chat."""

    messages: Sequence[Message]
    max_tokens: int
    sampling_settings: Mapping[str, float]
    """temperature, top_p, top_k and so on, as in the request's body."""
    seed: int


@dataclass(frozen=True)
class ChatAnswer:
    """What came back."""

    token_ids: tuple[int, ...]
    """Ids; the token that ended the answer is among them."""
    verification_steps: int
    """Verification steps, as the answer itself reports them (--per-request-spec-decode-metrics); 0 without."""


def send_requests(engine: RunningEngine, requests: Sequence[ChatRequest]) -> list[ChatAnswer]:
    """All answers, in the order of the requests."""
    return asyncio.run(_send_all(engine.url, requests))


async def _send_all(url: str, requests: Sequence[ChatRequest]) -> list[ChatAnswer]:
    limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=START_TIMEOUT_SECONDS) as client:

        async def one(request: ChatRequest) -> ChatAnswer:
            async with limit:
                return _parse_answer(await client.post("/v1/chat/completions", json=_build_body(request)))

        async with asyncio.TaskGroup() as group:  # one that fails ends the others, before the client is closed
            answers = [group.create_task(one(request)) for request in requests]
        return [answer.result() for answer in answers]


def _build_body(request: ChatRequest) -> dict[str, Any]:
    return {
        "model": "agreement",
        "messages": list(request.messages),
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "return_token_ids": True,
        **request.sampling_settings,
    }


def _parse_answer(response: httpx.Response) -> ChatAnswer:
    assert response.status_code == 200, response.text
    body = response.json()
    (choice,) = body["choices"]
    tokens = tuple(choice["token_ids"])
    assert len(tokens) == body["usage"]["completion_tokens"], body
    told = (body.get("metrics") or {}).get("speculative_decoding") or {}
    return ChatAnswer(tokens, int(told.get("num_spec_steps", 0)))


# --------------------------------------------------------------------------------------------------------- the distribution
SAMPLING_SETTINGS: tuple[Mapping[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
)
"""Kinds of requests, all in one batch: each setting is spread over the request's own draft tokens, and no other's."""
UNFILTERED_SAMPLING_SETTINGS = SAMPLING_SETTINGS[:2]
"""Those that the engine survives as it was released: with top_k or top_p it may end, reading beyond the vocabulary."""
SHORT_ANSWER_TOKENS = 6
"""Tokens of an answer: the first comes without a draft."""


def build_mixed_requests(
    engine_name: str,
    prompts: Sequence[Sequence[Message]],
    requests_per_kind: int,
    sampling_settings: Sequence[Mapping[str, float]],
) -> list[ChatRequest]:
    """`each` requests of every kind, with a prompt for each kind, and a greedy one of another prompt after every sixth.

    `name`: of the engine; two engines share no seed.
    """
    found: list[ChatRequest] = []
    for index in range(requests_per_kind):
        for kind, sampling in enumerate(sampling_settings):
            found.append(ChatRequest(prompts[kind], SHORT_ANSWER_TOKENS, sampling, derive_seed(engine_name, kind, index)))
            if len(found) % 7 == 6:
                prompt = prompts[len(found) // 7 % len(prompts)]
                found.append(
                    ChatRequest(prompt, 4 * SHORT_ANSWER_TOKENS, {"temperature": 0.0}, derive_seed(engine_name, "greedy", index))
                )
    return found


@dataclass(frozen=True)
class EngineSamples:
    """The answers of one engine to `mixed`."""

    sampled_tokens: tuple[NDArray[np.int64], ...]
    """By kind, in the order of SAMPLINGS, token ids [answers, SHORT]; -1 past an answer's end."""
    greedy_answers: tuple[tuple[int, ...], ...]


def sample_engine(
    engine: RunningEngine,
    engine_name: str,
    prompts: Sequence[Sequence[Message]],
    requests_per_kind: int,
    sampling_settings: Sequence[Mapping[str, float]] = SAMPLING_SETTINGS,
) -> EngineSamples:
    """Ask `mixed`, and sort the answers. `kinds`: all or the first ones."""
    requests = build_mixed_requests(engine_name, prompts, requests_per_kind, sampling_settings)
    answers = send_requests(engine, requests)
    drawn = []
    for sampling in sampling_settings:
        some = [
            answer.token_ids for request, answer in zip(requests, answers, strict=True) if request.sampling_settings == sampling
        ]
        drawn.append(np.array([[*tokens, *[-1] * (SHORT_ANSWER_TOKENS - len(tokens))] for tokens in some], dtype=np.int64))
    greedy = [a.token_ids for request, a in zip(requests, answers, strict=True) if request.sampling_settings["temperature"] == 0]
    return EngineSamples(tuple(drawn), tuple(greedy))


def permutation_p_value(first: EngineSamples, second: EngineSamples) -> float:
    """Probability of a difference at least as large between two engines that draw alike, over the kinds that both were asked."""
    generator = np.random.default_rng(derive_seed("permutations"))
    observed, drawn = 0.0, np.zeros(NUM_PERMUTATIONS)
    for mine, theirs in zip(first.sampled_tokens, second.sampled_tokens, strict=False):
        seen, chance = chi_square(mine, theirs, generator)
        observed, drawn = observed + seen, drawn + chance
    return float((1 + np.count_nonzero(drawn >= observed * (1 - 1e-9))) / (NUM_PERMUTATIONS + 1))


def chi_square(
    first: NDArray[np.int64], second: NDArray[np.int64], generator: np.random.Generator
) -> tuple[float, NDArray[np.float64]]:
    """The statistic, summed over features, and as it is where answers change sides by chance, [PERMUTATIONS].

    `one`, `other`: token ids [answers, positions]. A feature is a position from the second on, or two neighbours.
    """
    together = np.concatenate([first, second])
    cells = np.concatenate([_one_hot_cells(values) for values in _iterate_features(together)], axis=1)
    total = cells.sum(axis=0)
    share = len(first) / len(together)

    def statistic(mine: NDArray[np.float64]) -> NDArray[np.float64]:
        # The other side's difference is the same with the other sign: both terms of a 2 x cells table in one.
        found: NDArray[np.float64] = ((mine - share * total) ** 2 / (share * (1 - share) * total)).sum(axis=1)
        return found

    observed = float(statistic(cells[: len(first)].sum(axis=0, keepdims=True))[0])
    return observed, np.concatenate([statistic(sides @ cells) for sides in _permute_sides(len(first), len(together), generator)])


def _permute_sides(one: int, together: int, generator: np.random.Generator, block: int = 101) -> Iterator[NDArray[np.float64]]:
    """Blocks of permutations, [block, answers]: 1 where an answer falls on the first side."""
    sides = np.zeros((block, together))
    sides[:, :one] = 1
    for _ in range(NUM_PERMUTATIONS // block):
        yield generator.permuted(sides, axis=1)


def _iterate_features(tokens: NDArray[np.int64]) -> Iterator[list[tuple[int, ...]]]:
    for position in range(1, tokens.shape[1]):
        yield [(int(token),) for token in tokens[:, position]]
        yield [(int(a), int(b)) for a, b in tokens[:, position - 1 : position + 1]]


def _one_hot_cells(values: list[tuple[int, ...]]) -> NDArray[np.float64]:
    """One cell of each row is 1, [answers, cells]: that of its value, or of all rare values. Cells that none has are left out."""
    often = {value: place for place, (value, _) in enumerate(Counter(values).most_common(MAX_FREQUENT_CELLS))}
    made = np.zeros((len(values), MAX_FREQUENT_CELLS + 1))
    made[np.arange(len(values)), [often.get(value, MAX_FREQUENT_CELLS) for value in values]] = 1
    return made[:, made.any(axis=0)]


def greedy_agreement(first: EngineSamples, second: EngineSamples) -> float:
    """Share of the greedy answers, among sampled ones in their batch, that are equal token for token."""
    pairs = list(zip(first.greedy_answers, second.greedy_answers, strict=True))
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)
