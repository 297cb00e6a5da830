"""A user's request that an inconclusive analysis continues until some time, by the annotation aerie.dev/extend.

Its value is the canary's revision and the end, such as 71a723caa5/2026-11-28T10:30:00Z. The end is a time and not a duration, so
the annotation means the same however often it is read, and nothing once that time has come.

Guarantees: pure; a request names its revision, so it never extends the analysis of another one. An invalid value changes nothing
and is explained. Not guaranteed: an extension as long as requested; it ends with a decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from aerie.api import SpeculativeDeployment

EXTEND_ANNOTATION = "aerie.dev/extend"
"""Annotation with revision and end of an extension."""
MAX_EXTENSION = timedelta(hours=24)
"""Longest extension. A later end extends again, once this time is over and the canary is Held."""


@dataclass(frozen=True)
class ExtensionRequest:
    """What the annotation requests for one revision."""

    requested_end: datetime | None = None
    """Requested end, in UTC and whole seconds; None without a valid request for this revision."""
    problem: str = ""
    """Why the annotation is ignored, as a sentence without a period; empty if it is valid, absent, or about another revision."""

    def end_at(self, now: datetime) -> datetime | None:
        """Return the end of an extension that begins now; None without a request, and once it is over."""
        if self.requested_end is None or self.requested_end <= now:
            return None
        return min(self.requested_end, now + MAX_EXTENSION)


def read_extension_request(resource: SpeculativeDeployment, revision: str) -> ExtensionRequest:
    """Return what the annotation requests for the revision."""
    value = resource.metadata.annotations.get(EXTEND_ANNOTATION, "")
    named_revision, separator, end_text = value.partition("/")
    if separator and named_revision != revision:
        return ExtensionRequest()
    try:
        requested_end = datetime.fromisoformat(end_text)
        if requested_end.tzinfo is not None:
            return ExtensionRequest(requested_end.astimezone(UTC).replace(microsecond=0))
    except (ValueError, OverflowError):
        pass
    if not value:
        return ExtensionRequest()
    return ExtensionRequest(
        problem=(
            f"The annotation {EXTEND_ANNOTATION} is ignored: it has to be the canary's revision, a slash, and the end with its "
            f"time zone, such as {revision}/2026-11-28T10:30:00Z"
        )
    )
