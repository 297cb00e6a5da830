"""Preflight: what can be known to go wrong before a GPU is asked for, from two configs, weight headers and the arguments.

    findings = run(Subject(target, drafter, version, speculative, arguments, ...))
    findings.ok            whether an engine may be started
    findings.findings      every check with its evidence and its way out

Guarantees: pure; every check of `CHECKS` is in every report; what configs and headers do not tell is a note that says so.
Not guaranteed: that a drafter which passes is any good. Acceptance is only known from live traffic.
"""

from __future__ import annotations

from aerie.engine.preflight import checks as _checks  # noqa: F401 - importing it fills the table
from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.registry import CHECKS, Check
from aerie.engine.preflight.report import Finding, PreflightReport, Severity

__all__ = ["CHECKS", "Check", "Finding", "PreflightInput", "PreflightReport", "Severity", "list_checks", "run_preflight"]


def list_checks() -> list[Check]:
    """All checks by number."""
    return sorted(CHECKS.values(), key=lambda check: int(check.id[1:]))


def run_preflight(inputs: PreflightInput) -> PreflightReport:
    """Every check on this subject. Never raises: what cannot be read was refused before there was a subject."""
    return PreflightReport(tuple(finding for check in list_checks() for finding in check.run(inputs)))
