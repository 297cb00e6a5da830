"""The lab's binaries: pinned builds of Kubernetes, etcd, Helm, Contour, Prometheus and an S3 server, the packaged
Envoy, and vLLM.

lookup       the functions for callers
store        folders of builds; one build at a time, complete or absent
build        go build, and the reason of its failure
toolchain    a Go toolchain that is new enough
environment  a virtual environment of pinned Python packages
overlay      one release's Python over another environment's compiled files
pip          one pip install of pinned packages, and the reason of its failure
commands     one long command: supervised, and stopped with its children
version_check  the version that a binary reports
families     the recipes, as data; modules/ and *.txt have the pins
"""

from aerie_lab.binaries.lookup import (
    DEFAULT_FAMILY_NAMES,
    FAMILY_NAMES,
    ensure_binary,
    ensure_family,
    find_family_folder,
    find_installed_binary,
)

__all__ = [
    "DEFAULT_FAMILY_NAMES",
    "FAMILY_NAMES",
    "ensure_binary",
    "ensure_family",
    "find_family_folder",
    "find_installed_binary",
]
