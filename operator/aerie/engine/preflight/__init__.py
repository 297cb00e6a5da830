"""Preflight: checks for problems that are visible before a GPU is requested, in two configs, weight headers and the arguments.

    report = run_preflight(PreflightInput(target, drafter, version, speculative_config=..., arguments=..., ...))
    report.passed          whether an engine may be started
    report.findings        every check with its evidence and its fix

Guarantees: pure; every check of `CHECKS` is in every report. A fact that configs and headers do not
contain is a finding of severity info. Not guaranteed: that a drafter which passes is good. Only live traffic shows its
acceptance.
"""

from __future__ import annotations

from aerie.engine.preflight import checks as _checks  # noqa: F401 - the import fills the table
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import CHECKS, Check
from aerie.engine.preflight.report import Finding, PreflightReport, Severity

__all__ = ["CHECKS", "Check", "Finding", "PreflightInput", "PreflightReport", "Severity", "list_checks", "run_preflight"]


def list_checks() -> list[Check]:
    """Return all checks, sorted by number."""
    return sorted(CHECKS.values(), key=lambda check: int(check.id[1:]))


def run_preflight(inputs: PreflightInput) -> PreflightReport:
    """Run every check. Never raises: unreadable checkpoints and arguments are errors before there is a PreflightInput."""
    return PreflightReport(tuple(finding for check in list_checks() for finding in check.run(inputs)))
