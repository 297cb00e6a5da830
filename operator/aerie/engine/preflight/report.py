"""The results of one check, and the report of all checks: plain data, and the messages for users.

Guarantees: every check of the table has at least one finding in a report.
A check that lacks its input has a finding of severity info.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """The severity of a finding; the value is its spelling in JSON."""

    ERROR = "error"
    """The engine would fail, or serve with a harmful drafter: no engine is started."""
    WARNING = "warning"
    """The engine will run, but probably not as intended."""
    INFO = "info"
    """Advice, or a fact that configs and headers do not show, so that it could not be checked."""
    PASS = "pass"
    SKIP = "skip"
    """The check does not apply to this deployment."""

    @property
    def glyph(self) -> str:
        return {"error": "✗", "warning": "!", "info": "·", "pass": "✓", "skip": "-"}[self.value]


@dataclass(frozen=True)
class CheckResult:
    """One result of a check."""

    severity: Severity
    evidence: str
    """The observation with its values: a sentence without a full stop."""
    fix: str = ""
    """The action to take: an imperative without a full stop. Every error and warning has one."""
    is_general: bool = False
    """Whether every deployment with speculation gets it, because neither configs nor headers show the fact."""


def error(evidence: str, fix: str) -> CheckResult:
    return CheckResult(Severity.ERROR, evidence, fix)


def warning(evidence: str, fix: str) -> CheckResult:
    return CheckResult(Severity.WARNING, evidence, fix)


def info(evidence: str, fix: str = "") -> CheckResult:
    return CheckResult(Severity.INFO, evidence, fix)


def general_advice(evidence: str) -> CheckResult:
    """Return a note that every deployment with speculation gets."""
    return CheckResult(Severity.INFO, evidence, is_general=True)


def pass_check(evidence: str) -> CheckResult:
    return CheckResult(Severity.PASS, evidence)


def skip(evidence: str) -> CheckResult:
    return CheckResult(Severity.SKIP, evidence)


@dataclass(frozen=True)
class Finding:
    """A result together with its check."""

    id: str
    title: str
    severity: Severity
    evidence: str
    fix: str
    is_general: bool = False
    """See `CheckResult`."""

    @property
    def message(self) -> str:
        """The finding as one line.

        >>> Finding("C6", "one norm before fc", Severity.ERROR, "both are true", "set one to false").message
        '✗ C6 one norm before fc: both are true. Set one to false.'
        """
        line = f"{self.severity.glyph} {self.id} {self.title}: {self.evidence}."
        return f"{line} {self.fix[:1].upper()}{self.fix[1:]}." if self.fix else line

    def to_json(self) -> dict[str, str]:
        return {
            "id": self.id,
            "title": self.title,
            "severity": self.severity.value,
            "evidence": self.evidence,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class PreflightReport:
    """All findings, in the order of the table of checks."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether an engine may be started."""
        return not any(self.with_severity(Severity.ERROR))

    def with_severity(self, severity: Severity) -> Iterator[Finding]:
        return (finding for finding in self.findings if finding.severity is severity)

    @property
    def summary(self) -> str:
        """One line: the outcome, and the number of findings by severity."""
        counts = {severity: len(list(self.with_severity(severity))) for severity in Severity}
        labels = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
        numbers = [
            f"{counts[severity]} {label}{'s' if counts[severity] > 1 else ''}"
            for severity, label in labels.items()
            if counts[severity]
        ]
        return f"preflight {'passed' if self.passed else 'failed'}: {', '.join([*numbers, f'{counts[Severity.PASS]} passed'])}"

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "summary": self.summary, "findings": [finding.to_json() for finding in self.findings]}
