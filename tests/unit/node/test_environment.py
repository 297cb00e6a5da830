"""Variables, command and quantities, as in Kubernetes."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie_lab.node.environment import (
    ConfigError,
    build_command_line,
    build_environment,
    build_service_variables,
    expand_variables,
    parse_quantity,
    resolve_field_reference,
    resolve_resource_reference,
)

VARIABLES = {"A": "1", "B": "two words", "EMPTY": "", "ODD": "$(A)"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("$(A)$(B)", "1two words"),
        ("-$(EMPTY)-", "--"),
        ("$(ODD)", "$(A)"),  # what a variable holds is not expanded again
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$$$(A)", "$$(A)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$(A", "$(A"),
        ("$A ${A}", "$A ${A}"),
        ("$()", "$()"),
        ("$", "$"),
        ("a$", "a$"),
        ("$?-$!", "$?-$!"),
        ("$(UNKNOWN$(A))", "$(UNKNOWN$(A))"),  # no nesting: the name is all up to the first bracket
        ("$(A))", "1)"),
    ],
)
def test_variables_are_expanded(text: str, expanded: str) -> None:
    assert expand_variables(text, VARIABLES) == expanded


@given(st.text(st.characters(exclude_characters="$")))
def test_text_without_a_dollar_sign_is_unchanged(text: str) -> None:
    assert expand_variables(text, VARIABLES) == text


@given(st.text("$()AB", max_size=12))
def test_doubled_dollar_signs_escape_any_text(text: str) -> None:
    assert expand_variables(text.replace("$", "$$"), VARIABLES) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", 0.5), ("2", 2), ("2Gi", 2**31), ("1.5Ki", 1536), ("1e3", 1000), ("12E", 12e18), ("1E2", 100), (".5", 0.5),
     ("100k", 100_000), ("-1", -1), ("3u", 3e-6), ("7n", 7e-9)],
)  # fmt: skip
def test_quantities_are_parsed(text: str, number: float) -> None:
    assert parse_quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "abc", "1x", "1 Gi", "1.2.3", "1kk", "Gi"])
def test_invalid_quantities_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="not a quantity"):
        parse_quantity(text)


def build_pod(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "p",
            "namespace": "n",
            "uid": "u",
            "labels": {"b": "2", "a": 'say "1"'},
            "annotations": {"x/y": "z"},
        },
        "spec": {"nodeName": "node-1", "serviceAccountName": "s", "containers": [{"name": "c"}], **spec},
    }


def test_field_references_are_resolved() -> None:
    status = {"podIP": "10.0.0.1", "hostIP": "10.0.0.2"}
    values = {
        "metadata.name": "p",
        "metadata.namespace": "n",
        "metadata.uid": "u",
        "metadata.labels['b']": "2",
        "metadata.labels['absent']": "",
        "metadata.annotations['x/y']": "z",
        "metadata.labels": 'a="say \\"1\\""\nb="2"',
        "spec.nodeName": "node-1",
        "spec.serviceAccountName": "s",
        "status.podIP": "10.0.0.1",
        "status.hostIP": "10.0.0.2",
    }
    assert {field: resolve_field_reference(build_pod(), field, status) for field in values} == values
    with pytest.raises(ConfigError, match=r"metadata\.generation"):
        resolve_field_reference(build_pod(), "metadata.generation", status)


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ({"resource": "limits.cpu"}, "2"),  # 1.5 rounded up
        ({"resource": "limits.cpu", "divisor": "1m"}, "1500"),
        ({"resource": "limits.cpu", "divisor": "0"}, "2"),
        ({"resource": "requests.cpu", "divisor": "1m"}, "100"),
        ({"resource": "requests.memory", "divisor": "1Mi"}, "1024"),  # the limit, where no request is set
        ({"resource": "limits.memory"}, str(2**30)),
        ({"resource": "limits.ephemeral-storage"}, "1000"),  # the node's, where no limit is set
        ({"resource": "requests.ephemeral-storage"}, "0"),
        ({"resource": "limits.cpu", "containerName": "other"}, "8"),
    ],
)
def test_resource_references_are_resolved(reference: dict[str, Any], value: str) -> None:
    container = {"name": "c", "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1500m", "memory": "1Gi"}}}
    pod = build_pod(containers=[container, {"name": "other"}])
    assert resolve_resource_reference(pod, container, reference, {"cpu": "8", "ephemeral-storage": "1k"}) == value


@given(st.integers(1, 10**7))
def test_no_resource_is_lost_to_rounding(millis: int) -> None:
    container = {"name": "c", "resources": {"limits": {"cpu": f"{millis}m"}}}
    reference = {"resource": "limits.cpu", "divisor": "1m"}
    cpu_limit = resolve_resource_reference(build_pod(containers=[container]), container, reference, {})
    assert cpu_limit == str(millis)


def build_service(name: str, namespace: str, address: str = "10.96.0.7", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterIP": address, **spec}}


def test_service_variables() -> None:
    services = [
        build_service("kubernetes", "default", "10.96.0.1", ports=[{"name": "https", "port": 443}]),
        build_service("my-db", "n", ports=[{"name": "sql-main", "port": 5432}, {"port": 53, "protocol": "UDP"}]),
        build_service("headless", "n", "None", ports=[{"port": 1}]),
        build_service("foreign", "elsewhere", ports=[{"port": 1}]),
        build_service("portless", "n"),
    ]
    linked = build_service_variables(services, "n", enable_service_links=True)
    assert linked == {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_SERVICE_PORT_HTTPS": "443",
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
        "KUBERNETES_PORT_443_TCP": "tcp://10.96.0.1:443",
        "KUBERNETES_PORT_443_TCP_PROTO": "tcp",
        "KUBERNETES_PORT_443_TCP_PORT": "443",
        "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
        "MY_DB_SERVICE_HOST": "10.96.0.7",
        "MY_DB_SERVICE_PORT": "5432",
        "MY_DB_SERVICE_PORT_SQL_MAIN": "5432",
        "MY_DB_PORT": "tcp://10.96.0.7:5432",
        "MY_DB_PORT_5432_TCP": "tcp://10.96.0.7:5432",
        "MY_DB_PORT_5432_TCP_PROTO": "tcp",
        "MY_DB_PORT_5432_TCP_PORT": "5432",
        "MY_DB_PORT_5432_TCP_ADDR": "10.96.0.7",
        "MY_DB_PORT_53_UDP": "udp://10.96.0.7:53",
        "MY_DB_PORT_53_UDP_PROTO": "udp",
        "MY_DB_PORT_53_UDP_PORT": "53",
        "MY_DB_PORT_53_UDP_ADDR": "10.96.0.7",
    }
    unlinked = build_service_variables(services, "n", enable_service_links=False)
    assert {name.partition("_")[0] for name in unlinked} == {"KUBERNETES"}


OBJECTS = {
    ("configmaps", "map"): {"data": {"k": "from map", "same": "map"}},
    ("secrets", "secret"): {"data": {"s": base64.b64encode(b"from secret").decode(), "same": base64.b64encode(b"x").decode()}},
}


def build_container_environment(**container: Any) -> dict[str, str]:
    return build_environment(
        build_pod(),
        {"name": "c", **container},
        service_variables={"BASE": "b", "k": "service"},
        lookup=lambda plural, name: OBJECTS.get((plural, name)),
        status={},
        node={},
    )


def test_later_sources_override_earlier_ones() -> None:
    environment = build_container_environment(
        envFrom=[{"configMapRef": {"name": "map"}}, {"prefix": "P_", "secretRef": {"name": "secret"}}],
        env=[{"name": "same", "value": "$(same)+$(P_s)+$(BASE)+$(AFTER)"}, {"name": "AFTER", "value": "x"}],
    )
    assert environment == {
        "BASE": "b",
        "k": "from map",
        "same": "map+from secret+b+$(AFTER)",
        "P_s": "from secret",
        "P_same": "x",
        "AFTER": "x",
    }


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"envFrom": [{"configMapRef": {"name": "no"}}]}, 'configmap "no" not found'),
        ({"env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": "no", "key": "k"}}}]}, 'secret "no" not found'),
        ({"env": [{"name": "E", "valueFrom": {"configMapKeyRef": {"name": "map", "key": "z"}}}]}, "key z in configmap map"),
        ({"env": [{"name": "E", "valueFrom": {"fileKeyRef": {}}}]}, "fileKeyRef is not offered"),
    ],
)  # fmt: skip
def test_missing_objects_and_keys_are_reported(container: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_container_environment(**container)


def test_optional_objects_and_keys_may_be_missing() -> None:
    environment = build_container_environment(
        envFrom=[{"configMapRef": {"name": "no", "optional": True}}],
        env=[
            {"name": "E", "valueFrom": {"configMapKeyRef": {"name": "no", "key": "k", "optional": True}}},
            {"name": "F", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "no", "optional": True}}},
        ],
    )
    assert not environment.keys() & {"E", "F"}


@pytest.mark.parametrize(
    ("container", "line"),
    [
        ({}, ["entry", "default"]),
        ({"args": ["$(A)"]}, ["entry", "1"]),
        ({"command": ["run"]}, ["run"]),
        ({"command": ["run", "$(A)"], "args": ["$(NO)"]}, ["run", "1", "$(NO)"]),
    ],
)
def test_command_and_arguments(container: dict[str, Any], line: list[str]) -> None:
    assert build_command_line(container, ["entry"], ["default"], VARIABLES) == line
