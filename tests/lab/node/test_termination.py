"""How containers end: preStop, SIGTERM, the grace period, deletion with and without force, termination messages.

A finalizer keeps the object of a deleted pod, so that its last status can be read.
"""

from __future__ import annotations

import time
from pathlib import Path

from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.pods import Object, echo, find_container_status, pod, python, read_termination_message, shell

WITH_FINALIZER = {"finalizers": ["aerie.dev/test"]}


def remove_finalizers(namespace: Namespace, *names: str) -> None:
    for name in names:
        namespace.kubectl("patch", "pod", name, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')


def wait_until_terminated(namespace: Namespace, name: str, *, within: float = 30.0) -> Object:
    """Wait until the container of a deleted pod has ended, and return its terminated state."""
    ended_pod = namespace.wait_until(
        "pod", name, lambda p: find_container_status(p)["state"].get("terminated"), "ended", timeout_seconds=within
    )
    ended: Object = find_container_status(ended_pod)["state"]["terminated"]
    return ended


def test_sigterm_then_sigkill_at_the_grace_period(namespace: Namespace) -> None:
    polite = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(4)); open('/tmp/up', 'w'); time.sleep(600)"
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); open('/tmp/up', 'w'); time.sleep(600)"
    probe = {"exec": {"command": ["test", "-e", "/tmp/up"]}, "periodSeconds": 1}
    namespace.apply(
        pod("polite", python(polite, readinessProbe=probe), metadata=WITH_FINALIZER, terminationGracePeriodSeconds=200),
        pod("stubborn", python(stubborn, readinessProbe=probe), metadata=WITH_FINALIZER, terminationGracePeriodSeconds=3),
    )
    for name in ("polite", "stubborn"):
        namespace.wait_until_ready(name)
    began = time.monotonic()
    namespace.kubectl("delete", "pod", "polite", "stubborn", "--wait=false")
    assert wait_until_terminated(namespace, "polite")["exitCode"] == 4
    assert time.monotonic() - began < 150
    ended = wait_until_terminated(namespace, "stubborn")
    assert (ended["exitCode"], ended["signal"]) == (137, 9)
    assert time.monotonic() - began >= 3
    for name in ("polite", "stubborn"):
        # The finalizer keeps the object; the pod must not be started again because of it.
        namespace.wait_until_phase(name, "Failed")
    remove_finalizers(namespace, "polite", "stubborn")
    for name in ("polite", "stubborn"):
        namespace.wait_until_deleted("pod", name)


def test_pre_stop_hooks_run_before_sigterm(namespace: Namespace, tmp_path: Path) -> None:
    mounts = {"volumeMounts": [{"name": "told", "mountPath": "/told"}]}
    fields: Object = {
        "volumes": [{"name": "told", "hostPath": {"path": str(tmp_path)}}],
        "terminationGracePeriodSeconds": 20,
    }
    script = "trap 'date +%s%N > /told/$0; exit 0' TERM; while :; do sleep 0.05; done"
    by_command = shell(script, lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "date +%s%N > /told/hook"]}}}, **mounts)
    by_command["command"].append("by-command")
    by_sleep = shell(script, lifecycle={"preStop": {"sleep": {"seconds": 2}}}, **mounts)
    by_sleep["command"].append("by-sleep")
    # The hook makes the server exit with a code that SIGTERM would not give.
    ending = {"preStop": {"httpGet": {"path": "/exit", "port": 8080}}}
    server = python(
        """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.flush()
        if self.path == "/exit":
            os._exit(42)
http.server.HTTPServer(("", 8080), Handler).serve_forever()
""",
        lifecycle=ending,
        readinessProbe={"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    )
    namespace.apply(
        pod("by-command", by_command, **fields),
        pod("by-sleep", by_sleep, **fields),
        pod("by-http", server, metadata=WITH_FINALIZER, terminationGracePeriodSeconds=20),
    )
    for name in ("by-command", "by-sleep", "by-http"):
        namespace.wait_until_ready(name)
    began = time.time()
    namespace.kubectl("delete", "pod", "by-command", "by-sleep", "by-http", "--wait=false")
    assert wait_until_terminated(namespace, "by-http")["exitCode"] == 42
    for name in ("by-command", "by-sleep"):
        namespace.wait_until_deleted("pod", name)
    assert int((tmp_path / "hook").read_text()) < int((tmp_path / "by-command").read_text())
    assert int((tmp_path / "by-sleep").read_text()) / 1e9 >= began + 2
    remove_finalizers(namespace, "by-http")


def test_the_grace_period_can_be_shortened(namespace: Namespace) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    for name in ("shortened", "forced"):
        namespace.apply(pod(name, python(stubborn), terminationGracePeriodSeconds=300))
    for name in ("shortened", "forced"):
        namespace.wait_until_ready(name)
    namespace.kubectl("delete", "pod", "shortened", "forced", "--wait=false")
    namespace.kubectl("delete", "pod", "shortened", "--grace-period=1", "--wait=false")
    namespace.kubectl("delete", "pod", "forced", "--grace-period=0", "--force", "--wait=false")
    namespace.wait_until_deleted("pod", "forced")
    namespace.wait_until_deleted("pod", "shortened")

    def left() -> list[object]:
        return [c for c in namespace.lab.call_agent("containers") if c["namespace"] == namespace.name]

    wait_until(lambda: not left(), "no process left")


def test_deletion_during_init_starts_no_further_container(namespace: Namespace) -> None:
    polite = "trap 'exit 0' TERM; while :; do sleep 0.05; done"  # exit code 0, as if it had done its work
    namespace.apply(
        pod(
            "interrupted",
            shell("true"),
            initContainers=[{"name": "setup", **shell(polite)}],
            metadata=WITH_FINALIZER,
            terminationGracePeriodSeconds=20,
        )
    )
    namespace.wait_until(
        "pod", "interrupted", lambda p: find_container_status(p, "setup")["state"].get("running"), "init running"
    )
    namespace.kubectl("delete", "pod", "interrupted", "--wait=false")
    failed_pod = namespace.wait_until_phase("interrupted", "Failed")
    assert "waiting" in find_container_status(failed_pod)["state"]
    remove_finalizers(namespace, "interrupted")


def test_termination_messages(namespace: Namespace) -> None:
    fallback = "FallbackToLogsOnError"
    long = "head -c 6000 /dev/zero | tr '\\0' x > /dev/termination-log"
    namespace.apply(
        pod(
            "speaking",
            shell("echo from the file > /dev/termination-log; echo from the log; exit 1", terminationMessagePolicy=fallback),
            {"name": "logged", **shell("echo first; echo last >&2; exit 1", terminationMessagePolicy=fallback)},
            {"name": "good", **shell("echo all is well", terminationMessagePolicy=fallback)},
            {"name": "elsewhere", **shell("echo there > /tmp/said", terminationMessagePath="/tmp/said")},
            {"name": "long", **shell(long)},
            restartPolicy="Never",
        )
    )
    failed_pod = namespace.wait_until_phase("speaking", "Failed")
    assert read_termination_message(failed_pod) == "from the file\n"
    assert sorted(read_termination_message(failed_pod, "logged").split()) == ["first", "last"]
    assert read_termination_message(failed_pod, "good") == ""
    assert read_termination_message(failed_pod, "elsewhere") == "there\n"
    assert read_termination_message(failed_pod, "long") == "x" * 4096


def test_a_pod_behind_a_service_drains(namespace: Namespace) -> None:
    probe = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    server = echo(args=["--drain=1"], readinessProbe=probe)
    namespace.apply(pod("draining", server, metadata=WITH_FINALIZER, terminationGracePeriodSeconds=20))
    namespace.wait_until_ready("draining")
    namespace.kubectl("delete", "pod", "draining", "--wait=false")
    assert wait_until_terminated(namespace, "draining")["exitCode"] == 0
    namespace.wait_until_phase("draining", "Succeeded")
    remove_finalizers(namespace, "draining")
