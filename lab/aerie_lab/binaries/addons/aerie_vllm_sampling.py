"""Mends sampling with speculation on vLLM's CPU backend: a general plugin of vLLM, which loads it in every process.

The faults, both of 0.32.0 and 0.33.0 and both only where Triton is absent:

- vLLM issue 55005, open: `_expand_kernel_impl` in vllm/utils/cpu_triton_utils.py spreads a value of each request over the
  request's draft tokens. It hands `_ensure_int64(output)` to the C++ kernel, for a float or int32 tensor a copy that is thrown
  away. So `expand_batch_to_tokens` in vllm/v1/sample/rejection_sampler.py returns uninitialised memory; the logits are divided
  by it as temperature and cut by it as top_k and top_p: requests with a temperature above 0 do not follow the target's
  distribution, and acceptance is arbitrary.
- A step in which no request has a draft (a prompt's, for example) ends the engine where some request has a top_k and none a
  top_p: `apply_top_k_only` in vllm/v1/sample/ops/topk_topp_sampler.py takes the maximum of an empty tensor. A lone request with a
  top_k suffices; beside others it depends on which share the step, so on the machine's speed.

Guarantees: only a function of a release and a source text that are listed here is replaced; any other ends vLLM's start with a
sentence, because a mend of what is not known mends nothing. VLLM_PLUGINS="" starts vLLM without it. Not guaranteed: anything
about vLLM with Triton, which calls neither function.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class MendError(Exception):
    """This vLLM is not one that the mend is for; the message is a sentence."""


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,  # noqa: ARG001, N803 - the launch names it
) -> None:
    """Write each request's value once for each of its draft tokens, whatever the type.

    `output` [tokens] is written; `input_val` [requests]; `cu_num_tokens` [requests] are the cumulated numbers of draft tokens. A
    value equal to `replace_from` is written as `replace_to`: a greedy request's temperature 0 becomes 1. That is what the Triton
    kernel `expand_kernel` does (vllm/v1/sample/rejection_sampler.py).
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(torch.repeat_interleave(values, counts, output_size=output.shape[0]))


def unless_empty(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`apply_top_k_only` that leaves logits [0, vocabulary] as they are."""

    def top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return original(logits, k) if len(logits) else logits

    return top_k_only


@dataclass(frozen=True)
class Mend:
    """A faulty function of vLLM and what stands in for it."""

    module: str
    name: str
    digests: dict[str, str]
    """SHA-256 of the faulty function's source text, by release."""
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
    """What stands in for it, made from it; of this module."""


MENDS = (
    Mend(
        "vllm.utils.cpu_triton_utils",
        "_expand_kernel_impl",
        dict.fromkeys(("0.32.0", "0.33.0"), "cb72d4d389c5be6da303fd70bfd461aaacb238aa014a853e5fb49523fcd5056d"),
        lambda _: expand,
    ),
    Mend(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "apply_top_k_only",
        dict.fromkeys(("0.32.0", "0.33.0"), "2d58824a27f72f0a9f8f70b2d80fc212604e4d6177694209efce7aca8d05d57b"),
        unless_empty,
    ),
)


def register() -> None:
    """The entry point. Raises MendError, which ends vLLM's start."""
    version = importlib.import_module("vllm").__version__
    for one in MENDS:
        apply(one, importlib.import_module(one.module), version)
    logging.getLogger(f"vllm.{__name__}").info("sampling with speculation on CPU is mended (vLLM issue 55005, and empty steps)")


def apply(mend: Mend, module: Any, version: str) -> None:
    """Replace the function in `module`; nothing to do where that was done. Raises MendError."""
    present: Any = getattr(module, mend.name, None)
    if getattr(present, "__module__", None) == __name__:
        return
    release = version.partition("+")[0]
    if release not in mend.digests:
        raise MendError(
            f"vLLM is {version}, and the lab mends sampling on CPU (vLLM issue 55005) in {' and '.join(mend.digests)}: install "
            f'one of these, or set VLLM_PLUGINS="" and send no request with a temperature above 0 while it speculates.'
        )
    if (found := digest(present)) != mend.digests[release]:
        raise MendError(
            f"the source of {mend.name} in vLLM {version} has the digest {found[:12]}, and the lab mends "
            f"{mend.digests[release][:12]}: install vLLM {release} as it was released, or set VLLM_PLUGINS="
            f'"" if the change is a mend of its own.'
        )
    setattr(module, mend.name, mend.replacement(present))


def digest(function: Callable[..., Any] | None) -> str:
    """SHA-256 of the function's source text, or "absent"."""
    return "absent" if function is None else hashlib.sha256(inspect.getsource(function).strip().encode()).hexdigest()
