"""The page of preflight's checks, generated from their table."""

from __future__ import annotations

from aerie.engine.preflight import list_checks
from scripts.reference.markdown import GENERATED, join_parts, table

INTRODUCTION = """\
# Checks of preflight

This page lists every check of preflight: what it reads, why that matters, and how severe its findings can be.
[preflight.md](../how-to/preflight.md) explains how to run the checks and how to
[override](../how-to/preflight.md#override-preflight) one.

| severity | effect |
|---|---|
| error | The engine would fail, or serve with a harmful drafter. No pod of the revision is created |
| warning | The engine will run, but probably not as intended. The rollout continues |
| info | Advice, or a fact that configs and headers do not show |

"At worst" is the highest severity of a check. Acceptance lengths (AL) without another source were measured on vLLM 0.32 on CPU
with one small EAGLE 3.1 drafter and K = 3.

Preflight cannot check whether the tokenizers are equal, whether the drafter is good on your traffic, or what the engine's own
profile run will find."""


def page() -> str:
    """Return the page as Markdown."""
    return join_parts(
        GENERATED.format(source="operator/aerie/engine/preflight/checks"),
        INTRODUCTION,
        table(
            ["code", "check", "why", "at worst", "source"],
            ((check.id, check.title, check.rationale, check.max_severity.value, check.source) for check in list_checks()),
        ),
    )
