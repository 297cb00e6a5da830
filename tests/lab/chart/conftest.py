"""Helm on the chart of this repository."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie_lab.binaries import ensure_binary
from aerie_lab.cluster import Lab

CHART = Path(__file__).resolve().parents[3] / "charts" / "aerie"
CASES = Path(__file__).parent / "cases"
DEFINITION = "speculativedeployments.aerie.dev"

Render = Callable[..., str]
Release = Callable[..., contextlib.AbstractContextManager[None]]


@pytest.fixture(scope="session")
def chart() -> Path:
    """The folder of the chart."""
    return CHART


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm without a cluster."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(ensure_binary("helm")), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """Output of `helm template` for a release aerie in aerie-system, with the values of a case and further arguments."""

    def run(*arguments: object, case: str | None = None, chart: Path = CHART) -> str:
        values = () if case is None else ("--values", CASES / f"{case}.yaml")
        completed = helm("template", "aerie", chart, "--namespace", "aerie-system", *values, *arguments)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    return run


@pytest.fixture(scope="session")
def objects(render: Render) -> Callable[..., list[dict[str, Any]]]:
    """Parsed output of the fixture render."""

    def run(*arguments: object, case: str | None = None, chart: Path = CHART) -> list[dict[str, Any]]:
        return [item for item in yaml.safe_load_all(render(*arguments, case=case, chart=chart)) if item]

    return run


def is_allowed(lab: Lab, user: str, verb: str, resource: str, namespace: str, name: str = "") -> bool:
    """Return the response of the API server's authorizer; `resource` is group/resource/subresource, group '' for the core."""
    group, plural, *subresource = resource.split("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": plural, "name": name}
    if subresource:
        attributes["subresource"] = subresource[0]
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}

    async def review_access() -> bool:
        async with lab.client() as client:
            spec = {"user": user, "resourceAttributes": attributes}
            response = await client.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", {**review, "spec": spec})
            return bool(response["status"]["allowed"])

    return asyncio.run(review_access())


@pytest.fixture(scope="session")
def may(lab: Lab) -> Callable[..., bool]:
    """Whether a user may do something: user, verb, group/resource[/subresource], namespace, name."""
    return functools.partial(is_allowed, lab)


@pytest.fixture(scope="session")
def release(lab: Lab) -> Release:
    """Installs a chart as `aerie` in a namespace, by path and arguments; the end always restores the cluster."""

    @contextlib.contextmanager
    def installed(namespace: str, chart: Path, *arguments: str) -> Iterator[None]:
        options = ("--namespace", namespace, "--wait", "--timeout=180s")
        try:
            lab.helm("install", "aerie", str(chart), *options, *arguments)
            yield
        finally:
            lab.helm("uninstall", "aerie", *options, "--ignore-not-found")
            lab.kubectl("delete", "crd", DEFINITION, "--ignore-not-found")  # kept by default, and no namespace takes it along

    return installed
