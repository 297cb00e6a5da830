"""`aerie-lab fault ...`: make a fault, list the faults in force, undo them."""

from __future__ import annotations

import time
from typing import Annotated, get_args

import typer
from rich.table import Table

from aerie.terminal import sanitize_text
from aerie_lab.cli.console import err, out
from aerie_lab.cluster import Lab
from aerie_lab.engine.lies import MetricsCorruption, parse_corruption
from aerie_lab.errors import StateError
from aerie_lab.faults import Fault, FaultInjector

fault = typer.Typer(name="fault", no_args_is_help=True, help="Make things go wrong, and right again.")

Name = Annotated[str, typer.Option("--name", help="Which lab.", envvar="AERIE_LAB_NAME")]
Pod = Annotated[str, typer.Argument(help="The pod.")]
Container = Annotated[str | None, typer.Option("--container", "-c", help="Needed when the pod runs several.")]
KubeNamespace = Annotated[str, typer.Option("--namespace", "-n", help="The pod's or object's namespace.")]
Seconds = Annotated[float | None, typer.Option("--for", help="Undo it after so many seconds; Ctrl-C undoes it too.")]


def _find_injector(name: str) -> FaultInjector:
    return FaultInjector(Lab.find(name))


def _hold_fault(made: Fault, seconds: float | None) -> None:
    if seconds is None:
        err.print(f"fault {made.record.id} in force: {sanitize_text(str(made.record))}")
        err.print(f"undo it with: aerie-lab fault undo {made.record.id}")
        return
    with made:
        err.print(f"{sanitize_text(str(made.record))}: for {seconds:g} s")
        time.sleep(seconds)
    err.print("undone")


@fault.command()
def kill(pod: Pod, container: Container = None, namespace: KubeNamespace = "default", name: Name = "default") -> None:
    """Kill a container, as the kernel would when memory runs out. Its restart policy brings it back."""
    _find_injector(name).kill(pod, container, namespace=namespace)


@fault.command()
def crash(
    pod: Pod,
    after: Annotated[float, typer.Option(help="Seconds that each run of it lasts at most.")] = 60.0,
    container: Container = None,
    namespace: KubeNamespace = "default",
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Kill a container again and again, each time it has run for a while."""
    _hold_fault(_find_injector(name).crash(pod, after, container, namespace=namespace), seconds)


@fault.command()
def restart(component: Annotated[str, typer.Argument(help="etcd, kube-apiserver, ...")], name: Name = "default") -> None:
    """Kill a component of the control plane and wait until it is ready again."""
    _find_injector(name).restart(component)


@fault.command()
def freeze(
    pod: Pod,
    container: Container = None,
    namespace: KubeNamespace = "default",
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Stop a container's processes without ending them."""
    _hold_fault(_find_injector(name).freeze(pod, container, namespace=namespace), seconds)


@fault.command()
def cut(pod: Pod, namespace: KubeNamespace = "default", seconds: Seconds = None, name: Name = "default") -> None:
    """Cut a pod off from the network."""
    _hold_fault(_find_injector(name).cut(pod, namespace=namespace), seconds)


@fault.command()
def silence(node: Annotated[str, typer.Argument(help="The node.")], seconds: Seconds = None, name: Name = "default") -> None:
    """Let a node go silent; its pods go on running, and nobody hears of them."""
    _hold_fault(_find_injector(name).silence(node), seconds)


@fault.command()
def lie(
    pod: Pod,
    kind: Annotated[
        str, typer.Argument(metavar="LIE", help=f"What its metrics page shows: {', '.join(get_args(MetricsCorruption))}.")
    ],
    namespace: KubeNamespace = "default",
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Let a simulated engine's metrics page show what is not true; the engine works on."""
    _hold_fault(_find_injector(name).lie(pod, parse_corruption(kind), namespace=namespace), seconds)


@fault.command()
def hold(
    component: Annotated[str, typer.Argument(help="etcd, kube-apiserver, ...")],
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Take a component of the control plane down and keep it down."""
    _hold_fault(_find_injector(name).hold(component), seconds)


@fault.command()
def fill(node: Annotated[str, typer.Argument(help="The node.")], seconds: Seconds = None, name: Name = "default") -> None:
    """Leave no cpu, memory or GPU free on a node."""
    _hold_fault(_find_injector(name).fill(node), seconds)


@fault.command()
def delete(
    kind: Annotated[str, typer.Argument(help="As for kubectl: deployment, service, ...")],
    object_name: Annotated[str, typer.Argument(metavar="NAME", help="The object.")],
    namespace: KubeNamespace = "default",
    name: Name = "default",
) -> None:
    """Delete an object behind its controller's back; undo creates it again if the controller did not."""
    _hold_fault(_find_injector(name).delete(kind, object_name, namespace=namespace), None)


@fault.command("list")
def list_faults(name: Name = "default") -> None:
    """List the faults in force."""
    table = Table(box=None, pad_edge=False)
    for heading in ("ID", "FAULT", "SECONDS"):
        table.add_column(heading)
    for record in _find_injector(name).list_active():
        table.add_row(str(record.id), sanitize_text(str(record)), f"{time.time() - record.since:.0f}")
    out.print(table if table.row_count else "no fault is in force")


@fault.command()
def undo(
    number: Annotated[int | None, typer.Argument(metavar="ID", help="As `fault list` shows it.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All faults.")] = False,
    name: Name = "default",
) -> None:
    """Repair a fault."""
    if every:
        _find_injector(name).undo_all()
    elif number is not None:
        _find_injector(name).undo(number)
    else:
        raise StateError("name a fault by its id (`aerie-lab fault list`), or give --all.")
