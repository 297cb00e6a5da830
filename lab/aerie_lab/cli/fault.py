"""`aerie-lab fault ...`: inject a fault, list the active faults, undo them."""

from __future__ import annotations

import time
from typing import Annotated, get_args

import typer
from rich.table import Table

from aerie.terminal import sanitize_text
from aerie.typer_app import App
from aerie_lab.cli.console import err, out
from aerie_lab.cluster import Lab
from aerie_lab.engine.metrics.metrics_corruption import MetricsCorruption, parse_corruption
from aerie_lab.engine.serving.drafter_faults import DrafterFault, parse_drafter_fault
from aerie_lab.errors import StateError
from aerie_lab.faults import Fault, FaultInjector

fault = App(name="fault", help="Inject faults, and undo them.")

Name = Annotated[str, typer.Option("--name", help="Name of the lab.", envvar="AERIE_LAB_NAME")]
Pod = Annotated[str, typer.Argument(help="Name of the pod.")]
Container = Annotated[str | None, typer.Option("--container", "-c", help="Required if the pod has several.")]
KubeNamespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the pod or object.")]
Seconds = Annotated[float | None, typer.Option("--for", help="Undo the fault after so many seconds, or at Ctrl-C.")]


def _find_injector(name: str) -> FaultInjector:
    return FaultInjector(Lab.find(name))


def _keep_active(injected: Fault, seconds: float | None) -> None:
    if seconds is None:
        err.print(f"fault {injected.record.id} is active: {sanitize_text(str(injected.record))}")
        err.print(f"undo it with: aerie-lab fault undo {injected.record.id}")
        return
    with injected:
        err.print(f"{sanitize_text(str(injected.record))}: for {seconds:g} s")
        time.sleep(seconds)
    err.print("undone")


@fault.command()
def kill(pod: Pod, container: Container = None, namespace: KubeNamespace = "default", name: Name = "default") -> None:
    """Kill a container, as the kernel does when memory is exhausted. Its restart policy starts it again."""
    _find_injector(name).kill(pod, container, namespace=namespace)


@fault.command()
def crash(
    pod: Pod,
    after: Annotated[float, typer.Option(help="Maximum seconds of each run.")] = 60.0,
    container: Container = None,
    namespace: KubeNamespace = "default",
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Kill a container each time it has run for some seconds."""
    _keep_active(_find_injector(name).crash(pod, after, container, namespace=namespace), seconds)


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
    _keep_active(_find_injector(name).freeze(pod, container, namespace=namespace), seconds)


@fault.command()
def disconnect(pod: Pod, namespace: KubeNamespace = "default", seconds: Seconds = None, name: Name = "default") -> None:
    """Disconnect a pod from the network."""
    _keep_active(_find_injector(name).disconnect(pod, namespace=namespace), seconds)


@fault.command("silence-node")
def silence_node(
    node: Annotated[str, typer.Argument(help="Name of the node.")], seconds: Seconds = None, name: Name = "default"
) -> None:
    """Stop all reports of a node: no Lease, no status. Its pods keep running."""
    _keep_active(_find_injector(name).silence_node(node), seconds)


@fault.command("corrupt-metrics")
def corrupt_metrics(
    pod: Pod,
    corruption: Annotated[str, typer.Argument(help=f"One of {', '.join(get_args(MetricsCorruption))}.")],
    namespace: KubeNamespace = "default",
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Let a simulated engine expose false metrics. The engine keeps working."""
    _keep_active(_find_injector(name).corrupt_metrics(pod, parse_corruption(corruption), namespace=namespace), seconds)


@fault.command("fail-drafter")
def fail_drafter(
    pod: Pod,
    drafter_fault: Annotated[str, typer.Argument(metavar="FAULT", help=f"One of {', '.join(get_args(DrafterFault))}.")],
    namespace: KubeNamespace = "default",
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Let changes of a simulated engine's drafter in place fail. The engine keeps working."""
    _keep_active(_find_injector(name).fail_drafter(pod, parse_drafter_fault(drafter_fault), namespace=namespace), seconds)


@fault.command("stop-component")
def stop_component(
    component: Annotated[str, typer.Argument(help="etcd, kube-apiserver, ...")],
    seconds: Seconds = None,
    name: Name = "default",
) -> None:
    """Kill a component of the control plane and keep it down."""
    _keep_active(_find_injector(name).stop_component(component), seconds)


@fault.command("fill-node")
def fill_node(
    node: Annotated[str, typer.Argument(help="Name of the node.")], seconds: Seconds = None, name: Name = "default"
) -> None:
    """Leave no cpu, memory or GPU free on a node."""
    _keep_active(_find_injector(name).fill_node(node), seconds)


@fault.command()
def delete(
    kind: Annotated[str, typer.Argument(help="As for kubectl: deployment, service, ...")],
    object_name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the object.")],
    namespace: KubeNamespace = "default",
    name: Name = "default",
) -> None:
    """Delete an object directly. `undo` creates it again if its controller did not."""
    _keep_active(_find_injector(name).delete(kind, object_name, namespace=namespace), None)


@fault.command("list")
def list_faults(name: Name = "default") -> None:
    """List the active faults."""
    table = Table(box=None, pad_edge=False)
    for heading in ("ID", "FAULT", "SECONDS"):
        table.add_column(heading)
    for record in _find_injector(name).list_active():
        table.add_row(str(record.id), sanitize_text(str(record)), f"{time.time() - record.start_time:.0f}")
    out.print(table if table.row_count else "no active faults")


@fault.command()
def undo(
    number: Annotated[int | None, typer.Argument(metavar="ID", help="Number that `fault list` shows.")] = None,
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
