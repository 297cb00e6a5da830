"""Who is in an engine's next step: running requests first, then waiting ones while tokens, sequences and KV blocks last.

It follows vLLM 0.32.0's Scheduler.schedule (vllm/v1/core/sched/scheduler.py) without async scheduling: the last to come is
preempted first, and the number of draft tokens is the one that the previous step requested. It reads no clock and draws nothing.

Guaranteed: a step has no more tokens and requests than the settings allow. Not guaranteed: that the step is as long as vLLM's;
`aerie_lab.engine.performance_model.step` has its duration.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from aerie_lab.engine.core.kv_cache import KvCache
from aerie_lab.engine.metrics.counters import Counters
from aerie_lab.engine.performance_model.request import EngineSettings, Request


@dataclass(slots=True)
class ScheduledStep:
    """A step: who is in it, with how many tokens."""

    end: float = math.nan
    """Time at which it ends, once it is in flight."""
    draft_tokens: int | None = None
    """Drafted tokens of each request when all running requests decode with equal drafts; `work` is then left out."""
    work: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, its tokens in the step, drafted tokens among them)."""
    padded_requests: set[Request] = field(default_factory=set)
    """Requests whose drafts are padding: never accepted, yet counted (Scheduler.schedule, pad_spec_decode)."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    # what its duration depends on
    decode_batch: int = 0
    """Requests that decode."""
    decode_draft_tokens: int = 0
    cached_tokens: int = 0
    """Tokens in the KV cache that the step reads."""
    prompt_tokens: int = 0


class Scheduler:
    """The requests that an engine has admitted, and those that wait."""

    def __init__(self, settings: EngineSettings, counters: Counters) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.kv_cache = KvCache(settings)
        self.requested_drafts = 0
        """Draft tokens of each request that the last scheduled step requested, for the next one."""
        self.has_skipped_requests = False
        """True if a running request had no token in the last step, or was preempted since."""
        self._settings = settings
        self._counters = counters
        self._k_by_batch = settings.build_k_table()
        self._max_k = settings.num_speculative_tokens or 0

    def schedule_step(self, now: float) -> ScheduledStep:
        """Return the next step, which begins now."""
        if self._is_pure_decode():
            before, self.requested_drafts = self.requested_drafts, self.k_for_batch(len(self.running))
            return ScheduledStep(
                draft_tokens=before,
                decode_batch=len(self.running),
                decode_draft_tokens=before,
                cached_tokens=self.cached_tokens(),
            )
        step = ScheduledStep()
        budget, prefills = self._schedule_running(step)
        if budget is not None:
            self._admit(step, now, budget, prefills)
        decodes = prompt = cached = 0
        for request, tokens, drafts in step.work:
            cached += request.computed_tokens
            if tokens == drafts + 1:
                decodes += 1
            else:
                prompt += tokens
        before, self.requested_drafts = self.requested_drafts, self.k_for_batch(len(step.work))
        step.decode_batch, step.decode_draft_tokens = decodes, before if decodes else self.requested_drafts
        step.cached_tokens, step.prompt_tokens = cached, prompt
        return step

    def remove_running(self, request: Request) -> None:
        """Remove a running request, and release its KV blocks."""
        self.running.remove(request)
        self.kv_cache.release(request)

    def k_for_batch(self, scheduled: int) -> int:
        """Return the draft tokens that a step with so many requests requests for the next one."""
        return self._max_k if self._k_by_batch is None else self._k_by_batch[scheduled]

    def cached_tokens(self) -> int:
        """Return the tokens of all running requests in the KV cache."""
        return sum([request.computed_tokens for request in self.running])

    def free_tokens(self, k: int) -> int:
        """Return the tokens by which the batch can safely grow before the KV cache may be full, after a step with `k` drafts."""
        return self.kv_cache.free_tokens(len(self.running), self.cached_tokens(), k)

    def _is_pure_decode(self) -> bool:
        """Return whether the step is plain decoding: no prefill, no admission, and no shortened draft."""
        running, settings = self.running, self._settings
        if not running or self.has_skipped_requests or (self.waiting and len(running) < settings.max_num_seqs):
            return False
        k = max(self.requested_drafts, self.k_for_batch(len(running)))
        if len(running) * (k + 1) > settings.max_num_batched_tokens or self.free_tokens(k) < 0:
            return False
        for request in running:
            if (
                request.draft_tokens != self.requested_drafts
                or request.computed_tokens + k + 2 >= settings.max_model_len
                or request.is_prefilling
            ):
                return False
        return True

    def _schedule_running(self, step: ScheduledStep) -> tuple[int | None, bool]:
        """Give tokens to running requests. The budget left, or None when someone was preempted; whether a prefill is on."""
        budget, prefills, preempted, index = self._settings.max_num_batched_tokens, False, False, 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            tokens = request.total_tokens + request.draft_tokens - request.computed_tokens
            tokens = min(tokens, budget, self._settings.max_model_len - request.computed_tokens - 1)
            if tokens <= 0:
                continue
            while not self.kv_cache.allocate(request, request.computed_tokens + tokens):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return None, prefills
            prefills |= request.is_prefilling
            drafts = max(tokens + request.computed_tokens - request.total_tokens, 0)
            step.work.append((request, tokens, drafts))
            budget -= tokens
        return (None if preempted else budget), prefills

    def _admit(self, step: ScheduledStep, now: float, budget: int, prefills: bool) -> None:
        """Move waiting requests to the batch while tokens, sequences and blocks last."""
        running_before = bool(step.work)
        while self.waiting and budget > 0 and len(self.running) < self._settings.max_num_seqs:
            request = self.waiting[0]
            cached = self.kv_cache.match_prefix(request)
            tokens, drafts = request.total_tokens - cached, 0
            if (
                tokens == 1
                and self._max_k
                and self._k_by_batch is None
                and not prefills
                and (running_before or cached)
                and cached + self._max_k + 2 <= self._settings.max_model_len
            ):
                if self._max_k + 1 > budget:
                    break
                tokens, drafts = self._max_k + 1, self._max_k
            tokens = min(tokens, budget)
            # A request is let in only if all of it fits, so that two half-way prefills cannot lock each other out.
            if not self.kv_cache.allocate(request, max(request.total_tokens, cached + tokens)):
                break
            self.waiting.popleft()
            self.running.append(request)
            if math.isnan(request.scheduled_time):
                request.scheduled_time = now
            if not request.preemptions:
                request.cached_tokens = cached
                step.prefix_cache_queries += request.prompt_tokens
                step.prefix_cache_hits += cached
            request.computed_tokens = cached
            if drafts:
                step.padded_requests.add(request)
            step.work.append((request, tokens, drafts))
            budget -= tokens

    def _preempt(self, request: Request) -> None:
        self.kv_cache.release(request)
        request.computed_tokens = request.draft_tokens = 0
        request.preemptions += 1
        self._counters.num_preemptions += 1
        self.waiting.appendleft(request)
        self.has_skipped_requests = True
