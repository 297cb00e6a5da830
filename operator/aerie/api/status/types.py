"""Types of strings and counts in the status, with their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LongText = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=128)]
Count = Annotated[int, Field(ge=0)]
