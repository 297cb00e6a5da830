"""Configuration of a target that a drafter depends on, read from the target's folder without loading it.

Not read: weights, and nothing over the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_drafter.errors import TargetError
from aerie_drafter.weights import CONFIG_FILE, read_json


@dataclass(frozen=True)
class TargetConfig:
    """Sizes in a target's config.json."""

    folder: Path
    layer_count: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    architectures: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> TargetConfig:
        """Read config.json in a folder; of a multimodal target, that of its text model. Raises CheckpointError, TargetError."""
        raw = read_json(folder / CONFIG_FILE)
        text: dict[str, Any] = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw

        def need(name: str) -> int:
            value = text.get(name)
            if not isinstance(value, int):
                raise TargetError(f"{folder / CONFIG_FILE}: {name} is {value!r}: expected: an integer; this is not a target.")
            return value

        max_positions = text.get("max_position_embeddings")
        return cls(
            folder,
            layer_count=need("num_hidden_layers"),
            hidden_size=need("hidden_size"),
            vocab_size=need("vocab_size"),
            max_position_embeddings=max_positions if isinstance(max_positions, int) else None,
            architectures=tuple(map(str, raw.get("architectures") or ())),
        )
