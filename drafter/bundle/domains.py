"""The two domains of a shift of traffic: the questions that the bundle's drafters were trained on, and prompts of another kind.

    old   one question                     the drafters were trained on the answers (answers.py)
    new   a text that is to be summarized  the drafters were not

The new domain is defined here alone; the demo and the benchmark of a refresh take it from here. Guarantees: the same Python
release gives the same prompts, and a held-out text is in no training. Not guaranteed: that the target can summarize, or that a
drafter loses much; `make bench NAME=refresh` measures how much.
"""

from __future__ import annotations

from collections.abc import Sequence

from bundle.corpus import Item

INSTRUCTION = "Summarize:"


def build_new_prompts(items: Sequence[Item], *, held_out: bool) -> list[list[dict[str, str]]]:
    """Return the messages of each prompt of the new domain, with the held-out texts or with the others."""
    texts = dict.fromkeys(item.answer for item in items if item.held_out is held_out)
    if not held_out:
        kept = {item.answer for item in items if item.held_out}  # two functions may have the same documentation
        texts = dict.fromkeys(text for text in texts if text not in kept)
    return [[{"role": "user", "content": f"{INSTRUCTION}\n{text}"}] for text in texts]
