"""vLLM's engine client, as far as a change of the drafter needs it: all ranks of all engines, and no call that waits for ever.

vLLM's own `collective_rpc` returns the results of the first data-parallel engine only (`DPLBAsyncMPClient.call_utility_async`,
v1/engine/core_client.py, 0.26 to 0.33), and a call that is pending when the engine ends is never answered.

Guarantees: the result of a call has every rank of every engine that this API server serves, in the same order each time. A call
ends with `EngineDeadError` within a second after the engine has ended. Not guaranteed: a limit of a call while the engine lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar, cast

from aerie_vllm.cache_salt import CacheSalt
from aerie_vllm.rejection import EngineDeadError
from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP, Problem, Report, SwapReport

_DEATH_CHECK_SECONDS = 0.5
_T = TypeVar("_T")
_log = logging.getLogger(f"vllm.{__name__}")


class EngineClient(Protocol):
    """The part of vLLM's engine client that is public and used here (vllm/engine/protocol.py)."""

    vllm_config: Any

    @property
    def errored(self) -> bool: ...

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[object, ...]) -> list[Any]: ...


class Engine:
    """The engines behind one API server."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._core: Any = getattr(client, "engine_core", None)
        # 0.32 and newer label each token with the weights' version.
        self._label = getattr(client, "update_weight_version", None)
        self._salt: CacheSalt | None = None

    @property
    def is_dead(self) -> bool:
        """Whether the engine has ended."""
        return self._client.errored

    def count_unfinished_requests(self) -> int | None:
        """Return how many requests the engine serves or queues now; None where vLLM does not say."""
        name = "get_num_unfinished_requests"
        count = getattr(self._client, name, None) or getattr(getattr(self._client, "output_processor", None), name, None)
        return None if count is None else int(count())

    def find_unfit_reason(self) -> Problem | None:
        """Return why a drafter can never change in place behind this API server, or None if it can."""
        parallel = self._client.vllm_config.parallel_config
        if (servers := getattr(parallel, "_api_process_count", 1)) > 1:
            message = (
                f"{servers} API servers share the engine (--api-server-count), and none of them knows what the others change: "
                "start one, or let drafters change by pods."
            )
            return {"reason": "SeveralApiServers", "message": message}
        if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb:
            message = (
                "several API servers serve the data-parallel ranks (external or hybrid load balancing), and none of them can "
                "pause all: use internal load balancing, or let drafters change by pods."
            )
            return {"reason": "SeveralApiServers", "message": message}
        if parallel.enable_elastic_ep or getattr(parallel, "enable_fault_tolerance", False):
            message = (
                "engines may be added or restarted while the server runs (--enable-elastic-ep, --enable-fault-tolerance), and "
                "would have the drafter of the arguments: turn both off, or let drafters change by pods."
            )
            return {"reason": "EnginesMayRestart", "message": message}
        if not callable(getattr(self._core, "add_request_async", None)):
            message = (
                "this release of vLLM sends requests in another way (engine_core.add_request_async is missing), so cached blocks "
                "of two drafters cannot be separated: use a release that Aerie supports, or let drafters change by pods."
            )
            return {"reason": "NoCacheSalt", "message": message}
        return None

    async def describe(self) -> list[Report]:
        """Return what each rank holds. Raises EngineDeadError, and what the engine raises."""
        return cast("list[Report]", await self._call_ranks(DESCRIBE))

    async def stage(self, folder: str, files: dict[str, str], retained: Sequence[str]) -> list[Report]:
        """Start to read a drafter on each rank; drafters in `retained` stay in memory. Raises as `describe`."""
        return cast("list[Report]", await self._call_ranks(STAGE, folder, files, list(retained)))

    async def swap(self, digest: str) -> list[SwapReport]:
        """Load a drafter from memory on each rank of the paused engine. Raises as `describe`."""
        return cast("list[SwapReport]", await self._call_ranks(SWAP, digest))

    async def is_paused(self) -> bool:
        """Return whether the engine is paused or asleep. Raises as `describe`."""
        return await self._until_dead(self._client.is_paused())

    async def pause(self) -> None:
        """Pause the engine between two steps; requests and caches stay. Raises as `describe`."""
        await self._until_dead(self._client.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        """Resume the engine. Raises as `describe`."""
        await self._until_dead(self._client.resume_generation())

    def separate_blocks(self, arguments_digest: str) -> None:
        """Separate cached blocks by drafter from now on, while that of the engine's arguments is loaded."""
        self._salt = CacheSalt(self._core, arguments_digest)

    def file_blocks(self, digest: str) -> None:
        """File the blocks of requests that are sent from now on under a drafter."""
        assert self._salt is not None
        self._salt.digest = digest

    async def label_tokens(self, digest: str) -> None:
        """Label all tokens from now on with the drafter's digest, where the engine can. Raises EngineDeadError."""
        if self._label is None:
            return
        try:
            await self._until_dead(self._label(digest))
        except EngineDeadError:
            raise
        except Exception:  # noqa: BLE001 - a label is a convenience of clients
            _log.exception("tokens are not labelled with drafter %s", digest)

    def has_pending_outputs(self) -> bool:
        """Whether outputs of the engine have arrived and are not counted yet."""
        queue = getattr(self._core, "outputs_queue", None)
        return queue is not None and not queue.empty()

    async def _call_ranks(self, method: str, *arguments: object) -> list[Any]:
        engines = getattr(self._core, "core_engines", ())
        if len(engines) < 2:
            return await self._until_dead(self._client.collective_rpc(method, None, arguments))
        calls = [
            self._core._call_utility_async("collective_rpc", method, None, arguments, None, engine=engine) for engine in engines
        ]
        # All are waited for, also after a failure: no engine may still be in a call when the next one is made.
        results = await self._until_dead(asyncio.gather(*calls, return_exceptions=True))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [report for engine_reports in results for report in cast("list[Any]", engine_reports)]

    async def _until_dead(self, call: Awaitable[_T]) -> _T:
        """Return the call's result. Raises EngineDeadError if the engine ends before."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                if self.is_dead:
                    raise EngineDeadError
                await asyncio.wait((task,), timeout=_DEATH_CHECK_SECONDS)
            return task.result()
        except Exception:
            if self.is_dead:
                raise EngineDeadError from None
            raise
        finally:
            task.cancel()
