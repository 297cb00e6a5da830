"""How a request's next steps go, drawn ahead: what is accepted of it depends on no other request, only on its own drafts.

So the steps of a batch are sums over its requests' paths, and the counts are the same however time is cut into calls. A path
holds for one number of drafts: where that changes, the rest is thrown away and drawn anew, which changes no distribution, for
nothing has happened yet that depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aerie_lab.engine.acceptance import Floats

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Path:
    """Steps of one request, each with the same number of drafts."""

    drafts: int
    emitted: Ints
    """Tokens of each step, before the answer is cut at its end: accepted ones and one of the target."""
    cached: Ints
    """Tokens of the request in the KV cache before the first step, and after each."""
    taken: int = 0
    """Steps that are over."""

    @property
    def left(self) -> int:
        """Steps still to come."""
        return len(self.emitted) - self.taken


def draw(random: np.random.Generator, survival: Floats, cached: int, left: int, most: int) -> Path:
    """The path of a request with `cached` tokens and `left` to come, to its end or for `most` steps.

    `survival` has S_1 >= S_2 >= ... of its drafts.
    """
    drafts, steps = len(survival), min(left, most) + 1
    if drafts:
        # One uniform number per step decides how many are accepted: as many as there are survivals above it.
        tokens = drafts + 1 - survival[::-1].searchsorted(random.random(steps), side="right")
    else:  # chance decides nothing, and is not asked: steps that are booked one by one do not ask it either
        tokens = np.ones(steps, dtype=np.int64)
    tokens[0] = cached  # before the first step
    emitted, tokens = tokens[1:], np.add.accumulate(tokens)
    if tokens.item(-1) >= cached + left:
        last = int(tokens.searchsorted(cached + left))
        emitted, tokens = emitted[:last], tokens[: last + 1]
        tokens[-1] = cached + left
    return Path(drafts, emitted, tokens)
