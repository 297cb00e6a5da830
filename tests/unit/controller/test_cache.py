"""The mirror, against an API server whose messages arrive late, out of order or not at all."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aerie.controller.kubernetes import cache as mirrors
from aerie.controller.kubernetes.cache import ObjectCache, Relist
from aerie.controller.kubernetes.client import DEPLOYMENTS, PODS, SERVICES, SPECULATIVE_DEPLOYMENTS
from aerie.controller.work_queue import NamespacedName
from aerie.manifests import naming as names

CHAT = NamespacedName("default", "chat")
OTHER = NamespacedName("default", "other")


def made(kind: str, name: str, version: int, *, owner: str | None = "chat", uid: str = "u1", **more: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"namespace": "default", "name": name, "uid": uid, "resourceVersion": str(version)}
    if owner is not None:
        metadata["labels"] = {names.NAME_LABEL: owner}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **more}


class Heard:
    """A mirror, and what it told of since the last look."""

    def __init__(self) -> None:
        self.told: list[NamespacedName] = []
        self.mirror = ObjectCache(self.told.append)

    def news(self) -> set[NamespacedName]:
        found = set(self.told)
        self.told.clear()
        return found

    def names(self, key: NamespacedName = CHAT) -> dict[str, str]:
        return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in self.mirror.list_owned_objects(key)}


# -------------------------------------------------------------------------------------------------------------------- examples
def test_a_resource_and_what_belongs_to_it_are_found_by_its_key() -> None:
    heard = Heard()
    resource = made(SPECULATIVE_DEPLOYMENTS.kind, "chat", 1, owner=None, spec={"replicas": 2})
    heard.mirror.put(resource)
    heard.mirror.put(made("Service", "chat", 2))
    check = made("Pod", "chat-check", 3, owner=None)
    check["metadata"]["labels"] = {names.PREFLIGHT_LABEL: "chat"}
    heard.mirror.put(check)
    heard.mirror.put(made("Service", "other", 4, owner="other"))
    assert heard.mirror.get_resource(CHAT) == resource
    assert heard.mirror.get_resource(OTHER) is None
    assert heard.mirror.list_resources() == [CHAT]
    assert heard.names() == {"chat": "2", "chat-check": "3"}
    assert heard.news() == {CHAT, OTHER}
    assert len(heard.mirror._entries) == 4


def test_the_servers_bookkeeping_is_left_out_and_a_reader_cannot_change_what_is_kept() -> None:
    heard = Heard()
    item = made("PodDisruptionBudget", "chat", 1)
    applied = "kubectl.kubernetes.io/last-applied-configuration"
    item["metadata"] |= {"managedFields": [{"manager": "x"}], "annotations": {applied: "{...}", "mine": "yes"}}
    heard.mirror.put(item)
    assert item["metadata"]["managedFields"]
    (found,) = heard.mirror.list_owned_objects(CHAT)
    assert "managedFields" not in found["metadata"]
    assert found["metadata"]["annotations"] == {"mine": "yes"}
    found["metadata"]["name"] = "changed"
    assert heard.names() == {"chat": "1"}


@pytest.mark.parametrize("kind", ["HTTPRoute", "Service"])
def test_of_what_requests_go_through_it_is_kept_who_changed_it_when(kind: str) -> None:
    heard = Heard()
    item = made(kind, "chat", 1)
    at = "2026-01-01T00:00:00Z"
    item["metadata"]["managedFields"] = [{"manager": "aerie", "time": at, "fieldsV1": {"f:spec": {}}, "operation": "Apply"}]
    heard.mirror.put(item)
    (found,) = heard.mirror.list_owned_objects(CHAT)
    assert found["metadata"]["managedFields"] == [{"manager": "aerie", "time": at}]


def engine_pod(name: str, version: int) -> dict[str, Any]:
    container = {"name": "engine", "ports": [{"name": "http", "containerPort": 8000}], "env": [{"name": "X", "value": "y"}]}
    spec = {"nodeName": "node-1", "containers": [container], "volumes": [{"name": "models"}]}
    return made("Pod", name, version, spec=spec, status={"phase": "Running"})


def test_of_a_pods_spec_only_node_and_ports_are_kept() -> None:
    heard = Heard()
    heard.mirror.put(engine_pod("chat-1", 1))
    (found,) = heard.mirror.list_owned_objects(CHAT)
    ports = [{"name": "http", "containerPort": 8000}]
    assert found["spec"] == {"nodeName": "node-1", "containers": [{"name": "engine", "ports": ports}]}
    assert found["status"] == {"phase": "Running"}


@pytest.mark.parametrize("pods", [1, 40, 1000])
def test_each_version_of_a_pod_of_a_large_fleet_is_unpacked_once(pods: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, unpacked = Heard(), 0
    real = mirrors._unpack

    def counted(packed: bytes) -> dict[str, Any]:
        nonlocal unpacked
        unpacked += 1
        return real(packed)

    monkeypatch.setattr(mirrors, "_unpack", counted)
    for number in range(pods):
        heard.mirror.put(engine_pod(f"chat-{number}", number + 1))
    first = heard.mirror.list_owned_objects(CHAT)
    heard.mirror.put(engine_pod("chat-0", 5000))
    second = heard.mirror.list_owned_objects(CHAT)
    assert len(first) == len(second) == pods
    assert heard.names()["chat-0"] == "5000"
    assert unpacked == (pods + 1 if pods >= mirrors.MIN_OBJECTS_KEPT_UNPACKED else 3 * pods)


def test_an_older_version_never_follows_a_newer_one_and_a_repetition_is_no_news() -> None:
    heard = Heard()
    heard.mirror.put(made("Service", "chat", 5))
    assert heard.news() == {CHAT}
    heard.mirror.put(made("Service", "chat", 4))
    heard.mirror.put(made("Service", "chat", 5))
    assert heard.names() == {"chat": "5"}
    assert heard.news() == set()


def test_an_answer_that_comes_after_the_deletion_does_not_bring_the_object_back() -> None:
    heard = Heard()
    heard.mirror.put(made("Service", "chat", 5))
    heard.mirror.handle_deletion(made("Service", "chat", 8))
    heard.mirror.put(made("Service", "chat", 7))
    assert heard.names() == {}
    heard.mirror.put(made("Service", "chat", 9, uid="u2"))
    assert heard.names() == {"chat": "9"}


def test_a_late_deletion_leaves_the_namesake_that_came_since() -> None:
    heard = Heard()
    heard.mirror.put(made("Service", "chat", 5))
    heard.mirror.put(made("Service", "chat", 9, uid="u2"))
    heard.news()
    heard.mirror.handle_deletion(made("Service", "chat", 8))
    assert heard.names() == {"chat": "9"}
    assert heard.news() == set()


def test_what_was_deleted_while_nobody_watched_goes_with_the_next_list() -> None:
    heard = Heard()
    heard.mirror.put(made("Deployment", "ghost", 5))
    heard.mirror.put(made("Service", "of another kind", 5))
    listing = heard.mirror.start_relist(DEPLOYMENTS)
    listing.add([made("Deployment", "there", 6)])
    heard.news()
    listing.end("7")
    assert heard.names() == {"there": "6", "of another kind": "5"}
    assert heard.news() == {CHAT}
    heard.mirror.put(made("Deployment", "ghost", 6))  # an answer that was under way
    assert heard.names() == {"there": "6", "of another kind": "5"}


def test_what_is_heard_while_a_list_is_under_way_is_kept() -> None:
    heard = Heard()
    listing = heard.mirror.start_relist(DEPLOYMENTS)
    heard.mirror.put(made("Deployment", "made meanwhile", 12))
    heard.mirror.handle_deletion(made("Deployment", "deleted meanwhile", 13))
    listing.add([made("Deployment", "deleted meanwhile", 6)])
    listing.end("10")
    assert heard.names() == {"made meanwhile": "12"}


def test_a_list_of_one_namespace_or_of_one_resource_says_nothing_of_the_rest() -> None:
    heard = Heard()
    elsewhere = made("Service", "chat", 5)
    elsewhere["metadata"]["namespace"] = "elsewhere"
    for item in (elsewhere, made("Service", "chat", 5), made("Service", "other", 5, owner="other")):
        heard.mirror.put(item)
    heard.mirror.start_relist(SERVICES, owner=CHAT).end("9")
    assert heard.names() == {}
    assert heard.names(OTHER) == {"other": "5"}
    heard.mirror.start_relist(SERVICES, "default").end("9")
    assert heard.names(OTHER) == {}
    assert heard.names(NamespacedName("elsewhere", "chat")) == {"chat": "5"}


def test_a_kind_that_the_cluster_does_not_know_any_more_has_no_objects() -> None:
    heard = Heard()
    heard.mirror.put(made("Service", "chat", 5))
    heard.mirror.start_relist(SERVICES).end(None)
    assert heard.names() == {}
    heard.mirror.put(made("Service", "chat", 6))
    assert heard.names() == {"chat": "6"}


def test_an_object_follows_its_label_and_both_resources_are_told() -> None:
    heard = Heard()
    heard.mirror.put(made("Service", "chat", 5))
    heard.news()
    heard.mirror.put(made("Service", "chat", 6, owner="other"))
    assert (heard.names(), heard.names(OTHER)) == ({}, {"chat": "6"})
    assert heard.news() == {CHAT, OTHER}
    heard.mirror.put(made("Service", "chat", 7, owner=None))
    assert (heard.names(), heard.names(OTHER)) == ({}, {})
    assert heard.news() == {OTHER}


def test_a_resource_that_was_asked_for_in_vain_goes_unless_it_has_come_back() -> None:
    heard = Heard()
    heard.mirror.put(made(SPECULATIVE_DEPLOYMENTS.kind, "chat", 5, owner=None))
    heard.mirror.put(made(SPECULATIVE_DEPLOYMENTS.kind, "chat", 9, owner=None, uid="u2"))
    heard.mirror.handle_not_found(CHAT, "5")
    assert heard.mirror.get_resource(CHAT) is not None
    heard.news()
    heard.mirror.handle_not_found(CHAT, "9")
    assert heard.mirror.get_resource(CHAT) is None
    assert heard.news() == {CHAT}


# ---------------------------------------------------------------------------------------------------------- any order of things
Place = tuple[str, str]
PLACES = st.tuples(st.sampled_from(("Service", "Deployment")), st.sampled_from(("a", "b", "c")))
KINDS = {kind.kind: kind for kind in (SERVICES, DEPLOYMENTS, PODS)}


class Messages(RuleBasedStateMachine):
    """A server; and a mirror that its events, answers and lists reach in any order, some of them never."""

    under_way = Bundle("under_way")
    lists = Bundle("lists")

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.version = itertools.count(1)
        self.now = 0
        self.server: dict[Place, dict[str, Any]] = {}
        self.believed: dict[Place, int] = {}
        """The newest version of each object that the mirror has heard of, its deletion included."""
        self.shown = self.content()

    def content(self) -> dict[Place, dict[str, Any]]:
        found = [*self.heard.mirror.list_owned_objects(CHAT), *self.heard.mirror.list_owned_objects(OTHER)]
        return {(item["kind"], item["metadata"]["name"]): item for item in found}

    def next(self) -> int:
        self.now = next(self.version)
        return self.now

    def hears(self, place: Place, version: int) -> None:
        self.believed[place] = max(version, self.believed.get(place, 0))

    # -- the server: each change leaves a message that may be delivered at any time, more than once, or never
    @rule(target=under_way, place=PLACES, owner=st.sampled_from(("chat", "other")))
    def write(self, place: Place, owner: str) -> tuple[str, dict[str, Any]]:
        version = self.next()
        uid = self.server[place]["metadata"]["uid"] if place in self.server else f"u{version}"
        self.server[place] = made(*place, version, owner=owner, uid=uid)
        return ("MODIFIED", self.server[place])

    @rule(target=under_way, place=PLACES)
    def delete(self, place: Place) -> tuple[str, dict[str, Any]]:
        if place not in self.server:
            return ("NOTHING", {})
        item = copy.deepcopy(self.server.pop(place))
        item["metadata"]["resourceVersion"] = str(self.next())
        return ("DELETED", item)

    # -- what reaches the mirror
    @rule(message=under_way)
    def deliver(self, message: tuple[str, dict[str, Any]]) -> None:
        kind, item = message
        if kind == "NOTHING":
            return
        if kind == "DELETED":
            self.heard.mirror.handle_deletion(item)
        else:
            self.heard.mirror.put(item)
        self.hears((item["kind"], item["metadata"]["name"]), int(item["metadata"]["resourceVersion"]))

    @rule(target=lists, kind=st.sampled_from(sorted({"Service", "Deployment"})))
    def begin(self, kind: str) -> tuple[str, int, Relist, list[dict[str, Any]]]:
        items = [item for place, item in self.server.items() if place[0] == kind]
        return (kind, self.now, self.heard.mirror.start_relist(KINDS[kind]), items)

    @rule(found=consumes(lists))
    def end(self, found: tuple[str, int, Relist, list[dict[str, Any]]]) -> None:
        self.finish(*found)

    def finish(self, kind: str, version: int, listing: Relist, items: list[dict[str, Any]]) -> None:
        for item in items:
            listing.add([item])
            self.hears((kind, item["metadata"]["name"]), int(item["metadata"]["resourceVersion"]))
        listing.end(str(version))

    # -- what always holds
    @invariant()
    def each_change_is_told_and_nothing_else(self) -> None:
        before, self.shown = self.shown, self.content()
        moved = {place for place in before.keys() | self.shown.keys() if before.get(place) != self.shown.get(place)}
        sides = [side[place] for place in moved for side in (before, self.shown) if place in side]
        assert self.heard.news() == {NamespacedName("default", item["metadata"]["labels"][names.NAME_LABEL]) for item in sides}

    @invariant()
    def nothing_that_is_shown_is_older_than_what_was_heard(self) -> None:
        for place, item in self.shown.items():
            assert int(item["metadata"]["resourceVersion"]) >= self.believed[place]

    def teardown(self) -> None:
        """After whole lists of everything the mirror is the server, whatever was lost before."""
        for kind in ("Service", "Deployment"):
            self.finish(*self.begin(kind))
        assert self.content() == self.server


Messages.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_messages = Messages.TestCase


# ------------------------------------------------------------------------------------------------- etcd restored from a backup
def test_after_a_list_of_an_older_version_what_it_says_is_believed() -> None:
    """Resource versions begin anew below those that were seen; all kinds of objects: changed, made, deleted since the backup."""
    heard = Heard()
    mirror = heard.mirror
    first = mirror.start_relist(SERVICES)
    assert not first.begin("500")
    first.add([made("Service", "chat", 400, spec={"type": "new"}), made("Service", "made-since", 450)])
    first.end("500")
    mirror.put(made("Service", "changed-since", 510))
    mirror.handle_deletion(made("Service", "deleted-since", 520))
    deployment = made("Deployment", "chat", 505)
    mirror.put(deployment)
    heard.news()

    again = mirror.start_relist(SERVICES)
    assert again.begin("300")
    assert len(mirror._entries) == 4, "nothing goes before the list is whole"
    old = [made("Service", "chat", 200, spec={"type": "old"}), made("Service", "changed-since", 210)]
    again.add([*old, made("Service", "deleted-since", 220)])
    again.end("300")
    services = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in mirror.list_owned_objects(CHAT)[1:]}
    assert services == {"chat": "200", "changed-since": "210", "deleted-since": "220"}
    assert heard.news() == {CHAT}
    mirror.put(made("Service", "chat", 301))
    mirror.put(made("Service", "made-since", 302, uid="u2"))
    mirror.handle_deletion(made("Service", "changed-since", 303))
    assert heard.names().keys() == {"chat", "made-since", "deleted-since"}
    assert deployment in mirror.list_owned_objects(CHAT), "other kinds have lists of their own"


def test_a_list_of_one_resource_or_of_the_same_version_is_no_sign_of_a_backup() -> None:
    heard = Heard()
    whole = heard.mirror.start_relist(SERVICES)
    whole.begin("500")
    whole.add([made("Service", "chat", 400)])
    whole.end("500")
    for listing, version in (
        (heard.mirror.start_relist(SERVICES), "500"),
        (heard.mirror.start_relist(SERVICES, owner=CHAT), "300"),
    ):
        assert not listing.begin(version)
        listing.add([made("Service", "chat", 300)])
    assert heard.names() == {"chat": "400"}
