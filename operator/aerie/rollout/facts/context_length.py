"""Detection of a canary that rejects requests the stable pods serve, because its engine's context is shorter.

From 0.33 on, vLLM on its V2 model runner cuts the target's context to a drafter's positions where the drafter's RoPE is of a kind
whose table it does not extend (YaRN, longrope, dynamic). It logs only a warning (vllm/config/vllm.py,
`_limit_max_model_len_to_draft`). Longer requests then get status 400, on the canary only, and no compared metric shows it: they
never become steps, and vLLM counts them in no metric. Preflight (C5) rejects what it can read from the drafter's config; this
module checks what the engines report.

Guarantees: pure. A length that spec.engine.args requests by --max-model-len is no fault. Where the length of an arm is unknown,
the message is empty. Not guaranteed: lengths of pods that were not queried, where the engine fits the context to each GPU
(`auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aerie.engine import arguments
from aerie.engine.arguments import ArgumentError


@dataclass(frozen=True, slots=True)
class ContextLengths:
    """Longest request in tokens, prompt and answer together, that the engines of each arm serve."""

    canary: int
    control: int
    """Minimum over the queried pods of the stable revision."""


def shorter_context_message(context_lengths: ContextLengths | None, args: Sequence[str]) -> str:
    """Return the message that the canary serves only shorter requests than the stable pods, with the fix.

    Empty where it does not, where a length is unknown, or where `args`, the canary's spec.engine.args, request it.
    """
    if (
        context_lengths is None
        or context_lengths.canary >= context_lengths.control
        or _is_requested(args, context_lengths.canary)
    ):
        return ""
    return (
        f"Its context length is {context_lengths.canary} tokens (max_model_len of /v1/models), that of the stable pods "
        f"{context_lengths.control}: it alone rejects requests in between, with status 400. "
        "vLLM 0.33 and newer limit the context to the positions of a drafter with YaRN or longrope. Use a drafter with more "
        f"positions; or, if the shorter context is intended, set --max-model-len={context_lengths.canary} in spec.engine.args."
    )


def _is_requested(args: Sequence[str], length: int) -> bool:
    """Return whether the arguments request a context of at most `length` tokens."""
    try:
        max_model_len = arguments.parse_arguments(list(args)).max_model_len
    except ArgumentError:
        return False
    return max_model_len is not None and 0 < max_model_len <= length
