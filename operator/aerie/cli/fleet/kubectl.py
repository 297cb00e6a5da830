"""Requests to the API server by kubectl, with the flags of its user: contexts, impersonation, proxies and logins all work.

Guarantee: a failed request raises `CommandError` or `ConflictError`, whose text is kubectl's own and the fix.
Not guaranteed: an answer in finite time; `--request-timeout` limits it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from aerie.cli.console import CommandError

Document = Mapping[str, Any]
"""A Kubernetes object as JSON has it."""
RESOURCE = "speculativedeployments.aerie.dev"
_HINTS = {
    "not found": "set its namespace with -n, or list all with: kubectl aerie list -A",
    "Forbidden": "ask for the ClusterRole view to read, or edit to make decisions",
    "doesn't have a resource type": "install Aerie in this cluster, or use another context",
    "Unauthorized": "log in again, or use another context",
    "Unable to connect": "check the connection, or use another context",
    "connection to the server": "check the connection, or use another context",
}
"""What to do, by a part of kubectl's message."""
_CONFLICTS = ("the server rejected our request due to an error in our request", "testing path", "test failed", "Conflict")
"""Parts of kubectl's message where a tested value has changed."""


class ConflictError(CommandError):
    """The resource has changed since it was read, so nothing was written."""


class Kubectl:
    """kubectl with fixed flags."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        """`flags`: for all requests, such as `--context=prod`."""
        self._flags = tuple(flags)

    def get(self, name: str) -> Document:
        """Return a SpeculativeDeployment."""
        document: Document = json.loads(self._run("get", RESOURCE, name, "-o", "json"))
        return document

    def list(self, *, all_namespaces: bool) -> list[Document]:
        """Return the SpeculativeDeployments of the namespace, or of all."""
        scope = ("--all-namespaces",) if all_namespaces else ()
        items: list[Document] = json.loads(self._run("get", RESOURCE, *scope, "-o", "json"))["items"]
        return items

    def find(self, resource: str, name: str) -> Document | None:
        """Return an object; None if there is none."""
        text = self._run("get", resource, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def list_names(self, kind: str) -> Sequence[str]:
        """Return the names of the objects of a kind; none if they cannot be listed."""
        try:
            return self._run("get", kind, "-o", "jsonpath={.items[*].metadata.name}").split()
        except CommandError:
            return []

    def watch(self, name: str) -> Iterator[Document]:
        """Yield a SpeculativeDeployment now and after each change, until the server ends the connection."""
        command = ("kubectl", *self._flags, "get", RESOURCE, name, "--watch", "-o", "json")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                yield from _read_documents(process.stdout)
                if process.wait():
                    raise _build_error(process.stderr.read())
            finally:
                process.terminate()

    def patch(self, name: str, operations: Sequence[Mapping[str, Any]], *, dry_run: str = "none") -> Document:
        """Apply a JSON patch, and return the result. `dry_run`: none or server.

        Raises `ConflictError` if a tested value differs.
        """
        patch = json.dumps(list(operations))
        text = self._run("patch", RESOURCE, name, "--type=json", f"--patch={patch}", f"--dry-run={dry_run}", "-o", "json")
        document: Document = json.loads(text)
        return document

    def read_user_name(self) -> str:
        """Return the name of the user, as the API server knows it; empty where the server does not tell."""
        try:
            review = json.loads(self._run("auth", "whoami", "-o", "json"))
        except CommandError:
            return ""
        return str(review.get("status", {}).get("userInfo", {}).get("username", ""))

    def _run(self, *arguments: str) -> str:
        try:
            # Only kubectl's own flags and names as the user wrote them: kubectl validates both.
            result = subprocess.run(("kubectl", *self._flags, *arguments), capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise CommandError("kubectl is not on PATH: install it, or add its folder to PATH.") from None
        if result.returncode:
            raise _build_error(result.stderr)
        return result.stdout


def _read_documents(stream: Iterable[str]) -> Iterator[Document]:
    """Yield the indented JSON documents of a stream, each as soon as it is complete."""
    lines: list[str] = []
    for line in stream:
        lines.append(line)
        if line.rstrip() == "}":  # the only line of a document that begins with it
            yield json.loads("".join(lines))
            lines.clear()


def _build_error(stderr: str) -> CommandError:
    """Return the error for what kubectl wrote."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    message = lines[-1] if lines else "kubectl failed without a message"
    for prefix in ("Error from server (NotFound): ", "Error from server ", "error: "):
        message = message.removeprefix(prefix)
    if any(part in stderr for part in _CONFLICTS):
        return ConflictError(f"{message}. Nothing was written, because the resource has changed: look at it, and repeat.")
    hint = next((hint for part, hint in _HINTS.items() if part in stderr), "")
    return CommandError(f"{message.rstrip('.')}: {hint}." if hint else f"{message.rstrip('.')}.")
