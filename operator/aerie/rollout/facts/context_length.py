"""Whether a canary refuses requests that the stable pods take, because its engine's context is shorter.

From 0.33 on, vLLM on its V2 model runner cuts the target's context to a drafter's positions where the drafter's RoPE is of a kind
whose table it does not extend (YaRN, longrope, dynamic), and says so by a warning alone (vllm/config/vllm.py,
`_limit_max_model_len_to_draft`). Longer requests then get status 400, on the canary only, and no figure that is compared shows
it: they never become steps, and vLLM counts them in no metric. Preflight (C5) refuses what it can read from the drafter's config;
here counts what the engines say.

Guarantees: pure. What spec.engine.args asks for by --max-model-len is no fault. Where the length of an arm is not known, nothing
is said. Not guaranteed: lengths of pods that were not asked, where the engine fits the context to each GPU (`auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aerie.engine import arguments
from aerie.engine.arguments import ArgumentError


@dataclass(frozen=True, slots=True)
class ContextLengths:
    """Tokens of the longest request, prompt and answer together, that the engines of each arm take."""

    canary: int
    control: int
    """Of the pods of the stable revision that were asked, the least."""


def shorter_context_message(context_lengths: ContextLengths | None, args: Sequence[str]) -> str:
    """That the canary takes shorter requests than the stable pods, as sentences with the way out; empty where it does not, it is
    not known, or `args`, the canary's spec.engine.args, ask for it."""
    if (
        context_lengths is None
        or context_lengths.canary >= context_lengths.control
        or _is_requested(args, context_lengths.canary)
    ):
        return ""
    return (
        f"Its engine takes requests of up to {context_lengths.canary} tokens (max_model_len of /v1/models), and that of the stable pods up "
        f"to {context_lengths.control}: requests in between are refused by the canary alone, with status 400. vLLM 0.33 and newer cut the "
        "context to the positions of a drafter with YaRN or longrope. Use a drafter with more positions; or, if the shorter "
        f"context is meant, set --max-model-len={context_lengths.canary} in spec.engine.args."
    )


def _is_requested(args: Sequence[str], length: int) -> bool:
    """Whether the engine takes what it was asked to take."""
    try:
        asked = arguments.parse_arguments(list(args)).max_model_len
    except ArgumentError:
        return False
    return asked is not None and 0 < asked <= length
