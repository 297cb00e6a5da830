"""The reasons why a request gives no pair: the names under which batches and metrics count them."""

from __future__ import annotations

from enum import StrEnum


class SkipReason(StrEnum):
    """Reason why a request gives no pair."""

    UNSUPPORTED_PATH = "unsupported_path"
    """An endpoint whose answers have no counts of speculation, such as /v1/responses."""
    TOO_LARGE = "too_large"
    """A body above the size limit."""
    INCOMPLETE = "incomplete"
    """A body that did not arrive whole in time."""
    INVALID = "invalid"
    """A body that is no request of its endpoint."""
    SEVERAL_ANSWERS = "several_answers"
    """Several answers to a request, or a beam search: vLLM counts speculation of single answers only."""
    MEDIA_URL = "media_url"
    """An image, audio or video that the engines would fetch from another server."""
    TOO_SHORT = "too_short"
    """No second token: the first one comes without a draft."""
    REJECTED = "rejected"
    """Both engines rejected the request."""
    UNAVAILABLE = "unavailable"
    """An engine is paused, ends, or has too many requests, and the other one has not answered either."""
    CANARY_UNAVAILABLE = "canary_unavailable"
    """The canary is paused, ends, or has too many requests, and the control answered."""
    CONTROL_UNAVAILABLE = "control_unavailable"
    """The same of the control."""
    CANARY_FAILED = "canary_failed"
    """The canary did not answer what the control answered: evidence against the canary."""
    CONTROL_FAILED = "control_failed"
    """The control did not answer what the canary answered."""
    BOTH_FAILED = "both_failed"
    """Neither engine answered."""
    WITHOUT_METRICS = "without_metrics"
    """An answer without counts of speculation, as engines without `--per-request-spec-decode-metrics` give."""
    STOP_STRING = "stop_string"
    """An answer that ended at a stop string: vLLM counts its speculation, but does not return it."""
    DEFECT = "defect"
    """An error of the evaluator itself."""
