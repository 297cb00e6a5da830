"""Labels, selectors and names of the objects that Aerie creates.

A pod's labels name the resource and the revision, and mark control pods. They never change while the pod lives. The pod's arm
follows from them, so a canary becomes stable without a change to any pod. Only the Deployment is labelled with its arm, for
people.
"""

from __future__ import annotations

FIELD_MANAGER = "aerie"
ENGINE_CONTAINER = "engine"
"""Name of the engine's container; podTemplate changes the container by this name."""
ENGINE_PORT = 8000
"""Port of the engine in its pod: API, health and metrics."""
ENGINE_PORT_NAME = "http"
CACHE_PATH = "/cache"
"""Mount path of the volume for the engine's downloads and compiled code."""
HF_HOME_PATH = f"{CACHE_PATH}/huggingface"
PLUGIN_VOLUME = "aerie-plugin"
"""Name of the volume with Aerie's plugin of vLLM."""
DRAFTER_TOKEN_KEY, EXPECTED_DRAFTER_KEY = "token", "expected.json"
"""Keys in the Secret of `drafter_token_secret_name` and the ConfigMap of `expected_drafter_config_map_name`."""
EVALUATOR_TOKEN_KEY = "token"
"""Key in the Secret of `evaluator_token_secret_name`."""

NAME_LABEL = "aerie.dev/name"
REVISION_LABEL = "aerie.dev/revision"
CONTROL_LABEL = "aerie.dev/control"
ARM_LABEL = "aerie.dev/arm"
PREFLIGHT_LABEL = "aerie.dev/preflight"
"""Label of preflight Jobs' pods, instead of NAME_LABEL: they receive no requests."""
TEMPLATE_DIGEST_ANNOTATION = "aerie.dev/template"
"""Annotation of a Deployment: the digest of the template that it was built from."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"


def common_labels(resource_name: str) -> dict[str, str]:
    """Return the labels of every object of the resource."""
    return {NAME_LABEL: resource_name, MANAGED_BY_LABEL: FIELD_MANAGER}


def deployment_selector_labels(resource_name: str, revision: str, *, control: bool) -> dict[str, str]:
    """Return the labels that select the pods of one Deployment and no others."""
    return {NAME_LABEL: resource_name, REVISION_LABEL: revision, CONTROL_LABEL: "true" if control else "false"}


def serving_selector_labels(resource_name: str, revision: str | None) -> dict[str, str]:
    """Return the labels that select the pods for requests: all of the resource, or those of one revision."""
    return {NAME_LABEL: resource_name} if revision is None else {NAME_LABEL: resource_name, REVISION_LABEL: revision}


def deployment_name(resource_name: str, revision: str, *, control: bool) -> str:
    """Return the name of the Deployment of a revision's pods, or of its control pods."""
    return f"{resource_name}-{revision}-control" if control else f"{resource_name}-{revision}"


def drafter_token_secret_name(resource_name: str) -> str:
    """Return the name of the Secret with the token of the plugin's endpoint in the resource's pods."""
    return f"{resource_name}-aerie-drafter-token"


def evaluator_token_secret_name(resource_name: str) -> str:
    """Return the name of the Secret with the token by which the operator fetches the evaluator's counts."""
    return f"{resource_name}-aerie-evaluator-token"


def expected_drafter_config_map_name(resource_name: str, revision: str) -> str:
    """Return the name of the ConfigMap with the drafter that new pods of the revision come to."""
    return f"{resource_name}-{revision}-drafter"
