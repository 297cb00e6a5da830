"""Stands for docker, kind, k3d, kubectl and helm: its own name decides for which. A test copies it into a folder of the PATH.

It appends each call to the file `calls` beside that folder. A call that contains the text of the file `failing` fails.
A call that contains the text of `holding` waits for the file `deleted`.
kubectl behaves as with the demo's resource in a cluster: each patch is a rollout, the first promoted, the second rolled back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_FOLDER = Path(sys.argv[0]).parent.parent
_OUTCOME = {"class_name": "chat", "error": None, "tokens": 40, "time_to_first_token": 0.1, "total_seconds": 0.5, "end_time": 1.0}
_POD = {"metadata": {"name": "chat-1", "uid": "u1"}, "status": {"containerStatuses": [{"restartCount": 0}]}}
_RESULTS = ("Promoted", "RolledBack")


def _read(name: str) -> str:
    file = _FOLDER / name
    return file.read_text() if file.exists() else ""


def _build_resource() -> dict[str, Any]:
    patches = _read("patches").splitlines()
    history = [
        {"drafter": f"{repo}@commit", "change": "drafter", "result": result, "message": "By the fake."}
        for repo, result in zip(patches, _RESULTS, strict=False)
    ]
    return {
        "metadata": {"generation": 1},
        "status": {"phase": "Ready", "observedGeneration": 1, "replicas": 2, "readyReplicas": 2, "rolloutHistory": history[::-1]},
    }


def _run_kubectl(words: list[str]) -> None:
    match words:
        case ["get", "specdep", _, *options] if {"--output=json", "json"} & set(options):
            print(json.dumps(_build_resource(), indent=2), flush=True)  # noqa: T201
        case ["get", "pods", *options] if "--output=json" in options:
            print(json.dumps({"items": [_POD]}))  # noqa: T201
        case ["patch", *_, patch]:
            repo = json.loads(patch)["spec"]["drafter"]["source"]["huggingFace"]["repo"]
            (_FOLDER / "patches").write_text(f"{_read('patches')}{repo}\n")
        case ["get", "--raw", path] if path.endswith("/metrics"):
            print('aerie_drafter_info{digest="f922",kind="eagle3",own="true"} 1.0')  # noqa: T201
        case ["create", "--raw", *_]:
            print(json.dumps({"choices": [{"message": {"content": f"{len(sys.stdin.read())} bytes"}}]}))  # noqa: T201
        case ["logs", *_]:
            print(json.dumps(_OUTCOME), flush=True)  # noqa: T201
            if _read("log_ends"):
                return
            while not _read("deleted"):
                time.sleep(0.02)
            print(json.dumps(_OUTCOME | {"error": _read("last_error") or None}), flush=True)  # noqa: T201
        case ["delete", "pod", *_]:
            (_FOLDER / "deleted").write_text("yes")


def main(program: str, words: list[str]) -> int:
    call = " ".join([program, *words])
    with (_FOLDER / "calls").open("a") as calls:
        calls.write(f"{call}\n")
    failing = _read("failing")
    if failing and failing in call:
        print("it fails as the test demands", file=sys.stderr)  # noqa: T201
        return 7
    holding = _read("holding")
    while holding and holding in call and not _read("deleted"):
        time.sleep(0.02)
    if program == "kubectl":
        _run_kubectl(words)
    elif program in ("kind", "k3d"):
        if words[1] in ("clusters", "list"):
            print(_read("clusters"), end="")  # noqa: T201
        elif "create" in words:
            Path(os.environ["KUBECONFIG"]).write_text("")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
