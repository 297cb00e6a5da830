"""The page of published drafters, generated from the catalog and from the last comparison with their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aerie.engine.models.drafter_catalog import AutomaticReason, CatalogEntry, DrafterKind
from scripts.catalog.compare import RELEASES, find_entries
from scripts.catalog.record import Record, format_verdicts, read_records
from scripts.reference.markdown import GENERATED, join_parts, table

INTRODUCTION = """\
# Published drafters

This page lists the published EAGLE 3.1 drafters, and EAGLE 3 drafters that public set-ups use, with what is known of each.
`aerie catalog TARGET` lists those for one target ([how](../how-to/find-a-drafter.md)), and also acceptance lengths.

**Published files: {published} of {count} rows were compared with them.** The catalog was made without access to the Hub. Each
value is from a public source, which `operator/aerie/engine/models/catalog.toml` names. What no source has is "unknown".

* **commit:** the commit that public set-ups name. "Reported" means that a single set-up names it, or that the notes have another
  reason against it. A [resource without a drafter](../concepts/operator.md#drafter-selection) never gets a reported commit.
* **automatic:** whether a resource without a drafter may get the row. "Checked" and a day: preflight passed with the published
  files of drafter and target on that day ({checked} rows). "Earlier default": Aerie selected it before it required that, and
  its published files are unread ({earlier} rows). "No": write the drafter into the resource, or into an entry of your own.
* **licence:** as the model card declares it.
* **preflight:** the verdict by release of vLLM, {oldest} to {newest}, with vLLM's default arguments. "Passes" means no error.
  [preflight-checks.md](preflight-checks.md) has the codes.
* **source, read:** where the drafter was published, and when that was read.

"Rebuilt files" are configs and weight headers that were written from public descriptions (`scripts/catalog/rebuilt.toml`), and
served by the [lab's Hub](lab-pods.md). Their verdict can differ from that of the published files. "Not checked" means that no
description has enough of the config.

## Check this page

```
python -m scripts.catalog           # compares all rows with the Hub: commit, licence, kind, preflight's verdict
python -m scripts.catalog --write   # also writes the result, with its date
make crds                           # writes this page again
```

The command reads descriptions, configs and weight headers, never weights. It prints where a row and the files differ, with
the fix, and what has changed since the last comparison. Gated targets need `HF_TOKEN`; without it, their rows have no verdict.
The exit status is 0 if all rows agree, 1 if some differ, and 2 if the Hub cannot be read. With `--rebuilt` the command needs no
network. It was tested with the lab's Hub, and never ran against the real one."""


def page() -> str:
    """Return the page as Markdown."""
    records = read_records()
    entries = find_entries()
    published = sum(records[str(entry.repo)].basis == "published" for entry in entries if entry.repo in records)
    checked, earlier = (
        sum(entry.automatic is reason for entry in entries)
        for reason in (AutomaticReason.CHECKED, AutomaticReason.EARLIER_DEFAULT)
    )
    introduction = INTRODUCTION.format(
        published=published,
        count=len(entries),
        checked=checked,
        earlier=earlier,
        oldest=_format_release(0),
        newest=_format_release(-1),
    )
    parts = [GENERATED.format(source="operator/aerie/engine/models/catalog.toml and scripts/catalog/record.json"), introduction]
    for kind in (DrafterKind.EAGLE31, DrafterKind.EAGLE3):
        rows = _build_rows((entry for entry in entries if entry.kind is kind), records)
        headings = ["target", "drafter", "commit", "automatic", "licence", "preflight", "source, read", "notes"]
        parts.append(f"## {kind.display_name}\n\n{table(headings, rows)}")
    return join_parts(*parts)


def _build_rows(entries: Iterable[CatalogEntry], records: dict[str, Record]) -> Iterator[list[str]]:
    for entry in entries:
        yield [
            "<br>".join(entry.targets),
            f"`{entry.repo}`",
            _format_commit(entry),
            f"{entry.automatic.value} {entry.checked}".strip() if entry.automatic else "no",
            entry.licence or "unknown",
            _format_verdict(records.get(str(entry.repo))),
            f"{entry.source}; {entry.read}",
            entry.notes,
        ]


def _format_commit(entry: CatalogEntry) -> str:
    if entry.revision:
        return f"`{entry.revision[:12]}`"
    return f"reported `{entry.reported_revision[:12]}`" if entry.reported_revision else "unknown"


def _format_verdict(record: Record | None) -> str:
    if record is None:
        return "not checked"
    return f"{format_verdicts(record)} ({record.basis} files, {record.checked})"


def _format_release(index: int) -> str:
    version = RELEASES[index]
    return f"{version.release[0]}.{version.release[1]}"
