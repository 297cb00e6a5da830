"""vLLM's metrics that Aerie reads: name, type, unit, labels, buckets, and what each of them really counts.

Guarantees: every metric is in the source of vLLM 0.24 to 0.33 under this name and type. The meaning is that of the code, where
that differs from the name. Not guaranteed: buckets, which a user may change from 0.32 on (the parser takes those of the
exposition); expositions of vLLM's experimental front end in Rust.

An exposition has each metric once per engine (data-parallel rank), distinguished by the label `engine`. Several API-server
processes of one pod share one exposition: counters are then already sums, but see `ITERATION_TOKENS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class MetricType(StrEnum):
    """Prometheus's types, as the `# TYPE` lines spell them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricDefinition:
    """Definition of one vLLM metric."""

    name: str
    """Name as in an exposition: counters end in `_total`; histograms are without `_bucket`, `_sum`, `_count`."""
    metric_type: MetricType
    unit: str
    meaning: str
    source: str
    labels: tuple[str, ...] = ("model_name", "engine")
    buckets: tuple[float, ...] = ()
    """vLLM's default upper edges without +Inf."""


REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
INTER_TOKEN_LATENCY_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITERATION_TOKENS_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)

_LOGGERS_SOURCE = "vllm/v1/metrics/loggers.py"
_STATS_SOURCE = "vllm/v1/metrics/stats.py"
_SPEC_DECODE_SOURCE = "vllm/v1/spec_decode/metrics.py"


class Metric(Enum):
    """The metrics that Aerie reads. Each value is a `MetricDefinition`. The speculation metrics are in an exposition only if the
    engine speculates."""

    DRAFTS = MetricDefinition(
        "vllm:spec_decode_num_drafts_total",
        MetricType.COUNTER,
        "drafts",
        "Verification steps of one request that had at least one draft token. With a fixed K, from 0.25 on, a request admitted "
        "with a single token left to compute is padded with K dummy tokens and counts as one draft with nothing accepted; not "
        "with a schedule (vllm/v1/core/sched/scheduler.py, pad_spec_decode).",
        _SPEC_DECODE_SOURCE,
    )
    DRAFT_TOKENS = MetricDefinition(
        "vllm:spec_decode_num_draft_tokens_total",
        MetricType.COUNTER,
        "tokens",
        "Tokens in those drafts; fewer than K a draft under a grammar, near the context's end, or by a schedule. Under adaptive "
        "verification trimmed tokens count as drafted and as not accepted.",
        _SPEC_DECODE_SOURCE,
    )
    ACCEPTED = MetricDefinition(
        "vllm:spec_decode_num_accepted_tokens_total",
        MetricType.COUNTER,
        "tokens",
        "Draft tokens accepted, without the bonus token; also those behind a stop, which no client gets.",
        _SPEC_DECODE_SOURCE,
    )
    ACCEPTED_PER_POSITION = MetricDefinition(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        MetricType.COUNTER,
        "tokens",
        "Drafts whose token at this position, counted from 0, was accepted, and so all before it; always K positions.",
        _SPEC_DECODE_SOURCE,
        ("model_name", "engine", "position"),
    )
    GENERATION_TOKENS = MetricDefinition(
        "vllm:generation_tokens_total",
        MetricType.COUNTER,
        "tokens",
        "Output tokens, the first of each request included.",
        _STATS_SOURCE,
    )
    PROMPT_TOKENS = MetricDefinition(
        "vllm:prompt_tokens_total", MetricType.COUNTER, "tokens", "Prompt tokens, cached ones included.", _STATS_SOURCE
    )
    PROMPT_TOKENS_BY_SOURCE = MetricDefinition(
        "vllm:prompt_tokens_by_source_total",
        MetricType.COUNTER,
        "tokens",
        "Prompt tokens by where they came from: local_compute, local_cache_hit, external_kv_transfer.",
        _STATS_SOURCE,
        ("model_name", "engine", "source"),
    )
    PREEMPTIONS = MetricDefinition(
        "vllm:num_preemptions_total", MetricType.COUNTER, "preemptions", "Requests put back for want of KV cache.", _STATS_SOURCE
    )
    FINISHED = MetricDefinition(
        "vllm:request_success_total",
        MetricType.COUNTER,
        "requests",
        "Requests finished, by reason. A client that goes away is in none of them; refused requests (4xx) neither.",
        _LOGGERS_SOURCE,
        ("model_name", "engine", "finished_reason"),
    )
    PREFIX_CACHE_QUERIES = MetricDefinition(
        "vllm:prefix_cache_queries_total",
        MetricType.COUNTER,
        "tokens",
        "Prompt tokens looked up in the prefix cache.",
        _LOGGERS_SOURCE,
    )
    PREFIX_CACHE_HITS = MetricDefinition(
        "vllm:prefix_cache_hits_total", MetricType.COUNTER, "tokens", "Those found there.", _LOGGERS_SOURCE
    )
    INTER_TOKEN_LATENCY = MetricDefinition(
        "vllm:inter_token_latency_seconds",
        MetricType.HISTOGRAM,
        "seconds",
        "One observation per request and engine step after its first token, however many tokens the step gave: the interval of a "
        "step as a request sees it, never a time per token. Its count is the number of request-steps.",
        _STATS_SOURCE,
        buckets=INTER_TOKEN_LATENCY_BUCKETS,
    )
    ITERATION_TOKENS = MetricDefinition(
        "vllm:iteration_tokens_total",
        MetricType.HISTOGRAM,
        "tokens",
        "One observation per engine iteration that gave output: prompt tokens computed plus output tokens, not the tokens "
        "verified. With several API-server processes, each that got output observes the iteration: the count is then up to that "
        "many times the iterations.",
        _LOGGERS_SOURCE,
        buckets=ITERATION_TOKENS_BUCKETS,
    )
    TIME_TO_FIRST_TOKEN = MetricDefinition(
        "vllm:time_to_first_token_seconds",
        MetricType.HISTOGRAM,
        "seconds",
        "From a request's arrival at the API server to its first token; one observation per request.",
        _STATS_SOURCE,
        buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
    )
    TIME_PER_OUTPUT_TOKEN = MetricDefinition(
        "vllm:request_time_per_output_token_seconds",
        MetricType.HISTOGRAM,
        "seconds",
        "Of each finished request, the time after its first token by the tokens after its first; 0 for a request of one token.",
        _STATS_SOURCE,
        buckets=INTER_TOKEN_LATENCY_BUCKETS,
    )
    QUEUE_TIME = MetricDefinition(
        "vllm:request_queue_time_seconds",
        MetricType.HISTOGRAM,
        "seconds",
        "Of each finished request, from when it was queued to when it was first scheduled.",
        _STATS_SOURCE,
        buckets=REQUEST_LATENCY_BUCKETS,
    )
    RUNNING = MetricDefinition(
        "vllm:num_requests_running",
        MetricType.GAUGE,
        "requests",
        "Requests in the batch now, prefilling ones included.",
        _LOGGERS_SOURCE,
    )
    WAITING = MetricDefinition(
        "vllm:num_requests_waiting", MetricType.GAUGE, "requests", "Requests not yet in the batch now.", _LOGGERS_SOURCE
    )
    KV_CACHE_USAGE = MetricDefinition(
        "vllm:kv_cache_usage_perc", MetricType.GAUGE, "share of 1", "KV cache in use now.", _LOGGERS_SOURCE
    )
    CACHE_CONFIG = MetricDefinition(
        "vllm:cache_config_info",
        MetricType.GAUGE,
        "none",
        "Always 1; its labels are vLLM's cache config, with block_size (tokens) and num_gpu_blocks.",
        _LOGGERS_SOURCE,
        ("engine", "block_size", "num_gpu_blocks"),
    )

    @property
    def definition(self) -> MetricDefinition:
        return self.value

    def __str__(self) -> str:
        return self.value.name
