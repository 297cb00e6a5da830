"""The two domains of a shift of traffic: the questions that the bundle's drafters were trained on, and prompts of another kind.

    old   a question, which the target answers                       the drafters were trained on the answers (answers.py)
    new   a passage of pydoc's topics, which the target continues    the target was trained on such texts, the drafters were not

A request of the new domain is a chat completion with the argument COMPLETION of the bundle's chat template, which then renders
the passage alone. So `spec.capture` records it. The new domain is defined here alone, for the demo and the benchmark of a
refresh.

Guarantees: the same Python release gives the same prompts, and no held-out topic is among those to train on. Not guaranteed: how
much a drafter loses on it; `make bench NAME=refresh` measures it.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from bundle.corpus import items, topics

COMPLETION = {"complete": True}
"""chat_template_kwargs of a request."""
PASSAGE = 240
"""Characters of a passage."""
STRIDE = 400
"""Distance of passages in a topic."""


def build_old_requests(*, held_out: bool) -> list[dict[str, Any]]:
    """Return the requests of the old domain without model and sampling, of the held-out questions or of the others."""
    return [{"messages": [{"role": "user", "content": item.question}]} for item in items() if item.held_out is held_out]


def build_new_requests(*, held_out: bool) -> list[dict[str, Any]]:
    """Return the requests of the new domain without model and sampling, of the held-out topics or of the others."""
    passages = _read_passages(held_out=held_out)
    if not held_out:
        excluded = set(_read_passages(held_out=True))  # topics may share a paragraph
        passages = [passage for passage in passages if passage not in excluded]
    return [
        {"messages": [{"role": "user", "content": passage}], "chat_template_kwargs": COMPLETION}
        for passage in dict.fromkeys(passages)
    ]


def is_held_out(topic: str) -> bool:
    """Return whether a topic is kept out of every refresh: one in six, by name."""
    return zlib.crc32(topic.encode()) % 6 == 0


def cut_passages(text: str) -> list[str]:
    """Return passages that begin with a paragraph, at least STRIDE apart."""
    passages, after = [], 0
    for begin in [0, *(match.end() for match in re.finditer(r"\n\n", text))]:
        if begin >= after and begin + PASSAGE < len(text):
            passages.append(text[begin : begin + PASSAGE])
            after = begin + STRIDE
    return passages


def _read_passages(*, held_out: bool) -> list[str]:
    chosen = [text for name, text in topics().items() if is_held_out(name) is held_out]
    return [passage for text in chosen for passage in cut_passages(text)]
