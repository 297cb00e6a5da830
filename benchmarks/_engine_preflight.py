"""Part of the benchmark `engine`: how long preflight takes for a target of a trillion parameters."""

from __future__ import annotations

import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from aerie.checkpoints import read_checkpoint_directory
from aerie.engine.preflight import PreflightInput, run_preflight
from aerie.engine.releases import NEWEST_VERIFIED_VERSION

SHARDS = 700
TENSORS = 150
"""Tensors of each shard; in all, those of a model of a trillion parameters with 384 experts in each of 60 layers."""


def preflight() -> float:
    """Measure the seconds to read the headers of 700 shards with 105,000 tensors and to run all checks; the best of five."""
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as scratch:
        target, drafter = _target(Path(scratch, "target")), _drafter(Path(scratch, "drafter"))
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            speculative = {"method": "eagle3", "num_speculative_tokens": 3}
            subject = PreflightInput(
                read_checkpoint_directory(target),
                read_checkpoint_directory(drafter),
                NEWEST_VERIFIED_VERSION,
                speculative,
                gpu_memory_bytes=80 * 2**30,
                gpu_count=1,
            )
            run_preflight(subject)
            seconds.append(time.perf_counter() - began)
    return round(min(seconds), 2)


def _target(folder: Path) -> Path:
    """Write headers of 1.4 TiB of experts into sparse files."""
    rows, columns = 2048, 7168
    index: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard:05}-of-{SHARDS:05}.safetensors"
        names = [f"model.layers.{shard // 12}.mlp.experts.{shard * TENSORS + i}.gate_proj.weight" for i in range(TENSORS)]
        _write(folder / file, dict.fromkeys(names, ("F8_E4M3", (rows, columns), rows * columns)))
        index |= dict.fromkeys(names, file)
    sizes = {"hidden_size": columns, "num_hidden_layers": 61, "num_attention_heads": 64, "vocab_size": 163840}
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2", **sizes}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def _drafter(folder: Path) -> Path:
    _write(folder / "model.safetensors", {"fc.weight": ("BF16", (64, 192), 2 * 64 * 192)})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}))
    return folder


def _write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
