"""What the client makes of the API server's answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient

from aerie.controller.client import LEASES, SERVICES, ApiError, Cluster


class Answering(Cluster):
    """A cluster in which a deletion is answered with `code`, and there is an object with this uid, or none."""

    def __init__(self, code: int, uid: str | None) -> None:
        super().__init__(cast("ApiClient", None))
        self.code, self.uid = code, uid

    async def call(self, verb: str, *_: Any, **__: Any) -> Any:
        if verb == "DELETE":
            raise ApiError(self.code, "Refused", "no")
        if self.uid is None:
            raise ApiError(404, "NotFound", "none")
        return {"metadata": {"uid": self.uid}}


@pytest.mark.parametrize(("code", "uid"), [(404, None), (409, None), (409, "another")])
def test_what_is_gone_is_deleted(code: int, uid: str | None) -> None:
    asyncio.run(Answering(code, uid).delete(SERVICES, "a", "chat", "ours"))


@pytest.mark.parametrize(("code", "uid"), [(409, "ours"), (403, "ours"), (500, None)])
def test_what_is_still_there_is_not(code: int, uid: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(Answering(code, uid).delete(SERVICES, "a", "chat", "ours"))
    assert caught.value.status == code


def test_nothing_but_a_lease_is_written_by_an_operator_whose_lease_has_run_out() -> None:
    async def work() -> None:
        cluster = Cluster(cast("ApiClient", Unreachable()))
        cluster.may_write = lambda: False
        for verb, path in (("PATCH", "/api/v1/namespaces/a/services/b"), ("DELETE", "/api/v1/x"), ("POST", "/api/v1/events")):
            with pytest.raises(ApiError, match="the Lease has run out") as caught:
                await cluster.call(verb, path)
            assert caught.value.status is None
        for verb, path in (("GET", "/api/v1/services"), ("PUT", LEASES.path("aerie", "operator"))):
            with pytest.raises(ApiError, match="did not answer"):
                await cluster.call(verb, path)

    asyncio.run(work())


class Unreachable:
    """Whatever is asked of it, no answer comes."""

    async def param_serialize(self, **_: Any) -> None:
        raise OSError("nobody is there")
