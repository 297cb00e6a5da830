"""The operator that the chart installs does its work with the rights that the chart gives, and none is missing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.cluster import Lab
from aerie_lab.testing import Namespace, until
from aerie_lab.testing.plugin import new_namespace

Release = Callable[..., contextlib.AbstractContextManager[None]]

RESOURCE = """
apiVersion: aerie.dev/v1alpha1
kind: SpeculativeDeployment
metadata: {name: chat}
spec:
  model: {source: {huggingFace: {repo: a/b, revision: 0e9e39f249a16976918f6564b8830bc894c89659}}}
  engine: {image: "vllm/vllm-openai:v0.33.0"}
"""

ENTRY = """
targets = ["a/b"]
kind = "eagle3.1"
repo = "a/c"
revision = "0e9e39f249a16976918f6564b8830bc894c89659"
"""


@pytest.mark.parametrize("scope", ["all", "listed"])
def test_the_operator_works_with_its_rights_and_its_catalog(
    lab: Lab, namespace: Namespace, chart: Path, release: Release, scope: str, tmp_path: Path
) -> None:
    """The resource names no drafter: that of the chart's catalog is what preflight is to look at."""
    (tmp_path / "entry").write_text(ENTRY)
    given = ["--set-file", f"catalog.mine={tmp_path / 'entry'}"]
    given += ["--set", f"namespaces={{{namespace.name}}}"] if scope == "listed" else []
    with new_namespace(lab, "aerie-system") as home, release(home.name, chart, *given):
        (pod, *_) = pods = home.list_all("pods", "app.kubernetes.io/name=aerie")
        for place in (home, namespace):
            place.apply(RESOURCE)
        (job, *_) = until(lambda: namespace.list_all("jobs", "aerie.dev/name=chat"), "the preflight Job of the resource")
        chat = namespace.until("specdep", "chat", lambda item: item.get("status", {}).get("conditions"), "a status")

        (owner,) = job["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("SpeculativeDeployment", chat["metadata"]["uid"], True)
        assert images(job["spec"]["template"]) == images(pod)
        (drafter,) = chat["status"]["drafters"]
        assert (drafter["target"], drafter["repo"], drafter["kind"], drafter["used"]) == ("a/b", "a/c", "EAGLE 3.1", False)
        read = namespace.get("configmap", job["metadata"]["name"])["data"]["resource.json"]
        assert json.loads(read)["spec"]["drafter"]["source"]["huggingFace"]["repo"] == "a/c"
        if scope == "all":
            home.until("specdep", "chat", lambda item: "status" in item, "a status in the other namespace")
        else:
            assert "status" not in home.get("specdep", "chat")
        for each in pods:
            assert "forbidden" not in home.kubectl("logs", each["metadata"]["name"])


def images(pod: dict[str, Any]) -> list[str]:
    return [container["image"] for container in pod["spec"]["containers"]]
