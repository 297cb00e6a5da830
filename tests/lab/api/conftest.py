"""The resource on the lab's API server: its definition from crds/, and a fixture for dry runs of objects."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie_lab.cluster import Lab
from aerie_lab.errors import KubeError
from aerie_lab.testing import wait_until

CRD = Path(__file__).resolve().parents[3] / "crds" / "aerie.dev_speculativedeployments.yaml"
RESOURCES_PATH = "/apis/aerie.dev/v1alpha1/namespaces/default/speculativedeployments"

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
MINIMAL_RESOURCE: dict[str, Any] = {
    "apiVersion": "aerie.dev/v1alpha1",
    "kind": "SpeculativeDeployment",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"source": {"huggingFace": {"repo": "meta-llama/Llama-3.1-8B-Instruct", "revision": COMMIT}}},
        "engine": {"image": "vllm/vllm-openai:v0.33.0"},
    },
}

Changes = Mapping[str, Any]
DryRun = Callable[..., dict[str, Any]]


def build_manifest(changes: Changes) -> dict[str, Any]:
    """Return the minimal resource with some fields of its spec set, by dotted path; None removes one."""
    document = copy.deepcopy(MINIMAL_RESOURCE)
    for field_path, value in changes.items():
        *parents, last = field_path.split(".")
        node = document["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return document


@pytest.fixture(scope="module")
def crd(lab: Lab) -> Iterator[dict[str, Any]]:
    """The established definition; deleted at the end of the module."""
    document: dict[str, Any] = yaml.safe_load(CRD.read_text())
    lab.apply(document)
    name = document["metadata"]["name"]
    wait_until(lambda: "True" in lab.kubectl("get", "crd", name, "-o", _established()), "the definition is established")
    wait_until(lambda: _served(lab), "the resource is served")
    yield document
    lab.kubectl("delete", "crd", name)


def _established() -> str:
    return 'jsonpath={.status.conditions[?(@.type=="Established")].status}'


def _served(lab: Lab) -> bool:
    with contextlib.suppress(KubeError):
        return bool(_request(lab, "GET", RESOURCES_PATH)["kind"])
    return False


def _request(lab: Lab, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Any:
    async def run() -> Any:
        async with lab.client() as client:
            return await client.request(method, path, body=body, query=query)

    return asyncio.run(run())


@pytest.fixture
def minimal_resource() -> dict[str, Any]:
    """The minimal resource that can be applied."""
    return copy.deepcopy(MINIMAL_RESOURCE)


@pytest.fixture
def dry_run(lab: Lab, crd: dict[str, Any]) -> DryRun:  # noqa: ARG001 - the definition has to be there
    """Dry run of the minimal resource with changes; returns what the API server would store. Raises KubeError."""

    def dry_run(changes: Changes, name: str = "chat") -> dict[str, Any]:
        document = build_manifest(changes)
        document["metadata"]["name"] = name
        stored: dict[str, Any] = _request(lab, "POST", RESOURCES_PATH, document, {"dryRun": "All"})
        return stored

    return dry_run
