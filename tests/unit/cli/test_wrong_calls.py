"""Wrong calls and hostile files: status and message, and never a traceback."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.boundary import run_to_exit_status
from aerie.cli.app import run_command_line
from aerie_drafter.cli import run_cli as aerie_drafter
from aerie_lab.cli.run import run as lab

pytestmark = pytest.mark.slow

BUNDLE = Path(__file__).resolve().parents[3] / "drafter/bundle"
TARGET, DRAFTER = f"{BUNDLE}/target", f"{BUNDLE}/eagle3"
HEAD = "apiVersion: aerie.dev/v1alpha1\nkind: SpeculativeDeployment\nmetadata: {name: chat}\n"
BOMB = "".join(
    f"{chr(97 + level)}: &{chr(97 + level)} [{','.join(['x' if level == 0 else '*' + chr(96 + level)] * 9)}]\n"
    for level in range(8)
)
POD = "kind: Pod\nmetadata: {name: chat}\nspec: {containers: [{name: vllm, image: 'vllm/vllm-openai:v0.33.0', "
FILES = {
    "bomb.yaml": HEAD + BOMB,
    "merge.yaml": HEAD + "a: &a {x: 1}\n" + "spec: {<<: [" + ",".join(["*a"] * 200_000) + "]}\n",
    "cycle.yaml": "a: &a {b: *a}\n",
    "date.yaml": "kind: SpeculativeDeployment\nmetadata: {name: 2024-13-45}\n",
    "deep.yaml": "a: " + "[" * 5000,
    "digits.yaml": HEAD + "spec: {replicas: " + "9" * 5000 + "}",
    "hex.yaml": HEAD + "spec: {replicas: 0x" + "f" * 5000 + "}",
    "infinite.yaml": HEAD + "spec: {replicas: .inf}",
    "double.yaml": HEAD + "spec: {replicas: 4, replicas: 8}",
    "long.yaml": HEAD + "spec: {replicas: " + "x" * 100_000 + "}",
    "list.yaml": "- a\n",
    "service.yaml": "kind: Service\nmetadata: {name: chat}\n",
    "script.yaml": POD + "command: [sh, -c, 'if true; then vllm serve a/b; fi']}]}\n",
    "number.yaml": POD + "args: [a/b, --port, 80]}]}\n",
    "model.yaml": POD + "args: [/models/llama]}]}\n",
    "two.yaml": POD + "args: [a/b]}, {image: vllm/vllm-openai, args: [c/d]}]}\n",
    "empty.yaml": "",
    "tag.yaml": "a: !!python/object/apply:os.system [id]\n",
    "binary.yaml": "\x00\x01\x02",
    "map.yaml": "kind: ConfigMap\ndata: {mine: 'a = [[[[['}\n",
    "data.yaml": "kind: ConfigMap\ndata: [1]\n",
    "no-metrics.jsonl": "{}\n",
    "nan.jsonl": '{"time": NaN, "replica": "a", "page": ""}\n',
    "late.jsonl": '{"time": 1' + "0" * 400 + ', "replica": "a", "page": ""}\n',
    "nested.jsonl": "[" * 100_000,
    "squashed.gz": "",
    "config.kube": "a: [",
    "list.kube": "[]",
    "empty.kube": "",
    "plain.kube": "apiVersion: v1\nkind: Config\n",
    "authority.kube": json.dumps(
        {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1", "certificate-authority-data": "AAAA"}}],
            "users": [{"name": "u", "user": {}}],
        }
    ),
    "plugin.kube": json.dumps(
        {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "u", "user": {"exec": {"command": "no-such-plugin", "apiVersion": "v1"}}}],
        }
    ),
    "questions.jsonl": "[" * 100_000,
}


def write_checkpoint(folder: Path, header: bytes | None = None, index: object = None, config: bytes = b"{}") -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes(config)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if header is not None:
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    for name, text in FILES.items():
        (root / name).write_text(text)
    (root / "squashed.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\3\xff\xff\xff")
    (root / "utf16.yaml").write_bytes("a: 1".encode("utf-16"))
    large = ",".join(["9" * 4200] * 200)
    tensor = f'{{"a":{{"dtype":"BF16","shape":[{large}],"data_offsets":[0,0]}}}}'.encode()
    write_checkpoint(root / "large", tensor)
    maximum = ",".join(["9223372036854775807"] * 100_000)
    write_checkpoint(root / "many", f'{{"a":{{"dtype":"BF16","shape":[{maximum}],"data_offsets":[0,0]}}}}'.encode())
    write_checkpoint(root / "control", b'{"a\\u001b[2J":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}')
    write_checkpoint(root / "null", index={"weight_map": {"a": "x\0y"}})
    write_checkpoint(root / "surrogate", index={"weight_map": {"a": "\ud800"}})
    write_checkpoint(root / "digits", b"{}", config=b'{"hidden_size": ' + b"9" * 4000 + b"}")
    return root


Row = tuple[str, str, int, str]
ROWS: list[Row] = [
    ("aerie", "", 2, ""),
    ("aerie", "fly", 2, "No such command"),
    ("aerie", "preflight", 2, "nothing to check"),
    ("aerie", "preflight --nonsense", 2, "No such option"),
    ("aerie", "preflight -o xml", 2, "Invalid value"),
    ("aerie", "preflight -f FOLDER/none", 2, "cannot be read (No such file or directory)"),
    ("aerie", "preflight -f FOLDER", 2, "cannot be read (Is a directory)"),
    ("aerie", "preflight -f FOLDER/bomb.yaml", 2, "more than 100000 values after its aliases are expanded"),
    ("aerie", "preflight -f FOLDER/merge.yaml", 2, "more than 100000 values after its aliases are expanded"),
    ("aerie", "preflight -f FOLDER/cycle.yaml", 2, "a value contains itself, in line 1"),
    ("aerie", "preflight -f FOLDER/date.yaml", 2, "spec is missing"),
    ("aerie", "preflight -f FOLDER/deep.yaml", 2, "nested too deeply"),
    ("aerie", "preflight -f FOLDER/digits.yaml", 2, "an integer has more than 64 bits, in line 4"),
    ("aerie", "preflight -f FOLDER/hex.yaml", 2, "an integer has more than 64 bits"),
    ("aerie", "preflight -f FOLDER/infinite.yaml", 2, ".inf is not a finite number"),
    ("aerie", "preflight -f FOLDER/double.yaml", 2, "the key 'replicas' occurs twice, in line 4"),
    ("aerie", "preflight -f FOLDER/long.yaml", 2, "spec.replicas is of type string: write integer"),
    ("aerie", "preflight -f FOLDER/list.yaml", 2, "contains none"),
    ("aerie", "preflight -f FOLDER/empty.yaml", 2, "contains none"),
    ("aerie", "preflight -f FOLDER/tag.yaml", 2, "could not determine a constructor"),
    ("aerie", "preflight -f FOLDER/binary.yaml", 2, "is not YAML"),
    ("aerie", "preflight -f FOLDER/utf16.yaml", 2, "it is not text"),
    ("aerie", "preflight -f FOLDER/service.yaml", 2, "a container that runs `vllm serve`, but contains none: set a file"),
    (
        "aerie",
        "preflight -f FOLDER/script.yaml",
        2,
        "its command cannot be read (it contains 'if', so that the executed commands are",
    ),
    ("aerie", "preflight -f FOLDER/number.yaml", 2, "Pod/chat, container vllm: args[2] is 80: set a string, in quotes"),
    ("aerie", "preflight -f FOLDER/model.yaml", 2, "serves /models/llama, a path in the pod: set --target"),
    ("aerie", "preflight -f FOLDER/two.yaml", 2, "but preflight checks one at a time: set a file with one of them"),
    ("aerie", "preflight -f FOLDER/two.yaml --name chat", 2, "but preflight checks one at a time: set a file with one of them"),
    ("aerie", "preflight -f FOLDER/two.yaml --name other", 2, "but contains none with the name other"),
    ("aerie", "preflight --name chat", 2, "--name selects an object of a file: set the file with -f"),
    ("aerie", "preflight --target FOLDER/large --drafter DRAFTER", 2, "must have dtype, shape and data_offsets"),
    ("aerie", "preflight --target FOLDER/many --drafter DRAFTER", 2, "needs "),
    ("aerie", "preflight --target FOLDER/control --drafter DRAFTER", 2, "control characters in its name"),
    ("aerie", "preflight --target FOLDER/null --drafter DRAFTER", 2, "which is not a plain name"),
    ("aerie", "preflight --target FOLDER/surrogate --drafter DRAFTER", 2, "which is not a plain name"),
    ("aerie", "preflight --target FOLDER/digits --drafter DRAFTER", 2, "a whole number of 4000 digits"),
    ("aerie", "preflight --target TARGET --drafter FOLDER/none", 2, "config.json cannot be read"),
    ("aerie", "preflight --target TARGET --drafter DRAFTER --gpu-memory apples", 2, "set the memory of one GPU, such as 80GiB"),
    ("aerie", "preflight --target TARGET --drafter DRAFTER --vllm new", 2, "is not a vLLM version"),
    ("aerie", "preflight --target TARGET --drafter ~nobody-here/eagle", 2, "config.json cannot be read"),
    ("aerie", "preflight --target TARGET --drafter me/model@", 2, "--drafter is 'me/model@': set a folder, or a repository as"),
    ("aerie", "preflight --target https://example.com/a/b --drafter DRAFTER", 2, "--target is 'https://example.com/a/b': set"),
    ("aerie", "preflight --target " + "x" * 300 + " --drafter DRAFTER", 2, "cannot be read (File name too long)"),
    ("aerie", "preflight --target me/model@main --drafter DRAFTER", 2, "HTTPS_PROXY and HTTP_PROXY as http://HOST:PORT"),
    ("aerie", "preflight-job --file FOLDER/bomb.yaml --report FOLDER/report", 1, ""),
    ("aerie", "catalog -o xml", 2, "Invalid value"),
    ("aerie", "catalog example/none", 1, "has no drafter for example/none"),
    ("aerie", "catalog FOLDER/none", 1, "has no drafter"),
    ("aerie", "catalog --catalog FOLDER/none", 2, "cannot be read"),
    ("aerie", "catalog --catalog FOLDER/map.yaml", 2, "is not TOML"),
    ("aerie", "catalog --catalog FOLDER/data.yaml", 2, "must contain one ConfigMap whose data are strings"),
    ("aerie", "catalog --catalog FOLDER/deep.yaml", 2, "nested too deeply"),
    ("aerie", "operator", 2, "set --preflight-image or AERIE_IMAGE"),
    ("aerie", "operator --preflight-image i --log-level LOUD", 2, "--log-level is LOUD"),
    ("aerie", "operator --preflight-image i --preflight-resources {", 2, "--preflight-resources is {"),
    ("aerie", "operator --preflight-image i --prometheus-token x", 2, "--prometheus-token is x"),
    (
        "aerie",
        "operator --preflight-image i --notify-url hooks.example",
        2,
        "--notify-url or --notify-headers: the URL must begin",
    ),
    ("aerie", "operator --preflight-image i --notifications-config FOLDER/none", 2, "--notifications-config: "),
    ("aerie", "tune", 2, "set --metrics FILE or --prometheus URL"),
    ("aerie", "tune --metrics FOLDER/none", 2, "cannot be read"),
    ("aerie", "tune --metrics FOLDER/no-metrics.jsonl", 2, "line 1 has no 'time'"),
    ("aerie", "tune --metrics FOLDER/nan.jsonl", 2, "line 1 cannot be read"),
    ("aerie", "tune --metrics FOLDER/late.jsonl", 2, "line 1 cannot be read"),
    ("aerie", "tune --metrics FOLDER/nested.jsonl", 2, "line 1 cannot be read"),
    ("aerie", "tune --metrics FOLDER/squashed.gz", 2, "cannot be read"),
    ("aerie", "tune --prometheus nowhere --pods a", 2, "use the form http://HOST:PORT"),
    ("aerie", "tune --prometheus http://127.0.0.1:1 --pods (", 2, "which is not a regular expression"),
    ("aerie", "tune --prometheus http://127.0.0.1:1 --pods a", 2, "cannot be reached"),
    ("aerie", "explain", 2, "Missing argument"),
    ("aerie", "status", 2, "Missing argument"),
    ("aerie", "wait chat --for married", 2, "Invalid value"),
    ("aerie", "promote", 2, "Missing argument"),
    ("aerie", "KUBECONFIG=FOLDER/none operator --preflight-image i", 2, "there is no kubeconfig"),
    ("aerie", "KUBECONFIG=FOLDER/config.kube operator --preflight-image i", 2, "is not YAML"),
    ("aerie", "KUBECONFIG=FOLDER/list.kube operator --preflight-image i", 2, "is not a kubeconfig (it is a list)"),
    ("aerie", "KUBECONFIG=FOLDER/empty.kube operator --preflight-image i", 2, "is not a kubeconfig (it is empty)"),
    ("aerie", "KUBECONFIG=FOLDER/binary.yaml operator --preflight-image i", 2, "is not YAML"),
    ("aerie", "KUBECONFIG=FOLDER/plain.kube operator --preflight-image i", 2, "cannot be used (Expected key current-context"),
    ("aerie", "KUBECONFIG=FOLDER/authority.kube operator --preflight-image i", 2, "cannot be used (SSLError"),
    ("aerie", "KUBECONFIG=FOLDER/plugin.kube operator --preflight-image i", 2, "credentials plugin of the user failed"),
    ("aerie-drafter", "", 2, ""),
    ("aerie-drafter", "paint", 2, "No such command"),
    ("aerie-drafter", "inspect", 2, "Missing argument"),
    ("aerie-drafter", "inspect FOLDER/none", 2, "missing"),
    ("aerie-drafter", "inspect FOLDER/null", 2, ""),
    ("aerie-drafter", "export FOLDER/none FOLDER/out", 2, "missing"),
    ("aerie-drafter", "convert FOLDER/none FOLDER/out", 2, ""),
    ("aerie-drafter", "convert FOLDER/none FOLDER/out --layers low", 2, "--layers is 'low'"),
    ("aerie-drafter", "train", 2, "no settings file"),
    ("aerie-drafter", "train FOLDER/bomb.yaml", 2, "more than 100000 values"),
    ("aerie-drafter", "train FOLDER/double.yaml", 2, "occurs twice"),
    ("aerie-drafter", "evaluate FOLDER/questions.jsonl --drafter DRAFTER --target TARGET", 2, "invalid JSON"),
    ("aerie-drafter", "evaluate BUNDLE/prompts.jsonl --drafter DRAFTER --target TARGET --device gpu9", 2, "--device is gpu9"),
    ("aerie-drafter", "evaluate BUNDLE/prompts.jsonl", 2, "--drafter and --target are required"),
    ("aerie-lab", "", 2, ""),
    ("aerie-lab", "fly", 2, "No such command"),
    ("aerie-lab", "up --nodes 0", 2, "nodes is 0"),
    ("aerie-lab", "up --api-port 70000", 2, "api_port is 70000: choose a number from 0 to 65535"),
    ("aerie-lab", "up --gateway-port -1", 2, "gateway_port is -1"),
    ("aerie-lab", "up --gateway-name public", 2, "write NAMESPACE/NAME"),
    ("aerie-lab", "up --name No/Name", 2, "cannot name a lab"),
    ("aerie-lab", "status --name nobodys-lab", 2, "is not up"),
    ("aerie-lab", "logs etcd --name nobodys-lab", 2, "the lab is not up"),
    ("aerie-lab", "kubectl --name nobodys-lab get pods", 2, "lab 'nobodys-lab' is not up: start it with"),
    ("aerie-lab", "helm --name No/Name list", 2, "cannot name a lab"),
    ("aerie-lab", "build linux", 2, "is no family of binaries"),
    ("aerie-lab", "fault undo --name nobodys-lab", 2, "name a fault by its id"),
    ("aerie-lab", "traffic http://127.0.0.1:1 --model m --class odd", 2, "is no class of traffic"),
]


def select_command(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    if program == "aerie":
        return lambda: run_command_line(arguments)
    if program == "aerie-drafter":
        return lambda: aerie_drafter(arguments)
    monkeypatch.setattr("sys.argv", ["aerie-lab", *arguments])
    return lab


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}".replace("/", "|"))
def test_status_and_message_of_a_wrong_call(
    row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, line, code, message = row
    for name in ("AERIE_IMAGE", "AERIE_TRACEBACK", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    # A case that requests the Hub gets an error.
    monkeypatch.setenv("HTTPS_PROXY", "nowhere://127.0.0.1:1")
    paths = {"FOLDER": str(folder), "TARGET": TARGET, "DRAFTER": DRAFTER, "BUNDLE": str(BUNDLE)}
    for name, path in paths.items():
        line = line.replace(name, path)
    if (assignment := re.match(r"KUBECONFIG=(\S+) ", line)) is not None:
        monkeypatch.setenv("KUBECONFIG", assignment[1])
        line = line.removeprefix(assignment[0])
    status = run_to_exit_status(program, "", select_command(program, line.split(), monkeypatch))
    output = capsys.readouterr()
    assert (status, "Traceback" in output.err + output.out) == (code, False), output.err
    assert message in " ".join(output.err.split())
    assert len(output.err) < 4000


def test_a_preflight_job_rejects_a_hostile_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = folder / "verdict"
    assert run_command_line(["preflight-job", f"--file={folder / 'bomb.yaml'}", f"--report={report}"]) == 1
    assert json.loads(report.read_text())["passed"] is False
    assert "after its aliases are expanded" in capsys.readouterr().out


def test_there_are_at_least_60_wrong_calls() -> None:
    assert len(ROWS) >= 60
