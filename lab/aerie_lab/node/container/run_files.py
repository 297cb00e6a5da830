"""Files of a container's runs: the log and the termination message of each.

Guarantees: those of the current run and of the one before are kept, and older ones are removed, as by a kubelet. Not guaranteed:
a message; a full disk loses it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from aerie_lab.kube.client import KubeObject
from aerie_lab.node.logs import read_container_log_tail

_MAX_TERMINATION_MESSAGE_BYTES = 4096


class RunFiles:
    """The files of one container in its pod's folder."""

    def __init__(self, folder: Path, container: str) -> None:
        self._folder = folder
        self._container = container

    def log(self, run: int) -> Path:
        """Return the log of a run."""
        return self._file("logs", run)

    def create_termination_message(self, run: int) -> Path:
        """Return the empty file for a run's termination message, and make room for its log."""
        for kind in ("logs", "messages"):  # a kubelet keeps those of the run before, and no older ones
            self._file(kind, run).parent.mkdir(parents=True, exist_ok=True)
            for old in self._file(kind, 0).parent.glob(f"{run - 2}.log*"):
                old.unlink(missing_ok=True)
        message_file = self._file("messages", run)
        message_file.write_bytes(b"")
        return message_file

    def read_termination_message(self, spec: KubeObject, run: int, code: int) -> str:
        """Return the termination message of a run that ended with this code, as the container's spec has it."""
        with contextlib.suppress(OSError), self._file("messages", run).open("rb") as file:
            if raw := file.read(_MAX_TERMINATION_MESSAGE_BYTES):
                return raw.decode(errors="replace")
        if code != 0 and spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            return read_container_log_tail(self.log(run), 80)[-2048:]
        return ""

    def _file(self, kind: str, run: int) -> Path:
        return self._folder / kind / self._container / f"{run}.log"
