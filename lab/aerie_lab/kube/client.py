"""A thin client of the Kubernetes API for the lab's own processes: paths and plain dicts in, plain dicts out.

Why not the `kubernetes` package: the node agent plays a hundred kubelets in one process and must stay small and quick; it
needs six verbs. Guarantees: every refusal is a KubeError with the server's own message; TLS is always verified.
Not guaranteed: retries. The caller knows whether a repeat is safe.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

from aerie_lab.errors import KubeError
from aerie_lab.kube.connector import Connector, tls_context

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


def core(plural: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    """The path of a core/v1 resource."""
    return path("v1", plural, namespace, name, subresource)


def path(version: str, plural: str, namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
    """The path of any resource; `version` is apiVersion, such as "apps/v1"."""
    parts = ["api" if "/" not in version else "apis", version]
    if namespace:
        parts += ["namespaces", namespace]
    parts += [part for part in (plural, name, sub) if part]
    return "/" + "/".join(parts)


class KubeClient:
    """One connection pool to one API server, as one user."""

    def __init__(self, server: str, certificates: Path, client: str) -> None:
        self._server = server
        self._context = tls_context(certificates, client)
        self._http: aiohttp.ClientSession | None = None
        self._plurals: dict[tuple[str, str], tuple[str, bool]] = {}

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(self._server, connector=Connector(self._context, limit=64))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def request(
        self,
        method: str,
        where: str,
        *,
        body: Any = None,
        content: str = "application/json",
        timeout: float = 30.0,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """One request. Raises KubeError for a refusal (status 0: the server could not be reached)."""
        assert self._http is not None, "use the client as a context manager"
        try:
            async with self._http.request(
                method,
                where,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": content} if body is not None else None,
                params=query,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise _refusal(response.status, raw)
                return json.loads(raw) if "json" in response.content_type else raw.decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeError(0, "Unreachable", f"{method} {where}: {str(error) or type(error).__name__}") from error

    async def get(self, where: str, **query: str) -> Any:
        """GET."""
        return await self.request("GET", where, query=query)

    async def create(self, where: str, body: Object) -> Object:
        """POST to a collection."""
        created: Object = await self.request("POST", where, body=body)
        return created

    async def patch(self, where: str, body: Object, content: str = MERGE, **query: str) -> Object:
        """PATCH."""
        patched: Object = await self.request("PATCH", where, body=body, content=content, query=query)
        return patched

    async def delete(self, where: str, body: Object | None = None) -> None:
        """DELETE; gone already is fine."""
        try:
            await self.request("DELETE", where, body=body)
        except KubeError as error:
            if error.status != 404:
                raise

    async def apply(self, document: Mapping[str, Any], manager: str = "aerie-lab") -> Object:
        """Server-side apply of one object of any kind that the server knows, taking over conflicting fields."""
        where = await self.address(document)
        applied: Object = await self.request(
            "PATCH", where, body=document, content=APPLY, query={"fieldManager": manager, "force": "true"}
        )
        return applied

    async def address(self, document: Mapping[str, Any]) -> str:
        """The path of an object, by asking the server which resource its kind is."""
        version, kind, metadata = document["apiVersion"], document["kind"], document["metadata"]
        if (version, kind) not in self._plurals:
            for resource in (await self.get(path(version, ""))).get("resources", []):
                if "/" not in resource["name"]:
                    self._plurals[version, resource["kind"]] = (resource["name"], resource["namespaced"])
        if (version, kind) not in self._plurals:
            raise KubeError(404, "NotFound", f"the server knows no {kind} in {version}")
        plural, namespaced = self._plurals[version, kind]
        return path(version, plural, metadata.get("namespace", "default") if namespaced else None, metadata["name"])

    async def watch(self, where: str, version: str, **query: str) -> AsyncIterator[tuple[str, Object]]:
        """Events of a collection after resource version `version`, bookmarks included, until the server ends the watch.

        Raises KubeError: 410 when `version` is too old, 0 when the connection fails or is silent for 90 s.
        """
        assert self._http is not None, "use the client as a context manager"
        query |= {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90)
            async with self._http.get(where, params=query, timeout=timeout) as response:
                if response.status >= 400:
                    raise _refusal(response.status, await response.read())
                buffer = bytearray()
                async for chunk in response.content.iter_any():
                    buffer += chunk
                    *lines, rest = buffer.split(b"\n")
                    buffer = rest
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            status = event["object"]
                            raise KubeError(status.get("code", 0), status.get("reason", ""), status.get("message", ""))
                        yield event["type"], event["object"]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeError(0, "Unreachable", f"watch {where}: {str(error) or type(error).__name__}") from error


def _refusal(status: int, raw: bytes) -> KubeError:
    try:
        document = json.loads(raw)
        return KubeError(status, document.get("reason", ""), document.get("message", ""))
    except ValueError:
        return KubeError(status, "", raw.decode(errors="replace").strip())
