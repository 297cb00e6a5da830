"""The ConfigMap that keeps what reports show of a resource's last rollouts: curves, phases and outcomes.

It has a key for each rollout, whose value is compressed JSON (`kubectl get configmap chat-aerie-rollouts -o json`, then base64
and gzip). The operator never decides by it, so losing it changes no rollout.

Guarantees: the same records give the same ConfigMap, of at most `MAX_BYTES`. The latest rollout is never dropped. Text that is no
record is read as none.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aerie.manifests import naming

MAX_ROLLOUTS = 5
"""Rollouts that are kept."""
MAX_BYTES = 200 * 1024
"""Size limit of all values, in bytes as the API server stores them (base64)."""
MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Size of a record's JSON beyond which it is not read: the operator writes 200 KiB at most."""
RECORD_FORMAT = 1
"""Version of the record's fields, in its field `format`."""
_KEY = re.compile(r"\d{8}T\d{6}Z-[a-z0-9]{1,64}")

Record = Mapping[str, Any]
"""One rollout as JSON has it; aerie.rollout.status.rollout_record has its fields."""


@dataclass(frozen=True)
class RolloutHistory:
    """What the operator keeps in memory of one rollout: more than the ConfigMap has, until it is written."""

    uid: str
    """UID of the resource."""
    key: str
    """Key of the rollout in the ConfigMap."""
    record: Record
    """Its record: aerie.rollout.status.rollout_record has the fields."""
    packed_records: Mapping[str, str]
    """Packed records of all rollouts by key; that of this one as it was written last, if it was."""
    written_at: datetime | None = None
    """Time of the latest write; None before the first one of this process."""
    is_changed: bool = False
    """Whether the record differs from the written one."""
    is_urgent: bool = False
    """Whether it is to be written at once: the rollout has ended."""


def rollout_history_config_map_name(resource_name: str) -> str:
    """Return the ConfigMap's name. It contains `aerie`, like the names of the other ConfigMaps."""
    return f"{resource_name}-aerie-rollouts"


def build_record_key(start_time: datetime, revision: str) -> str:
    """Return the key of a rollout: keys in alphabetical order are in the order of the rollouts' starts."""
    return f"{start_time.astimezone(UTC):%Y%m%dT%H%M%SZ}-{revision}"


def pack_record(record: Record) -> str:
    """Return a record as the ConfigMap has it."""
    text = json.dumps(record, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def unpack_record(text: str) -> Record | None:
    """Return the record that `pack_record` made this text of; None for any other text, and for a record of a later format."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(base64.b64decode(text, validate=True))) as stream:
            content = stream.read(MAX_RECORD_BYTES + 1)
        record = json.loads(content) if len(content) <= MAX_RECORD_BYTES else None
    except (ValueError, OSError, EOFError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("format") == RECORD_FORMAT and _has_form(record) else None


def _has_form(record: Mapping[str, Any]) -> bool:
    """Return whether a record has the lists to which the operator adds."""
    lists = [record.get("phases"), record.get("observations")]
    entries = [entry for entries in lists if isinstance(entries, list) for entry in entries]
    return all(isinstance(entries, list) for entries in lists) and all(
        isinstance(entry, dict) and isinstance(entry.get("seconds"), int | float) and isinstance(entry.get("phase"), str)
        for entry in entries
    )


def read_packed_records(config_map: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the packed records of a ConfigMap by key, the oldest first; none where there is no ConfigMap."""
    data = (config_map or {}).get("binaryData") or {}
    return {key: data[key] for key in sorted(data) if _KEY.fullmatch(key)}


def limit_packed_records(records: Mapping[str, str]) -> dict[str, str]:
    """Return the latest records that fit, the oldest first."""
    latest: dict[str, str] = {}
    size = 0
    for key in sorted(records, reverse=True)[:MAX_ROLLOUTS]:
        size += len(key) + len(records[key])
        if latest and size > MAX_BYTES:
            break
        latest[key] = records[key]
    return dict(sorted(latest.items()))


def render_rollout_history_config_map(resource_name: str, records: Mapping[str, str]) -> dict[str, Any]:
    """Return the ConfigMap with the packed records as a plain object."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": rollout_history_config_map_name(resource_name), "labels": naming.common_labels(resource_name)},
        "binaryData": limit_packed_records(records),
    }
