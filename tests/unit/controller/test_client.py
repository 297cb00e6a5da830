"""Responses of the API server as the client interprets them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from aerie.controller.kubernetes.client import LEASES, SERVICES, ApiError, Cluster

from .served import serve_http


class DeletionCluster(Cluster):
    """A cluster that responds to a deletion with `code` and has an object with this uid, or none."""

    def __init__(self, code: int, uid: str | None) -> None:
        super().__init__(cast("ApiClient", None))
        self.code, self.uid = code, uid

    async def request(self, verb: str, *_: Any, **__: Any) -> Any:
        if verb == "DELETE":
            raise ApiError(self.code, "Refused", "no")
        if self.uid is None:
            raise ApiError(404, "NotFound", "none")
        return {"metadata": {"uid": self.uid}}


@pytest.mark.parametrize(("code", "uid"), [(404, None), (409, None), (409, "another")])
def test_deletion_of_a_missing_object_succeeds(code: int, uid: str | None) -> None:
    asyncio.run(DeletionCluster(code, uid).delete(SERVICES, "a", "chat", "ours"))


@pytest.mark.parametrize(("code", "uid"), [(409, "ours"), (403, "ours"), (500, None)])
def test_deletion_of_an_existing_object_fails(code: int, uid: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(DeletionCluster(code, uid).delete(SERVICES, "a", "chat", "ours"))
    assert caught.value.status == code


@pytest.mark.parametrize(("headers", "seconds"), [({"Retry-After": "7"}, 7.0), ({}, None), ({"Retry-After": "tomorrow"}, None)])
def test_retry_after_header_is_read_from_a_rejection(headers: dict[str, str], seconds: float | None) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"reason": "TooManyRequests", "message": "later"}, status=429, headers=headers)

    async def work() -> None:
        async with serve_http("GET", "/api/v1/services", busy) as address:
            cluster = Cluster(ApiClient(Configuration(host=address)))
            try:
                with pytest.raises(ApiError) as caught:
                    await cluster.request("GET", SERVICES.path(None))
            finally:
                await cluster.close()
        assert (caught.value.status, caught.value.retry_after_seconds) == (429, seconds)

    asyncio.run(work())


def test_operator_with_an_expired_lease_writes_only_leases() -> None:
    async def work() -> None:
        cluster = Cluster(cast("ApiClient", Unreachable()))
        cluster.may_write = lambda: False
        for verb, path in (("PATCH", "/api/v1/namespaces/a/services/b"), ("DELETE", "/api/v1/x"), ("POST", "/api/v1/events")):
            with pytest.raises(ApiError, match="the Lease has expired") as caught:
                await cluster.request(verb, path)
            assert caught.value.status is None
        for verb, path in (("GET", "/api/v1/services"), ("PUT", LEASES.path("aerie", "operator"))):
            with pytest.raises(ApiError, match="did not answer"):
                await cluster.request(verb, path)

    asyncio.run(work())


class Unreachable:
    """An API client whose requests never get a response."""

    async def param_serialize(self, **_: Any) -> None:
        raise OSError("nobody is there")


@pytest.mark.parametrize(
    ("header", "date"),
    [
        ("Sat, 21 Nov 2026 12:00:00 GMT", datetime(2026, 11, 21, 12, tzinfo=UTC)),
        ("Sat, 21 Nov 2026 12:00:00", None),
        ("tomorrow", None),
        ("", None),
    ],
)
def test_server_time_is_read_from_the_date_header(header: str, date: datetime | None) -> None:
    async def dated(_: web.Request) -> web.Response:
        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}}, headers={"Date": header})

    async def work() -> None:
        async with serve_http("GET", "/api/v1/services", dated) as address:
            cluster = Cluster(ApiClient(Configuration(host=address)))
            assert cluster.server_time() is None
            try:
                await cluster.request("GET", SERVICES.path(None))
            finally:
                await cluster.close()
        server_time = cluster.server_time()
        assert (server_time and server_time[0]) == date

    asyncio.run(work())
