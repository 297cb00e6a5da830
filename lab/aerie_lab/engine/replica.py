"""One engine as a state machine: requests wait, are prefilled in chunks, decode in a batch, and leave; time is an argument.

    submit(request, at) --> coming --> waiting --> running: prefill ... decode ... --> finished
                                          ^            |
                                          +-- preempt -+   when the KV cache is full

The scheduling is vLLM 0.32.0's (vllm/v1/core/sched/scheduler.py, Scheduler.schedule), without async scheduling: running requests
first, then waiting ones while tokens, sequences and KV blocks last; the last to come is preempted first. The number of
drafted tokens is the one that the step before asked for. `advance(until)` ends every step that ends by then; requests may be
submitted before that, in order. The same object runs in virtual time (fleet) and, driven by the clock, behind HTTP (server).

Steps in which all running requests decode make up nearly all of a day, so they are computed many at a time; the tests hold
this against the same steps taken one by one.

Guaranteed: the identities of vLLM's counters, and the same seed with the same requests gives the same counts and times, however
time is cut into calls of `advance`. Not modelled: LoRA, structured output, parallel sampling, encoder inputs, KV connectors,
several engine processes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, reduce

import numpy as np

from aerie_lab.engine.acceptance import NO_DRIFT, Drift, Floats
from aerie_lab.engine.counters import Counters
from aerie_lab.engine.jitter import Jitter
from aerie_lab.engine.path import Path, draw
from aerie_lab.engine.prefix import PrefixCache
from aerie_lab.engine.request import EngineSettings, Request
from aerie_lab.engine.step import StepTime

_SPAN = 256  # steps of a request that are drawn at once
_DRIFTING = 64  # the same where acceptance drifts: the drift is held fixed for as long
_FEW = 4  # steps that are booked sooner one by one than at once


@dataclass(slots=True)
class _Step:
    """A step in flight: who is in it, with how many tokens."""

    end: float
    drafts: int | None = None
    """Drafted tokens of each request when all running requests decode with equal drafts; `work` is then left out."""
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
        self.random, self._effects, times = np.random.default_rng(seed).spawn(3)
        self._jitter = Jitter(step_time.noise, times)
        self.counters = Counters(settings.max_model_len, settings.num_speculative_tokens)
        self.coming: deque[Request] = deque()
        """Those that arrive while the step in flight is on, or later."""
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

    # --- what goes in -------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Number of requests."""
        return len(self.coming) + len(self.waiting) + len(self.running)

    def submit(self, request: Request, at: float) -> None:
        """A request arrives, after all others so far. It joins the step after the one in flight then."""
        if request.prompt_tokens < 1 or request.prompt_tokens >= self.settings.max_model_len:
            raise ValueError(f"prompt of {request.prompt_tokens} tokens: give 1 to {self.settings.max_model_len - 1}.")
        request.arrival = at
        if request.acceptance.spread:
            request.effect = self._effects.normal(0.0, request.acceptance.spread)
        request.limit = min(request.max_tokens, self.settings.max_model_len - request.prompt_tokens)
        if request.stop_after is not None:
            request.limit = min(request.limit, request.stop_after)
        self.coming.append(request)
        if self._step is None:
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
        elif request in self.coming:
            self.coming.remove(request)
        self._tell_gauges()

    @property
    def next_end(self) -> float | None:
        """When the step in flight ends; None when there is nothing to do."""
        return None if self._step is None else self._step.end

    def advance(self, until: float) -> list[Request]:
        """End every step that ends by `until`; the requests that finished, in order."""
        finished: list[Request] = []
        while (step := self._step) is not None and step.end <= until:
            calm = min(until, self.coming[0].arrival) if self.coming else until
            if step.drafts is not None and (steps := self._alike(step.end, step.drafts, calm)) > 1:
                self._decode(step, steps, calm, until, finished)
            else:
                self._complete(step, finished)
        return finished

    def _arrive(self) -> None:
        while self.coming and self.coming[0].arrival < self.clock:
            self.waiting.append(self.coming.popleft())

    # --- scheduling ---------------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> _Step | None:
        """The next step, or None when there is nothing to do."""
        if not self.running and not self.waiting:
            if not self.coming:
                return None
            self.waiting.append(self.coming.popleft())  # which wakes an idle engine
            now = self.clock = max(now, self.waiting[0].arrival)
        if self._all_decode():
            before, self._drafted = self._drafted, self._k(len(self.running))
            return _Step(now + self._time(len(self.running), before, self._cached_tokens(), 0), before)
        step = _Step(now)
        budget, prefills = self._schedule_running(step)
        if budget is not None:
            self._admit(step, now, budget, prefills)
        decodes = prompt = cached = 0
        for request, tokens, drafts in step.work:
            cached += request.computed
            if tokens == drafts + 1:
                decodes += 1
            else:
                prompt += tokens
        before, self._drafted = self._drafted, self._k(len(step.work))
        step.end = now + self._time(decodes, before if decodes else self._drafted, cached, prompt)
        return step

    def _all_decode(self) -> bool:
        """Whether the step is one of plain decoding: nobody prefills or can be admitted, and nothing cuts a draft short."""
        running, settings = self.running, self.settings
        if not running or self._uneven or (self.waiting and len(running) < settings.max_num_seqs):
            return False
        k = max(self._drafted, self._k(len(running)))
        if len(running) * (k + 1) > settings.max_num_batched_tokens or self._room(k) < 0:
            return False
        for request in running:
            if request.drafts != self._drafted or request.computed + k + 2 >= settings.max_model_len or request.prefilling:
                return False
        return True

    def _room(self, k: int) -> int:
        """Tokens that the batch can surely grow by before the KV cache may be full, after a step with `k` drafts."""
        block = self.settings.block_size
        return self._usable_blocks * block - self._cached_tokens() - len(self.running) * (k + self._lookahead + block)

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
            cached = self._found(request)
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

    def _found(self, request: Request) -> int:
        """Tokens of the request that are in the prefix cache."""
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
        if request.segments and request.generated:
            answer = (request.name, request.generated)
            self.cache.insert([*request.segments, answer])

    def _k(self, scheduled: int) -> int:
        return self._k_max if self._lookup is None else self._lookup[scheduled]

    def _cached_tokens(self) -> int:
        return sum([request.computed for request in self.running])

    def _time(self, batch: int, drafts: int, cached: float, prompt: int) -> float:
        seconds = self._fixed(batch, drafts) + self.step_time.cached * cached + self.step_time.prefill * prompt
        return seconds * self._jitter.next()

    # --- results ------------------------------------------------------------------------------------------------------

    def _survival(self, request: Request) -> Floats:
        if request.survival is None or self._drifts:
            shift = request.effect + self.drift.shift(request.tokens, self.clock - self.started, self.clock)
            request.survival = request.acceptance.survival(self._k_max, shift)
        return request.survival

    def _path(self, request: Request, drafts: int) -> Path:
        """The request's next steps, with `drafts` drafted tokens each; at least one."""
        path = request.path
        if path is None or path.drafts != drafts or not path.left:
            survival, left = self._survival(request)[:drafts], request.limit - request.generated
            path = request.path = draw(self.random, survival, request.tokens - 1, left, _DRIFTING if self._drifts else _SPAN)
        return path

    def _complete(self, step: _Step, finished: list[Request]) -> None:
        """Book one step of any kind, and look at what comes next."""
        counters, end = self.counters, step.end
        counters.prefix_cache_queries += step.queries
        counters.prefix_cache_hits += step.hits
        prompt = returned = draft_tokens = 0
        outputs = False
        emitted: list[int] = []
        ended: list[Request] = []
        work, k = step.work, step.drafts
        for request, tokens, drafted in work if k is None else [(request, k + 1, k) for request in self.running]:
            request.computed += tokens
            if request.computed < request.prompt_tokens + request.generated:
                continue  # a chunk of a prompt: no output
            accepted = 0
            if not drafted or request in step.dummies:
                request.path = None
            else:
                path = self._path(request, drafted)
                accepted = path.emitted.item(path.taken) - 1
                path.taken += 1
            if drafted:
                draft_tokens += drafted
                emitted.append(accepted + 1)
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
            request.computed = request.prompt_tokens + request.generated - 1
            request.drafts = self._drafted
            returned += new
            if k is not None:
                self._allocate(request, request.tokens + self._lookahead)
            if request.generated >= request.limit:
                ended.append(request)
        if emitted:
            counters.spec_decode_num_draft_tokens += draft_tokens
            counters.emitted.observe_many(emitted)
        if outputs:
            counters.generation_tokens += returned
            counters.iteration_tokens.observe(prompt + returned)
        if ended:
            self._finish(ended, finished)
        if k is None:
            self._uneven = any(request.generated and request.last_token != end for request in self.running)
        self.clock = end
        self._arrive()
        self._tell_gauges()
        self._step = self._schedule(end)

    def _alike(self, end: float, k: int, calm: float) -> int:
        """How many steps like this one follow each other while nobody joins or comes near a limit; 1 when they are few.

        This one ends at `end`; at most those that can end by `calm`, and the one that is then in flight.
        """
        settings, running, batch = self.settings, self.running, len(self.running)
        if not running or k != self._drafted or k != self._k(batch) or (self.waiting and batch < settings.max_num_seqs):
            return 1
        steps = 2 + int(min((calm - end) / self._fixed(batch, k), _SPAN))
        if steps > _FEW:
            longest = max([request.computed for request in running])
            steps = min(steps, (settings.max_model_len - longest - 2) // (k + 1), self._room(k) // (batch * (k + 1)))
        return steps if steps > _FEW else 1

    def _decode(self, step: _Step, steps: int, calm: float, until: float, finished: list[Request]) -> None:
        """Book those of `steps` steps, all decoding with equal drafts, that end by `until`, up to one in which a request ends.

        By `calm` nobody arrives; the step that is then in flight is the last.
        """
        running, counters, batch, k = self.running, self.counters, len(self.running), self._drafted
        paths = [self._path(request, k) for request in running]
        steps = min(steps, min([path.left for path in paths]))
        # Tokens of all in the KV cache before the first step and after each; what each step takes; when it ends.
        cached = reduce(np.add, [path.cached[path.taken : path.taken + steps + 1] for path in paths])
        seconds = cached[:-1] * self.step_time.cached
        seconds += self._fixed(batch, k)
        seconds *= self._jitter.ahead(steps)
        seconds[0] = step.end  # of the first step the end is known already
        ends = np.add.accumulate(seconds)
        seconds[0] = step.end - self.clock
        done = steps if ends.item(-1) <= calm else int(ends.searchsorted(calm, side="right"))
        if done < steps and ends.item(done) <= until:
            done += 1
        self.clock = ends.item(done - 1)
        # An interval is the same for all requests of a step, for all were in the step before.
        counters.inter_token_latency.observe_many(seconds[:done], batch)
        counters.iteration_tokens.observe_many(cached[1 : done + 1] - cached[:done])
        counters.generation_tokens += cached.item(done) - cached.item(0)
        counters.spec_decode_num_draft_tokens += batch * done * k
        for request, path in zip(running, paths, strict=True):
            if k:
                counters.emitted.observe_many(path.emitted[path.taken : path.taken + done])
            path.taken += done
            request.computed = path.cached.item(path.taken)
            request.generated = request.computed - request.prompt_tokens + 1
            request.last_token = self.clock
            self._allocate(request, request.computed + 1 + self._lookahead)
        if done == steps and (ended := [request for request in running if request.generated >= request.limit]):
            self._finish(ended, finished)
        self._arrive()
        self._tell_gauges()
        # Either the next step of this kind is in flight, or what comes next has to be looked at.
        if done < steps and not self.waiting:
            self._jitter.move(done)
            step.end = ends.item(done)
        else:
            self._jitter.move(done - 1)
            self._step = self._schedule(self.clock)

    def _finish(self, ended: Sequence[Request], finished: list[Request]) -> None:
        for request in ended:
            self.running.remove(request)
            self._release(request)
            by_itself = request.stop_after is not None and request.generated >= request.stop_after
            request.finish_reason = "stop" if by_itself else "length"
            request.path = None
            self.counters.finish(request)
            finished.append(request)

    def _tell_gauges(self) -> None:
        self.counters.num_requests_running = len(self.running)
        self.counters.num_requests_waiting = len(self.waiting)
        self.counters.kv_cache_usage_perc = self._used_blocks / self._usable_blocks
