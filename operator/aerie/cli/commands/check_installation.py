"""`aerie check-installation`: whether the installed operator works, as the pod of `helm test` runs it.

The pod has the operator's image and service account, so the check covers both. It uses no further permission, and writes nothing.
Guarantees: exit status 0 only if the API server serves the definition, lists SpeculativeDeployments in each namespace, and an
operator renewed the Lease while the check ran. Not guaranteed: that the operator may write, or that engines can start.
`kubectl aerie doctor` checks more, with the permissions of its user.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Protocol

import typer

from aerie.boundary import EXIT_REJECTED
from aerie.cli.console import CommandError

_POLL_SECONDS = 1.0


class ApiReader(Protocol):
    """The call of the API server that the check needs."""

    async def request(self, verb: str, path: str, query: list[tuple[str, str]] | None = None) -> Any:
        """Return the object at `path`. Raises ApiError."""


def check_installation(
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace that the operator manages; repeatable. Default: all.")
    ] = None,
    lease_namespace: Annotated[str, typer.Option(help="Namespace of the leader election Lease.")] = "aerie-system",
    lease_name: Annotated[str, typer.Option(help="Name of the leader election Lease.")] = "aerie-operator",
    timeout_seconds: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for an operator that works.")] = 90.0,
) -> None:
    """Check in a pod whether the operator works: its definition, its permission to list, and its Lease."""
    # Imported here: the list of commands needs no client of the cluster.
    from aerie.controller.kubernetes.kubeconfig import ConnectError

    try:
        problem = asyncio.run(_check(tuple(namespace or ()), lease_namespace, lease_name, timeout_seconds))
    except ConnectError as error:
        raise CommandError(str(error)) from None
    typer.echo(problem or "The operator works: the API server serves its definition, and it renews its Lease.")
    if problem:
        raise typer.Exit(EXIT_REJECTED)


async def _check(namespaces: tuple[str, ...], lease_namespace: str, lease_name: str, timeout_seconds: float) -> str | None:
    from aerie.controller.kubernetes.client import Cluster

    cluster = await Cluster.connect()
    try:
        return await wait_until_operator_works(cluster, namespaces, lease_namespace, lease_name, timeout_seconds)
    finally:
        await cluster.close()


async def wait_until_operator_works(
    api: ApiReader, namespaces: tuple[str, ...], lease_namespace: str, lease_name: str, timeout_seconds: float
) -> str | None:
    """Return None as soon as the operator works; after the timeout, the latest problem."""
    from aerie.controller.kubernetes.client import ApiError

    deadline = asyncio.get_running_loop().time() + timeout_seconds
    first_renewal = None
    while True:
        try:
            await _list_resources(api, namespaces)
            lease = await _read_lease(api, lease_namespace, lease_name)
            first_renewal = first_renewal or lease.get("renewTime")
            # Clocks differ, so only a change of the time counts. A leader renews every two seconds.
            if lease.get("holderIdentity") and lease.get("renewTime") != first_renewal:
                return None
            problem = f"No operator renews the Lease {lease_namespace}/{lease_name}: look into the log of the operator's pods."
        except ApiError as error:
            problem = f"The API server rejects what the operator needs: {error}"
        if asyncio.get_running_loop().time() >= deadline:
            return problem
        await asyncio.sleep(_POLL_SECONDS)


async def _list_resources(api: ApiReader, namespaces: tuple[str, ...]) -> None:
    """List SpeculativeDeployments as the operator does. Raises ApiError, also where the definition is not served."""
    from aerie.controller.kubernetes.client import SPECULATIVE_DEPLOYMENTS

    for namespace in namespaces or (None,):
        await api.request("GET", SPECULATIVE_DEPLOYMENTS.path(namespace), [("limit", "1")])


async def _read_lease(api: ApiReader, namespace: str, name: str) -> dict[str, Any]:
    """Return the spec of the Lease, empty where it does not exist."""
    from aerie.controller.kubernetes.client import LEASES, ApiError

    try:
        return dict((await api.request("GET", LEASES.path(namespace, name))).get("spec") or {})
    except ApiError as error:
        if error.status == 404:
            return {}
        raise
