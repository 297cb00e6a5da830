"""Reads the bearer token of a resource's pods from the resource's own Secret.

Guarantees: only a Secret that the resource controls is read: whoever may write a resource cannot make Aerie send another Secret
to a pod. A token is `TOKEN_CHARACTERS` hexadecimal digits, so it fits a header and has a constant size. It is cached for
`TOKEN_TTL_SECONDS`, and for no longer than `MIN_TOKEN_TTL_SECONDS` after a pod has rejected it. A failure is a value, cached for
the shorter time. No message contains anything of a Secret. Not guaranteed: that the pods have the same token; the kubelet takes a
minute or so to mount a new one.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aerie.controller.kubernetes.client import ApiError, Cluster, ResourceKind
from aerie.controller.work_queue import NamespacedName
from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.manifests import naming
from aerie.rollout.facts.snapshot import is_owned_by

SECRETS = ResourceKind("v1", "Secret", "secrets")
TOKEN_CHARACTERS = 64
TOKEN_TTL_SECONDS = 300.0
MIN_TOKEN_TTL_SECONDS = 10.0
"""Minimum seconds between two reads of a Secret, whatever pods answer."""
_TOKEN = re.compile(rf"[0-9a-f]{{{TOKEN_CHARACTERS}}}")


@dataclass(frozen=True)
class _CachedToken:
    owner_uid: str
    result: str | EndpointProblem
    read_at: float
    """Time of the event loop."""
    ttl_seconds: float


class DrafterTokens:
    """The tokens of all resources, for use from one event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._cache: dict[NamespacedName, _CachedToken] = {}
        self._locks: dict[NamespacedName, asyncio.Lock] = {}
        """Lock of each resource: its pods wait for one read of the Secret."""

    async def read(self, key: NamespacedName, owner_uid: str) -> str | EndpointProblem:
        """Return the token of the resource with this uid, or why there is none."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            now, cached = asyncio.get_running_loop().time(), self._cache.get(key)
            if cached is not None and cached.owner_uid == owner_uid and now - cached.read_at < cached.ttl_seconds:
                return cached.result
            result = await self._read_secret(key, owner_uid)
            seconds = TOKEN_TTL_SECONDS if isinstance(result, str) else MIN_TOKEN_TTL_SECONDS
            self._cache[key] = _CachedToken(owner_uid, result, asyncio.get_running_loop().time(), seconds)
            return result

    def expire(self, key: NamespacedName) -> None:
        """Read the token again soon, because a pod has rejected it."""
        if (cached := self._cache.get(key)) is not None:
            self._cache[key] = replace(cached, ttl_seconds=MIN_TOKEN_TTL_SECONDS)

    def forget(self, key: NamespacedName) -> None:
        """Drop the token of a resource that was deleted."""
        self._cache.pop(key, None)
        self._locks.pop(key, None)

    async def _read_secret(self, key: NamespacedName, owner_uid: str) -> str | EndpointProblem:
        name = naming.drafter_token_secret_name(key.name)
        try:
            secret = await self._cluster.get(SECRETS, key.namespace, name)
        except ApiError as error:
            return _no_token(f"the Secret {name} cannot be read ({error}): grant the operator the right to get Secrets.")
        if secret is None:
            return _no_token(f"there is no Secret {name} with the token of the pods: wait until Aerie has created it.")
        if not is_owned_by(secret, owner_uid):
            return _no_token(f"the Secret {name} is not the resource's own: delete it, and Aerie creates it again.")
        token = _decode_token(secret)
        if token is None:
            message = f"the Secret {name} has no token of {TOKEN_CHARACTERS} hexadecimal digits in {naming.DRAFTER_TOKEN_KEY}"
            return _no_token(f"{message}: delete it, and Aerie creates it again.")
        return token


def _decode_token(secret: Mapping[str, Any]) -> str | None:
    value = (secret.get("data") or {}).get(naming.DRAFTER_TOKEN_KEY)
    if not isinstance(value, str):
        return None
    try:
        text = base64.b64decode(value, validate=True).decode("ascii")
    except ValueError:  # not base64, or not ASCII
        return None
    return text if _TOKEN.fullmatch(text) else None


def _no_token(message: str) -> EndpointProblem:
    return EndpointProblem("NoToken", message)
