"""Labels, selectors and names of what Aerie makes.

A pod bears the resource, the revision, and whether it is a control pod; those never change while it lives. Which arm it
belongs to follows from them, so that a canary becomes stable without a single pod being touched. Only the Deployment is
labelled with its arm, for people.
"""

from __future__ import annotations

FIELD_MANAGER = "aerie"
ENGINE = "engine"
"""Name of the engine's container, by which podTemplate may change it."""
PORT = 8000
"""Port of the engine in its pod: API, health and metrics."""
PORT_NAME = "http"
CACHE = "/cache"
"""Where the engine keeps what it downloads and compiles."""
HF_HOME = f"{CACHE}/huggingface"

NAME = "aerie.dev/name"
REVISION = "aerie.dev/revision"
CONTROL = "aerie.dev/control"
ARM = "aerie.dev/arm"
PREFLIGHT = "aerie.dev/preflight"
"""On pods of preflight Jobs, instead of NAME: they serve nothing."""
TEMPLATE = "aerie.dev/template"
"""Annotation of a Deployment: the digest of the template that it was made of."""
MANAGED_BY = "app.kubernetes.io/managed-by"


def common(name: str) -> dict[str, str]:
    """Labels of everything that belongs to the resource."""
    return {NAME: name, MANAGED_BY: FIELD_MANAGER}


def group(name: str, revision: str, *, control: bool) -> dict[str, str]:
    """What tells one group of pods, that of one Deployment, from all others."""
    return {NAME: name, REVISION: revision, CONTROL: "true" if control else "false"}


def serving(name: str, only: str | None) -> dict[str, str]:
    """What tells the pods that requests are for: all of the resource, or only those of one revision."""
    return {NAME: name} if only is None else {NAME: name, REVISION: only}


def deployment(name: str, revision: str, *, control: bool) -> str:
    """Name of a group's Deployment."""
    return f"{name}-{revision}-control" if control else f"{name}-{revision}"
