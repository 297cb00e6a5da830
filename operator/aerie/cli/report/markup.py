"""Elements of HTML and SVG, whose text and attributes are escaped unless they are elements themselves.

Guarantee: no text of a caller becomes an element, an attribute, or a control character.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

_VOID = frozenset({"meta"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Return the text as markup. Characters that no XML may have become spaces."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape("".join(item if item.isprintable() or item == "\n" else " " for item in text)))


def element(name: str, /, *children: str | Iterable[str], **attributes: str) -> Markup:
    """Return an element. An attribute's underscores become hyphens; one at the end is dropped (`class_`)."""
    parts = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    content = "".join(escape(child) if isinstance(child, str) else "".join(map(escape, child)) for child in children)
    return Markup(f"<{name}{parts}>" if name in _VOID else f"<{name}{parts}>{content}</{name}>")


def json_block(document: Any, identifier: str) -> Markup:
    """Return a block of JSON that no browser runs, and that no text in it can end."""
    text = json.dumps(document, ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{escape(identifier)}">{text}</script>')
