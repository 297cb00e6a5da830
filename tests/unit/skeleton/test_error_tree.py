"""docs/reference/errors.md draws the exception classes of each package: all of them, each below its base class."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "Operator": "operator/aerie",
    "Lab": "lab/aerie_lab",
    "Drafter": "drafter/aerie_drafter",
    "Plugin": "plugin/aerie_vllm",
}
"""Folder of each package, by its heading on the page."""
BUILT_IN = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}
BRANCH = re.compile(r"(?P<indent>[│ ]*)[├└]── (?P<name>\w+) +(?P<status>-|\d+) +\S")

Tree = list[tuple[str, str]]
"""Name of each class and of its base class, sorted."""


def find_exceptions(package: Path) -> Tree:
    """Return the exception classes that a package defines. A name stands for one class in a package."""
    bases = [
        (node.name, base)
        for module in package.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for base in (ast.unparse(item).rpartition(".")[2] for item in node.bases)
    ]
    exceptions: Tree = []
    names = BUILT_IN
    while new := [(name, base) for name, base in bases if base in names and (name, base) not in exceptions]:
        exceptions += new
        names = names | {name for name, _ in new}
    return sorted(exceptions)


def read_drawn_tree(page: str, heading: str) -> Tree:
    """Return the classes below a heading of the page. Raises AssertionError for a line that is no class with a status."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    drawn: Tree = []
    path: list[str] = []
    for line in section.partition("```\n")[2].partition("```")[0].splitlines():
        if branch := BRANCH.match(line):
            depth = len(branch["indent"]) // 4 + 1
            path = [*path[:depth], branch["name"]]
            drawn.append((branch["name"], path[depth - 1]))
        else:
            assert not line or line in BUILT_IN, line
            path = [line]
    return sorted(drawn)


@pytest.mark.parametrize("heading", PACKAGES)
def test_the_page_draws_every_exception_class_below_its_base(heading: str) -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert read_drawn_tree(page, heading) == find_exceptions(ROOT / PACKAGES[heading])


def test_subclasses_in_other_modules_are_exceptions(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text("class PodError(Exception): ...\nclass Pod: ...\n")
    (tmp_path / "pods.py").write_text("import errors\nclass CrashError(errors.PodError): ...\n")
    assert find_exceptions(tmp_path) == [("CrashError", "PodError"), ("PodError", "Exception")]
