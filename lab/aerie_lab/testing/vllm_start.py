"""The environment of a real vLLM on CPU that starts in half the processor time, for tests and benchmarks beside other work.

vLLM on CPU imports itself in each of its three processes: 48 s of a processor for a start, 23 s where two of them are forked
(AMD EPYC, 2 cores). Not guaranteed: the start of vLLM as it is released; vLLM in pods of the lab starts like that.
"""

from __future__ import annotations

import os
from pathlib import Path

FORKED_FOLDER = Path(__file__).parent / "forked_vllm"
"""Folder of the module that lets vLLM's processes fork."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Five seconds by default, as long as httpx keeps one: on busy cores a request would meet a connection that is closing.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3900",
    "OMP_NUM_THREADS": "1",
}
"""The environment of docs/how-to/vllm-on-cpu.md, with one computing thread on any core, and a long limit of idle connections."""


def build_environment(*folders: Path) -> dict[str, str]:
    """Return the environment of this process with ENVIRONMENT, and a PYTHONPATH of these folders with forked processes."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (FORKED_FOLDER, *folders)))}
