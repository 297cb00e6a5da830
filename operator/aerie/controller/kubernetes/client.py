"""Client of the API server with plain dictionaries: read, server-side apply, status, delete, events.

Why not the generated models of `kubernetes`: they reject unknown fields, and an operator must preserve what a newer API server
sends. Only its transport is used, with its credentials and their renewal.

Guarantees: every call has a timeout and is counted by verb and code. Every failure is an `ApiError` with the status that the
server gave, or None when no answer came. An operator whose own Lease has expired by its own clock writes nothing but a Lease
(`may_write`). Not guaranteed: retries; the caller knows which calls may be repeated.
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
"""Timeout of one call in seconds."""
ACCEPT_JSON = "application/json, */*"
ACCEPT_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
LIST_PAGE_SIZE = 100
"""Objects per page of a list: a page takes some milliseconds to parse, and megabytes while it is parsed."""


class ApiError(Exception):
    """Rejection by the API server, or a missing answer.

    `retry_after_seconds`: time that the server asks to wait before the next call, if it names one.
    """

    def __init__(self, status: int | None, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after_seconds = status, reason, retry_after_seconds


@dataclass(frozen=True)
class ResourceKind:
    """Kind of Kubernetes objects, and its API path."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Return the path of one object, of all objects of a namespace, or of all objects."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        namespace_path = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{namespace_path}/{self.plural}" + (f"/{name}" if name else "")


DEPLOYMENTS = ResourceKind("apps/v1", "Deployment", "deployments")
SERVICES = ResourceKind("v1", "Service", "services")
CONFIG_MAPS = ResourceKind("v1", "ConfigMap", "configmaps")
SECRETS = ResourceKind("v1", "Secret", "secrets")
PODS = ResourceKind("v1", "Pod", "pods")
EVENTS = ResourceKind("events.k8s.io/v1", "Event", "events")
POD_DISRUPTION_BUDGETS = ResourceKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
JOBS = ResourceKind("batch/v1", "Job", "jobs")
LEASES = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")
HTTP_ROUTES = ResourceKind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
SPECULATIVE_DEPLOYMENTS = ResourceKind("aerie.dev/v1alpha1", "SpeculativeDeployment", "speculativedeployments")

CHILD_KINDS = (DEPLOYMENTS, SERVICES, POD_DISRUPTION_BUDGETS, JOBS, CONFIG_MAPS, HTTP_ROUTES)
"""Kinds of the objects that Aerie creates for a resource."""
RESOURCE_KIND_BY_NAME = {kind.kind: kind for kind in (*CHILD_KINDS, SPECULATIVE_DEPLOYMENTS, PODS, EVENTS, LEASES, SECRETS)}

RecordApiCall = Callable[[str, str, float], None]
"""Callback for each call: verb, status code or error, duration in seconds."""
PageErrorHandler = Callable[[ApiError], Awaitable[None]]
"""Handler of a page that could not be listed: it returns when the page is to be retried, and raises the error otherwise."""


async def _raise_page_error(error: ApiError) -> None:
    raise error


class Cluster:
    """Connection to the API server. The caller has to close it."""

    def __init__(self, client: ApiClient, record_call: RecordApiCall = lambda *_: None) -> None:
        self._client, self._record_call = client, record_call
        self.may_write: Callable[[], bool] = lambda: True
        """Returns True while this operator is the leader by its own clock.

        After a stall another one may be, unnoticed by this one.
        """
        self.namespace = "default"
        """Namespace of the kubeconfig's context."""
        self._last_response_date = ("", 0.0)
        """Date header of the latest answer, and the monotonic time at which it arrived."""

    @classmethod
    async def connect(
        cls,
        record_call: RecordApiCall = lambda *_: None,
    ) -> Cluster:
        """Connect with the service account of the pod, or outside of a cluster with the kubeconfig. Raises ConnectError."""
        client, namespace = await kubeconfig.create_api_client()
        cluster = cls(client, record_call)
        cluster.namespace = namespace
        return cluster

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        """Return the object, or None when there is none."""
        try:
            item: ObjectDict = await self.request("GET", kind.path(namespace, name))
            return item
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def get_metadata(self, kind: ResourceKind, namespace: str | None, name: str) -> ObjectDict | None:
        """Return the object's metadata, or None when there is no such object. The rest of the object is not transferred."""
        try:
            item: ObjectDict = await self.request("GET", kind.path(namespace, name), accept=ACCEPT_METADATA_ONLY)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        metadata: ObjectDict = item["metadata"]
        return metadata

    async def list_pages(
        self, kind: ResourceKind, namespace: str | None, selector: str = "", on_page_error: PageErrorHandler = _raise_page_error
    ) -> AsyncIterator[tuple[list[ObjectDict], str | None]]:
        """Yield the pages of a list, so that a long list does not block everything else while it is read.

        Each page comes with the version of the whole list, or None where the cluster does not know the kind. Raises ApiError 410
        when the list has taken so long that the server no longer has that version.
        """
        selector_query = [("labelSelector", selector)] if selector else []
        continue_token = ""
        while True:
            query = [*selector_query, ("limit", str(LIST_PAGE_SIZE)), *([("continue", continue_token)] if continue_token else [])]
            try:
                page = await self.request("GET", kind.path(namespace), query)
            except ApiError as error:
                if error.status == 404:
                    yield [], None
                    return
                await on_page_error(error)
                continue
            # Items of a list lack the fields that the list has once for all of them.
            yield (
                [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page["items"]],
                page["metadata"]["resourceVersion"],
            )
            continue_token = page["metadata"].get("continue") or ""
            if not continue_token:
                return

    async def apply(self, desired: ObjectDict, *, uid: str | None) -> ObjectDict:
        """Apply the object on the server side, as the owner of exactly its fields.

        `uid`: the uid of our existing object. Raises ApiError 409 when another object has its name by now. None when we know of
        no object: it is created. If somebody else has created one of that name meanwhile, no field of it is taken over (ApiError
        409).
        """
        kind = RESOURCE_KIND_BY_NAME[desired["kind"]]
        path = kind.path(desired["metadata"]["namespace"], desired["metadata"]["name"])
        query = [("fieldManager", FIELD_MANAGER), ("force", "false" if uid is None else "true")]
        body = desired if uid is None else {**desired, "metadata": {**desired["metadata"], "uid": uid}}
        applied: ObjectDict = await self.request("PATCH", path, query, body, "application/apply-patch+yaml")
        return applied

    async def merge_patch(self, target: ObjectDict, changes: ObjectDict) -> None:
        """Change fields of the object, whoever owns them: maps are merged, lists and values are replaced (RFC 7386)."""
        kind = RESOURCE_KIND_BY_NAME[target["kind"]]
        path = kind.path(target["metadata"]["namespace"], target["metadata"]["name"])
        await self.request("PATCH", path, [("fieldManager", FIELD_MANAGER)], changes, "application/merge-patch+json")

    async def replace_status(self, resource: ObjectDict, status: ObjectDict) -> ObjectDict:
        """Write the status of the resource on the version that was read. Raises ApiError 409 when it has changed since."""
        kind = RESOURCE_KIND_BY_NAME[resource["kind"]]
        path = kind.path(resource["metadata"]["namespace"], resource["metadata"]["name"])
        # A merge patch would leave removed fields. A patch that sets the whole status as one value does not.
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": resource["metadata"]["resourceVersion"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        query = [("fieldManager", FIELD_MANAGER)]
        try:
            written: ObjectDict = await self.request("PATCH", f"{path}/status", query, patch, "application/json-patch+json")
            return written
        except ApiError as error:
            if error.status == 422 and "/metadata/resourceVersion" in str(error):  # the patch's own test
                raise ApiError(409, "Conflict", "the resource has changed since it was read") from error
            raise

    async def create(self, desired: ObjectDict) -> ObjectDict:
        """Create the object, and return it as created."""
        kind = RESOURCE_KIND_BY_NAME[desired["kind"]]
        created: ObjectDict = await self.request("POST", kind.path(desired["metadata"]["namespace"]), [], desired)
        return created

    async def replace(self, desired: ObjectDict) -> ObjectDict:
        """Replace the object, and return the new one. With a resourceVersion, it is replaced only if it has not changed."""
        kind = RESOURCE_KIND_BY_NAME[desired["kind"]]
        path = kind.path(desired["metadata"]["namespace"], desired["metadata"]["name"])
        replaced: ObjectDict = await self.request("PUT", path, [], desired)
        return replaced

    async def delete(self, kind: ResourceKind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid, and in the background the objects that it owns. A missing object is no error."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self.request("DELETE", kind.path(namespace, name), [], body)
        except ApiError as error:
            if error.status == 404:
                return
            live = await self.get(kind, namespace, name) if error.status == 409 else None
            if error.status != 409 or (live is not None and live["metadata"]["uid"] == uid):
                raise  # else another object has the name by now

    async def read_log(self, namespace: str, pod: str, container: str, *, previous: bool, lines: int) -> str:
        """Return the last lines of a container's log, or of the log of its previous run."""
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
        """Send one request, and return the object in its answer. Raises ApiError."""
        raw = await self._request_raw(verb, path, query or [], body, content_type, timeout_seconds, accept)
        document = _parse_object(raw.decode(errors="replace"))
        if document is None:
            raise ApiError(200, "NoObject", f"the response to {verb} {path} is not a Kubernetes object: {_PROXY_HINT}")
        return document

    def server_time(self) -> tuple[datetime, float] | None:
        """Return the API server's time in its last answer and the monotonic time of its arrival; None when it gave none."""
        try:
            date = email.utils.parsedate_to_datetime(self._last_response_date[0])
        except ValueError:
            return None
        return None if date.tzinfo is None else (date, self._last_response_date[1])

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
            raise ApiError(None, "Fenced", "the Lease has expired by this operator's own clock, so nothing is written")
        started, code = time.monotonic(), "none"
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
            response = await self._client.call_api(method, url, headers, data, fields, _request_timeout=timeout_seconds)
            raw: bytes = await response.response.read()
            code = str(response.status)
            self._last_response_date = response.response.headers.get("Date", ""), time.monotonic()
            if response.status >= 400:
                raise _build_api_error(response.status, raw, response.response.headers)
            return raw
        except ApiException as error:
            code = str(error.status)
            raise _build_api_error(int(error.status or 0), error.body, error.headers) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            code = type(error).__name__
            raise ApiError(None, code, f"the API server did not answer {verb} {path}: {str(error) or code}") from error
        finally:
            self._record_call(verb, code, time.monotonic() - started)


def _build_api_error(status: int, body: str | bytes | None, headers: Mapping[str, str] | None) -> ApiError:
    text = body.decode(errors="replace") if isinstance(body, bytes) else (body or "")
    status_object = _parse_object(text) or {}
    retry_after = (headers or {}).get("Retry-After") or ""
    seconds = float(retry_after) if retry_after.isdecimal() else None  # Kubernetes writes no dates
    return ApiError(
        status,
        str(status_object.get("reason") or status),
        str(status_object.get("message") or _describe_non_json_body(text)),
        seconds,
    )


_PROXY_HINT = "there may be a proxy in between, or the address is not that of an API server"


def _describe_non_json_body(text: str) -> str:
    """Return a message for an answer that is not an object."""
    line = " ".join(text.split())
    return _PROXY_HINT if not line or line.startswith("<") else line[:500]


def _parse_object(text: str) -> ObjectDict | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
