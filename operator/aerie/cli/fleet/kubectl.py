"""Requests to the API server by kubectl, with the flags of its user: contexts, impersonation, proxies and logins all work.

Guarantee: a failed request raises `CommandError` or `ConflictError`, whose text is kubectl's own and the fix.
Not guaranteed: an answer in finite time; `--request-timeout` limits it.
"""

from __future__ import annotations

import builtins
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from aerie.cli.console import CommandError

Document = Mapping[str, Any]
"""A Kubernetes object as JSON has it."""
RESOURCE = "speculativedeployments.aerie.dev"
_HINTS = {
    "(NotFound)": "set its namespace with -n, or list all with: kubectl aerie list -A",
    "(Forbidden)": "ask for the ClusterRole view to read, or edit to make decisions",
    "doesn't have a resource type": "install Aerie in this cluster, or use another context",
    "(Unauthorized)": "log in again, or use another context",
    "must be logged in": "log in again, or use another context",
    "getting credentials": "install the login plugin that the kubeconfig names, log in, or use another context",
    "context": "list the contexts with: kubectl config get-contexts",
    "no such file or directory": "check --kubeconfig and KUBECONFIG",
    "invalid duration": "write --request-timeout as 10s",
}
"""What to do, by a part of kubectl's message."""
_UNREACHABLE = (
    "Unable to connect",
    "connection to the server",
    "(ServiceUnavailable)",
    "(InternalError)",
    "(Timeout)",
    "timeout",
    "EOF",
)
"""Parts of kubectl's message where the API server did not answer, or could not."""
_ERROR_BEGINNINGS = ("error: ", "Error from server", "Unable to connect", "The connection to the server")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_REJECTIONS = (
    "is invalid:",
    "strict decoding error",
    "error validating",
    "denied the request",
    "denied request",
    "exceeded quota",
)
"""Parts of kubectl's message where the API server rejects an object, and not the user."""
_CONFLICTS = ("the server rejected our request due to an error in our request", "testing path", "test failed", "Conflict")
"""Parts of kubectl's message where a tested value has changed."""


class ConflictError(CommandError):
    """The resource has changed since it was read, so nothing was written."""


class UnreachableError(CommandError):
    """The API server did not answer, or could not: a later request may succeed."""


class RejectionError(CommandError):
    """The API server rejects the object: `str(error)` has the reasons, each on a line of its own."""


_MISSING_KUBECTL = CommandError("kubectl is not on PATH: install it, or add its folder to PATH.")


class Kubectl:
    """kubectl with fixed flags."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        """`flags`: for all requests, such as `--context=prod`."""
        self._flags = tuple(flags)

    @property
    def flags(self) -> Sequence[str]:
        """Flags of all requests."""
        return self._flags

    def get(self, name: str) -> Document:
        """Return a SpeculativeDeployment."""
        document: Document = _parse(self._run("get", RESOURCE, _check_name(name), "-o", "json"))
        return document

    def list(self, *, all_namespaces: bool) -> list[Document]:
        """Return the SpeculativeDeployments of the namespace, or of all."""
        scope = ("--all-namespaces",) if all_namespaces else ()
        items: list[Document] = _parse(self._run("get", RESOURCE, *scope, "-o", "json"))["items"]
        return items

    def in_namespace(self, namespace: str) -> Kubectl:
        """Return kubectl with the same flags and this namespace."""
        return Kubectl((*self._flags, f"--namespace={namespace}"))

    def list_objects(self, resource: str, *arguments: str) -> Sequence[Document]:
        """Return the objects of a kind. `arguments`: such as selectors; the namespace is that of the flags without any."""
        items: Sequence[Document] = _parse(self._run("get", resource, *arguments, "-o", "json"))["items"]
        return items

    def apply_without_writing(self, document: Document) -> Document:
        """Return the object as it would be after `kubectl apply`, with defaults, validation and admission of the API server.

        Raises `RejectionError` if the server would reject it. Needs the rights of the apply: get, and create or patch.
        """
        text = self._run("apply", "--dry-run=server", "-f", "-", "-o", "json", stdin=json.dumps(document))
        result: Document = _parse(text)
        return result

    def find(self, resource: str, name: str, *, namespace: str | None = None) -> Document | None:
        """Return an object; None if there is none. `namespace`: None for that of the user's flags."""
        scope = () if namespace is None else (f"--namespace={namespace}",)
        text = self._run("get", resource, name, *scope, "--ignore-not-found", "-o", "json")
        return _parse(text) if text.strip() else None

    def list_names(self, kind: str) -> Sequence[str]:
        """Return the names of the objects of a kind; none if they cannot be listed."""
        try:
            return self._run("get", kind, "-o", "jsonpath={.items[*].metadata.name}").split()
        except CommandError:
            return []

    def read_events(self, name: str) -> Sequence[Document]:
        """Return the events of a SpeculativeDeployment that the API server still has."""
        selector = f"--field-selector=involvedObject.kind=SpeculativeDeployment,involvedObject.name={name}"
        items: Sequence[Document] = _parse(self._run("get", "events", selector, "-o", "json"))["items"]
        return items

    def select(self, resource: str, selector: str, *, namespace: str | None = None) -> builtins.list[Document]:
        """Return the objects with these labels. `namespace`: None for all."""
        scope = "--all-namespaces" if namespace is None else f"--namespace={namespace}"
        items: list[Document] = _parse(self._run("get", resource, scope, f"--selector={selector}", "-o", "json"))["items"]
        return items

    def get_raw(self, path: str, *, timeout_seconds: float | None = None) -> str:
        """Return what the API server answers at a path. `timeout_seconds`: where the user's flags set none."""
        limit = (
            ()
            if timeout_seconds is None or any(flag.startswith("--request-timeout") for flag in self._flags)
            else (f"--request-timeout={timeout_seconds:g}s",)
        )
        return self._run("get", "--raw", path, *limit)

    def watch(self, name: str) -> Iterator[Document]:
        """Yield a SpeculativeDeployment now and after each change, until the server ends the connection.

        Raises `CommandError` when it is deleted.
        """
        arguments = ("get", RESOURCE, _check_name(name), "--watch", "--output-watch-events", "-o", "json")
        try:
            process = subprocess.Popen(
                ("kubectl", *self._flags, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            raise _MISSING_KUBECTL from None
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                for event in _read_documents(process.stdout):
                    if event.get("type") == "DELETED":
                        raise CommandError(f"SpeculativeDeployment {name} was deleted.")
                    if event.get("type") in ("ADDED", "MODIFIED"):
                        yield event["object"]
                if process.wait():
                    raise _build_error(process.stderr.read())
            finally:
                process.terminate()

    def patch(self, name: str, operations: Sequence[Mapping[str, Any]], *, dry_run: str = "none") -> Document:
        """Apply a JSON patch, and return the result. `dry_run`: none or server.

        Raises `ConflictError` if a tested value differs.
        """
        patch = json.dumps(list(operations))
        text = self._run(
            "patch", RESOURCE, _check_name(name), "--type=json", f"--patch={patch}", f"--dry-run={dry_run}", "-o", "json"
        )
        document: Document = _parse(text)
        return document

    def read_user_name(self) -> str:
        """Return the name of the user, as the API server knows it; empty where the server does not tell."""
        try:
            review = self.read_user()
        except CommandError:
            return ""
        return str(review.get("status", {}).get("userInfo", {}).get("username", ""))

    def read_user(self) -> Document:
        """Return the SelfSubjectReview of the user. Its creation time is that of the API server."""
        review: Document = _parse(self._run("auth", "whoami", "-o", "json"))
        return review

    def read_rules(self, namespace: str) -> builtins.list[Mapping[str, Any]]:
        """Return the rules of the user in a namespace, as the API server's authorizers list them."""
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        answer = _parse(self._run("create", "--raw", path, "-f", "-", stdin=json.dumps(review)))
        rules: list[Mapping[str, Any]] = answer["status"]["resourceRules"]
        return rules

    def read_namespace(self) -> str:
        """Return the namespace of the user's flags, else that of the context; no request."""
        flag = next((flag for flag in reversed(self._flags) if flag.startswith("--namespace=")), None)
        if flag is not None:
            return flag.partition("=")[2]
        return self._run("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip() or "default"

    def has_api(self, group_version: str) -> bool:
        """Return whether the API server has a version of an API group."""
        try:
            self.get_raw(f"/apis/{group_version}")
        except CommandError as error:
            if "could not find the requested resource" in str(error):
                return False
            raise
        return True

    def _run(self, *arguments: str, stdin: str | None = None) -> str:
        try:
            # Only kubectl's own flags and names as the user wrote them: kubectl validates both.
            command = ("kubectl", *self._flags, *arguments)
            result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise _MISSING_KUBECTL from None
        if result.returncode:
            raise _build_error(result.stderr)
        return result.stdout


def _check_name(name: str) -> str:
    """Return the name if it may be one: kubectl would read others as options, or as several objects."""
    if not _NAME.fullmatch(name):
        raise CommandError(f"{name!r} cannot be the name of a SpeculativeDeployment: list them with: kubectl aerie list -A.")
    return name


def _parse(text: str) -> Any:
    """Return what kubectl printed as JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise CommandError("kubectl printed no JSON: check which kubectl is on PATH, and its plugins and wrappers.") from None


def _read_documents(stream: Iterable[str]) -> Iterator[Document]:
    """Yield the JSON documents of a stream, each as soon as it is complete: events have a line each, objects are indented."""
    lines: list[str] = []
    for line in stream:
        lines.append(line)
        is_event = len(lines) == 1 and line.startswith("{") and line.rstrip().endswith("}")
        if is_event or line.rstrip() == "}":  # no other line of an indented object begins with it
            yield _parse("".join(lines))
            lines.clear()


def _build_error(stderr: str) -> CommandError:
    """Return the error for what kubectl wrote."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    is_conflict = any(part in stderr for part in _CONFLICTS)  # of a JSON patch, which kubectl calls invalid too
    if not is_conflict and (reasons := list(_find_rejections(lines))):
        return RejectionError("\n".join(reasons))
    message = next((line for line in lines if line.startswith(_ERROR_BEGINNINGS)), lines[-1] if lines else "")
    message = re.sub(r"^(error: |Error from server( \(\w+\))?: )", "", message) or "kubectl failed without a message"
    if is_conflict:
        return ConflictError(f"{message}. Nothing was written, because the resource has changed: look at it, and repeat.")
    if any(part in stderr for part in _UNREACHABLE):
        return UnreachableError(f"{message.rstrip('.')}: check the connection, or use another context.")
    hint = next((hint for part, hint in _HINTS.items() if part in stderr), "")
    return CommandError(f"{message.rstrip('.')}: {hint}." if hint else f"{message.rstrip('.')}.")


def _find_rejections(lines: Sequence[str]) -> Iterator[str]:
    """Yield why the API server rejects an object, without kubectl's prefixes; nothing where it does not."""
    if not any(part in line for line in lines for part in _REJECTIONS):
        return
    for line in lines:
        if line.startswith("Warning:"):
            continue
        _, is_headed, reason = line.partition(" is invalid:")
        text = (reason if is_headed else line).removeprefix("* ").removeprefix("error: ").strip()
        if text:
            yield text
