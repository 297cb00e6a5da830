"""Tokenizer and target of the bundle: a byte-level BPE tokenizer with chat tokens, and a small Llama trained on the corpus.

The budget is a number of steps, never a time, and everything random comes from one seed, so that the same packages on the
same kind of processor with one thread give the same bytes. Other kinds of processor round otherwise.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from aerie.terminal import err
from bundle.corpus import Item

BEGIN, PAD, START, END = "<|begin|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 2048

CHAT_TEMPLATE = (
    "{{ bos_token }}{% if complete is defined and complete %}{{ messages[-1]['content'] }}{% else %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{% endif %}"
)
"""ChatML (https://github.com/openai/openai-python/blob/v0.28.1/chatml.md), after a token that begins the text.

With the argument `complete` the target continues the last message as a text, as it was trained on pydoc's topics."""

PHASES = ((1500, 4, 256), (24, 1, 2048))
"""(steps, sequences, tokens of each): most of the training is short, the end goes to the full length."""

SEED = 20260511


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCABULARY tokens; every text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save, with the class name that Transformers 4 knows too: the newest vLLM that loads the bundle is not the only one."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = {**json.loads(file.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the target before training."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train_target(folder: Path, items: list[Item], texts: list[str], phases: Sequence[tuple[int, int, int]] = PHASES) -> float:
    """Train and save tokenizer and target into `folder`; returns the mean loss over the last hundred steps, nats per token."""
    training_items = [item for item in items if not item.held_out]
    tokenizer = make_tokenizer([text for item in training_items for text in (item.question, item.answer)] + texts)
    model = new_model(tokenizer)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.0, betas=(0.9, 0.95), fused=True)
    total, losses = sum(steps for steps, _, _ in phases), []
    for step, batch in enumerate(batches(tokenizer, training_items, texts, phases)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 99:
            err.print(f"target: step {step + 1} of {total}, loss {sum(losses[-100:]) / 100:.3f}")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    last = losses[-100:]
    return float(sum(last) / len(last))


def parameter_groups(model: LlamaForCausalLM) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def learning_rate(step: int, total: int, peak: float = 3e-3, warmup: int = 60) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))))


def batches(
    tokenizer: PreTrainedTokenizerFast, learned: list[Item], texts: list[str], phases: Sequence[tuple[int, int, int]]
) -> Iterator[Tensor]:
    """Yield token ids [sequences, tokens], cut from an endless stream of documents, shuffled again for every pass."""
    stream = _stream(tokenizer, learned, texts)
    pool: list[int] = []
    for steps, sequences, length in phases:
        for _ in range(steps):
            while len(pool) < sequences * length:
                pool += next(stream)
            yield torch.tensor(pool[: sequences * length]).view(sequences, length)
            pool = pool[sequences * length :]


def _stream(tokenizer: PreTrainedTokenizerFast, learned: list[Item], texts: list[str]) -> Iterator[list[int]]:
    """Documents without end: conversations of one to four questions, and pieces of the plain texts."""
    generator = random.Random(SEED)  # noqa: S311 (an order, no secret)
    while True:
        documents: list[str] = []
        order = generator.sample(learned, len(learned))
        while order:
            turns = min(generator.choice((1, 1, 2, 4)), len(order))
            messages = [message for _ in range(turns) for message in exchange(order.pop())]
            documents.append(str(tokenizer.apply_chat_template(messages, tokenize=False)))
        documents += [BEGIN + text + END for text in texts]
        generator.shuffle(documents)
        yield from tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]


def exchange(item: Item) -> list[dict[str, str]]:
    """One question and its answer, as chat messages."""
    return [{"role": "user", "content": item.question}, {"role": "assistant", "content": item.answer}]
