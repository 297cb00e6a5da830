"""docs/reference/conditions.md explains every condition type and every reason of the operator, and the operator uses them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from aerie.rollout import conditions, reasons
from scripts.reference.events import REASONS_BY_SECTION

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "conditions.md"
OPERATOR = ROOT / "operator" / "aerie"


def read_sections() -> dict[str, str]:
    """Return the text of each section of the page, by heading."""
    _, *parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("section", REASONS_BY_SECTION)
def test_page_explains_the_reasons_of_the_code(section: str) -> None:
    explained = re.findall(r"^\*\*(\w+)\.\*\* \S", read_sections()[section], flags=re.MULTILINE)
    assert sorted(explained) == sorted(get_args(REASONS_BY_SECTION[section]))


def test_sections_cover_every_reason() -> None:
    assert list(read_sections()) == list(REASONS_BY_SECTION)
    explained = {reason for group in REASONS_BY_SECTION.values() for reason in get_args(group)}
    assert explained == set(get_args(reasons.EventReason))


def test_pod_reasons_are_explained_in_their_order_of_severity() -> None:
    assert re.findall(r"^\*\*(\w+)\.\*\*", read_sections()["Pods"], flags=re.MULTILINE) == list(
        get_args(reasons.PodFailureReason)
    )


def test_page_has_the_condition_types_of_the_code() -> None:
    introduction = PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    types = re.findall(r"^\| ([A-Z]\w+) \|", introduction, flags=re.MULTILINE)
    assert types == list(conditions.HEALTHY_STATUS_BY_TYPE)


def test_operator_uses_every_reason() -> None:
    """A reason in a type that no other module writes is dead, and its paragraph too."""
    used = {text for path in OPERATOR.rglob("*.py") if path.name != "reasons.py" for text in read_strings(path)}
    assert set(get_args(reasons.EventReason)) - used == set()


def read_strings(path: Path) -> Iterator[str]:
    """Yield the string constants of a module, without docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
