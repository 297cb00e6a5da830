"""Settings of a lab, chosen at `up` and stored in its folder. Data only; every field has one meaning and one default."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from aerie_lab.errors import StateError

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LAB_FILE_FORMAT = 2  # of lab.json; another format is an error


@dataclass(frozen=True)
class LabSettings:
    """The choices of one lab."""

    name: str = "default"
    nodes: int = 2
    """Number of Nodes that the agent plays, named node-1, node-2, ..."""
    gpus_per_node: int = 8
    """`nvidia.com/gpu` of each node. The scheduler counts them; there is no hardware."""
    cpus_per_node: int = 32
    """`cpu` of each node, cores."""
    memory_gib_per_node: int = 256
    """`memory` of each node, GiB."""
    pods_per_node: int = 250
    """Maximum number of pods per node."""
    gateway: bool = True
    """Whether Contour, Envoy and a Gateway are installed."""
    gateway_name: str = "projectcontour/lab"
    """The Gateway's NAMESPACE/NAME, so that manifests which name another one work as they are."""
    api_port: int = 0
    """The API server's port on 127.0.0.1; 0 takes a free one."""
    gateway_port: int = 0
    """The gateway's port on 127.0.0.1; 0 takes a free one."""
    image_tables: list[str] = field(default_factory=list)
    """Further image tables (TOML files), which take precedence over the lab's own."""
    restart_backoff: float = 10.0
    """Seconds before a crashed container's first restart; doubles up to 30 times this, as a kubelet's 10 s does to 300 s."""

    def __post_init__(self) -> None:
        bounds = {"nodes": (1, 100), "gpus_per_node": (0, 64), "cpus_per_node": (1, 1024), "memory_gib_per_node": (1, 65536)}
        bounds |= {"pods_per_node": (1, 5000), "api_port": (0, 65535), "gateway_port": (0, 65535)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise StateError(f"{name} is {value}: choose a number from {low} to {high}.")
        if not re.fullmatch(f"{_DNS_LABEL}/{_DNS_LABEL}", self.gateway_name):
            raise StateError(f"gateway_name is '{self.gateway_name}': write NAMESPACE/NAME, as projectcontour/lab.")
        if self.restart_backoff <= 0:
            raise StateError(f"restart_backoff is {self.restart_backoff}: choose seconds above 0.")

    def to_json(self) -> dict[str, Any]:
        """Return the content of `settings` in lab.json."""
        return asdict(self)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Return the settings of the lab in `folder`. Raises StateError when they cannot be read."""
        path = folder / "lab.json"
        try:
            document = json.loads(path.read_text())
            if document["format"] != LAB_FILE_FORMAT:
                raise StateError(
                    f"{path} was written by another version of the lab (format {document['format']}, this one writes "
                    f"{LAB_FILE_FORMAT}): run `aerie-lab down --name {folder.name}` and then `up` again."
                )
            return cls(**document["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{path} cannot be read ({error}): run `aerie-lab down --name {folder.name}` and then `up` again."
            ) from error
