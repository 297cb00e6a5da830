"""A lab for its users: bring it up, use it, take it down. The command line and the test fixtures are thin over this.

    with Lab.up(Settings(name="try")) as lab:
        lab.kubectl("get", "nodes")

Guarantees: `up` returns a cluster whose nodes are Ready and whose gateway is programmed, or raises a LabError with nothing
left running; `down` leaves no process, namespace, mount or file outside the cache; SIGTERM in the block, or in `up`, takes the
lab down before it ends the process (see ending). Not guaranteed: that a lab survives a restart of the machine. The next `up` or
`down` clears what is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from aerie_lab import control
from aerie_lab.binaries import binary, ensure
from aerie_lab.cluster import process
from aerie_lab.cluster.ending import ended_first, undisturbed
from aerie_lab.cluster.folder import clear, keep_logs, locked, require_space
from aerie_lab.cluster.start import Say, api_url, start, supervisor_status
from aerie_lab.errors import LabError, StartError, StateError
from aerie_lab.images.table import ImageTable
from aerie_lab.kube.client import KubeClient, Object
from aerie_lab.paths import lab_folder
from aerie_lab.settings import Settings

_DOWN_LIMIT = 15.0


def _silent(line: str) -> None:
    pass


class Lab:
    """One running lab. Make it with `up`, or find it with `find`."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.name = settings.name
        self.kubeconfig = folder / "kubeconfig"
        self.api_url = api_url(settings)
        self.gateway_url = f"http://127.0.0.1:{settings.gateway_port}" if settings.gateway else None

        self._block = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._block.enter_context(ended_first(self.down))
        return self

    def __exit__(self, *_: object) -> None:
        with self._block, undisturbed():
            self.down()

    # -- up and down --------------------------------------------------------------------------------------------------

    @classmethod
    def up(cls, settings: Settings, say: Say = _silent, *, leashed: bool = False) -> Self:
        """Bring the lab up, or find it up already with these settings. Raises LabError.

        A leashed lab ends with the calling process, however that ends; a lab without a leash outlives it.
        """
        folder = lab_folder(settings.name)
        with locked(folder):
            ImageTable([Path(file) for file in settings.images])  # a table that cannot be read is told now
            if process.living(folder) and (found := cls._running(folder)):
                if _choices(found.settings) != _choices(settings, found.settings):
                    raise StateError(
                        f"lab '{settings.name}' is up with other settings: run `aerie-lab down --name {settings.name}` "
                        "first, or give another --name."
                    )
                say(f"lab '{settings.name}' is up already")
                return found
            clear(folder)
            for family in ("etcd", "kubernetes", *(("contour", "envoy") if settings.gateway else ())):
                ensure(family, say)
            require_space(folder)
            with ended_first(lambda: clear(folder)):
                return cls._start_or_clear(folder, settings, say, leashed)

    @classmethod
    def _start_or_clear(cls, folder: Path, settings: Settings, say: Say, leashed: bool) -> Self:
        try:
            return cls._start(folder, settings, say, leashed)
        except BaseException as error:
            with undisturbed():
                process.kill(folder)
                kept = keep_logs(folder)
                clear(folder)
            if isinstance(error, LabError) and kept is not None:
                raise StartError(f"{error}\nThe logs of this attempt are in {kept}.") from error
            raise

    @classmethod
    def find(cls, name: str = "default") -> Self:
        """The running lab of this name. Raises StateError when there is none."""
        folder = lab_folder(name)
        if not process.living(folder):
            raise StateError(f"lab '{name}' is not up: start it with `aerie-lab up --name {name}`.")
        found = cls._running(folder)
        if found is None:
            raise StateError(f"lab '{name}' is half started: run `aerie-lab up --name {name}` to start it afresh.")
        return found

    def down(self) -> None:
        """Take this lab down."""
        take_down(self.name)

    @classmethod
    def _running(cls, folder: Path) -> Self | None:
        """The lab in `folder` if it came up completely."""
        if not (folder / "complete").exists():
            return None
        return cls(folder, Settings.from_folder(folder))

    @classmethod
    def _start(cls, folder: Path, settings: Settings, say: Say, leashed: bool) -> Self:
        began = time.monotonic()
        leash = None
        if leashed:
            # The writing end stays open in this process alone, and is closed with it, however it ends.
            leash, _ = os.pipe()
        try:
            lab = cls(folder, start(folder, settings, say, leash))
        finally:
            if leash is not None:
                os.close(leash)
        say(f"up after {time.monotonic() - began:.1f} s")
        return lab

    # -- use ----------------------------------------------------------------------------------------------------------

    def client(self) -> KubeClient:
        """An asynchronous client of the API server, as the administrator."""
        return KubeClient(self.api_url, self.folder / "certificates", "admin")

    def status(self) -> dict[str, Any]:
        """The components, as the supervisor sees them."""
        return supervisor_status(self.folder)

    def ask_agent(self, verb: str, **fields: Any) -> Any:
        """One request to the node agent (see node.agent)."""
        return control.ask(self.folder / "agent.sock", verb, **fields)

    def ask_supervisor(self, verb: str, **fields: Any) -> Any:
        """One request to the supervisor (see aerie_lab.supervisor)."""
        return control.ask(self.folder / "control.sock", verb, timeout=90, **fields)

    def environment(self) -> dict[str, str]:
        """For tools on this machine: KUBECONFIG, GATEWAY (its address), and the lab's kubectl and helm first on PATH."""
        folders = [str(binary(name).parent) for name in ("kubectl", "helm")]
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "GATEWAY": self.gateway_url or "",
            "PATH": ":".join([*folders, os.environ.get("PATH", "")]),
        }

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl against this lab; its standard output. Raises LabError with what it said."""
        return self._tool("kubectl", arguments, stdin, check)

    def helm(self, *arguments: str, check: bool = True) -> str:
        """Run helm against this lab; its standard output. Raises LabError with what it said."""
        return self._tool("helm", arguments, None, check)

    def _tool(self, name: str, arguments: tuple[str, ...], stdin: str | None, check: bool) -> str:
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(
            [str(binary(name)), *arguments], input=stdin, capture_output=True, text=True, env=environment, check=False
        )
        if check and done.returncode != 0:
            raise LabError(f"{name} {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> list[Object]:
        """Server-side apply of plain objects, in order."""

        async def run() -> list[Object]:
            async with self.client() as client:
                return [await client.apply(item) for item in objects]

        return asyncio.run(run())


def take_down(name: str, say: Say = _silent) -> bool:
    """End the lab of this name and remove its folder; whether there was one."""
    folder = lab_folder(name)
    if not folder.exists():
        return False
    with locked(folder):
        found = process.living(folder)
        if found is not None:
            with contextlib.suppress(LabError):
                control.ask(folder / "control.sock", "stop", timeout=5)
            if not process.wait_for_end(found, _DOWN_LIMIT):
                say("the lab did not end by itself: killing it")
        clear(folder)
    return True


def _choices(settings: Settings, found: Settings | None = None) -> dict[str, Any]:
    """The settings for comparison; a port of 0 asks for any, so it agrees with the one that was found."""
    document = settings.to_json()
    for name in ("api_port", "gateway_port"):
        if found is not None and document[name] == 0:
            document[name] = getattr(found, name)
    return document
