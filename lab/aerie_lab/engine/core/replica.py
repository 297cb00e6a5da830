"""One engine as a state machine: requests wait, are prefilled in chunks, decode in a batch, and leave; time is an argument.

    submit(request, at) --> coming --> waiting --> running: prefill ... decode ... --> finished
                                          ^            |
                                          +-- preempt -+   when the KV cache is full

The scheduling is vLLM 0.32.0's (`aerie_lab.engine.core`). `advance(until)` ends every step that ends by then; requests may
be submitted before that, in order. The same object runs in virtual time (fleet) and, driven by the clock, behind HTTP (server).

Steps in which all running requests decode make up nearly all of a day, so they are computed many at a time; the tests hold
this against the same steps taken one by one.

Guaranteed: the identities of vLLM's counters, and the same seed with the same requests gives the same counts and times, however
time is cut into calls of `advance`. Not modelled: LoRA, structured output, parallel sampling, encoder inputs, KV connectors,
several engine processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache, reduce

import numpy as np

from aerie_lab.engine.core.scheduler import ScheduledStep, Scheduler
from aerie_lab.engine.metrics.counters import Counters
from aerie_lab.engine.performance_model.acceptance import NO_DRIFT, Acceptance, Drift, FloatArray
from aerie_lab.engine.performance_model.request import EngineSettings, Request
from aerie_lab.engine.performance_model.step import StepTime
from aerie_lab.engine.performance_model.step_noise import StepTimeNoise
from aerie_lab.engine.performance_model.step_sequence import StepSequence, draw_step_sequence

_STEPS_PER_DRAW = 256  # steps of a request that are drawn together
_STEPS_PER_DRAW_WITH_DRIFT = 64  # the same where acceptance drifts: the drift is held fixed for as long
_MAX_SINGLE_STEPS = 4  # so few steps are completed faster one by one


class Replica:
    """One engine."""

    def __init__(
        self,
        settings: EngineSettings,
        step_time: StepTime,
        *,
        seed: int = 0,
        drift: Drift = NO_DRIFT,
        start_time: float = 0.0,
    ) -> None:
        self.settings = settings
        self.step_time = step_time
        self._fixed_seconds = cache(step_time.fixed_seconds)
        self.drift = drift
        self.start_time = start_time
        self._has_drift = bool(drift)
        self.random, self._effect_random, times = np.random.default_rng(seed).spawn(3)
        self._step_noise = StepTimeNoise(step_time.log_sd, times)
        self.counters = Counters(settings.max_model_len, settings.num_speculative_tokens)
        self.arrivals: deque[Request] = deque()
        """Those that arrive while the step in flight is on, or later."""
        self.clock = start_time
        """End of the last step."""
        self._scheduler = Scheduler(settings, self.counters)
        self._max_k = settings.num_speculative_tokens or 0
        self._step_in_flight: ScheduledStep | None = None

    # --- what goes in -------------------------------------------------------------------------------------------------

    @property
    def unfinished_count(self) -> int:
        """Number of requests."""
        return len(self.arrivals) + len(self._scheduler.waiting) + len(self._scheduler.running)

    def submit(self, request: Request, arrival_time: float) -> None:
        """A request arrives, after all others so far. It joins the step after the one in flight then."""
        if request.prompt_tokens < 1 or request.prompt_tokens >= self.settings.max_model_len:
            raise ValueError(f"prompt of {request.prompt_tokens} tokens: give 1 to {self.settings.max_model_len - 1}.")
        request.arrival_time = arrival_time
        if request.acceptance.spread:
            request.logit_effect = self._effect_random.normal(0.0, request.acceptance.spread)
        request.max_answer_tokens = min(request.max_tokens, self.settings.max_model_len - request.prompt_tokens)
        if request.stop_after is not None:
            request.max_answer_tokens = min(request.max_answer_tokens, request.stop_after)
        self.arrivals.append(request)
        if self._step_in_flight is None:
            self._step_in_flight = self._schedule_step(self.clock)

    def abort(self, request: Request) -> None:
        """End a request whose client has disconnected: it gets no more steps and does not count as finished."""
        waiting = self._scheduler.waiting
        if request in self._scheduler.running:
            self._scheduler.remove_running(request)
            if self._step_in_flight is not None:
                self._step_in_flight.work = [work for work in self._step_in_flight.work if work[0] is not request]
        elif request in waiting:
            waiting.remove(request)
        elif request in self.arrivals:
            self.arrivals.remove(request)
        self._update_gauges()

    def change_acceptance(self, request: Request, acceptance: Acceptance) -> None:
        """Another drafter drafts for a request, whose effect stays. The step in flight verifies drafts of the previous one."""
        request.acceptance, request.survival = acceptance, None
        if request.step_sequence is not None:
            request.step_sequence.truncate(1)

    def delay_step(self, start_time: float) -> None:
        """The step in flight began only at this time, because the engine was paused."""
        if self._step_in_flight is not None:
            self._step_in_flight.end += max(0.0, start_time - self.clock)

    @property
    def next_step_end(self) -> float | None:
        """When the step in flight ends; None when there is nothing to do."""
        return None if self._step_in_flight is None else self._step_in_flight.end

    def advance(self, until: float) -> list[Request]:
        """End every step that ends by `until`; the requests that finished, in order."""
        finished: list[Request] = []
        while (step := self._step_in_flight) is not None and step.end <= until:
            calm = min(until, self.arrivals[0].arrival_time) if self.arrivals else until
            if step.draft_tokens is not None and (steps := self._count_uniform_steps(step.end, step.draft_tokens, calm)) > 1:
                self._complete_decode_steps(step, steps, calm, until, finished)
            else:
                self._complete_step(step, finished)
        return finished

    def _collect_arrivals(self) -> None:
        while self.arrivals and self.arrivals[0].arrival_time < self.clock:
            self._scheduler.waiting.append(self.arrivals.popleft())

    # --- scheduling ---------------------------------------------------------------------------------------------------

    def _schedule_step(self, now: float) -> ScheduledStep | None:
        """Return the next step, or None when there is nothing to do."""
        scheduler = self._scheduler
        if not scheduler.running and not scheduler.waiting:
            if not self.arrivals:
                return None
            scheduler.waiting.append(self.arrivals.popleft())  # which wakes an idle engine
            now = self.clock = max(now, scheduler.waiting[0].arrival_time)
        step = scheduler.schedule_step(now)
        step.end = now + self._draw_step_seconds(step)
        return step

    def _draw_step_seconds(self, step: ScheduledStep) -> float:
        seconds = (
            self._fixed_seconds(step.decode_batch, step.decode_draft_tokens)
            + self.step_time.seconds_per_cached_token * step.cached_tokens
            + self.step_time.seconds_per_prompt_token * step.prompt_tokens
        )
        return seconds * self._step_noise.next_factor()

    # --- results ------------------------------------------------------------------------------------------------------

    def _survival(self, request: Request) -> FloatArray:
        if request.survival is None or self._has_drift:
            shift = request.logit_effect + self.drift.logit_shift(request.total_tokens, self.clock - self.start_time, self.clock)
            request.survival = request.acceptance.survival(self._max_k, shift)
        return request.survival

    def _ensure_step_sequence(self, request: Request, drafts: int) -> StepSequence:
        """Return the request's next steps, with `drafts` draft tokens each; at least one."""
        path = request.step_sequence
        if path is None or path.draft_tokens != drafts or not path.steps_left:
            survival, left = self._survival(request)[:drafts], request.max_answer_tokens - request.generated_tokens
            path = request.step_sequence = draw_step_sequence(
                self.random,
                survival,
                request.total_tokens - 1,
                left,
                _STEPS_PER_DRAW_WITH_DRIFT if self._has_drift else _STEPS_PER_DRAW,
            )
        return path

    def _complete_step(self, step: ScheduledStep, finished: list[Request]) -> None:
        """Book one step of any kind, and look at what comes next."""
        scheduler, counters, end = self._scheduler, self.counters, step.end
        counters.prefix_cache_queries += step.prefix_cache_queries
        counters.prefix_cache_hits += step.prefix_cache_hits
        prompt = returned = draft_tokens = 0
        outputs = False
        emitted: list[int] = []
        ended: list[Request] = []
        work, k = step.work, step.draft_tokens
        for request, tokens, drafted in work if k is None else [(request, k + 1, k) for request in scheduler.running]:
            request.computed_tokens += tokens
            if request.computed_tokens < request.prompt_tokens + request.generated_tokens:
                continue  # a chunk of a prompt: no output
            accepted = 0
            if not drafted or request in step.padded_requests:
                request.step_sequence = None
            else:
                path = self._ensure_step_sequence(request, drafted)
                accepted = path.step_tokens.item(path.steps_taken) - 1
                path.steps_taken += 1
            if drafted:
                draft_tokens += drafted
                emitted.append(accepted + 1)
                if request.accepted_by_step is not None:
                    request.record_steps((accepted,), drafted)
            outputs = True
            if not request.generated_tokens:
                request.first_token_time = end
                counters.time_to_first_token.observe(end - request.arrival_time)
                counters.prompt_tokens += request.prompt_tokens
                counters.prompt_tokens_cached += request.cached_tokens
                prompt += request.prompt_tokens - request.cached_tokens
            else:
                counters.inter_token_latency.observe(end - request.last_token_time)
            request.last_token_time = end
            new = min(1 + accepted, request.max_answer_tokens - request.generated_tokens)
            request.generated_tokens += new
            request.computed_tokens = request.prompt_tokens + request.generated_tokens - 1
            request.draft_tokens = scheduler.requested_drafts
            returned += new
            if k is not None:
                scheduler.kv_cache.allocate(request, request.total_tokens)
            if request.generated_tokens >= request.max_answer_tokens:
                ended.append(request)
        if emitted:
            counters.spec_decode_num_draft_tokens += draft_tokens
            counters.tokens_per_draft.observe_many(emitted)
        if outputs:
            counters.generation_tokens += returned
            counters.iteration_tokens.observe(prompt + returned)
        if ended:
            self._finish_requests(ended, finished)
        if k is None:
            scheduler.has_skipped_requests = any(
                request.generated_tokens and request.last_token_time != end for request in scheduler.running
            )
        self.clock = end
        self._collect_arrivals()
        self._update_gauges()
        self._step_in_flight = self._schedule_step(end)

    def _count_uniform_steps(self, end: float, k: int, no_arrivals_until: float) -> int:
        """Return how many equal steps follow each other while no request joins or comes near a limit; 1 when they are few.

        This one ends at `end`; at most those that can end by `no_arrivals_until`, and the one that is then in flight.
        """
        settings, scheduler, running = self.settings, self._scheduler, self._scheduler.running
        batch = len(running)
        if (
            not running
            or k != scheduler.requested_drafts
            or k != scheduler.k_for_batch(batch)
            or (scheduler.waiting and batch < settings.max_num_seqs)
        ):
            return 1
        steps = 2 + int(min((no_arrivals_until - end) / self._fixed_seconds(batch, k), _STEPS_PER_DRAW))
        if steps > _MAX_SINGLE_STEPS:
            longest = max([request.computed_tokens for request in running])
            steps = min(steps, (settings.max_model_len - longest - 2) // (k + 1), scheduler.free_tokens(k) // (batch * (k + 1)))
        return steps if steps > _MAX_SINGLE_STEPS else 1

    def _complete_decode_steps(
        self, step: ScheduledStep, steps: int, no_arrivals_until: float, until: float, finished: list[Request]
    ) -> None:
        """Book those of `steps` steps, all decoding with equal drafts, that end by `until`, up to one in which a request ends.

        No request arrives before `no_arrivals_until`; the step that is then in flight is the last.
        """
        scheduler, counters, running = self._scheduler, self.counters, self._scheduler.running
        batch, k = len(running), scheduler.requested_drafts
        paths = [self._ensure_step_sequence(request, k) for request in running]
        steps = min(steps, min([path.steps_left for path in paths]))
        # Tokens of all in the KV cache before the first step and after each; what each step takes; when it ends.
        cached = reduce(np.add, [path.cached_tokens[path.steps_taken : path.steps_taken + steps + 1] for path in paths])
        seconds = cached[:-1] * self.step_time.seconds_per_cached_token
        seconds += self._fixed_seconds(batch, k)
        seconds *= self._step_noise.peek(steps)
        seconds[0] = step.end  # of the first step the end is known already
        ends = np.add.accumulate(seconds)
        seconds[0] = step.end - self.clock
        done = steps if ends.item(-1) <= no_arrivals_until else int(ends.searchsorted(no_arrivals_until, side="right"))
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
                step_tokens = path.step_tokens[path.steps_taken : path.steps_taken + done]
                counters.tokens_per_draft.observe_many(step_tokens)
                if request.accepted_by_step is not None:
                    request.record_steps((step_tokens - 1).tolist(), k)
            path.steps_taken += done
            request.computed_tokens = path.cached_tokens.item(path.steps_taken)
            request.generated_tokens = request.computed_tokens - request.prompt_tokens + 1
            request.last_token_time = self.clock
            scheduler.kv_cache.allocate(request, request.computed_tokens + 1)
        if done == steps and (ended := [request for request in running if request.generated_tokens >= request.max_answer_tokens]):
            self._finish_requests(ended, finished)
        self._collect_arrivals()
        self._update_gauges()
        # Either the next step of this kind is in flight, or the next step has to be scheduled.
        if done < steps and not scheduler.waiting:
            self._step_noise.skip(done)
            step.end = ends.item(done)
        else:
            self._step_noise.skip(done - 1)
            self._step_in_flight = self._schedule_step(self.clock)

    def _finish_requests(self, ended: Sequence[Request], finished: list[Request]) -> None:
        for request in ended:
            self._scheduler.remove_running(request)
            by_itself = request.stop_after is not None and request.generated_tokens >= request.stop_after
            request.finish_reason = "stop" if by_itself else "length"
            request.step_sequence = None
            self.counters.finish(request)
            finished.append(request)

    def _update_gauges(self) -> None:
        self.counters.num_requests_running = len(self._scheduler.running)
        self.counters.num_requests_waiting = len(self._scheduler.waiting)
        self.counters.kv_cache_usage_perc = self._scheduler.kv_cache.usage
