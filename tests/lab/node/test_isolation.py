"""A pod has its own network, host name, processes and file system, and does not change those of the machine."""

from __future__ import annotations

from pathlib import Path

from aerie_lab.sandbox.addresses import BRIDGE_IP, BRIDGE_MAC
from aerie_lab.testing import Namespace
from aerie_lab.testing.pods import (
    echo,
    find_container_status,
    pod,
    python,
    read_termination_json,
    read_termination_message,
    shell,
)

WEB = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}


def test_each_pod_has_an_address_and_all_ports(namespace: Namespace) -> None:
    namespace.apply(pod("one", echo(readinessProbe=WEB)), pod("two", echo(readinessProbe=WEB)))
    first_ip, second_ip = (namespace.wait_until_ready(name)["status"]["podIP"] for name in ("one", "two"))
    assert first_ip != second_ip
    ask = f"""
import json, urllib.request
def pod(address):
    return json.load(urllib.request.urlopen(f"http://{{address}}:8080/", timeout=10))["pod"]
open("/dev/termination-log", "w").write(json.dumps([pod("{first_ip}"), pod("{second_ip}")]))
"""
    namespace.apply(pod("asking", python(ask), restartPolicy="Never"))
    assert read_termination_json(namespace.wait_until_phase("asking", "Succeeded")) == ["one", "two"]


def test_the_gateway_of_a_pod_keeps_its_mac_address(namespace: Namespace) -> None:
    ask = f"""
import json, socket
try:
    socket.create_connection(("{BRIDGE_IP}", 9), timeout=10)
except ConnectionRefusedError:
    pass
entries = [line.split() for line in open("/proc/net/arp")]
open("/dev/termination-log", "w").write(json.dumps([e[3] for e in entries if e[0] == "{BRIDGE_IP}"]))
"""
    namespace.apply(pod("asking", python(ask), restartPolicy="Never"))
    # The kernel's default would be the address of one of the pods' veth devices.
    assert read_termination_json(namespace.wait_until_phase("asking", "Succeeded")) == [BRIDGE_MAC]


def test_containers_of_a_pod_share_its_network_and_nothing_else(namespace: Namespace) -> None:
    script = """
import json, os, socket, time, urllib.request
def ask():
    for _ in range(300):
        try:
            return json.load(urllib.request.urlopen("http://localhost:8080/", timeout=10))["pod"]
        except OSError:
            time.sleep(0.05)
told = {
    "neighbour": ask(), "hostname": socket.gethostname(), "address": socket.gethostbyname("friend.example"),
    "pid": os.getpid(), "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
}
open("/dev/termination-log", "w").write(json.dumps(told))
os.kill(1, 15)
"""
    namespace.apply(
        pod(
            "couple",
            python(script),
            {"name": "server", **echo()},
            hostname="host-of-couple",
            hostAliases=[{"ip": "10.1.2.3", "hostnames": ["friend.example"]}],
            restartPolicy="Never",
        )
    )
    ended_pod = namespace.wait_until("pod", "couple", lambda p: find_container_status(p)["state"].get("terminated"), "told")
    report = read_termination_json(ended_pod)
    assert report == {
        "neighbour": "host-of-couple",
        "hostname": "host-of-couple",
        "address": "10.1.2.3",
        "pid": 1,
        "processes": 1,
    }


def test_writes_do_not_change_files_of_the_machine(namespace: Namespace) -> None:
    mark = f"aerie-lab-{namespace.name}"
    script = f"""
        for folder in /usr /etc /tmp /root /run /var/tmp; do touch $folder/{mark}; done
        mkdir /{mark}
        echo changed >> /etc/passwd
        rm -f /bin/ls
        ! touch /sys/{mark} 2>/dev/null
        ! (echo 1 > /proc/sys/kernel/sysrq) 2>/dev/null
        ls /etc/{mark} 2>/dev/null || test -e /etc/{mark}
    """
    passwords = Path("/etc/passwd").read_bytes()
    namespace.apply(pod("scribbling", shell(script, terminationMessagePolicy="FallbackToLogsOnError"), restartPolicy="Never"))
    namespace.wait_until_phase("scribbling", "Succeeded")
    for folder in ("/usr", "/etc", "/tmp", "/root", "/run", "/var/tmp", "/"):
        assert not (Path(folder) / mark).exists()
    assert Path("/etc/passwd").read_bytes() == passwords
    assert Path("/bin/ls").exists()


def test_a_read_only_root(namespace: Namespace) -> None:
    script = """
        for place in / /usr /tmp /etc /run; do
            if touch $place/x 2>/dev/null; then echo $place is writable > /dev/termination-log; exit 1; fi
        done
        touch /scratch/x /dev/shm/x
    """
    namespace.apply(
        pod(
            "strict",
            shell(
                script,
                securityContext={"readOnlyRootFilesystem": True},
                volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}],
            ),
            volumes=[{"name": "scratch", "emptyDir": {}}],
            restartPolicy="Never",
        )
    )
    ended_pod = namespace.wait_until("pod", "strict", lambda p: p["status"].get("phase") in ("Succeeded", "Failed"), "done")
    assert read_termination_message(ended_pod) == ""
    assert ended_pod["status"]["phase"] == "Succeeded"
