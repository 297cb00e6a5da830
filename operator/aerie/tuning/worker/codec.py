"""Telemetry as text, for a ConfigMap and for the process that decides.

    settings, replicas and bucket edges, each once ─┐
    blocks: a row each, histograms by bucket        ├─► JSON ─► zlib ─► base64
    cells: a row each                              ─┘

Guarantees: what is packed comes back, counts exactly and other figures to six digits; the text has at most `limit` characters,
for which the oldest cells go first and the oldest blocks after them; what cannot be read (another version of Aerie wrote it, a
hand has been at it, other lengths of blocks) is as good as none. Not kept: the windows that were left out.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import zlib
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, Speculation
from aerie.engine.speculation import Setting
from aerie.tuning.recommendation import setting_from_dict, setting_to_dict
from aerie.tuning.telemetry import Cell, Key, Scale, Telemetry

VERSION = 1
LIMIT = 512 * 1024
"""Characters; a ConfigMap may have 1 MiB."""
_LARGEST = 16 * 1024 * 1024
"""Bytes of JSON that a text may unfold to."""
_SCALARS = (
    *("generation_tokens", "prompt_tokens", "computed_prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("preemptions", "request_steps", "step_seconds", "iterations", "queued_requests", "queue_seconds"),
)
_SUMS = ("windows", "request_steps", "step_seconds", "batch", "prefill", "drafted")

T = TypeVar("T")


def to_json(telemetry: Telemetry) -> dict[str, Any]:
    """All but what was left out."""
    settings: dict[Setting, int] = {}
    replicas: dict[str, int] = {}
    edges: dict[tuple[float, ...], int] = {}
    scale = telemetry.scale
    blocks = [
        [round(one.start / scale.block), _index(settings, one.setting), *_row(one.counters, edges)] for one in telemetry.blocks()
    ]
    cells = [
        [
            *(key.slot, _index(replicas, key.replica), _index(settings, key.setting), key.batch_bin, key.prefill_bin),
            *(_short(getattr(cell, name)) for name in _SUMS),
        ]
        for key, cell in sorted(telemetry.cells.items(), key=lambda item: _order(item[0]))
    ]
    return {
        "version": VERSION,
        "scale": [scale.block, scale.cell, scale.warm],
        "newest": telemetry.newest,
        "settings": [setting_to_dict(one) for one in settings],
        "replicas": list(replicas),
        "edges": [[edge for edge in one if edge < math.inf] for one in edges],
        "blocks": blocks,
        "cells": cells,
    }


def from_json(found: Any, horizon: float, scale: Scale, api_servers: int = 1) -> Telemetry:
    """What `to_json` made. Raises ValueError, LookupError or TypeError for anything else, and for another scale."""
    if found["version"] != VERSION or found["scale"] != [scale.block, scale.cell, scale.warm]:
        raise ValueError("it is of another version, or of another scale.")
    telemetry = Telemetry(horizon, api_servers, scale)
    settings = [setting_from_dict(one) for one in found["settings"]]
    edges = [(*map(float, one), math.inf) for one in found["edges"]]
    replicas = [str(one) for one in found["replicas"]]
    for slot, setting, *row in found["blocks"]:
        telemetry.count(int(slot), settings[setting], _counters(row, edges))
    for slot, replica, setting, batch, prefill, windows, *sums in found["cells"]:
        key = Key(int(slot), replicas[replica], settings[setting], int(batch), int(prefill))
        telemetry.cells[key] = Cell(int(windows), *_numbers(sums, len(_SUMS) - 1))
    if found["newest"] is not None:
        telemetry.seen(_numbers([found["newest"]], 1)[0])
    return telemetry


def pack(telemetry: Telemetry, limit: int = LIMIT) -> str:
    """As text of at most `limit` characters; empty where nothing fits."""
    document = to_json(telemetry)
    while len(text := _packed(document)) > limit:
        for part in ("cells", "blocks"):
            if rows := document[part]:
                document[part] = rows[max(1, math.ceil(len(rows) * (1 - limit / len(text)))) :]
                break
        else:
            return ""
    return text


def unpack(text: str, horizon: float, scale: Scale, api_servers: int = 1) -> Telemetry | None:
    """What was packed; None for what is none, or of another scale."""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), _LARGEST)
        if not inflate.eof:
            return None
        return from_json(json.loads(raw), horizon, scale, api_servers)
    except (binascii.Error, zlib.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _order(key: Key) -> tuple[int, str, str, int, int]:
    """The oldest first; equal telemetry makes equal text."""
    return key.slot, key.replica, str(key.setting), key.batch_bin, key.prefill_bin


def _packed(document: dict[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)).decode()


def _index(known: dict[T, int], one: T) -> int:
    return known.setdefault(one, len(known))


def _short(number: float) -> float:
    """Counts as they are, other figures to six digits."""
    if float(number).is_integer() and abs(number) < 1e15:
        return int(number)
    rounded = float(f"{number:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _row(counters: Counters, edges: dict[tuple[float, ...], int]) -> list[Any]:
    found: list[Any] = [_short(getattr(counters, name)) for name in _SCALARS]
    found.append({reason: _short(count) for reason, count in counters.finished.items()})
    for one in (counters.time_to_first_token, counters.time_per_output_token):
        by_bucket = [_short(after - before) for before, after in pairwise((0.0, *one.counts))]
        found += [_index(edges, one.edges), _short(one.sum), by_bucket]
    if (one_ := counters.speculation) is not None:
        found.append([_short(n) for n in (one_.drafts, one_.draft_tokens, one_.accepted, *one_.accepted_per_position)])
    return found


def _counters(row: list[Any], edges: list[tuple[float, ...]]) -> Counters:
    scalars = _numbers(row[: len(_SCALARS)], len(_SCALARS))
    finished, first, first_sum, first_counts, output, output_sum, output_counts, *rest = row[len(_SCALARS) :]
    speculation = None
    if rest:
        drafts, tokens, accepted, *positions = _numbers(rest[0], len(rest[0]))
        speculation = Speculation(drafts, tokens, accepted, tuple(positions))
    return Counters(
        **dict(zip(_SCALARS, scalars, strict=True)),
        finished={str(reason): _numbers([count], 1)[0] for reason, count in finished.items()},
        time_to_first_token=_histogram(edges[first], first_counts, first_sum),
        time_per_output_token=_histogram(edges[output], output_counts, output_sum),
        speculation=speculation,
    )


def _histogram(edges: tuple[float, ...], by_bucket: list[Any], total: Any) -> Histogram:
    return Histogram(edges, tuple(accumulate(_numbers(by_bucket, len(edges)))), _numbers([total], 1)[0])


def _numbers(found: list[Any], count: int) -> list[float]:
    """So many numbers, none of them negative or beyond all bounds. Raises ValueError."""
    numbers = [float(one) for one in found]
    if len(numbers) != count or not all(0 <= one < math.inf for one in numbers):
        raise ValueError(f"{count} numbers were to be there, and there are {found!r}.")
    return numbers
