"""Up and down: no traces remain, whatever happens in between. These tests start their own labs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.cluster import Lab, LabSettings, list_lab_names, process, start, take_down_lab
from aerie_lab.errors import StartError, StateError
from aerie_lab.paths import lab_folder
from aerie_lab.testing import wait_until
from tests.nightly import at_night, use_each_nth

NAME = f"life-{os.getpid()}"
# SIGINT is ignored where the tests run in the background of a script, and the command would inherit that.
READY = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from aerie_lab.cli import main; "
COMMAND = [sys.executable, "-c", READY + "main()"]


def small_settings(name: str = NAME, **changes: Any) -> LabSettings:
    """Return settings of a lab that starts quickly."""
    return LabSettings(name=name, nodes=1, gateway=False, **changes)


def find_traces(name: str) -> list[str]:
    """Return every trace of a lab on this machine: processes, mounts, named namespaces, files."""
    folder = str(lab_folder(name))
    traces = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(argument.startswith(folder) or f"={folder}" in argument for argument in arguments):
                traces.append(f"process {entry.name}: {' '.join(arguments)[:100]}")
    traces += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line]
    return traces + ([folder] if Path(folder).exists() else [])


def machine_state() -> tuple[list[str], list[str], int]:
    """Return named network namespaces, network devices and the number of mounts of this machine."""
    network_namespaces = sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return network_namespaces, sorted(os.listdir("/sys/class/net")), mounts


@pytest.fixture(autouse=True)
def no_traces_remain() -> Iterator[None]:
    before = machine_state()
    yield
    for name in list_lab_names():
        if name.startswith(NAME):
            take_down_lab(name)
    assert find_traces(NAME) == []
    assert machine_state() == before


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.nightly  # `make test` runs two
def test_two_labs_run_side_by_side_and_are_removed() -> None:
    with Lab.up(small_settings()) as first, Lab.up(small_settings(f"{NAME}-b")) as second:
        assert first.api_url != second.api_url
        for lab in (first, second):
            lab.kubectl("create", "deployment", "echo", "--image=aerie.dev/lab/echo:1")
            lab.kubectl("rollout", "status", "deployment/echo", "--timeout=180s")
        # The same addresses in both, and neither sees the other's.
        assert "node-1" in second.kubectl("get", "nodes", "-o", "name")
        second.down()
        assert find_traces(f"{NAME}-b") == []
        assert "echo" in first.kubectl("get", "deployments", "-o", "name")


def test_a_second_up_reuses_the_lab_and_rejects_other_settings() -> None:
    with Lab.up(small_settings()) as lab:
        progress: list[str] = []
        assert Lab.up(small_settings(), progress.append).api_url == lab.api_url
        assert progress == [f"lab '{NAME}' is up already"]
        with pytest.raises(StateError, match="is up with other settings"):
            Lab.up(small_settings(gpus_per_node=4))


def test_a_killed_lab_is_cleaned_up_by_the_next_up() -> None:
    lab = Lab.up(small_settings())
    lab.kubectl("create", "deployment", "echo", "--image=aerie.dev/lab/echo:1")
    pid = process.find_lab_pid(lab.folder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not [trace for trace in find_traces(NAME) if trace.startswith("process")], "all its processes are gone")
    wait_until(lambda: process.find_lab_pid(lab.folder) is None, "process 1, which has no command line any more, has ended too")
    with pytest.raises(StateError, match="is not up"):
        Lab.find(NAME)
    with Lab.up(small_settings()) as new_lab:
        assert "echo" not in new_lab.kubectl("get", "deployments", "-o", "name")


def test_a_lab_that_ends_with_its_caller_ends_with_it() -> None:
    code = (
        "import os, signal, sys; from aerie_lab.cluster import Lab, LabSettings\n"
        f"Lab.up(LabSettings(name='{NAME}', nodes=1, gateway=False), end_with_caller=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    wait_until(lambda: not [trace for trace in find_traces(NAME) if trace.startswith("process")], "all its processes are gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, at_night(signal.SIGHUP)])
def test_a_signal_in_a_block_takes_the_lab_down_first(number: signal.Signals) -> None:
    code = (
        "import signal; from aerie_lab.cluster import Lab, LabSettings\n"
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # as started without nohup
        f"with Lab.up(LabSettings(name='{NAME}', nodes=1, gateway=False)):\n"
        f"    signal.raise_signal({int(number)})\n"
        "    print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")
    assert find_traces(NAME) == []


def test_sigterm_during_up_leaves_no_traces() -> None:
    command = [*COMMAND, "up", "--name", NAME, "--nodes=1", "--no-gateway"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as starting:
        wait_until(lambda: process.find_lab_pid(lab_folder(NAME)), "the lab's first process lives")
        starting.terminate()
        _, errors = starting.communicate(timeout=60)
    assert starting.returncode == -signal.SIGTERM
    assert b"Traceback" not in errors
    assert find_traces(NAME) == []


@pytest.mark.parametrize("seconds", use_each_nth(2, [0.3, 1.0, 1.6, 2.5, 4.0]))
def test_the_next_command_cleans_up_after_ctrl_c_during_up(seconds: float) -> None:
    command = [sys.executable, "-c", READY + "print('begun', flush=True); main()"]
    command += ["up", "--name", NAME, "--nodes=1", "--no-gateway"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline() == b"begun\n"  # before it, Ctrl-C would interrupt Python's own start, with a traceback
        time.sleep(seconds)  # an interrupt at any time must be handled
        starting.send_signal(signal.SIGINT)
        _, errors = starting.communicate(timeout=60)
    assert starting.returncode in (0, 130), errors.decode()
    assert b"Traceback" not in errors
    down = run("down", "--name", NAME)
    assert down.returncode == 0, down.stderr
    assert find_traces(NAME) == []


def test_down_cleans_up_after_a_killed_up() -> None:
    starting = subprocess.Popen([*COMMAND, "up", "--name", NAME, "--nodes=1", "--no-gateway"], stderr=subprocess.DEVNULL)
    wait_until(lambda: process.find_lab_pid(lab_folder(NAME)), "the lab's first process lives")
    starting.kill()
    starting.wait()
    with pytest.raises(StateError, match="half started"):
        Lab.find(NAME)
    assert run("down", "--name", NAME).returncode == 0
    assert find_traces(NAME) == []


def test_a_used_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"port {port} of 127.0.0.1 is taken: give another one with --api-port"):
            Lab.up(small_settings(api_port=port))


def test_stale_state_is_removed_and_foreign_state_rejected() -> None:
    folder = lab_folder(NAME)
    folder.mkdir(parents=True)
    (folder / "lab.json").write_text("{ half a fi")
    (folder / "process.json").write_text(json.dumps({"pid": os.getpid(), "start_time": 1}))  # a reused process id
    with Lab.up(small_settings()) as lab:
        assert "node-1" in lab.kubectl("get", "nodes", "-o", "name")
        (folder / "lab.json").write_text(json.dumps({"format": 0, "settings": {}}))
        with pytest.raises(StateError, match="another version of the lab"):
            Lab.find(NAME)


def test_a_component_that_cannot_start_is_reported_with_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    # A file is in the place of etcd's folder, as after disk corruption.
    write_credentials = start._write_credentials

    def write_and_block_etcd(folder: Path, settings: LabSettings) -> None:
        write_credentials(folder, settings)
        (folder / "etcd").write_text("not a folder")

    monkeypatch.setattr(start, "_write_credentials", write_and_block_etcd)
    with pytest.raises(StartError, match=r"(?s)etcd did not become ready.*not a directory.*logs of this attempt are in"):
        Lab.up(small_settings())


def test_an_error_of_the_command_line_is_one_sentence() -> None:
    for arguments, sentence in (
        (["status", "--name", NAME], f"lab '{NAME}' is not up: start it with `aerie-lab up --name {NAME}`."),
        (["up", "--name", "Not A Name"], "cannot name a lab"),
        (["up", "--name", NAME, "--nodes", "0"], "nodes is 0: choose a number from 1 to 100"),
        (["up", "--name", NAME, "--images", "/nowhere.toml"], "image table /nowhere.toml cannot be read"),
        (["logs", "etcd", "--name", NAME], "the lab is not up"),
        (["build", "linux"], "'linux' is no family of binaries"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert sentence in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_all_commands_from_up_to_down() -> None:
    up = run("up", "--name", NAME, "--nodes=1", "--no-gateway")
    assert up.returncode == 0, up.stderr
    assert up.stdout == f"export KUBECONFIG={lab_folder(NAME) / 'kubeconfig'}\n"
    assert "API server  https://127.0.0.1:" in up.stderr
    environment = {**os.environ, "AERIE_LAB_NAME": NAME}
    nodes = subprocess.run([*COMMAND, "kubectl", "get", "nodes"], capture_output=True, text=True, env=environment, check=True)
    assert "node-1" in nodes.stdout
    status = json.loads(run("status", "--name", NAME, "--json").stdout)
    assert all(part["running"] for part in status["components"].values())
    assert "using 10.245.0.1" in run("logs", "kube-apiserver", "--name", NAME, "-n", "2000").stdout
    shell = run("shell", "--name", NAME, "--", "sh", "-c", "kubectl get nodes -o name; exit 3")
    assert (shell.stdout, shell.returncode) == ("node/node-1\n", 3)
    inside = run("shell", "--inside", "--name", NAME, "--", "sh", "-c", "kubectl get nodes -o name; ls /sys/class/net")
    assert "node/node-1" in inside.stdout, inside.stderr
    assert run("down", "--name", NAME).returncode == 0
    assert run("down", "--name", NAME).returncode == 0  # a second time succeeds too
