"""Preflight: what can be known to go wrong before a GPU is asked for, from two configs, weight headers and the arguments.

    findings = run(Subject(target, drafter, version, speculative, arguments, ...))
    findings.ok            whether an engine may be started
    findings.findings      every check with its evidence and its way out

Guarantees: pure; every check of `CHECKS` is in every report; what configs and headers do not tell is a note that says so.
Not guaranteed: that a drafter which passes is any good. Acceptance is only known from live traffic.
"""

from __future__ import annotations

from aerie.engine.preflight import checks as _checks  # noqa: F401 - importing it fills the table
from aerie.engine.preflight.input import Subject
from aerie.engine.preflight.registry import CHECKS, Check
from aerie.engine.preflight.report import Finding, Report, Severity

__all__ = ["CHECKS", "Check", "Finding", "Report", "Severity", "Subject", "run", "table"]


def table() -> list[Check]:
    """All checks by number."""
    return sorted(CHECKS.values(), key=lambda check: int(check.id[1:]))


def run(subject: Subject) -> Report:
    """Every check on this subject. Never raises: what cannot be read was refused before there was a subject."""
    return Report(tuple(finding for check in table() for finding in check.findings(subject)))
