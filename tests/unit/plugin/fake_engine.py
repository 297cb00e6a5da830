"""An engine client with the memory of its ranks, which pauses, swaps and fails as vLLM's may; in virtual time.

It records what must never happen: a swap while the engine runs, and a call of an engine that has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import prometheus_client

from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP, Drafter, Problem, compute_digest

STEP_SECONDS, SWAP_SECONDS, STAGE_SECONDS = 0.02, 0.03, 0.495
ACCEPTED_PER_DRAFT = {"own": 1.0, "better": 2.0}


def make_files(name: str) -> dict[str, str]:
    """Return the files of the drafter with this name, as a caller sends them."""
    digit = format(sum(name.encode()) % 16, "x")
    return {"config.json": digit * 64, "model.safetensors": name.encode().hex().ljust(64, "0")[:64]}


def make_drafter(name: str) -> Drafter:
    """Return the drafter with this name, as a worker describes it."""
    files = make_files(name)
    return {"digest": compute_digest(files), "files": files, "kind": "eagle3", "flags": {}}


class FakeRank:
    """A rank of the engine."""

    def __init__(self, number: int, own: Drafter) -> None:
        self.number, self.own = number, own
        self.own_known = True
        self.own_problem: Problem | None = None
        self.unfit: Problem | None = None
        self.loaded: Drafter = own
        self.previous: Drafter = own
        self.memory: dict[str, Drafter] = {own["digest"]: own}
        self.staging: dict[str, Any] | None = None
        self.staged_at = 0.0
        self.broken: Problem | None = None

    def report(self, now: float, rejections: Mapping[str, Problem], hangs: bool) -> dict[str, Any]:
        """Return the report, after ending a stage whose time has come."""
        if self.staging is not None and self.staging["state"] == "Reading" and now >= self.staged_at and not hangs:
            problem = rejections.get(self.staging["digest"])
            self.staging |= {"state": "Rejected" if problem else "Staged", "problem": problem}
            if problem is None:
                self.memory[self.staging["digest"]] = self.staging["drafter"]
        staging = self.staging and {key: value for key, value in self.staging.items() if key != "drafter"}
        return {
            "rank": self.number,
            "architecture": "Eagle3LlamaForCausalLM",
            "method": "eagle3",
            "own": self.own if self.own_known else None,
            "own_problem": self.own_problem,
            "unfit": self.unfit,
            "loaded": self.loaded["digest"] if self.own_known else None,
            "held": list(self.memory.values()),
            "staging": staging,
            "broken": self.broken,
        }


@dataclass
class FakeRequest:
    """A request that the engine core gets, as far as the plugin uses it."""

    cache_salt: str | None = None


class FakeEngineCore:
    """vLLM's client of the engine core."""

    def __init__(self) -> None:
        self.salts: list[str | None] = []
        """Salts of all requests that were sent."""

    async def add_request_async(self, request: FakeRequest) -> None:
        self.salts.append(request.cache_salt)


class FakeEngineClient:
    """vLLM's engine client, with `ranks` ranks of one engine."""

    def __init__(self, ranks: int = 2, registry: prometheus_client.CollectorRegistry | None = None) -> None:
        off = ("data_parallel_external_lb", "data_parallel_hybrid_lb", "enable_elastic_ep", "enable_fault_tolerance")
        parallel = SimpleNamespace(_api_process_count=1, **dict.fromkeys(off, False))
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.engine_core: Any = FakeEngineCore()
        self.own = make_drafter("own")
        self.ranks = [FakeRank(number, self.own) for number in range(ranks)]
        self.errored = False
        self.paused = False
        self.pause_seconds = STEP_SECONDS
        """Time until a pause is complete; nothing is scheduled meanwhile."""
        self.failures: Counter[str] = Counter()
        """How often the next calls of a name fail: pause, resume, is_paused, a method of the workers, `swap:RANK`, or
        `back:RANK` for a swap to what the rank had before."""
        self.broken_ranks: set[int] = set()
        """Ranks that break in the next swap that fails there."""
        self.rejections: dict[str, Problem] = {}
        """Why a drafter is rejected, by digest."""
        self.unfinished_requests = 0
        self.hanging_disk = False
        self.dies_in: str | None = None
        """The call in which the engine ends."""
        self.labels: list[str] = []
        self.calls: list[str] = []
        self.violations: list[str] = []
        self.drafters: dict[str, Drafter] = {}
        """Drafters on the disk, by folder name."""
        labels = ["model_name", "engine"]
        self._counters = [
            prometheus_client.Counter(name, name, labels, registry=registry or prometheus_client.CollectorRegistry())
            for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens", "vllm:generation_tokens")
        ]

    # ------------------------------------------------------------------------------------------------------ the client
    async def is_paused(self) -> bool:
        await self._enter("is_paused")
        return self.paused

    def get_num_unfinished_requests(self) -> int:
        return self.unfinished_requests

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True  # before the pause is complete
        await self._enter("pause", self.pause_seconds)

    async def resume_generation(self) -> None:
        await self._enter("resume")
        self.paused = False

    async def update_weight_version(self, new_version: str) -> None:
        await self._enter("label")
        self.labels.append(new_version)

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        assert timeout is None
        await self._enter(method)
        if method == DESCRIBE:
            return self._report()
        if method == STAGE:
            return self._stage(*args)
        assert method == SWAP
        return await self._swap(*args)

    # --------------------------------------------------------------------------------------------------------- the test
    async def send_request(self, user_salt: str | None = None) -> str | None:
        """Send a request as vLLM's frontend does, and return the salt that reaches the engine."""
        await self.engine_core.add_request_async(FakeRequest(user_salt))
        salt: str | None = self.engine_core.salts[-1]
        return salt

    def serve_steps(self, drafts: int) -> None:
        """Verify drafts of requests, unless the engine is paused."""
        if self.paused or self.errored:
            return
        name = next(
            (name for name in ACCEPTED_PER_DRAFT if make_drafter(name)["digest"] == self.ranks[0].loaded["digest"]), "own"
        )
        accepted = drafts * ACCEPTED_PER_DRAFT[name]
        for counter, value in zip(self._counters, (drafts, accepted, drafts + accepted), strict=True):
            counter.labels("target", "0").inc(value)

    def loaded_digests(self) -> set[str]:
        """Return what the ranks draft with."""
        return {rank.loaded["digest"] for rank in self.ranks}

    # --------------------------------------------------------------------------------------------------------- inside
    async def _enter(self, name: str, seconds: float = 0.0) -> None:
        self.calls.append(name)
        if self.errored:
            self.violations.append(f"{name} of an engine that has ended")
        await asyncio.sleep(seconds)
        if self.dies_in == name:
            self.errored = True
            await asyncio.Event().wait()  # the answer never comes
        if self.failures[name] > 0:
            self.failures[name] -= 1
            raise RuntimeError(f"{name} failed")

    def _report(self) -> list[dict[str, Any]]:
        now = asyncio.get_running_loop().time()
        return [rank.report(now, self.rejections, self.hanging_disk) for rank in self.ranks]

    def _stage(self, _folder: str, files: dict[str, str], keep: Sequence[str]) -> list[dict[str, Any]]:
        drafter: Drafter = {"digest": compute_digest(files), "files": files, "kind": "eagle3", "flags": {}}
        for rank in self.ranks:
            retained = {rank.loaded["digest"], rank.previous["digest"], *keep}
            rank.memory = {digest: held for digest, held in rank.memory.items() if digest in retained}
            rank.staging = {"digest": drafter["digest"], "state": "Reading", "problem": None, "seconds": 0.0, "drafter": drafter}
            rank.staged_at = asyncio.get_running_loop().time() + STAGE_SECONDS * (1 + rank.number)
        return self._report()

    async def _swap(self, digest: str) -> list[dict[str, Any]]:
        if not self.paused:
            self.violations.append("a swap while the engine runs")
        await asyncio.sleep(SWAP_SECONDS)
        results = []
        for rank in self.ranks:
            problem: Problem | None = None
            failure = f"{'back' if digest == rank.previous['digest'] else 'swap'}:{rank.number}"
            if digest == rank.loaded["digest"]:
                pass
            elif self.failures[failure] > 0:
                self.failures[failure] -= 1
                problem = {"reason": "LoadFailed", "message": "the weights could not be copied."}
                if rank.number in self.broken_ranks:
                    rank.broken = {"reason": "Broken", "message": "the weights could not be restored."}
            elif digest not in rank.memory:
                problem = {"reason": "NotHeld", "message": f"drafter {digest} is not in memory."}
            else:
                rank.previous, rank.loaded = rank.loaded, rank.memory[digest]
            report = {
                "rank": rank.number,
                "loaded": rank.loaded["digest"],
                "problem": problem,
                "broken": rank.broken,
                "seconds": 0.03,
            }
            results.append(report)
        return results
