"""Requests to an engine, and its limits: data of the replica's state machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from aerie_lab.engine.performance_model.acceptance import Acceptance, FloatArray
from aerie_lab.engine.performance_model.prefix import PromptSegments
from aerie_lab.engine.performance_model.step_sequence import StepSequence

_UNSET_TIME = math.nan


@dataclass(frozen=True)
class EngineSettings:
    """An engine's limits, named as vLLM's flags are."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 32768
    block_size: int = 16
    num_blocks: int = 20_000
    """KV cache blocks."""
    num_speculative_tokens: int | None = None
    """K; None: speculation is off."""
    k_schedule: tuple[tuple[int, int, int], ...] | None = None
    """(first batch, last batch, K), ...: vLLM's num_speculative_tokens_per_batch_size."""
    drops_last_block: bool = True
    """EAGLE-style drafters need the last cached block computed again."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        held = (self.num_blocks - 1) * self.block_size
        if held < self.max_model_len:
            raise ValueError(
                f"To serve at least one request with the model's max seq len ({self.max_model_len}), {self.max_model_len} tokens "
                f"of KV cache are needed, which is more than there are ({held}): give a smaller max_model_len or more blocks."
            )
        if self.max_num_batched_tokens <= (self.num_speculative_tokens or 0):
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: give more than num_speculative_tokens "
                f"({self.num_speculative_tokens})."
            )

    def build_k_table(self) -> list[int] | None:
        """K by number of scheduled requests, index 0 unused: gaps and the tail carry on, and K is capped, as in vLLM
        (v1/spec_decode/dynamic/utils.py)."""
        if self.k_schedule is None or self.num_speculative_tokens is None:
            return None
        table = [0] * (self.max_num_seqs + 1)
        ranges = iter(sorted(self.k_schedule))
        current = next(ranges)
        following = next(ranges, None)
        for batch in range(1, self.max_num_seqs + 1):
            if following is not None and batch >= following[0]:
                current, following = following, next(ranges, None)
            table[batch] = min(current[2], self.num_speculative_tokens)
        return table


@dataclass(eq=False, slots=True)
class Request:
    """One request, and what the frontend and the scheduler know of it."""

    name: str
    prompt_tokens: int
    max_tokens: int
    acceptance: Acceptance
    stop_after: int | None = None
    """Tokens after which the model ends its answer; None: at `max_tokens`."""
    segments: PromptSegments = ()
    """The prompt as the prefix cache sees it."""
    cache_salt: str | None = None
    """Separates the prompt from those with another salt in the prefix cache, once the engine has it."""
    arrival_time: float = 0.0
    # progress
    logit_effect: float = 0.0
    generated_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    kv_blocks: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    # times
    scheduled_time: float = _UNSET_TIME
    first_token_time: float = _UNSET_TIME
    last_token_time: float = _UNSET_TIME
    max_answer_tokens: int = 0
    """Tokens after which the answer ends, for whatever reason."""
    survival: FloatArray | None = None
    """S_1..S_K with the effect and the drift."""
    step_sequence: StepSequence | None = None
    """Its next steps, as far as they are drawn."""
    accepted_by_step: list[int] | None = None
    """Accepted draft tokens of each verification step, beyond the answer's end too; None: they are not recorded."""
    drafted_by_step: list[int] = field(default_factory=list)
    """Draft tokens of each of these steps."""

    def record_steps(self, accepted: Iterable[int], drafted: int) -> None:
        """Record verification steps with this number of draft tokens each."""
        if self.accepted_by_step is not None:
            self.accepted_by_step += accepted
            self.drafted_by_step += [drafted] * (len(self.accepted_by_step) - len(self.drafted_by_step))

    @property
    def total_tokens(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the last token has still to be computed."""
        return self.computed_tokens < self.total_tokens - 1 or not self.generated_tokens

    @property
    def time_per_output_token(self) -> float:
        """Mean over the answer without its first token; 0 for an answer of one token, as in vLLM."""
        return (self.last_token_time - self.first_token_time) / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0
