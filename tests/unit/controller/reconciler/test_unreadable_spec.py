"""A spec that this release cannot read: stable pods are maintained, and nothing else is created."""

from __future__ import annotations

from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, Operator, Server, get_condition, start_settled_operator

UNREADABLE_SPEC = {"engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": "-x"}}}}


def test_serving_pods_with_an_unreadable_spec_are_maintained(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server, gauge = operator.server, operator.reconciler.metrics.registry.get_sample_value
        before = {key: item["spec"] for key, item in server.objects.items() if key[0] in ("Deployment", "Service")}
        server.edit(**UNREADABLE_SPEC, replicas=3)
        for kind, name in before:
            server.remove(kind, name)
        await operator.settle()
        after = {key: server.objects[key]["spec"] for key in before}
        assert after == {key: {**spec, **({"replicas": 3} if key[0] == "Deployment" else {})} for key, spec in before.items()}
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "UnreadableSpec")
        assert "spec.engine.resources.limits.nvidia.com/gpu is '-x'" in message
        assert gauge("aerie_resources_held", {"reason": "UnreadableSpec"}) == 1
        server.calls.clear()
        for _ in range(3):
            operator.deliver_events()
            await operator.reconciler.reconcile(CHAT)
        assert server.calls == [], "and nothing is written twice"
        server.edit(engine={"image": "vllm/vllm-openai:v0.33.0"})
        await operator.settle()
        assert get_condition(server, "Degraded")[0] == "False"
        assert gauge("aerie_resources_held", {"reason": "UnreadableSpec"}) == 0
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "Ready"

    run(work())


def test_unreadable_spec_without_stable_pods_is_only_reported(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit(**UNREADABLE_SPEC)
        operator = Operator(server)
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "UnreadableSpec")
        assert "spec.engine.resources.limits" in message

    run(work())
