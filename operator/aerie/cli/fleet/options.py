"""The options of all commands about resources in a cluster: they are kubectl's, and go to kubectl as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Concatenate

import typer

from aerie.cli.fleet.kubectl import Kubectl

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
_REPEATABLE_FLAG = "as-group"
_PANEL = "Options of kubectl"


def with_kubectl(command: Callable[Concatenate[Kubectl, ...], None]) -> Callable[..., None]:
    """Return the command with kubectl's options in place of its first parameter, which is kubectl with these options."""
    signature = inspect.signature(command, eval_str=True)
    flags = {_parameter_name(name): name for name in _OPTIONS}

    def run(*args: Any, **kwargs: Any) -> None:
        values = {flags[name]: kwargs.pop(name) for name in list(kwargs) if name in flags}
        command(Kubectl(tuple(_build_flags(values))), *args, **kwargs)

    parameters = [*list(signature.parameters.values())[1:], *_build_parameters()]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter_name(flag: str) -> str:
    return f"kubectl_{flag.replace('-', '_')}"


def _build_parameters() -> Iterator[inspect.Parameter]:
    for flag, (declarations, text) in _OPTIONS.items():
        kind: Any = list[str] if flag == _REPEATABLE_FLAG else str
        option = typer.Option(*declarations, help=text, rich_help_panel=_PANEL, show_default=False)
        annotation = Annotated[kind | None, option]
        yield inspect.Parameter(_parameter_name(flag), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _build_flags(values: dict[str, list[str] | str | None]) -> Iterator[str]:
    for flag, value in values.items():
        for item in [value] if isinstance(value, str) else value or ():
            yield f"--{flag}={item}"
