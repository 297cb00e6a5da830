"""A thin client of the Kubernetes API for the lab's own processes: paths and plain dicts in, plain dicts out.

Why not the `kubernetes` package: the node agent plays a hundred kubelets in one process and must stay small and quick; it
needs six verbs. Guarantees: every rejection is a KubeError with the server's own message; TLS is always verified.
Not guaranteed: retries. The caller knows whether a repeat is safe.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

from aerie_lab.errors import KubeError
from aerie_lab.kube.connector import ApiServerConnector, build_tls_context

KubeObject = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


def core_path(plural: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    """Return the path of a core/v1 resource."""
    return resource_path("v1", plural, namespace, name, subresource)


def resource_path(
    api_version: str, plural: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None
) -> str:
    """Return the path of any resource; `api_version` is for example "apps/v1"."""
    parts = ["api" if "/" not in api_version else "apis", api_version]
    if namespace:
        parts += ["namespaces", namespace]
    parts += [part for part in (plural, name, subresource) if part]
    return "/" + "/".join(parts)


class KubeClient:
    """One connection pool to one API server, as one user."""

    def __init__(self, server: str, certificates: Path, client: str) -> None:
        self._server = server
        self._context = build_tls_context(certificates, client)
        self._http: aiohttp.ClientSession | None = None
        self._resources_by_kind: dict[tuple[str, str], tuple[str, bool]] = {}

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(self._server, connector=ApiServerConnector(self._context, limit=64))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def request(
        self,
        method: str,
        url_path: str,
        *,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 30.0,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """Send one request. Raises KubeError for an error response (status 0: the server could not be reached)."""
        assert self._http is not None, "use the client as a context manager"
        try:
            async with self._http.request(
                method,
                url_path,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": content_type} if body is not None else None,
                params=query,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise build_error(response.status, raw)
                return json.loads(raw) if "json" in response.content_type else raw.decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeError(0, "Unreachable", f"{method} {url_path}: {str(error) or type(error).__name__}") from error

    async def get(self, url_path: str, **query: str) -> Any:
        """GET."""
        return await self.request("GET", url_path, query=query)

    async def create(self, url_path: str, body: KubeObject) -> KubeObject:
        """POST to a collection."""
        created: KubeObject = await self.request("POST", url_path, body=body)
        return created

    async def patch(self, url_path: str, body: KubeObject, content_type: str = MERGE_PATCH, **query: str) -> KubeObject:
        """PATCH."""
        patched: KubeObject = await self.request("PATCH", url_path, body=body, content_type=content_type, query=query)
        return patched

    async def delete(self, url_path: str, body: KubeObject | None = None) -> None:
        """Delete an object; ignore one that does not exist."""
        try:
            await self.request("DELETE", url_path, body=body)
        except KubeError as error:
            if error.status != 404:
                raise

    async def apply(self, document: Mapping[str, Any], field_manager: str = "aerie-lab") -> KubeObject:
        """Server-side apply of one object of any kind that the server knows, taking over conflicting fields."""
        where = await self.resolve_path(document)
        applied: KubeObject = await self.request(
            "PATCH", where, body=document, content_type=APPLY_PATCH, query={"fieldManager": field_manager, "force": "true"}
        )
        return applied

    async def resolve_path(self, document: Mapping[str, Any]) -> str:
        """Return the path of an object, by asking the server which resource its kind is."""
        version, kind, metadata = document["apiVersion"], document["kind"], document["metadata"]
        if (version, kind) not in self._resources_by_kind:
            for resource in (await self.get(resource_path(version, ""))).get("resources", []):
                if "/" not in resource["name"]:
                    self._resources_by_kind[version, resource["kind"]] = (resource["name"], resource["namespaced"])
        if (version, kind) not in self._resources_by_kind:
            raise KubeError(404, "NotFound", f"the server knows no {kind} in {version}")
        plural, namespaced = self._resources_by_kind[version, kind]
        return resource_path(version, plural, metadata.get("namespace", "default") if namespaced else None, metadata["name"])

    async def watch(self, url_path: str, resource_version: str, **query: str) -> AsyncIterator[tuple[str, KubeObject]]:
        """Events of a collection after resource version `version`, bookmarks included, until the server ends the watch.

        Raises KubeError: 410 when `version` is too old, 0 when the connection fails or is silent for 90 s.
        """
        assert self._http is not None, "use the client as a context manager"
        query |= {"watch": "true", "resourceVersion": resource_version, "allowWatchBookmarks": "true"}
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90)
            async with self._http.get(url_path, params=query, timeout=timeout) as response:
                if response.status >= 400:
                    raise build_error(response.status, await response.read())
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
            raise KubeError(0, "Unreachable", f"watch {url_path}: {str(error) or type(error).__name__}") from error


def build_error(status: int, raw: bytes) -> KubeError:
    """Return the error of a response, with the server's own message."""
    try:
        document = json.loads(raw)
        return KubeError(status, document.get("reason", ""), document.get("message", ""))
    except ValueError:
        return KubeError(status, "", raw.decode(errors="replace").strip())
