"""The Secret with the token of a resource's pods: before the pods, once, and of no consequence for anything else."""

from __future__ import annotations

from aerie.controller.kubernetes.client import ApiError
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import Operator, Server, get_condition, start_settled_operator

DEFAULT: dict[str, object] = {}
KEY_SECRET, TOKEN_SECRET = "aerie-drafter-key", "chat-aerie-drafter-token"


async def start(server: Server) -> Operator:
    """Return a settled operator of a resource whose pods have the plugin."""
    server.edit(rollout=DEFAULT)
    operator = Operator(server)
    await operator.settle()
    return operator


def count_posts(server: Server) -> int:
    return sum(call == f"POST Secret {TOKEN_SECRET}" for call in server.calls)


def test_secret_is_there_before_the_pods_and_is_not_written_again(run: Run) -> None:
    async def work() -> None:
        server = Server()
        operator = await start(server)
        assert get_condition(server, "Ready")[0] == "True"
        deployment = next(call for call in server.calls if call.startswith("APPLY Deployment"))
        assert server.calls.index(f"POST Secret {TOKEN_SECRET}") < server.calls.index(deployment)
        secret, resource = server.objects["Secret", TOKEN_SECRET], server.objects["SpeculativeDeployment", "chat"]
        assert secret["metadata"]["ownerReferences"][0]["uid"] == resource["metadata"]["uid"]
        server.edit(rollout=DEFAULT, replicas=3)
        await operator.settle()
        assert count_posts(server) == 1
        assert [call for call in server.calls if call.startswith("GET Secret")] == [f"GET Secret {KEY_SECRET}"]

    run(work())


def test_restarted_operator_writes_with_the_next_pods_only(run: Run) -> None:
    async def work() -> None:
        server = Server()
        await start(server)
        token = server.objects["Secret", TOKEN_SECRET]["stringData"]
        server.calls.clear()
        restarted = Operator(server)
        await restarted.settle()
        assert server.writes == []
        del server.objects["Secret", TOKEN_SECRET]
        server.edit(rollout=DEFAULT, replicas=3)
        await restarted.settle()
        assert (count_posts(server), server.objects["Secret", TOKEN_SECRET]["stringData"]) == (1, token)

    run(work())


def test_without_the_plugin_there_is_no_secret(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        assert not any("Secret" in call for call in operator.server.calls)

    run(work())


def test_missing_permission_stops_nothing(run: Run) -> None:
    async def work() -> None:
        for name in (KEY_SECRET, TOKEN_SECRET):
            server = Server()
            server.create_errors[name] = ApiError(403, "Forbidden", f'secrets "{name}" is forbidden')
            await start(server)
            assert ("Secret", TOKEN_SECRET) not in server.objects
            assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "Ready"
            assert get_condition(server, "Degraded")[0] == "False"

    run(work())
