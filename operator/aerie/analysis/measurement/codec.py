"""What is kept for a program alone, as one word of text: for a status or a ConfigMap, which hold texts and are read by people.

Guarantee: what `pack` was given comes back; for anything else `unpack` raises ValueError.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any


def pack(value: Any) -> str:
    """As text."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)).decode()


def unpack(text: str) -> Any:
    """What it was made of."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(f"the text of {len(text)} characters is none of Aerie's.") from error
