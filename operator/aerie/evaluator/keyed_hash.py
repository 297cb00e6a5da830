"""Hashes under a key that only this process has: tenants, conversations and requests get a number without a way to their name.

Guarantee: equal input gives an equal hash within a process; nobody without the key can test a guess of the input. Not guaranteed:
equal hashes in two processes, so a cluster may change its bucket when the evaluator restarts.
"""

from __future__ import annotations

import hashlib
import secrets

from aerie.analysis.paired.sums import BUCKETS


class KeyedHash:
    """Hash functions under one key. `key`: at most 64 bytes; random if it is None."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def bucket(self, cluster_name: bytes) -> int:
        """Return the bucket of a cluster, from 0 to BUCKETS - 1."""
        return int.from_bytes(self._digest(b"cluster", cluster_name)) % BUCKETS

    def cache_salt(self, salt: str) -> str:
        """Return a salt of the engines' prefix cache that separates what the request's own salt separates."""
        return self._digest(b"salt", salt.encode(errors="replace")).hex()

    def _digest(self, purpose: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=self._key, person=purpose).digest()
