"""The table of checks: a check is one decorated function, and no other code has to name it."""

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
    """The consequence of the problem that it detects."""
    max_severity: Severity
    """The worst severity that it can return."""
    source: str
    """The source of the fact: a vLLM pull request, issue or source file, a measurement, a paper."""
    function: CheckFunction

    def run(self, inputs: PreflightInput) -> Iterator[Finding]:
        results = list(self.function(inputs))
        assert results, f"check {self.id} has no result"  # a check that passes returns its evidence too
        return (
            Finding(self.id, self.title, result.severity, result.evidence, result.fix, result.is_general) for result in results
        )


CHECKS: dict[str, Check] = {}
"""Checks by id, in the order of their modules."""


def register_check(
    check_id: str, title: str, *, rationale: str, max_severity: Severity, source: str
) -> Callable[[CheckFunction], CheckFunction]:
    """Add a function to the table. It yields its results, and `pass_check(...)` if there is no problem."""

    def register(function: CheckFunction) -> CheckFunction:
        assert check_id not in CHECKS, f"two checks are called {check_id}"
        CHECKS[check_id] = Check(check_id, title, rationale, max_severity, source, function)
        return function

    return register


def eagle3_only(function: CheckFunction) -> CheckFunction:
    """Wrap a check that is about EAGLE 3 drafters: for others it is skipped, with the reason."""

    def check_eagle3(inputs: PreflightInput) -> Iterable[CheckResult]:
        if inputs.drafter is None:
            return [skip("there is no drafter")]
        if inputs.method not in (None, "eagle3"):
            return [skip(f"the method is {inputs.method}, and the check applies to eagle3")]
        return function(inputs)

    return check_eagle3
