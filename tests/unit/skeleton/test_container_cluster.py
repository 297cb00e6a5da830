"""`aerie-lab demo --cluster kind`, and k3d, with programs that record their arguments. No container engine is involved."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aerie_lab.cli import demo
from aerie_lab.cli.container_cluster import IMAGES
from aerie_lab.cli.run import run
from tests.nightly import use_each_nth

pytestmark = pytest.mark.slow

PROGRAMS = ("docker", "kind", "k3d", "kubectl", "helm")
BUILDS = [f"docker build --tag={image} --file={file} ." for image, file in IMAGES.items()]
STEPS = {
    "kind": (
        "kind get clusters",
        "kind create cluster --name=aerie-demo --wait=180s",
        f"kind load docker-image --name=aerie-demo {' '.join(IMAGES)}",
        "kind delete cluster --name=aerie-demo",
    ),
    "k3d": (
        "k3d cluster list --no-headers",
        "k3d cluster create aerie-demo --wait --timeout=180s",
        f"k3d image import --cluster=aerie-demo {' '.join(IMAGES)}",
        "k3d cluster delete aerie-demo",
    ),
}
DELETE = STEPS["kind"][-1]


class Machine:
    """A machine with these programs on the PATH and no others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        self.programs = folder / "bin"
        self.programs.mkdir()
        source = Path(__file__).with_name("container_programs.py").read_text()
        for name in PROGRAMS:
            program = self.programs / name
            program.write_text(f"#!{sys.executable} -IS\n{source}")
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(self.programs))
        monkeypatch.setenv("AERIE_LAB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(demo, "_TRAFFIC_SECONDS", 0.1)
        self.kubeconfig = folder / "cache" / "container-clusters" / "aerie-demo.kubeconfig"

    def write(self, name: str, text: str) -> None:
        """Write one of the files that change what the programs do."""
        (self.folder / name).write_text(text)

    def run(self, *options: str) -> tuple[int, str]:
        """Run the demo; return its exit status and what it has printed."""
        self._monkeypatch.setattr(sys, "argv", ["aerie-lab", "demo", *options])
        status = run()
        captured = self._capfd.readouterr()
        return status, " ".join((captured.out + captured.err).split())

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Machine:
    return Machine(tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("program", use_each_nth(2, [*STEPS]))
def test_whole_demo(machine: Machine, program: str) -> None:
    status, output = machine.run("--cluster", program)
    assert status == 0, output
    list_names, create, load, delete = STEPS[program]
    assert machine.calls[:6] == ["docker info", list_names, *BUILDS, create, load]
    assert machine.calls[6].startswith("helm install aerie ")
    assert machine.calls[-1] == delete
    applied = [call.rpartition("/")[2] for call in machine.calls if call.startswith("kubectl apply")]
    assert applied == ["demo-hub.yaml", "demo-containers.yaml", "demo-traffic-pod.yaml"]
    assert [call.split()[1] for call in machine.calls if "patch specdep" in call] == ["patch", "patch"]
    assert "2 requests, 0 failed." in output
    assert not machine.kubeconfig.exists()


def test_kept_cluster_is_not_deleted(machine: Machine) -> None:
    status, output = machine.run("--cluster", "kind", "--keep")
    assert status == 0, output
    assert DELETE not in machine.calls
    assert f"afterwards: {DELETE}" in output
    assert machine.kubeconfig.exists()


@pytest.mark.parametrize("missing", ["docker", "kind", "kubectl", "helm"])
def test_missing_program_is_named(machine: Machine, missing: str) -> None:
    (machine.programs / missing).unlink()
    status, output = machine.run("--cluster", "kind")
    assert status != 0
    assert f"{missing} is not on the PATH: install what is missing. On Linux, `make demo` without CLUSTER" in output
    assert machine.calls == []


def test_all_missing_programs_are_named_together(machine: Machine) -> None:
    for name in ("docker", "helm"):
        (machine.programs / name).unlink()
    assert "docker and helm are not on the PATH" in machine.run("--cluster", "k3d")[1]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("docker info", "Docker does not answer: start it, and see `docker info`."),
        ("get clusters", "kind cannot list its clusters. it fails as the test demands"),
        (BUILDS[0], f"`{BUILDS[0]}` ended with status 7: its output is above."),
        (BUILDS[1], f"`{BUILDS[1]}` ended with status 7: its output is above."),
    ],
)
def test_failure_before_there_is_a_cluster_deletes_none(machine: Machine, failing: str, message: str) -> None:
    machine.write("failing", failing)
    status, output = machine.run("--cluster", "kind")
    assert status != 0
    assert message in output
    assert machine.calls[-1].startswith(failing.split()[0]) or failing in machine.calls[-1]
    assert DELETE not in machine.calls


@pytest.mark.parametrize("keep", [(), ("--keep",)])
@pytest.mark.parametrize("failing", STEPS["kind"][1:3])
def test_incomplete_cluster_is_deleted(machine: Machine, failing: str, keep: tuple[str, ...]) -> None:
    machine.write("failing", failing)
    status, output = machine.run("--cluster", "kind", *keep)
    assert status != 0
    assert f"`{failing}` ended with status 7" in output
    assert machine.calls[-2:] == [failing, DELETE]


@pytest.mark.parametrize(
    "failing",
    [
        "helm install",
        "demo-hub.yaml",
        "wait deployment",
        "demo-containers.yaml",
        "create --raw",
        "demo-traffic-pod.yaml",
        "patch",
    ],
)
def test_failure_in_the_cluster_deletes_it(machine: Machine, failing: str) -> None:
    machine.write("failing", failing)
    status, output = machine.run("--cluster", "kind")
    assert status != 0
    assert "it fails as the test demands" in output
    assert failing in machine.calls[-2]
    assert machine.calls[-1] == DELETE


def test_failed_deletion_is_reported_with_the_command(machine: Machine) -> None:
    machine.write("failing", "delete cluster")
    status, output = machine.run("--cluster", "kind")
    assert status != 0
    assert (
        f"`{DELETE}` ended with status 7: its output is above. Cluster aerie-demo may still run: repeat that command." in output
    )


def test_failed_deletion_does_not_hide_the_first_error(machine: Machine) -> None:
    machine.write("failing", "cluster --name=aerie-demo")  # create and delete
    output = machine.run("--cluster", "kind")[1]
    assert f"`{STEPS['kind'][1]}` ended with status 7" in output
    assert "Cluster aerie-demo may still run" in output


@pytest.mark.parametrize(("name", "is_rejected"), [("aerie-demo", True), ("aerie-demo-2", False)])
def test_cluster_of_the_same_name_is_left_alone(machine: Machine, name: str, is_rejected: bool) -> None:
    machine.write("clusters", f"other\n{name}\n")
    machine.write("failing", "docker build")
    output = machine.run("--cluster", "kind")[1]
    assert (f"kind has a cluster aerie-demo already: delete it with `{DELETE}`, or give another --name." in output) == is_rejected
    assert DELETE not in machine.calls


def test_failed_request_is_an_error(machine: Machine) -> None:
    machine.write("last_error", "timeout")
    status, output = machine.run("--cluster", "kind")
    assert status != 0
    assert "1 of 2 requests failed: {'timeout': 1}." in output
    assert machine.calls[-1] == DELETE


def test_end_of_the_requests_is_an_error(machine: Machine) -> None:
    machine.write("log_ends", "yes")
    status, output = machine.run("--cluster", "kind")
    assert status != 0
    assert "the pod with the requests has ended too early: see `kubectl logs traffic`." in output
    assert machine.calls[-1] == DELETE


def test_termination_deletes_the_cluster(machine: Machine) -> None:
    command = [sys.executable, "-c", "from aerie_lab.cli import main; main()", "demo", "--cluster", "kind"]
    machine.write("holding", "kubectl get pods")  # so that no other call begins while the signal arrives
    with subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 60
        while not any("kubectl get pods" in call for call in machine.calls) and time.monotonic() < deadline:
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == -signal.SIGTERM
    machine.write("deleted", "yes")  # ends the process that stands for `kubectl logs`
    assert machine.calls[-1] == DELETE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cluster", "minikube"), "--cluster minikube: no such cluster. Choose lab or kind or k3d."),
        (("--cluster", "kind", "--engine", "vllm"), "--engine vllm needs the lab: leave --cluster out."),
        (("--cluster", "kind", "--name", "No"), "'No' cannot name a cluster"),
    ],
)
def test_invalid_options_are_rejected(machine: Machine, options: tuple[str, ...], message: str) -> None:
    status, output = machine.run(*options)
    assert status != 0
    assert message in output
    assert machine.calls == []
