"""The API of labs: start, use, stop. The command line and the test fixtures are thin layers over it.

    with Lab.up(LabSettings(name="try")) as lab:
        lab.kubectl("get", "nodes")

Guarantees: `up` returns a cluster whose nodes are Ready and whose gateway is programmed, or raises a LabError with nothing
left running; `down` leaves no process, namespace, mount or file outside the cache; SIGTERM in the block, or in `up`, stops the
lab before it ends the process (see signal_cleanup). Not guaranteed: that a lab survives a restart of the machine. The next `up`
or `down` removes its remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from aerie_lab import control
from aerie_lab.binaries import ensure_binary, ensure_family
from aerie_lab.binaries.commands import ProgressCallback
from aerie_lab.cluster import process
from aerie_lab.cluster.folder import lab_lock, preserve_failed_logs, remove_lab, require_disk_space
from aerie_lab.cluster.signal_cleanup import clean_up_on_signal, defer_signals
from aerie_lab.cluster.start import build_api_url, read_supervisor_status, start_lab
from aerie_lab.errors import LabError, StartError, StateError
from aerie_lab.images.table import ImageTable
from aerie_lab.kube.client import KubeClient, KubeObject
from aerie_lab.kube.reader import ObjectReader
from aerie_lab.paths import lab_folder
from aerie_lab.settings import LabSettings

_SHUTDOWN_TIMEOUT_SECONDS = 15.0


def _ignore_progress(line: str) -> None:
    pass


class Lab:
    """One running lab. Create it with `up`, or get it with `find`."""

    def __init__(self, folder: Path, settings: LabSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.name = settings.name
        self.kubeconfig = folder / "kubeconfig"
        self.api_url = build_api_url(settings)
        self.gateway_url = f"http://127.0.0.1:{settings.gateway_port}" if settings.gateway else None

        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._exit_stack.enter_context(clean_up_on_signal(self.down))
        return self

    def __exit__(self, *_: object) -> None:
        with self._exit_stack, defer_signals():
            self.down()

    # -- up and down --------------------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls, settings: LabSettings, report_progress: ProgressCallback = _ignore_progress, *, end_with_caller: bool = False
    ) -> Self:
        """Start the lab, or return the running one if it has these settings. Raises LabError.

        With `end_with_caller` the lab ends with the calling process, however that ends; otherwise it outlives it.
        """
        folder = lab_folder(settings.name)
        with lab_lock(folder):
            ImageTable([Path(file) for file in settings.image_tables])  # an unreadable table is an error now, not in a pod
            if process.find_lab_pid(folder) and (running_lab := cls._find_complete(folder)):
                if _comparable_settings(running_lab.settings) != _comparable_settings(settings, running_lab.settings):
                    raise StateError(
                        f"lab '{settings.name}' is up with other settings: run `aerie-lab down --name {settings.name}` "
                        "first, or give another --name."
                    )
                report_progress(f"lab '{settings.name}' is up already")
                return running_lab
            remove_lab(folder)
            for family in ("etcd", "kubernetes", *(("contour", "envoy") if settings.gateway else ())):
                ensure_family(family, report_progress)
            require_disk_space(folder)
            with clean_up_on_signal(lambda: remove_lab(folder)):
                return cls._start_or_clear(folder, settings, report_progress, end_with_caller)

    @classmethod
    def _start_or_clear(
        cls, folder: Path, settings: LabSettings, report_progress: ProgressCallback, end_with_caller: bool
    ) -> Self:
        try:
            return cls._start(folder, settings, report_progress, end_with_caller)
        except BaseException as error:
            with defer_signals():
                process.kill_lab(folder)
                preserved_logs = preserve_failed_logs(folder)
                remove_lab(folder)
            if isinstance(error, LabError) and preserved_logs is not None:
                raise StartError(f"{error}\nThe logs of this attempt are in {preserved_logs}.") from error
            raise

    @classmethod
    def find(cls, name: str = "default") -> Self:
        """Return the running lab of this name. Raises StateError when there is none."""
        folder = lab_folder(name)
        if not process.find_lab_pid(folder):
            raise StateError(f"lab '{name}' is not up: start it with `aerie-lab up --name {name}`.")
        lab = cls._find_complete(folder)
        if lab is None:
            raise StateError(f"lab '{name}' is half started: run `aerie-lab up --name {name}` to start it afresh.")
        return lab

    def down(self) -> None:
        """Take this lab down."""
        take_down_lab(self.name)

    @classmethod
    def _find_complete(cls, folder: Path) -> Self | None:
        """Return the lab in `folder` if its start was complete."""
        if not (folder / "complete").exists():
            return None
        return cls(folder, LabSettings.from_folder(folder))

    @classmethod
    def _start(cls, folder: Path, settings: LabSettings, report_progress: ProgressCallback, end_with_caller: bool) -> Self:
        start_time = time.monotonic()
        caller_pipe = None
        if end_with_caller:
            # The writing end stays open in this process alone, and is closed with it, however it ends.
            caller_pipe, _ = os.pipe()
        try:
            lab = cls(folder, start_lab(folder, settings, report_progress, caller_pipe))
        finally:
            if caller_pipe is not None:
                os.close(caller_pipe)
        report_progress(f"up after {time.monotonic() - start_time:.1f} s")
        return lab

    # -- use ----------------------------------------------------------------------------------------------------------

    def client(self) -> KubeClient:
        """Return an asynchronous client of the API server, as the administrator."""
        return KubeClient(self.api_url, self.folder / "certificates", "admin")

    def reader(self) -> ObjectReader:
        """Return a reader of the API server's objects, as the administrator."""
        return ObjectReader(self.api_url, self.folder / "certificates", "admin")

    def status(self) -> dict[str, Any]:
        """Return the status of the components."""
        return read_supervisor_status(self.folder)

    def call_agent(self, verb: str, **fields: Any) -> Any:
        """Send one request to the node agent (see node.agent)."""
        return control.send_request(self.folder / "agent.sock", verb, **fields)

    def call_supervisor(self, verb: str, **fields: Any) -> Any:
        """Send one request to the supervisor (see aerie_lab.supervisor)."""
        return control.send_request(self.folder / "control.sock", verb, timeout=90, **fields)

    def environment(self) -> dict[str, str]:
        """Return the environment for tools: KUBECONFIG, GATEWAY (its address), and PATH.

        On PATH, the lab's kubectl and helm are first, then the commands of this installation, such as `kubectl-aerie`.
        """
        folders = [str(ensure_binary(name).parent) for name in ("kubectl", "helm")] + [str(Path(sys.executable).parent)]
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "GATEWAY": self.gateway_url or "",
            "PATH": ":".join([*folders, os.environ.get("PATH", "")]),
        }

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl against this lab, and return its standard output. Raises LabError with its error output."""
        return self._run_tool("kubectl", arguments, stdin, check)

    def helm(self, *arguments: str, check: bool = True) -> str:
        """Run helm against this lab, and return its standard output. Raises LabError with its error output."""
        return self._run_tool("helm", arguments, None, check)

    def _run_tool(self, name: str, arguments: tuple[str, ...], stdin: str | None, check: bool) -> str:
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(
            [str(ensure_binary(name)), *arguments], input=stdin, capture_output=True, text=True, env=environment, check=False
        )
        if check and done.returncode != 0:
            raise LabError(f"{name} {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> list[KubeObject]:
        """Server-side apply of plain objects, in order."""

        async def run() -> list[KubeObject]:
            async with self.client() as client:
                return [await client.apply(item) for item in objects]

        return asyncio.run(run())


def take_down_lab(name: str, report_progress: ProgressCallback = _ignore_progress) -> bool:
    """Stop the lab of this name and remove its folder; return whether there was one."""
    folder = lab_folder(name)
    if not folder.exists():
        return False
    with lab_lock(folder):
        pid = process.find_lab_pid(folder)
        if pid is not None:
            with contextlib.suppress(LabError):
                control.send_request(folder / "control.sock", "stop", timeout=5)
            if not process.wait_for_exit(pid, _SHUTDOWN_TIMEOUT_SECONDS):
                report_progress("the lab did not stop in time: killing it")
        remove_lab(folder)
    return True


def _comparable_settings(settings: LabSettings, running_settings: LabSettings | None = None) -> dict[str, Any]:
    """Return the settings for comparison; a port of 0 means any, so it equals that of the running lab."""
    document = settings.to_json()
    for name in ("api_port", "gateway_port"):
        if running_settings is not None and document[name] == 0:
            document[name] = getattr(running_settings, name)
    return document
