"""The new domain: passages that the template passes on as they are, and no held-out topic among those to train on."""

from __future__ import annotations

from typing import Any

from aerie_drafter import bundle
from aerie_drafter.chat_template import TemplateArguments
from aerie_drafter.train.states import load_tokenizer
from bundle import corpus
from bundle.domains import PASSAGE, build_new_requests, cut_passages, is_held_out
from bundle.target import CHAT_TEMPLATE


def passage(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


def test_no_held_out_topic_is_among_the_prompts_to_train_on() -> None:
    trained, held_back = (build_new_requests(held_out=held_out) for held_out in (False, True))
    held_out_text = "\n".join(text for name, text in corpus.topics().items() if is_held_out(name))
    assert len(trained) > 400
    assert len(held_back) > 40
    assert all(passage(request) in held_out_text for request in held_back)
    assert not {passage(request) for request in trained} & {passage(request) for request in held_back}


def test_passages_begin_with_a_paragraph() -> None:
    text = "\n\n".join(f"{number} " + "word " * 80 for number in range(6))
    assert [part.split()[0] for part in cut_passages(text)] == ["0", "1", "2", "3", "4", "5"]
    assert {len(part) for part in cut_passages(text)} == {PASSAGE}


def test_the_shipped_template_renders_the_passage_alone() -> None:
    tokenizer = load_tokenizer(str(bundle.find_bundle_path("target")), None)
    request = build_new_requests(held_out=True)[0]
    arguments = TemplateArguments(kwargs=request["chat_template_kwargs"])
    assert arguments.render(tokenizer, request["messages"], "a test", generation_prompt=True) == "<|begin|>" + passage(request)
    plain = TemplateArguments().render(tokenizer, request["messages"], "a test", generation_prompt=True)
    assert plain.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.chat_template == CHAT_TEMPLATE
