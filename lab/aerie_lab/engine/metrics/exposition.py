"""Renders an engine's counters as vLLM's /metrics: same families, types, help, labels and order as vLLM 0.32.0.

Taken from vllm/v1/metrics/loggers.py (PrometheusStatLogger) and v1/spec_decode/metrics.py, and from pages of a running server.
The format is prometheus_client's: labels sorted, counters end in _total, every counter and histogram has a `_created` gauge.
Not written: families that vLLM registers only with a flag (KV residency, LoRA, corrupted requests), and those of its plugins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aerie_lab.engine.metrics.counters import Counters, Histogram

FamilySamples = dict[str, float]
"""Values by what the family adds to its labels, written as `name="value"`; "" when it adds nothing."""


@dataclass(frozen=True)
class MetricFamily:
    """One family of the page."""

    name: str
    kind: str
    help: str
    read: Callable[[Counters], FamilySamples | Histogram]
    engine_label: bool = True


def _value_reader(name: str) -> Callable[[Counters], FamilySamples]:
    return lambda counters: {"": float(getattr(counters, name))}


def _histogram_reader(name: str) -> Callable[[Counters], Histogram]:
    def read(counters: Counters) -> Histogram:
        histogram: Histogram = getattr(counters, name)
        return histogram

    return read


def _zeros_reader(label: str, *values: str) -> Callable[[Counters], FamilySamples]:
    return lambda _: {f'{label}="{value}"' if label else "": 0.0 for value in values}


def _accepted_per_position(counters: Counters) -> FamilySamples:
    return {f'position="{i}"': float(n) for i, n in enumerate(counters.spec_decode_num_accepted_tokens_per_pos.tolist())}


def _waiting_by_reason(counters: Counters) -> FamilySamples:
    return {'reason="capacity"': float(counters.num_requests_waiting), 'reason="deferred"': 0.0}


def _prompt_tokens_by_source(counters: Counters) -> FamilySamples:
    computed = counters.prompt_tokens - counters.prompt_tokens_cached
    return {
        'source="local_compute"': float(computed),
        'source="local_cache_hit"': float(counters.prompt_tokens_cached),
        'source="external_kv_transfer"': 0.0,
    }


def _cached_tokens_by_source(counters: Counters) -> FamilySamples:
    others = {f'source="{tier}"': 0.0 for tier in ("host", "p2p", "disk", "external_unspecified")}
    return {'source="device"': float(counters.prefix_cache_hits)} | others


def _success_by_reason(counters: Counters) -> FamilySamples:
    return {f'finished_reason="{reason}"': float(count) for reason, count in counters.request_success.items()}


def _sleep_states(_: Counters) -> FamilySamples:
    return {'sleep_state="awake"': 1.0, 'sleep_state="weights_offloaded"': 0.0, 'sleep_state="discard_all"': 0.0}


_PER_GPU_HELP = "(for Model Flops Utilization calculations)."
_SPECULATION_FAMILIES = (
    MetricFamily("spec_decode_num_drafts", "counter", "Number of spec decoding drafts.", _value_reader("spec_decode_num_drafts")),
    MetricFamily(
        "spec_decode_num_draft_tokens", "counter", "Number of draft tokens.", _value_reader("spec_decode_num_draft_tokens")
    ),
    MetricFamily(
        "spec_decode_num_accepted_tokens",
        "counter",
        "Number of accepted tokens.",
        _value_reader("spec_decode_num_accepted_tokens"),
    ),
    MetricFamily(
        "spec_decode_num_accepted_tokens_per_pos", "counter", "Accepted tokens per draft position.", _accepted_per_position
    ),
)
_BASE_FAMILIES = (
    MetricFamily(
        "estimated_flops_per_gpu",
        "counter",
        f"Estimated number of floating point operations per GPU {_PER_GPU_HELP}",
        _zeros_reader("", ""),
    ),
    MetricFamily(
        "estimated_read_bytes_per_gpu",
        "counter",
        f"Estimated number of bytes read from memory per GPU {_PER_GPU_HELP}",
        _zeros_reader("", ""),
    ),
    MetricFamily(
        "estimated_write_bytes_per_gpu",
        "counter",
        f"Estimated number of bytes written to memory per GPU {_PER_GPU_HELP}",
        _zeros_reader("", ""),
    ),
    MetricFamily(
        "num_requests_running", "gauge", "Number of requests in model execution batches.", _value_reader("num_requests_running")
    ),
    MetricFamily(
        "num_requests_waiting", "gauge", "Number of requests waiting to be processed.", _value_reader("num_requests_waiting")
    ),
    MetricFamily(
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
        "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
        "Sum of all reasons equals vllm:num_requests_waiting.",
        _waiting_by_reason,
    ),
    MetricFamily(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        _sleep_states,
    ),
    MetricFamily(
        "kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", _value_reader("kv_cache_usage_perc")
    ),
    MetricFamily(
        "prefix_cache_queries",
        "counter",
        "Prefix cache queries, in terms of number of queried tokens.",
        _value_reader("prefix_cache_queries"),
    ),
    MetricFamily(
        "prefix_cache_hits",
        "counter",
        "Prefix cache hits, in terms of number of cached tokens.",
        _value_reader("prefix_cache_hits"),
    ),
    MetricFamily(
        "external_prefix_cache_queries",
        "counter",
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.",
        _zeros_reader("", ""),
    ),
    MetricFamily(
        "external_prefix_cache_hits",
        "counter",
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.",
        _zeros_reader("", ""),
    ),
    MetricFamily(
        "mm_cache_queries", "counter", "Multi-modal cache queries, in terms of number of queried items.", _zeros_reader("", "")
    ),
    MetricFamily(
        "mm_cache_hits", "counter", "Multi-modal cache hits, in terms of number of cached items.", _zeros_reader("", "")
    ),
    MetricFamily(
        "num_preemptions", "counter", "Cumulative number of preemption from the engine.", _value_reader("num_preemptions")
    ),
    MetricFamily("prompt_tokens", "counter", "Number of prefill tokens processed.", _value_reader("prompt_tokens")),
    MetricFamily("prompt_tokens_by_source", "counter", "Number of prompt tokens by source.", _prompt_tokens_by_source),
    MetricFamily(
        "prompt_tokens_cached",
        "counter",
        "Number of cached prompt tokens (local + external).",
        _value_reader("prompt_tokens_cached"),
    ),
    MetricFamily(
        "prompt_tokens_cached_by_source",
        "counter",
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, p2p "
        "(transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to "
        "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
        _cached_tokens_by_source,
    ),
    MetricFamily("generation_tokens", "counter", "Number of generation tokens processed.", _value_reader("generation_tokens")),
    MetricFamily("request_success", "counter", "Count of successfully processed requests.", _success_by_reason),
    MetricFamily(
        "admission_rejections",
        "counter",
        "Number of admission attempts rejected by a queue limit, by reason.",
        _zeros_reader("reason", "max_num_queued_reqs", "max_num_queued_tokens"),
        engine_label=False,
    ),
    MetricFamily(
        "request_prompt_tokens", "histogram", "Number of prefill tokens processed.", _histogram_reader("request_prompt_tokens")
    ),
    MetricFamily(
        "request_generation_tokens",
        "histogram",
        "Number of generation tokens processed.",
        _histogram_reader("request_generation_tokens"),
    ),
    MetricFamily(
        "iteration_tokens_total",
        "histogram",
        "Histogram of number of tokens per engine_step.",
        _histogram_reader("iteration_tokens"),
    ),
    MetricFamily(
        "request_max_num_generation_tokens",
        "histogram",
        "Histogram of maximum number of requested generation tokens.",
        _histogram_reader("request_max_num_generation_tokens"),
    ),
    MetricFamily("request_params_n", "histogram", "Histogram of the n request parameter.", _histogram_reader("request_params_n")),
    MetricFamily(
        "request_params_max_tokens",
        "histogram",
        "Histogram of the max_tokens request parameter.",
        _histogram_reader("request_params_max_tokens"),
    ),
    MetricFamily(
        "time_to_first_token_seconds",
        "histogram",
        "Histogram of time to first token in seconds.",
        _histogram_reader("time_to_first_token"),
    ),
    MetricFamily(
        "inter_token_latency_seconds",
        "histogram",
        "Histogram of inter-token latency in seconds.",
        _histogram_reader("inter_token_latency"),
    ),
    MetricFamily(
        "request_time_per_output_token_seconds",
        "histogram",
        "Histogram of time_per_output_token_seconds per request.",
        _histogram_reader("request_time_per_output_token"),
    ),
    MetricFamily(
        "e2e_request_latency_seconds",
        "histogram",
        "Histogram of e2e request latency in seconds.",
        _histogram_reader("e2e_request_latency"),
    ),
    MetricFamily(
        "request_queue_time_seconds",
        "histogram",
        "Histogram of time spent in WAITING phase for request.",
        _histogram_reader("request_queue_time"),
    ),
    MetricFamily(
        "request_inference_time_seconds",
        "histogram",
        "Histogram of time spent in RUNNING phase for request.",
        _histogram_reader("request_inference_time"),
    ),
    MetricFamily(
        "request_prefill_time_seconds",
        "histogram",
        "Histogram of time spent in PREFILL phase for request.",
        _histogram_reader("request_prefill_time"),
    ),
    MetricFamily(
        "request_decode_time_seconds",
        "histogram",
        "Histogram of time spent in DECODE phase for request.",
        _histogram_reader("request_decode_time"),
    ),
    MetricFamily(
        "request_num_preemptions",
        "histogram",
        "Histogram of the number of times a request was preempted.",
        _histogram_reader("request_num_preemptions"),
    ),
    MetricFamily(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _histogram_reader("request_prefill_kv_computed_tokens"),
    ),
)


def list_families(speculation: bool) -> tuple[MetricFamily, ...]:
    """Return the families of an engine with or without speculation, in the order of the exposition."""
    return (_SPECULATION_FAMILIES if speculation else ()) + _BASE_FAMILIES


def render_exposition(counters: Counters, model_name: str, created: float, cache_config: dict[str, str] | None = None) -> str:
    """Return the metrics of one engine in the Prometheus exposition format.

    `created` is the engine's start in seconds since 1970; `cache_config` the labels of vllm:cache_config_info, which is left out
    when they are None.
    """
    lines: list[str] = []
    for family in list_families(counters.max_draft_tokens is not None):
        lines += _render_family(family, counters, model_name, created)
    if cache_config is not None:
        pairs = ",".join(
            f'{name}="{escape_label_value(value)}"' for name, value in sorted(({"engine": "0"} | cache_config).items())
        )
        lines += family_header("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        lines.append(f"vllm:cache_config_info{{{pairs}}} 1.0")
    return "\n".join(lines) + "\n"


def _render_family(family: MetricFamily, counters: Counters, model_name: str, created: float) -> Iterator[str]:
    name = f"vllm:{family.name}"
    common = (['engine="0"'] if family.engine_label else []) + [f'model_name="{escape_label_value(model_name)}"']
    values = family.read(counters)
    full_name = f"{name}_total" if family.kind == "counter" else name
    yield from family_header(full_name, family.help, family.kind)
    if isinstance(values, Histogram):
        yield from render_histogram(name, values, common)
        rows = [""]
    else:
        for extra, value in values.items():
            yield f"{full_name}{_render_labels(common, extra)} {format_number(value)}"
        rows = list(values)
    if family.kind != "gauge":
        yield from family_header(f"{name}_created", family.help, "gauge")
        for extra in rows:
            yield f"{name}_created{_render_labels(common, extra)} {format_number(created)}"


def family_header(name: str, text: str, kind: str) -> list[str]:
    """Return the two comment lines of a family."""
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def render_histogram(name: str, histogram: Histogram, common: list[str]) -> Iterator[str]:
    """Buckets (cumulated), count and sum."""
    cumulated = list(itertools.accumulate(histogram.counts))
    for bound, count in zip((*histogram.bounds, math.inf), cumulated, strict=True):
        edge = f'le="{format_number(bound)}"'
        yield f"{name}_bucket{_render_labels(common, edge)} {format_number(float(count))}"
    labels = _render_labels(common, "")
    yield f"{name}_count{labels} {format_number(float(cumulated[-1]))}"
    yield f"{name}_sum{labels} {format_number(histogram.total)}"


def _render_labels(common: list[str], extra: str) -> str:
    pairs = sorted([*common, extra] if extra else common)
    return f"{{{','.join(pairs)}}}" if pairs else ""


def escape_label_value(text: str) -> str:
    """Return a label's value escaped for its quotes."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def format_number(value: float) -> str:
    """Format a float as prometheus_client does, which is as Go does.

    >>> number(1.0), number(1795265030.25), number(math.inf)
    ('1.0', '1.79526503025e+09', '+Inf')
    """
    if value == math.inf:
        return "+Inf"
    text = repr(value)
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text
