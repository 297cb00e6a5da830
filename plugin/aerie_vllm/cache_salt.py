"""Separates cached blocks by drafter, so that no request continues with keys and values of a drafter that does not serve it.

A block of vLLM has the keys and values of target and drafter together, and no hash of a block has the drafter's identity. A
request's cache salt is in the hash of its first block, and each hash is in the next one. So each request gets a salt of the
drafter that serves it. A return to a drafter finds the blocks that it has left.

The drafter of the engine's arguments has no salt, in every process; any other drafter has its own. So processes with the same
drafter in their arguments agree on salts, also where they share a store of blocks.

Guarantees: while the drafter of the arguments is loaded, requests are as their users sent them. A request finds no blocks of
requests that were sent for another drafter, or with another user's salt. Not guaranteed: that all blocks of a request are of the
drafter that it was sent for. A request that waits or runs at a change is computed by the next drafter from then on. Also, a user
who knows a drafter's digest can send the salt of its blocks while the drafter of the arguments is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable
from typing import Any


class CacheSalt:
    """Gives each request that is sent to the engine the salt of a drafter."""

    def __init__(self, core: Any, arguments_digest: str) -> None:
        """Begin while the drafter of the engine's arguments is loaded.

        Args:
            core: vLLM's client of the engine core. All requests of all paths go through its `add_request_async`.
            arguments_digest: of that drafter.
        """
        self._add_request = core.add_request_async
        self._arguments_digest = self.digest = arguments_digest
        """`digest`: of the drafter that serves the requests which are sent from now on."""
        core.add_request_async = self._add_salted_request

    def _add_salted_request(self, request: Any) -> Awaitable[None]:
        """Send a request, vLLM's EngineCoreRequest."""
        if self.digest != self._arguments_digest:
            request.cache_salt = compute_salt(request.cache_salt, self.digest)
        sent: Awaitable[None] = self._add_request(request)
        return sent


def compute_salt(user_salt: str | None, digest: str) -> str:
    """Return the salt of a user's requests with a drafter.

    It is a hash, because stores of blocks need short salts: vLLM limits users' salts to 128 characters (`validate_cache_salt`,
    from 0.30 on).
    """
    return hashlib.sha256(f"{user_salt or ''}:{digest}".encode()).hexdigest()
