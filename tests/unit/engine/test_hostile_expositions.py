"""Hostile metrics responses of a tenant: which are rejected, with which message, and how much time and memory they take."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aerie.engine.metrics import exposition
from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie.engine.metrics.sample import Sample
from benchmarks._hostile_pods import PAGES, filled, honest

ACCEPTED = {"families", "ranks"}


@pytest.mark.parametrize("form", sorted(PAGES.keys() - ACCEPTED))
def test_a_hostile_response_is_rejected_without_its_text(form: str) -> None:
    with pytest.raises(ExpositionError) as caught:
        parse_exposition(PAGES[form]())
    message = str(caught.value)
    assert len(message) < 200
    assert "\\" not in message
    assert "1e308" not in message


@pytest.mark.parametrize(
    ("form", "message"),
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
def test_the_message_names_the_limit(form: str, message: str) -> None:
    with pytest.raises(ExpositionError, match=message):
        parse_exposition(PAGES[form]())


@pytest.mark.parametrize(
    ("line", "message"),
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
def test_a_line_over_a_limit_is_rejected(line: str, message: str) -> None:
    with pytest.raises(ExpositionError, match=message):
        parse_exposition(honest() + line.encode() + b"\n")


def test_a_response_over_the_maximum_size_is_rejected() -> None:
    largest = filled(b"#", honest(), size=exposition.MAX_EXPOSITION_BYTES)
    assert len(largest) == exposition.MAX_EXPOSITION_BYTES
    assert parse_exposition(largest).counters == parse_exposition(honest()).counters
    with pytest.raises(ExpositionError, match="more than 1048576 bytes"):
        parse_exposition(b"#" + largest)
    assert len(parse_exposition(honest(16, "m" * 70)).engines) == 16


def test_repeated_families_are_summed() -> None:
    count = len(PAGES["families"]()) // len(honest())
    assert parse_exposition(PAGES["families"]()).gauges == parse_exposition(honest()).gauges
    single, repeated = (parse_exposition(text.replace(b" 0.0\n", b" 2.0\n")) for text in (honest(), PAGES["families"]()))
    assert repeated.counters.prompt_tokens == count * single.counters.prompt_tokens > 0


def build_largest_sample() -> Sample:
    """Return the sample of an exposition with the maximum number of values of each label, each of maximum length."""
    lines = [
        *(f'vllm:request_success_total{{finished_reason="{number:0>64}"}} 0.{number}7' for number in range(27)),
        *(f'vllm:generation_tokens_total{{engine="{number:0>64}"}} 0.{number}7' for number in range(63)),
        *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{number}"}} 0.{number}7' for number in range(64)),
        *(f'vllm:time_to_first_token_seconds_bucket{{le="{number}.123"}} 0.{number}7' for number in range(100)),
        *(f'vllm:request_time_per_output_token_seconds_bucket{{le="{number}.123"}} 0.{number}7' for number in range(100)),
    ]
    return parse_exposition(honest() + "\n".join(lines).encode() + b"\n")


def test_a_sample_is_small_for_any_response() -> None:
    assert len(pickle.dumps(build_largest_sample())) < 16 * 1024
    assert len(pickle.dumps(parse_exposition(honest(16)))) < 4 * 1024


def measure_parse_seconds(body: bytes) -> float:
    """Return the CPU time of one parse: the minimum of five."""
    durations = []
    for _ in range(5):
        started = time.process_time()
        parse_exposition(body)
        durations.append(time.process_time() - started)
    return min(durations)


ESCAPED = b'vllm:prompt_tokens_by_source_total{a="' + b"\\\\" * 3900 + b'",source="a"} 1\n'
MANY = b"vllm:prompt_tokens_by_source_total{" + b'a="\\"",' * 7 + b'source="a"} 1\n'
PLAIN = b'vllm:prompt_tokens_by_source_total{a="' + b"}" * 7000 + b'",source="a"} 1\n'


@pytest.mark.parametrize("line", [ESCAPED, MANY, PLAIN], ids=["escapes", "labels", "braces"])
def test_parse_time_is_linear_in_the_number_of_lines(line: bytes) -> None:
    line_count = min(4000, (exposition.MAX_EXPOSITION_BYTES - len(honest())) // len(line)) // 4
    small, large = (honest() + line * number for number in (line_count, 4 * line_count))
    assert measure_parse_seconds(large) < 10 * measure_parse_seconds(small)


TEXT = st.text(st.sampled_from('ab",\\{}=\n \N{GREEK SMALL LETTER MU}'), max_size=8)
REASONS = st.sampled_from(["stop", "length", 'a"b', "a,b", "c\\n", "}", "le="])


def escape_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(
    st.lists(st.tuples(REASONS, TEXT, TEXT, st.integers(0, 10**9), st.permutations([0, 1, 2])), max_size=20),
    st.sampled_from(["", " ", "  "]),
)
def test_parsed_labels_agree_with_the_prometheus_client(lines: list[tuple[str, str, str, int, list[int]]], blank: str) -> None:
    text = ""
    for reason, model, other, value, order in lines:
        labels = [("finished_reason", reason), ("model_name", model), ("other", other)]
        pairs = f",{blank}".join(f'{labels[index][0]}="{escape_value(labels[index][1])}"' for index in order)
        text += f"vllm:request_success_total{{{pairs}}} {value}.0{blank}\n"
    expected = defaultdict(float, parse_exposition(honest()).counters.finished)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            expected[sample.labels["finished_reason"]] += sample.value
    assert parse_exposition(honest() + text.encode()).counters.finished == expected
