"""Encode telemetry as text, for a ConfigMap and for the worker process.

    settings, replicas and bucket edges, each once ─┐
    blocks: a row each, histograms by bucket        ├─► JSON ─► zlib ─► base64
    cells: a row each                              ─┘

Guarantees: packed telemetry is restored, counts exactly and other values to six digits. The text has at most `max_characters`
characters; the oldest cells are dropped first to fit, and then the oldest blocks. Unreadable text counts as no telemetry: another
version of Aerie wrote it, a user edited it, or it has other block lengths. Excluded windows are not stored.
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
from aerie.engine.metrics.sample import Counters, SpeculationCounters
from aerie.engine.speculation import SpeculationSetting
from aerie.tuning.recommendation import setting_from_dict, setting_to_dict
from aerie.tuning.telemetry import StepCell, StepCellKey, TelemetryScale, TuningTelemetry

TELEMETRY_FORMAT_VERSION = 1
MAX_PACKED_CHARACTERS = 512 * 1024
"""Characters; a ConfigMap may have 1 MiB."""
_MAX_JSON_BYTES = 16 * 1024 * 1024
"""Bytes of JSON that a text may decompress to."""
_SCALAR_COUNTERS = (
    *("generation_tokens", "prompt_tokens", "computed_prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("preemptions", "request_steps", "step_seconds", "iterations", "queued_requests", "queue_seconds"),
)
_CELL_SUMS = ("windows", "request_steps", "step_seconds", "batch_sum", "prefill_sum", "draft_tokens_sum")

T = TypeVar("T")


def telemetry_to_json(telemetry: TuningTelemetry) -> dict[str, Any]:
    """Return telemetry as a JSON object, without the excluded windows."""
    settings: dict[SpeculationSetting, int] = {}
    replicas: dict[str, int] = {}
    edges: dict[tuple[float, ...], int] = {}
    scale = telemetry.scale
    blocks = [
        [
            round(block.start / scale.block_seconds),
            _intern_index(settings, block.setting),
            *_counters_to_row(block.counters, edges),
        ]
        for block in telemetry.blocks()
    ]
    cells = [
        [
            *(
                key.slot,
                _intern_index(replicas, key.replica),
                _intern_index(settings, key.setting),
                key.batch_bin,
                key.prefill_bin,
            ),
            *(_shorten_number(getattr(cell, name)) for name in _CELL_SUMS),
        ]
        for key, cell in sorted(telemetry.cells.items(), key=lambda item: _cell_sort_key(item[0]))
    ]
    return {
        "version": TELEMETRY_FORMAT_VERSION,
        "scale": [scale.block_seconds, scale.cell_seconds, scale.warm_up_seconds],
        "newest": telemetry.newest_window_end,
        "settings": [setting_to_dict(setting) for setting in settings],
        "replicas": list(replicas),
        "edges": [[edge for edge in bucket_edges if edge < math.inf] for bucket_edges in edges],
        "blocks": blocks,
        "cells": cells,
    }


def telemetry_from_json(document: Any, horizon: float, scale: TelemetryScale, api_servers: int = 1) -> TuningTelemetry:
    """Parse the result of `telemetry_to_json`. Raises ValueError, LookupError or TypeError for anything else, and for another
    scale."""
    if document["version"] != TELEMETRY_FORMAT_VERSION or document["scale"] != [
        scale.block_seconds,
        scale.cell_seconds,
        scale.warm_up_seconds,
    ]:
        raise ValueError("the telemetry has another format version or scale.")
    telemetry = TuningTelemetry(horizon, api_servers, scale)
    settings = [setting_from_dict(setting) for setting in document["settings"]]
    edges = [(*map(float, bucket_edges), math.inf) for bucket_edges in document["edges"]]
    replicas = [str(replica) for replica in document["replicas"]]
    for slot, setting, *row in document["blocks"]:
        telemetry.add_to_block(int(slot), settings[setting], _counters_from_row(row, edges))
    for slot, replica, setting, batch, prefill, windows, *sums in document["cells"]:
        key = StepCellKey(int(slot), replicas[replica], settings[setting], int(batch), int(prefill))
        telemetry.cells[key] = StepCell(int(windows), *_parse_numbers(sums, len(_CELL_SUMS) - 1))
    if document["newest"] is not None:
        telemetry.advance_to(_parse_numbers([document["newest"]], 1)[0])
    return telemetry


def pack_telemetry(telemetry: TuningTelemetry, max_characters: int = MAX_PACKED_CHARACTERS) -> str:
    """Return telemetry as text of at most `max_characters` characters; empty if nothing fits."""
    document = telemetry_to_json(telemetry)
    while len(text := _compress_document(document)) > max_characters:
        for part in ("cells", "blocks"):
            if rows := document[part]:
                document[part] = rows[max(1, math.ceil(len(rows) * (1 - max_characters / len(text)))) :]
                break
        else:
            return ""
    return text


def unpack_telemetry(text: str, horizon: float, scale: TelemetryScale, api_servers: int = 1) -> TuningTelemetry | None:
    """Return the packed telemetry; None for unreadable text, or text of another scale."""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), _MAX_JSON_BYTES)
        if not inflate.eof:
            return None
        return telemetry_from_json(json.loads(raw), horizon, scale, api_servers)
    except (binascii.Error, zlib.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _cell_sort_key(key: StepCellKey) -> tuple[int, str, str, int, int]:
    """Return the sort key of a cell: the oldest first, and equal telemetry gives equal text."""
    return key.slot, key.replica, str(key.setting), key.batch_bin, key.prefill_bin


def _compress_document(document: dict[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)).decode()


def _intern_index(indices: dict[T, int], value: T) -> int:
    """Return the index of a value, which is added if it is new."""
    return indices.setdefault(value, len(indices))


def _shorten_number(number: float) -> float:
    """Return counts unchanged, and other values to six digits."""
    if float(number).is_integer() and abs(number) < 1e15:
        return int(number)
    rounded = float(f"{number:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _counters_to_row(counters: Counters, edges: dict[tuple[float, ...], int]) -> list[Any]:
    row: list[Any] = [_shorten_number(getattr(counters, name)) for name in _SCALAR_COUNTERS]
    row.append({reason: _shorten_number(count) for reason, count in counters.finished.items()})
    for histogram in (counters.time_to_first_token, counters.time_per_output_token):
        by_bucket = [_shorten_number(upper - lower) for lower, upper in pairwise((0.0, *histogram.counts))]
        row += [_intern_index(edges, histogram.edges), _shorten_number(histogram.sum), by_bucket]
    if (speculation := counters.speculation) is not None:
        numbers = (speculation.drafts, speculation.draft_tokens, speculation.accepted, *speculation.accepted_per_position)
        row.append([_shorten_number(number) for number in numbers])
    return row


def _counters_from_row(row: list[Any], edges: list[tuple[float, ...]]) -> Counters:
    scalars = _parse_numbers(row[: len(_SCALAR_COUNTERS)], len(_SCALAR_COUNTERS))
    finished, first, first_sum, first_counts, output, output_sum, output_counts, *rest = row[len(_SCALAR_COUNTERS) :]
    speculation = None
    if rest:
        drafts, tokens, accepted, *positions = _parse_numbers(rest[0], len(rest[0]))
        speculation = SpeculationCounters(drafts, tokens, accepted, tuple(positions))
    return Counters(
        **dict(zip(_SCALAR_COUNTERS, scalars, strict=True)),
        finished={str(reason): _parse_numbers([count], 1)[0] for reason, count in finished.items()},
        time_to_first_token=_histogram_from_buckets(edges[first], first_counts, first_sum),
        time_per_output_token=_histogram_from_buckets(edges[output], output_counts, output_sum),
        speculation=speculation,
    )


def _histogram_from_buckets(edges: tuple[float, ...], by_bucket: list[Any], total: Any) -> Histogram:
    return Histogram(edges, tuple(accumulate(_parse_numbers(by_bucket, len(edges)))), _parse_numbers([total], 1)[0])


def _parse_numbers(values: list[Any], count: int) -> list[float]:
    """Return `count` finite numbers, none of them negative. Raises ValueError."""
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{count} finite numbers of at least 0 are needed, not {values!r}.")
    return numbers
