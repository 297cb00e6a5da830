"""Objects of the API server by the names that kubectl accepts, without an event loop and without a process.

A test that waits reads the same object many times, and a kubectl takes 0.13 s of a processor each time. Guarantees: plurals,
singulars and short names work, also with their group ("jobs.batch"); an item of a list has its `kind` and `apiVersion`; as with
kubectl, `managedFields` are left out; every failure is a KubeError. Not guaranteed: a fixed set of kinds; one that is not known
yet is looked up again.
"""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeObject, build_error, resource_path
from aerie_lab.kube.connector import build_tls_context

_TIMEOUT_SECONDS = 30.0
_ALL_GROUPS = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
"""Media type of an answer with the resources of all groups (Kubernetes, aggregated discovery)."""


@dataclass(frozen=True)
class _Resource:
    """A kind of objects, as the API server names it."""

    api_version: str
    kind: str
    plural: str
    is_namespaced: bool

    def path(self, namespace: str, name: str | None = None) -> str:
        return resource_path(self.api_version, self.plural, namespace if self.is_namespaced else None, name)

    def complete(self, item: KubeObject) -> KubeObject:
        item["metadata"].pop("managedFields", None)
        return {"apiVersion": self.api_version, "kind": self.kind, **item}


class ObjectReader:
    """Reads from one API server, as one user, over one connection. Threads may share it; `close` it at the end."""

    def __init__(self, server: str, certificates: Path, client: str) -> None:
        self._address = urlsplit(server).netloc
        self._certificates = certificates
        self._client = client
        self._connection: http.client.HTTPSConnection | None = None
        self._lock = threading.Lock()
        self._resources: dict[str, _Resource] = {}

    def close(self) -> None:
        """Close the connection. Another read opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, kind: str, name: str, namespace: str) -> KubeObject:
        """Return one object. Raises KubeError, with status 404 if it or its kind does not exist."""
        resource = self._resolve(kind)
        return resource.complete(self._request(resource.path(namespace, name)))

    def list_all(self, kinds: str, namespace: str, selector: str = "") -> list[KubeObject]:
        """Return all objects of a kind, or of several with commas between them. Raises KubeError."""
        items: list[KubeObject] = []
        for kind in kinds.split(","):
            resource = self._resolve(kind)
            query = "?" + urlencode({"labelSelector": selector}) if selector else ""
            items += map(resource.complete, self._request(resource.path(namespace) + query)["items"])
        return items

    def _resolve(self, kind: str) -> _Resource:
        if kind.lower() not in self._resources:
            self._resources = self._discover()
        if (resource := self._resources.get(kind.lower())) is None:
            raise KubeError(404, "NotFound", f"the server has no resource {kind}")
        return resource

    def _discover(self) -> dict[str, _Resource]:
        """Return the resources by their names; the first group that has a name keeps it, the core group before the others."""
        resources: dict[str, _Resource] = {}
        for root in ("/api", "/apis"):
            for group in self._request(root, accept=_ALL_GROUPS)["items"]:
                suffix = group["metadata"].get("name", "")
                for version in group["versions"]:
                    api_version = "/".join(filter(None, (suffix, version["version"])))
                    for item in version["resources"]:
                        plural, kind = item["resource"], item["responseKind"]["kind"]
                        resource = _Resource(api_version, kind, plural, item["scope"] == "Namespaced")
                        for name in (plural, item.get("singularResource") or kind, *item.get("shortNames", [])):
                            resources.setdefault(name.lower(), resource)
                        resources.setdefault(f"{plural}.{suffix}", resource)
        return resources

    def _request(self, url_path: str, accept: str = "application/json") -> Any:
        with self._lock:
            try:
                status, body = self._send(url_path, accept)
            except (http.client.HTTPException, OSError) as error:
                raise KubeError(0, "Unreachable", f"GET {url_path}: {str(error) or type(error).__name__}") from error
        if status >= 400:
            raise build_error(status, body)
        return json.loads(body)

    def _send(self, url_path: str, accept: str) -> tuple[int, bytes]:
        """Return status and body. Repeats what fails on an old connection: a server that restarts closes it."""
        is_old = self._connection is not None
        if self._connection is None:
            context = build_tls_context(self._certificates, self._client)
            self._connection = http.client.HTTPSConnection(self._address, timeout=_TIMEOUT_SECONDS, context=context)
        try:
            self._connection.request("GET", url_path, headers={"Accept": accept})
            response = self._connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, OSError):
            self.close()
            if not is_old:
                raise
        return self._send(url_path, accept)
