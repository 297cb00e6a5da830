"""Expositions of real vLLM and generated ones: parsed samples, errors, and the difference of two samples."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.names import Metric, MetricType
from aerie.engine.metrics.sample import CounterReset, Counters, Gauges, Sample, SpeculationCounters, diff_samples

DATA = Path(__file__).parent / "data"
PAGES = sorted(DATA.glob("*.prom"))


def read_exposition(name: str) -> bytes:
    return (DATA / f"vllm-0.32.0-{name}.prom").read_bytes()


# -------------------------------------------------------------------------------------------------- expositions of real vLLM
def test_an_exposition_of_real_vllm() -> None:
    sample = parse_exposition(read_exposition("ngram-2"))
    counters = sample.counters
    assert counters.speculation == SpeculationCounters(354, 850, 448, (250, 122, 76))
    assert sum(counters.speculation.accepted_per_position) == counters.speculation.accepted
    assert (counters.generation_tokens, counters.prompt_tokens, counters.computed_prompt_tokens) == (1056, 2590, 2590)
    assert (counters.request_steps, counters.iterations, counters.first_tokens) == (606, 208, 32)
    assert counters.finished == {"stop": 0, "length": 32, "abort": 0, "error": 0, "repetition": 0}
    assert counters.step_seconds == 4.301867736999384
    assert counters.time_to_first_token.sum == 6.126955986022949
    assert sample.gauges == Gauges(0, 0, 0, 65536)
    assert sample.engines == {"0"}
    assert sample.process_start_time == 1.79526501702e09


def test_an_exposition_of_two_api_servers() -> None:
    before, after = parse_exposition(read_exposition("two-api-servers-0")), parse_exposition(read_exposition("two-api-servers-2"))
    assert before.gauges == Gauges(None, None, None, 65536)
    assert after.gauges == Gauges(0, 0, 0, 65536)
    assert after.process_start_time is None
    one_server = parse_exposition(read_exposition("ngram-2")).counters
    assert after.counters.speculation == one_server.speculation
    assert after.counters.request_steps == one_server.request_steps
    assert one_server.iterations < after.counters.iterations <= 2 * one_server.iterations


@pytest.mark.parametrize("metric", Metric)
def test_every_metric_is_in_the_exposition(metric: Metric) -> None:
    """Name, type, labels and default buckets are those of the captured exposition."""
    row = metric.definition
    families = {family.name: family for family in text_string_to_metric_families(read_exposition("ngram-2").decode())}
    family = families[row.name.removesuffix("_total") if row.metric_type is MetricType.COUNTER else row.name]
    assert family.type == row.metric_type
    expected_labels = set(row.labels) | ({"le"} if row.metric_type is MetricType.HISTOGRAM else set())
    series = [sample for sample in family.samples if sample.name.startswith(row.name) and "_created" not in sample.name]
    assert series
    for sample in series:
        assert set(sample.labels) >= set(row.labels)
        if metric is not Metric.CACHE_CONFIG:
            assert set(sample.labels) <= expected_labels
    edges = [float(sample.labels["le"]) for sample in series if sample.name.endswith("_bucket")]
    assert edges == [*row.buckets, math.inf] if row.metric_type is MetricType.HISTOGRAM else not edges


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_counters_agree_with_the_prometheus_client(path: Path) -> None:
    text = path.read_text()
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (
                sample.name,
                sample.labels.get("le") or sample.labels.get("position") or sample.labels.get("finished_reason") or "",
            )
            values[key] = values.get(key, 0.0) + sample.value
    counters = parse_exposition(text.encode()).counters
    assert counters.speculation is not None
    assert counters.speculation.drafts == values["vllm:spec_decode_num_drafts_total", ""]
    for position, count in enumerate(counters.speculation.accepted_per_position):
        assert count == values["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(position)]
    for reason, count in counters.finished.items():
        assert count == values["vllm:request_success_total", reason]
    histogram = counters.time_to_first_token
    for edge, count in zip(histogram.edges, histogram.counts, strict=True):
        assert count == values["vllm:time_to_first_token_seconds_bucket", "+Inf" if edge == math.inf else str(edge)]


# --------------------------------------------------------------------------------------------------- generated expositions
def render(sample: Sample, model: str = "tiny") -> bytes:
    """Render an exposition with all values on the first engine, and zeros on the others."""
    lines = list(_lines(sample, model))
    if sample.process_start_time is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {sample.process_start_time!r}"]
    return ("# HELP vllm:x y\n" + "\n".join(lines) + "\n").encode()


def escape_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _lines(sample: Sample, model: str) -> Iterator[str]:
    counters, gauges = sample.counters, sample.gauges
    for index, engine in enumerate(sorted(sample.engines)):
        labels = {"engine": engine, "model_name": model}
        scale = 0.0 if index else 1.0
        for metric, value, metric_labels in _values(counters, gauges):
            yield _line(metric.definition.name, labels | metric_labels, value * scale)
        for metric, histogram in _histograms(counters):
            name = metric.definition.name
            for edge, count in zip(histogram.edges, histogram.counts, strict=True):
                yield _line(f"{name}_bucket", labels | {"le": "+Inf" if edge == math.inf else repr(edge)}, count * scale)
            yield _line(f"{name}_count", labels, histogram.count * scale)
            yield _line(f"{name}_sum", labels, histogram.sum * scale)
    if gauges.kv_tokens is not None:
        yield _line(Metric.CACHE_CONFIG.definition.name, {"block_size": "1", "num_gpu_blocks": f"{gauges.kv_tokens:.0f}"}, 1.0)


def _line(name: str, labels: dict[str, str], value: float) -> str:
    return name + "{" + ",".join(f'{key}="{escape_value(text)}"' for key, text in sorted(labels.items())) + "} " + repr(value)


def _values(counters: Counters, gauges: Gauges) -> Iterator[tuple[Metric, float, dict[str, str]]]:
    yield Metric.GENERATION_TOKENS, counters.generation_tokens, {}
    yield Metric.PROMPT_TOKENS, counters.prompt_tokens, {}
    yield Metric.PROMPT_TOKENS_BY_SOURCE, counters.computed_prompt_tokens, {"source": "local_compute"}
    yield Metric.PROMPT_TOKENS_BY_SOURCE, 5.0, {"source": "local_cache_hit"}
    yield Metric.PREFIX_CACHE_QUERIES, counters.prefix_cache_queries, {}
    yield Metric.PREFIX_CACHE_HITS, counters.prefix_cache_hits, {}
    yield Metric.PREEMPTIONS, counters.preemptions, {}
    for reason, count in counters.finished.items():
        yield Metric.FINISHED, count, {"finished_reason": reason}
    if counters.speculation is not None:
        yield Metric.DRAFTS, counters.speculation.drafts, {}
        yield Metric.DRAFT_TOKENS, counters.speculation.draft_tokens, {}
        yield Metric.ACCEPTED, counters.speculation.accepted, {}
        for position, count in enumerate(counters.speculation.accepted_per_position):
            yield Metric.ACCEPTED_PER_POSITION, count, {"position": str(position)}
    for metric, value in (
        (Metric.RUNNING, gauges.running_requests),
        (Metric.WAITING, gauges.waiting_requests),
        (Metric.KV_CACHE_USAGE, gauges.kv_cache_usage),
    ):
        if value is not None:
            yield metric, value, {}


def _histograms(counters: Counters) -> Iterator[tuple[Metric, Histogram]]:
    for metric, count, total in (
        (Metric.INTER_TOKEN_LATENCY, counters.request_steps, counters.step_seconds),
        (Metric.ITERATION_TOKENS, counters.iterations, 7.0),
        (Metric.QUEUE_TIME, counters.queued_requests, counters.queue_seconds),
    ):
        yield metric, Histogram((1.0, math.inf), (0.0, count), total)
    yield Metric.TIME_TO_FIRST_TOKEN, counters.time_to_first_token
    yield Metric.TIME_PER_OUTPUT_TOKEN, counters.time_per_output_token


COUNTS = st.integers(0, 10**9).map(float)
SECONDS = st.floats(0, 1e6)
EDGES = (0.1, 1.0, float("inf"))
SPECULATION = st.builds(SpeculationCounters, COUNTS, COUNTS, COUNTS, st.tuples(COUNTS, COUNTS, COUNTS))


def histograms() -> st.SearchStrategy[Histogram]:
    buckets = st.lists(st.integers(0, 10**6).map(float), min_size=len(EDGES), max_size=len(EDGES))
    return st.builds(lambda counts, total: Histogram(EDGES, tuple(accumulate(counts)), total), buckets, SECONDS)


def counters() -> st.SearchStrategy[Counters]:
    """Return a strategy of one engine's counters, all with the same edges and positions."""
    return st.builds(
        Counters,
        generation_tokens=COUNTS,
        prompt_tokens=COUNTS,
        computed_prompt_tokens=COUNTS,
        prefix_cache_queries=COUNTS,
        prefix_cache_hits=COUNTS,
        preemptions=COUNTS,
        finished=st.fixed_dictionaries({"stop": COUNTS, "length": COUNTS, "error": COUNTS}),
        request_steps=COUNTS,
        step_seconds=SECONDS,
        iterations=COUNTS,
        queued_requests=COUNTS,
        queue_seconds=SECONDS,
        time_to_first_token=histograms(),
        time_per_output_token=histograms(),
        speculation=SPECULATION,
    )


def samples() -> st.SearchStrategy[Sample]:
    gauge = st.none() | COUNTS
    return st.builds(
        Sample,
        counters=counters() | counters().map(lambda generated: dataclasses.replace(generated, speculation=None)),
        gauges=st.builds(Gauges, gauge, gauge, st.none() | st.floats(0, 1), gauge),
        engines=st.sampled_from([frozenset("0"), frozenset("01"), frozenset(['a"b', "c\\,}"])]),
        process_start_time=st.none() | st.floats(1e9, 2e9),
    )


@given(
    samples(),
    st.sampled_from(["tiny", 'a"b', "back\\slash", "new\nline", "a,le=", "}", 'x\\",position="9', "\N{GREEK SMALL LETTER MU}"]),
)
def test_a_rendered_sample_parses_to_itself(sample: Sample, model: str) -> None:
    assert parse_exposition(render(sample, model)) == sample


def test_every_label_value_is_unescaped() -> None:
    sample = dataclasses.replace(parse_exposition(read_exposition("ngram-2")), engines=frozenset({'a"b', "c\\n", "d\n}"}))
    assert parse_exposition(render(sample)).engines == sample.engines


def test_engines_and_model_names_are_summed() -> None:
    first_engine = read_exposition("ngram-2")
    second_engine = first_engine.replace(b'engine="0"', b'engine="1"')
    second_model = first_engine.replace(b'model_name="tiny"', b'model_name="second name"')
    total, single = parse_exposition(first_engine + second_engine + second_model), parse_exposition(first_engine)
    assert total.counters == single.counters + single.counters + single.counters
    assert total.engines == {"0", "1"}
    assert total.gauges.kv_tokens == 3 * 65536


def test_a_timestamp_after_the_value_is_ignored() -> None:
    body = read_exposition("ngram-2").replace(
        b'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0', b'vllm:num_requests_running{engine="0"} 7 1395066363000'
    )
    assert parse_exposition(body).gauges.running_requests == 7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\n", b"", "ends in the middle of a line"),
        (b"vllm:", b"sglang:", "has no vllm:generation_tokens_total"),
        (b"vllm:generation_tokens_total", b"vllm:other", "has no vllm:generation_tokens_total"),
        (b"vllm:spec_decode_num_draft_tokens_total", b"vllm:other", "has no vllm:spec_decode_num_draft_tokens_total"),
        (b"vllm:inter_token_latency_seconds_count", b"vllm:other", "has no vllm:inter_token_latency_seconds_count"),
        (b'position="1"', b'position="4"', "does not have the positions 0, 1, 2"),
        (b'le="+Inf"', b'le="9999"', "is no histogram"),
        (b'le="0.5",', b"", "cannot be read (no label le)"),
        (b" 448.0", b" NaN", "cannot be read (no finite value): vllm:spec_decode_num_accepted_tokens_total"),
        (b" 448.0", b"", "cannot be read (no finite value)"),
        (b" 448.0", b" -448.0", "cannot be read (a value below zero): vllm:spec_decode_num_accepted_tokens_total"),
        (b" 448.0", b" many", "cannot be read (a value that is no number)"),
        (b'source="local_compute"', b'source="local\\', "cannot be read"),
    ],
)
def test_invalid_expositions_are_rejected_with_a_message(old: bytes, new: bytes, message: str) -> None:
    broken = read_exposition("ngram-2").rstrip() if old == b"\n" else read_exposition("ngram-2").replace(old, new)
    with pytest.raises(ExpositionError) as caught:
        parse_exposition(broken)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"\n", b"<html>\n", b"\xff\xfe\n", b'vllm:cache_config_info{block_size="\xff"} 1\n'])
def test_other_responses_are_rejected(text: bytes) -> None:
    with pytest.raises(ExpositionError):
        parse_exposition(text)


LINES = [line + b"\n" for line in read_exposition("ngram-2").split(b"\n") if line.startswith(b"vllm:")]


@given(
    st.integers(0, len(LINES) - 1),
    st.floats(0, 1),
    st.integers(0, 6),
    st.binary(max_size=3) | st.sampled_from([b'"', b"\\", b"{", b"}", b",", b"=", b" ", b"\n"]),
)
def test_a_damaged_exposition_parses_or_is_rejected(line: int, share: float, cut: int, inserted: bytes) -> None:
    offset = int(share * len(LINES[line]))
    damaged = LINES[line][:offset] + inserted + LINES[line][offset + cut :]
    with contextlib.suppress(ExpositionError):
        parse_exposition(b"".join([*LINES[:line], damaged, *LINES[line + 1 :]]))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'position="1"', b'position="one"', "does not have the positions 0, 1, 2"),
        (b'le="0.5"', b'le="half"', "is no histogram: its buckets need different edges"),
        (b'le="0.5"', b'le="nan"', "is no histogram: its buckets need different edges"),
        (b'le="0.5"', b'le="1.0e0"', "is no histogram: its buckets need different edges"),
        (b'finished_reason="stop"', b'finished_reason="\xff"', "no text in UTF-8"),
        (b"\nprocess_start_time_seconds 1", b"\nprocess_start_time_seconds x", "cannot be read"),
    ],
)
def test_labels_that_are_no_numbers_are_rejected(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(ExpositionError, match=message):
        parse_exposition(read_exposition("ngram-2").replace(old, new))


def test_an_unknown_kv_cache_size_is_none() -> None:
    sample = parse_exposition(read_exposition("ngram-2").replace(b'num_gpu_blocks="512"', b'num_gpu_blocks="None"'))
    assert sample.gauges.kv_tokens is None


# ------------------------------------------------------------------------------------------------------------- difference
def build_sample(counters: Counters, process_start_time: float | None = 1e9) -> Sample:
    return Sample(counters, Gauges(0, 0, 0, 0), frozenset("0"), process_start_time)


@given(counters(), counters(), counters())
def test_windows_add_up(first: Counters, second: Counters, third: Counters) -> None:
    """The sum of adjacent windows is the window from end to end: exact for counts, to rounding for seconds."""
    scrapes = [build_sample(first), build_sample(first + second), build_sample(first + second + third)]
    first_window, second_window, whole = (
        diff_samples(*scrapes[:2]),
        diff_samples(*scrapes[1:]),
        diff_samples(scrapes[0], scrapes[2]),
    )
    assert isinstance(first_window, Counters)
    assert isinstance(second_window, Counters)
    assert isinstance(whole, Counters)
    together = first_window + second_window
    assert together.speculation == whole.speculation
    assert together.finished == whole.finished
    assert together.request_steps == whole.request_steps
    assert together.time_to_first_token.counts == whole.time_to_first_token.counts
    assert together.step_seconds == pytest.approx(whole.step_seconds, abs=1e-6)


@given(counters(), counters(), st.booleans())
def test_a_difference_has_no_negative_count(before: Counters, after: Counters, has_start_time: bool) -> None:
    """The difference of any two scrapes has no value below zero."""
    difference = diff_samples(
        build_sample(before, 1e9 if has_start_time else None), build_sample(after, 1e9 if has_start_time else None)
    )
    if isinstance(difference, CounterReset):
        assert difference.message.endswith(".")
        return
    for value in (difference.generation_tokens, difference.step_seconds, difference.iterations, *difference.finished.values()):
        assert value >= 0
    for histogram in (difference.time_to_first_token, difference.time_per_output_token):
        assert list(histogram.counts) == sorted(histogram.counts)
        assert histogram.counts[0] >= 0


def test_a_restart_is_a_counter_reset_with_its_evidence() -> None:
    before, after = parse_exposition(read_exposition("ngram-1")), parse_exposition(read_exposition("ngram-2"))
    window = diff_samples(before, after)
    assert isinstance(window, Counters)
    assert window.first_tokens == 16
    assert diff_samples(after, before) == CounterReset("the engine was restarted: generation tokens fell.")
    later = dataclasses.replace(after, process_start_time=1.8e9)
    assert "it began at 1800000000" in _reset_message(before, later)
    two_engines = dataclasses.replace(after, engines=frozenset({"0", "1"}))
    assert "from ['0'] to ['0', '1']" in _reset_message(before, two_engines)
    without_speculation = dataclasses.replace(after, counters=dataclasses.replace(after.counters, speculation=None))
    assert "only one of them has speculation" in _reset_message(before, without_speculation)
    assert after.counters.speculation is not None
    four_positions = dataclasses.replace(after.counters.speculation, accepted_per_position=(250, 122, 76, 0))
    assert "3 positions" in _reset_message(
        before, dataclasses.replace(after, counters=dataclasses.replace(after.counters, speculation=four_positions))
    )


def _reset_message(before: Sample, after: Sample) -> str:
    reset = diff_samples(before, after)
    assert isinstance(reset, CounterReset)
    return reset.message


def test_an_exposition_of_the_rust_front_end_before_any_request() -> None:
    """It has OpenMetrics' last line, no start of the process, and no series by label before their first event."""
    later = {b"process_start_time_seconds", b"vllm:cache_config_info", b"vllm:request_success_total"}
    later.add(b"vllm:spec_decode_num_accepted_tokens_per_pos_total")
    lines = [line for line in read_exposition("ngram-1").split(b"\n") if re.split(rb"[ {]", line)[0] not in later]
    fresh = parse_exposition(b"\n".join(lines) + b"# EOF\n")
    assert (fresh.process_start_time, fresh.gauges.kv_tokens, fresh.counters.finished) == (None, None, {})
    assert fresh.counters.speculation is not None
    assert fresh.counters.speculation.accepted_per_position == ()
