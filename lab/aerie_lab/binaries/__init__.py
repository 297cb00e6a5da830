"""The lab's binaries: pinned builds of Kubernetes, etcd, Helm, Contour and Prometheus, the packaged Envoy, and vLLM.

lookup       what callers use: ensure, folder_of, binary, installed
store        where builds lie; one build at a time, complete or not there
build        go build, and what went wrong with it
toolchain    a Go that is new enough
environment  a virtual environment of pinned Python packages
overlay      one release's Python over another environment's compiled files
pip          one pip install of pinned packages, and what went wrong with it
commands     one long command: watched, and stopped with its children
proof        which version a binary tells
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
