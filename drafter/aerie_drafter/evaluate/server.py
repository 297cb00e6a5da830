"""Acceptance by category as a running vLLM counts it: its /metrics before and after each category's prompts.

Guarantee: the counters' differences, of all engines behind the address together. Not guaranteed: that only our prompts made
them; the counters know no request. Finished requests that are not ours are told in the result, and then it says little.
Counters: vLLM, v1/spec_decode/metrics.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from aerie_drafter.errors import DataError
from aerie_drafter.evaluate.acceptance import AcceptanceCounts
from aerie_drafter.evaluate.prompts import Prompt

DRAFTS_METRIC = "vllm:spec_decode_num_drafts_total"
ACCEPTED_PER_POSITION_METRIC = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FINISHED_REQUESTS_METRIC = "vllm:request_success_total"


@dataclass(frozen=True)
class AcceptanceCounters:
    """The counters of one reading."""

    drafts: int
    accepted_per_position: tuple[int, ...]
    """By position."""
    finished_requests: int
    """Requests."""

    @classmethod
    def parse(cls, exposition: str) -> AcceptanceCounters:
        """From a metrics page. Raises DataError where the server does not speculate."""
        sums: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                if sample.name in (DRAFTS_METRIC, ACCEPTED_PER_POSITION_METRIC, FINISHED_REQUESTS_METRIC):
                    key = (sample.name, sample.labels.get("position", ""))
                    sums[key] = sums.get(key, 0.0) + sample.value
        places = sorted(int(position) for name, position in sums if name == ACCEPTED_PER_POSITION_METRIC)
        if (DRAFTS_METRIC, "") not in sums or not places:
            raise DataError(
                f"the metrics page has no {DRAFTS_METRIC}: the server runs without --speculative-config, or is no vLLM."
            )
        accepted = tuple(int(sums[ACCEPTED_PER_POSITION_METRIC, str(place)]) for place in places)
        return cls(int(sums[DRAFTS_METRIC, ""]), accepted, int(sums.get((FINISHED_REQUESTS_METRIC, ""), 0)))

    def acceptance_since(self, before: AcceptanceCounters) -> AcceptanceCounts:
        """What was counted in between. Raises DataError where the server was started anew."""
        if self.drafts < before.drafts or len(self.accepted_per_position) != len(before.accepted_per_position):
            raise DataError("the counters went back while we measured: the server was started anew; measure again.")
        return AcceptanceCounts(
            self.drafts - before.drafts,
            tuple(b - a for a, b in zip(before.accepted_per_position, self.accepted_per_position, strict=True)),
        )


@dataclass(frozen=True)
class ServerEvaluation:
    """What was measured: acceptance by category, and how many finished requests were not ours."""

    acceptance_by_category: dict[str, AcceptanceCounts]
    foreign_requests: int


class VllmServer:
    """A vLLM behind an address."""

    def __init__(self, client: httpx.AsyncClient, model: str, *, poll_interval_seconds: float = 0.5) -> None:
        """`client` has the base address; `pause`: seconds between readings until the counters stand still."""
        self.client, self.model, self.poll_interval_seconds = client, model, poll_interval_seconds

    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        concurrency: int = 8,
        log_progress: Callable[[str], None] | None = None,
    ) -> ServerEvaluation:
        """Send the prompts, one category after another. Raises DataError."""
        found: dict[str, AcceptanceCounts] = {}
        others = 0
        limit = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> None:
            async with limit:
                await self._complete(prompt, max_tokens, temperature)

        for category in dict.fromkeys(prompt.category for prompt in prompts):
            some = [prompt for prompt in prompts if prompt.category == category]
            before = await self._read_settled_counters()
            await asyncio.gather(*(one(prompt) for prompt in some))
            after = await self._read_settled_counters()
            found[category] = after.acceptance_since(before)
            others += max(0, after.finished_requests - before.finished_requests - len(some))
            if log_progress is not None:
                log_progress(f"{category}: {len(some)} prompts, AL {found[category].acceptance_length:.3f}")
        return ServerEvaluation(found, others)

    async def count_tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt, as the server sees it (its route /tokenize). Raises DataError."""
        given: dict[str, Any] = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}
        answer = await self._request("POST", "/tokenize", {"model": self.model, **given})
        return int(answer.json()["count"])

    async def _complete(self, prompt: Prompt, max_tokens: int, temperature: float) -> None:
        given: dict[str, Any] = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}
        route = "/v1/chat/completions" if prompt.messages else "/v1/completions"
        await self._request("POST", route, {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **given})

    async def _read_settled_counters(self) -> AcceptanceCounters:
        """The counters, once two readings in a row are equal: an engine counts a little after it answers."""
        last = None
        for _ in range(20):
            now = AcceptanceCounters.parse((await self._request("GET", "/metrics")).text)
            if now == last:
                return now
            last = now
            await asyncio.sleep(self.poll_interval_seconds)
        raise DataError("the counters do not stand still: others use this server; measure on one that nobody else uses.")

    async def _request(self, method: str, route: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = await self.client.request(method, route, json=body)
        except httpx.HTTPError as error:
            raise DataError(f"{self.client.base_url}{route}: no answer ({type(error).__name__}: {error}).") from error
        if answer.is_error:
            raise DataError(f"{self.client.base_url}{route}: status {answer.status_code}: {answer.text[:300]}")
        return answer


async def evaluate_server(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    *,
    length_category: Callable[[int], str] | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    concurrency: int = 8,
    log_progress: Callable[[str], None] | None = None,
) -> ServerEvaluation:
    """`Server.evaluate` at an address; with `by_length` the categories are those of the prompts' lengths. Raises DataError."""
    async with httpx.AsyncClient(base_url=url.rstrip("/"), timeout=httpx.Timeout(600, connect=10)) as client:
        server = VllmServer(client, model)
        if length_category is not None:
            lengths = [await server.count_tokens(prompt) for prompt in prompts]
            ordered = sorted(zip(lengths, prompts, strict=True), key=lambda pair: pair[0])
            prompts = [Prompt(length_category(length), prompt.messages, prompt.text) for length, prompt in ordered]
        return await server.evaluate(
            prompts, max_tokens=max_tokens, temperature=temperature, concurrency=concurrency, log_progress=log_progress
        )
