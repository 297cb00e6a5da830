"""The table of checks: a check is one decorated function, and nothing else has to know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from aerie.engine.preflight.input import PreflightInput
from aerie.engine.preflight.report import CheckResult, Finding, Severity, skip

CheckFunction = Callable[[PreflightInput], Iterable[CheckResult]]


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    id: str
    title: str
    rationale: str
    """What happens without it."""
    max_severity: Severity
    """The worst that it can say."""
    source: str
    """Where the fact is from: a vLLM pull request, issue or source file, a measurement, a paper."""
    function: CheckFunction

    def run(self, inputs: PreflightInput) -> Iterator[Finding]:
        outcomes = list(self.function(inputs))
        assert outcomes, f"check {self.id} said nothing"  # a check says what it saw, also when all is well
        return (Finding(self.id, self.title, found.severity, found.evidence, found.fix) for found in outcomes)


CHECKS: dict[str, Check] = {}
"""By id, in the order of the modules that hold them."""


def register_check(
    check_id: str, title: str, *, rationale: str, max_severity: Severity, source: str
) -> Callable[[CheckFunction], CheckFunction]:
    """Adds a function to the table. It yields what it found, and `passed(...)` when it found nothing wrong."""

    def add(look: CheckFunction) -> CheckFunction:
        assert check_id not in CHECKS, f"two checks are called {check_id}"
        CHECKS[check_id] = Check(check_id, title, rationale, max_severity, source, look)
        return look

    return add


def eagle3_only(function: CheckFunction) -> CheckFunction:
    """For a check that is about EAGLE 3 drafters: anything else is skipped, with a word why."""

    def guarded(subject: PreflightInput) -> Iterable[CheckResult]:
        if subject.drafter is None:
            return [skip("there is no drafter")]
        if subject.method not in (None, "eagle3"):
            return [skip(f"the method is {subject.method}, and this is about eagle3")]
        return function(subject)

    return guarded
