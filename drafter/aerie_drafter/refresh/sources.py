"""Captured prompts and old conversations, read from files.

    captured   a folder of JSON Lines files as the recorder of `spec.capture` writes them, or one such file
    old        files of conversations, answered or not; by default the data that the served drafter was trained on

Guarantees: a file that the recorder still writes (`.open`) is not read. Training data is only taken for the drafter's own if its
digest is that of the checkpoint's provenance. Not guaranteed: that old data without a digest was ever served.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_drafter.checkpoint import Provenance
from aerie_drafter.errors import DataError
from aerie_drafter.train.conversations import (
    Conversation,
    compute_sources_digest,
    parse_conversation,
    parse_json_line,
    read_conversations,
)

_TRAINING_DATA = re.compile(r"(?P<names>.+) \(sha256:(?P<digest>[0-9a-f]{64})\)")


@dataclass(frozen=True)
class CapturedPrompts:
    """Prompts of production, with the sampling parameters of their requests."""

    conversations: tuple[Conversation, ...]
    sampling: tuple[Mapping[str, Any], ...]


def read_captured_prompts(source: Path) -> CapturedPrompts:
    """Read the complete files of a folder and its subfolders in the order of their paths, or one file. Raises DataError."""
    files = sorted(source.rglob("*.jsonl")) if source.is_dir() else [source]
    conversations: list[Conversation] = []
    sampling: list[Mapping[str, Any]] = []
    for file in files:
        for location, line in _read_lines(file):
            record = parse_json_line(line, location)
            conversations.append(parse_conversation(record, location))
            parameters = record.get("sampling")
            sampling.append(parameters if isinstance(parameters, dict) else {})
    if not conversations:
        raise DataError(f"{source}: no prompts; expected: JSON Lines files with the suffix .jsonl, as spec.capture writes them.")
    return CapturedPrompts(tuple(conversations), tuple(sampling))


def read_old_conversations(sources: Sequence[Path]) -> tuple[Conversation, ...]:
    """Read all conversations of some files, without their `sequences`, which need much memory. Raises DataError."""
    return tuple(
        dataclasses.replace(conversation, sequences=()) for source in sources for conversation in read_conversations(source)
    )


def read_chosen_conversations(sources: Sequence[Path], locations: Collection[str]) -> dict[str, Conversation]:
    """Read the whole conversations at some locations, by location. Raises DataError."""
    chosen = frozenset(locations)
    return {
        conversation.location: conversation
        for source in sources
        for conversation in read_conversations(source)
        if conversation.location in chosen
    }


def find_training_data(provenance: Provenance, folders: Sequence[Path]) -> list[Path]:
    """Return the files that a checkpoint was trained on, if one of `folders` has them unchanged; else nothing."""
    match = _TRAINING_DATA.fullmatch(provenance.training_data)
    if match is None:
        return []
    for folder in folders:
        files = [folder / name for name in match["names"].split(", ")]
        if all(file.is_file() for file in files) and compute_sources_digest(files) == match["digest"]:
            return files
    return []


def _read_lines(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file}:{number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from error
