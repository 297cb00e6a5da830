"""Writes what an engine has counted as vLLM's /metrics page: same families, types, help, labels and order as vLLM 0.32.0.

Taken from vllm/v1/metrics/loggers.py (PrometheusStatLogger) and v1/spec_decode/metrics.py, and from pages of a running server.
The format is prometheus_client's: labels sorted, counters end in _total, every counter and histogram has a `_created` gauge.
Not written: families that vLLM registers only with a flag (KV residency, LoRA, corrupted requests), and those of its plugins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aerie_lab.engine.counters import Counters, Histogram

Samples = dict[str, float]
"""Values by what the family adds to its labels, written as `name="value"`; "" when it adds nothing."""


@dataclass(frozen=True)
class Family:
    """One family of the page."""

    name: str
    kind: str
    help: str
    read: Callable[[Counters], Samples | Histogram]
    engine_label: bool = True


def _one(name: str) -> Callable[[Counters], Samples]:
    return lambda counters: {"": float(getattr(counters, name))}


def _histogram(name: str) -> Callable[[Counters], Histogram]:
    def read(counters: Counters) -> Histogram:
        found: Histogram = getattr(counters, name)
        return found

    return read


def _zeros(label: str, *values: str) -> Callable[[Counters], Samples]:
    return lambda _: {f'{label}="{value}"' if label else "": 0.0 for value in values}


def _per_position(counters: Counters) -> Samples:
    return {f'position="{i}"': float(n) for i, n in enumerate(counters.spec_decode_num_accepted_tokens_per_pos.tolist())}


def _waiting(counters: Counters) -> Samples:
    return {'reason="capacity"': float(counters.num_requests_waiting), 'reason="deferred"': 0.0}


def _by_source(counters: Counters) -> Samples:
    computed = counters.prompt_tokens - counters.prompt_tokens_cached
    return {
        'source="local_compute"': float(computed),
        'source="local_cache_hit"': float(counters.prompt_tokens_cached),
        'source="external_kv_transfer"': 0.0,
    }


def _cached_by_source(counters: Counters) -> Samples:
    others = {f'source="{tier}"': 0.0 for tier in ("host", "p2p", "disk", "external_unspecified")}
    return {'source="device"': float(counters.prefix_cache_hits)} | others


def _success(counters: Counters) -> Samples:
    return {f'finished_reason="{reason}"': float(count) for reason, count in counters.request_success.items()}


def _asleep(_: Counters) -> Samples:
    return {'sleep_state="awake"': 1.0, 'sleep_state="weights_offloaded"': 0.0, 'sleep_state="discard_all"': 0.0}


_PER_GPU = "(for Model Flops Utilization calculations)."
_SPECULATION = (
    Family("spec_decode_num_drafts", "counter", "Number of spec decoding drafts.", _one("spec_decode_num_drafts")),
    Family("spec_decode_num_draft_tokens", "counter", "Number of draft tokens.", _one("spec_decode_num_draft_tokens")),
    Family("spec_decode_num_accepted_tokens", "counter", "Number of accepted tokens.", _one("spec_decode_num_accepted_tokens")),
    Family("spec_decode_num_accepted_tokens_per_pos", "counter", "Accepted tokens per draft position.", _per_position),
)
_ALWAYS = (
    Family(
        "estimated_flops_per_gpu", "counter", f"Estimated number of floating point operations per GPU {_PER_GPU}", _zeros("", "")
    ),
    Family(
        "estimated_read_bytes_per_gpu",
        "counter",
        f"Estimated number of bytes read from memory per GPU {_PER_GPU}",
        _zeros("", ""),
    ),
    Family(
        "estimated_write_bytes_per_gpu",
        "counter",
        f"Estimated number of bytes written to memory per GPU {_PER_GPU}",
        _zeros("", ""),
    ),
    Family("num_requests_running", "gauge", "Number of requests in model execution batches.", _one("num_requests_running")),
    Family("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", _one("num_requests_waiting")),
    Family(
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
        "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
        "Sum of all reasons equals vllm:num_requests_waiting.",
        _waiting,
    ),
    Family(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        _asleep,
    ),
    Family("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", _one("kv_cache_usage_perc")),
    Family(
        "prefix_cache_queries",
        "counter",
        "Prefix cache queries, in terms of number of queried tokens.",
        _one("prefix_cache_queries"),
    ),
    Family("prefix_cache_hits", "counter", "Prefix cache hits, in terms of number of cached tokens.", _one("prefix_cache_hits")),
    Family(
        "external_prefix_cache_queries",
        "counter",
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.",
        _zeros("", ""),
    ),
    Family(
        "external_prefix_cache_hits",
        "counter",
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.",
        _zeros("", ""),
    ),
    Family("mm_cache_queries", "counter", "Multi-modal cache queries, in terms of number of queried items.", _zeros("", "")),
    Family("mm_cache_hits", "counter", "Multi-modal cache hits, in terms of number of cached items.", _zeros("", "")),
    Family("num_preemptions", "counter", "Cumulative number of preemption from the engine.", _one("num_preemptions")),
    Family("prompt_tokens", "counter", "Number of prefill tokens processed.", _one("prompt_tokens")),
    Family("prompt_tokens_by_source", "counter", "Number of prompt tokens by source.", _by_source),
    Family("prompt_tokens_cached", "counter", "Number of cached prompt tokens (local + external).", _one("prompt_tokens_cached")),
    Family(
        "prompt_tokens_cached_by_source",
        "counter",
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, p2p "
        "(transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to "
        "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
        _cached_by_source,
    ),
    Family("generation_tokens", "counter", "Number of generation tokens processed.", _one("generation_tokens")),
    Family("request_success", "counter", "Count of successfully processed requests.", _success),
    Family(
        "admission_rejections",
        "counter",
        "Number of admission attempts rejected by a queue limit, by reason.",
        _zeros("reason", "max_num_queued_reqs", "max_num_queued_tokens"),
        engine_label=False,
    ),
    Family("request_prompt_tokens", "histogram", "Number of prefill tokens processed.", _histogram("request_prompt_tokens")),
    Family(
        "request_generation_tokens",
        "histogram",
        "Number of generation tokens processed.",
        _histogram("request_generation_tokens"),
    ),
    Family(
        "iteration_tokens_total",
        "histogram",
        "Histogram of number of tokens per engine_step.",
        _histogram("iteration_tokens"),
    ),
    Family(
        "request_max_num_generation_tokens",
        "histogram",
        "Histogram of maximum number of requested generation tokens.",
        _histogram("request_max_num_generation_tokens"),
    ),
    Family("request_params_n", "histogram", "Histogram of the n request parameter.", _histogram("request_params_n")),
    Family(
        "request_params_max_tokens",
        "histogram",
        "Histogram of the max_tokens request parameter.",
        _histogram("request_params_max_tokens"),
    ),
    Family(
        "time_to_first_token_seconds",
        "histogram",
        "Histogram of time to first token in seconds.",
        _histogram("time_to_first_token"),
    ),
    Family(
        "inter_token_latency_seconds",
        "histogram",
        "Histogram of inter-token latency in seconds.",
        _histogram("inter_token_latency"),
    ),
    Family(
        "request_time_per_output_token_seconds",
        "histogram",
        "Histogram of time_per_output_token_seconds per request.",
        _histogram("request_time_per_output_token"),
    ),
    Family(
        "e2e_request_latency_seconds",
        "histogram",
        "Histogram of e2e request latency in seconds.",
        _histogram("e2e_request_latency"),
    ),
    Family(
        "request_queue_time_seconds",
        "histogram",
        "Histogram of time spent in WAITING phase for request.",
        _histogram("request_queue_time"),
    ),
    Family(
        "request_inference_time_seconds",
        "histogram",
        "Histogram of time spent in RUNNING phase for request.",
        _histogram("request_inference_time"),
    ),
    Family(
        "request_prefill_time_seconds",
        "histogram",
        "Histogram of time spent in PREFILL phase for request.",
        _histogram("request_prefill_time"),
    ),
    Family(
        "request_decode_time_seconds",
        "histogram",
        "Histogram of time spent in DECODE phase for request.",
        _histogram("request_decode_time"),
    ),
    Family(
        "request_num_preemptions",
        "histogram",
        "Histogram of the number of times a request was preempted.",
        _histogram("request_num_preemptions"),
    ),
    Family(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _histogram("request_prefill_kv_computed_tokens"),
    ),
)


def families(speculation: bool) -> tuple[Family, ...]:
    """The families of an engine with or without speculation, in the page's order."""
    return (_SPECULATION if speculation else ()) + _ALWAYS


def page(counters: Counters, model_name: str, created: float, cache_config: dict[str, str] | None = None) -> str:
    """The page of one engine: text in the Prometheus exposition format.

    `created` is the engine's start in seconds since 1970; `cache_config` the labels of vllm:cache_config_info, which is left out
    when they are None.
    """
    lines: list[str] = []
    for family in families(counters.drafts_max is not None):
        lines += _family(family, counters, model_name, created)
    if cache_config is not None:
        pairs = ",".join(f'{name}="{escape(value)}"' for name, value in sorted(({"engine": "0"} | cache_config).items()))
        lines += head("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        lines.append(f"vllm:cache_config_info{{{pairs}}} 1.0")
    return "\n".join(lines) + "\n"


def _family(family: Family, counters: Counters, model_name: str, created: float) -> Iterator[str]:
    name = f"vllm:{family.name}"
    common = (['engine="0"'] if family.engine_label else []) + [f'model_name="{escape(model_name)}"']
    found = family.read(counters)
    shown = f"{name}_total" if family.kind == "counter" else name
    yield from head(shown, family.help, family.kind)
    if isinstance(found, Histogram):
        yield from histogram_samples(name, found, common)
        rows = [""]
    else:
        for extra, value in found.items():
            yield f"{shown}{_labels(common, extra)} {number(value)}"
        rows = list(found)
    if family.kind != "gauge":
        yield from head(f"{name}_created", family.help, "gauge")
        for extra in rows:
            yield f"{name}_created{_labels(common, extra)} {number(created)}"


def head(name: str, text: str, kind: str) -> list[str]:
    """The two comment lines of a family."""
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def histogram_samples(name: str, histogram: Histogram, common: list[str]) -> Iterator[str]:
    """Buckets (cumulated), count and sum."""
    cumulated = list(itertools.accumulate(histogram.counts))
    for bound, count in zip((*histogram.bounds, math.inf), cumulated, strict=True):
        edge = f'le="{number(bound)}"'
        yield f"{name}_bucket{_labels(common, edge)} {number(float(count))}"
    labels = _labels(common, "")
    yield f"{name}_count{labels} {number(float(cumulated[-1]))}"
    yield f"{name}_sum{labels} {number(histogram.total)}"


def _labels(common: list[str], extra: str) -> str:
    pairs = sorted([*common, extra] if extra else common)
    return f"{{{','.join(pairs)}}}" if pairs else ""


def escape(text: str) -> str:
    """A label's value as it stands between the quotes."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """As prometheus_client writes a float, which is as Go does.

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
