"""Packs state that only a program reads into one word of text: a status or a ConfigMap holds text, and people read it.

Guarantee: `unpack` returns the value that `pack` was given; for any other text it raises ValueError.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any


def pack(value: Any) -> str:
    """Return the value as one word of text."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)).decode()


def unpack(text: str) -> Any:
    """Return the value that `pack` made this text of; raise ValueError for any other text."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(f"the text of {len(text)} characters is none of Aerie's.") from error
