"""`python -m scripts.catalog` against the lab's Hub: rows and files that agree, that differ, and a Hub that cannot be read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.checkpoints import HubClient
from aerie.engine.models.drafter_catalog import AutomaticReason, CatalogEntry, DrafterKind
from aerie_lab.hub.checkpoints import Repository, read_repositories
from scripts.catalog import __main__ as command
from scripts.catalog.compare import RELEASES, Comparison, Verdict, compare_entry, find_entries
from scripts.catalog.record import (
    Record,
    build_record,
    describe_changes,
    find_false_check,
    format_verdicts,
    read_records,
    update_records,
    write_records,
)
from scripts.reference import catalog as page

DRAFTER = "Inferact/MiniMax-M3-EAGLE3"
TARGET = "MiniMaxAI/MiniMax-M3-MXFP8"
GATED = "meta-llama/Llama-3.1-8B-Instruct"
OTHER_COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def rebuilt() -> dict[str, Repository]:
    """Repositories of the rebuilt checkpoints, and the lab's."""
    return command.read_rebuilt_repositories()


def find_entry(repository: str) -> CatalogEntry:
    (entry,) = (entry for entry in find_entries() if entry.repo == repository)
    return entry


def compare(entry: CatalogEntry, repositories: Mapping[str, Repository], token: str | None = "any") -> Comparison:
    with command.serve(dict(repositories)) as endpoint, HubClient(endpoint, token) as hub:
        return compare_entry(entry, hub)


def test_rebuilt_files_agree_with_rows_and_record(rebuilt: dict[str, Repository]) -> None:
    entries = [entry for entry in find_entries() if entry.repo in rebuilt]
    assert len(entries) >= 9
    records = read_records()
    with command.serve(rebuilt) as endpoint, HubClient(endpoint, "any") as hub:
        comparisons = [compare_entry(entry, hub) for entry in entries]
    for comparison in comparisons:
        entry = comparison.entry
        assert comparison.differences == (), entry.repo
        assert comparison.commit == (entry.revision or entry.reported_revision)
        record = records[str(entry.repo)]
        if record.basis == "rebuilt":
            assert build_record(comparison, record.checked, "rebuilt") == record, (
                "run `python -m scripts.catalog --rebuilt --write`"
            )


def test_every_rebuilt_drafter_is_in_the_catalog_with_its_target() -> None:
    names = read_repositories(command.REBUILT).keys()
    entries = [entry for entry in find_entries() if entry.repo in names]
    targets = {entry.targets[0] for entry in entries} | {GATED}
    assert names <= {entry.repo for entry in entries} | targets


def test_verdicts_cover_all_releases_in_order(rebuilt: dict[str, Repository]) -> None:
    verdicts = compare(find_entry("lightseekorg/kimi-k2.6-eagle3.1-mla"), rebuilt).verdicts
    assert [str(verdict) for verdict in verdicts[:3]] == ["0.22 fails C1, C20", "0.23 fails C20", "0.24 to 0.25 passes"]
    releases = [f"{version.release[0]}.{version.release[1]}" for version in RELEASES]
    assert verdicts[0].first == releases[0]
    assert verdicts[-1].last == releases[-1] == "0.33"
    for before, after in itertools.pairwise(verdicts):
        assert releases.index(after.first) == releases.index(before.last) + 1


@pytest.mark.parametrize(
    ("row", "repository", "difference"),
    [
        ({}, {"licence": "apache-2.0"}, "licence: the model card declares apache-2.0, and the row mit: set licence"),
        ({}, {"licence": ""}, "licence: the model card declares none, and the row mit: remove it"),
        ({"licence": ""}, {}, "licence: the model card declares mit, and the row none: set licence"),
        ({"kind": DrafterKind.EAGLE3}, {}, "kind: the config is that of EAGLE 3.1, and the row says EAGLE 3: set kind"),
        ({"repo": "me/none"}, {}, "the Hub gives no repository me/none: remove the row, or correct its name"),
        ({"revision": OTHER_COMMIT}, {}, f"the repository has no {OTHER_COMMIT}: main is at 44cafa5ace41"),
        ({}, {"files": dict}, "its files: "),
    ],
)
def test_differences_name_both_values_and_the_fix(
    rebuilt: dict[str, Repository], row: dict[str, Any], repository: dict[str, Any], difference: str
) -> None:
    repositories = rebuilt | {DRAFTER: replace(rebuilt[DRAFTER], **repository)}
    comparison = compare(replace(find_entry(DRAFTER), **row), repositories)
    assert [line.startswith(difference) for line in comparison.differences] == [True], comparison.differences


def test_a_moved_branch_and_a_row_without_commit_are_notes(rebuilt: dict[str, Repository]) -> None:
    moved = rebuilt | {DRAFTER: replace(rebuilt[DRAFTER], main=OTHER_COMMIT)}
    entry = find_entry(DRAFTER)
    comparison = compare(entry, moved)
    assert (comparison.differences, comparison.notes) == ((), (f"main has moved to {OTHER_COMMIT}",))
    assert comparison.commit == entry.revision
    unpinned = compare(replace(entry, revision=None), rebuilt)
    assert unpinned.notes == (f"the row has no commit, and main is at {entry.revision}",)
    assert unpinned.commit == entry.revision


@pytest.mark.parametrize(("name", "token"), [(GATED, None), ("me/none", "any")])
def test_a_target_that_is_not_readable_leaves_out_the_verdict(
    rebuilt: dict[str, Repository], name: str, token: str | None
) -> None:
    comparison = compare(replace(find_entry(DRAFTER), targets=(name,)), rebuilt, token)
    assert comparison.verdicts == ()
    assert comparison.no_verdict == f"the target {name} is not readable: set HF_TOKEN if it is gated"
    assert comparison.differences == ()


CHECKED = replace(find_entry(DRAFTER), automatic=AutomaticReason.CHECKED, checked="2026-11-28")
PASSED = Record("2026-11-29", "published", str(CHECKED.revision), "mit", (Verdict("0.24", "0.33", (), ("C4",)),))


@pytest.mark.parametrize(
    ("record", "difference"),
    [
        (PASSED, ""),
        (None, "automatic: no comparison with published files is recorded: remove"),
        (replace(PASSED, basis="rebuilt"), "automatic: no comparison with published files is recorded: remove"),
        (replace(PASSED, commit=OTHER_COMMIT), f"automatic: {OTHER_COMMIT} was compared, and the row has 44cafa5ace41"),
        (replace(PASSED, verdicts=(Verdict("0.24", "0.33", ("C9",), ()),)), "automatic: preflight does not pass with the newest"),
        (replace(PASSED, verdicts=(), no_verdict="gated"), "automatic: preflight does not pass with the newest release (not"),
        (replace(PASSED, checked="2026-11-27"), "checked: the last comparison was on 2026-11-27, and the row says 2026-11-28"),
    ],
)
def test_a_checked_row_needs_a_recorded_verdict_of_published_files(record: Record | None, difference: str) -> None:
    lines = list(find_false_check(CHECKED, record))
    assert [line.startswith(difference) for line in lines] == ([True] if difference else []), lines
    assert list(find_false_check(replace(CHECKED, automatic=AutomaticReason.EARLIER_DEFAULT, checked=""), record)) == []


def test_checked_rows_of_the_catalog_have_their_verdict_in_the_record() -> None:
    records = read_records()
    assert [line for entry in find_entries() for line in find_false_check(entry, records.get(str(entry.repo)))] == []


def test_command_names_rows_that_may_be_checked_and_false_ones() -> None:
    comparison = Comparison(replace(CHECKED, automatic=None, checked=""), str(CHECKED.revision), "mit", PASSED.verdicts)
    note = 'preflight passes: the row may get automatic = "checked", checked = "2026-11-29"'
    assert command.add_automatic_lines(comparison, PASSED).notes == (note,)
    assert command.add_automatic_lines(comparison, replace(PASSED, commit=OTHER_COMMIT)).notes == ()
    assert command.add_automatic_lines(replace(comparison, differences=("any",)), PASSED).notes == ()
    checked = replace(comparison, entry=CHECKED)
    assert command.add_automatic_lines(checked, PASSED) == checked
    (difference,) = command.add_automatic_lines(checked, replace(PASSED, verdicts=())).differences
    assert difference.startswith("automatic: preflight does not pass")


def test_command_writes_the_record_with_its_date(
    rebuilt: dict[str, Repository], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    file.write_text("{}")
    monkeypatch.setattr(command, "FILE", file)
    monkeypatch.setattr("scripts.catalog.__main__.read_records", lambda: read_records(file))
    monkeypatch.setenv("HF_TOKEN", "any")
    with command.serve(rebuilt) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert command.main([DRAFTER]) == 0
        assert file.read_text() == "{}"
        assert command.main([DRAFTER, "--write"]) == 0
    written = json.loads(file.read_text())
    assert written.keys() == {DRAFTER}
    assert (written[DRAFTER]["basis"], written[DRAFTER]["licence"]) == ("published", "mit")
    output = capsys.readouterr().out
    assert f"{written[DRAFTER]['checked']}, published files: 1 compared, 0 not as in the table." in output
    with command.serve(rebuilt | {DRAFTER: replace(rebuilt[DRAFTER], licence="bsd")}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert command.main([DRAFTER]) == 1
    output = capsys.readouterr().out
    assert f"{DRAFTER}: not as in the table\n  differs: licence: the model card declares bsd, and the row mit" in output
    assert f"  changed: licence: mit on {written[DRAFTER]['checked']}, now bsd" in output


def test_a_hub_that_cannot_be_read_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FILE", tmp_path / "record.json")
    monkeypatch.setattr("aerie.checkpoints.hugging_face.MAX_REQUEST_ATTEMPTS", 1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert command.main([DRAFTER, "--write"]) == 2
    assert "The Hub cannot be read, and nothing was written: " in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


def test_an_unknown_name_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["me/none"])
    assert caught.value.code == 2
    assert "the catalog has no EAGLE drafter me/none" in capsys.readouterr().err


def test_rebuilt_files_never_replace_published_ones(tmp_path: Path) -> None:
    passes, fails = (Verdict("0.24", "0.33", errors, ()) for errors in ((), ("C9",)))
    published = Record("2026-11-01", "published", "a" * 40, "mit", (passes,))
    rebuilt = Record("2026-11-02", "rebuilt", "a" * 40, "", (fails,))
    assert update_records({"a/b": published}, {"a/b": rebuilt, "c/d": rebuilt}) == {"a/b": published, "c/d": rebuilt}
    assert update_records({"a/b": rebuilt}, {"a/b": published}) == {"a/b": published}
    assert list(describe_changes(None, published)) == ["first comparison"]
    assert list(describe_changes(published, replace(published, checked="2026-12-01"))) == []
    assert list(describe_changes(published, rebuilt)) == [
        "files: published on 2026-11-01, now rebuilt",
        "licence: mit on 2026-11-01, now none",
        "verdict: 0.24 to 0.33 passes on 2026-11-01, now 0.24 to 0.33 fails C9",
    ]
    write_records({"c/d": rebuilt, "a/b": published}, tmp_path / "record.json")
    assert list(read_records(tmp_path / "record.json").items()) == [("a/b", published), ("c/d", rebuilt)]


def test_page_has_every_row_and_its_verdict() -> None:
    text = page.page()
    for entry in find_entries():
        assert f"| `{entry.repo}` |" in text
    for repository, record in read_records().items():
        row = next(line for line in text.splitlines() if f"| `{repository}` |" in line)
        assert f"{format_verdicts(record)} ({record.basis} files, {record.checked})" in row
