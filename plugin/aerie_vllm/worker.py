"""The worker's half: vLLM gives its worker class these methods (`--worker-extension-cls aerie_vllm.worker.DrafterWorker`).

worker_protocol.py has the contract with the API server. Reading, hashing and checking a drafter take seconds and happen in a
thread, so that the engine's loop continues; the thread changes nothing but its own result, which the next call takes over.

Guarantees: nothing of the engine changes before a drafter is read, hashed and checked in full; a swap that fails is undone from
host memory, without a disk; a drafter that was loaded before is loaded again by plain copies.

Host memory on each rank: its part of each held drafter (the one loaded, the ones that the caller keeps, one on trial), and from a
stage until its first swap the whole checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aerie_vllm import weights
from aerie_vllm.checkpoint import CheckpointError, ReadingCancelledError
from aerie_vllm.reader import Own, Reader, find_unfit
from aerie_vllm.worker_protocol import Drafter, Problem, Report, Staging, SwapReport, build_problem, compute_digest

logger = logging.getLogger(f"vllm.{__name__}")
OWN_RETRY_SECONDS = 600.0
"""How long the own drafter is read again after errors that are not the checkpoint's, such as those of a network disk."""


class DrafterWorker:
    """The methods that vLLM's worker gets. Their names begin with `aerie_drafter_`, because a conflict would end vLLM's start."""

    _aerie_drafters: Drafters | None = None

    def aerie_drafter_describe(self) -> Report:
        """Return what this rank holds, and begin to read its own drafter's files if that has not begun."""
        return self.aerie_drafters().describe()

    def aerie_drafter_stage(self, folder: str, files: dict[str, str], keep: list[str]) -> Report:
        """Begin to read and check a drafter.

        Args:
            folder: where its files lie on this rank.
            files: SHA-256 (hex) by file name: config.json and every safetensors file.
            keep: digests of drafters that stay in memory; others than these and the loaded one are dropped.
        """
        return self.aerie_drafters().stage(Path(folder), files, keep)

    def aerie_drafter_swap(self, digest: str) -> SwapReport:
        """Draft with another drafter that this rank holds. The engine has to be paused."""
        return self.aerie_drafters().swap(digest)

    def aerie_drafters(self) -> Drafters:
        """Return this rank's drafters."""
        if self._aerie_drafters is None:
            self._aerie_drafters = Drafters(self)
        return self._aerie_drafters


@dataclasses.dataclass
class Held:
    """A drafter in host memory."""

    drafter: Drafter
    snapshot: weights.Snapshot | None
    """Its weights as the engine has them; captured once it has been loaded."""
    tensors: dict[str, torch.Tensor] | None = None
    """Its checkpoint, until it is loaded for the first time."""


class Job:
    """Work in a thread, whose outcome another thread reads once `is_done`."""

    def __init__(self, work: Callable[[Job], Any], failure: str) -> None:
        """Start it. `failure` is the reason for an exception that has none of its own."""
        self.result: Any = None
        self.problem: Problem | None = None
        self.is_rejected = False
        """Whether the problem is the checkpoint's, so that the same work would fail again."""
        self.is_cancelled = False
        self.seconds = 0.0
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work, failure), name="aerie-drafter", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Job], Any], failure: str) -> None:
        try:
            self.result = work(self)
        except Exception as error:  # noqa: BLE001 - a rejection of any kind must not end the engine
            self.is_rejected = isinstance(error, CheckpointError)
            self.problem = describe_error(error, failure)
        self.seconds = time.monotonic() - self._began

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def elapsed_seconds(self) -> float:
        return self.seconds if self.is_done else time.monotonic() - self._began

    def wait(self) -> None:
        """Wait until it is done."""
        self._thread.join()


class Drafters:
    """One rank's drafters. Its methods are called by one thread, and do not raise."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._config = worker.vllm_config.speculative_config
        model = worker.get_draft_model() if self._config is not None else None
        self._architecture = "" if model is None else type(model).__name__
        self._layout = weights.Layout(nn.Identity() if model is None else model, worker.get_model())
        self._unfit = find_unfit(worker.vllm_config, model, self._layout)
        self._reader = Reader(worker.vllm_config, self._layout)
        self._held: dict[str, Held] = {}
        self._loaded: str | None = None
        self._broken: Problem | None = None
        self._own_job: Job | None = None
        self._own: Own | None = None
        self._own_problem: Problem | None = None
        self._own_failed_at: float | None = None
        self._stage_job: Job | None = None
        self._stage_digest = ""

    def describe(self) -> Report:
        self._collect()
        return Report(
            rank=self._worker.rank,
            architecture=self._architecture,
            method=self._method,
            own=self._own.drafter if self._own else None,
            own_problem=self._own_problem,
            unfit=self._unfit,
            loaded=self._loaded,
            held=[held.drafter for held in self._held.values()],
            staging=self._describe_staging(),
            broken=self._broken,
        )

    def stage(self, folder: Path, files: dict[str, str], keep: list[str]) -> Report:
        self._collect()
        if self._stage_job is not None:
            self._stage_job.is_cancelled = True
        self._stage_digest = compute_digest(files)
        self._held = {digest: held for digest, held in self._held.items() if digest in {*keep, self._loaded, self._stage_digest}}
        present = self._held.get(self._stage_digest)
        self._stage_job = Job(lambda job: present or self._read_candidate(job, folder, files), "StageFailed")
        if present is not None:
            self._stage_job.wait()
        return self.describe()

    def swap(self, digest: str) -> SwapReport:
        self._collect()
        began = time.monotonic()
        problem = self._broken or self._unfit or self._try_swap(digest)
        return SwapReport(
            rank=self._worker.rank,
            loaded=self._loaded,
            problem=problem,
            broken=self._broken,
            seconds=time.monotonic() - began,
        )

    def _collect(self) -> None:
        """Take over what the threads have finished, and start the one that reads the own drafter."""
        if self._unfit is not None:
            return
        if self._own is None:
            self._collect_own()
        if self._stage_job is not None and self._stage_job.is_done and self._stage_job.result is not None:
            self._held.setdefault(self._stage_digest, self._stage_job.result)

    def _collect_own(self) -> None:
        """Take over the own drafter, and begin to read it at first and after an error that may pass."""
        job = self._own_job
        if job is not None:
            if not job.is_done:
                return
            self._own_problem = job.problem
            if job.result is not None:
                self._own = job.result
                self._loaded = self._own.drafter["digest"]
                self._held[self._loaded] = Held(self._own.drafter, None)
                return
            logger.warning("the engine's own drafter was not read: %s", job.problem)
            self._own_failed_at = self._own_failed_at or time.monotonic()
            if job.is_rejected or time.monotonic() - self._own_failed_at >= OWN_RETRY_SECONDS:
                self._unfit = job.problem
                return
        self._own_job = Job(lambda job: self._reader.read_own(lambda: job.is_cancelled), "OwnDrafterUnreadable")

    def _describe_staging(self) -> Staging | None:
        job = self._stage_job
        if job is None:
            return None
        return Staging(
            digest=self._stage_digest,
            state="Reading" if not job.is_done else "Rejected" if job.problem else "Staged",
            problem=job.problem,
            seconds=job.elapsed_seconds,
        )

    @property
    def _method(self) -> str:
        return str(self._config.method) if self._config is not None else ""

    def _read_candidate(self, job: Job, folder: Path, files: dict[str, str]) -> Held:
        """Read and check a drafter in the job's thread."""
        own_job = self._own_job
        assert own_job is not None
        own_job.wait()
        if own_job.problem is not None:
            raise CheckpointError(**own_job.problem)
        candidate = self._reader.read_candidate(own_job.result, folder, files, lambda: job.is_cancelled)
        return Held(candidate.drafter, weights.Snapshot(self._layout), candidate.tensors)

    def _try_swap(self, digest: str) -> Problem | None:
        """Load a held drafter, or else what is loaded now. Returns why it failed."""
        if digest == self._loaded:
            return None
        if digest not in self._held or self._loaded is None:
            return build_problem("NotStaged", f"no drafter {digest[:12]} is staged on rank {self._worker.rank}: stage it.")
        current = self._held[self._loaded]
        try:
            current.snapshot = current.snapshot or weights.Snapshot(self._layout)
            if not current.snapshot.is_captured:
                current.snapshot.capture()
        except Exception as error:  # noqa: BLE001 - nothing has changed
            return describe_error(error, "SnapshotFailed")
        try:
            self._load(self._held[digest])
        except Exception as error:  # whatever vLLM's loaders raise is undone
            logger.exception("the drafter %s was not loaded", digest[:12])
            try:
                current.snapshot.restore()
            except Exception as second:
                logger.exception("the drafter %s was not restored", self._loaded[:12])
                self._broken = describe_error(second, "RestoreFailed")
            return describe_error(error, "SwapFailed")
        self._loaded = digest
        return None

    def _load(self, held: Held) -> None:
        """Load a drafter. Raises what the loaders raise; the weights are undefined then."""
        from vllm.config import set_current_vllm_config

        assert held.snapshot is not None
        if held.snapshot.is_captured:
            held.snapshot.restore()
            return
        assert held.tensors is not None
        with set_current_vllm_config(self._worker.vllm_config), weights.detached(self._layout):
            weights.reload(self._layout.drafter, held.tensors, self._config.draft_model_config)
        for flag, gate in getattr(self._layout.drafter, "aerie_gates", {}).items():
            gate.fill_(held.drafter["flags"][flag])
        held.snapshot.capture()
        held.tensors = None


def describe_error(error: Exception, reason: str) -> Problem:
    """Return the problem that an exception stands for."""
    if isinstance(error, CheckpointError):
        return build_problem(error.reason, str(error))
    if isinstance(error, ReadingCancelledError):
        return build_problem("Replaced", "another drafter was staged in the meantime.")
    return build_problem(reason, f"{type(error).__name__}: {error}")
