"""vLLM's engine client on a simulated engine, as far as the plugin uses it (`aerie_vllm.engine.EngineClient`).

Guarantees: a pause begins between two steps, and no request advances until the engine is resumed. Not guaranteed: anything that
the plugin does not call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aerie_lab.engine.serving.drafter_worker import SimulatedWorker
from aerie_lab.engine.serving.driver import ReplicaDriver
from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP


class SimulatedEngineClient:
    """The engine client of one server."""

    def __init__(
        self, driver: ReplicaDriver, worker: SimulatedWorker | None, api_server_count: int, has_ended: Callable[[], bool]
    ) -> None:
        """Serve a driver's engine.

        Args:
            driver: of the engine.
            worker: the worker's half; None: the workers have none of the plugin's methods.
            api_server_count: processes that share the engine.
            has_ended: whether the engine has ended.
        """
        self._driver, self._worker, self._has_ended = driver, worker, has_ended
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

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Pause the engine between two steps. Raises ValueError for a pause that would lose requests or caches."""
        if mode != "keep" or clear_cache:
            raise ValueError(f"the simulator has no pause with mode={mode!r}, clear_cache={clear_cache}: use 'keep' and False.")
        await self._driver.pause()

    async def resume_generation(self) -> None:
        """Resume the engine."""
        self._driver.resume()

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return self._driver.is_paused

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
