"""The page of the annotations and labels of Aerie, generated from the constants of the code and a line for each of them.

A test checks that the page has every name that occurs in the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aerie.manifests import naming
from aerie.manifests.apply_diff import APPLIED_DIGEST_ANNOTATION
from aerie.manifests.evaluator import EVALUATOR_LABEL
from aerie.manifests.recorder import RECORDER_LABEL
from aerie.manifests.revision_hash import RENEW_ANNOTATION
from aerie.rollout.canary.extension_request import EXTEND_ANNOTATION, MAX_EXTENSION
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION
from aerie.rollout.progression.retry_request import RETRY_ANNOTATION
from aerie.rollout.progression.user_request import REQUESTED_BY_ANNOTATION
from aerie.rollout.status.subscriptions import ANNOTATION_PREFIX, MAX_SUBSCRIPTIONS
from aerie_lab.node.support import HUB_LABEL, PROCESSLESS_ANNOTATION, PROCESSLESS_LOAD_SECONDS_ANNOTATION
from scripts.reference.markdown import GENERATED, join_parts, table


@dataclass(frozen=True)
class Key:
    """An annotation or a label."""

    name: str
    value: str
    meaning: str


WRITTEN_BY_USERS = (
    Key(
        PROMOTE_ANNOTATION,
        "revision of the canary",
        "Promotes this revision: ends or skips its analysis, and continues with the ramp. `kubectl aerie promote` writes it.",
    ),
    Key(
        ROLLBACK_ANNOTATION,
        "revision of the canary, or of the promotion to revert",
        "Rolls this revision back. After a promotion it works while pods of the previous revision are retained. "
        "`kubectl aerie rollback` writes it.",
    ),
    Key(
        RETRY_ANNOTATION,
        "any new value, such as a time",
        "Rolls a rejected revision out again, from its preflight on. Each new value works once. `kubectl aerie retry` writes it.",
    ),
    Key(
        EXTEND_ANNOTATION,
        "revision, a slash, and the end in RFC 3339",
        f"Extends the inconclusive analysis of this canary, by at most {MAX_EXTENSION.total_seconds() / 3600:g} hours. "
        "`kubectl aerie resume --for` writes it.",
    ),
    Key(
        REQUESTED_BY_ANNOTATION,
        "JSON with `action`, `user`, `time` and `reason`",
        "Who requested the action, and why, for the history. `kubectl aerie` writes it with the action. It is a statement of its "
        "author; the audit log of the API server has the proof.",
    ),
    Key(
        RENEW_ANNOTATION,
        "any new value, such as a time",
        "Makes a new revision of the same spec, which is rolled out by a canary. Its pods are built as the present release of "
        "Aerie builds them.",
    ),
    Key(
        f"{ANNOTATION_PREFIX}EVENT.RECEIVER",
        "recipients with `;` between them, or empty",
        f"Subscribes a receiver to an [event](events.md#notifications). At most {MAX_SUBSCRIPTIONS} per resource.",
    ),
)
LABELS = (
    Key(
        naming.NAME_LABEL,
        "name of the resource",
        "Engine pods of the resource, and the objects that Aerie creates for it; not those of preflight and of the evaluator.",
    ),
    Key(naming.REVISION_LABEL, "revision", "Pods and Deployments of one revision, and the pods of its preflight Job."),
    Key(
        naming.CONTROL_LABEL,
        "`true` or `false`",
        "Whether an engine pod is a control pod. Control pods have the revision of the stable pods.",
    ),
    Key(
        naming.ARM_LABEL,
        "`stable`, `canary`, `control`, `previous`",
        "Arm of a Deployment. Pods lack it, because a canary becomes stable without a change of its pods.",
    ),
    Key(
        naming.PREFLIGHT_LABEL,
        "name of the resource",
        "Pods of preflight Jobs. They get no requests, so they lack the name label.",
    ),
    Key(EVALUATOR_LABEL, "name of the resource", "Objects and pods of the evaluator of a shadow evaluation."),
    Key(RECORDER_LABEL, "name of the resource", "Pods of the recorder of a capture."),
    Key(naming.MANAGED_BY_LABEL, f"`{naming.FIELD_MANAGER}`", "All objects that Aerie creates."),
)
WRITTEN_BY_AERIE = (
    Key(naming.TEMPLATE_DIGEST_ANNOTATION, "digest", "Template from which the Deployment was built."),
    Key(APPLIED_DIGEST_ANNOTATION, "digest", "Content of the object as Aerie applied it last. Another content is corrected."),
)
LAB = (
    Key(HUB_LABEL, "`true`", "Label of a namespace: its containers use the lab's Hub."),
    Key(PROCESSLESS_ANNOTATION, "`true`", "Annotation of a pod: it becomes ready immediately, and runs nothing."),
    Key(PROCESSLESS_LOAD_SECONDS_ANNOTATION, "number", "Annotation of such a pod: seconds until it becomes ready."),
)

INTRODUCTION = """\
# Annotations and labels

This page lists the annotations by which you request something of Aerie, and the labels by which you select its objects."""
USERS = """\
## Annotations that users write

Set these on a SpeculativeDeployment. [`kubectl aerie`](../how-to/cli.md#decide) checks the state first and writes most of them
for you.

```
kubectl annotate --overwrite specdep chat aerie.dev/retry="$(date +%s)"
```"""
SELECTORS = """\
## Labels

Use these in selectors. Aerie finds its pods by them, so `podTemplate` may set no label that begins with `aerie.dev/`.

```
kubectl get pods --selector=aerie.dev/name=chat --label-columns=aerie.dev/revision,aerie.dev/control
```"""
OWN = """\
## Annotations that Aerie writes

Aerie keeps these on the objects that it creates. Leave them as they are."""
LAB_SECTION = """\
## In the lab

These exist in [the lab](../how-to/lab.md) only. Other clusters ignore them."""


def page() -> str:
    """Return the page as Markdown."""
    return join_parts(
        GENERATED.format(source="scripts/reference/annotation_table.py"),
        INTRODUCTION,
        USERS,
        _render(WRITTEN_BY_USERS),
        SELECTORS,
        _render(LABELS),
        OWN,
        _render(WRITTEN_BY_AERIE),
        LAB_SECTION,
        _render(LAB),
    )


def _render(keys: Iterable[Key]) -> str:
    return table(["name", "value", "meaning"], ((f"`{key.name}`", key.value, key.meaning) for key in keys))
