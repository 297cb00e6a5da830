"""`kubectl aerie doctor`: whether Aerie can work in this cluster. Exit status 1: something has to be fixed.

Eight requests, nine where not all namespaces may be listed, by kubectl: all at a time but the Lease, which the pods name. Nothing
is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from importlib.metadata import version
from typing import Annotated, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from aerie.boundary import EXIT_REJECTED
from aerie.cli.console import CommandError, out
from aerie.cli.fleet.doctor import FORBIDDEN, CheckLine, ClusterFacts, Forbidden, Mark, check_cluster, find_lease
from aerie.cli.fleet.kubectl import Document, Kubectl
from aerie.cli.fleet.options import with_kubectl
from aerie.cli.fleet.output import Output, OutputOption, write_document
from aerie.cli.fleet.resource_view import now, parse_time

_OPERATOR_SELECTOR = "app.kubernetes.io/name=aerie"
_DEFINITION = "speculativedeployments.aerie.dev"
T = TypeVar("T")
_STYLES = {Mark.OK: ("✓", "green"), Mark.PROBLEM: ("✗", "red"), Mark.UNKNOWN: ("?", "yellow")}


@with_kubectl
def doctor(
    kubectl: Kubectl,
    operator_namespace: Annotated[
        str | None, typer.Option("--operator-namespace", help="Namespace of the operator. Default: all are searched.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check whether Aerie can work in this cluster: definition, operator, rights, resources, clock."""
    lines = check_cluster(read_cluster(kubectl, operator_namespace))
    if output in (Output.JSON, Output.YAML):
        checks = [
            {"result": line.mark.value, "check": line.title, "message": line.text, "fix": line.fix or None} for line in lines
        ]
        write_document(output, "ClusterChecks", {"checks": checks})
    else:
        _print_lines(lines)
    if any(line.mark is Mark.PROBLEM for line in lines):
        raise typer.Exit(EXIT_REJECTED)


def _print_lines(lines: Sequence[CheckLine]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for line in lines:
        mark, style = _STYLES[line.mark]
        table.add_row(Text(mark, style), Text(_clean(line.title)), Text(_clean(line.text)))
        if line.fix:
            table.add_row("", "", Text(f"→ {_clean(line.fix)}", "dim"))
    out.print(table, soft_wrap=False)


def read_cluster(kubectl: Kubectl, operator_namespace: str | None = None) -> ClusterFacts:
    """Return what the checks need. Raises CommandError: the cluster cannot be reached, or the user is unknown to it."""
    namespace = kubectl.read_namespace()
    with ThreadPoolExecutor() as pool:
        clock = pool.submit(_read_clock, kubectl)
        definition = pool.submit(_read, lambda: kubectl.find("customresourcedefinitions", _DEFINITION))
        pods = pool.submit(_read, lambda: kubectl.select("pods", _OPERATOR_SELECTOR, namespace=operator_namespace))
        bindings = pool.submit(_read, lambda: kubectl.select("validatingadmissionpolicybindings", _OPERATOR_SELECTOR))
        resources = pool.submit(_read_resources, kubectl)
        rules = pool.submit(_read, lambda: kubectl.read_rules(namespace))
        gateway_api = pool.submit(_read, lambda: kubectl.has_api("gateway.networking.k8s.io/v1"))
        lease = pool.submit(_read_lease, kubectl, pods)
        missing_fields = _find_missing_fields(definition)
    read_from, server_time, read_until = clock.result()
    return ClusterFacts(
        definition=definition.result(),
        missing_fields=missing_fields,
        resources=[] if definition.result() is None else resources.result(),
        operator_pods=pods.result(),
        lease=lease.result(),
        admission_bindings=bindings.result(),
        rules=rules.result(),
        has_gateway_api=gateway_api.result(),
        server_time=server_time,
        read_from=read_from,
        read_until=read_until,
        namespace=namespace,
        version=version("aerie-operator"),
    )


def _read_clock(kubectl: Kubectl) -> tuple[datetime, datetime | None, datetime]:
    """Return the time of the API server between two of this machine."""
    read_from = now()
    review = kubectl.read_user()
    return read_from, parse_time((review.get("metadata") or {}).get("creationTimestamp")), now()


def _read(request: Callable[[], T]) -> T | Forbidden:
    try:
        return request()
    except CommandError as error:
        if "forbidden" in str(error).lower():
            return FORBIDDEN
        raise


def _read_resources(kubectl: Kubectl) -> Sequence[Document] | Forbidden:
    """Return the resources of all namespaces; those of one where the user may not list all."""
    try:
        resources = _read(lambda: kubectl.list(all_namespaces=True))
        return _read(lambda: kubectl.list(all_namespaces=False)) if isinstance(resources, Forbidden) else resources
    except CommandError as error:
        if "doesn't have a resource type" in str(error):
            return []
        raise


def _read_lease(kubectl: Kubectl, pods: Future[list[Document] | Forbidden]) -> Document | Forbidden | None:
    operator_pods = pods.result()
    place = None if isinstance(operator_pods, Forbidden) else find_lease(operator_pods)
    if place is None:
        return FORBIDDEN if isinstance(operator_pods, Forbidden) else None
    return _read(lambda: kubectl.find("leases.coordination.k8s.io", place[1], namespace=place[0]))


def _find_missing_fields(definition: Future[Document | Forbidden | None]) -> list[str]:
    """Return the fields of the status that the definition lacks."""
    from aerie.api.validation.release_skew import find_missing_crd_fields  # slow to import: meanwhile kubectl works

    document = definition.result()
    return [] if document is None or isinstance(document, Forbidden) else find_missing_crd_fields(document)


def _clean(text: str) -> str:
    """Return the text without control characters, which could move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
