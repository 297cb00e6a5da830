"""Parts of Markdown that the generated pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GENERATED = "<!-- Generated from {source} by `make crds`. Change that, not this file. -->"
"""First line of a generated page."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A cell may contain `|`, and its line breaks become spaces."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def join_parts(*parts: str) -> str:
    """Return the parts of a page with an empty line between them."""
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
