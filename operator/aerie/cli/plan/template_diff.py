"""The pod template of the stable revision and that of the desired one, as a unified diff of YAML.

Guarantee: pure; no literal value of a variable or argument whose name is that of a secret is shown. Contents of Secrets are
not in a template at all. Not guaranteed: that a secret under another name is hidden.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

_SECRET_NAME = re.compile(r"token(?!s|iz)|secret|passw|credential|api[-_]?key|private[-_]?key|authorization", re.IGNORECASE)
_HIDDEN, _HIDDEN_CHANGED = "(hidden)", "(hidden, changed)"


def build_template_diff(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, names: tuple[str, str]) -> str:
    """Return the diff; empty without a difference. `names`: those of the two revisions."""
    secrets = [set(_iter_secrets(template)) for template in (before, after)]
    changed = secrets[1] - secrets[0] if before is not None else set()
    lines = (_to_lines(_hide(before, set())), _to_lines(_hide(after, changed)))
    return "".join(difflib.unified_diff(lines[0], lines[1], names[0], names[1]))


def _to_lines(template: Any) -> list[str]:
    return [] if template is None else yaml.safe_dump(template, width=120, allow_unicode=True).splitlines(keepends=True)


def _iter_secrets(value: Any) -> Iterator[tuple[str, str]]:
    """Yield name and value of each secret."""
    if isinstance(value, Mapping):
        name, literal = value.get("name"), value.get("value")
        if isinstance(name, str) and isinstance(literal, str) and _SECRET_NAME.search(name):
            yield name, literal
        for child in value.values():
            yield from _iter_secrets(child)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for previous, item in zip((None, *value), value, strict=False):
            if (secret := _split_argument(previous, item)) is not None:
                yield secret
            yield from _iter_secrets(item)


def _hide(value: Any, changed: set[tuple[str, str]]) -> Any:
    """Return the value without its secrets; `changed`: those that differ from the other template's."""
    if isinstance(value, Mapping):
        hidden = {key: _hide(child, changed) for key, child in value.items()}
        name, literal = value.get("name"), value.get("value")
        if isinstance(name, str) and isinstance(literal, str) and _SECRET_NAME.search(name):
            hidden["value"] = _HIDDEN_CHANGED if (name, literal) in changed else _HIDDEN
        return hidden
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = []
        for previous, item in zip((None, *value), value, strict=False):
            secret = _split_argument(previous, item)
            if secret is None:
                items.append(_hide(item, changed))
                continue
            text = _HIDDEN_CHANGED if secret in changed else _HIDDEN
            items.append(f"{secret[0]}={text}" if item.startswith("-") else text)
        return items
    return value


def _split_argument(previous: object, item: object) -> tuple[str, str] | None:
    """Return name and value of an argument that is a secret; None for any other item of a list."""
    if not isinstance(item, str):
        return None
    name, is_assignment, literal = item.partition("=")
    if is_assignment and name.startswith("-") and _SECRET_NAME.search(name):
        return name, literal
    if isinstance(previous, str) and previous.startswith("--") and "=" not in previous and not item.startswith("-"):
        return (previous, item) if _SECRET_NAME.search(previous) else None
    return None
