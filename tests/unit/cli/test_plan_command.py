"""The command line of `kubectl aerie plan`, with a script in place of kubectl: what it asks for, and how it ends."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.cli.app import run_command_line
from aerie.forecast import stages
from aerie_lab.testing.model import Shape, write_tiny_llama
from tests.unit.rollout.in_place_world import IN_PLACE
from tests.unit.rollout.world import World, serving_world

Capture = pytest.CaptureFixture[str]
SCRIPT = """#!/bin/sh
printf '%s\\n' "$*" >> "$KUBECTL_FOLDER/log"
case "$*" in
  *" nodes "*|*"--all-namespaces"*) [ -f "$KUBECTL_FOLDER/forbidden" ] && { cat "$KUBECTL_FOLDER/forbidden" >&2; exit 1; } ;;
  *apply*) cat > "$KUBECTL_FOLDER/applied"; [ -f "$KUBECTL_FOLDER/rejection" ] && { cat "$KUBECTL_FOLDER/rejection" >&2; exit 1; }
           cat "$KUBECTL_FOLDER/apply.json"; exit ;;
esac
case "$*" in
  *"get speculativedeployments"*) [ -f "$KUBECTL_FOLDER/live.json" ] && cat "$KUBECTL_FOLDER/live.json"; exit 0 ;;
  *--all-namespaces*) cat "$KUBECTL_FOLDER/nothing.json" ;;
  *"get deployments"*) cat "$KUBECTL_FOLDER/children.json" ;;
  *"get pods"*preflight*) cat "$KUBECTL_FOLDER/nothing.json" ;;
  *"get pods"*) cat "$KUBECTL_FOLDER/pods.json" ;;
  *"get nodes"*) cat "$KUBECTL_FOLDER/nodes.json" ;;
esac
"""


class FakeCluster:
    """A folder with what kubectl answers, and the manifest that is planned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "chat.yaml"

    def serve(self, world: World, document: dict[str, Any]) -> None:
        """Answer with the world; the API server returns `document` for the apply."""
        (self.folder / "live.json").write_text(json.dumps(world.document))
        nodes = [{"metadata": {"name": "gpu-1"}, "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "3"}}}]
        items = {"children": list(world.objects.values()), "pods": world.pods, "nodes": nodes, "nothing": []}
        for name, values in items.items():
            (self.folder / f"{name}.json").write_text(json.dumps({"items": values}))
        (self.folder / "apply.json").write_text(json.dumps(document))
        manifest = {key: value for key, value in document.items() if key != "status"}
        self.file.write_text(yaml.safe_dump(manifest))

    def fail(self, name: str, message: str) -> None:
        (self.folder / name).write_text(message)

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster whose resource has two pods, and a manifest with another drafter."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(SCRIPT)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(folder))
    cluster = FakeCluster(folder)
    engine = {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    world = serving_world(engine=engine)
    document = json.loads(json.dumps(world.document))
    document["spec"]["drafter"]["source"]["persistentVolumeClaim"]["path"] = "eagle31"
    cluster.serve(world, document)
    return cluster


def run(cluster: FakeCluster, *options: str) -> int:
    return run_command_line(["plan", "-f", str(cluster.file), *options])


def test_kubectl_gets_the_flags_and_nothing_is_written(cluster: FakeCluster, capsys: Capture) -> None:
    assert run(cluster, "-n", "default", "--context", "eu") == 0
    assert all(line.startswith("--namespace=default --context=eu ") for line in cluster.log)
    verbs = {next(argument for argument in line.split() if not argument.startswith("--")) for line in cluster.log}
    assert verbs == {"apply", "get"}
    assert [line for line in cluster.log if " apply " in line] == [
        "--namespace=default --context=eu apply --dry-run=server -f - -o json"
    ]
    text = " ".join(capsys.readouterr().out.split())
    assert "a canary with new pods tests the change" in text
    assert "Room now for 3 pods: gpu-1 3 (3 free)." in text
    assert "Not checked here: spec.model.source is a volume claim" in text
    assert "The operator's preflight Job will check it." in text
    assert "kubectl apply -n default --context=eu -f" in text


def test_only_the_resource_of_a_file_is_sent(cluster: FakeCluster) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}, "stringData": {"token": "sesame"}}
    cluster.file.write_text(cluster.file.read_text() + "---\n" + yaml.safe_dump(secret))
    assert run(cluster) == 0
    assert "sesame" not in (cluster.folder / "applied").read_text()


def test_documents_for_programs(cluster: FakeCluster, capsys: Capture) -> None:
    assert run(cluster, "-o", "json", "--diff") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["apiVersion"], document["kind"]) == ("cli.aerie.dev/v1", "RolloutPlan")
    assert (document["verdict"], document["change"]["kind"], document["pods"]["fit"]) == ("Apply", "Canary", True)
    assert "+      subPath: eagle31" in document["diff"]
    assert run(cluster, "-o", "yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "RolloutPlan"


def test_nodes_that_may_not_be_listed_are_unknown(cluster: FakeCluster, capsys: Capture) -> None:
    cluster.fail("forbidden", 'Error from server (Forbidden): nodes is forbidden: User "alice" cannot list resource "nodes"')
    assert run(cluster) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Free GPUs are unknown: " in text
    assert 'User "alice" cannot list resource "nodes"' in text


def test_a_forecast_needs_a_rate(cluster: FakeCluster, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "RUNS", 20)
    world = serving_world(rollout=IN_PLACE)
    document = json.loads(json.dumps(world.document))
    document["spec"]["drafter"]["source"]["persistentVolumeClaim"]["path"] = "eagle31"
    cluster.serve(world, document)
    assert run(cluster, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["forecast"] is None
    assert run(cluster, "-o", "json", "--requests-per-second", "20") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["change"]["kind"] == "InPlace"
    assert [row["effectPercent"] for row in planned["forecast"]] == [3, 0, -3]


@pytest.mark.parametrize(
    ("rejection", "texts"),
    [
        (
            """The SpeculativeDeployment "chat" is invalid:
            * spec.replicas: Invalid value: -1: should be at least 0
            * spec.drafter: Required value""",
            ["spec.replicas: Invalid value: -1: should be at least 0", "spec.drafter: Required value", "Correct these fields"],
        ),
        (
            'Error from server (BadRequest): error when creating "STDIN": strict decoding error: unknown field "spec.replica"',
            ['unknown field "spec.replica"'],
        ),
        (
            'Error from server: admission webhook "policy.example" denied the request: use a mirror of the image',
            ["use a mirror of the image"],
        ),
    ],
)
def test_a_rejection_of_the_server_ends_with_1(cluster: FakeCluster, capsys: Capture, rejection: str, texts: list[str]) -> None:
    cluster.fail("rejection", rejection)
    assert run(cluster) == 1
    error = " ".join(capsys.readouterr().err.split())
    for text in texts:
        assert text in error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ('Error from server (Forbidden): User "alice" cannot patch resource "speculativedeployments"', "edit to make decisions"),
        ("Unable to connect to the server: dial tcp: lookup x: no such host", "check the connection"),
        ('error: resource mapping not found: no matches for kind "SpeculativeDeployment"', "no matches for kind"),
    ],
)
def test_without_an_answer_there_is_no_plan(cluster: FakeCluster, capsys: Capture, error: str, text: str) -> None:
    cluster.fail("rejection", error)
    assert run(cluster) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_preflight_that_failed_in_the_cluster_ends_with_1(cluster: FakeCluster, capsys: Capture) -> None:
    world = serving_world()
    world.drafter("refused")
    for _ in range(3):
        world.step()
        world.check()
    cluster.serve(world, world.document)
    assert run(cluster) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "fails preflight" in text
    assert "C9 weights: torn" in text


def test_models_of_folders_are_checked(cluster: FakeCluster, capsys: Capture, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "target", Shape(layers=4))
    assert run(cluster, "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "target")) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "fails preflight" in text
    assert "✗ C" in text


def test_arguments_that_cannot_run_are_rejected(cluster: FakeCluster, capsys: Capture) -> None:
    document = json.loads((cluster.folder / "apply.json").read_text())
    document["spec"]["speculation"] = {"engineOptions": {"num_speculative_tokens": 5}}
    (cluster.folder / "apply.json").write_text(json.dumps(document))
    assert run(cluster) == 1
    assert "engineOptions" in capsys.readouterr().out


def test_a_workload_is_for_preflight(cluster: FakeCluster, capsys: Capture) -> None:
    cluster.file.write_text(yaml.safe_dump({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}}))
    assert run(cluster) == 2
    assert "run: aerie preflight -f" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--requests-per-second=0"], "--requests-per-second is 0"),
        (["--name=other"], "no object of kind SpeculativeDeployment named 'other'"),
        (["--target=a:b"], "--target is 'a:b'"),
    ],
)
def test_wrong_options_are_named(cluster: FakeCluster, capsys: Capture, options: list[str], text: str) -> None:
    assert run(cluster, *options) == 2
    assert text in " ".join(capsys.readouterr().err.split())
