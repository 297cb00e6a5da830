"""Reads what a plan needs by kubectl: the resource after and before the apply, its objects and pods, and the cluster's nodes.

Guarantee: nothing is written. Not guaranteed: one point in time; the requests follow each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aerie.api import KIND
from aerie.cli.console import CommandError
from aerie.cli.fleet.kubectl import RESOURCE, Document, Kubectl
from aerie.cli.inputs.files import display_file_name, read_objects
from aerie.cli.inputs.workload import WORKLOAD_KINDS
from aerie.manifests import naming
from aerie.rollout.facts.snapshot import ClusterState, read_labels

_CHILD_RESOURCES = "deployments.apps,services,poddisruptionbudgets.policy,jobs.batch,configmaps"
_HTTP_ROUTES = "httproutes.gateway.networking.k8s.io"
_ACTIVE_PODS = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True)
class ReadCluster:
    """What was read of the cluster."""

    planned: Document
    """The resource after the apply."""
    live: Document | None
    state: ClusterState
    kubectl: Kubectl
    """kubectl in the namespace of the resource."""


def read_manifest(file: str, name: str | None) -> dict[str, Any]:
    """Return the file's resource, as it is written. Raises CommandError."""
    objects = read_objects(file)
    documents = [item for item in objects if item.get("kind") == KIND]
    if name is not None:
        documents = [item for item in documents if (item.get("metadata") or {}).get("name") == name]
    if len(documents) == 1:
        return documents[0]
    shown = display_file_name(file)
    if documents:
        raise CommandError(f"{shown} has {len(documents)} objects of kind {KIND}: set the name with --name.")
    if name is None and any(item.get("kind") in WORKLOAD_KINDS for item in objects):
        raise CommandError(
            f"{shown} has no {KIND}, but a workload. A plan is of a {KIND}; for a workload, run: aerie preflight -f {file}"
        )
    suffix = "" if name is None else f" named '{name[:80]}'"
    raise CommandError(f"{shown} has no object of kind {KIND}{suffix}: set a file with one.")


def read_cluster(kubectl: Kubectl, manifest: Document) -> ReadCluster:
    """Return what the cluster has. Raises RejectionError: the API server rejects the manifest; CommandError."""
    planned = kubectl.apply_without_writing(manifest)
    name, namespace = str(planned["metadata"]["name"]), str(planned["metadata"]["namespace"])
    kubectl = kubectl.in_namespace(namespace)
    live = kubectl.find(RESOURCE, name)
    if live is not None and live["metadata"].get("deletionTimestamp"):
        raise CommandError(f"{namespace}/{name} is being deleted: wait until it is gone, or set another name in the file.")
    if live is None:
        return ReadCluster(planned, None, ClusterState(name), kubectl)
    selector = f"--selector={naming.NAME_LABEL}={name}"
    children = [*kubectl.list_objects(_CHILD_RESOURCES, selector)]
    if "gateway" in str((live["spec"].get("rollout") or {}).get("traffic")):
        with contextlib.suppress(CommandError):  # without it, a route counts as changed only where the spec changes it
            children += kubectl.list_objects(_HTTP_ROUTES, selector)
    pods = kubectl.list_objects("pods", selector)
    preflight_pods = kubectl.list_objects("pods", f"--selector={naming.PREFLIGHT_LABEL}={name}")
    state = ClusterState(
        name,
        children=tuple(children),
        pods=tuple(pod for pod in pods if naming.REVISION_LABEL in read_labels(pod)),
        preflight_pods=tuple(preflight_pods),
    )
    return ReadCluster(planned, live, state, kubectl)


def read_nodes(kubectl: Kubectl) -> tuple[Sequence[Document], Sequence[Document]]:
    """Return the nodes, and the pods of all namespaces that have not ended. Raises CommandError."""
    return kubectl.list_objects("nodes"), kubectl.list_objects("pods", "--all-namespaces", _ACTIVE_PODS)
