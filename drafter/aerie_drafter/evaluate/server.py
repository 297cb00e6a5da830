"""Acceptance by category of a running vLLM, from its /metrics before and after the prompts of each category.

Guarantee: the result is the difference of the counters, summed over the engines behind the address. Not guaranteed: that only
these prompts caused it, because the counters do not distinguish requests. The result contains the number of finished requests of
other clients; if there are many, the result is unreliable.
Counters: vLLM, v1/spec_decode/metrics.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """Counters of one scrape."""

    drafts: int
    accepted_per_position: tuple[int, ...]
    """Accepted tokens by position."""
    finished_requests: int
    """Number of finished requests."""

    @classmethod
    def parse(cls, exposition: str) -> AcceptanceCounters:
        """Parse /metrics. Raises DataError if the server does not use speculative decoding."""
        sums: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                if sample.name in (DRAFTS_METRIC, ACCEPTED_PER_POSITION_METRIC, FINISHED_REQUESTS_METRIC):
                    key = (sample.name, sample.labels.get("position", ""))
                    sums[key] = sums.get(key, 0.0) + sample.value
        positions = sorted(int(position) for name, position in sums if name == ACCEPTED_PER_POSITION_METRIC)
        if (DRAFTS_METRIC, "") not in sums or not positions:
            raise DataError(f"/metrics has no {DRAFTS_METRIC}: the server runs without --speculative-config, or is not vLLM.")
        accepted = tuple(int(sums[ACCEPTED_PER_POSITION_METRIC, str(position)]) for position in positions)
        return cls(int(sums[DRAFTS_METRIC, ""]), accepted, int(sums.get((FINISHED_REQUESTS_METRIC, ""), 0)))

    def acceptance_since(self, before: AcceptanceCounters) -> AcceptanceCounts:
        """Return the difference to an earlier scrape. Raises DataError if the server restarted."""
        if self.drafts < before.drafts or len(self.accepted_per_position) != len(before.accepted_per_position):
            raise DataError("the counters decreased during the measurement: the server restarted; measure again.")
        return AcceptanceCounts(
            self.drafts - before.drafts,
            tuple(b - a for a, b in zip(before.accepted_per_position, self.accepted_per_position, strict=True)),
        )


@dataclass(frozen=True)
class ServerEvaluation:
    """Acceptance by category, and the number of finished requests of other clients."""

    acceptance_by_category: dict[str, AcceptanceCounts]
    foreign_requests: int


class VllmServer:
    """Client of a running vLLM."""

    def __init__(self, client: httpx.AsyncClient, model: str, *, poll_interval_seconds: float = 0.5) -> None:
        """`client` has the base address. The counters are polled every `poll_interval_seconds` until they are stable."""
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
        acceptance: dict[str, AcceptanceCounts] = {}
        foreign_requests = 0
        semaphore = asyncio.Semaphore(concurrency)

        async def complete(prompt: Prompt) -> None:
            async with semaphore:
                await self._complete(prompt, max_tokens, temperature)

        for category in dict.fromkeys(prompt.category for prompt in prompts):
            category_prompts = [prompt for prompt in prompts if prompt.category == category]
            before = await self._read_settled_counters()
            await asyncio.gather(*(complete(prompt) for prompt in category_prompts))
            after = await self._read_settled_counters()
            acceptance[category] = after.acceptance_since(before)
            foreign_requests += max(0, after.finished_requests - before.finished_requests - len(category_prompts))
            if log_progress is not None:
                log_progress(f"{category}: {len(category_prompts)} prompts, AL {acceptance[category].acceptance_length:.3f}")
        return ServerEvaluation(acceptance, foreign_requests)

    async def count_tokens(self, prompt: Prompt) -> int:
        """Return the number of tokens of a prompt, by the server's /tokenize. Raises DataError."""
        body = _build_prompt_body(prompt)
        response = await self._request("POST", "/tokenize", {"model": self.model, **body})
        return int(response.json()["count"])

    async def _complete(self, prompt: Prompt, max_tokens: int, temperature: float) -> None:
        body = _build_prompt_body(prompt)
        route = "/v1/chat/completions" if prompt.messages else "/v1/completions"
        await self._request("POST", route, {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **body})

    async def _read_settled_counters(self) -> AcceptanceCounters:
        """Read the counters until two consecutive scrapes are equal, because an engine counts shortly after it answers."""
        last = None
        for _ in range(20):
            now = AcceptanceCounters.parse((await self._request("GET", "/metrics")).text)
            if now == last:
                return now
            last = now
            await asyncio.sleep(self.poll_interval_seconds)
        raise DataError("the counters keep changing: other clients use this server; measure on one without other traffic.")

    async def _request(self, method: str, route: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = await self.client.request(method, route, json=body)
        except httpx.HTTPError as error:
            raise DataError(f"{self.client.base_url}{route}: no response ({type(error).__name__}: {error}).") from error
        if answer.is_error:
            raise DataError(f"{self.client.base_url}{route}: status {answer.status_code}: {answer.text[:300]}")
        return answer


def _build_prompt_body(prompt: Prompt) -> dict[str, Any]:
    return {"messages": list(prompt.messages), **prompt.template.to_json()} if prompt.messages else {"prompt": prompt.text}


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
    """Measure a server by its address; `length_category` replaces the categories by prompt lengths. Raises DataError."""
    async with httpx.AsyncClient(base_url=url.rstrip("/"), timeout=httpx.Timeout(600, connect=10)) as client:
        server = VllmServer(client, model)
        if length_category is not None:
            lengths = [await server.count_tokens(prompt) for prompt in prompts]
            ordered = sorted(zip(lengths, prompts, strict=True), key=lambda pair: pair[0])
            prompts = [replace(prompt, category=length_category(length)) for length, prompt in ordered]
        return await server.evaluate(
            prompts, max_tokens=max_tokens, temperature=temperature, concurrency=concurrency, log_progress=log_progress
        )
