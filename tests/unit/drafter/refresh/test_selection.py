"""Choice of prompts: no duplicate, no conversation on both sides, and the same choice for the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from aerie_drafter.refresh.selection import (
    count_old,
    mix_recorded_temperatures,
    most_frequent_temperature,
    remove_prompts,
    split_conversations,
    strip_answer,
)
from aerie_drafter.train.conversations import Conversation, parse_conversation


def conversation(*texts: str, system: str = "") -> Conversation:
    """Return a conversation whose turns alternate, beginning with the user's."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    begin = [{"role": "system", "content": system}] if system else []
    return parse_conversation({"messages": [*begin, *messages]}, "a test")


def texts(conversations: Sequence[Conversation]) -> list[str]:
    return [str(strip_answer(each)[-1]["content"]) for each in conversations]


def test_duplicates_count_once_and_the_order_does_not_matter() -> None:
    prompts = [conversation(f"question {index % 40}") for index in range(80)]
    split = split_conversations(prompts, 0.25, None, 1000)
    assert sorted(texts(split.trained) + texts(split.held_out)) == sorted(f"question {index}" for index in range(40))
    assert split_conversations(prompts[::-1], 0.25, None, 1000) == split


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=60), st.floats(0.01, 0.99))
def test_no_conversation_is_on_both_sides(turns: list[list[int]], share: float) -> None:
    split = split_conversations([conversation(*map(str, numbers)) for numbers in turns], share, None, 1000)
    begins = [{strip_answer(each)[0]["content"] for each in side} for side in (split.trained, split.held_out)]
    assert not begins[0] & begins[1]


def test_a_prompt_stays_on_its_side_when_others_are_added() -> None:
    before = split_conversations([conversation(f"a {index}") for index in range(50)], 0.3, None, 1000)
    after = split_conversations([conversation(f"{letter} {index}") for letter in "ab" for index in range(50)], 0.3, None, 1000)
    assert set(texts(before.held_out)) <= set(texts(after.held_out))
    assert set(texts(before.trained)) <= set(texts(after.trained))


def test_the_limits_bound_both_sides() -> None:
    split = split_conversations([conversation(f"a {index}") for index in range(200)], 0.5, 7, 5)
    assert (len(split.trained), len(split.held_out)) == (7, 5)


def test_an_answer_at_the_end_is_not_part_of_the_prompt() -> None:
    answered, open_question = conversation("q", "answer"), conversation("q")
    assert strip_answer(answered) == strip_answer(open_question)
    assert len(split_conversations([answered, open_question], 0.01, None, 1).trained) == 1


def test_template_arguments_make_another_prompt() -> None:
    plain = parse_conversation({"prompt": "q"}, "a test")
    other = parse_conversation({"prompt": "q", "chat_template_kwargs": {"enable_thinking": False}}, "a test")
    split = split_conversations([plain, other], 0.01, None, 10)
    assert len(split.trained + split.held_out) == 2


def test_prompts_that_are_held_back_elsewhere_are_removed() -> None:
    remaining = remove_prompts([conversation("a", "x", "b"), conversation("c")], [conversation("a")])
    assert texts(remaining) == ["c"]


def test_old_conversations_get_their_share() -> None:
    assert count_old(100, 1000, 0.5) == 100
    assert count_old(100, 1000, 0.75) == 300
    assert count_old(100, 20, 0.5) == 20
    assert count_old(100, 1000, 0.0) == 0


def test_temperatures_are_those_of_the_captured_requests() -> None:
    mix = mix_recorded_temperatures([{"temperature": 0}, {"temperature": 0.71}, {"temperature": 0.7}, {}], default=1.0)
    assert mix.shares == ((0.0, 0.25), (0.7, 0.5), (1.0, 0.25))
    assert most_frequent_temperature(mix) == 0.7
    assert mix_recorded_temperatures([], default=1.0).shares == ((1.0, 1.0),)
    assert mix_recorded_temperatures([{"temperature": "hot"}, {"temperature": True}], default=0.0).shares == ((0.0, 1.0),)
