"""Tuning on running engines, for which K = 3 is wrong: three resources side by side, under one operator.

    load     mode Auto, requests through the gateway: the load doubles, and a setting with fewer drafts is proven and applied;
             then the load decreases again, and no unproven setting follows
    shown    mode Recommend, engines with own requests, at a load at which K = 3 loses: a recommendation, and no trial
    planted  mode Auto, a drafter that takes far more time than the tuner can measure at K = 3: its recommendation is rolled back

Each wait is for a state, with minutes of time. Steps take tens of milliseconds, so that the delay on a busy machine does not
bring an engine near to its limit, where nothing can be measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aerie.manifests import tuning_config_map
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.engine.load_generation.workload import LengthDistribution, TrafficClass
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.resources import resource
from tests.lab.operator.test_canary import gateway_answers

pytestmark = pytest.mark.timeout(1800)
Object = dict[str, Any]
TIMEOUT_SECONDS = 900.0
"""Maximum for one wait. A minute or two is usual."""
RATE = 7.8
"""Requests a second for two engines: at K = 3 they have three at a time, and with twice the rate ten."""
ANSWER = LengthDistribution(45, 0.3)
TRAFFIC_CLASSES = (TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(30, 0.3), ANSWER),)


def simulator(formula: Object, rates: list[float], requests_per_second: float = 0.0) -> str:
    """Return the simulator's options; each engine sends itself `requests_per_second`, of 45 tokens each."""
    options = {
        "startup_seconds": 0.5,
        "own_requests_per_second": requests_per_second,
        "step_time": {"formula": formula},
        "acceptance": {"chat": {"rates": rates}},
    }
    return json.dumps(options | {"apply_drafter_effect": False})


COSTLY_TOKENS = {"base_seconds": 1e-2, "seconds_per_token": 1.25e-3}
"""Each verified token costs: with many requests at a time, drafts that are seldom accepted do harm."""
FEW, FEWER = [0.6, 0.4, 0.28], [0.45, 0.2, 0.09]
COSTLY_DRAFTS = {"base_seconds": 1e-3, "seconds_per_token": 0.0, "seconds_per_draft_token": 6.4e-3}
"""A step of the drafter costs six times one of the target, which no metric at one K tells from a costly target."""
MANY = [0.94, 0.8836, 0.8306]


def tuned_resource(name: str, mode: str, engine: str, *, cooldown: str = "0s", **rollout_fields: Any) -> Object:
    """Return a resource whose tuner decides every ten seconds. Its canary takes the place of a stable pod, so that the load per
    pod stays the same; with two pods none is spared for explorations."""
    document = resource(
        name,
        simulator=engine,
        replicas=2,
        canary={"capacity": "Reuse", "control": "Stable"},
        analysis={"blockDuration": "4s", "maxDuration": "5m"},
        **rollout_fields,
    )
    spec = document["spec"]
    spec["speculation"]["tuning"] = {
        "mode": mode,
        "decisionInterval": "10s",
        "cooldownDuration": cooldown,
        "historyWindow": "90s",
    }
    spec["model"]["servedName"] = "chat"
    spec["metrics"]["scrapeInterval"] = "2s"
    spec["engine"]["args"] = ["--enforce-eager"]
    spec["engine"]["env"].append({"name": "VLLM_USE_V2_MODEL_RUNNER", "value": "0"})  # so that no schedule is a candidate
    del spec["engine"]["podTemplate"]["spec"]["containers"]  # requests come through the gateway: pods drain before they end
    return document


def test_tuned_settings_are_applied_recommended_or_rolled_back(namespace: Namespace, inner_operator: Any) -> None:
    host = f"{namespace.name}.example"
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]}
    route = {"mode": "Gateway", "gateway": gateway}
    namespace.apply(tuned_resource("load", "Auto", simulator(COSTLY_TOKENS, FEW), traffic=route))
    namespace.apply(tuned_resource("shown", "Recommend", simulator(COSTLY_TOKENS, FEWER, requests_per_second=5.4)))
    namespace.apply(tuned_resource("planted", "Auto", simulator(COSTLY_DRAFTS, MANY, requests_per_second=11), cooldown="1h"))

    def wait_for_condition(name: str, condition: Callable[[Object], object], description: str) -> Object:
        status: Object = namespace.wait_until(
            "specdep",
            name,
            lambda item: condition(item.get("status") or {}),
            f"{name}: {description}",
            timeout_seconds=TIMEOUT_SECONDS,
        )["status"]
        return status

    for name in ("load", "shown", "planted"):
        wait_for_condition(name, lambda s: s.get("phase") == "Ready", "it is Ready")
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: gateway_answers(url, host), "the gateway answers")
    target = TrafficTarget(url, "chat", host, stream=False, timeout_seconds=120)
    with BackgroundTraffic(target, RATE, TRAFFIC_CLASSES) as traffic:
        wait_for_condition("load", lambda s: reason(s) in ("Optimal", "Recommended", "Trial"), "there is a first decision")
        with BackgroundTraffic(target, RATE, TRAFFIC_CLASSES) as more_traffic:
            trial_status = wait_for_condition(
                "load", lambda s: trials(s) and trials(s)[0]["result"] == "Promoted", "a change is proven"
            )
            trial = trials(trial_status)[0]
            applied_status = wait_for_condition(
                "load", lambda s: s.get("phase") == "Ready" and applied_setting(s), "the proven setting serves"
            )
            assert trial["fromSetting"] == {"mode": "Static", "numSpeculativeTokens": 3}
            assert applied_status["speculation"]["applied"]["setting"] == applied_status["stable"]["setting"]
            assert trial["toSetting"] != trial["fromSetting"]
            assert trial["predicted"]["estimate"] > 0
            assert 0 <= trial["measured"]["lower"] <= trial["measured"]["estimate"], "faster than the control, rounded"
            assert trial["measured"]["estimate"] > 0
            assert namespace.get("specdep", "load")["spec"]["speculation"]["numSpeculativeTokens"] == 3, "the spec is the user's"
        # Half of the load again: the next decisions depend on it, and their settings are proven, too.
        first_decision = decided_at(namespace, "load")
        wait_until(
            lambda: decided_at(namespace, "load") != first_decision,
            "there is a decision on the previous load",
            timeout_seconds=TIMEOUT_SECONDS,
        )
        later_status = namespace.get("specdep", "load")["status"]
        assert all(record["result"] != "Promoted" or record["measured"]["lower"] >= 0 for record in trials(later_status))
    for background in (traffic, more_traffic):
        assert [outcome for outcome in background.report.outcomes if outcome.error] == []

    recommended_status = wait_for_condition("shown", lambda s: reason(s) == "Recommended", "a better setting is recommended")
    assert (
        recommended_status["speculation"]["recommended"]
        != recommended_status["speculation"]["current"]
        == {"mode": "Static", "numSpeculativeTokens": 3}
    )
    assert recommended_status["speculation"]["predicted"]["estimate"] > 0
    assert not {"trial", "applied", "trials"} & recommended_status["speculation"].keys()
    assert [record["result"] for record in recommended_status["rolloutHistory"]] == ["Promoted"], (
        "the first revision, and no canary since"
    )

    rolled_back_status = wait_for_condition("planted", lambda s: trials(s) and not s.get("canary"), "its trial is over")
    rolled_back_trial = trials(rolled_back_status)[0]
    assert (rolled_back_trial["result"], rolled_back_trial["toSetting"]["mode"]) == ("RolledBack", "Static")
    assert rolled_back_trial["toSetting"]["numSpeculativeTokens"] > 3
    assert rolled_back_trial["predicted"]["estimate"] > 0 > rolled_back_trial["measured"]["estimate"]
    assert rolled_back_status["stable"]["setting"] == {"mode": "Static", "numSpeculativeTokens": 3}
    assert "applied" not in rolled_back_status["speculation"]
    cooldown_status = wait_for_condition("planted", lambda s: reason(s) == "Cooldown", "nothing is tried for a while")
    assert cooldown_status["speculation"]["lastRollbackTime"] == rolled_back_trial["completionTime"]

    for name, text in (("load", "by tuning; the spec has K=3"), ("shown", "K=3"), ("planted", "1 trial in the history")):
        command = [sys.executable, "-m", "aerie.cli", "explain", name, "-n", namespace.name]
        environment = {**os.environ, "KUBECONFIG": str(namespace.lab.kubeconfig)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        assert text in ended.stdout
    assert trials(namespace.get("specdep", "planted")["status"]) == [rolled_back_trial], "nothing is tried for a while"
    assert inner_operator.end() == 0


def reason(status: Object) -> str:
    """Return the reason of the condition SpeculationTuned."""
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    return str(conditions.get("SpeculationTuned", {}).get("reason", ""))


def trials(status: Object) -> list[Object]:
    """Return the ended trials, the newest first."""
    return list((status.get("speculation") or {}).get("trials") or [])


def applied_setting(status: Object) -> object:
    return (status.get("speculation") or {}).get("applied")


def decided_at(namespace: Namespace, name: str) -> str:
    """Return the time of the last stored decision."""
    return str(
        namespace.get("configmap", tuning_config_map.tuning_config_map_name(name))["data"][tuning_config_map.DECISION_TIME_KEY]
    )
