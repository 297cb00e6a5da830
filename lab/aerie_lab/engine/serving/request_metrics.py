"""`metrics` of an answer, as vLLM 0.32 adds it with `--per-request-spec-decode-metrics` and `--enable-per-request-metrics`.

Fields and formulas are those of vllm/v1/metrics/stats.py (RequestSpecDecodeMetrics.to_dict) and
vllm/entrypoints/generate/base/serving.py (build_per_request_timing_metrics). As there, a last step counts all the draft tokens
that it accepted, also those past the end of the answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from aerie_lab.engine.performance_model.request import Request

SpecDecodeMetrics = Literal["none", "summary", "detailed"]


@dataclass(frozen=True)
class RequestMetricsConfig:
    """What answers tell of their requests."""

    speculation: SpecDecodeMetrics = "none"
    has_times: bool = False
    num_speculative_tokens: int = 0

    @property
    def records_steps(self) -> bool:
        """Whether the steps of requests have to be recorded."""
        return self.speculation != "none"

    def build(self, request: Request) -> dict[str, Any] | None:
        """Return `metrics` of a finished request; None where vLLM has none."""
        if not self.has_times and not self.records_steps:
            return None
        times = _build_times(request) if self.has_times else dict.fromkeys(_TIMES)
        return {**times, "speculative_decoding": self._build_speculation(request) if self.records_steps else None}

    def _build_speculation(self, request: Request) -> dict[str, Any]:
        accepted, drafted = request.accepted_by_step or [], request.drafted_by_step
        counts, draft_tokens, is_detailed = Counter(accepted), sum(drafted), self.speculation == "detailed" and bool(accepted)
        return {
            "mean_acceptance_length": 1.0 + sum(accepted) / len(accepted) if accepted else 1.0,
            "draft_acceptance_rate": sum(accepted) / draft_tokens if draft_tokens else 0.0,
            "acceptance_histogram": [counts[number] for number in range(self.num_speculative_tokens + 1)],
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": draft_tokens,
            "num_spec_tokens": self.num_speculative_tokens,
            "per_step_accepted": accepted if is_detailed else None,
            "per_step_drafted": drafted if is_detailed else None,
        }


_TIMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def _build_times(request: Request) -> dict[str, float | None]:
    decode_seconds = request.last_token_time - request.first_token_time
    inference_seconds = request.last_token_time - request.scheduled_time
    return {
        "time_to_first_token_ms": (request.first_token_time - request.scheduled_time) * 1000,
        "generation_time_ms": decode_seconds * 1000,
        "queue_time_ms": (request.scheduled_time - request.arrival_time) * 1000,
        "mean_itl_ms": decode_seconds / (request.generated_tokens - 1) * 1000 if request.generated_tokens > 1 else None,
        "tokens_per_second": request.generated_tokens / inference_seconds if inference_seconds > 0 else None,
    }


def drop_nulls(metrics: Any) -> Any:
    """Return metrics as a stream has them: without fields that are null."""
    if not isinstance(metrics, dict):
        return metrics
    return {name: drop_nulls(value) for name, value in metrics.items() if value is not None}
