"""vLLM's processes on CPU are forked from its server in place of importing vLLM again: half the processor time of a start.

Python imports this module at its start where the folder is in PYTHONPATH (../vllm_start.py). vLLM forks on GPUs by default, and
sets `spawn` on CPU (vllm/platforms/cpu.py, `check_and_update_config`, 0.32.0 and 0.33.0), because workers read OMP_NUM_THREADS
and the bound processors when they import torch. Forked workers have both from the server: so the caller has to set
OMP_NUM_THREADS and VLLM_CPU_OMP_THREADS_BIND=nobind.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

_get_context = multiprocessing.get_context


def get_context(method: str | None = None) -> BaseContext:
    """Return the context of `fork` in place of `spawn`'s."""
    return _get_context("fork" if method == "spawn" else method)


multiprocessing.get_context = get_context  # type: ignore[assignment]
