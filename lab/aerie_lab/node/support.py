"""Which parts of a pod the lab honours, which it accepts without effect, and which it refuses. Data and one pure function.

A field that is in neither list is rejected with its path, so that nothing is ignored silently when Kubernetes or a
chart grows. What is accepted without effect is so because a process of this machine cannot tell the difference in a way
that matters to a test (resource limits, identity), or because another component acts on it (scheduling, quotas).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aerie_lab.kube.client import KubeObject

_SUPPORTED_FIELDS = {
    "pod": {
        "activeDeadlineSeconds", "containers", "enableServiceLinks", "hostAliases", "hostname", "imagePullSecrets",
        "initContainers", "readinessGates", "restartPolicy", "serviceAccountName", "terminationGracePeriodSeconds",
        "volumes",
    },
    "container": {
        "args", "command", "env", "envFrom", "image", "lifecycle", "livenessProbe", "name", "ports", "readinessProbe",
        "securityContext", "startupProbe", "terminationMessagePath", "terminationMessagePolicy", "volumeMounts",
        "workingDir",
    },
    "container securityContext": {"readOnlyRootFilesystem"},
    "volume": {
        "configMap", "downwardAPI", "emptyDir", "hostPath", "image", "name", "persistentVolumeClaim", "projected", "secret",
    },
    "volume mount": {"mountPath", "name", "readOnly", "subPath", "subPathExpr"},
    "probe": {
        "exec", "failureThreshold", "httpGet", "initialDelaySeconds", "periodSeconds", "successThreshold", "tcpSocket",
        "terminationGracePeriodSeconds", "timeoutSeconds",
    },
    "lifecycle": {"preStop"},
    "preStop": {"exec", "httpGet", "sleep"},
    "port": {"containerPort", "name", "protocol"},
}  # fmt: skip

_IGNORED_FIELDS = {
    # acted on by the scheduler, the API server or a controller, or only naming what the lab has one of
    "pod": {
        "affinity", "automountServiceAccountToken", "dnsConfig", "dnsPolicy", "nodeName", "nodeSelector", "overhead",
        "preemptionPolicy", "priority", "priorityClassName", "runtimeClassName", "schedulerName", "schedulingGates",
        "securityContext", "serviceAccount", "setHostnameAsFQDN", "subdomain", "tolerations", "topologySpreadConstraints",
        "os", "resources",
    },
    # resources are counted by the scheduler and not enforced; nothing is pulled; standard input is empty
    "container": {"imagePullPolicy", "resizePolicy", "resources", "stdin", "stdinOnce", "tty"},
    # every process runs as the lab's user, in namespaces of its own
    "container securityContext": {
        "allowPrivilegeEscalation", "appArmorProfile", "capabilities", "privileged", "procMount", "runAsGroup",
        "runAsNonRoot", "runAsUser", "seLinuxOptions", "seccompProfile",
    },
    "volume": set[str](),
    "volume mount": {"mountPropagation", "recursiveReadOnly"},
    "probe": set[str](),
    "lifecycle": set[str](),
    "preStop": set[str](),
    "port": set[str](),
}  # fmt: skip

PROCESSLESS_ANNOTATION = "lab.aerie.dev/processless"
"""A pod with this annotation set to "true" is Ready immediately and runs nothing: for tests of scale."""


def is_processless(pod: KubeObject) -> bool:
    """Return whether the pod becomes Ready without a process."""
    return bool((pod["metadata"].get("annotations") or {}).get(PROCESSLESS_ANNOTATION) == "true")


HUB_LABEL = "lab.aerie.dev/hub"
"""Label of a namespace; with the value "true" its containers have HF_ENDPOINT set to the lab's Hub. Others need it in their
specs."""

PROCESSLESS_LOAD_SECONDS_ANNOTATION = "lab.aerie.dev/processless-load-seconds"
"""Seconds that a processless pod is not Ready, as an engine that loads its model."""


def read_processless_load_seconds(pod: KubeObject) -> float:
    """Return the seconds until a processless pod is Ready. Raises ValueError for an invalid number."""
    text = (pod["metadata"].get("annotations") or {}).get(PROCESSLESS_LOAD_SECONDS_ANNOTATION, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise ValueError(
            f"the annotation {PROCESSLESS_LOAD_SECONDS_ANNOTATION} is {text!r}, and has to be a number of seconds from 0 to 86400"
        )
    return seconds


def find_unsupported_fields(pod: KubeObject) -> list[str]:
    """Return the paths of all fields of the pod that the lab does not support; empty when it can run the pod."""
    return list(_iterate_unsupported_fields(pod["spec"]))


def _iterate_unsupported_fields(spec: KubeObject) -> Iterator[str]:
    yield from _unknown_fields("pod", spec, "spec")
    for field in ("initContainers", "containers"):
        for container in spec.get(field) or []:
            where = f"spec.{field}[{container['name']}]"
            yield from _unknown_fields("container", container, where)
            yield from _unknown_fields("container securityContext", container.get("securityContext"), f"{where}.securityContext")
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                yield from _unknown_fields("probe", container.get(probe), f"{where}.{probe}")
            lifecycle = container.get("lifecycle")
            yield from _unknown_fields("lifecycle", lifecycle, f"{where}.lifecycle")
            yield from _unknown_fields("preStop", (lifecycle or {}).get("preStop"), f"{where}.lifecycle.preStop")
            for port in container.get("ports") or []:
                yield from _unknown_fields("port", port, f"{where}.ports[{port['containerPort']}]")
            for mount in container.get("volumeMounts") or []:
                yield from _unknown_fields("volume mount", mount, f"{where}.volumeMounts[{mount['name']}]")
    for volume in spec.get("volumes") or []:
        yield from _unknown_fields("volume", volume, f"spec.volumes[{volume['name']}]")


def _unknown_fields(kind: str, part: Mapping[str, Any] | None, where: str) -> Iterator[str]:
    known_fields = _SUPPORTED_FIELDS[kind] | _IGNORED_FIELDS[kind]
    for field, value in (part or {}).items():
        if field not in known_fields and value not in (None, False, [], {}, ""):
            yield f"{where}.{field}"
