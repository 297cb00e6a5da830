"""docs/preflight.md has the table of checks that the code has."""

from __future__ import annotations

from pathlib import Path

from aerie.engine.preflight import table

PAGE = Path(__file__).resolve().parents[4] / "docs" / "preflight.md"


def rendered() -> str:
    rows = [f"| {check.id} | {check.title} | {check.why} | {check.worst.value} | {check.source} |" for check in table()]
    return "\n".join(["| | check | why | at worst | source |", "|---|---|---|---|---|", *rows])


def test_table_in_the_docs_is_the_table_in_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- checks -->\n", "\n<!-- /checks -->"
    written = page[page.index(begin) + len(begin) : page.index(end)]
    assert written == rendered(), f"write this between the two marks of docs/preflight.md:\n{rendered()}"


def test_every_check_names_its_source() -> None:
    for check in table():
        assert check.source
        assert check.why
        assert "|" not in check.why + check.title + check.source
