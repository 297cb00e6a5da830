"""Sampled answers of real engines, and whether two engines draw them from the same distribution.

Lossless speculation changes how many tokens a step brings, never what is drawn. So an engine with a drafter is compared with the
same target without one: the same prompts and settings, hundreds of short answers each.

    samples of two engines ─► chi-square of tokens by position and of neighbours ─► p-value by permutation

Guarantees: the p-value is exact whatever the counts, because answers are permuted between the engines instead of using a table;
it is at least 1 / (NUM_PERMUTATIONS + 1). Each request has its own seed, derived from its identity: with one seed for all, model
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
"""The most frequent values of a feature have their own cell; the others share the last."""
MAX_CONCURRENT_REQUESTS = 12
"""Fewer than `agreement.build_command` allows in one batch."""
UNPATCHED_ENVIRONMENT = {"VLLM_PLUGINS": ""}
"""The environment of an engine as it was released, without the lab's fix of its sampling (aerie_lab.binaries.addons)."""

Message = Mapping[str, str]


def derive_seed(*identity: object) -> int:
    """Return a request's seed from its identity: 31 bits of SHA-256.

    >>> derive_seed("off", 1) == derive_seed("off", 1), derive_seed("off", 1) == derive_seed("off", 2)
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
    """The answer to a ChatRequest."""

    token_ids: tuple[int, ...]
    """Ids; the token that ended the answer is among them."""
    verification_steps: int
    """Verification steps, as the answer itself reports them (--per-request-spec-decode-metrics); 0 without."""


def send_requests(engine: RunningEngine, requests: Sequence[ChatRequest]) -> list[ChatAnswer]:
    """Send all requests, and return their answers in the same order."""
    return asyncio.run(_send_all(engine.url, requests))


async def _send_all(url: str, requests: Sequence[ChatRequest]) -> list[ChatAnswer]:
    limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=START_TIMEOUT_SECONDS) as client:

        async def send_one(request: ChatRequest) -> ChatAnswer:
            async with limit:
                return _parse_answer(await client.post("/v1/chat/completions", json=_build_body(request)))

        async with asyncio.TaskGroup() as group:  # one that fails ends the others, before the client is closed
            answers = [group.create_task(send_one(request)) for request in requests]
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
    metrics = (body.get("metrics") or {}).get("speculative_decoding") or {}
    return ChatAnswer(tokens, int(metrics.get("num_spec_steps", 0)))


# --------------------------------------------------------------------------------------------------------- the distribution
SAMPLING_SETTINGS: tuple[Mapping[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
)
"""Kinds of requests, all in one batch: each setting is spread over the request's own draft tokens, and no other's."""
UNFILTERED_SAMPLING_SETTINGS = SAMPLING_SETTINGS[:2]
"""Settings that do not crash the engine as it was released: with top_k or top_p it may read beyond the vocabulary and end."""
SHORT_ANSWER_TOKENS = 6
"""Tokens of an answer: the first comes without a draft."""


def build_mixed_requests(
    engine_name: str,
    prompts: Sequence[Sequence[Message]],
    requests_per_kind: int,
    sampling_settings: Sequence[Mapping[str, float]],
) -> list[ChatRequest]:
    """Build `requests_per_kind` requests of every kind, each kind with one prompt, and a greedy one of another prompt after every
    sixth.

    Two engines, by their `engine_name`, share no seed.
    """
    requests: list[ChatRequest] = []
    for index in range(requests_per_kind):
        for kind, sampling in enumerate(sampling_settings):
            requests.append(ChatRequest(prompts[kind], SHORT_ANSWER_TOKENS, sampling, derive_seed(engine_name, kind, index)))
            if len(requests) % 7 == 6:
                prompt = prompts[len(requests) // 7 % len(prompts)]
                requests.append(
                    ChatRequest(prompt, 4 * SHORT_ANSWER_TOKENS, {"temperature": 0.0}, derive_seed(engine_name, "greedy", index))
                )
    return requests


@dataclass(frozen=True)
class EngineSamples:
    """The answers of one engine to `build_mixed_requests`."""

    sampled_tokens: tuple[NDArray[np.int64], ...]
    """Tokens by kind, in the order of SAMPLING_SETTINGS, token ids [answers, SHORT_ANSWER_TOKENS]; -1 past an answer's end."""
    greedy_answers: tuple[tuple[int, ...], ...]


def sample_engine(
    engine: RunningEngine,
    engine_name: str,
    prompts: Sequence[Sequence[Message]],
    requests_per_kind: int,
    sampling_settings: Sequence[Mapping[str, float]] = SAMPLING_SETTINGS,
) -> EngineSamples:
    """Send `build_mixed_requests`, and group the answers. `sampling_settings`: all or the first ones."""
    requests = build_mixed_requests(engine_name, prompts, requests_per_kind, sampling_settings)
    answers = send_requests(engine, requests)
    drawn = []
    for sampling in sampling_settings:
        token_ids = [
            answer.token_ids for request, answer in zip(requests, answers, strict=True) if request.sampling_settings == sampling
        ]
        drawn.append(np.array([[*tokens, *[-1] * (SHORT_ANSWER_TOKENS - len(tokens))] for tokens in token_ids], dtype=np.int64))
    greedy = [a.token_ids for request, a in zip(requests, answers, strict=True) if request.sampling_settings["temperature"] == 0]
    return EngineSamples(tuple(drawn), tuple(greedy))


def permutation_p_value(first: EngineSamples, second: EngineSamples) -> float:
    """Return the probability of a difference at least as large between equal engines, over the kinds that both have."""
    generator = np.random.default_rng(derive_seed("permutations"))
    observed, drawn = 0.0, np.zeros(NUM_PERMUTATIONS)
    for first_tokens, second_tokens in zip(first.sampled_tokens, second.sampled_tokens, strict=False):
        statistic, permuted = chi_square(first_tokens, second_tokens, generator)
        observed, drawn = observed + statistic, drawn + permuted
    return float((1 + np.count_nonzero(drawn >= observed * (1 - 1e-9))) / (NUM_PERMUTATIONS + 1))


def chi_square(
    first: NDArray[np.int64], second: NDArray[np.int64], generator: np.random.Generator
) -> tuple[float, NDArray[np.float64]]:
    """Return the statistic, summed over features, and its values under permutation, [NUM_PERMUTATIONS].

    `first`, `second`: token ids [answers, positions]. A feature is a position from the second on, or two neighbours.
    """
    together = np.concatenate([first, second])
    cells = np.concatenate([_one_hot_cells(values) for values in _iterate_features(together)], axis=1)
    total = cells.sum(axis=0)
    share = len(first) / len(together)

    def statistic(side: NDArray[np.float64]) -> NDArray[np.float64]:
        # The other side's difference is the same with the other sign: both terms of a 2 x cells table in one.
        result: NDArray[np.float64] = ((side - share * total) ** 2 / (share * (1 - share) * total)).sum(axis=1)
        return result

    observed = float(statistic(cells[: len(first)].sum(axis=0, keepdims=True))[0])
    return observed, np.concatenate([statistic(sides @ cells) for sides in _permute_sides(len(first), len(together), generator)])


def _permute_sides(
    first_count: int, together: int, generator: np.random.Generator, block: int = 101
) -> Iterator[NDArray[np.float64]]:
    """Yield blocks of permutations, [block, answers]: 1 where an answer is on the first side."""
    sides = np.zeros((block, together))
    sides[:, :first_count] = 1
    for _ in range(NUM_PERMUTATIONS // block):
        yield generator.permuted(sides, axis=1)


def _iterate_features(tokens: NDArray[np.int64]) -> Iterator[list[tuple[int, ...]]]:
    for position in range(1, tokens.shape[1]):
        yield [(int(token),) for token in tokens[:, position]]
        yield [(int(a), int(b)) for a, b in tokens[:, position - 1 : position + 1]]


def _one_hot_cells(values: list[tuple[int, ...]]) -> NDArray[np.float64]:
    """Return one-hot rows, [answers, cells]: a cell per frequent value, one for all rare values, no empty cells."""
    frequent = {value: place for place, (value, _) in enumerate(Counter(values).most_common(MAX_FREQUENT_CELLS))}
    cells = np.zeros((len(values), MAX_FREQUENT_CELLS + 1))
    cells[np.arange(len(values)), [frequent.get(value, MAX_FREQUENT_CELLS) for value in values]] = 1
    return cells[:, cells.any(axis=0)]


def greedy_agreement(first: EngineSamples, second: EngineSamples) -> float:
    """Return the share of greedy answers, sent in batches with sampled ones, that are equal token for token."""
    pairs = list(zip(first.greedy_answers, second.greedy_answers, strict=True))
    return sum(first_answer == second_answer for first_answer, second_answer in pairs) / len(pairs)
