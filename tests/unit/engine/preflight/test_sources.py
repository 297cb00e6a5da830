"""Every check of preflight names its source, and fits into a row of docs/reference/preflight-checks.md, which has it."""

from __future__ import annotations

from aerie.engine.preflight import list_checks


def test_every_check_names_its_source() -> None:
    for check in list_checks():
        assert check.source
        assert check.rationale
        assert "|" not in check.rationale + check.title + check.source
