"""The exposition equals vLLM's line by line: that of a new vLLM 0.32.0, and values rendered by prometheus_client."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.parser import text_string_to_metric_families

from aerie_lab.engine.metrics.counters import ITL_BUCKETS, Counters, Histogram
from aerie_lab.engine.metrics.exposition import render_exposition, render_histogram
from aerie_lab.engine.metrics.registry import register_counters, render_other_families
from aerie_vllm.counters import read_counts

FRESH = Path(__file__).with_name("vllm-0.32.0-fresh.prom")
"""Metrics response of vLLM 0.32.0 on CPU just after its start, K = 3, --max-model-len 1024: the lines that name vLLM."""


def without_timestamps(lines: list[str]) -> list[str]:
    return [re.sub(r"(_created\{.*\}) .*", r"\1 T", line) for line in lines]


def test_the_exposition_of_a_new_engine_equals_that_of_vllm() -> None:
    expected = [line for line in FRESH.read_text().splitlines() if "cache_config_info" not in line]
    assert without_timestamps(render_exposition(Counters(1024, 3), "tiny", 1.8e9).splitlines()) == without_timestamps(expected)


def test_without_speculation_its_metric_families_are_absent() -> None:
    assert "spec_decode" not in render_exposition(Counters(1024, None), "tiny", 1.8e9)


def test_the_cache_config_is_an_info_gauge() -> None:
    text = render_exposition(Counters(1024, None), "tiny", 1.8e9, {"block_size": "16", "num_gpu_blocks": "512"})
    assert text.endswith('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="512"} 1.0\n')


def test_values_are_rendered_like_those_of_prometheus_client() -> None:
    registry = CollectorRegistry()
    library_histogram = LibraryHistogram("itl", "h", ["m"], buckets=ITL_BUCKETS, registry=registry).labels("x")
    simulator_histogram = Histogram(ITL_BUCKETS)
    for value in (0.004, 0.01, 0.0100001, 3.0, 99.0, 1e-7):
        library_histogram.observe(value)
        simulator_histogram.observe(value)
    expected = [line for line in generate_latest(registry).decode().splitlines() if "#" not in line and "_created" not in line]
    assert list(render_histogram("itl", simulator_histogram, ['m="x"'])) == expected


@pytest.mark.parametrize("value", [0.0, 12345678.0, 1795265030.3011808, 0.1 + 0.2, 1e15, 3e20])
def test_large_counters_are_rendered_like_those_of_prometheus_client(value: float) -> None:
    registry = CollectorRegistry()
    Counter("n", "h", registry=registry).inc(value)
    counters = Counters(1024, None)
    counters.generation_tokens = value  # type: ignore[assignment]
    simulator_line = next(
        line for line in render_exposition(counters, "m", 1.0).splitlines() if line.startswith("vllm:generation_tokens_total")
    )
    library_line = next(line for line in generate_latest(registry).decode().splitlines() if line.startswith("n_total"))
    assert simulator_line.rsplit(" ", 1)[1] == library_line.rsplit(" ", 1)[1]


def test_a_model_name_with_quotes_is_escaped() -> None:
    text = render_exposition(Counters(1024, None), 'a"b\\c', 1.0)
    names = {sample.labels["model_name"] for family in text_string_to_metric_families(text) for sample in family.samples}
    assert names == {'a"b\\c'}


def busy_counters() -> Counters:
    counters = Counters(1024, 3)
    counters.generation_tokens, counters.prompt_tokens = 700, 300
    counters.request_success["length"] = 5
    counters.tokens_per_draft.observe_many([1, 2, 4, 4])
    for value in (0.004, 0.02, 99.0):
        counters.time_to_first_token.observe(value)
    return counters


def test_a_registry_has_the_samples_of_the_exposition() -> None:
    counters, registry = busy_counters(), CollectorRegistry()
    register_counters(registry, counters, "tiny")
    families = text_string_to_metric_families(render_exposition(counters, "tiny", 1.8e9))
    expected = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    actual = {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in registry.collect() for sample in family.samples
    }
    assert actual == expected


def test_the_plugin_reads_the_counters_of_an_engine() -> None:
    counters, registry = busy_counters(), CollectorRegistry()
    register_counters(registry, counters, "tiny")
    Counter("other", "h", registry=registry).inc()
    counts = read_counts(registry)
    assert counts["vllm:spec_decode_num_drafts_total"] == {"": 4.0}
    assert counts["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == {"0": 3.0, "1": 2.0, "2": 2.0}
    assert counts["vllm:time_to_first_token_seconds_bucket"]["0.02"] == 2.0
    assert counts["vllm:request_success_total"]["length"] == 5.0
    assert "other_total 1.0" in (text := render_other_families(registry))
    assert "vllm:" not in text
