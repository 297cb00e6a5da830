"""What an engine is asked for, and its limits: data of the replica's state machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aerie_lab.engine.acceptance import Acceptance, Floats
from aerie_lab.engine.path import Path
from aerie_lab.engine.prefix import Segments

_NO_TIME = math.nan


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
    schedule: tuple[tuple[int, int, int], ...] | None = None
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

    def lookup(self) -> list[int] | None:
        """K by number of scheduled requests, index 0 unused: gaps and the tail carry on, and K is capped, as in vLLM
        (v1/spec_decode/dynamic/utils.py)."""
        if self.schedule is None or self.num_speculative_tokens is None:
            return None
        table = [0] * (self.max_num_seqs + 1)
        ranges = iter(sorted(self.schedule))
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
    """The model ends its answer by itself after so many tokens; None: it goes on to `max_tokens`."""
    segments: Segments = ()
    """The prompt as the prefix cache sees it."""
    arrival: float = 0.0
    # progress
    effect: float = 0.0
    generated: int = 0
    computed: int = 0
    cached: int = 0
    drafts: int = 0
    blocks: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    # times
    scheduled: float = _NO_TIME
    first_token: float = _NO_TIME
    last_token: float = _NO_TIME
    limit: int = 0
    """Tokens after which the answer ends, for whatever reason."""
    survival: Floats | None = None
    """S_1..S_K with the effect and the drift."""
    path: Path | None = None
    """Its next steps, as far as they are drawn."""

    @property
    def tokens(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + self.generated

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token has still to be computed."""
        return self.computed < self.tokens - 1 or not self.generated

    @property
    def time_per_output_token(self) -> float:
        """Mean over the answer without its first token; 0 for an answer of one token, as in vLLM."""
        return (self.last_token - self.first_token) / (self.generated - 1) if self.generated > 1 else 0.0
