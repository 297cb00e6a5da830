"""One Kubernetes namespace of a lab, as a test uses it: apply, look, wait.

Waiting is by asking the API server again and again until a bound; a test never sleeps and hopes. Guarantee: what was
waited for and what was there instead is in the failure's message.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import yaml

from aerie_lab.cluster import Lab
from aerie_lab.errors import KubeError, LabError
from aerie_lab.faults import FaultInjector

T = TypeVar("T")


def wait_until(check: Callable[[], T], description: str, *, timeout_seconds: float = 120.0, interval_seconds: float = 0.1) -> T:
    """Call `check` until it returns something true, and return that. Raises AssertionError after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = check()
        except LabError as error:
            last = error
        else:
            if last:
                return last
        time.sleep(interval_seconds)
    raise AssertionError(f"not within {timeout_seconds:g} s: {description} (last seen: {last})")


class Namespace:
    """A namespace of `lab`, its own for one test."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.faults = FaultInjector(lab)
        self._reader = lab.reader()

    def close(self) -> None:
        """Close the connection to the API server."""
        self._reader.close()

    def apply(self, *objects: dict[str, Any] | str) -> None:
        """Apply objects, as dicts or as YAML, into this namespace unless they name another."""
        documents: list[dict[str, Any]] = []
        for item in objects:
            documents += [d for d in yaml.safe_load_all(item) if d] if isinstance(item, str) else [copy.deepcopy(item)]
        for document in documents:
            document.setdefault("metadata", {}).setdefault("namespace", self.name)
        self.lab.apply(*documents)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in this namespace."""
        return self.lab.kubectl("-n", self.name, *arguments, stdin=stdin)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return one object."""
        return self._reader.get(kind, name, self.name)

    def list_all(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        """Return all objects of a kind, or of several with commas between them."""
        return self._reader.list_all(kinds, self.name, selector)

    def exists(self, kind: str, name: str) -> bool:
        """Return whether the object exists."""
        try:
            self.get(kind, name)
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    def wait_until(
        self, kind: str, name: str, check: Callable[[dict[str, Any]], object], description: str, *, timeout_seconds: float = 120.0
    ) -> dict[str, Any]:
        """Wait until the object fulfils `check`, and return it."""
        last_object: dict[str, Any] = {}

        def check_object() -> bool:
            nonlocal last_object
            last_object = self.get(kind, name)
            return bool(check(last_object))

        try:
            wait_until(check_object, description, timeout_seconds=timeout_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(last_object.get('status'), indent=1)}") from None
        return last_object

    def wait_until_ready(self, pod: str, *, timeout_seconds: float = 120.0) -> dict[str, Any]:
        """Wait until a pod is Ready, and return it."""
        return self.wait_until("pod", pod, is_ready, f"pod {pod} Ready", timeout_seconds=timeout_seconds)

    def wait_until_phase(self, pod: str, phase: str, *, timeout_seconds: float = 120.0) -> dict[str, Any]:
        """Wait until a pod is in `phase`, and return it."""
        return self.wait_until(
            "pod", pod, lambda p: p["status"].get("phase") == phase, f"pod {pod} {phase}", timeout_seconds=timeout_seconds
        )

    def wait_until_deleted(self, kind: str, name: str, *, timeout_seconds: float = 120.0) -> None:
        """Wait until there is no such object."""
        wait_until(lambda: not self.exists(kind, name), f"{kind} {name} is deleted", timeout_seconds=timeout_seconds)

    def wait_for_rollout(self, deployment: str, *, timeout_seconds: float = 120.0) -> None:
        """Wait until a Deployment is rolled out."""
        self.kubectl("rollout", "status", f"deployment/{deployment}", f"--timeout={timeout_seconds:g}s")

    def events(self, name: str) -> list[tuple[str, str]]:
        """Return (reason, message) of the events about an object."""
        return [(e["reason"], e["message"]) for e in self.list_all("events") if e["involvedObject"]["name"] == name]


def is_ready(item: dict[str, Any]) -> bool:
    """Return whether the object's Ready condition is True."""
    conditions = item.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
