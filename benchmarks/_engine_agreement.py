"""Part of the benchmark `engine`: how far the simulator is from real vLLM on the same traffic, measured as tests/vllm does it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from aerie_lab.binaries import ensure
from aerie_lab.testing.agreement import compared, difference, length, measured, per_token


def agreement() -> dict[str, float]:
    """Per cent, without sign. Installs vLLM where it is not there yet; prints the table of docs/simulator.md."""
    vllm = ensure("vllm", lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as scratch:
        pair = compared(vllm, Path(scratch))
    for kind, report in pair.reports.items():
        assert not report.errors, (kind, report.errors)
    print(measured(pair))
    return {
        "agreement_al_pct": round(100 * abs(difference(pair, length)), 2),
        "agreement_tpot_pct": round(100 * abs(difference(pair, per_token)), 2),
    }
