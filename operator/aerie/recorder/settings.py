"""What a recorder is started with, checked: an error names the option, its value and the fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aerie.recorder.hook import Hook
from aerie.recorder.objects import Bucket
from aerie.recorder.redaction import Pattern, PatternError, Redaction
from aerie.recorder.storage import Retention

ACCESS_KEY_VARIABLE, SECRET_KEY_VARIABLE = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"


class SettingsError(ValueError):
    """An option that cannot be used; the message is a full sentence."""


@dataclass(frozen=True, slots=True)
class RecorderSettings:
    """Settings of a recorder."""

    folder: Path
    """Folder of the files, or of those that wait for their upload."""
    retention: Retention
    rate: float
    max_per_minute: int
    redaction: Redaction
    hook: Hook | None = None
    bucket: Bucket | None = None
    """None: the files stay in the folder."""
    host: str | None = None
    """Address to listen on; None for all."""
    port: int = 8000


def parse_redaction(option: str, text: str) -> Redaction:
    """Return the patterns of a JSON list of objects with `pattern` and `replacement`. Raises SettingsError."""
    try:
        patterns = [Pattern(item["pattern"], item["replacement"]) for item in json.loads(text)]
        return Redaction(patterns)
    except PatternError as error:
        raise SettingsError(f"{option}: {error}") from None
    except (ValueError, TypeError, LookupError):
        raise SettingsError(
            f'{option} is no list of patterns: write JSON such as [{{"pattern": "[0-9]{{16}}", "replacement": "[card]"}}].'
        ) from None


def read_bucket(name: str, prefix: str, region: str, endpoint: str | None, environment: Mapping[str, str]) -> Bucket:
    """Return the bucket with the key of the environment. Raises SettingsError."""
    missing = [name for name in (ACCESS_KEY_VARIABLE, SECRET_KEY_VARIABLE) if not environment.get(name)]
    if missing:
        raise SettingsError(f"{missing[0]} is missing: set it to the credentials of the bucket {name}.")
    return Bucket(name, prefix, region, endpoint, environment[ACCESS_KEY_VARIABLE], environment[SECRET_KEY_VARIABLE])
