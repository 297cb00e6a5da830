"""The lab's own processes as data: command lines and health checks. Pure.

The control plane is upstream's; only what one machine needs is set. Sources of the flags: the components' `--help`.
Where a default is changed, the reason stands beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aerie_lab.sandbox.addresses import CONTROL_PLANE_IP, HUB_PORT, SERVICE_CIDR

API_SERVER_PORT = 6443
"""Where the API server listens inside the lab."""
GATEWAY_SERVICE_IP = "10.96.0.30"
"""The cluster IP that the gateway's Service requests; the host's gateway port leads to its port 80."""


@dataclass(frozen=True)
class Component:
    """One long-running process of the lab itself."""

    name: str
    command: list[str]
    health_url: str | None = None
    """URL that answers 200 when the component is ready; None: ready when running."""
    use_lab_certificates: bool = False
    """Whether `health_url` is requested with the lab's certificates."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables where the lab's caller has none of that name."""


def build_components(folder: Path, find_program: Callable[[str], Path]) -> list[Component]:
    """Return the lab's processes in their start order. `find_program` returns a program by its name."""
    certificates = folder / "certificates"
    configs = folder / "components"
    # The heap of an idle control plane is small: collecting it a little more often costs nothing and saves a third of it. Under
    # load it does cost CPU time, so `make test` sets another value.
    frugal = {"GOGC": "60"}
    etcd = Component(
        "etcd",
        [
            str(find_program("etcd")),
            f"--data-dir={folder / 'etcd'}",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--log-level=warn",
            "--unsafe-no-fsync",  # a lab's data need not survive a power cut
        ],
        "http://127.0.0.1:2379/health",
        environment=frugal,
    )
    apiserver = Component(
        "kube-apiserver",
        [
            str(find_program("kube-apiserver")),
            "--etcd-servers=http://127.0.0.1:2379",
            f"--secure-port={API_SERVER_PORT}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={CONTROL_PLANE_IP}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            "--allow-privileged=true",
            f"--client-ca-file={certificates / 'ca.crt'}",
            f"--tls-cert-file={certificates / 'kube-apiserver.crt'}",
            f"--tls-private-key-file={certificates / 'kube-apiserver.key'}",
            f"--kubelet-certificate-authority={certificates / 'ca.crt'}",
            f"--kubelet-client-certificate={certificates / 'kube-apiserver-to-node.crt'}",
            f"--kubelet-client-key={certificates / 'kube-apiserver-to-node.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={certificates / 'service-account.pub'}",
            f"--service-account-signing-key-file={certificates / 'service-account.key'}",
            "--profiling=false",
        ],
        f"https://127.0.0.1:{API_SERVER_PORT}/readyz",
        use_lab_certificates=True,
        environment=frugal,
    )
    controllers = Component(
        "kube-controller-manager",
        [
            str(find_program("kube-controller-manager")),
            f"--kubeconfig={configs / 'kube-controller-manager.kubeconfig'}",
            "--bind-address=127.0.0.1",
            f"--root-ca-file={certificates / 'ca.crt'}",
            f"--service-account-private-key-file={certificates / 'service-account.key'}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--profiling=false",
            # One machine, no neighbours to be polite to: upstream's 20 requests/s would take minutes for 1,000 pods.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            # A lab's user waits for a silent node to be noticed; upstream's 50 s suit fleets that cross networks.
            "--node-monitor-grace-period=20s",
        ],
        environment=frugal,
    )
    scheduler = Component(
        "kube-scheduler",
        [
            str(find_program("kube-scheduler")),
            f"--config={configs / 'kube-scheduler.yaml'}",
            "--bind-address=127.0.0.1",
            "--profiling=false",
        ],
        environment=frugal,
    )
    agent = Component(
        "node-agent",
        [sys.executable, "-m", "aerie_lab.node", str(folder)],
        environment={"PYTHONUNBUFFERED": "1"},
    )
    hub = Component(
        "hub",
        [sys.executable, "-m", "aerie_lab.hub", str(folder)],
        f"http://127.0.0.1:{HUB_PORT}/health",
    )
    return [etcd, apiserver, controllers, scheduler, hub, agent]


def build_scheduler_configuration(kubeconfig: Path) -> dict[str, object]:
    """Return the scheduler's configuration file."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 500, "burst": 1000},
        "leaderElection": {"leaderElect": False},
    }
