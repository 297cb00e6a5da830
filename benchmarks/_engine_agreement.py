"""Part of the benchmark `engine`: how the simulator differs from real vLLM on the same traffic, measured as in tests/vllm."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from aerie_lab.binaries import ensure_family
from aerie_lab.testing.agreement import (
    acceptance_length,
    mean_time_per_output_token,
    relative_difference,
    render_agreement_table,
    run_agreement,
)


def agreement() -> dict[str, float]:
    """Measure absolute differences in per cent, and print the table of docs/reference/simulator.md.

    Installs vLLM if it is missing.
    """
    vllm = ensure_family("vllm", lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as scratch:
        pair = run_agreement(vllm, Path(scratch))
    for kind, report in pair.reports.items():
        assert not report.errors, (kind, report.errors)
    print(render_agreement_table(pair))
    return {
        "agreement_al_pct": round(100 * abs(relative_difference(pair, acceptance_length)), 2),
        "agreement_tpot_pct": round(100 * abs(relative_difference(pair, mean_time_per_output_token)), 2),
    }
