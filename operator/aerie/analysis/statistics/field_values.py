"""The values of a record's fields, as the state of an analysis stores them.

`dataclasses.astuple` does the same, but copies every value deeply, and a reconcile packs the state each time.

Guarantee: the values in the order of the fields' definition. Not guaranteed: a copy of a value that can change.
"""

from __future__ import annotations

from typing import Any


def field_values(record: Any) -> list[Any]:
    """Return the values of the fields of a dataclass with slots."""
    return [getattr(record, name) for name in record.__slots__]
