"""The API server, with plain dictionaries: read, server-side apply, status, delete, events.

Why not the generated models of `kubernetes`: they refuse fields that they do not know, and an operator must carry what a newer
API server sends. Only its transport is used, with its credentials and their renewal.

Guarantees: every call has a time limit and is counted by verb and code; every failure is an `ApiError` with the status that
the server gave, or None where no answer came. Nothing but a Lease is written by an operator whose own Lease has run out by its
own clock (`may_write`). Not guaranteed: retries; whoever calls knows what may be repeated.
"""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from aerie.controller.kubernetes import kubeconfig
from aerie.manifests.naming import FIELD_MANAGER

ObjectDict = dict[str, Any]
API_REQUEST_TIMEOUT_SECONDS = 15.0
"""Seconds for one call."""
ACCEPT_JSON = "application/json, */*"
ACCEPT_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
LIST_PAGE_SIZE = 100
"""Objects in one answer to a list: some milliseconds of parsing, and megabytes meanwhile."""


class ApiError(Exception):
    """The API server refused, or did not answer."""

    def __init__(self, status: int | None, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after_seconds = status, reason, retry_after_seconds
        """`retry_after`: seconds that the server asks to be left alone, where it says so."""


@dataclass(frozen=True)
class ResourceKind:
    """One kind of objects, and where they are."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Path of one object, or of all of a namespace, or of all."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        inside = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{inside}/{self.plural}" + (f"/{name}" if name else "")


DEPLOYMENTS = ResourceKind("apps/v1", "Deployment", "deployments")
SERVICES = ResourceKind("v1", "Service", "services")
CONFIG_MAPS = ResourceKind("v1", "ConfigMap", "configmaps")
PODS = ResourceKind("v1", "Pod", "pods")
EVENTS = ResourceKind("events.k8s.io/v1", "Event", "events")
POD_DISRUPTION_BUDGETS = ResourceKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
JOBS = ResourceKind("batch/v1", "Job", "jobs")
LEASES = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")
HTTP_ROUTES = ResourceKind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
SPECULATIVE_DEPLOYMENTS = ResourceKind("aerie.dev/v1alpha1", "SpeculativeDeployment", "speculativedeployments")

CHILD_KINDS = (DEPLOYMENTS, SERVICES, POD_DISRUPTION_BUDGETS, JOBS, CONFIG_MAPS, HTTP_ROUTES)
"""The kinds that Aerie makes for a resource."""
RESOURCE_KIND_BY_NAME = {kind.kind: kind for kind in (*CHILD_KINDS, SPECULATIVE_DEPLOYMENTS, PODS, EVENTS, LEASES)}

RecordApiCall = Callable[[str, str, float], None]
"""Told of each call: verb, code or what went wrong, seconds."""
PageErrorHandler = Callable[[ApiError], Awaitable[None]]
"""Asked when a page of a list has failed: returns when it is to be tried again, and raises the error otherwise."""


async def _raise_page_error(error: ApiError) -> None:
    raise error


class Cluster:
    """A connection to the API server; close it."""

    def __init__(self, client: ApiClient, record_call: RecordApiCall = lambda *_: None) -> None:
        self._client, self._record_call = client, record_call
        self.may_write: Callable[[], bool] = lambda: True
        """Whether this operator leads, by its own clock: after a stall another one may, without this one having noticed."""
        self.namespace = "default"
        """That of the kubeconfig's context."""
        self._last_response_date = ("", 0.0)
        """The date in the last answer that came, and the monotonic time at that."""

    @classmethod
    async def connect(
        cls,
        record_call: RecordApiCall = lambda *_: None,
        selection: kubeconfig.KubeconfigSelection = kubeconfig.DEFAULT_KUBECONFIG,
    ) -> Cluster:
        """With the service account of the pod, or outside of a cluster with the kubeconfig. Raises ConnectError."""
        client, namespace = await kubeconfig.create_api_client(selection)
        cluster = cls(client, record_call)
        cluster.namespace = namespace
        return cluster

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        """The object, or None when there is none."""
        try:
            found: ObjectDict = await self.request("GET", kind.path(namespace, name))
            return found
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def get_metadata(self, kind: ResourceKind, namespace: str | None, name: str) -> ObjectDict | None:
        """The object's metadata, without the rest being sent; None when there is no such object."""
        try:
            found: ObjectDict = await self.request("GET", kind.path(namespace, name), accept=ACCEPT_METADATA_ONLY)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        metadata: ObjectDict = found["metadata"]
        return metadata

    async def list_all(self, kind: ResourceKind, namespace: str | None, selector: str = "") -> list[ObjectDict]:
        """All objects that the label selector takes; none where the cluster does not know the kind."""
        return [item async for page, _ in self.list_pages(kind, namespace, selector) for item in page]

    async def list_pages(
        self, kind: ResourceKind, namespace: str | None, selector: str = "", on_page_error: PageErrorHandler = _raise_page_error
    ) -> AsyncIterator[tuple[list[ObjectDict], str | None]]:
        """The same in pages, so that a long list does not hold up everything else while it is read.

        With each page comes the version that the whole list is of, or None where the cluster does not know the kind. Raises
        ApiError 410 when the list has taken so long that the server has forgotten that version.
        """
        selected = [("labelSelector", selector)] if selector else []
        following = ""
        while True:
            query = [*selected, ("limit", str(LIST_PAGE_SIZE)), *([("continue", following)] if following else [])]
            try:
                found = await self.request("GET", kind.path(namespace), query)
            except ApiError as error:
                if error.status == 404:
                    yield [], None
                    return
                await on_page_error(error)
                continue
            # Entries of a list lack what the list says once.
            yield (
                [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in found["items"]],
                found["metadata"]["resourceVersion"],
            )
            following = found["metadata"].get("continue") or ""
            if not following:
                return

    async def apply(self, desired: ObjectDict, *, uid: str | None) -> ObjectDict:
        """Server-side apply of the object, as the owner of exactly the fields in it.

        `uid`: that of our own object which is there; raises ApiError 409 when another one bears the name by now. None where none
        is known: the object is made, and of one that somebody else has made meanwhile no field is taken over (ApiError 409).
        """
        kind = RESOURCE_KIND_BY_NAME[desired["kind"]]
        where = kind.path(desired["metadata"]["namespace"], desired["metadata"]["name"])
        query = [("fieldManager", FIELD_MANAGER), ("force", "false" if uid is None else "true")]
        known = desired if uid is None else {**desired, "metadata": {**desired["metadata"], "uid": uid}}
        applied: ObjectDict = await self.request("PATCH", where, query, known, "application/apply-patch+yaml")
        return applied

    async def merge_patch(self, target: ObjectDict, changes: ObjectDict) -> None:
        """Change fields of the object whatever they are owned by: maps are merged, lists and values replaced (RFC 7386)."""
        kind = RESOURCE_KIND_BY_NAME[target["kind"]]
        where = kind.path(target["metadata"]["namespace"], target["metadata"]["name"])
        await self.request("PATCH", where, [("fieldManager", FIELD_MANAGER)], changes, "application/merge-patch+json")

    async def replace_status(self, resource: ObjectDict, status: ObjectDict) -> ObjectDict:
        """Write the status of the resource as it was read. Raises ApiError 409 when it has changed since."""
        kind = RESOURCE_KIND_BY_NAME[resource["kind"]]
        where = kind.path(resource["metadata"]["namespace"], resource["metadata"]["name"])
        # A merge would leave fields that are gone; a patch of the whole status as one value cannot.
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": resource["metadata"]["resourceVersion"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        query = [("fieldManager", FIELD_MANAGER)]
        try:
            written: ObjectDict = await self.request("PATCH", f"{where}/status", query, patch, "application/json-patch+json")
            return written
        except ApiError as error:
            if error.status == 422 and "/metadata/resourceVersion" in str(error):  # the patch's own test
                raise ApiError(409, "Conflict", "the resource has changed since it was read") from error
            raise

    async def create(self, desired: ObjectDict) -> ObjectDict:
        """Create the object."""
        kind = RESOURCE_KIND_BY_NAME[desired["kind"]]
        created: ObjectDict = await self.request("POST", kind.path(desired["metadata"]["namespace"]), [], desired)
        return created

    async def replace(self, desired: ObjectDict) -> ObjectDict:
        """Replace the object; with a resourceVersion, only when it has not changed."""
        kind = RESOURCE_KIND_BY_NAME[desired["kind"]]
        where = kind.path(desired["metadata"]["namespace"], desired["metadata"]["name"])
        replaced: ObjectDict = await self.request("PUT", where, [], desired)
        return replaced

    async def delete(self, kind: ResourceKind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid, and in the background what it owns; gone already is well."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self.request("DELETE", kind.path(namespace, name), [], body)
        except ApiError as error:
            if error.status == 404:
                return
            found = await self.get(kind, namespace, name) if error.status == 409 else None
            if error.status != 409 or (found is not None and found["metadata"]["uid"] == uid):
                raise  # else another one bears the name by now

    async def read_log(self, namespace: str, pod: str, container: str, *, previous: bool, lines: int) -> str:
        """The last lines of a container, or of its run before."""
        query = [("container", container), ("tailLines", str(lines)), ("previous", str(previous).lower())]
        raw = await self._request_raw(
            "GET", f"{PODS.path(namespace, pod)}/log", query, None, "application/json", API_REQUEST_TIMEOUT_SECONDS
        )
        return raw.decode(errors="replace")

    async def request(
        self,
        verb: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: object = None,
        content_type: str = "application/json",
        timeout_seconds: float = API_REQUEST_TIMEOUT_SECONDS,
        accept: str = ACCEPT_JSON,
    ) -> Any:
        """One request; the object that comes back. Raises ApiError."""
        raw = await self._request_raw(verb, path, query or [], body, content_type, timeout_seconds, accept)
        found = _parse_object(raw.decode(errors="replace"))
        if found is None:
            raise ApiError(200, "NoObject", f"the answer to {verb} {path} is no object of Kubernetes: {_PROXY_HINT}")
        return found

    def server_time(self) -> tuple[datetime, float] | None:
        """The API server's time in its last answer, and the monotonic one at which it came; None where it named none."""
        try:
            found = email.utils.parsedate_to_datetime(self._last_response_date[0])
        except ValueError:
            return None
        return None if found.tzinfo is None else (found, self._last_response_date[1])

    async def _request_raw(
        self,
        verb: str,
        path: str,
        query: list[tuple[str, str]],
        body: object,
        content_type: str,
        timeout_seconds: float,
        accept: str = ACCEPT_JSON,
    ) -> bytes:
        if verb != "GET" and f"/{LEASES.plural}" not in path and not self.may_write():
            raise ApiError(None, "Fenced", "the Lease has run out by this operator's own clock, so nothing is written")
        began, code = time.monotonic(), "none"
        try:
            arguments = await self._client.param_serialize(
                method=verb,
                resource_path=path,
                query_params=query,
                header_params={"Accept": accept, "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            method, url, headers, data, fields = arguments
            answer = await self._client.call_api(method, url, headers, data, fields, _request_timeout=timeout_seconds)
            raw: bytes = await answer.response.read()
            code = str(answer.status)
            self._last_response_date = answer.response.headers.get("Date", ""), time.monotonic()
            if answer.status >= 400:
                raise _build_api_error(answer.status, raw, answer.response.headers)
            return raw
        except ApiException as error:
            code = str(error.status)
            raise _build_api_error(int(error.status or 0), error.body, error.headers) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            code = type(error).__name__
            raise ApiError(None, code, f"the API server did not answer {verb} {path}: {str(error) or code}") from error
        finally:
            self._record_call(verb, code, time.monotonic() - began)


def _build_api_error(status: int, body: str | bytes | None, headers: Mapping[str, str] | None) -> ApiError:
    text = body.decode(errors="replace") if isinstance(body, bytes) else (body or "")
    found = _parse_object(text) or {}
    after = (headers or {}).get("Retry-After") or ""
    seconds = float(after) if after.isdecimal() else None  # Kubernetes writes no dates
    return ApiError(
        status, str(found.get("reason") or status), str(found.get("message") or _describe_non_json_body(text)), seconds
    )


_PROXY_HINT = "a proxy may stand between, or the address is not that of an API server"


def _describe_non_json_body(text: str) -> str:
    """What an answer says that is no object."""
    line = " ".join(text.split())
    return _PROXY_HINT if not line or line.startswith("<") else line[:500]


def _parse_object(text: str) -> ObjectDict | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
