"""Search for words of users' requests in everything that a test has left: objects, metrics, logs, and all files of the lab.

Not guaranteed: files in the memory volumes of pods, and what a process only has in memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from aerie_lab.cluster import process
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace

_PROGRAM = """
import json, sys, urllib.request
print(json.dumps({address: urllib.request.urlopen(address, timeout=30).read().decode() for address in json.load(sys.stdin)}))
"""


def create_marker(prefix: str) -> str:
    """Return a word that occurs nowhere else."""
    return f"{prefix}-{os.urandom(6).hex()}"


def fetch_in_lab(namespace: Namespace, addresses: Iterable[str]) -> dict[str, str]:
    """Return the text at each address of the lab's network. Raises LabError if there is none."""
    network = [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(process.find_lab_pid(namespace.lab.folder))]
    completed = subprocess.run(
        [*network, sys.executable, "-c", _PROGRAM],
        input=json.dumps(list(addresses)),
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        raise LabError(completed.stderr)
    texts: dict[str, str] = json.loads(completed.stdout)
    return texts


def list_objects(namespace: Namespace) -> Iterator[dict[str, Any]]:
    """Yield every object of the namespace, of all kinds."""
    kinds = namespace.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    # Metrics of pods are no objects, and are not served here.
    yield from json.loads(namespace.kubectl("get", ",".join(kinds), "-o", "json", "--ignore-not-found"))["items"]


def find_in_objects(namespace: Namespace, markers: Iterable[str], is_searched: Callable[[dict[str, Any]], bool]) -> list[str]:
    """Return the kind and name of each object with one of the markers."""
    markers = tuple(markers)
    return [
        f"{item['kind']}/{item['metadata']['name']}"
        for item in list_objects(namespace)
        if is_searched(item) and any(marker in json.dumps(item) for marker in markers)
    ]


def find_in_files(folders: Iterable[Path], markers: Iterable[str], is_searched: Callable[[Path], bool]) -> list[str]:
    """Return the path of each file with one of the markers."""
    encoded = tuple(marker.encode() for marker in markers)
    marked = []
    for folder in folders:
        assert folder.is_dir(), folder
        for path in sorted(folder.rglob("*")):
            try:
                if path.is_file() and not path.is_symlink() and is_searched(path):
                    content = path.read_bytes()
                    marked += [str(path)] if any(marker in content for marker in encoded) else []
            except OSError:  # removed meanwhile
                continue
    return marked
