"""Mends sampling with speculation on vLLM's CPU backend: a general plugin of vLLM, which loads it in every process.

The fault (vLLM issue 55005, open; 0.32.0 and 0.33.0): where Triton is absent, `_expand_kernel_impl` in
vllm/utils/cpu_triton_utils.py spreads a value of each request over the request's draft tokens. It hands `_ensure_int64(output)`
to the C++ kernel, for a float or int32 tensor a copy that is thrown away. So `expand_batch_to_tokens` in
vllm/v1/sample/rejection_sampler.py returns uninitialised memory, and the logits are divided by it as temperature and cut by it
as top_k and top_p: requests with a temperature above 0 do not follow the target's distribution, and acceptance is arbitrary.

Guarantees: only the function of a release and a source text that are listed here is replaced; any other ends vLLM's start with
a sentence, because a mend of what is not known mends nothing. VLLM_PLUGINS="" starts vLLM without it. Not guaranteed: anything
about vLLM with Triton, which does not call the function.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from typing import Any

import torch

KNOWN = {
    "0.32.0": "cb72d4d389c5be6da303fd70bfd461aaacb238aa014a853e5fb49523fcd5056d",
    "0.33.0": "cb72d4d389c5be6da303fd70bfd461aaacb238aa014a853e5fb49523fcd5056d",
}
"""SHA-256 of the faulty function's source text, by release."""

NAME = "_expand_kernel_impl"


class MendError(Exception):
    """This vLLM is not one that the mend is for; the message is a sentence."""


def register() -> None:
    """The entry point. Raises MendError, which ends vLLM's start."""
    version = importlib.import_module("vllm").__version__
    mend(importlib.import_module("vllm.utils.cpu_triton_utils"), version)
    logging.getLogger(f"vllm.{__name__}").info("vLLM issue 55005: sampling with speculation on CPU is mended")


def mend(module: Any, version: str) -> None:
    """Replace the function in `module`; nothing to do where that was done. Raises MendError."""
    present = getattr(module, NAME, None)
    if present is expand:
        return
    release = version.partition("+")[0]
    if release not in KNOWN:
        raise MendError(
            f"vLLM is {version}, and the lab mends sampling on CPU (vLLM issue 55005) in {' and '.join(KNOWN)}: install one of "
            f'these, or set VLLM_PLUGINS="" and send no request with a temperature above 0 while it speculates.'
        )
    digest = hashlib.sha256(inspect.getsource(present).strip().encode()).hexdigest() if present is not None else "absent"
    if digest != KNOWN[release]:
        raise MendError(
            f"the source of {NAME} in vLLM {version} has the digest {digest[:12]}, and the lab mends {KNOWN[release][:12]} (vLLM "
            f'issue 55005): install vLLM {release} as it was released, or set VLLM_PLUGINS="" if the change is a mend of its own.'
        )
    setattr(module, NAME, expand)


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
