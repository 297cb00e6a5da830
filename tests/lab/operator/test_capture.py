"""Capture of prompts through the lab's real gateway: what users send becomes redacted files on a volume, and costs them nothing.

    requests of users ─► Envoy ─► simulated engines
                           └─ copies ─► recorder ─► hook ─► volume

A recorder that is frozen, killed or deleted costs no user an answer. A failing hook stores nothing. In a shadow evaluation, whose
evaluator gets the copies, the capture pauses. The end of the capture keeps the files.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie.manifests.recorder import RECORDER_LABEL
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.namespace import is_ready
from tests.lab.operator.in_place_resources import create_model_claim, resource
from tests.lab.operator.markers import create_marker, find_in_files, find_in_objects

pytestmark = pytest.mark.timeout(900)
Object = dict[str, Any]
NAME = "chat"
PROMPT, SECRET, USER, PERSON, API_KEY = (create_marker(prefix) for prefix in ("prompt", "secret", "user", "named", "key"))
HOOK = f"""
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps(document)
        fails = "the hook fails" in text
        self.send_response(500 if fails else 200)
        self.end_headers()
        self.wfile.write(text.replace("{PERSON}", "[name]").encode())
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
"""
MAX_SECONDS = 15.0
"""Limit of an answer. Without load, one takes about a second."""


@pytest.fixture
def models(namespace: Namespace, tmp_path: Path) -> Iterator[None]:
    """A claim with the models."""
    with create_model_claim(namespace, tmp_path / "models"):
        yield


@pytest.fixture
def prompts(namespace: Namespace, tmp_path: Path) -> Iterator[Path]:
    """The folder behind a claim for prompts."""
    folder, volume = tmp_path / "prompts", f"{namespace.name}-prompts"
    folder.mkdir()
    node = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}]}
    common: Object = {"accessModes": ["ReadWriteOnce"], "storageClassName": volume}
    spec = common | {
        "capacity": {"storage": "1Gi"},
        "persistentVolumeReclaimPolicy": "Retain",
        "local": {"path": str(folder)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [node]}},
    }
    namespace.lab.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
    claim = common | {"resources": {"requests": {"storage": "1Gi"}}}
    namespace.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "prompts"}, "spec": claim})
    yield folder
    for arguments in (("describe", "pods", "-l", RECORDER_LABEL), ("logs", "-l", RECORDER_LABEL, "--all-containers")):
        print(namespace.kubectl(*arguments))  # noqa: T201 - shown for failed tests
    namespace.lab.kubectl("delete", "persistentvolume", volume, "--wait=false")


class Users:
    """Users who send chat requests through the gateway, one after another."""

    def __init__(self, namespace: Namespace) -> None:
        self.host, self.sent = f"{NAME}.{namespace.name}.example", 0
        headers = {"Host": self.host, "Authorization": f"Bearer {API_KEY}", "X-Session-ID": USER}
        self.client = httpx.Client(base_url=namespace.lab.gateway_url or "", headers=headers, timeout=60)

    def are_served(self) -> bool:
        """Return whether the gateway leads to an engine."""
        return self.client.get("/v1/models").status_code == 200

    def send(self, content: str) -> str:
        """Send a request, and return its content with a number. It has to be answered in time."""
        self.sent += 1
        text = f"{PROMPT} {self.sent} {content}"
        body: Object = {"messages": [{"role": "user", "content": text, "name": USER}], "user": USER, "max_tokens": 8}
        began = time.monotonic()
        response = self.client.post("/v1/chat/completions", json=body | {"stream": bool(self.sent % 2)})
        assert response.status_code == 200, response.text
        assert time.monotonic() - began < MAX_SECONDS
        return text


def captured(namespace: Namespace, drafter: str = "eagle3", capture: Object | None = None) -> Object:
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [f"{NAME}.{namespace.name}.example"]}
    options = {"own_requests_per_second": 0}
    document = resource(NAME, drafter, replicas=2, options=options, traffic={"mode": "Gateway", "gateway": gateway})
    document["spec"]["rollout"]["analysis"]["shadow"] = {"source": "Mirror", "maxDuration": "5m"}
    document["spec"]["capture"] = capture
    return document


def full_capture() -> Object:
    hook = {"image": "aerie.dev/lab/shell", "args": ["-c", 'exec python -u -c "$0"', HOOK], "timeout": "2s"}
    return {
        "consent": {"confirmed": True, "basis": "terms of service, section 4"},
        "sampling": {"rate": 1.0, "maxPerMinute": 6000},
        "redaction": {
            "patterns": [{"pattern": r"secret-[0-9a-f]+$|secret-[0-9a-f]+\b", "replacement": "[secret]"}],
            "hook": hook,
        },
        "storage": {"persistentVolumeClaim": {"claimName": "prompts", "path": "of/chat"}},
    }


def read_texts(folder: Path) -> list[str]:
    """Return the text of each recorded message, of the open file too. A line that is being written is left out."""
    texts = []
    for path in sorted((folder / "of" / "chat" / NAME).glob("*.jsonl*")):
        with contextlib.suppress(FileNotFoundError):  # it has just got its final name
            lines = path.read_text().splitlines(keepends=True)
            texts += [json.loads(line)["messages"][0]["content"] for line in lines if line.endswith("\n")]
    return texts


def wait_for_condition(namespace: Namespace, status: str, reason: str) -> None:
    def matches() -> bool:
        conditions = (namespace.get("specdep", NAME).get("status") or {}).get("conditions") or []
        return any((item["type"], item["status"], item["reason"]) == ("CaptureReady", status, reason) for item in conditions)

    wait_until(matches, f"CaptureReady is {status} ({reason})", timeout_seconds=120)


def find_recorder(namespace: Namespace) -> str:
    """Return the name of the recorder's pod, once it is ready."""

    def ready_pod() -> str | None:
        pods = namespace.list_all("pods", f"{RECORDER_LABEL}={NAME}")
        return next((pod["metadata"]["name"] for pod in pods if is_ready(pod)), None)

    return str(wait_until(ready_pod, "the recorder is ready", timeout_seconds=120))


def wait_until_recorded(users: Users, folder: Path) -> None:
    """Wait until a new request of a user is recorded."""

    def is_recorded() -> bool:
        text = users.send("again")
        time.sleep(1.0)
        return text in read_texts(folder)

    wait_until(is_recorded, "requests are recorded", timeout_seconds=180)


@pytest.fixture
def users(namespace: Namespace) -> Iterator[Users]:
    users = Users(namespace)
    with users.client:
        yield users


@pytest.mark.usefixtures("models", "inner_operator")
def test_prompts_become_redacted_files_and_users_notice_nothing(namespace: Namespace, prompts: Path, users: Users) -> None:
    namespace.apply(captured(namespace, capture=full_capture()))
    wait_for_condition(namespace, "True", "Recording")
    namespace.wait_until("specdep", NAME, lambda item: item["status"]["phase"] == "Ready", "the engines serve")
    wait_until(users.are_served, "the route has reached Envoy")
    wait_until_recorded(users, prompts)

    # Redacted by pattern and hook; nothing is stored where the hook fails.
    users.send(f"with {SECRET} of {PERSON}")
    users.send("the hook fails")
    wait_until(lambda: any("[secret] of [name]" in text for text in read_texts(prompts)), "it is redacted")
    users.send("last")
    wait_until(lambda: any(text.endswith("last") for text in read_texts(prompts)), "the last is recorded")
    assert not [text for text in read_texts(prompts) if "the hook fails" in text]

    # A frozen recorder, a killed one, and none at all.
    recorder = find_recorder(namespace)
    with namespace.faults.freeze(recorder, "recorder", namespace=namespace.name):
        for _ in range(10):
            users.send("frozen")
    namespace.faults.kill(recorder, "recorder", namespace=namespace.name)
    for _ in range(5):
        users.send("killed")
    before = set(read_texts(prompts))
    namespace.kubectl("delete", "pod", recorder, "--wait=false")
    for _ in range(5):
        users.send("deleted")
    wait_for_condition(namespace, "True", "Recording")
    wait_until_recorded(users, prompts)
    assert before <= set(read_texts(prompts))

    # A shadow evaluation gets the copies meanwhile.
    namespace.apply(captured(namespace, "better", full_capture()))
    wait_for_condition(namespace, "False", "ShadowEvaluation")
    (rule,) = namespace.get("httproute", NAME)["spec"]["rules"]
    assert [item["requestMirror"]["backendRef"]["name"] for item in rule["filters"]] == [f"{NAME}-evaluator"]
    users.send("evaluated")
    namespace.apply(captured(namespace, "eagle3", full_capture()))
    wait_for_condition(namespace, "True", "Recording")
    wait_until_recorded(users, prompts)

    # The end of the capture keeps the files, all complete.
    recorded = set(read_texts(prompts))
    namespace.kubectl("patch", "specdep", NAME, "--type=json", "-p", '[{"op": "remove", "path": "/spec/capture"}]')
    namespace.wait_until_deleted("deployment", f"{NAME}-recorder")
    wait_until(lambda: not namespace.list_all("pods", f"{RECORDER_LABEL}={NAME}"), "the recorder has ended")
    assert recorded <= set(read_texts(prompts))
    assert not list(prompts.rglob("*.open"))
    (rule,) = namespace.get("httproute", NAME)["spec"]["rules"]
    assert not rule.get("filters")
    users.send("after the end")

    # Prompts are in the files alone, and redacted ones nowhere.
    assert find_in_objects(namespace, (PROMPT, USER, API_KEY), lambda _: True) == []
    assert find_in_files([namespace.lab.folder], (PROMPT, SECRET, USER, API_KEY), lambda _: True) == []
    assert find_in_files([prompts], (SECRET, PERSON, USER, API_KEY), lambda _: True) == []


@pytest.mark.nightly  # tests/unit/recorder has the faults of a storage
@pytest.mark.usefixtures("models", "inner_operator")
def test_storage_that_is_missing_is_named_and_costs_users_nothing(namespace: Namespace, prompts: Path, users: Users) -> None:
    (prompts / "of").write_text("a file where the folder has to be")
    namespace.apply(captured(namespace, capture=full_capture()))
    wait_for_condition(namespace, "False", "RecorderNotReady")
    wait_until(lambda: namespace.exists("httproute", NAME), "there is a route")
    wait_until(users.are_served, "the engines serve", timeout_seconds=240)
    for _ in range(5):
        users.send("unrecorded")
    pods = namespace.list_all("pods", f"{RECORDER_LABEL}={NAME}")
    log = wait_until(
        lambda: [
            line
            for line in namespace.kubectl("logs", pods[0]["metadata"]["name"], "-c", "recorder").splitlines()
            if "storage" in line
        ],
        "the log names the problem",
    )
    assert "check the volume claim" in log[0]
    (prompts / "of").unlink()
    wait_for_condition(namespace, "True", "Recording")
    wait_until_recorded(users, prompts)
