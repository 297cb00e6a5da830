"""What the last comparison of each drafter saw, as data: record.json. The page docs/reference/catalog.md shows it.

Guarantees: a comparison with rebuilt files never replaces one with published files. Writing the same comparisons on the same day
gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from aerie.engine.models.drafter_catalog import AutomaticReason, CatalogEntry
from scripts.catalog.compare import Comparison, Verdict

FILE = Path(__file__).with_name("record.json")
Basis = Literal["published", "rebuilt"]
"""Where the files were from: the repositories, or `rebuilt.toml` and the lab's Hub."""


@dataclass(frozen=True)
class Record:
    """One drafter at its last comparison."""

    checked: str
    """The day."""
    basis: Basis
    commit: str
    licence: str
    verdicts: tuple[Verdict, ...]
    no_verdict: str = ""

    @property
    def passes(self) -> bool:
        """Whether preflight passed for the newest release."""
        return bool(self.verdicts) and not self.verdicts[-1].errors

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Record:
        verdicts = tuple(
            Verdict(**{**verdict, "errors": tuple(verdict["errors"]), "warnings": tuple(verdict["warnings"])})
            for verdict in document["verdicts"]
        )
        return cls(**{**document, "verdicts": verdicts})


def read_records(file: Path = FILE) -> dict[str, Record]:
    """Return the records by repository."""
    return {repository: Record.from_json(document) for repository, document in json.loads(file.read_text()).items()}


def write_records(records: Mapping[str, Record], file: Path = FILE) -> None:
    """Write the records, sorted by repository."""
    file.write_text(json.dumps({name: records[name].to_json() for name in sorted(records)}, indent=1) + "\n")


def build_record(comparison: Comparison, checked: str, basis: Basis) -> Record:
    """Return the record of a comparison."""
    return Record(checked, basis, comparison.commit, comparison.licence, comparison.verdicts, comparison.no_verdict)


def update_records(records: Mapping[str, Record], new: Mapping[str, Record]) -> dict[str, Record]:
    """Return the records with new ones: rebuilt files never replace published ones."""
    published = {name for name, record in records.items() if record.basis == "published"}
    return {**records, **{name: record for name, record in new.items() if record.basis == "published" or name not in published}}


def describe_changes(old: Record | None, new: Record) -> Iterator[str]:
    """Yield what changed since the last comparison."""
    if old is None:
        yield "first comparison"
        return
    for name, before, after in (
        ("files", old.basis, new.basis),
        ("commit", old.commit, new.commit),
        ("licence", old.licence, new.licence),
        ("verdict", format_verdicts(old), format_verdicts(new)),
    ):
        if before != after:
            yield f"{name}: {before or 'none'} on {old.checked}, now {after or 'none'}"


def find_false_check(entry: CatalogEntry, record: Record | None) -> Iterator[str]:
    """Yield what speaks against the row's automatic = "checked", with the fix; nothing for a row without it."""
    if entry.automatic is not AutomaticReason.CHECKED:
        return
    fix = "remove automatic and checked"
    if record is None or record.basis != "published":
        yield f"automatic: no comparison with published files is recorded: {fix}"
    elif record.commit != entry.revision:
        yield f"automatic: {record.commit or 'no commit'} was compared, and the row has {entry.revision}: {fix}"
    elif not record.passes:
        yield f"automatic: preflight does not pass with the newest release ({format_verdicts(record)}): {fix}"
    elif record.checked < entry.checked:
        yield f"checked: the last comparison was on {record.checked}, and the row says {entry.checked}: correct the day"


def format_verdicts(record: Record) -> str:
    """Return the verdicts as one line, or the reason why there are none."""
    return "; ".join(map(str, record.verdicts)) or f"not checked: {record.no_verdict}"
