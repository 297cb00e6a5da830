"""Pages that a tenant makes up: what is refused, in which words, what an accepted one can cost, and that honest ones are read."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aerie.engine.metrics import exposition as pages
from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie.engine.metrics.sample import Sample
from benchmarks._hostile_pods import PAGES, filled, honest

ACCEPTED = {"families", "ranks"}


@pytest.mark.parametrize("form", sorted(PAGES.keys() - ACCEPTED))
def test_a_made_up_page_is_refused_in_words_that_are_not_its_own(form: str) -> None:
    with pytest.raises(ExpositionError) as caught:
        parse_exposition(PAGES[form]())
    sentence = str(caught.value)
    assert len(sentence) < 200
    assert "\\" not in sentence
    assert "1e308" not in sentence


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("labels", "longer than 8192 bytes"),
        ("reasons", "more than 32 values of finished_reason"),
        ("engines", "more than 64 values of engine"),
        ("positions", "more than 64 values of position"),
        ("edges", "more than 128 values of le"),
        ("huge", "above 1e"),
        ("nan", "no finite value"),
        ("newlines", "more than 20000 lines"),
        ("sums", "more than 20000 lines"),
    ],
)
def test_the_limit_is_named(form: str, why: str) -> None:
    with pytest.raises(ExpositionError, match=why):
        parse_exposition(PAGES[form]())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('vllm:prompt_tokens_total{engine="1"} 1e19', r"a value above 1e\+18"),
        ('vllm:prompt_tokens_total{engine="1"} 9e17\n' * 3, r"a sum above 1e\+18"),
        ('vllm:prompt_tokens_total{engine="1"} ' + "9" * 65, "a value longer than 64 bytes"),
        ('vllm:request_success_total{finished_reason="' + "a" * 65 + '"} 1', "a value of finished_reason longer than 64 bytes"),
        ("vllm:request_success_total{" + 'a="",' * 8 + 'finished_reason="stop"} 1', "more than 8 labels"),
        ("vllm:request_success_total{" + 'a="\\"",' * 9 + 'finished_reason="stop"} 1', "more than 8 labels"),
        ("vllm:cache_config_info{" + "".join(f'a{n}="",' for n in range(129)) + "} 1", "more than 128 labels"),
        ('vllm:cache_config_info{num_gpu_blocks="' + "9" * 19 + '",block_size="16"} 1', "a number of more than 18 digits"),
        ('vllm:cache_config_info{num_gpu_blocks="9"} 1\n' * 65, "more than 64 engines"),
        ("vllm:prompt_tokens_total{} 1\n" * 4096, "more than 4096 lines that are read"),
        ("vllm:cache_config_info{a==} 1", "malformed labels"),
    ],
)
def test_a_line_beyond_a_limit_makes_the_page_one_that_cannot_be_read(line: str, why: str) -> None:
    with pytest.raises(ExpositionError, match=why):
        parse_exposition(honest() + line.encode() + b"\n")


def test_a_page_one_byte_too_large_is_refused_and_one_of_sixteen_ranks_is_not() -> None:
    largest = filled(b"#", honest(), size=pages.MAX_EXPOSITION_BYTES)
    assert len(largest) == pages.MAX_EXPOSITION_BYTES
    assert parse_exposition(largest).counters == parse_exposition(honest()).counters
    with pytest.raises(ExpositionError, match="more than 1048576 bytes"):
        parse_exposition(b"#" + largest)
    assert len(parse_exposition(honest(16, "m" * 70)).engines) == 16


def test_the_same_family_again_and_again_is_summed() -> None:
    times = len(PAGES["families"]()) // len(honest())
    assert parse_exposition(PAGES["families"]()).gauges == parse_exposition(honest()).gauges
    one, all_of_them = (parse_exposition(text.replace(b" 0.0\n", b" 2.0\n")) for text in (honest(), PAGES["families"]()))
    assert all_of_them.counters.prompt_tokens == times * one.counters.prompt_tokens > 0


def fullest() -> Sample:
    """Of a page that has as many values of each label as are allowed, each as long as it may be."""
    lines = [
        *(f'vllm:request_success_total{{finished_reason="{number:0>64}"}} 0.{number}7' for number in range(27)),
        *(f'vllm:generation_tokens_total{{engine="{number:0>64}"}} 0.{number}7' for number in range(63)),
        *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{number}"}} 0.{number}7' for number in range(64)),
        *(f'vllm:time_to_first_token_seconds_bucket{{le="{number}.123"}} 0.{number}7' for number in range(100)),
        *(f'vllm:request_time_per_output_token_seconds_bucket{{le="{number}.123"}} 0.{number}7' for number in range(100)),
    ]
    return parse_exposition(honest() + "\n".join(lines).encode() + b"\n")


def test_a_sample_is_small_whatever_its_page_says() -> None:
    assert len(pickle.dumps(fullest())) < 16 * 1024
    assert len(pickle.dumps(parse_exposition(honest(16)))) < 4 * 1024


def seconds(page: bytes) -> float:
    """The processor's time for one reading, the least of some."""
    found = []
    for _ in range(5):
        began = time.process_time()
        parse_exposition(page)
        found.append(time.process_time() - began)
    return min(found)


ESCAPED = b'vllm:prompt_tokens_by_source_total{a="' + b"\\\\" * 3900 + b'",source="a"} 1\n'
MANY = b"vllm:prompt_tokens_by_source_total{" + b'a="\\"",' * 7 + b'source="a"} 1\n'
PLAIN = b'vllm:prompt_tokens_by_source_total{a="' + b"}" * 7000 + b'",source="a"} 1\n'


@pytest.mark.parametrize("line", [ESCAPED, MANY, PLAIN], ids=["escapes", "labels", "braces"])
def test_four_times_the_page_takes_four_times_as_long_and_not_sixteen(line: bytes) -> None:
    most = min(4000, (pages.MAX_EXPOSITION_BYTES - len(honest())) // len(line)) // 4
    small, large = (honest() + line * number for number in (most, 4 * most))
    assert seconds(large) < 10 * seconds(small)


TEXT = st.text(st.sampled_from('ab",\\{}=\n \N{GREEK SMALL LETTER MU}'), max_size=8)
REASONS = st.sampled_from(["stop", "length", 'a"b', "a,b", "c\\n", "}", "le="])


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(
    st.lists(st.tuples(REASONS, TEXT, TEXT, st.integers(0, 10**9), st.permutations([0, 1, 2])), max_size=20),
    st.sampled_from(["", " ", "  "]),
)
def test_what_a_page_says_is_what_prometheus_reads_in_it(lines: list[tuple[str, str, str, int, list[int]]], blank: str) -> None:
    made = ""
    for reason, model, other, value, order in lines:
        labels = [("finished_reason", reason), ("model_name", model), ("other", other)]
        pairs = f",{blank}".join(f'{labels[index][0]}="{escaped(labels[index][1])}"' for index in order)
        made += f"vllm:request_success_total{{{pairs}}} {value}.0{blank}\n"
    expected = defaultdict(float, parse_exposition(honest()).counters.finished)
    for family in text_string_to_metric_families(made):
        for sample in family.samples:
            expected[sample.labels["finished_reason"]] += sample.value
    assert parse_exposition(honest() + made.encode()).counters.finished == expected
