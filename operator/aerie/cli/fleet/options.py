"""The options of all commands about resources in a cluster: they are kubectl's, and go to kubectl as they are."""

from __future__ import annotations

from typing import Any

import click
from typer.core import TyperCommand, TyperOption

_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "namespace": (("-n", "--namespace"), "Namespace. Default: that of the context."),
    "context": (("--context",), "Context of the kubeconfig. Default: the current context."),
    "kubeconfig": (("--kubeconfig",), "Kubeconfig file. Default: $KUBECONFIG, else ~/.kube/config."),
    "cluster": (("--cluster",), "Cluster of the kubeconfig."),
    "user": (("--user",), "User of the kubeconfig."),
    "as": (("--as",), "User to impersonate."),
    "as-group": (("--as-group",), "Group to impersonate; may be repeated."),
    "request-timeout": (("--request-timeout",), "Time limit of each request, such as 10s."),
}
"""Flags of kubectl with a value, by name."""


class KubectlCommand(TyperCommand):
    """A command with the options of kubectl, which `kubectl_flags` returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, (declarations, text) in _OPTIONS.items():
            multiple = name == "as-group"
            self.params.append(
                TyperOption(
                    param_decls=declarations,
                    help=text,
                    type=str,
                    multiple=multiple,
                    expose_value=False,
                    callback=_collect,
                    rich_help_panel="Options of kubectl",
                )
            )


def _collect(context: click.Context, option: click.Parameter, value: Any) -> None:
    flags: list[str] = context.meta.setdefault(__name__, [])
    name = max((each for each in option.opts), key=len)
    flags += [f"{name}={item}" for item in (value if isinstance(value, tuple) else (value,)) if item is not None]


def kubectl_flags(context: click.Context) -> tuple[str, ...]:
    """Return the flags for kubectl that the command line has."""
    return tuple(context.meta.get(__name__, ()))
