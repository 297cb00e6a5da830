"""Volumes of every kind that Aerie's pods use."""

from __future__ import annotations

from pathlib import Path

from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.pods import Object, config_map, pod, python, read_termination_json, read_termination_message, shell


def mount(name: str, path: str, **fields: object) -> Object:
    return {"name": name, "mountPath": path, **fields}


def test_empty_dirs_are_shared_between_containers(namespace: Namespace) -> None:
    reader_script = """
import json, os, time
while not os.path.exists("/memory/done"):
    time.sleep(0.05)
status = os.statvfs("/memory")
told = {
    "disk": open("/part/file").read(), "memory": open("/memory/file").read(),
    "size": status.f_blocks * status.f_frsize, "shm": os.statvfs("/dev/shm").f_blocks * status.f_frsize,
}
try:
    open("/part/other", "w")
except OSError as error:
    told["write"] = error.strerror
open("/dev/termination-log", "w").write(json.dumps(told))
"""
    writer_script = "mkdir -p /disk/sub; echo disk > /disk/sub/file; echo memory > /memory/file; touch /memory/done"
    namespace.apply(
        pod(
            "sharing",
            python(
                reader_script, volumeMounts=[mount("disk", "/part", subPath="sub", readOnly=True), mount("memory", "/memory")]
            ),
            {"name": "writer", **shell(writer_script, volumeMounts=[mount("disk", "/disk"), mount("memory", "/memory")])},
            volumes=[
                {"name": "disk", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            ],
            restartPolicy="Never",
        )
    )
    report = read_termination_json(namespace.wait_until_phase("sharing", "Succeeded"))
    assert report == {
        "disk": "disk\n", "memory": "memory\n", "size": 2**20, "shm": 64 * 2**20, "write": "Read-only file system",
    }  # fmt: skip


def test_config_maps_secrets_and_fields_as_files(namespace: Namespace) -> None:
    report_script = """
import json, os
told = {}
for root, folders, files in os.walk("/in", followlinks=True):
    if "/.." not in root:
        for name in files:
            path = os.path.join(root, name)
            told[path] = [open(path).read().strip(), oct(os.stat(path).st_mode & 0o777)]
try:
    open("/in/map/one", "w")
    told["write"] = "allowed"
except OSError as error:
    told["write"] = error.strerror
open("/dev/termination-log", "w").write(json.dumps(told))
"""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"key": "hidden"}}
    label = {"fieldRef": {"fieldPath": "metadata.labels['app']"}}
    namespace.apply(
        config_map("numbers", one="1", two="2"),
        secret,
        pod(
            "reading",
            python(
                report_script,
                volumeMounts=[
                    mount("map", "/in/map"),
                    mount("some", "/in/some"),
                    mount("secret", "/in/secret"),
                    mount("about", "/in/about"),
                    mount("mixed", "/in/mixed"),
                    mount("map", "/in/single/file", subPath="two"),
                ],
                resources={"limits": {"cpu": "1500m"}},
            ),
            volumes=[
                {"name": "map", "configMap": {"name": "numbers"}},
                {"name": "some", "configMap": {"name": "numbers", "items": [{"key": "two", "path": "deep/2", "mode": 0o400}]}},
                {"name": "secret", "secret": {"secretName": "keys", "defaultMode": 0o440}},
                {"name": "about", "downwardAPI": {"items": [{"path": "label", **label}]}},
                {
                    "name": "mixed",
                    "projected": {
                        "sources": [
                            {"configMap": {"name": "numbers", "items": [{"key": "one", "path": "one"}]}},
                            {"secret": {"name": "keys"}},
                            {"configMap": {"name": "absent", "optional": True}},
                            {
                                "downwardAPI": {
                                    "items": [
                                        {
                                            "path": "cpu",
                                            "resourceFieldRef": {"containerName": "main", "resource": "limits.cpu"},
                                        }
                                    ]
                                }
                            },
                        ]
                    },
                },
            ],
            restartPolicy="Never",
        ),
    )
    assert read_termination_json(namespace.wait_until_phase("reading", "Succeeded")) == {
        "/in/map/one": ["1", "0o644"],
        "/in/map/two": ["2", "0o644"],
        "/in/some/deep/2": ["2", "0o400"],
        "/in/secret/key": ["hidden", "0o440"],
        "/in/about/label": ["reading", "0o644"],
        "/in/mixed/one": ["1", "0o644"],
        "/in/mixed/key": ["hidden", "0o644"],
        "/in/mixed/cpu": ["2", "0o644"],
        "/in/single/file": ["2", "0o644"],
        "write": "Read-only file system",
    }


def test_a_changed_config_map_reaches_a_running_pod(namespace: Namespace) -> None:
    follow = "until grep -q new /in/text; do sleep 0.1; done; until grep -q again /about/notes; do sleep 0.1; done"
    notes = {"path": "notes", "fieldRef": {"fieldPath": "metadata.annotations"}}
    namespace.apply(
        config_map("changing", text="old"),
        pod(
            "following",
            shell(follow, volumeMounts=[mount("text", "/in"), mount("about", "/about")]),
            volumes=[
                {"name": "text", "configMap": {"name": "changing"}},
                {"name": "about", "downwardAPI": {"items": [notes]}},
            ],
            restartPolicy="Never",
        ),
    )
    namespace.wait_until_phase("following", "Running")
    namespace.apply(config_map("changing", text="new"))
    # A change of the pod's annotations makes a kubelet reconcile immediately, instead of within a minute.
    namespace.kubectl("annotate", "pod", "following", "look=again")
    namespace.wait_until_phase("following", "Succeeded")


def test_host_paths_persistent_and_image_volumes(namespace: Namespace, tmp_path: Path) -> None:
    for name in ("host", "volume"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    persistent = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace.name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": namespace.name,
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(tmp_path / "volume")},
            "nodeAffinity": {
                "required": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-2"]}]}
                    ]
                }
            },
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": namespace.name,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    script = """
        cat /host/file /claim/file /image/config.json > /dev/termination-log
        echo written > /claim/answer; mkdir /host/made
        ! touch /image/config.json
    """
    namespace.lab.apply(persistent)
    try:
        namespace.apply(
            claim,
            pod(
                "folders",
                shell(script, volumeMounts=[mount(name, f"/{name}") for name in ("host", "claim", "image")]),
                volumes=[
                    {"name": "host", "hostPath": {"path": str(tmp_path / "host"), "type": "Directory"}},
                    {"name": "claim", "persistentVolumeClaim": {"claimName": "models"}},
                    {"name": "image", "image": {"reference": "aerie.dev/test/model:1"}},
                ],
                restartPolicy="Never",
            ),
        )
        ended_pod = namespace.wait_until_phase("folders", "Succeeded")
        assert ended_pod["spec"]["nodeName"] == "node-2"
        assert read_termination_message(ended_pod) == 'hostvolume{"from": "image volume"}'
        assert (tmp_path / "volume" / "answer").read_text() == "written\n"
        assert (tmp_path / "host" / "made").is_dir()
    finally:
        namespace.lab.kubectl("delete", "persistentvolume", namespace.name, "--wait=false")


def test_a_service_account_token_opens_the_api_server(namespace: Namespace) -> None:
    ask = """
import json, os, ssl, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
context = ssl.create_default_context(cafile=folder + "ca.crt")
host = os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
space = open(folder + "namespace").read()
def status(kind):
    request = urllib.request.Request(f"https://{host}/api/v1/namespaces/{space}/{kind}")
    request.add_header("Authorization", "Bearer " + open(folder + "token").read())
    try:
        return urllib.request.urlopen(request, context=context).status
    except urllib.error.HTTPError as error:
        return error.code
open("/dev/termination-log", "w").write(json.dumps([space, status("configmaps"), status("secrets")]))
"""
    namespace.kubectl("create", "serviceaccount", "reader")
    namespace.kubectl("create", "role", "reader", "--verb=list", "--resource=configmaps")
    namespace.kubectl("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace.name}:reader")
    namespace.apply(pod("asking", python(ask), serviceAccountName="reader", restartPolicy="Never"))
    assert read_termination_json(namespace.wait_until_phase("asking", "Succeeded")) == [namespace.name, 200, 403]


def test_a_pod_waits_for_a_missing_volume(namespace: Namespace) -> None:
    namespace.apply(
        pod(
            "patient",
            shell("cat /in/key", volumeMounts=[mount("late", "/in")]),
            volumes=[{"name": "late", "configMap": {"name": "late"}}],
            restartPolicy="Never",
        )
    )
    wait_until(lambda: [m for r, m in namespace.events("patient") if r == "FailedMount" and "late" in m], "FailedMount")
    assert namespace.get("pod", "patient")["status"]["phase"] == "Pending"
    namespace.apply(config_map("late", key="value"))
    namespace.wait_until_phase("patient", "Succeeded")
