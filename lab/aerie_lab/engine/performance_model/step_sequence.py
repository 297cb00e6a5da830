"""A request's next steps, drawn in advance: its accepted tokens depend on its own drafts, and on no other request.

So the steps of a batch are sums over its requests' sequences, and the counts are the same however time is cut into calls. A
sequence holds for one number of drafts. When that changes, the rest is discarded and drawn again. This changes no distribution,
because nothing that depends on the rest has happened yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aerie_lab.engine.performance_model.acceptance import FloatArray

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepSequence:
    """Steps of one request, each with the same number of drafts."""

    draft_tokens: int
    step_tokens: IntArray
    """Tokens of each step, before the answer is cut at its end: accepted ones and one of the target."""
    cached_tokens: IntArray
    """Tokens of the request in the KV cache before the first step, and after each."""
    steps_taken: int = 0
    """Steps that are over."""

    @property
    def steps_left(self) -> int:
        """Steps still to come."""
        return len(self.step_tokens) - self.steps_taken

    def truncate(self, steps_left: int) -> None:
        """Discard the steps after the next `steps_left`."""
        end = self.steps_taken + steps_left
        self.step_tokens, self.cached_tokens = self.step_tokens[:end], self.cached_tokens[: end + 1]


def draw_step_sequence(
    random: np.random.Generator, survival: FloatArray, cached_tokens: int, remaining_tokens: int, max_steps: int
) -> StepSequence:
    """Draw the steps of a request with `cached_tokens`, and `remaining_tokens` to come, to its end or for `max_steps`.

    `survival` has S_1 >= S_2 >= ... of its drafts.
    """
    drafts, steps = len(survival), min(remaining_tokens, max_steps) + 1
    if drafts:
        # One uniform number per step decides how many are accepted: as many as there are survivals above it.
        tokens = drafts + 1 - survival[::-1].searchsorted(random.random(steps), side="right")
    else:  # draws no random numbers, as steps that are completed one by one draw none either
        tokens = np.ones(steps, dtype=np.int64)
    tokens[0] = cached_tokens  # before the first step
    emitted, tokens = tokens[1:], np.add.accumulate(tokens)
    if tokens.item(-1) >= cached_tokens + remaining_tokens:
        last = int(tokens.searchsorted(cached_tokens + remaining_tokens))
        emitted, tokens = emitted[:last], tokens[: last + 1]
        tokens[-1] = cached_tokens + remaining_tokens
    return StepSequence(drafts, emitted, tokens)
