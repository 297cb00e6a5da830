"""The bearer tokens of a resource's pods, and the Secrets by which the pods get them: engines have one, the evaluator another.

    the operator's own Secret ─► key ─┐
    kind of the token, resource's uid ┴─ HMAC-SHA256 ─► token ─► Secret of the resource ─► its pods

The operator computes a token whenever it needs it. So it only creates Secrets in the namespaces of resources, and reads none
there; even a patch would answer with the object.

Guarantees: the only Secret that is read is the operator's own, which is created if it does not exist. Of several operators that
do so, all get the key of the first. The token of a resource is the same as long as the key is, and opens no pods of another
resource or for another kind of token. No Secret is ever changed. An attempt to create one is repeated only after a failure, or
after a pod did not have the token, and not within `RETRY_SECONDS`. A failure is a value, and its message contains nothing of a
key or token. The key is read once per process. It cannot become old by another leader, because a leader that loses its Lease
ends its process. Only a user can replace the key, who restarts the operator then.

Not guaranteed: that an existing Secret of the resource has the token. That of another owner, or of a deleted resource of the same
name, looks the same. The pods reject the token then, and `explain_rejection` has the fix. The kubelet takes a minute or so to
mount a new Secret.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aerie.controller.kubernetes.client import SECRETS, SPECULATIVE_DEPLOYMENTS, ApiError, Cluster, ObjectDict
from aerie.controller.work_queue import NamespacedName
from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.manifests import naming, plugin_config_map

_log = logging.getLogger(__name__)

KEY = "key"
"""Key of the Secret that has the operator's key."""
MIN_KEY_BYTES = 32
RETRY_SECONDS = 10.0
"""Minimum seconds between two attempts to create a Secret, whatever pods answer."""
NO_TOKEN = "NoToken"
"""Reason without a token: of the operator, or of a pod."""


@dataclass(frozen=True)
class TokenKind:
    """What tokens are for."""

    name: str
    """Part of what a token is derived from: tokens of two kinds differ."""
    secret_name: Callable[[str], str]
    """Name of the Secret of a resource, by the resource's name."""
    secret_key: str
    """Key in that Secret."""
    effect_without: str
    """What a resource lacks without its token, as a clause."""


DRAFTER_TOKEN = TokenKind(
    "aerie drafter token",
    naming.drafter_token_secret_name,
    naming.DRAFTER_TOKEN_KEY,
    "its drafter cannot change in place",
)
EVALUATOR_TOKEN = TokenKind(
    "aerie evaluator token",
    naming.evaluator_token_secret_name,
    naming.EVALUATOR_TOKEN_KEY,
    "its canary cannot be evaluated before users meet it",
)


def derive_token(key: bytes, resource_uid: str, kind: TokenKind = DRAFTER_TOKEN) -> str:
    """Return the token of a resource's pods: 64 hexadecimal digits."""
    return hmac.new(key, f"{kind.name}/{resource_uid}".encode(), hashlib.sha256).hexdigest()


def needs_token(objects: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether pods of these objects have the plugin."""
    return any(
        plugin_config_map.find_plugin_config_map(item["spec"]["template"]) is not None
        for item in objects
        if item["kind"] == "Deployment"
    )


@dataclass(frozen=True)
class _Attempt:
    """The latest attempt to create the Secret of a resource."""

    owner_uid: str
    result: str | EndpointProblem
    ended_at: float
    """Time of the event loop."""
    is_final: bool
    """Whether the Secret exists, as far as is known."""


class ResourceTokens:
    """The tokens of one kind of all resources, for use from one event loop. `key_secret`: the operator's own Secret."""

    def __init__(self, cluster: Cluster, key_secret: NamespacedName, kind: TokenKind = DRAFTER_TOKEN) -> None:
        self._cluster, self._key_secret, self._kind = cluster, key_secret, kind
        self._key: bytes | EndpointProblem | None = None
        self._key_retry_at = 0.0
        """Time of the event loop before which a failed read of the key is not repeated."""
        self._key_lock = asyncio.Lock()
        self._attempts: dict[NamespacedName, _Attempt] = {}
        self._locks: dict[NamespacedName, asyncio.Lock] = {}
        """Lock of each resource: its pods wait for one attempt."""

    async def ensure(self, owner: NamespacedName, owner_uid: str) -> str | EndpointProblem:
        """Create the Secret of the resource's pods, unless that was done, and return its token, or why there is none."""
        async with self._locks.setdefault(owner, asyncio.Lock()):
            attempt = self._attempts.get(owner)
            if (
                attempt is not None
                and attempt.owner_uid == owner_uid
                and (attempt.is_final or _now() < attempt.ended_at + RETRY_SECONDS)
            ):
                return attempt.result
            result = await self._create_secret(owner, owner_uid)
            if isinstance(result, EndpointProblem) and (attempt is None or attempt.result != result):
                _log.warning("%s: %s: %s", owner, self._kind.effect_without, result.message)
            self._attempts[owner] = _Attempt(owner_uid, result, _now(), isinstance(result, str))
            return result

    def explain_rejection(self, owner: NamespacedName, problem: EndpointProblem) -> EndpointProblem:
        """Return a pod's problem, with the Secret and the fix if the pod does not have the token.

        The next `ensure` then tries to create the Secret again: it may have been deleted.
        """
        if problem.status is None or (problem.status != 401 and problem.reason != NO_TOKEN):
            return problem
        if (attempt := self._attempts.get(owner)) is not None:
            self._attempts[owner] = replace(attempt, is_final=False)
        name = self._kind.secret_name(owner.name)
        message = (
            f"the pod does not have the token that Aerie sends: wait a minute until it has the Secret {name}. If this lasts, "
            "delete the Secret, and Aerie creates it again."
        )
        return replace(problem, message=message)

    def forget(self, owner: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        self._attempts.pop(owner, None)
        self._locks.pop(owner, None)

    async def _create_secret(self, owner: NamespacedName, owner_uid: str) -> str | EndpointProblem:
        key = await self._load_key()
        if isinstance(key, EndpointProblem):
            return key
        token = derive_token(key, owner_uid, self._kind)
        try:
            await self._cluster.create(_build_token_secret(owner, owner_uid, self._kind, token))
        except ApiError as error:
            if error.status != 409:
                name = self._kind.secret_name(owner.name)
                return _no_token(
                    f"the Secret {name} cannot be created ({error}): grant the operator create on Secrets in {owner.namespace}, "
                    "as the chart does, and check the namespace's quota."
                )
        else:
            _log.info("%s: created the Secret with the token of its pods", owner)
        return token

    async def _load_key(self) -> bytes | EndpointProblem:
        async with self._key_lock:
            if self._key is None or (isinstance(self._key, EndpointProblem) and _now() >= self._key_retry_at):
                self._key = await self._read_or_create_key()
                self._key_retry_at = _now() + RETRY_SECONDS
            return self._key

    async def _read_or_create_key(self) -> bytes | EndpointProblem:
        try:
            secret = await self._cluster.get(SECRETS, *self._key_secret) or await self._create_key()
        except ApiError as error:
            return _no_token(
                f"the Secret {self._key_secret} with the key of all tokens can neither be read nor created ({error}): grant the "
                f"operator both, as the chart does, or create it yourself with {MIN_KEY_BYTES} random bytes in {KEY}."
            )
        key = _decode_key(secret)
        if len(key) < MIN_KEY_BYTES:
            return _no_token(
                f"the Secret {self._key_secret} has {len(key)} bytes in {KEY}: replace it by one with {MIN_KEY_BYTES} random "
                "bytes or more."
            )
        return key

    async def _create_key(self) -> ObjectDict:
        """Create the operator's Secret, or return the one of another operator that was quicker. Raises ApiError."""
        namespace, name = self._key_secret
        data = {KEY: base64.b64encode(secrets.token_bytes(MIN_KEY_BYTES)).decode()}
        metadata = {"namespace": namespace, "name": name, "labels": {naming.MANAGED_BY_LABEL: naming.FIELD_MANAGER}}
        try:
            return await self._cluster.create(
                {"apiVersion": "v1", "kind": SECRETS.kind, "metadata": metadata, "immutable": True, "data": data}
            )
        except ApiError as error:
            if error.status != 409:
                raise
        return await self._cluster.get(SECRETS, namespace, name) or {}


def _build_token_secret(owner: NamespacedName, owner_uid: str, kind: TokenKind, token: str) -> ObjectDict:
    """Return the Secret of the resource's pods, which is deleted with the resource."""
    reference = {
        "apiVersion": SPECULATIVE_DEPLOYMENTS.api_version,
        "kind": SPECULATIVE_DEPLOYMENTS.kind,
        "name": owner.name,
        "uid": owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "v1",
        "kind": SECRETS.kind,
        "metadata": {
            "namespace": owner.namespace,
            "name": kind.secret_name(owner.name),
            "labels": naming.common_labels(owner.name),
            "ownerReferences": [reference],
        },
        "stringData": {kind.secret_key: token},
    }


def _decode_key(secret: Mapping[str, Any]) -> bytes:
    """Return the key in a Secret; no bytes if it has none."""
    return base64.b64decode((secret.get("data") or {}).get(KEY) or "")


def _no_token(message: str) -> EndpointProblem:
    return EndpointProblem(NO_TOKEN, message)


def _now() -> float:
    return asyncio.get_running_loop().time()
