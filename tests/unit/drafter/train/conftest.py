"""A tiny target with random weights and a tokenizer of single bytes, and conversations for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SPECIAL = ("<end>", "<system>", "<user>", "<assistant>", "<tool>")


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")  # type: ignore[no-untyped-call]
    tokenizer.add_special_tokens({"extra_special_tokens": list(SPECIAL[1:])})
    tokenizer.chat_template = template
    return tokenizer


def tiny_target(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes | changes))
    return model.eval()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved target with its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def write_conversations(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a file of `count` conversations whose answers are consecutive words."""

    def write(count: int = 12, name: str = "answers.jsonl") -> Path:
        draw = random.Random(count)  # noqa: S311 (no secret)
        lines = []
        for index in range(count):
            words = " ".join(draw.choice(("one", "two", "three")) for _ in range(draw.randint(2, 6)))
            lines.append(json.dumps({"prompt": f"say {index}", "response": words}))
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[..., Any]:
    """Return `byte_tokenizer`, for tests."""
    return byte_tokenizer


@pytest.fixture(scope="session")
def target_of() -> Callable[..., Any]:
    """Return `tiny_target`, for tests."""
    return tiny_target
