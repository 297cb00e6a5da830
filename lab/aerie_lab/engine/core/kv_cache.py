"""KV cache of one engine: the blocks of each request, and the prefixes that finished and preempted requests leave.

Guaranteed: the blocks of all requests never exceed those of the engine. Not modelled: blocks that requests share
(`aerie_lab.engine.performance_model.prefix`).
"""

from __future__ import annotations

from aerie_lab.engine.performance_model.prefix import PrefixCache
from aerie_lab.engine.performance_model.request import EngineSettings, Request


class KvCache:
    """The KV blocks of one engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._usable_blocks = settings.num_blocks - 1  # vLLM keeps block 0 as a placeholder
        self._used_blocks = 0
        self._prefix_cache = PrefixCache(self._usable_blocks * settings.block_size, settings.block_size)
        self._is_last_block_recomputed = settings.drops_last_block and bool(settings.num_speculative_tokens)
        self._lookahead = (settings.num_speculative_tokens or 0) if settings.drops_last_block else 0

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        return self._used_blocks / self._usable_blocks

    def free_tokens(self, requests: int, cached_tokens: int, k: int) -> int:
        """Return the tokens by which `requests` requests with `cached_tokens` tokens in the cache can safely grow before it may
        be full, after a step with `k` drafts."""
        block = self._settings.block_size
        return self._usable_blocks * block - cached_tokens - requests * (k + self._lookahead + block)

    def allocate(self, request: Request, tokens: int) -> bool:
        """KV blocks for `tokens` tokens of the request, and for the drafter's lookahead; False when there are not enough."""
        blocks = -(-min(tokens + self._lookahead, self._settings.max_model_len) // self._settings.block_size)
        if blocks > request.kv_blocks:
            if self._used_blocks + blocks - request.kv_blocks > self._usable_blocks:
                return False
            self._used_blocks += blocks - request.kv_blocks
            request.kv_blocks = blocks
        return True

    def release(self, request: Request) -> None:
        """Release the request's blocks; its prompt and answer stay in the prefix cache."""
        self._used_blocks -= request.kv_blocks
        request.kv_blocks = 0
        if request.segments and request.generated_tokens:
            answer = (request.name, request.generated_tokens)
            self._prefix_cache.insert([*request.segments, answer])

    def match_prefix(self, request: Request) -> int:
        """Return the number of the request's tokens in the prefix cache."""
        if not self._settings.enable_prefix_caching or not request.segments:
            return 0
        segments = request.segments
        if request.generated_tokens:  # preempted: its own answer is in the cache as well
            segments = [*segments, (request.name, request.generated_tokens)]
        matched = self._prefix_cache.match(segments, request.total_tokens - 1)
        return max(matched - self._settings.block_size, 0) if self._is_last_block_recomputed else matched
