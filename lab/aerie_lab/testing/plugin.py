"""pytest fixtures: one lab per test session, one Kubernetes namespace per test.

    def test_something(namespace: Namespace) -> None:
        namespace.apply(...)

What takes long to start can be shared by the tests of a module: a fixture of theirs with `new_namespace`.

The lab is started when the first test requests it. It ends with the test process, so that a killed session leaves
nothing behind. With pytest-xdist (`-n 2`), each worker process has a lab of its own. A test's faults are undone and its
namespace is deleted when it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.node.support import HUB_LABEL
from aerie_lab.testing.namespace import Namespace


@pytest.fixture(scope="session")
def report_progress(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Return a function that shows a line of progress past pytest's capture: the first build takes minutes."""
    return create_progress_writer(pytestconfig)


def create_progress_writer(config: pytest.Config) -> Callable[[str], None]:
    """Return the function behind `report_progress`, for hooks that can request no fixture."""
    capture = config.pluginmanager.getplugin("capturemanager")

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"lab: {line}\n")

    return show


@pytest.fixture(scope="session")
def lab_images() -> list[str]:
    """Further image tables for the lab of this session; a conftest.py may override it."""
    return []


@pytest.fixture(scope="session")
def lab(report_progress: Callable[[str], None], lab_images: list[str]) -> Iterator[Lab]:
    """A lab of this session: two nodes with eight GPUs each, a gateway, and quick restarts of crashed containers."""
    settings = LabSettings(name=f"test-{os.getpid()}", restart_backoff=1.0, image_tables=lab_images)
    with Lab.up(settings, report_progress, end_with_caller=True) as running:
        yield running


@pytest.fixture
def namespace(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """One namespace per test."""
    with new_namespace(lab, request.node.name.removeprefix("test_")) as test_namespace:
        yield test_namespace


@contextlib.contextmanager
def new_namespace(lab: Lab, label: str, *, use_hub: bool = True) -> Iterator[Namespace]:
    """Create a namespace named after `label`, and delete it with its faults at the end.

    `use_hub`: containers in it have HF_ENDPOINT set to the lab's Hub.
    """
    words = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    name = f"{words[:40].strip('-')}-{os.urandom(2).hex()}"
    labels = {HUB_LABEL: "true"} if use_hub else {}
    lab.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    created = Namespace(lab, name)
    try:
        created.wait_until("serviceaccount", "default", lambda _: True, "the default service account")
        yield created
    finally:
        created.faults.undo_all()
        lab.kubectl("delete", "namespace", name, "--wait=false")
        created.close()
