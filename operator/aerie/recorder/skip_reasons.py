"""The reasons why a request is not recorded: the names under which metrics count them."""

from __future__ import annotations

from enum import StrEnum


class SkipReason(StrEnum):
    """Reason why a request is not recorded."""

    NOT_SAMPLED = "not_sampled"
    """It is not in the share that is recorded."""
    OVER_LIMIT = "over_limit"
    """The number of requests that may be recorded in this minute is reached."""
    BUSY = "busy"
    """The number of requests that may be in memory is reached."""
    UNSUPPORTED_PATH = "unsupported_path"
    """An endpoint other than /v1/chat/completions."""
    TOO_LARGE = "too_large"
    """A body above the size limit, or a redacted prompt above that of a line."""
    INCOMPLETE = "incomplete"
    """A body that did not arrive whole in time."""
    INVALID = "invalid"
    """A body that is no request of its endpoint."""
    NOT_TEXT = "not_text"
    """A message with an image, audio or video."""
    OWN_TEMPLATE = "own_template"
    """A request with a chat template of its own, with template arguments that the engine sets, or one that continues an answer:
    its prompt is not that of the model."""
    HOOK_FAILED = "hook_failed"
    """The hook did not answer in time, or not with a redacted prompt."""
    STORAGE_FAILED = "storage_failed"
    """The prompt could not be written."""
    DEFECT = "defect"
    """An error of the recorder itself."""
