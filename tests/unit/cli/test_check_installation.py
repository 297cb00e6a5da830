"""`aerie check-installation`: an operator works if its definition is served and its Lease changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aerie.cli.commands import check_installation
from aerie.controller.kubernetes.client import ApiError

RESOURCES = "/apis/aerie.dev/v1alpha1/speculativedeployments"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/aerie-system/leases/aerie"


class Api:
    """An API server with the specs of a Lease, one for each read; the last one stays."""

    def __init__(self, *leases: dict[str, Any] | None, errors: dict[str, int] | None = None) -> None:
        self.leases = list(leases)
        self.errors = errors or {}
        self.paths: list[str] = []

    async def request(self, verb: str, path: str, query: list[tuple[str, str]] | None = None) -> Any:
        assert verb == "GET"
        self.paths.append(path)
        if path in self.errors:
            raise ApiError(self.errors[path], "Rejected", f"rejected {path}")
        if path != LEASE:
            assert query == [("limit", "1")]
            return {"items": []}
        spec = self.leases.pop(0) if len(self.leases) > 1 else self.leases[0]
        if spec is None:
            raise ApiError(404, "NotFound", "no such Lease")
        return {"spec": spec}


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_installation, "_POLL_SECONDS", 0.0)


def check(api: Api, *namespaces: str) -> str | None:
    return asyncio.run(check_installation.wait_until_operator_works(api, namespaces, "aerie-system", "aerie", 0.1))


def lease(renewal: str, holder: str = "a") -> dict[str, str]:
    return {"holderIdentity": holder, "renewTime": renewal}


def test_renewed_lease_is_a_working_operator() -> None:
    api = Api(lease("1"), lease("1"), lease("2"))
    assert check(api) is None
    assert set(api.paths) == {RESOURCES, LEASE}


def test_lease_may_appear_while_the_check_waits() -> None:
    assert check(Api(None, {}, lease("1"), lease("2"))) is None


@pytest.mark.parametrize("specs", [(None,), (lease("1"),), (lease("1"), lease("2", ""))])
def test_lease_that_nobody_renews_is_a_problem(specs: tuple[dict[str, Any] | None, ...]) -> None:
    assert "No operator renews the Lease aerie-system/aerie" in str(check(Api(*specs)))


def test_resources_are_listed_in_each_namespace() -> None:
    path = "/apis/aerie.dev/v1alpha1/namespaces/team-b/speculativedeployments"
    api = Api(lease("1"), lease("2"), errors={path: 403})
    assert check(api, "team-a", "team-b") == f"The API server rejects what the operator needs: rejected {path}"
    assert path.replace("team-b", "team-a") in api.paths
    assert LEASE not in api.paths


def test_definition_that_is_not_served_is_a_problem() -> None:
    assert "rejects what the operator needs" in str(check(Api(lease("1"), lease("2"), errors={RESOURCES: 404})))
