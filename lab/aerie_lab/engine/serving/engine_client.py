"""vLLM's engine client on a simulated engine, as far as the plugin uses it (`aerie_vllm.engine.EngineClient`).

Guarantees: a pause begins between two steps, and no request advances until the engine is resumed. Not guaranteed: anything that
the plugin does not call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

from aerie_lab.engine.serving.drafter_worker import SimulatedWorker
from aerie_lab.engine.serving.engine_core import SimulatedEngineCore
from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP


class PausableEngine(Protocol):
    """An engine that pauses between two steps: `driver.ReplicaDriver`, or a simpler model of one."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def unfinished_count(self) -> int: ...

    async def pause(self) -> None: ...

    def resume(self) -> None: ...


class SimulatedEngineClient:
    """The engine client of one server."""

    def __init__(
        self,
        engine: PausableEngine,
        engine_core: SimulatedEngineCore,
        worker: SimulatedWorker | None,
        api_server_count: int,
        has_ended: Callable[[], bool],
    ) -> None:
        """Serve an engine.

        Args:
            engine: which is paused.
            engine_core: through which requests go.
            worker: the worker's half; None: the workers have none of the plugin's methods.
            api_server_count: processes that share the engine.
            has_ended: whether the engine has ended.
        """
        self._engine, self._worker, self._has_ended = engine, worker, has_ended
        self.engine_core = engine_core
        parallel_config = SimpleNamespace(
            _api_process_count=api_server_count,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
            enable_elastic_ep=False,
        )
        self.vllm_config = SimpleNamespace(parallel_config=parallel_config)

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""
        return self._has_ended()

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests run or wait."""
        return self._engine.unfinished_count

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Pause the engine between two steps. Raises ValueError for a pause that would lose requests or caches."""
        if mode != "keep" or clear_cache:
            raise ValueError(f"the simulator has no pause with mode={mode!r}, clear_cache={clear_cache}: use 'keep' and False.")
        await self._engine.pause()

    async def resume_generation(self) -> None:
        """Resume the engine."""
        self._engine.resume()

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return self._engine.is_paused

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:
        """Call a method of the one rank. Raises AttributeError where its worker has no such method."""
        del timeout
        worker = self._worker
        if worker is not None and method == DESCRIBE:
            return [worker.describe()]
        if worker is not None and method == STAGE:
            return [worker.stage(*args)]
        if worker is not None and method == SWAP:
            return [await worker.swap(*args)]
        raise AttributeError(f"'Worker' object has no attribute '{method}'")
