"""One engine as a state machine: requests wait, are prefilled in chunks, decode in a batch, and leave; time is an argument.

    submit(request, now) --> waiting --> running: prefill ... decode ... --> finished
                                ^            |
                                +-- preempt -+   when the KV cache is full

The scheduling is vLLM 0.32.0's (vllm/v1/core/sched/scheduler.py, Scheduler.schedule), without async scheduling: running requests
first, then waiting ones while tokens, sequences and KV blocks last; the last to come is preempted first. The number of
drafted tokens is the one that the step before asked for. `advance(until)` ends every step that ends by then. The same object
runs in virtual time (fleet) and, driven by the clock, behind HTTP (server).

Steps in which all running requests decode make up nearly all of a day, so they are computed many at a time; the tests hold
this against the same steps taken one by one.

Guaranteed: the identities of vLLM's counters, and the same seed with the same calls gives the same counts. Not modelled: LoRA,
structured output, parallel sampling, encoder inputs, KV connectors, several engine processes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, reduce

import numpy as np

from aerie_lab.engine.acceptance import NO_DRIFT, Drift, Floats
from aerie_lab.engine.counters import Counters, Ints
from aerie_lab.engine.prefix import PrefixCache
from aerie_lab.engine.request import EngineSettings, Request
from aerie_lab.engine.step import StepTime

_SPAN = 128  # decode steps computed at once; drift is held fixed for as long


@dataclass(slots=True)
class _Step:
    """A step in flight: who is in it, with how many tokens; `uniform` when all running requests decode with equal drafts."""

    end: float
    uniform: bool
    work: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, its tokens in the step, drafted tokens among them)."""
    dummies: set[Request] = field(default_factory=set)
    """Requests whose drafts are padding: never accepted, yet counted (Scheduler.schedule, pad_spec_decode)."""
    queries: int = 0
    hits: int = 0


class Replica:
    """One engine."""

    def __init__(
        self,
        settings: EngineSettings,
        step_time: StepTime,
        *,
        seed: int = 0,
        drift: Drift = NO_DRIFT,
        started: float = 0.0,
    ) -> None:
        self.settings = settings
        self.step_time = step_time
        self._fixed = cache(step_time.fixed)
        self.drift = drift
        self.started = started
        self._drifts = bool(drift)
        self.random = np.random.default_rng(seed)
        self.counters = Counters(settings.max_model_len, settings.num_speculative_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.clock = started
        """End of the last step."""
        usable = settings.num_blocks - 1  # vLLM keeps block 0 as a placeholder
        self.cache = PrefixCache(usable * settings.block_size, settings.block_size)
        self._usable_blocks = usable
        self._used_blocks = 0
        self._lookup = settings.lookup()
        self._k_max = settings.num_speculative_tokens or 0
        self._lookahead = self._k_max if settings.drops_last_block else 0
        self._drafted = 0
        self._step: _Step | None = None
        self._uneven = False
        self._stack: Floats | None = None

    # --- what goes in -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """A request arrives. It joins the next step, never the one in flight."""
        if request.prompt_tokens < 1 or request.prompt_tokens >= self.settings.max_model_len:
            raise ValueError(f"prompt of {request.prompt_tokens} tokens: give 1 to {self.settings.max_model_len - 1}.")
        request.arrival = now
        if request.acceptance.spread:
            request.effect = float(self.random.normal(0.0, request.acceptance.spread))
        request.limit = min(request.max_tokens, self.settings.max_model_len - request.prompt_tokens)
        if request.stop_after is not None:
            request.limit = min(request.limit, request.stop_after)
        self.waiting.append(request)
        if self._step is None:
            self.clock = max(self.clock, now)
            self._step = self._schedule(self.clock)

    def abort(self, request: Request) -> None:
        """The client has gone: no more steps for the request, and no count of it as finished."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
            if self._step is not None:
                self._step.work = [work for work in self._step.work if work[0] is not request]
        elif request in self.waiting:
            self.waiting.remove(request)
        self._tell_gauges()

    @property
    def next_end(self) -> float | None:
        """When the step in flight ends; None when there is nothing to do."""
        return None if self._step is None else self._step.end

    def advance(self, until: float) -> list[Request]:
        """End every step that ends by `until`; the requests that finished, in order."""
        finished: list[Request] = []
        while (step := self._step) is not None and step.end <= until:
            if step.uniform and self.running:
                self._decode(step, until, finished)
            else:
                self._complete(step, finished)
                self.clock = step.end
                self._step = self._schedule(step.end)
        return finished

    # --- scheduling ---------------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> _Step | None:
        """The next step, or None when there is nothing to do."""
        if not self.running and not self.waiting:
            return None
        context = self._context()
        if self._all_decode(context):
            return _Step(now + self._time(len(self.running), self._drafted, context, 0), uniform=True)
        step = _Step(now, uniform=False)
        budget, prefills = self._schedule_running(step)
        if budget is not None:
            self._admit(step, now, budget, prefills)
        decodes = sum(tokens == drafts + 1 for _, tokens, drafts in step.work)
        prompt = sum(tokens for _, tokens, drafts in step.work if tokens != drafts + 1)
        cached = sum(request.computed for request, _, _ in step.work)
        before, self._drafted = self._drafted, self._k(len(step.work))
        step.end = now + self._time(decodes, before if decodes else self._drafted, cached, prompt)
        return step

    def _all_decode(self, context: int) -> bool:
        """Whether the step is one of plain decoding: nobody prefills or can be admitted, and nothing cuts a draft short."""
        running, settings = self.running, self.settings
        if not running or self._uneven or (self.waiting and len(running) < settings.max_num_seqs):
            return False
        k = max(self._drafted, self._k(len(running)))
        if len(running) * (k + 1) > settings.max_num_batched_tokens or self._room(k, context) < 0:
            return False
        for request in running:
            if request.drafts != self._drafted or request.tokens + k + 1 >= settings.max_model_len or request.prefilling:
                return False
        return True

    def _room(self, k: int, context: int) -> int:
        """Tokens that the batch can surely grow by before the KV cache may be full, after a step with `k` drafts."""
        block = self.settings.block_size
        return self._usable_blocks * block - context - len(self.running) * (k + self._lookahead + block)

    def _schedule_running(self, step: _Step) -> tuple[int | None, bool]:
        """Give tokens to running requests. The budget left, or None when someone was preempted; whether a prefill is on."""
        budget, prefills, preempted, index = self.settings.max_num_batched_tokens, False, False, 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            tokens = request.tokens + request.drafts - request.computed
            tokens = min(tokens, budget, self.settings.max_model_len - request.computed - 1)
            if tokens <= 0:
                continue
            while not self._allocate(request, request.computed + tokens + self._lookahead):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return None, prefills
            prefills |= request.prefilling
            drafts = max(tokens + request.computed - request.tokens, 0)
            step.work.append((request, tokens, drafts))
            budget -= tokens
        return (None if preempted else budget), prefills

    def _admit(self, step: _Step, now: float, budget: int, prefills: bool) -> None:
        """Move waiting requests to the batch while tokens, sequences and blocks last."""
        running_before = bool(step.work)
        while self.waiting and budget > 0 and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            cached = self._cached(request)
            tokens, drafts = request.tokens - cached, 0
            if (
                tokens == 1
                and self._k_max
                and self._lookup is None
                and not prefills
                and (running_before or cached)
                and cached + self._k_max + 2 <= self.settings.max_model_len
            ):
                if self._k_max + 1 > budget:
                    break
                tokens, drafts = self._k_max + 1, self._k_max
            tokens = min(tokens, budget)
            # A request is let in only if all of it fits, so that two half-way prefills cannot lock each other out.
            if not self._allocate(request, max(request.tokens, cached + tokens) + self._lookahead):
                break
            self.waiting.popleft()
            self.running.append(request)
            if math.isnan(request.scheduled):
                request.scheduled = now
            if not request.preemptions:
                request.cached = cached
                step.queries += request.prompt_tokens
                step.hits += cached
            request.computed = cached
            if drafts:
                step.dummies.add(request)
            step.work.append((request, tokens, drafts))
            budget -= tokens

    def _cached(self, request: Request) -> int:
        if not self.settings.enable_prefix_caching or not request.segments:
            return 0
        segments = request.segments
        if request.generated:  # preempted: its own answer is in the cache as well
            segments = [*segments, (request.name, request.generated)]
        found = self.cache.match(segments, request.tokens - 1)
        return max(found - self.settings.block_size, 0) if self.settings.drops_last_block and self._k_max else found

    def _allocate(self, request: Request, tokens: int) -> bool:
        """KV blocks for `tokens` tokens of the request; False when there are not enough."""
        blocks = -(-min(tokens, self.settings.max_model_len) // self.settings.block_size)
        if blocks > request.blocks:
            if self._used_blocks + blocks - request.blocks > self._usable_blocks:
                return False
            self._used_blocks += blocks - request.blocks
            request.blocks = blocks
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.computed = request.drafts = 0
        request.preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.appendleft(request)
        self._uneven = True

    def _release(self, request: Request) -> None:
        self._used_blocks -= request.blocks
        request.blocks = 0
        self._stack = None
        if request.segments and request.generated:
            answer = (request.name, request.generated)
            self.cache.insert([*request.segments, answer])

    def _k(self, scheduled: int) -> int:
        return self._k_max if self._lookup is None else self._lookup[scheduled]

    def _context(self) -> int:
        return sum([request.prompt_tokens + request.generated for request in self.running])

    def _time(self, batch: int, drafts: int, cached: float, prompt: int) -> float:
        seconds = self._fixed(batch, drafts) + self.step_time.cached * cached + self.step_time.prefill * prompt
        if self.step_time.noise:
            seconds *= math.exp(self.step_time.noise * float(self.random.standard_normal()))
        return seconds

    # --- results ------------------------------------------------------------------------------------------------------

    def _survival(self, request: Request) -> Floats:
        if request.survival is None or self._drifts:
            shift = request.effect + self.drift.shift(request.tokens, self.clock - self.started, self.clock)
            request.survival = request.acceptance.survival(self._k_max, shift)
        return request.survival

    def _complete(self, step: _Step, finished: list[Request]) -> None:
        """Book one step of any kind."""
        counters, end = self.counters, step.end
        counters.prefix_cache_queries += step.queries
        counters.prefix_cache_hits += step.hits
        prompt = returned = drafts = draft_tokens = 0
        outputs = False
        accepted_tokens: list[int] = []
        ended: list[Request] = []
        for request, tokens, drafted in step.work:
            request.computed += tokens
            if request.computed < request.tokens:
                continue  # a chunk of a prompt: no output
            accepted = 0
            if drafted:
                if request not in step.dummies:
                    accepted = int((self.random.random() < self._survival(request)[:drafted]).sum())
                drafts += 1
                draft_tokens += drafted
                accepted_tokens.append(accepted)
            outputs = True
            if not request.generated:
                request.first_token = end
                counters.time_to_first_token.observe(end - request.arrival)
                counters.prompt_tokens += request.prompt_tokens
                counters.prompt_tokens_cached += request.cached
                prompt += request.prompt_tokens - request.cached
            else:
                counters.inter_token_latency.observe(end - request.last_token)
            request.last_token = end
            new = min(1 + accepted, request.limit - request.generated)
            request.generated += new
            request.computed = request.tokens - 1
            request.drafts = self._drafted
            returned += new
            if request.generated >= request.limit:
                ended.append(request)
        if drafts:
            counters.observe_drafts(drafts, draft_tokens, np.array(accepted_tokens))
        if outputs:
            counters.generation_tokens += returned
            counters.iteration_tokens.observe(prompt + returned)
        self._stack = None
        self._finish(ended, end, finished)
        self._uneven = any(request.generated and request.last_token != end for request in self.running)
        self._tell_gauges()

    def _decode(self, step: _Step, until: float, finished: list[Request]) -> None:
        """Book this step and all like it that follow by `until`, up to the one in which a request ends."""
        running, counters, k_first = self.running, self.counters, self._drafted
        batch, context = len(running), self._context()
        k = self._k(batch)
        widest = max(k, k_first)
        left = [request.limit - request.generated for request in running]
        steps = self._span_length(step, until, min(left), widest, context)
        accepted = self._accepted(steps, k_first, k)
        sums = (accepted + 1).cumsum(axis=0)
        ending = [int(sums[:, i].searchsorted(left[i])) for i, tokens in enumerate(sums[-1].tolist()) if tokens >= left[i]]
        last = min(ending, default=-1)  # the step in which a request ends
        if ending:
            steps = last + 1
        # Tokens of all requests, after each step.
        grown = np.add.reduce(sums[:steps], axis=1)
        seconds = self._seconds(step.end - self.clock, batch, k, context, grown)
        ends = self.clock + np.add.accumulate(seconds)
        # The first step is over by `until`, whatever the rounding of clock + (end - clock) says.
        done = steps if ends[-1] <= until else max(int(ends.searchsorted(until, side="right")), 1)
        emitted = sums[done - 1].tolist()
        if last == done - 1:
            emitted = list(map(min, emitted, left))
        returned = sum(emitted)
        per_step = grown[:done].copy()
        per_step[-1] = returned
        per_step[1:] -= grown[: done - 1]
        self.clock = float(ends[done - 1])
        # An interval is the same for all requests of a step, for all were in the step before.
        counters.inter_token_latency.observe_many(seconds[:done], batch)
        counters.iteration_tokens.observe_many(per_step)
        counters.generation_tokens += returned
        drafted = accepted[:done] if k_first and k else accepted[:1] if k_first else accepted[1:done]
        if widest and drafted.size:
            tokens = batch * (k_first + (done - 1) * k)
            counters.observe_drafts(drafted.size, tokens, drafted)
        self._drafted = k
        for request, new in zip(running, emitted, strict=True):
            request.generated += new
            request.computed += new
            request.drafts = k
            request.last_token = self.clock
        if last == done - 1:
            self._finish([request for request in running if request.generated >= request.limit], self.clock, finished)
        for request in running:
            self._allocate(request, request.tokens + self._lookahead)
        self._tell_gauges()
        # Either the next step of this kind is in flight, or what comes next has to be looked at.
        self._step = _Step(float(ends[done]), uniform=True) if done < steps else self._schedule(self.clock)

    def _span_length(self, step: _Step, until: float, left: int, k: int, context: int) -> int:
        """How many steps to compute: no more than can end by `until`, or while nobody joins, ends or comes near a limit."""
        settings, batch = self.settings, len(self.running)
        if self.waiting and batch < settings.max_num_seqs:
            return 1
        steps = min(_SPAN, left, 2 + int(min((until - step.end) / self._fixed(batch, k), _SPAN)))
        longest = max([request.tokens for request in self.running])
        steps = min(steps, (settings.max_model_len - longest - 1) // (k + 1), self._room(k, context) // (batch * (k + 1)))
        return max(steps, 1)

    def _accepted(self, steps: int, k_first: int, k: int) -> Ints:
        """By step and request, how many drafted tokens are accepted, of `k_first` in the first step and `k` in the others."""
        widest = max(k_first, k)
        if not widest:
            return np.zeros((steps, len(self.running)), dtype=np.int64)
        if self._stack is None or self._drifts:
            self._stack = np.array([self._survival(request) for request in self.running]).T[:, None, :]
        # One uniform number per step and request decides how many: as many as there are survivals above it.
        chance = self.random.random((steps, len(self.running)))
        accepted: Ints = reduce(np.add, (chance < self._stack[:widest]).astype(np.int16))
        if k_first != k:
            np.minimum(accepted[0], k_first, out=accepted[0])
            np.minimum(accepted[1:], k, out=accepted[1:])
        return accepted

    def _seconds(self, first: float, batch: int, k: int, context: int, grown: Ints) -> Floats:
        """How long steps take after which the batch has `grown` by so many tokens; the first is in flight already."""
        seconds: Floats = np.empty(len(grown))
        seconds[1:] = self._fixed(batch, k) + self.step_time.cached * (context + grown[:-1])
        if self.step_time.noise:
            seconds *= np.exp(self.step_time.noise * self.random.standard_normal(len(grown)))
        seconds[0] = first
        return seconds

    def _finish(self, ended: Sequence[Request], end: float, finished: list[Request]) -> None:
        counters = self.counters
        for request in ended:
            self.running.remove(request)
            self._release(request)
            by_itself = request.stop_after is not None and request.generated >= request.stop_after
            request.finish_reason = "stop" if by_itself else "length"
            counters.request_success[request.finish_reason] += 1
            counters.e2e_request_latency.observe(end - request.arrival)
            counters.request_queue_time.observe(request.scheduled - request.arrival)
            counters.request_prefill_time.observe(request.first_token - request.scheduled)
            counters.request_inference_time.observe(request.last_token - request.scheduled)
            counters.request_decode_time.observe(request.last_token - request.first_token)
            counters.request_num_preemptions.observe(request.preemptions)
            counters.request_prefill_kv_computed_tokens.observe(request.prompt_tokens - request.cached)
            counters.request_prompt_tokens.observe(request.prompt_tokens)
            counters.request_generation_tokens.observe(request.generated)
            counters.request_time_per_output_token.observe(request.time_per_output_token)
            counters.request_params_max_tokens.observe(request.max_tokens)
            counters.request_max_num_generation_tokens.observe(request.generated)
            counters.request_params_n.observe(1)
            finished.append(request)

    def _tell_gauges(self) -> None:
        self.counters.num_requests_running = len(self.running)
        self.counters.num_requests_waiting = len(self.waiting)
        self.counters.kv_cache_usage_perc = self._used_blocks / self._usable_blocks
