"""Check the catalog of published drafters against the repositories, and date the result.

python -m scripts.catalog                 compare all EAGLE rows with the Hub (HF_ENDPOINT, HF_TOKEN)
python -m scripts.catalog NAME ...        compare the rows of these drafters
python -m scripts.catalog --rebuilt       compare with checkpoints rebuilt from public descriptions, without a network
python -m scripts.catalog --write         also write scripts/catalog/record.json; then `python -m scripts.generate`

Exit status: 0 if rows and repositories agree; 1 if they differ; 2 if the Hub cannot be read, and then nothing is written.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from aerie.checkpoints import HubClient, HubError
from aerie.engine.models.drafter_catalog import AutomaticReason, CatalogEntry
from aerie_lab.hub.checkpoints import Repository, load_repositories, read_repositories
from aerie_lab.hub.server import create_hub_server
from scripts.catalog.compare import Comparison, compare_entry, find_entries
from scripts.catalog.record import (
    FILE,
    Basis,
    Record,
    build_record,
    describe_changes,
    find_false_check,
    read_records,
    update_records,
    write_records,
)

REBUILT = Path(__file__).with_name("rebuilt.toml")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.catalog", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="repository of a drafter")
    parser.add_argument("--rebuilt", action="store_true", help="use the rebuilt checkpoints")
    parser.add_argument("--write", action="store_true", help="write the record")
    options = parser.parse_args(arguments)
    entries = [entry for entry in find_entries() if not options.names or entry.repo in options.names]
    if unknown := sorted(set(options.names) - {entry.repo for entry in entries}):
        parser.error(f"the catalog has no EAGLE drafter {unknown[0]}: `aerie catalog` lists them.")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        if not options.rebuilt:
            with HubClient.from_environment() as hub:
                return check(entries, hub, today, "published", FILE if options.write else None)
        repositories = read_rebuilt_repositories()
        with serve(repositories) as endpoint, HubClient(endpoint, "any") as hub:
            rebuilt = [entry for entry in entries if entry.repo in repositories]
            return check(rebuilt, hub, today, "rebuilt", FILE if options.write else None)
    except HubError as error:
        print(f"The Hub cannot be read, and nothing was written: {error}", file=sys.stderr)
        return 2


def check(entries: Sequence[CatalogEntry], hub: HubClient, today: str, basis: Basis, output: Path | None) -> int:
    """Compare the rows, print what differs and what changed, and write the record to `output`. Return the exit status.

    Raises HubError: the Hub cannot be read.
    """
    comparisons = {str(entry.repo): compare_entry(entry, hub) for entry in entries}
    old = read_records()
    new = {repository: build_record(comparison, today, basis) for repository, comparison in comparisons.items()}
    if basis == "published":
        comparisons = {name: add_automatic_lines(comparison, new[name]) for name, comparison in comparisons.items()}
    for repository, comparison in comparisons.items():
        lines = [f"differs: {difference}" for difference in comparison.differences]
        lines += [f"note: {note}" for note in comparison.notes]
        lines += [f"changed: {change}" for change in describe_changes(old.get(repository), new[repository])]
        print(
            "\n  ".join([f"{repository}: {'as in the table' if not comparison.differences else 'not as in the table'}", *lines])
        )
    differing = sum(bool(comparison.differences) for comparison in comparisons.values())
    print(f"{today}, {basis} files: {len(comparisons)} compared, {differing} not as in the table.")
    if output is not None:
        write_records(update_records(old, new), output)
    return 1 if differing else 0


def add_automatic_lines(comparison: Comparison, record: Record) -> Comparison:
    """Return the comparison with what its published files say of the automatic selection of the row."""
    entry = comparison.entry
    differences = (*comparison.differences, *find_false_check(entry, record))
    notes = comparison.notes
    may_be_checked = not differences and record.passes and record.commit == entry.revision
    if may_be_checked and entry.automatic is not AutomaticReason.CHECKED:
        notes = (*notes, f'preflight passes: the row may get automatic = "checked", checked = "{record.checked}"')
    return replace(comparison, differences=differences, notes=notes)


def read_rebuilt_repositories() -> dict[str, Repository]:
    """Return the rebuilt checkpoints, and those of the lab's Hub."""
    return load_repositories() | read_repositories(REBUILT)


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[str]:
    """Serve repositories on this machine; yield the address."""
    with create_hub_server(repositories, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
