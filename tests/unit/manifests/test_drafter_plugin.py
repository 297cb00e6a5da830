"""Delivery of the plugin to engine pods: what is added to a pod, what of the user's is kept, and why a pod does not get it."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.engine.command_line import validate_user_arguments
from aerie.engine.releases import Version
from aerie.manifests import naming, plugin_config_map, preflight_environment
from aerie.manifests.pod import drafter_plugin, engine_pod
from aerie.manifests.pod.drafter_plugin import PluginAdditions, PluginObstacle
from aerie.rollout.revision.desired import DesiredRevision, resolve_desired_revision
from aerie_vllm.settings import Settings
from tests.golden import Messages

DRAFT = {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 3}
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
ON_CLAIM = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}}
ON_HUB = {"source": {"huggingFace": {"repo": "me/eagle3", "revision": COMMIT}}}
MAX_OBJECT_BYTES = 1024 * 1024
"""What the API server accepts as data of a ConfigMap."""


def resource(engine: Mapping[str, Any] | None = None, mode: str = "Auto", **spec: Any) -> SpeculativeDeployment:
    document = {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": {"huggingFace": {"repo": "meta-llama/Llama-3.1-8B-Instruct", "revision": COMMIT}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0", **(engine or {})},
            "drafter": ON_CLAIM,
            "rollout": {"inPlace": {"mode": mode}},
            **spec,
        },
    }
    return SpeculativeDeployment.from_dict(document, unknown_fields="forbid")


def plan(
    subject: SpeculativeDeployment,
    version: str = "0.33.0",
    speculative_config: dict[str, Any] | None = DRAFT,
    revision: str = "r1",
) -> PluginAdditions | PluginObstacle:
    template = engine_pod.build_pod_template(subject, speculative_config)
    before = copy.deepcopy(template)
    result = drafter_plugin.plan_plugin(subject, revision, Version.parse(version), template)
    assert template == before
    return result


def build_pod(subject: SpeculativeDeployment, revision: str = "r1") -> dict[str, Any]:
    """Return the pod's template with the plugin."""
    additions = plan(subject, revision=revision)
    assert isinstance(additions, PluginAdditions), additions
    return additions.add_to(engine_pod.build_pod_template(subject, DRAFT))


def engine(template: Mapping[str, Any]) -> dict[str, Any]:
    (container,) = [c for c in template["spec"]["containers"] if c["name"] == naming.ENGINE_CONTAINER]
    return dict(container)


def environment(template: Mapping[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in engine(template)["env"]}


def pod_template(**container: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": "engine", **container}]}}}


def test_pod_has_the_plugin_and_what_it_reads() -> None:
    template = build_pod(resource(mode="Required"))
    assert engine(template)["args"][-4:] == [
        "--middleware",
        "aerie_vllm.endpoint.DrafterEndpoint",
        "--worker-extension-cls",
        "aerie_vllm.worker.DrafterWorker",
    ]
    variables = environment(template)
    assert variables["PYTHONPATH"] == "/aerie/plugin"
    assert "VLLM_PLUGINS" not in variables, "unset, vLLM loads every plugin"
    settings = Settings.from_environment({name: value for name, value in variables.items() if value})
    assert settings is not None
    mounts = {mount["mountPath"]: mount for mount in engine(template)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert all(mounts[path]["readOnly"] for path in ("/aerie/plugin", "/aerie/token", "/aerie/expected", "/models/drafters"))
    assert settings.token_file == Path("/aerie/token/token")
    assert volumes[mounts["/aerie/token"]["name"]]["secret"] == {"secretName": "chat-aerie-drafter-token", "optional": True}
    assert settings.expected == Path("/aerie/expected/expected.json")
    expected = {"name": "chat-r1-drafter", "optional": True}
    assert volumes[mounts["/aerie/expected"]["name"]]["configMap"] == expected
    # The claim as a whole, because the drafter's own mount has one folder of it; and the Hub's cache, for a later drafter.
    assert settings.roots == (Path("/models/drafters"), Path("/cache/huggingface"))
    assert volumes[mounts["/models/drafters"]["name"]]["persistentVolumeClaim"]["claimName"] == "models"
    assert "subPath" not in mounts["/models/drafters"]
    assert mounts["/models/drafter"]["subPath"] == "eagle3"


def test_readiness_alone_asks_the_plugin() -> None:
    subject = resource(engine=pod_template(readinessProbe={"periodSeconds": 2}))
    before, after = engine(engine_pod.build_pod_template(subject, DRAFT)), engine(build_pod(subject))
    probe = {**before["readinessProbe"], "httpGet": {"path": "/aerie/ready", "port": "http"}}
    assert (after["readinessProbe"], probe["periodSeconds"]) == (probe, 2)
    assert [after[name] for name in ("startupProbe", "livenessProbe")] == [
        before[name] for name in ("startupProbe", "livenessProbe")
    ]


def test_the_rest_of_the_pod_stays() -> None:
    subject = resource(
        engine={"podTemplate": {"spec": {"containers": [{"name": "log", "image": "a"}], "priorityClassName": "p"}}}
    )
    before, after = engine_pod.build_pod_template(subject, DRAFT), build_pod(subject)
    assert after["metadata"] == before["metadata"]
    assert {**after["spec"], "containers": None, "volumes": None} == {**before["spec"], "containers": None, "volumes": None}
    assert after["spec"]["volumes"][: len(before["spec"]["volumes"])] == before["spec"]["volumes"]
    assert after["spec"]["containers"][1:] == before["spec"]["containers"][1:]
    extended = {"args", "env", "volumeMounts", "readinessProbe"}
    assert {k: v for k, v in engine(after).items() if k not in extended} == {
        k: v for k, v in engine(before).items() if k not in extended
    }
    for name in ("args", "env", "volumeMounts"):
        assert engine(after)[name][: len(engine(before)[name])] == engine(before)[name]


def test_lists_of_the_user_are_continued() -> None:
    subject = resource(
        engine={
            "args": ["--middleware=mine.Auth"],
            "env": [
                {"name": "PYTHONPATH", "value": "/mine:/other"},
                {"name": "VLLM_PLUGINS", "value": "lora_resolver"},
                {"name": "LAST", "value": "$(PYTHONPATH)"},
            ],
        }
    )
    template = build_pod(subject)
    variables = environment(template)
    assert variables["PYTHONPATH"] == "/mine:/other:/aerie/plugin"
    assert variables["VLLM_PLUGINS"] == "lora_resolver,aerie_vllm"
    names = [variable["name"] for variable in engine(template)["env"]]
    assert len(names) == len(set(names))
    assert names.index("PYTHONPATH") < names.index("LAST"), "a variable refers to variables before it"
    assert [value for value in engine(template)["args"] if "middleware" in value] == ["--middleware=mine.Auth", "--middleware"]
    # podTemplate's variables count as well: it is merged last.
    merged = resource(
        engine=pod_template(env=[{"name": "PYTHONPATH", "value": "/merged"}, {"name": "VLLM_PLUGINS", "value": ""}])
    )
    assert environment(build_pod(merged))["PYTHONPATH"] == "/merged:/aerie/plugin"
    assert environment(build_pod(merged))["VLLM_PLUGINS"] == "aerie_vllm"


def test_drafters_of_the_hub_are_read_from_its_cache() -> None:
    template = build_pod(resource(drafter=ON_HUB))
    assert environment(template)["AERIE_DRAFTER_ROOTS"] == "/cache/huggingface"
    assert "/models/drafters" not in {mount["mountPath"] for mount in engine(template)["volumeMounts"]}
    env = [{"name": "HF_HUB_CACHE", "value": "/hub"}]
    assert (
        environment(build_pod(resource(engine={"env": env}, drafter=ON_HUB)))["AERIE_DRAFTER_ROOTS"] == "/cache/huggingface:/hub"
    )


def own_cache(**engine: Any) -> tuple[str | None, str | None]:
    variables = environment(build_pod(resource(engine=engine, drafter=ON_HUB)))
    return variables.get("AERIE_DRAFTER_OWN_CACHE"), variables.get("AERIE_DRAFTER_OWN_CACHE_BYTES")


def test_drafters_are_removed_only_from_a_cache_of_the_pods_own() -> None:
    assert own_cache() == ("/cache", None)
    assert own_cache(cache={"sizeLimit": "100Gi"}) == ("/cache", str(100 << 30))
    assert own_cache(cache={"claimName": "cache"}) == (None, None)
    assert own_cache(env=[{"name": "HF_HUB_CACHE", "value": "/hub"}]) == (None, None)
    assert own_cache(env=[{"name": "HF_HUB_CACHE", "value": "/cache/hub"}]) == ("/cache", None)


FIELD = {"valueFrom": {"secretKeyRef": {"name": "mine", "key": "a"}}}
OBSTACLES: dict[str, dict[str, Any]] = {
    "mode Off": {"mode": "Off"},
    "no drafter": {"drafter": None},
    "drafter in an image": {"drafter": {"source": {"image": {"reference": f"registry.example/eagle3@sha256:{'0' * 64}"}}}},
    "drafter in the target": {"model": ON_CLAIM},
    "worker extension": {"engine": {"args": ["--worker-extension-cls", "mine.Worker"]}},
    "worker extension, other spelling": {"engine": {"args": ["--worker_extension_cls=mine.Worker"]}},
    "worker extension, shortened": {"engine": {"args": ["--worker-ext=mine.Worker"]}},
    "API servers": {"engine": {"args": ["--api-server-count=4"]}},
    "API servers by default": {"engine": {"args": ["--data-parallel-size=2"]}},
    "pipeline": {"engine": {"args": ["-pp=2"]}},
    "Ray": {"engine": {"args": ["--distributed-executor-backend", "ray"]}},
    "an executor of the user's": {"engine": {"args": ["--distributed-executor-backend=mine.Executor"]}},
    "Ray for data parallelism": {"engine": {"args": ["-dpb=ray"]}},
    "root path of the endpoint": {"engine": {"args": ["--root-path=/aerie/"]}},
    "front end in Rust": {"engine": {"env": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}]}},
    "front end from a Secret": {"engine": {"env": [{"name": "VLLM_USE_RUST_FRONTEND", **FIELD}]}},
    "elastic": {"engine": {"args": ["--enable-elastic-ep"]}},
    "another image": {"engine": {"image": "registry.example/vllm-custom:v1", "version": "0.33.0"}},
    "PYTHONPATH from a Secret": {"engine": {"env": [{"name": "PYTHONPATH", **FIELD}]}},
    "VLLM_PLUGINS from a Secret": {"engine": {"env": [{"name": "VLLM_PLUGINS", **FIELD}]}},
    "variable of the plugin": {"engine": {"env": [{"name": "AERIE_DRAFTER_ROOTS", "value": "/"}]}},
    "cache from a Secret": {"drafter": ON_HUB, "engine": {"env": [{"name": "HF_HOME", **FIELD}]}},
    "relative cache": {"drafter": ON_HUB, "engine": {"env": [{"name": "HF_HUB_CACHE", "value": "hub"}]}},
    "volume": {"engine": {"podTemplate": {"spec": {"volumes": [{"name": "aerie-plugin", "emptyDir": {}}]}}}},
    "mount": {"engine": pod_template(volumeMounts=[{"name": "shm", "mountPath": "/aerie/plugin/"}])},
    "mount above": {"engine": pod_template(volumeMounts=[{"name": "shm", "mountPath": "/aerie"}])},
    "mount below": {"engine": pod_template(volumeMounts=[{"name": "shm", "mountPath": "/models/drafters/a"}])},
    "probe": {"engine": pod_template(readinessProbe={"httpGet": {"path": "/mine"}})},
    "several": {"mode": "Off", "engine": {"args": ["--worker-extension-cls", "mine.Worker", "--pipeline-parallel-size", "2"]}},
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles_name_the_value_and_the_fix(name: str, messages: Messages) -> None:
    obstacle = plan(resource(**OBSTACLES[name]))
    assert isinstance(obstacle, PluginObstacle)
    messages.check(name, obstacle.message)


def test_engine_that_drafts_nothing_has_no_plugin(messages: Messages) -> None:
    obstacle = plan(resource(), speculative_config=None)
    assert isinstance(obstacle, PluginObstacle)
    messages.check("no drafter", obstacle.message)


def test_plugin_needs_vllm_0_26(messages: Messages) -> None:
    assert isinstance(plan(resource(), "0.26.0"), PluginAdditions)
    for version in ("0.25.1", "0.26.0rc1"):
        assert isinstance(plan(resource(), version), PluginObstacle)
    obstacle = plan(resource(), "0.25.1")
    assert isinstance(obstacle, PluginObstacle)
    messages.check("older engine", obstacle.message)


def test_a_release_that_was_not_read_starts_without_the_plugin(messages: Messages) -> None:
    for version in ("0.33.0+cpu", "0.33.7", "0.33.1rc1"):
        assert isinstance(plan(resource(), version), PluginAdditions), version
    for version in ("0.34.0", "0.34.0rc1", "1.0.0"):
        assert isinstance(plan(resource(), version), PluginObstacle), version
    obstacle = plan(resource(mode="Required"), "0.34.0")
    assert isinstance(obstacle, PluginObstacle)
    messages.check("newer engine", obstacle.message)


@pytest.mark.parametrize("value", ["", "/image"])
def test_another_image_gets_the_plugin_if_its_pythonpath_is_stated(value: str) -> None:
    image = {"image": "registry.example/vllm-custom:v1", "version": "0.33.0", "env": [{"name": "PYTHONPATH", "value": value}]}
    assert environment(build_pod(resource(engine=image)))["PYTHONPATH"] == f"{value}:/aerie/plugin".lstrip(":")
    copied = {"image": "registry.example/vllm/vllm-openai:v0.33.0"}
    assert isinstance(plan(resource(engine=copied)), PluginAdditions)


@pytest.mark.parametrize(
    "changes",
    [
        {"args": ["--data-parallel-size=2", "--api-server-count=1"]},
        {"args": ["--worker-cls=auto"]},
        {"args": ["--tensor-parallel-size=4", "--distributed-executor-backend=mp", "--data-parallel-backend=mp"]},
        {"args": ["--api-key=a", "--root-path=/aeries", "--disable-fastapi-docs", "--enable-request-id-headers"]},
        {"env": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "0"}]},
        pod_template(command=["sh", "-c", 'ulimit -n 65536; exec vllm serve "$@"', "--"]),
    ],
)
def test_engines_that_can_change_have_no_obstacle(changes: dict[str, Any]) -> None:
    assert isinstance(plan(resource(engine=changes)), PluginAdditions)


def test_servers_that_are_not_plain_http_are_rejected_in_every_engine() -> None:
    """`plan_plugin` does not look for these flags."""
    flags = ["--config=a", "--grpc", "--headless", "--host=::", "--port=1", "--uds=/a", "--ssl-keyfile=a", "--nnodes=2"]
    assert [flag for flag in flags if not validate_user_arguments([flag])] == []


def test_the_python_front_end_may_be_set() -> None:
    assert isinstance(plan(resource(engine={"env": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "0"}]})), PluginAdditions)


def test_mode_changes_no_revision_and_mode_off_no_pod() -> None:
    def desired(**spec: Any) -> DesiredRevision:
        return resolve_desired_revision(resource(**spec))

    without = desired(rollout={})
    off, auto, required = (desired(mode=mode) for mode in ("Off", "Auto", "Required"))
    assert without.revision == off.revision == auto.revision == required.revision
    assert off.pod_template is not None
    assert plugin_config_map.find_plugin_config_map(off.pod_template) is None
    assert json.dumps(without.pod_template) == json.dumps(auto.pod_template), "Auto is the default"
    assert json.dumps(auto.pod_template) == json.dumps(required.pod_template) == json.dumps(build_pod(resource(), auto.revision))
    blocked = {"args": ["--worker-extension-cls=mine.Worker"]}
    assert json.dumps(desired(engine=blocked).pod_template) == json.dumps(desired(engine=blocked, mode="Off").pod_template)


def test_preflight_gets_nothing_of_the_plugin() -> None:
    template = build_pod(resource())
    names = {variable["name"] for variable in preflight_environment.select_env(template)}
    assert not {name for name in names if "PYTHON" in name or "DRAFTER" in name}


# ------------------------------------------------------------------------------------------------------------ the ConfigMap
def test_config_map_is_small_and_named_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    config_map = plugin_config_map.build_plugin_config_map("chat")
    size = len(json.dumps(config_map).encode())
    assert size < MAX_OBJECT_BYTES / 4
    assert config_map["immutable"] is True
    name = config_map["metadata"]["name"]
    assert plugin_config_map.is_plugin_config_map("chat", name)
    assert not plugin_config_map.is_plugin_config_map("chat", "chat-r1-preflight")
    assert plugin_config_map.find_plugin_config_map(build_pod(resource())) == name
    assert plugin_config_map.find_plugin_config_map(engine_pod.build_pod_template(resource(), DRAFT)) is None
    changed = plugin_config_map.Plugin({**plugin_config_map.load_plugin().files, "aerie_vllm/more.py": ""}, "0123456789")
    monkeypatch.setattr(plugin_config_map, "load_plugin", lambda: changed)
    assert plugin_config_map.plugin_config_map_name("chat") != name


def test_mounted_plugin_is_importable_and_has_its_entry_point(tmp_path: Path) -> None:
    """The volume as the kubelet writes it: files in a dated folder, and links to them."""
    config_map = plugin_config_map.build_plugin_config_map("chat")
    items = plugin_config_map.build_plugin_volume("chat")["configMap"]["items"]
    assert {item["key"] for item in items} == set(config_map["data"])
    for item in items:
        path = tmp_path / "..2026_11_26" / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config_map["data"][item["key"]])
    (tmp_path / "..data").symlink_to("..2026_11_26")
    for top in {Path(item["path"]).parts[0] for item in items}:
        (tmp_path / top).symlink_to(f"..data/{top}")
    program = (
        "import importlib.metadata as m, aerie_vllm, aerie_vllm.control, aerie_vllm.requests, aerie_vllm.registration as r\n"
        "(entry,) = m.entry_points(group='vllm.general_plugins')\n"
        "assert (entry.name, entry.load(), entry.dist.name) == ('aerie_vllm', r.register, 'aerie-vllm')\n"
        "print(aerie_vllm.__file__)"
    )
    (tmp_path / "deps").symlink_to(Path(pytest.__file__).parent.parent)  # prometheus_client, which vLLM's image has as well
    completed = subprocess.run(
        # Without `site`: the editable installation of the plugin must not be what is imported.
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{tmp_path / 'deps'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == str(tmp_path / "aerie_vllm" / "__init__.py")


@pytest.mark.parametrize("name", [drafter_plugin.MIDDLEWARE, drafter_plugin.WORKER_EXTENSION])
def test_classes_on_the_command_line_exist(name: str) -> None:
    module, _, class_name = name.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())  # not imported, because it imports vLLM
    assert class_name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
