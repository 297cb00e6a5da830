"""The whole lab in a user namespace, for a user without privileges.

Privileges that this process has are dropped for the lab; without any to drop, every other test shows the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aerie_lab.binaries import ensure_family
from aerie_lab.cluster import Lab
from aerie_lab.paths import lab_folder
from aerie_lab.testing.namespace import Namespace
from aerie_lab.testing.pods import config_map, echo, pod, read_termination_message, shell

DROP_PRIVILEGES = ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-sys_admin,-net_admin"]
NAME = f"bare-{os.getpid()}"


def run_unprivileged(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DROP_PRIVILEGES, *command], capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def unprivileged_lab(report_progress: Callable[[str], None]) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("this user has no privileges to drop: the whole suite runs without them")
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("needs setpriv and unshare (util-linux) to drop privileges")
    if run_unprivileged("unshare", "--net", "true").returncode == 0:
        pytest.skip("privileges cannot be dropped here")
    if run_unprivileged("unshare", "--user", "--net", "true").returncode != 0:
        pytest.skip("user namespaces are not allowed here")
    for family in ("etcd", "kubernetes"):
        ensure_family(family, report_progress)
    program = str(Path(sys.executable).parent / "aerie-lab")
    up = run_unprivileged(program, "up", "--name", NAME, "--no-gateway")
    try:
        assert up.returncode == 0, up.stderr
        yield Lab.find(NAME)
    finally:
        down = run_unprivileged(program, "down", "--name", NAME)
    assert down.returncode == 0, down.stderr
    assert not lab_folder(NAME).exists()


def test_pods_run_without_privileges(unprivileged_lab: Lab, tmp_path: Path) -> None:
    namespace = Namespace(unprivileged_lab, "default")
    script = """
        cat /in/key > /dev/termination-log
        touch /usr/x /etc/x /x /disk/x /memory/x /host/x
        ! touch /in/x 2>/dev/null
        ! touch /sys/x 2>/dev/null
    """
    names = ("in", "disk", "memory", "host")
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in names]
    strict = {"name": "strict", **shell("! touch /usr/x", securityContext={"readOnlyRootFilesystem": True})}
    volumes = [
        {"name": "in", "configMap": {"name": "numbers"}},
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "host", "hostPath": {"path": str(tmp_path)}},
    ]
    probes = {
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
        "livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1},
    }
    namespace.apply(
        config_map("numbers", key="value"),
        pod("writing", shell(script, volumeMounts=mounts), strict, volumes=volumes, restartPolicy="Never"),
        pod("serving", echo(**probes)),
    )
    assert read_termination_message(namespace.wait_until_phase("writing", "Succeeded")) == "value"
    assert (tmp_path / "x").exists()
    assert not Path("/usr/x").exists()
    namespace.wait_until_ready("serving")
    namespace.kubectl("delete", "pod", "writing", "serving", "--timeout=180s")
    namespace.close()


def test_without_user_namespaces_the_error_names_the_setting() -> None:
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False).returncode != 0:
        pytest.skip("needs a user namespace in which the next one can be forbidden")
    program = str(Path(sys.executable).parent / "aerie-lab")
    # The limit is the inner namespace's own; the machine's stays as it is.
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {" ".join(DROP_PRIVILEGES)} "$0" "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid]
    up = subprocess.run(
        [*inside, program, "up", "--name", NAME, "--no-gateway"], capture_output=True, text=True, timeout=100, check=False
    )
    assert up.returncode == 2
    assert "this user may not make namespaces, which the lab needs: run as root, or allow" in up.stderr
    assert "Traceback" not in up.stderr
    assert not lab_folder(NAME).exists()
