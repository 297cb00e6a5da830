"""Credentials for the API server: the service account of the pod, or a kubeconfig.

The client's own loader lets whatever is wrong with a kubeconfig out as the error that came of it (KeyError, SSLError, ...), and
after an exec plugin that failed it asks without credentials, which ends as a 401 that names nothing.

Guarantees: what cannot be used is a ConnectError that names the file and the way out; no request goes out without the credentials
that the kubeconfig asks for. Not guaranteed: that the server takes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from aerie.yaml_documents import YamlDocumentError, read_yaml_documents

_log = logging.getLogger("kubernetes.aio.config.kube_config")


class ConnectError(Exception):
    """No cluster can be asked; `str(error)` is a sentence that says why and what to do."""


@dataclass(frozen=True)
class KubeconfigSelection:
    """Which kubeconfig, and which context of it; None: as kubectl has it."""

    kubeconfig: str | None = None
    context: str | None = None


DEFAULT_KUBECONFIG = KubeconfigSelection()


async def create_api_client(selection: KubeconfigSelection) -> tuple[ApiClient, str]:
    """A client, and the namespace that the context names. Raises ConnectError."""
    if selection == DEFAULT_KUBECONFIG:
        try:
            load_incluster_config()  # type: ignore[no-untyped-call]
            return ApiClient(), "default"
        except ConfigException:
            pass  # not in a pod
    files = _find_kubeconfig_files(selection)
    shown = ":".join(files)
    for file in files:
        _check_kubeconfig(file)
    configuration = Configuration()
    try:
        with _capture_loader_errors() as complaints:
            loader = await load_kube_config(shown, selection.context, configuration)  # type: ignore[no-untyped-call]
        if complaints:
            raise ConnectError(
                f"{shown}: the credentials plugin of the user failed ({complaints[0]}): install it, log in, or choose another "
                "context."
            )
        namespace = str(loader.current_context["context"].get("namespace") or "default")
        return ApiClient(configuration), namespace
    except ConnectError:
        raise
    except ConfigException as error:
        reason = str(error).removeprefix("Invalid kube-config file. ").rstrip(".")
        raise ConnectError(f"{shown} cannot be used ({reason}): choose a context that it has, or correct it.") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConnectError(f"{shown} cannot be used ({reason}): correct it; `kubectl config view` shows what it says.") from error


def _find_kubeconfig_files(selection: KubeconfigSelection) -> list[str]:
    named = selection.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    files = [str(Path(one).expanduser()) for one in named.split(":") if one]
    present = [one for one in files if Path(one).exists()]
    if not present:
        raise ConnectError(f"no cluster is known, because there is no kubeconfig {':'.join(files)}: set KUBECONFIG to one.")
    return present


def _check_kubeconfig(file: str) -> None:
    """Refuse what is no kubeconfig at all, such as the empty file that a failed `> kubeconfig` leaves."""
    try:
        documents = read_yaml_documents(file)
    except YamlDocumentError as error:
        raise ConnectError(str(error).replace("give a YAML file", "set KUBECONFIG to a kubeconfig")) from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        what = f"a {type(documents[0]).__name__}" if len(documents) == 1 and documents[0] is not None else "empty"
        raise ConnectError(f"{file} is no kubeconfig (it is {what}): set KUBECONFIG to one.")
    for name in ("clusters", "contexts", "users"):
        if not isinstance(documents[0].get(name) or [], list):
            raise ConnectError(f"{file} is no kubeconfig ({name} is no list): set KUBECONFIG to one.")


@contextmanager
def _capture_loader_errors() -> Iterator[list[str]]:
    """What the loader logs as an error instead of raising it."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, propagates = Keep(logging.ERROR), _log.propagate
    _log.addHandler(handler)
    _log.propagate = False
    try:
        yield found
    finally:
        _log.removeHandler(handler)
        _log.propagate = propagates
