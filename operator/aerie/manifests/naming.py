"""Labels, selectors and names of what Aerie makes.

A pod bears the resource, the revision, and whether it is a control pod; those never change while it lives. Which arm it
belongs to follows from them, so that a canary becomes stable without a single pod being touched. Only the Deployment is
labelled with its arm, for people.
"""

from __future__ import annotations

FIELD_MANAGER = "aerie"
ENGINE_CONTAINER = "engine"
"""Name of the engine's container, by which podTemplate may change it."""
ENGINE_PORT = 8000
"""Port of the engine in its pod: API, health and metrics."""
ENGINE_PORT_NAME = "http"
CACHE_PATH = "/cache"
"""Where the engine keeps what it downloads and compiles."""
HF_HOME_PATH = f"{CACHE_PATH}/huggingface"

NAME_LABEL = "aerie.dev/name"
REVISION_LABEL = "aerie.dev/revision"
CONTROL_LABEL = "aerie.dev/control"
ARM_LABEL = "aerie.dev/arm"
PREFLIGHT_LABEL = "aerie.dev/preflight"
"""On pods of preflight Jobs, instead of NAME: they serve nothing."""
TEMPLATE_DIGEST_ANNOTATION = "aerie.dev/template"
"""Annotation of a Deployment: the digest of the template that it was made of."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"


def common_labels(resource_name: str) -> dict[str, str]:
    """Labels of everything that belongs to the resource."""
    return {NAME_LABEL: resource_name, MANAGED_BY_LABEL: FIELD_MANAGER}


def deployment_selector_labels(resource_name: str, revision: str, *, control: bool) -> dict[str, str]:
    """What tells one group of pods, that of one Deployment, from all others."""
    return {NAME_LABEL: resource_name, REVISION_LABEL: revision, CONTROL_LABEL: "true" if control else "false"}


def serving_selector_labels(resource_name: str, revision: str | None) -> dict[str, str]:
    """What tells the pods that requests are for: all of the resource, or only those of one revision."""
    return {NAME_LABEL: resource_name} if revision is None else {NAME_LABEL: resource_name, REVISION_LABEL: revision}


def deployment_name(resource_name: str, revision: str, *, control: bool) -> str:
    """Name of a group's Deployment."""
    return f"{resource_name}-{revision}-control" if control else f"{resource_name}-{revision}"
