"""docs/preflight-checks.md has the table of checks that the code has."""

from __future__ import annotations

from pathlib import Path

from aerie.engine.preflight import list_checks

PAGE = Path(__file__).resolve().parents[4] / "docs" / "preflight-checks.md"


def render_table() -> str:
    rows = [
        f"| {check.id} | {check.title} | {check.rationale} | {check.max_severity.value} | {check.source} |"
        for check in list_checks()
    ]
    return "\n".join(["| | check | why | at worst | source |", "|---|---|---|---|---|", *rows])


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- checks -->\n", "\n<!-- /checks -->"
    table = page[page.index(begin) + len(begin) : page.index(end)]
    assert table == render_table(), f"write this between the two marks of docs/preflight-checks.md:\n{render_table()}"


def test_every_check_names_its_source() -> None:
    for check in list_checks():
        assert check.source
        assert check.rationale
        assert "|" not in check.rationale + check.title + check.source
