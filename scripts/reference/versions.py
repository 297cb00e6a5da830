"""The page of vLLM's releases, generated from the table of its features."""

from __future__ import annotations

from aerie.engine.releases import MIN_SECURE_VERSION, NEWEST_VERIFIED_VERSION, Feature
from scripts.reference.markdown import GENERATED, join_parts, table

INTRODUCTION = """\
# Releases of vLLM

This page states which releases of vLLM Aerie supports, and which feature needs which release.

* **{newest}** is the newest release that Aerie was verified with (2026-11). Aerie treats a later minor release as {newest}, and
  warns.
* **{secure}** is the first release that a remote request cannot stop under speculation. Preflight's check
  [C20](preflight-checks.md) reports an error for earlier ones.
* **{in_place} to {newest}** can change the drafter [in a running engine](../concepts/in-place.md). A later minor release gets
  no plugin, because the plugin uses internals of vLLM ([which](../project/in-place-vllm.md)), and they were read up to {newest}.

The version comes from `spec.engine.version`, or from the tag of an image of vLLM's own
([details](../how-to/preflight.md#how-gpus-versions-and-memory-are-determined)). The keys of the speculative config, by release,
are in [resource.md](resource.md).

## Features

A release from "since" on has the feature; a pre-release of that release does not."""


def page() -> str:
    """Return the page as Markdown."""
    features = sorted(Feature, key=lambda feature: (feature.since, feature.name))
    return join_parts(
        GENERATED.format(source="operator/aerie/engine/releases.py"),
        INTRODUCTION.format(newest=NEWEST_VERIFIED_VERSION, secure=MIN_SECURE_VERSION, in_place=Feature.DRAFTER_IN_PLACE.since),
        table(
            ["since", "feature", "limits", "removed in", "source"],
            (
                (
                    str(feature.since),
                    feature.description,
                    feature.limitations,
                    str(feature.removed_in or ""),
                    feature.source,
                )
                for feature in features
            ),
        ),
    )
