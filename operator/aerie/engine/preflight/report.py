"""What a check says, and what all checks together say: plain data, and the sentences that a person reads.

Guarantee: every check of the table has at least one finding in a report. What could not be looked at is a note that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """How bad a finding is; the value is its word in JSON."""

    REFUSE = "refuse"
    """It would fail, or serve with a drafter that does harm: no engine is started."""
    WARN = "warn"
    """It will run, and probably not as meant."""
    NOTE = "note"
    """Something to know, or something that could not be checked from configs and headers."""
    PASS = "pass"
    SKIP = "skip"
    """The check is about something that this deployment does not have."""

    @property
    def glyph(self) -> str:
        return {"refuse": "✗", "warn": "!", "note": "·", "pass": "✓", "skip": "-"}[self.value]


@dataclass(frozen=True)
class CheckResult:
    """One thing that a check found."""

    severity: Severity
    evidence: str
    """What was seen, with its values: a sentence without a full stop."""
    fix: str = ""
    """What to do: an imperative without a full stop. Given for every refusal and warning."""


def refuse(evidence: str, fix: str) -> CheckResult:
    return CheckResult(Severity.REFUSE, evidence, fix)


def warn(evidence: str, fix: str) -> CheckResult:
    return CheckResult(Severity.WARN, evidence, fix)


def note(evidence: str, fix: str = "") -> CheckResult:
    return CheckResult(Severity.NOTE, evidence, fix)


def pass_check(evidence: str) -> CheckResult:
    return CheckResult(Severity.PASS, evidence)


def skip(evidence: str) -> CheckResult:
    return CheckResult(Severity.SKIP, evidence)


@dataclass(frozen=True)
class Finding:
    """An outcome with the check that it comes from."""

    id: str
    title: str
    severity: Severity
    evidence: str
    fix: str

    @property
    def message(self) -> str:
        """The finding as one line.

        >>> Finding("C6", "one norm before fc", Severity.REFUSE, "both are true", "set one to false").sentence
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
            "wayOut": self.fix,
        }


@dataclass(frozen=True)
class PreflightReport:
    """All findings, in the order of the table."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether an engine may be started."""
        return not any(self.with_severity(Severity.REFUSE))

    def with_severity(self, severity: Severity) -> Iterator[Finding]:
        return (finding for finding in self.findings if finding.severity is severity)

    @property
    def summary(self) -> str:
        """One line: the verdict, and how many findings there are of each kind."""
        counts = {severity: len(list(self.with_severity(severity))) for severity in Severity}
        words = {Severity.REFUSE: "refused", Severity.WARN: "to look at", Severity.NOTE: "notes", Severity.PASS: "passed"}
        found = ", ".join(f"{counts[severity]} {word}" for severity, word in words.items() if counts[severity])
        return f"preflight {'passed' if self.ok else 'refused'}: {found}"

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "summary": self.summary, "findings": [finding.to_json() for finding in self.findings]}
