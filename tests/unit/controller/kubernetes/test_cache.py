"""The cache, with an API server whose messages arrive late, out of order or not at all."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aerie.controller.kubernetes import cache as cache_module
from aerie.controller.kubernetes.cache import ObjectCache, Relist
from aerie.controller.kubernetes.client import DEPLOYMENTS, PODS, SERVICES, SPECULATIVE_DEPLOYMENTS
from aerie.controller.work_queue import NamespacedName
from aerie.manifests import naming
from aerie.manifests.engine_key import find_engine_key
from aerie.manifests.evaluator import build_evaluator_deployment
from aerie.manifests.preflight_job import PreflightJobConfig
from tests.unit.manifests.test_objects import resource

CHAT = NamespacedName("default", "chat")
OTHER = NamespacedName("default", "other")


def build_object(
    kind: str, name: str, version: int, *, owner: str | None = "chat", uid: str = "u1", **fields: Any
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"namespace": "default", "name": name, "uid": uid, "resourceVersion": str(version)}
    if owner is not None:
        metadata["labels"] = {naming.NAME_LABEL: owner}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **fields}


class RecordingCache:
    """A cache that records the keys it has notified."""

    def __init__(self) -> None:
        self.notified_keys: list[NamespacedName] = []
        self.cache = ObjectCache(self.notified_keys.append)

    def take_notified_keys(self) -> set[NamespacedName]:
        keys = set(self.notified_keys)
        self.notified_keys.clear()
        return keys

    def versions_by_name(self, key: NamespacedName = CHAT) -> dict[str, str]:
        return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in self.cache.list_owned_objects(key)}


# -------------------------------------------------------------------------------------------------------------------- examples
def test_resource_and_its_owned_objects_are_found_by_key() -> None:
    recorder = RecordingCache()
    resource = build_object(SPECULATIVE_DEPLOYMENTS.kind, "chat", 1, owner=None, spec={"replicas": 2})
    recorder.cache.put(resource)
    recorder.cache.put(build_object("Service", "chat", 2))
    check = build_object("Pod", "chat-check", 3, owner=None)
    check["metadata"]["labels"] = {naming.PREFLIGHT_LABEL: "chat"}
    recorder.cache.put(check)
    recorder.cache.put(build_object("Service", "other", 4, owner="other"))
    assert recorder.cache.get_resource(CHAT) == resource
    assert recorder.cache.get_resource(OTHER) is None
    assert recorder.cache.list_resources() == [CHAT]
    assert recorder.versions_by_name() == {"chat": "2", "chat-check": "3"}
    assert recorder.take_notified_keys() == {CHAT, OTHER}
    assert len(recorder.cache._entries) == 4


def test_server_metadata_is_pruned_and_cached_objects_are_immutable() -> None:
    recorder = RecordingCache()
    item = build_object("PodDisruptionBudget", "chat", 1)
    applied = "kubectl.kubernetes.io/last-applied-configuration"
    item["metadata"] |= {"managedFields": [{"manager": "x"}], "annotations": {applied: "{...}", "mine": "yes"}}
    recorder.cache.put(item)
    assert item["metadata"]["managedFields"]
    (cached_object,) = recorder.cache.list_owned_objects(CHAT)
    assert "managedFields" not in cached_object["metadata"]
    assert cached_object["metadata"]["annotations"] == {"mine": "yes"}
    cached_object["metadata"]["name"] = "changed"
    assert recorder.versions_by_name() == {"chat": "1"}


def test_data_that_cannot_change_are_not_cached() -> None:
    recorder = RecordingCache()
    for version, (name, fields) in enumerate({"chat-plugin": {"immutable": True}, "chat-record": {}}.items()):
        recorder.cache.put({**build_object("ConfigMap", name, version + 1), "data": {"a": "b"}, **fields})
    cached = {item["metadata"]["name"]: item.get("data") for item in recorder.cache.list_owned_objects(CHAT)}
    assert cached == {"chat-plugin": None, "chat-record": {"a": "b"}}


@pytest.mark.parametrize("kind", ["HTTPRoute", "Service"])
def test_managers_and_times_of_routes_and_services_are_cached(kind: str) -> None:
    recorder = RecordingCache()
    item = build_object(kind, "chat", 1)
    at = "2026-01-01T00:00:00Z"
    item["metadata"]["managedFields"] = [{"manager": "aerie", "time": at, "fieldsV1": {"f:spec": {}}, "operation": "Apply"}]
    recorder.cache.put(item)
    (cached_object,) = recorder.cache.list_owned_objects(CHAT)
    assert cached_object["metadata"]["managedFields"] == [{"manager": "aerie", "time": at}]


def engine_pod(name: str, version: int) -> dict[str, Any]:
    container = {"name": "engine", "ports": [{"name": "http", "containerPort": 8000}], "env": [{"name": "X", "value": "y"}]}
    spec = {"nodeName": "node-1", "containers": [container], "volumes": [{"name": "models"}]}
    return build_object("Pod", name, version, spec=spec, status={"phase": "Running"})


def test_of_a_pod_spec_only_what_is_read_is_cached() -> None:
    recorder = RecordingCache()
    recorder.cache.put(engine_pod("chat-1", 1))
    (cached_object,) = recorder.cache.list_owned_objects(CHAT)
    ports = [{"name": "http", "containerPort": 8000}]
    assert cached_object["spec"] == {"nodeName": "node-1", "containers": [{"name": "engine", "ports": ports}]}
    assert cached_object["status"] == {"phase": "Running"}


KEY = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "chat"}}}


@pytest.mark.parametrize(
    "engine",
    [
        {"env": [KEY]},
        {"env": [{**KEY, "name": "KEY"}], "args": ["/models/target", "--api-key=$(KEY)"]},
        {"env": [{**KEY, "name": "KEY"}], "command": ["vllm", "serve", "--api-key", "$(KEY)"]},
        {"env": [{**KEY, "name": "KEY"}, {"name": "VLLM_API_KEY", "value": "$(KEY)"}]},
        {"args": ["--api-key=in-plain-text"]},
        {"env": [{"name": "OTHER", "value": "1"}], "args": ["/models/target"]},
    ],
)
def test_an_evaluator_of_a_cached_pod_is_that_of_the_pod(engine: dict[str, Any]) -> None:
    pod = engine_pod("chat-1", 1)
    pod["spec"]["containers"][0] |= engine
    pod["spec"]["containers"].insert(0, {"name": "sidecar", "env": [KEY], "args": ["--api-key=other"]})
    pod["spec"] |= {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    recorder = RecordingCache()
    recorder.cache.put(pod)
    (cached,) = recorder.cache.list_owned_objects(CHAT)

    assert find_engine_key(cached) == find_engine_key(pod)
    config = PreflightJobConfig("aerie:1", pull_secrets=("own",))
    built, expected = (
        build_evaluator_deployment(resource(), item, "http://10.0.0.1:8000", 8.0, config) for item in (cached, pod)
    )
    assert built == expected
    assert built["spec"]["template"]["spec"]["tolerations"] == pod["spec"]["tolerations"]
    assert "other" not in json.dumps(cached), "a sidecar's arguments are not kept"


@pytest.mark.parametrize("pods", [1, 40, 1000])
def test_each_pod_version_of_a_large_fleet_is_unpacked_once(pods: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, unpack_count = RecordingCache(), 0
    unpack = cache_module._unpack

    def count_unpack(packed: bytes) -> dict[str, Any]:
        nonlocal unpack_count
        unpack_count += 1
        return unpack(packed)

    monkeypatch.setattr(cache_module, "_unpack", count_unpack)
    for number in range(pods):
        recorder.cache.put(engine_pod(f"chat-{number}", number + 1))
    first = recorder.cache.list_owned_objects(CHAT)
    recorder.cache.put(engine_pod("chat-0", 5000))
    second = recorder.cache.list_owned_objects(CHAT)
    assert len(first) == len(second) == pods
    assert recorder.versions_by_name()["chat-0"] == "5000"
    assert unpack_count == (pods + 1 if pods >= cache_module.MIN_OBJECTS_KEPT_UNPACKED else 3 * pods)


def test_older_or_repeated_versions_are_ignored() -> None:
    recorder = RecordingCache()
    recorder.cache.put(build_object("Service", "chat", 5))
    assert recorder.take_notified_keys() == {CHAT}
    recorder.cache.put(build_object("Service", "chat", 4))
    recorder.cache.put(build_object("Service", "chat", 5))
    assert recorder.versions_by_name() == {"chat": "5"}
    assert recorder.take_notified_keys() == set()


def test_response_after_the_deletion_does_not_restore_the_object() -> None:
    recorder = RecordingCache()
    recorder.cache.put(build_object("Service", "chat", 5))
    recorder.cache.handle_deletion(build_object("Service", "chat", 8))
    recorder.cache.put(build_object("Service", "chat", 7))
    assert recorder.versions_by_name() == {}
    recorder.cache.put(build_object("Service", "chat", 9, uid="u2"))
    assert recorder.versions_by_name() == {"chat": "9"}


def test_late_deletion_keeps_a_recreated_object() -> None:
    recorder = RecordingCache()
    recorder.cache.put(build_object("Service", "chat", 5))
    recorder.cache.put(build_object("Service", "chat", 9, uid="u2"))
    recorder.take_notified_keys()
    recorder.cache.handle_deletion(build_object("Service", "chat", 8))
    assert recorder.versions_by_name() == {"chat": "9"}
    assert recorder.take_notified_keys() == set()


def test_object_deleted_without_an_event_is_removed_by_the_next_list() -> None:
    recorder = RecordingCache()
    recorder.cache.put(build_object("Deployment", "stale", 5))
    recorder.cache.put(build_object("Service", "of another kind", 5))
    listing = recorder.cache.start_relist(DEPLOYMENTS)
    listing.add([build_object("Deployment", "there", 6)])
    recorder.take_notified_keys()
    listing.end("7")
    assert recorder.versions_by_name() == {"there": "6", "of another kind": "5"}
    assert recorder.take_notified_keys() == {CHAT}
    recorder.cache.put(build_object("Deployment", "stale", 6))  # a delayed response
    assert recorder.versions_by_name() == {"there": "6", "of another kind": "5"}


def test_events_during_a_list_are_kept() -> None:
    recorder = RecordingCache()
    listing = recorder.cache.start_relist(DEPLOYMENTS)
    recorder.cache.put(build_object("Deployment", "made meanwhile", 12))
    recorder.cache.handle_deletion(build_object("Deployment", "deleted meanwhile", 13))
    listing.add([build_object("Deployment", "deleted meanwhile", 6)])
    listing.end("10")
    assert recorder.versions_by_name() == {"made meanwhile": "12"}


def test_list_of_a_namespace_or_resource_affects_no_other_objects() -> None:
    recorder = RecordingCache()
    elsewhere = build_object("Service", "chat", 5)
    elsewhere["metadata"]["namespace"] = "elsewhere"
    for item in (elsewhere, build_object("Service", "chat", 5), build_object("Service", "other", 5, owner="other")):
        recorder.cache.put(item)
    recorder.cache.start_relist(SERVICES, owner=CHAT).end("9")
    assert recorder.versions_by_name() == {}
    assert recorder.versions_by_name(OTHER) == {"other": "5"}
    recorder.cache.start_relist(SERVICES, "default").end("9")
    assert recorder.versions_by_name(OTHER) == {}
    assert recorder.versions_by_name(NamespacedName("elsewhere", "chat")) == {"chat": "5"}


def test_removed_kind_has_no_objects() -> None:
    recorder = RecordingCache()
    recorder.cache.put(build_object("Service", "chat", 5))
    recorder.cache.start_relist(SERVICES).end(None)
    assert recorder.versions_by_name() == {}
    recorder.cache.put(build_object("Service", "chat", 6))
    assert recorder.versions_by_name() == {"chat": "6"}


def test_relabelled_object_moves_and_both_resources_are_notified() -> None:
    recorder = RecordingCache()
    recorder.cache.put(build_object("Service", "chat", 5))
    recorder.take_notified_keys()
    recorder.cache.put(build_object("Service", "chat", 6, owner="other"))
    assert (recorder.versions_by_name(), recorder.versions_by_name(OTHER)) == ({}, {"chat": "6"})
    assert recorder.take_notified_keys() == {CHAT, OTHER}
    recorder.cache.put(build_object("Service", "chat", 7, owner=None))
    assert (recorder.versions_by_name(), recorder.versions_by_name(OTHER)) == ({}, {})
    assert recorder.take_notified_keys() == {OTHER}


def test_resource_not_found_is_removed_unless_recreated() -> None:
    recorder = RecordingCache()
    recorder.cache.put(build_object(SPECULATIVE_DEPLOYMENTS.kind, "chat", 5, owner=None))
    recorder.cache.put(build_object(SPECULATIVE_DEPLOYMENTS.kind, "chat", 9, owner=None, uid="u2"))
    recorder.cache.handle_not_found(CHAT, "5")
    assert recorder.cache.get_resource(CHAT) is not None
    recorder.take_notified_keys()
    recorder.cache.handle_not_found(CHAT, "9")
    assert recorder.cache.get_resource(CHAT) is None
    assert recorder.take_notified_keys() == {CHAT}


# -------------------------------------------------------------------------------------------------------- any order of messages
ObjectKey = tuple[str, str]
OBJECT_KEYS = st.tuples(st.sampled_from(("Service", "Deployment")), st.sampled_from(("a", "b", "c")))
KINDS = {kind.kind: kind for kind in (SERVICES, DEPLOYMENTS, PODS)}


class CacheStateMachine(RuleBasedStateMachine):
    """A server, and a cache that gets its events, responses and lists in any order, some of them never."""

    messages = Bundle("messages")
    lists = Bundle("lists")

    def __init__(self) -> None:
        super().__init__()
        self.recorder = RecordingCache()
        self.version = itertools.count(1)
        self.now = 0
        self.server: dict[ObjectKey, dict[str, Any]] = {}
        self.newest_versions: dict[ObjectKey, int] = {}
        """Newest version of each object that the cache has received, deletions included."""
        self.cached_objects = self.get_cached_objects()

    def get_cached_objects(self) -> dict[ObjectKey, dict[str, Any]]:
        owned_objects = [*self.recorder.cache.list_owned_objects(CHAT), *self.recorder.cache.list_owned_objects(OTHER)]
        return {(item["kind"], item["metadata"]["name"]): item for item in owned_objects}

    def next_version(self) -> int:
        self.now = next(self.version)
        return self.now

    def record_version(self, object_key: ObjectKey, version: int) -> None:
        self.newest_versions[object_key] = max(version, self.newest_versions.get(object_key, 0))

    # -- the server: each change leaves a message that may be delivered at any time, more than once, or never
    @rule(target=messages, object_key=OBJECT_KEYS, owner=st.sampled_from(("chat", "other")))
    def write(self, object_key: ObjectKey, owner: str) -> tuple[str, dict[str, Any]]:
        version = self.next_version()
        uid = self.server[object_key]["metadata"]["uid"] if object_key in self.server else f"u{version}"
        self.server[object_key] = build_object(*object_key, version, owner=owner, uid=uid)
        return ("MODIFIED", self.server[object_key])

    @rule(target=messages, object_key=OBJECT_KEYS)
    def delete(self, object_key: ObjectKey) -> tuple[str, dict[str, Any]]:
        if object_key not in self.server:
            return ("NOTHING", {})
        item = copy.deepcopy(self.server.pop(object_key))
        item["metadata"]["resourceVersion"] = str(self.next_version())
        return ("DELETED", item)

    # -- messages that reach the cache
    @rule(message=messages)
    def deliver(self, message: tuple[str, dict[str, Any]]) -> None:
        kind, item = message
        if kind == "NOTHING":
            return
        if kind == "DELETED":
            self.recorder.cache.handle_deletion(item)
        else:
            self.recorder.cache.put(item)
        self.record_version((item["kind"], item["metadata"]["name"]), int(item["metadata"]["resourceVersion"]))

    @rule(target=lists, kind=st.sampled_from(sorted({"Service", "Deployment"})))
    def begin(self, kind: str) -> tuple[str, int, Relist, list[dict[str, Any]]]:
        items = [item for object_key, item in self.server.items() if object_key[0] == kind]
        return (kind, self.now, self.recorder.cache.start_relist(KINDS[kind]), items)

    @rule(listing_state=consumes(lists))
    def end(self, listing_state: tuple[str, int, Relist, list[dict[str, Any]]]) -> None:
        self.finish_list(*listing_state)

    def finish_list(self, kind: str, version: int, listing: Relist, items: list[dict[str, Any]]) -> None:
        for item in items:
            listing.add([item])
            self.record_version((kind, item["metadata"]["name"]), int(item["metadata"]["resourceVersion"]))
        listing.end(str(version))

    # -- invariants
    @invariant()
    def each_change_and_nothing_else_is_notified(self) -> None:
        before, self.cached_objects = self.cached_objects, self.get_cached_objects()
        changed_keys = {
            object_key
            for object_key in before.keys() | self.cached_objects.keys()
            if before.get(object_key) != self.cached_objects.get(object_key)
        }
        changed_objects = [
            objects_by_key[object_key]
            for object_key in changed_keys
            for objects_by_key in (before, self.cached_objects)
            if object_key in objects_by_key
        ]
        assert self.recorder.take_notified_keys() == {
            NamespacedName("default", item["metadata"]["labels"][naming.NAME_LABEL]) for item in changed_objects
        }

    @invariant()
    def cached_objects_are_never_older_than_received_ones(self) -> None:
        for object_key, item in self.get_cached_objects().items():
            assert int(item["metadata"]["resourceVersion"]) >= self.newest_versions[object_key]

    def teardown(self) -> None:
        """Check that the cache equals the server after complete lists, whatever was lost before."""
        for kind in ("Service", "Deployment"):
            self.finish_list(*self.begin(kind))
        assert self.get_cached_objects() == self.server


CacheStateMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_cache_with_any_order_of_messages = CacheStateMachine.TestCase


# ------------------------------------------------------------------------------------------------- etcd restored from a backup
def test_list_of_an_older_version_replaces_the_cache() -> None:
    """Resource versions restart below the observed ones; objects were changed, created or deleted since the backup."""
    recorder = RecordingCache()
    cache = recorder.cache
    first_list = cache.start_relist(SERVICES)
    assert not first_list.begin("500")
    first_list.add([build_object("Service", "chat", 400, spec={"type": "new"}), build_object("Service", "made-since", 450)])
    first_list.end("500")
    cache.put(build_object("Service", "changed-since", 510))
    cache.handle_deletion(build_object("Service", "deleted-since", 520))
    deployment = build_object("Deployment", "chat", 505)
    cache.put(deployment)
    recorder.take_notified_keys()

    restored_list = cache.start_relist(SERVICES)
    assert restored_list.begin("300")
    assert len(cache._entries) == 4, "nothing is removed before the list is complete"
    restored_services = [
        build_object("Service", "chat", 200, spec={"type": "old"}),
        build_object("Service", "changed-since", 210),
    ]
    restored_list.add([*restored_services, build_object("Service", "deleted-since", 220)])
    restored_list.end("300")
    services = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in cache.list_owned_objects(CHAT)[1:]}
    assert services == {"chat": "200", "changed-since": "210", "deleted-since": "220"}
    assert recorder.take_notified_keys() == {CHAT}
    cache.put(build_object("Service", "chat", 301))
    cache.put(build_object("Service", "made-since", 302, uid="u2"))
    cache.handle_deletion(build_object("Service", "changed-since", 303))
    assert recorder.versions_by_name().keys() == {"chat", "made-since", "deleted-since"}
    assert deployment in cache.list_owned_objects(CHAT), "other kinds have lists of their own"


def test_partial_list_or_equal_version_does_not_replace_the_cache() -> None:
    recorder = RecordingCache()
    complete_list = recorder.cache.start_relist(SERVICES)
    complete_list.begin("500")
    complete_list.add([build_object("Service", "chat", 400)])
    complete_list.end("500")
    for listing, version in (
        (recorder.cache.start_relist(SERVICES), "500"),
        (recorder.cache.start_relist(SERVICES, owner=CHAT), "300"),
    ):
        assert not listing.begin(version)
        listing.add([build_object("Service", "chat", 300)])
    assert recorder.versions_by_name() == {"chat": "400"}
