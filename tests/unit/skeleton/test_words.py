"""The check of the words in names, docstrings, comments and docs: what it reports, what it ignores, and the tree's own counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_words

NOTHING_ALLOWED = dict.fromkeys(check_words.Kind, 0)


def write_module(root: Path, source: str, path: str = "rollout/pods.py") -> None:
    module = root / check_words.CODE_FOLDERS[0] / path
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(source)


def check(root: Path) -> list[str]:
    messages, _ = check_words.check(root, NOTHING_ALLOWED)
    return messages


@pytest.mark.parametrize(
    ("source", "location", "expected"),
    [
        ("pods = 1\nfound = 2\n", "2", "found"),
        ("def _told(): ...\n", "1", "_told"),
        ("class Course: ...\n", "1", "Course"),
        ("def count(*, one): ...\n", "1", "one"),
        ("for pod, known in pods: ...\n", "1", "known"),
        ("names = [\n    seen for seen in pods\n]\n", "2", "seen"),
        ("def set_up(self):\n    self.kept = []\n", "2", "kept"),
        ("import statistics as way\n", "1", "way"),
        ("try: ...\nexcept ValueError as given: ...\n", "2", "given"),
        ("match pods:\n    case [one, *_]: ...\n", "2", "one"),
        ("wanted_pods = 1\n", "1", "wanted_pods"),
        ("class PodTrouble: ...\n", "1", "PodTrouble"),
        ('"""With one more pod."""\n', "1", "With"),
        ('class Pods:\n    ready: int = 0\n    """Of them, the ready ones."""\n', "3", "Of"),
        ('def count():\n    """\n    By revision.\n    """\n', "2", "By"),
        ('"""Rollouts.\n\nA canary goes\non."""\n', "3", "goes on"),
        ("pods = 1  # what serves\n", "1", "what serves"),
        ("pods = 1\n# A rollout that is under\n# way waits.\n", "2", "under way"),
    ],
)
def test_each_kind_of_violation_is_reported_with_its_line(tmp_path: Path, source: str, location: str, expected: str) -> None:
    write_module(tmp_path, source)
    (message,) = check(tmp_path)
    assert message.startswith(f"operator/aerie/rollout/pods.py:{location}: `{expected}` (")
    assert "): write " in message


def test_module_names_are_checked(tmp_path: Path) -> None:
    write_module(tmp_path, "", "rollout/leftovers.py")
    write_module(tmp_path, "", "rollout/lanes/__init__.py")
    assert [message.split(" (")[0] for message in check(tmp_path)] == [
        "operator/aerie/rollout/lanes/__init__.py:1: `lanes`",
        "operator/aerie/rollout/leftovers.py:1: `leftovers`",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "print(found, settings.kept, load(told=1))\n",  # others' names
        "not_found = known_pods = 1\n",  # a vague word that is not alone
        "message = 'A person is told.'\n",  # a string that is no docstring
        '"""Calls `history.wanted`."""\n',  # code
        "pods = 1\n# A canary goes\nready = 1\n# on two nodes.\n",  # two comments
        "arms = pods = 1\n'''Without a docstring's place'''.strip()\n",
    ],
)
def test_uses_strings_and_code_are_not_checked(tmp_path: Path, source: str) -> None:
    write_module(tmp_path, source)
    assert check(tmp_path) == []


def test_pages_of_the_docs_are_checked_without_their_code(tmp_path: Path) -> None:
    for page in ("README.md", "docs/rollouts.md", "docs/decisions/0001.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text("# Rollouts\n\n```\nNothing is amiss.\n```\n\nThe canary is taken back.\n")
    assert [message.split(" (")[0] for message in check(tmp_path)] == [
        "README.md:7: `taken back`",
        "docs/decisions/0001.md:7: `taken back`",
        "docs/rollouts.md:7: `taken back`",
    ]


def test_allow_list_accepts_a_word_in_one_file(tmp_path: Path) -> None:
    write_module(tmp_path, "word = 1\n")
    write_module(tmp_path, "word = 1\n", "rollout/arms.py")
    allow_list = tmp_path / check_words.ALLOW_LIST
    allow_list.parent.mkdir()
    allow_list.write_text("# comment\noperator/aerie/rollout/pods.py:word  # the shell's term\n")
    (message,) = check(tmp_path)
    assert message.startswith("operator/aerie/rollout/arms.py:1: `word` (")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("operator/aerie/rollout/pods.py:word", "is no entry"),
        ("operator/aerie/rollout/pods.py:word  # the shell's term", "does not occur any more"),
    ],
)
def test_allow_list_needs_reasons_and_is_kept_short(tmp_path: Path, line: str, problem: str) -> None:
    allow_list = tmp_path / check_words.ALLOW_LIST
    allow_list.parent.mkdir()
    allow_list.write_text(f"{line}\n")
    (message,) = check(tmp_path)
    assert message.startswith(f"{check_words.ALLOW_LIST}:1: `operator/aerie/rollout/pods.py:word")
    assert problem in message


def test_counts_up_to_the_maximum_pass(tmp_path: Path) -> None:
    write_module(tmp_path, "found = 1\nseen = 2\n")
    messages, summary = check_words.check(tmp_path, NOTHING_ALLOWED | {check_words.Kind.VAGUE_NAME: 2})
    assert messages == []
    assert summary.startswith("words: vague names 2 (at most 2), coined names 0 (at most 0), ")
    messages, _ = check_words.check(tmp_path, NOTHING_ALLOWED | {check_words.Kind.VAGUE_NAME: 1})
    assert len(messages) == 2


def test_exit_status_and_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(tmp_path, "lanes = 1\n" * 1000)
    assert check_words.main([str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert len(output.err.splitlines()) == 1000
    assert output.out.startswith("words: ")


@pytest.mark.nightly  # `make check` runs the script
@pytest.mark.slow
def test_tree_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_words.main() == 0, capsys.readouterr().err
