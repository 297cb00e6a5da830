"""Credentials for the API server: the service account of the pod, or a kubeconfig.

The client's own loader raises whatever a broken kubeconfig leads to (KeyError, SSLError, ...). After an exec plugin that failed,
it sends requests without credentials, which end as a 401 that names no cause.

Guarantees: unusable credentials raise a ConnectError that names the file and the fix. No request is sent without the credentials
that the kubeconfig names. Not guaranteed: that the server accepts them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from aerie.yaml_documents import YamlDocumentError, read_yaml_documents

_log = logging.getLogger("kubernetes.aio.config.kube_config")


class ConnectError(Exception):
    """Error for a cluster that cannot be reached; `str(error)` is a message with the cause and the fix."""


async def create_api_client() -> tuple[ApiClient, str]:
    """Return a client, and the namespace of the context. Raises ConnectError."""
    try:
        load_incluster_config()  # type: ignore[no-untyped-call]
        return ApiClient(), "default"
    except ConfigException:
        pass  # not in a pod
    files = _find_kubeconfig_files()
    paths = ":".join(files)
    for file in files:
        _check_kubeconfig(file)
    configuration = Configuration()
    try:
        with _capture_loader_errors() as loader_errors:
            loader = await load_kube_config(paths, None, configuration)  # type: ignore[no-untyped-call]
        if loader_errors:
            raise ConnectError(
                f"{paths}: the credentials plugin of the user failed ({loader_errors[0]}): install it, log in, or choose another "
                "context."
            )
        namespace = str(loader.current_context["context"].get("namespace") or "default")
        return ApiClient(configuration), namespace
    except ConnectError:
        raise
    except ConfigException as error:
        reason = str(error).removeprefix("Invalid kube-config file. ").rstrip(".")
        raise ConnectError(f"{paths} cannot be used ({reason}): choose one of its contexts, or correct it.") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConnectError(f"{paths} cannot be used ({reason}): correct it; `kubectl config view` shows its content.") from error


def _find_kubeconfig_files() -> list[str]:
    path_list = os.environ.get("KUBECONFIG") or "~/.kube/config"
    files = [str(Path(path).expanduser()) for path in path_list.split(":") if path]
    existing_files = [path for path in files if Path(path).exists()]
    if not existing_files:
        raise ConnectError(f"there is no kubeconfig at {':'.join(files)}: set KUBECONFIG to one.")
    return existing_files


def _check_kubeconfig(file: str) -> None:
    """Reject a file that is not a kubeconfig at all, such as the empty one that a failed `> kubeconfig` leaves."""
    try:
        documents = read_yaml_documents(file)
    except YamlDocumentError as error:
        raise ConnectError(str(error).replace("give a YAML file", "set KUBECONFIG to a kubeconfig")) from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        content = f"a {type(documents[0]).__name__}" if len(documents) == 1 and documents[0] is not None else "empty"
        raise ConnectError(f"{file} is not a kubeconfig (it is {content}): set KUBECONFIG to one.")
    for name in ("clusters", "contexts", "users"):
        if not isinstance(documents[0].get(name) or [], list):
            raise ConnectError(f"{file} is not a kubeconfig ({name} is not a list): set KUBECONFIG to one.")


@contextmanager
def _capture_loader_errors() -> Iterator[list[str]]:
    """Yield a list that receives what the loader logs as an error instead of raising it."""
    messages: list[str] = []

    class CapturingHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, propagate = CapturingHandler(logging.ERROR), _log.propagate
    _log.addHandler(handler)
    _log.propagate = False
    try:
        yield messages
    finally:
        _log.removeHandler(handler)
        _log.propagate = propagate
