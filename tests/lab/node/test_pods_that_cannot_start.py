"""Pods that cannot be run as specified: the status of the container and an event state the reason."""

from __future__ import annotations

from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.pods import Object, config_map, find_container_status, pod, read_termination_message, shell


def wait_for_waiting_state(namespace: Namespace, name: str, reason: str) -> Object:
    """Wait until the container waits for `reason`, and return its waiting state."""
    waiting_pod = namespace.wait_until(
        "pod",
        name,
        lambda p: (
            "containerStatuses" in p["status"] and find_container_status(p)["state"].get("waiting", {}).get("reason") == reason
        ),
        reason,
    )
    waiting: Object = find_container_status(waiting_pod)["state"]["waiting"]
    return waiting


def test_an_unknown_image_is_reported(namespace: Namespace) -> None:
    namespace.apply(pod("imageless", {"image": "example.org/team/model:2"}))
    waiting = wait_for_waiting_state(namespace, "imageless", "ErrImagePull")
    assert "example.org/team/model:2" in waiting["message"]
    assert "example.org/team/model:2" in wait_for_waiting_state(namespace, "imageless", "ImagePullBackOff")["message"]
    wait_until(
        lambda: [m for r, m in namespace.events("imageless") if r == "Failed" and "example.org/team/model" in m], "an event"
    )
    assert namespace.get("pod", "imageless")["status"]["phase"] == "Pending"


def test_a_missing_command_is_reported(namespace: Namespace) -> None:
    namespace.apply(pod("commandless", {"image": "aerie.dev/lab/shell", "command": ["/no/such/command"]}, restartPolicy="Never"))
    ended = find_container_status(namespace.wait_until_phase("commandless", "Failed"))["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("StartError", 128)
    assert "/no/such/command" in ended["message"]


def test_a_pod_starts_once_its_config_map_exists(namespace: Namespace) -> None:
    env = [{"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "late", "key": "key"}}}]
    namespace.apply(pod("waiting", shell("echo $KEY > /dev/termination-log", env=env), restartPolicy="Never"))
    assert 'configmap "late" not found' in wait_for_waiting_state(namespace, "waiting", "CreateContainerConfigError")["message"]
    namespace.apply(config_map("late", other="1"))
    wait_until(lambda: [m for r, m in namespace.events("waiting") if "couldn't find key key" in m], "the key is missed")
    namespace.apply(config_map("late", key="value"))
    assert read_termination_message(namespace.wait_until_phase("waiting", "Succeeded")) == "value\n"


def test_unsupported_fields_are_reported(namespace: Namespace) -> None:
    namespace.apply(
        pod(
            "demanding",
            shell("true", lifecycle={"postStart": {"exec": {"command": ["true"]}}}, ports=[{"containerPort": 1, "hostPort": 1}]),
            hostPID=True,
            volumes=[{"name": "nfs", "nfs": {"server": "example.org", "path": "/"}}],
        )
    )
    message = wait_for_waiting_state(namespace, "demanding", "LabUnsupported")["message"]
    for field in ("spec.hostPID", "[main].lifecycle.postStart", "hostPort", "spec.volumes[nfs].nfs"):
        assert field in message
    wait_until(lambda: [m for r, m in namespace.events("demanding") if r == "LabUnsupported" and "hostPID" in m], "an event")
    assert namespace.get("pod", "demanding")["status"]["phase"] == "Pending"
    namespace.kubectl("delete", "pod", "demanding", "--timeout=180s")
