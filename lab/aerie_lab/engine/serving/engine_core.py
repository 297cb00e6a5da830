"""vLLM's client of the engine core, as far as the plugin replaces it: each request goes through it before it is submitted.

Guarantees: the prefix cache separates prompts by their cache salts, as vLLM's hashes do.
"""

from __future__ import annotations

from aerie_lab.engine.performance_model.request import Request


class SimulatedEngineCore:
    """The client of one server."""

    async def add_request_async(self, request: Request) -> None:
        """Put the request's salt into the key of its first segment."""
        if request.cache_salt is not None and request.segments:
            (key, tokens), *others = request.segments
            request.segments = (((request.cache_salt, key), tokens), *others)
