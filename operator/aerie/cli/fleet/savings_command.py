"""`kubectl aerie savings`: replica-hours that speculation settings have saved, of one namespace or of all."""

from __future__ import annotations

from typing import Annotated

import typer

from aerie.cli.console import out
from aerie.cli.fleet.kubectl import Kubectl
from aerie.cli.fleet.options import with_kubectl
from aerie.cli.fleet.output import Output, OutputOption, write_document
from aerie.cli.fleet.resource_view import ResourceView, now
from aerie.cli.fleet.savings import build_savings_document, read_savings, render_savings


@with_kubectl
def savings(
    kubectl: Kubectl,
    all_namespaces: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Of all namespaces.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the replica-hours that speculation settings have saved, and what trials have cost."""
    views, time = [ResourceView(item) for item in kubectl.list(all_namespaces=all_namespaces)], now()
    items = [item for view in views if (item := read_savings(view, time)) is not None]
    if output in (Output.JSON, Output.YAML):
        write_document(output, "SavingsReport", build_savings_document(items, len(views)))
    else:
        out.print(render_savings(items, time, resource_count=len(views)), soft_wrap=False)
