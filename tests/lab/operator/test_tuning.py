"""Tuning on running engines, whose costs are such that K = 3 is wrong: three resources side by side, under one operator.

    load     mode Auto, requests through the gateway: the load doubles, and a setting that drafts less is proven and kept; then
             the load is as before, and nothing that is not proven follows
    shown    mode Recommend, engines that ask themselves, at a load at which K = 3 loses: it is told, and nothing happens
    planted  mode Auto, a drafter that takes far more time than the tuner can know from K = 3: what it recommends is taken back

Nothing here waits for what "should be over by now": each wait is for a state, and has minutes. Steps take tens of milliseconds,
so that what a busy machine adds to each does not bring an engine near to its limit, where nothing could be told of it.
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
from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE
from aerie_lab.engine.background import BackgroundTraffic
from aerie_lab.engine.traffic import TrafficTarget
from aerie_lab.engine.workload import LengthDistribution, TrafficClass
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.resources import resource
from tests.lab.operator.test_canary import answers

pytestmark = pytest.mark.timeout(1800)
Object = dict[str, Any]
PATIENCE = 900.0
"""Seconds for one wait. A minute or two is usual."""
RATE = 7.8
"""Requests a second for two engines: at K = 3 they have three at a time, and with twice the rate ten."""
ANSWER = LengthDistribution(45, 0.3)
KINDS = (TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(30, 0.3), ANSWER),)


def simulator(formula: Object, rates: list[float], requests_per_second: float = 0.0) -> str:
    """Return the simulator's options; each engine sends itself `requests_per_second`, of 45 tokens each."""
    told = {
        "startup_seconds": 0.5,
        "own_requests_per_second": requests_per_second,
        "step_time": {"formula": formula},
        "acceptance": {"chat": {"rates": rates}},
    }
    return json.dumps(told | {"apply_drafter_effect": False})


COSTLY_TOKENS = {"base_seconds": 1e-2, "seconds_per_token": 1.25e-3}
"""Each verified token costs: with many requests at a time, drafts that are seldom accepted do harm."""
FEW, FEWER = [0.6, 0.4, 0.28], [0.45, 0.2, 0.09]
COSTLY_DRAFTS = {"base_seconds": 1e-3, "seconds_per_token": 0.0, "seconds_per_draft_token": 6.4e-3}
"""A step of the drafter costs six times one of the target, which no metric at one K tells from a costly target."""
MANY = [0.94, 0.8836, 0.8306]


def tuned(name: str, mode: str, engine: str, *, cooldown: str = "0s", **more: Any) -> Object:
    """A resource whose setting is decided on every ten seconds. Its canary takes the place of a stable pod, so that each pod has
    as much to do as before; with two of them none is spared for exploring."""
    made = resource(
        name,
        simulator=engine,
        replicas=2,
        canary={"capacity": "Reuse", "control": "Stable"},
        analysis={"blockDuration": "4s", "maxDuration": "5m"},
        **more,
    )
    spec = made["spec"]
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
    del spec["engine"]["podTemplate"]["spec"][
        "containers"
    ]  # requests come through the gateway: pods wait until it knows, before they end
    return made


def test_settings_are_proven_or_only_shown_or_taken_back(namespace: Namespace, inside: Any) -> None:
    host = f"{namespace.name}.example"
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]}
    route = {"mode": "Gateway", "gateway": gateway}
    namespace.apply(tuned("load", "Auto", simulator(COSTLY_TOKENS, FEW), traffic=route))
    namespace.apply(tuned("shown", "Recommend", simulator(COSTLY_TOKENS, FEWER, requests_per_second=5.4)))
    namespace.apply(tuned("planted", "Auto", simulator(COSTLY_DRAFTS, MANY, requests_per_second=11), cooldown="1h"))

    def status(name: str, look: Callable[[Object], object], what: str) -> Object:
        found: Object = namespace.wait_until(
            "specdep", name, lambda item: look(item.get("status") or {}), f"{name}: {what}", timeout_seconds=PATIENCE
        )["status"]
        return found

    for name in ("load", "shown", "planted"):
        status(name, lambda s: s.get("phase") == "Ready", "it is Ready")
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: answers(url, host), "the gateway answers")
    target = TrafficTarget(url, "chat", host, stream=False, timeout_seconds=120)
    with BackgroundTraffic(target, RATE, KINDS) as traffic:
        status("load", lambda s: reason(s) in ("Optimal", "Recommended", "Trial"), "there is a first decision")
        with BackgroundTraffic(target, RATE, KINDS) as more:
            found = status("load", lambda s: trials(s) and trials(s)[0]["result"] == "Promoted", "a change is proven")
            proven = trials(found)[0]
            chosen = status("load", lambda s: s.get("phase") == "Ready" and chosen_of(s), "the proven setting serves")
            assert proven["fromSetting"] == {"mode": "Static", "numSpeculativeTokens": 3}
            assert chosen["speculation"]["applied"]["setting"] == chosen["stable"]["setting"]
            assert proven["toSetting"] != proven["fromSetting"]
            assert proven["predicted"]["estimate"] > 0
            assert 0 <= proven["measured"]["lower"] <= proven["measured"]["estimate"], "faster than the control, rounded"
            assert proven["measured"]["estimate"] > 0
            assert namespace.get("specdep", "load")["spec"]["speculation"]["numSpeculativeTokens"] == 3, "the spec is the user's"
        # Half of the load again: the next decisions are on that, and whatever they lead to is proven too.
        seen = decided_at(namespace, "load")
        wait_until(lambda: decided_at(namespace, "load") != seen, "it is decided on the load as before", timeout_seconds=PATIENCE)
        later = namespace.get("specdep", "load")["status"]
        assert all(one["result"] != "Promoted" or one["measured"]["lower"] >= 0 for one in trials(later))
    for one in (traffic, more):
        assert [outcome for outcome in one.report.outcomes if outcome.error] == []

    shown = status("shown", lambda s: reason(s) == "Recommended", "a better setting is told")
    assert shown["speculation"]["recommended"] != shown["speculation"]["current"] == {"mode": "Static", "numSpeculativeTokens": 3}
    assert shown["speculation"]["predicted"]["estimate"] > 0
    assert not {"trial", "applied", "trials"} & shown["speculation"].keys()
    assert [one["result"] for one in shown["rolloutHistory"]] == ["Promoted"], "the first revision, and no canary since"

    back = status("planted", lambda s: trials(s) and not s.get("canary"), "its trial is over")
    taken = trials(back)[0]
    assert (taken["result"], taken["toSetting"]["mode"]) == ("RolledBack", "Static")
    assert taken["toSetting"]["numSpeculativeTokens"] > 3
    assert taken["predicted"]["estimate"] > 0 > taken["measured"]["estimate"]
    assert back["stable"]["setting"] == {"mode": "Static", "numSpeculativeTokens": 3}
    assert "applied" not in back["speculation"]
    resting = status("planted", lambda s: reason(s) == "Cooldown", "nothing is tried for a while")
    assert resting["speculation"]["lastRollbackTime"] == taken["completionTime"]

    for name, told in (("load", "by tuning (spec: 3)"), ("shown", "K=3"), ("planted", "K=7")):
        command = [sys.executable, "-m", "aerie.cli", "tune", "explain", name, "-n", namespace.name]
        environment = {**os.environ, "KUBECONFIG": str(namespace.lab.kubeconfig)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        assert told in ended.stdout
    assert trials(namespace.get("specdep", "planted")["status"]) == [taken], "nothing is tried for a while"
    assert inside.end() == 0


def reason(status: Object) -> str:
    """Of the condition SpeculationTuned."""
    known = {one["type"]: one for one in status.get("conditions") or []}
    return str(known.get("SpeculationTuned", {}).get("reason", ""))


def trials(status: Object) -> list[Object]:
    """How trials have ended, the newest first."""
    return list((status.get("speculation") or {}).get("trials") or [])


def chosen_of(status: Object) -> object:
    return (status.get("speculation") or {}).get("applied")


def decided_at(namespace: Namespace, name: str) -> str:
    """When the last decision was made that is written down."""
    return str(
        namespace.get("configmap", tuning_config_map.tuning_config_map_name(name))["data"][tuning_config_map.DECISION_TIME_KEY]
    )
