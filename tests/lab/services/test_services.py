"""Cluster IPs work inside the lab, and forward to ready endpoints only."""

from __future__ import annotations

from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.pods import Object, echo, pod, python, read_termination_json

SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"selector": {"part": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
}
ASK = """
import collections, json, sys, urllib.request
url = sys.argv[1]
found = collections.Counter()
for _ in range(30):
    try:
        found[json.load(urllib.request.urlopen(url, timeout=10))["pod"]] += 1
    except OSError as error:
        found[type(getattr(error, "reason", error)).__name__] += 1
open("/dev/termination-log", "w").write(json.dumps(found))
"""


def endpoints(namespace: Namespace) -> dict[str, bool]:
    """Return whether each pod is a ready endpoint, by pod name."""
    slices = namespace.list_all("endpointslices", "kubernetes.io/service-name=web")
    listed = [endpoint for part in slices for endpoint in part.get("endpoints") or []]
    return {endpoint["targetRef"]["name"]: endpoint["conditions"]["ready"] for endpoint in listed}


def count_responses(namespace: Namespace, name: str) -> dict[str, int]:
    """Return the number of responses by pod, of thirty requests from a pod inside the lab."""
    url = f"http://{namespace.get('service', 'web')['spec']['clusterIP']}"
    namespace.apply(pod(name, python(ASK, args=[url]), restartPolicy="Never"))
    responses_by_pod: dict[str, int] = read_termination_json(namespace.wait_until_phase(name, "Succeeded"))
    return responses_by_pod


def test_a_service_balances_over_ready_endpoints(namespace: Namespace) -> None:
    # A stall of the machine must not count as a failure; a rejected connection fails immediately.
    probe = {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 30}
    names = ("one", "two", "three")
    namespace.apply(SERVICE, *(pod(name, echo(readinessProbe=probe), metadata={"labels": {"part": "web"}}) for name in names))
    for name in names:
        namespace.wait_until_ready(name)
    wait_until(lambda: endpoints(namespace) == dict.fromkeys(names, True), "three ready endpoints")
    assert count_responses(namespace, "all") == {"one": 10, "two": 10, "three": 10}

    where = f"/api/v1/namespaces/{namespace.name}/pods/two:8080/proxy/unhealthy"
    namespace.kubectl("create", "--raw", where, "-f", "-", stdin="{}")
    namespace.kubectl("delete", "pod", "three", "--wait=false")
    wait_until(lambda: endpoints(namespace) == {"one": True, "two": False}, "one ready endpoint")
    assert count_responses(namespace, "rest") == {"one": 30}


def test_a_service_rejects_connections_until_its_first_endpoint(namespace: Namespace) -> None:
    namespace.apply(SERVICE)
    assert count_responses(namespace, "early").keys() <= {"ConnectionResetError", "ConnectionRefusedError", "RemoteDisconnected"}
    namespace.apply(
        pod("web", echo(readinessProbe={"tcpSocket": {"port": 8080}, "periodSeconds": 1}), metadata={"labels": {"part": "web"}})
    )
    wait_until(lambda: endpoints(namespace) == {"web": True}, "a ready endpoint")
    assert count_responses(namespace, "later") == {"web": 30}
