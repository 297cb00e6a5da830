"""`aerie preflight -f` of a plain Kubernetes workload that runs vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.cli.app import run_command_line
from aerie.cli.inputs.shell_command import ExpansionBudget, find_serve_arguments, find_vllm_commands
from aerie.cli.inputs.workload import Workload, find_workloads

BUNDLE = Path(__file__).resolve().parents[3] / "drafter/bundle"
FOLDERS = ("--target", f"{BUNDLE}/target", "--drafter", f"{BUNDLE}/eagle31")
EAGLE = {"method": "eagle3", "model": "me/eagle", "num_speculative_tokens": 5}
CONFIG = f"--speculative-config={json.dumps(EAGLE)}"
ARGS = ["--model=me/llama", CONFIG, "--port=8000", "--api-key=secret"]
IMAGE = "vllm/vllm-openai:v0.33.0"

Capture = pytest.CaptureFixture[str]
Preflight = Callable[..., int]


def deployment(name: str = "chat", kind: str = "Deployment", pod: Any = None, **container: Any) -> dict[str, Any]:
    fields = {"name": "vllm", "image": IMAGE, "args": ARGS, **container}
    template = {"containers": [{key: value for key, value in fields.items() if value is not None}], **(pod or {})}
    spec = template if kind == "Pod" else {"replicas": 2, "template": {"spec": template}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def find_workload(*documents: dict[str, Any]) -> Workload:
    (workload,) = find_workloads(documents)
    return workload


@pytest.fixture
def preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preflight:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")

    def preflight(documents: Any, *options: str) -> int:
        documents = [documents] if isinstance(documents, dict) else documents
        (tmp_path / "chat.yaml").write_text(yaml.safe_dump_all(documents))
        return run_command_line(["preflight", "-f", str(tmp_path / "chat.yaml"), *options])

    return preflight


# -- The command line ----------------------------------------------------------------------------------------------------

SCRIPT = """\
# it's the start
set -euo pipefail
export MODEL=me/llama
echo "starting $MODEL"
VLLM_LOGGING_LEVEL=DEBUG exec vllm serve ${MODEL} \\
  --tensor-parallel-size "${TP:-2}" --max-model-len=$LENGTH \\
  '--speculative-config={"method": "eagle3", "model": "me/eagle", "num_speculative_tokens": 5}' > /tmp/log 2>&1 &
wait
"""


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"args": ["a/b", "--port=1"]}, ["a/b", "--port=1"]),
        ({"args": ["serve", "a/b"], "command": ["vllm"]}, ["a/b"]),
        ({"args": ["a/b"], "command": ["/usr/local/bin/vllm", "serve"]}, ["a/b"]),
        ({"args": None, "command": ["uv", "run", "vllm", "serve", "a/b"]}, ["a/b"]),
        ({"args": ["--model", "a/b"], "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"]}, ["--model", "a/b"]),
        ({"args": ["a/b"], "command": ["python3", "-m", "vllm.entrypoints.cli.main", "serve"]}, ["a/b"]),
        ({"args": None, "command": ["/bin/sh", "-c", "vllm serve a/b --port 80 | tee log"]}, ["a/b", "--port", "80"]),
        ({"command": ["bash", "-ceu"], "args": ["sleep 1; vllm serve a/b && echo done"]}, ["a/b"]),
        ({"command": ["sh", "-c"], "args": ["cd /models\nvllm serve a/b # one\n"]}, ["a/b"]),
        (
            {"args": ["$(MODEL)", "$$(X)"], "env": [{"name": "M", "value": "b"}, {"name": "MODEL", "value": "a/$(M)"}]},
            ["a/b", "$(X)"],
        ),
        (
            {"args": None, "command": ["bash", "-c", SCRIPT], "env": [{"name": "LENGTH", "value": "8k"}]},
            ["me/llama", "--tensor-parallel-size", "2", "--max-model-len=8k", CONFIG.replace("=", "=", 1)],
        ),
        ({"image": "registry.example/team/my-vllm@sha256:00", "args": ["--model=a/b"]}, ["--model=a/b"]),
    ],
)
def test_the_arguments_of_vllm_serve_are_found(container: dict[str, Any], words: list[str]) -> None:
    assert find_workload(deployment(**container)).serve_arguments == words


def test_variables_of_the_script_are_in_the_environment() -> None:
    workload = find_workload(deployment(args=None, command=["sh", "-c", "export A=1; B=$A VLLM_X='2 3' vllm serve a/b"]))
    assert workload.environment == {"A": "1", "B": "1", "VLLM_X": "2 3"}


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "ReplicaSet", "DaemonSet", "Pod"])
def test_every_kind_of_workload_is_found(kind: str) -> None:
    assert find_workload(deployment(kind=kind)).name == f"{kind}/chat, container vllm"


def test_other_documents_and_containers_are_ignored(preflight: Preflight, capsys: Capture) -> None:
    sidecar = {"name": "log", "image": "busybox", "command": ["sh", "-c", "tail -f /log"]}
    chat = deployment()
    chat["spec"]["template"]["spec"]["containers"].insert(0, sidecar)
    router = deployment("router", image="lmcache/vllm-router:v1", args=["--port=80"])
    others = [{"kind": "Service", "metadata": {"name": "chat"}}, router, deployment("redis", image="redis", args=None)]
    assert find_workload(*others, chat).name == "Deployment/chat, container vllm"
    assert preflight({"kind": "List", "items": [*others, chat]}, *FOLDERS) == 0
    assert "Deployment/chat, container vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"command": ["/start.sh"]}, "it runs /start.sh, which preflight does not read"),
        ({"args": ["--port", 8000]}, "args[1] is 8000: set a string, in quotes"),
        ({"args": "--port"}, 'args is "--port": set a list'),
        (
            {"command": ["sh", "-c", "vllm serve 'a"], "args": None},
            "its command cannot be read (line 1 has more than simple commands, or an unterminated quote",
        ),
        (
            {"command": ["sh", "-c", "vllm serve a || vllm serve b"], "args": None},
            "its script starts vLLM more than once: set the command line of vLLM as command and args",
        ),
        ({"command": ["sh", "-c", "/start.sh"], "args": None}, "its script does not visibly start vLLM"),
        ({"env": {"a": 1}}, 'env is {"a": 1}: set a list'),
        ({"resources": []}, "resources is []: set an object"),
    ],
)
def test_unreadable_workloads_are_rejected(
    preflight: Preflight, container: dict[str, Any], message: str, capsys: Capture
) -> None:
    assert preflight(deployment(**container), *FOLDERS) == 2
    assert f"Deployment/chat, container vllm: {message}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"kind": "Deployment"},
            "must contain a SpeculativeDeployment, or a workload with a container that runs `vllm serve`, but",
        ),
        ({"kind": "List", "items": 3}, "but contains none"),
        ({"kind": "Pod", "spec": {"containers": [1, {"image": 2}]}}, "but contains none"),
        ({"kind": "Deployment", "spec": []}, "Deployment/None: spec is []: set an object"),
        ({"kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": {}}}, "Pod/x: containers is {}: set a list"),
    ],
)
def test_invalid_manifests_are_rejected(preflight: Preflight, document: dict[str, Any], message: str, capsys: Capture) -> None:
    assert preflight(document) == 2
    assert message in " ".join(capsys.readouterr().err.split())


# -- A shell's script ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("vllm serve $MODEL $FLAGS", ["me/llama", "--port", "80"]),
        ('vllm serve "$MODEL" "$FLAGS"', ["me/llama", "--port 80"]),
        ("vllm serve '$MODEL'", ["$MODEL"]),
        (r"vllm serve \$MODEL a\ b", ["$MODEL", "a b"]),
        ('vllm serve m -sc "{\\"method\\": \\"eagle3\\"}"', ["m", "-sc", '{"method": "eagle3"}']),
        ("vllm serve m --a=$(nproc --all) --b `hostname -i` --c ${X}", ["m", "--a=$(...)", "--b", "$(...)", "--c", "${X}"]),
        ("vllm serve m ${X:---port 1} ${MODEL:-other}", ["m", "--port", "1", "me/llama"]),
        ("vllm serve m 2>&1 >/dev/null &> log > 'a b'", ["m"]),
        ("vllm serve m '> x' a#b # c", ["m", "> x", "a#b"]),
        ("# don't\nX=1; X=2\nvllm serve $X", ["2"]),
        ("X=1 true; vllm serve $X", ["$X"]),
        ("vllm serve m \\\n  --port 80", ["m", "--port", "80"]),
        ('vllm serve "a\\\nb"', ["ab"]),
        ("(cd /models && vllm serve m) | tee log &", ["m"]),
        ('exec vllm serve "$@"', ["$@"]),
    ],
)
def test_a_script_is_expanded_as_by_a_shell(script: str, words: list[str]) -> None:
    environment = {"MODEL": "me/llama", "FLAGS": "--port 80"}
    (command,) = find_vllm_commands(script, environment, ExpansionBudget())
    assert command.serve_arguments == words


@pytest.mark.parametrize(
    "script", ["if true; then vllm serve a; fi", "while true\ndo x; done", "cat <<EOF\nEOF", "x $(a $(b))", "x $((1+1))", "'"]
)
def test_scripts_of_more_than_simple_commands_are_rejected(script: str) -> None:
    with pytest.raises(ValueError, match=r"line 1 has more than simple commands|the executed commands are unknown"):
        find_vllm_commands(script, {}, ExpansionBudget())


DOUBLING_SCRIPT = "A=xxxxxxxxxxxxxxxx;" + "A=$A$A;" * 64


@pytest.mark.parametrize(
    "script",
    [
        DOUBLING_SCRIPT + "vllm serve $A",
        "A=" + "x" * 2**15 + "; B=" + "$A''" * 2**10,
        "A=" + "x" * 2**15 + "; vllm serve " + "$A " * 2**10,
    ],
    ids=["doubled", "pieces", "words"],
)
def test_a_script_with_growing_variables_is_rejected(script: str) -> None:
    with pytest.raises(ValueError, match="the expanded variables have more than 2 MiB"):
        find_vllm_commands(script, {}, ExpansionBudget())


def test_many_variables_and_commands_are_read_in_linear_time() -> None:
    environment = {f"V{number}": "x" for number in range(30_000)}
    assert find_vllm_commands("A=1;" * 30_000 + "vllm serve $A;" * 30_000, environment, ExpansionBudget())[0].serve_arguments == [
        "1"
    ]
    assert find_serve_arguments(["x"] * 100_000) is None


def test_growing_variables_of_the_manifest_are_rejected(preflight: Preflight, capsys: Capture) -> None:
    env = [{"name": "V0", "value": "x" * 16}, *({"name": f"V{n + 1}", "value": f"$(V{n})$(V{n})"} for n in range(64))]
    assert preflight(deployment(env=env), *FOLDERS) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert (
        "Deployment/chat, container vllm: its command cannot be read (the expanded variables have more than 2 MiB): set" in stderr
    )


def test_only_exported_variables_are_in_the_environment() -> None:
    script = "VLLM_A=1; export VLLM_B=2; VLLM_C=3; export VLLM_C; VLLM_D=4\nVLLM_E=5 vllm serve m"
    (command,) = find_vllm_commands(script, {"VLLM_D": "0"}, ExpansionBudget())
    assert command.environment == {"VLLM_B": "2", "VLLM_C": "3", "VLLM_D": "4", "VLLM_E": "5"}


# -- The result ----------------------------------------------------------------------------------------------------------


def test_a_deployment_is_checked(preflight: Preflight, capsys: Capture) -> None:
    limits = {"nvidia.com/gpu": 1}
    assert preflight(deployment(resources={"limits": limits}), *FOLDERS, "--gpu-memory=16GiB", "--verbose") == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[:3] == ["target   me/llama", "drafter  me/eagle", "vLLM     0.33.0"]
    assert "✓ C29 GPU count: the pod has 1 of nvidia.com/gpu" in output.out
    assert "Deployment/chat, container vllm" in output.err
    assert "secret" not in output.out + output.err


def test_an_error_is_status_1_and_in_the_json(preflight: Preflight, capsys: Capture) -> None:
    args = [*ARGS, "--tensor-parallel-size=4"]
    assert preflight(deployment(args=args, resources={"limits": {"nvidia.com/gpu": "2"}}), *FOLDERS, "-o", "json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["allowed"], report["drafter"]) == (False, False, "me/eagle")
    assert [finding["id"] for finding in report["findings"] if finding["severity"] == "error"] == ["C29"]


def test_method_tokens_environment_and_node_selector_are_used(preflight: Preflight, capsys: Capture) -> None:
    config = json.dumps({"model": "me/eagle", "num_speculative_tokens": 2})
    pod = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
    env = [{"name": "VLLM_USE_V2_MODEL_RUNNER", "value": "0"}]
    assert preflight(deployment(args=["me/llama", "-sc", config], env=env, pod=pod), *FOLDERS, "-v") == 1
    output = capsys.readouterr().out
    assert "✗ C10 method is set: --speculative-config has no method" in output
    assert "model runner V1: VLLM_USE_V2_MODEL_RUNNER=0" in output
    assert "of 80.0 GiB" in output


def test_an_engine_without_a_drafter_is_checked_with_the_given_one(preflight: Preflight, capsys: Capture) -> None:
    plain = deployment(args=["me/llama"])
    assert preflight(plain, *FOLDERS) == 0
    stderr = " ".join(capsys.readouterr().err.split())
    assert 'has no drafter: checked with --drafter and {"method": "eagle3", "num_speculative_tokens": 3}.' in stderr
    assert preflight(plain, *FOLDERS[:2]) == 0
    assert "has no --speculative-config: the engine runs without a drafter." in " ".join(capsys.readouterr().err.split())
    ngram = deployment(args=["me/llama", "--spec-method=ngram", "--spec-tokens=4"])
    assert preflight(ngram, *FOLDERS[:2]) == 0
    assert "method ngram needs no drafter" in " ".join(capsys.readouterr().err.split())
    assert preflight(ngram, *FOLDERS) == 0
    assert '{"method": "eagle3", "num_speculative_tokens": 4}' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("container", "options", "message"),
    [
        ({"args": ["/models/llama"]}, (), "serves /models/llama, a path in the pod: set --target to a folder or"),
        ({"args": ["s3://bucket/llama"]}, (), "serves s3://bucket/llama, a path in the pod"),
        ({"args": ["$(MODEL)"]}, (), "serves $(MODEL), which is unknown: set"),
        ({"args": ["--port=1"]}, (), "names no model: set --target"),
        (
            {"args": ["a/b", "--spec-model=/models/eagle"]},
            FOLDERS[:2],
            "drafts with /models/eagle, a path in the pod: set --drafter to a folder or OWNER/NAME@COMMIT",
        ),
        ({"image": "vllm/vllm-openai:latest"}, FOLDERS, "vllm-openai:latest does not show its vLLM version: set it"),
        ({"args": [*ARGS, "--max-model-len=$(LENGTH)"]}, FOLDERS, "sets --max-model-len to $(LENGTH): vLLM expects tokens"),
        ({"args": ["a/b", "-sc", "{"]}, FOLDERS, "sets --speculative-config to invalid JSON"),
        ({}, ("--vllm=new", *FOLDERS), "--vllm: 'new' is not a vLLM version"),
    ],
)  # fmt: skip
def test_workloads_that_cannot_be_checked_are_status_2(
    preflight: Preflight, container: dict[str, Any], options: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert preflight(deployment(**container), *options) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert message in stderr
    assert "spec.engine" not in stderr


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({}, "vLLM 0.33.0, by its image's tag."),
        ({"args": [*ARGS, "--config=/etc/vllm.yaml"]}, "--config is a file in the pod: its flags are unknown."),
        ({"args": [*ARGS, "--seed=$(SEED)"]}, "the value of --seed is unknown."),
        ({"envFrom": [{"configMapRef": {"name": "x"}}]}, "variables by envFrom are unknown."),
        (
            {"env": [{"name": "VLLM_X", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}]},
            "the value of the variable VLLM_X is unknown.",
        ),
        ({"args": [*ARGS, "--nnodes=2"]}, "--nnodes=2 distributes an engine over several pods: their GPUs are not counted."),
        (
            {"args": ["a/b", "-sc", json.dumps({**EAGLE, "rejection_sample_method": "fly"})]},
            "the speculative config verifies by 'fly', which lets the drafter change the model's outputs",
        ),
        (
            {"args": ["a/b", "-sc", json.dumps({"method": "eagle3", "model": "me/eagle"})]},
            "--speculative-config has no num_speculative_tokens",
        ),
    ],
)
def test_unknown_parts_of_a_workload_are_notes(
    preflight: Preflight, container: dict[str, Any], message: str, capsys: Capture
) -> None:
    assert preflight(deployment(**container), *FOLDERS) == 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_speculators_checkpoint_as_target_names_the_options(preflight: Preflight, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "speculator"
    folder.mkdir()
    config = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": "me/verifier"}}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").touch()
    assert preflight(deployment(args=["me/speculator"]), "--target", str(folder)) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert (
        "me/speculator is a drafter whose config names its target, me/verifier: set --target me/verifier --drafter me/speculator."
        in stderr
    )


# -- Several documents ---------------------------------------------------------------------------------------------------


def test_several_engines_need_a_name(preflight: Preflight, capsys: Capture) -> None:
    files = [deployment("one"), {"kind": "Service", "metadata": {"name": "one"}}, deployment("two")]
    assert preflight(files, *FOLDERS) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert (
        "contains Deployment/one, container vllm, Deployment/two, container vllm, but preflight checks one at a time: select"
        in stderr
    )
    assert stderr.endswith("select one with --name.")
    assert preflight(files, *FOLDERS, "--name", "two") == 0
    assert "Deployment/two" in capsys.readouterr().err
    assert preflight(files, *FOLDERS, "--name", "three") == 2
    assert "but contains none with the name three" in " ".join(capsys.readouterr().err.split())


def test_a_resource_takes_precedence_over_a_workload(preflight: Preflight, capsys: Capture) -> None:
    source = {"huggingFace": {"repo": "example/target", "revision": "1" * 40}}
    resource = {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": source}, "engine": {"image": IMAGE}, "drafter": {"source": source}},
    }
    assert preflight([deployment(), resource], *FOLDERS) == 0
    assert "target   example/target@" in capsys.readouterr().out
    assert preflight([resource, {**resource, "metadata": {"name": "other"}}], *FOLDERS) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert "contains SpeculativeDeployment/chat, SpeculativeDeployment/other, but" in stderr
    assert stderr.endswith("select one with --name.")
    assert preflight([resource, {**resource, "metadata": {"name": "other"}}], *FOLDERS, "--name=other") == 0
