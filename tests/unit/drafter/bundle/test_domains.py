"""The new domain: no held-out text is among the prompts that a refresh may train on."""

from __future__ import annotations

from bundle import corpus
from bundle.domains import INSTRUCTION, build_new_prompts


def test_no_held_out_text_is_in_the_prompts_to_train_on() -> None:
    items = corpus.items()
    trained, kept = (build_new_prompts(items, held_out=held_out) for held_out in (False, True))
    texts = [{messages[0]["content"].removeprefix(f"{INSTRUCTION}\n") for messages in side} for side in (trained, kept)]
    assert texts[1] == {item.answer for item in items if item.held_out}
    assert not texts[0] & texts[1]
    assert len(trained) > 1000
    assert len(kept) > 80
