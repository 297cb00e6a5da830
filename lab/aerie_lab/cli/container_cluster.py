"""A cluster of containers, by kind or k3d, with Aerie's images in it: the place of `aerie-lab demo --cluster`.

It runs the user's own programs: docker, kind or k3d, kubectl and helm. Their output goes to the terminal.

Guarantees: nothing starts before all programs are on the PATH, Docker answers, and no cluster has the name. So only a cluster
that was created here is deleted. It is deleted when a later step fails, or SIGTERM or SIGHUP ends this process. kind, k3d,
kubectl and helm get a kubeconfig of the demo's own. Not guaranteed: that it works with a container engine. It is tested with
programs that record their arguments (tests/unit/skeleton/test_container_cluster.py), and never ran with Docker. A build of an
image has no timeout.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aerie.terminal import sanitize_text
from aerie_lab.cli.console import out
from aerie_lab.cluster.signal_cleanup import clean_up_on_signal, defer_signals
from aerie_lab.errors import LabError, StateError
from aerie_lab.paths import NAME_PATTERN, cache_folder

REPOSITORY_FOLDER = Path(__file__).resolve().parents[3]
IMAGES = {"aerie.dev/aerie:0.1.0": "Dockerfile", "aerie.dev/lab/engine:v0.33.0": "lab/Dockerfile"}
"""Dockerfiles by image: the chart's operator, and what the demo's manifests name."""
_INFO_TIMEOUT_SECONDS = 30.0
_ALTERNATIVE = "On Linux, `make demo` without CLUSTER needs no container engine."


@dataclass(frozen=True)
class _ClusterProgram:
    """The commands of one program. {name} is the cluster's name."""

    list_names: str
    """Prints a line for each cluster, which begins with its name."""
    create: str
    load_images: str
    delete: str


CLUSTER_PROGRAMS = {
    "kind": _ClusterProgram(
        list_names="kind get clusters",
        create="kind create cluster --name={name} --wait=180s",
        load_images="kind load docker-image --name={name}",
        delete="kind delete cluster --name={name}",
    ),
    "k3d": _ClusterProgram(
        list_names="k3d cluster list --no-headers",
        create="k3d cluster create {name} --wait --timeout=180s",
        load_images="k3d image import --cluster={name}",
        delete="k3d cluster delete {name}",
    ),
}


@contextlib.contextmanager
def run_container_cluster(program: str, demo_name: str, *, keep: bool) -> Iterator[ContainerCluster]:
    """Build the images, create a cluster with them, and yield it.

    Delete the cluster at the end, unless it is to be kept and was complete. Raises StateError if something is missing, and
    LabError if a step fails.
    """
    if not NAME_PATTERN.fullmatch(demo_name):
        raise StateError(f"'{demo_name}' cannot name a cluster: use up to 20 lower-case letters, digits and inner dashes.")
    cluster = ContainerCluster(program, f"aerie-{demo_name}")
    cluster.check()
    for image, file in IMAGES.items():
        cluster.run(["docker", "build", f"--tag={image}", f"--file={file}", "."])
    with cluster.delete_on_error():
        cluster.run(cluster.command("create"))
        cluster.run([*cluster.command("load_images"), *IMAGES])
        if not keep:
            yield cluster
    if keep:
        yield cluster
    else:
        cluster.delete()


class ContainerCluster:
    """One cluster by its name, which may not exist yet."""

    def __init__(self, program: str, name: str) -> None:
        self.program, self.name = program, name
        self.kubeconfig = cache_folder() / "container-clusters" / f"{name}.kubeconfig"
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),  # kind and k3d write it, kubectl and helm read it
            # `kind load` fails with images that have attestations (kubernetes-sigs/kind#3795), which buildx adds by default.
            "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
        }

    def command(self, step: str) -> list[str]:
        return [argument.format(name=self.name) for argument in getattr(CLUSTER_PROGRAMS[self.program], step).split()]

    def check(self) -> None:
        """Raise StateError unless everything is there, and the name is free."""
        missing = [name for name in ("docker", self.program, "kubectl", "helm") if shutil.which(name) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise StateError(f"{' and '.join(missing)} {verb} not on the PATH: install what is missing. {_ALTERNATIVE}")
        self._read_output(["docker", "info"], f"Docker does not answer: start it, and see `docker info`. {_ALTERNATIVE}")
        names = self._read_output(self.command("list_names"), f"{self.program} cannot list its clusters.")
        if self.name in [line.split()[0] for line in names.splitlines() if line.strip()]:
            raise StateError(
                f"{self.program} has a cluster {self.name} already: delete it with `{shlex.join(self.command('delete'))}`, "
                "or give another --name."
            )
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.unlink(missing_ok=True)  # that of a cluster which was deleted by hand

    def run(self, command: list[str]) -> None:
        """Print a command, and run it. Raises LabError if it fails."""
        out.print(f"[cyan]$ {sanitize_text(shlex.join(command))}[/]")
        out.file.flush()
        status = subprocess.run(
            command, cwd=REPOSITORY_FOLDER, env=self.environment, stdin=subprocess.DEVNULL, check=False
        ).returncode
        if status != 0:
            raise LabError(f"`{shlex.join(command)}` ended with status {status}: its output is above.")

    @contextlib.contextmanager
    def delete_on_error(self) -> Iterator[None]:
        """Within it, an exception deletes the cluster, and so does a signal that ends this process."""
        with clean_up_on_signal(self.delete):
            try:
                yield
            except BaseException as error:
                try:
                    self.delete()
                except LabError as second_error:
                    raise LabError(f"{error}\n{second_error}") from error
                raise

    def delete(self) -> None:
        """Delete the cluster, complete or not."""
        with defer_signals():
            try:
                self.run(self.command("delete"))
            except LabError as error:
                raise LabError(f"{error} Cluster {self.name} may still run: repeat that command.") from error
            self.kubeconfig.unlink(missing_ok=True)

    def _read_output(self, command: list[str], failure: str) -> str:
        """Return the standard output of a command. Raises StateError with `failure` and what the command has printed."""
        try:
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=_INFO_TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise StateError(f"{failure} `{shlex.join(command)}` took longer than {_INFO_TIMEOUT_SECONDS:g} s.") from error
        if done.returncode != 0:
            raise StateError(f"{failure} {done.stderr.strip()}")
        return done.stdout
