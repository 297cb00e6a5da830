"""An engine without requests: its counters grow with time as under a constant load, so that one process has hundreds of them.

Requests come at random and draw their accepted tokens from the acceptance of the loaded drafter. A better drafter so needs fewer
steps for the same tokens, and less time per token.

Guarantees: nothing grows while the engine is paused. The counters of the drafts, tokens, steps and times agree with each other,
and with vLLM's families. Not guaranteed: a carry-over; the first step after a change already has the new drafter's acceptance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.registry import RestrictedRegistry

from aerie_lab.engine.metrics.counters import Counters
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE
from aerie_lab.engine.serving.drafter import DrafterProfile

MAX_MODEL_LEN, DRAFT_TOKENS = 8192, 3
REQUESTS_PER_SECOND = 1.0
PROMPT_TOKENS, ANSWER_TOKENS = 500, 100
STEP_SECONDS, FIRST_TOKEN_SECONDS = 0.01, 0.2
RUNNING_REQUESTS = 3
NOISE = 0.02
"""Standard deviation of the logarithm of times between two readings."""


class SteadyEngine:
    """One engine under a constant load."""

    def __init__(self, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counters(MAX_MODEL_LEN, DRAFT_TOKENS)
        self.counters.num_requests_running = RUNNING_REQUESTS
        self._random, self._clock = np.random.default_rng(seed), clock
        self._advanced_to = clock()
        self._pause_time = math.inf
        self.load(DrafterProfile("eagle3", "eagle3"))

    def load(self, drafter: DrafterProfile) -> None:
        """Draft with another drafter from now on."""
        self.advance()
        survival = CLASS_ACCEPTANCE["chat"].shift_logits(*drafter.logit_shifts).survival(DRAFT_TOKENS)
        at_least = np.array([1.0, *survival, 0.0])
        self._emitted_shares = at_least[:-1] - at_least[1:]
        """Shares of the steps that emit 1, 2, ... tokens."""

    @property
    def is_paused(self) -> bool:
        return self._pause_time < math.inf

    @property
    def unfinished_count(self) -> int:
        return 0

    async def pause(self) -> None:
        """Pause the engine."""
        self._pause_time = min(self._pause_time, self._clock())

    def resume(self) -> None:
        """End a pause."""
        self.advance()
        self._pause_time, self._advanced_to = math.inf, self._clock()

    def advance(self) -> None:
        """Count what has happened since the last call."""
        now = min(self._clock(), self._pause_time)
        seconds, self._advanced_to = max(0.0, now - self._advanced_to), max(now, self._advanced_to)
        requests = int(self._random.poisson(REQUESTS_PER_SECOND * seconds))
        if requests > 0:
            self._count(requests)

    def _count(self, requests: int) -> None:
        emitted = np.arange(1, DRAFT_TOKENS + 2)
        steps = round(requests * (ANSWER_TOKENS - 1) / float(self._emitted_shares @ emitted))
        steps_by_emitted = self._random.multinomial(steps, self._emitted_shares)
        tokens = int(steps_by_emitted @ emitted)
        step_seconds, first_token_seconds = np.exp(self._random.normal(0, NOISE, 2)) * (STEP_SECONDS, FIRST_TOKEN_SECONDS)
        decode_seconds = step_seconds * steps / requests
        counters = self.counters
        for count, times in zip(emitted.tolist(), steps_by_emitted.tolist(), strict=True):
            counters.tokens_per_draft.observe(count, times)
        counters.spec_decode_num_draft_tokens += DRAFT_TOKENS * steps
        counters.generation_tokens += tokens + requests
        counters.prompt_tokens += PROMPT_TOKENS * requests
        counters.request_success["stop"] += requests
        iterations = max(1, steps // RUNNING_REQUESTS)
        for histogram, value, times in (
            (counters.iteration_tokens, tokens / iterations, iterations),
            (counters.inter_token_latency, step_seconds, steps),
            (counters.time_to_first_token, first_token_seconds, requests),
            (counters.request_time_per_output_token, step_seconds * steps / tokens, requests),
            (counters.request_decode_time, decode_seconds, requests),
            (counters.e2e_request_latency, first_token_seconds + decode_seconds, requests),
            (counters.request_prompt_tokens, PROMPT_TOKENS, requests),
            (counters.request_generation_tokens, ANSWER_TOKENS, requests),
        ):
            histogram.observe(float(value), times)


class SteadyRegistry(CollectorRegistry):
    """A registry that lets an engine advance before the plugin reads its counters."""

    def __init__(self, engine: SteadyEngine) -> None:
        super().__init__()
        self._engine = engine

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Return the registry of some families, as of now."""
        self._engine.advance()
        return super().restricted_registry(names)
