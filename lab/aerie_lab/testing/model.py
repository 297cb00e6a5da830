"""Writes a tiny Llama-style model for real vLLM, with random weights: it serves in no time and talks nonsense.

Files as a model repository has them, written with the standard library alone, so that a test needs neither torch nor a
download. Guarantees: the same seed writes the same files; every byte is a token of its own, so that any text is a prompt
and N tokens are N bytes. Not guaranteed: that the bytes that it answers are text.
"""

from __future__ import annotations

import array
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BEGIN, _END = "<s>", "</s>"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. vLLM's attention on CPU wants heads of at least 32."""

    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 2
    positions: int = 4096


_SHAPE = Shape()


def write_tiny_llama(folder: Path, shape: Shape = _SHAPE, seed: int = 0) -> Path:
    """Write the model into `folder`, which is made; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary()
    documents = {
        "config.json": _config(shape, len(vocabulary)),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer.json": _tokenizer(vocabulary),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BEGIN,
            "eos_token": _END,
            "model_max_length": shape.positions,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1) + "\n")
    chance = random.Random(seed)  # noqa: S311 - weights, no secrets
    (folder / "model.safetensors").write_bytes(_safetensors(_shapes(shape, len(vocabulary)), chance))
    return folder


def _config(shape: Shape, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _vocabulary() -> dict[str, int]:
    """Begin, end, and the 256 bytes, each as the printable character by which byte-level tokenizers write it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {_BEGIN: 0, _END: 1} | {characters[byte]: byte + 2 for byte in range(256)}


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, Any]:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_as_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[token], "content": token, **special} for token in (_BEGIN, _END)],
        "normalizer": None,
        "pre_tokenizer": bytes_as_characters,
        "post_processor": None,
        "decoder": bytes_as_characters,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _shapes(shape: Shape, vocabulary: int) -> dict[str, tuple[int, ...]]:
    hidden, wide = shape.hidden, shape.intermediate
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(shape.layers):
        part = f"model.layers.{layer}"
        shapes |= {f"{part}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{part}.mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        shapes[f"{part}.mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{part}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _safetensors(shapes: dict[str, tuple[int, ...]], chance: random.Random) -> bytes:
    """The weights as a safetensors file: the header's length (8 bytes), the header (JSON), the numbers one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        # Norms are 1, as in a fresh model; the rest is spread widely enough that answers differ from prompt to prompt.
        numbers = array.array("f", (1.0 if len(shape) == 1 else chance.gauss(0.0, 0.1) for _ in range(count)))
        if sys.byteorder == "big":
            numbers.byteswap()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
        data += numbers.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)
