"""Launch of a container's process: its inputs, from image, spec and pod, and its start with the output copied to the log.

Guarantees: only the container's processes hold the write ends of its output, so the copying ends with them. Not guaranteed: that
the inputs exist; a missing one raises, and the caller tries again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from aerie_lab.images.table import Image
from aerie_lab.kube.client import KubeObject
from aerie_lab.node.container.context import ContainerContext
from aerie_lab.node.container.run_files import RunFiles
from aerie_lab.node.environment import ConfigError, build_command_line, build_environment
from aerie_lab.node.logs import LogFile
from aerie_lab.sandbox.addresses import HUB_URL
from aerie_lab.sandbox.container import ContainerProcess, LaunchError, LaunchSpec, start_container

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


async def build_launch_spec(spec: KubeObject, image: Image, files: RunFiles, run: int, context: ContainerContext) -> LaunchSpec:
    """Return the inputs of a run. Raises ConfigError, VolumeError, KubeError or OSError."""
    pod = context.get_pod()
    gathered = await context.read_environment_inputs(spec)
    own = {"PATH": ":".join([*image.path_folders, _DEFAULT_PATH]), "HOSTNAME": context.hostname, "HOME": "/root"}
    if gathered.pop("hub"):
        own["HF_ENDPOINT"] = HUB_URL
    variables = build_environment(pod, spec, service_variables=gathered.pop("services"), **gathered)
    command = build_command_line(spec, image.entrypoint, image.arguments, variables)
    if not command:
        raise ConfigError("no command: neither the image nor the container names one")
    message_file = files.create_termination_message(run)
    mounts = [
        {"source": str(context.folder / "hosts"), "path": "/etc/hosts", "read_only": False},
        {
            "source": str(message_file),
            "path": spec.get("terminationMessagePath") or "/dev/termination-log",
            "read_only": False,
        },
    ]
    security = spec.get("securityContext") or {}
    return LaunchSpec(
        command=command,
        environment=own | image.environment | variables,
        working_directory=spec.get("workingDir") or "/",
        hostname=context.hostname,
        mounts=mounts + context.build_mounts(spec, variables),
        read_only_root=bool(security.get("readOnlyRootFilesystem")),
        shared_memory=str(context.shared_memory),
    )


async def start_process(
    launch: LaunchSpec, log_path: Path, spec: Path, network_fd: int | None
) -> tuple[ContainerProcess, Sequence[asyncio.Task[None]]]:
    """Return the process, and the tasks that copy its output to the log until it ends. Raises LaunchError."""
    loop = asyncio.get_running_loop()
    try:
        log = LogFile(log_path)
    except OSError as error:
        raise LaunchError(f"no log can be written: {error}") from error
    outputs: list[asyncio.Task[None]] = []
    write_ends: list[int] = []
    try:
        for stream in ("stdout", "stderr"):
            read_end, write_end = os.pipe()
            write_ends.append(write_end)
            reader = asyncio.StreamReader(limit=1 << 20)
            protocol = asyncio.StreamReaderProtocol(reader)
            await loop.connect_read_pipe(lambda p=protocol: p, os.fdopen(read_end, "rb"))  # type: ignore[misc]
            outputs.append(asyncio.create_task(log.copy(reader, stream)))
        asyncio.gather(*outputs, return_exceptions=True).add_done_callback(lambda _: log.close())
        return await start_container(launch, network_fd, spec, *write_ends), outputs
    except OSError as error:
        raise LaunchError(str(error)) from error
    finally:
        for write_end in write_ends:
            os.close(write_end)
