"""The commands of `aerie-lab` that start, stop and use a lab."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from aerie.terminal import sanitize_text
from aerie_lab import cluster
from aerie_lab.binaries import DEFAULT_FAMILY_NAMES, FAMILY_NAMES, ensure_binary, ensure_family
from aerie_lab.cli.console import err, out, print_progress, replace_process
from aerie_lab.cluster import Lab, LabSettings, process, take_down_lab
from aerie_lab.errors import LabError, StateError
from aerie_lab.faults import FaultInjector
from aerie_lab.images.table import SIMULATED_IMAGE_TABLE
from aerie_lab.paths import lab_folder

Name = Annotated[str, typer.Option("--name", help="Name of the lab; several can run at the same time.", envvar="AERIE_LAB_NAME")]
_DEFAULTS = LabSettings()


def up(
    name: Name = _DEFAULTS.name,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = _DEFAULTS.nodes,
    gpus: Annotated[int, typer.Option(help="nvidia.com/gpu of each node.")] = _DEFAULTS.gpus_per_node,
    cpus: Annotated[int, typer.Option(help="cpu of each node, cores.")] = _DEFAULTS.cpus_per_node,
    memory_gib: Annotated[int, typer.Option(help="memory of each node, GiB.")] = _DEFAULTS.memory_gib_per_node,
    pods: Annotated[int, typer.Option(help="Pods that fit on each node.")] = _DEFAULTS.pods_per_node,
    gateway: Annotated[bool, typer.Option(help="Install Contour, Envoy and a Gateway.")] = _DEFAULTS.gateway,
    gateway_name: Annotated[str, typer.Option(help="The Gateway's NAMESPACE/NAME.")] = _DEFAULTS.gateway_name,
    api_port: Annotated[int, typer.Option(help="The API server's port on 127.0.0.1; 0: any.")] = 0,
    gateway_port: Annotated[int, typer.Option(help="The gateway's port on 127.0.0.1; 0: any.")] = 0,
    images: Annotated[list[Path] | None, typer.Option(help="A further image table (TOML); may be repeated.")] = None,
    simulated_vllm: Annotated[
        bool, typer.Option("--simulated-vllm", help="Run the simulator as vllm/vllm-openai instead of real vLLM on CPU.")
    ] = False,
    restart_backoff: Annotated[
        float, typer.Option(help="Seconds before a crashed container's first restart.")
    ] = _DEFAULTS.restart_backoff,
) -> None:
    """Start a lab, and print its addresses."""
    lab = Lab.up(
        LabSettings(
            name=name,
            nodes=nodes,
            gpus_per_node=gpus,
            cpus_per_node=cpus,
            memory_gib_per_node=memory_gib,
            pods_per_node=pods,
            gateway=gateway,
            gateway_name=gateway_name,
            api_port=api_port,
            gateway_port=gateway_port,
            image_tables=[
                str(file.absolute()) for file in [*(images or []), *([SIMULATED_IMAGE_TABLE] if simulated_vllm else [])]
            ],
            restart_backoff=restart_backoff,
        ),
        print_progress,
    )
    _print_addresses(lab)


def _print_addresses(lab: Lab) -> None:
    out.print(f"export KUBECONFIG={lab.kubeconfig}")
    err.print(f"API server  {lab.api_url}")
    err.print(f"gateway     {lab.gateway_url or 'none (--no-gateway)'}")


def down(
    name: Name = _DEFAULTS.name,
    every: Annotated[bool, typer.Option("--all", help="All labs of this user.")] = False,
) -> None:
    """Stop a lab and remove all of it; built binaries stay in the cache."""
    for each in cluster.list_lab_names() if every else [name]:
        print_progress(f"lab '{each}' is down" if take_down_lab(each, print_progress) else f"there is no lab '{each}'")


def status(name: Name = _DEFAULTS.name, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show a lab's components, addresses and faults."""
    lab = Lab.find(name)
    document = lab.status()
    document |= {
        "kubeconfig": str(lab.kubeconfig),
        "api_url": lab.api_url,
        "gateway_url": lab.gateway_url,
        "faults": [{"id": record.id, "fault": str(record)} for record in FaultInjector(lab).list_active()],
        "containers": len(lab.call_agent("containers")) if document["components"]["node-agent"]["running"] else 0,
    }
    if as_json:
        out.print_json(json.dumps(document))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("COMPONENT", "STATE", "RESTARTS", "LAST EXIT"):
        table.add_column(heading)
    for component, part in document["components"].items():
        state = "[green]running" if part["running"] else "[yellow]stopped by a fault" if part["stopped_by_fault"] else "[red]down"
        table.add_row(component, state, str(part["restarts"]), part["last_exit"])
    out.print(table)
    _print_addresses(lab)
    err.print(f"up for {document['uptime']:.0f} s, {document['containers']} containers running")
    for record in document["faults"]:
        err.print(f"[yellow]fault {record['id']}:[/] {sanitize_text(record['fault'])}")


def kubectl(context: typer.Context) -> None:
    """Run kubectl against a lab. The arguments are kubectl's, but for --name NAME before them: the lab (or $AERIE_LAB_NAME)."""
    _run_tool("kubectl", context.args)


def helm(context: typer.Context) -> None:
    """Run helm against a lab. The arguments are helm's, but for --name NAME before them: the lab (or $AERIE_LAB_NAME)."""
    _run_tool("helm", context.args)


def _run_tool(tool: str, arguments: list[str]) -> None:
    name = os.environ.get("AERIE_LAB_NAME", _DEFAULTS.name)
    match arguments:
        case ["--name"]:
            raise StateError(f"--name has no value: write --name NAME before the arguments of {tool}.")
        case ["--name", name, *arguments]:
            pass
        case [first, *rest] if first.startswith("--name="):
            name, arguments = first.removeprefix("--name="), rest
    lab = Lab.find(name)
    program = str(ensure_binary(tool, print_progress))
    replace_process([program, *arguments], {**os.environ, "KUBECONFIG": str(lab.kubeconfig)})


def logs(
    component: Annotated[str, typer.Argument(help="A component that `status` lists, or supervisor.")],
    name: Name = _DEFAULTS.name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of last lines.")] = 100,
) -> None:
    """Show the output of a component of the lab. (`aerie-lab kubectl logs` shows a pod's.)"""
    folder = lab_folder(name) / "logs"
    file = folder / f"{component}.log"
    if not file.exists():
        components = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) if folder.is_dir() else ""
        raise StateError(f"'{component}' has no log in lab '{name}': {components or 'the lab is not up'}.")
    with file.open(errors="replace") as stream:
        for line in stream.readlines()[-lines:]:
            sys.stdout.write(line)
        while follow and process.find_lab_pid(folder.parent):
            if chunk := stream.read():
                sys.stdout.write(chunk)
                sys.stdout.flush()
            else:
                time.sleep(0.2)


def shell(
    command: Annotated[list[str] | None, typer.Argument(help="Command to run instead of an interactive shell.")] = None,
    name: Name = _DEFAULTS.name,
    inside: Annotated[
        bool, typer.Option("--inside", help="In the lab's own network, where pods and services have their addresses.")
    ] = False,
) -> None:
    """Open a shell with KUBECONFIG and GATEWAY set and the lab's kubectl and helm on the PATH."""
    lab = Lab.find(name)
    for tool in ("kubectl", "helm"):
        ensure_binary(tool, print_progress)
    environment = lab.environment()
    words = command or [os.environ.get("SHELL", "/bin/sh")]
    if inside:
        pid = process.find_lab_pid(lab.folder)
        environment["KUBECONFIG"] = str(lab.folder / "components" / "admin.kubeconfig")
        words = [sys.executable, "-m", "aerie_lab.sandbox.inside", str(pid), *words]
    try:
        replace_process(words, environment)
    except FileNotFoundError as error:
        raise LabError(f"{words[0]}: no such command.") from error


def build(
    families: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Of {', '.join(FAMILY_NAMES)}. When none is named: all but versitygw, which tests alone use, vllm, which takes "
            "5.5 GiB of disk, and vllm-0.33."
        ),
    ] = None,
) -> None:
    """Build binaries ahead of time. A lab builds what it needs automatically, except vllm and vllm-0.33."""
    for family in families or DEFAULT_FAMILY_NAMES:
        if family not in FAMILY_NAMES:
            raise StateError(f"'{family}' is no family of binaries: one of {', '.join(FAMILY_NAMES)}.")
        out.print(str(ensure_family(family, print_progress)))
