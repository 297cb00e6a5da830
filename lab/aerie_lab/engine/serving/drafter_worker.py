"""The worker's half of the plugin in a simulated engine: real files are read, hashed and checked, and an acceptance is swapped.

It answers the three methods of `aerie_vllm.worker_protocol` as `aerie_vllm.worker` does, with the plugin's own checks
(`checkpoint`, `validation`). The engine has one rank.

Guarantees: what is held was hashed, and fits the drafter of the arguments by config, names, shapes and types. Not guaranteed:
what only the weights show (values that are no numbers, a vocabulary map beyond the target's, another copy of the target's
embedding), and the defaults that vLLM gives to keys which a config.json leaves out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aerie_lab.engine.serving.drafter import DrafterProfile, build_drafter_profile
from aerie_lab.engine.serving.drafter_faults import DrafterFault
from aerie_lab.engine.serving.files import ModelFiles, has_hub
from aerie_vllm.checkpoint import CheckpointError, open_checkpoint
from aerie_vllm.rejection import RejectionError
from aerie_vllm.requests import DrafterSource
from aerie_vllm.source_reader import read_source
from aerie_vllm.validation import FLAGS, SHARED, Engine, Form, find_problem, name_kind, read_flags
from aerie_vllm.worker_protocol import Drafter, Problem, Report, Staging, SwapReport, compute_digest

_RANK = 0
_HANG_SECONDS = 0.1
"""Seconds within which a disk that hung reads again after the end of the fault."""
_EAGLE3_CLASS = "Eagle3LlamaForCausalLM"
_EAGLE3_ARCHITECTURES = frozenset(("LlamaForCausalLMEagle3", _EAGLE3_CLASS))
"""Architectures that vLLM serves with the class."""


@dataclass(frozen=True)
class HeldDrafter:
    """A drafter in a worker's memory."""

    drafter: Drafter
    form: Form
    profile: DrafterProfile


@dataclass
class _Stage:
    """The latest call of `stage`."""

    digest: str
    start_time: float
    end_time: float | None = None
    problem: Problem | None = None


class SimulatedWorker:
    """The drafters of one engine."""

    def __init__(
        self, method: str, model: str, revision: str | None, load: Callable[[DrafterProfile], None], swap_seconds: float
    ) -> None:
        """Serve a drafter.

        Args:
            method: of drafting, empty without a drafter.
            model: the drafter's folder or its name on the Hub, empty without a drafter.
            revision: on the Hub.
            load: makes the engine draft with another drafter.
            swap_seconds: duration of a swap.
        """
        self.fault: DrafterFault | None = None
        self.stage_seconds = 0.0
        """Seconds in which files of a real size are read, besides those of the files that are there."""
        self._method, self._model, self._load, self._swap_seconds = method, model, load, swap_seconds
        self._revision = revision or "main"
        self._loop = asyncio.get_running_loop()
        self._own: HeldDrafter | None = None
        self._unfit = _find_unfit_reason(method, model)
        self._loaded: str | None = None
        self._held: dict[str, HeldDrafter] = {}
        self._stage: _Stage | None = None
        self._broken: Problem | None = None
        self._own_task: asyncio.Task[None] | None = None
        self._stage_task: asyncio.Task[None] | None = None

    def describe(self) -> Report:
        """Return what the rank holds, and begin to read its own drafter if that has not begun."""
        if self._own_task is None and self._unfit is None:
            self._own_task = asyncio.create_task(self._read_own())
        architectures = self._own.form.config.get("architectures") or [""] if self._own is not None else [""]
        return Report(
            rank=_RANK,
            architecture=_EAGLE3_CLASS if architectures[0] in _EAGLE3_ARCHITECTURES else architectures[0],
            method=self._method,
            own=self._own.drafter if self._own is not None else None,
            own_problem=None,
            unfit=self._unfit,
            loaded=self._loaded,
            held=[held.drafter for held in self._held.values()],
            staging=self._describe_staging(),
            broken=self._broken,
        )

    def stage(self, folder: str, files: dict[str, str], retained: Sequence[str]) -> Report:
        """Begin to read and check a drafter; those in `retained` and the loaded one stay in memory."""
        if self._stage_task is not None:
            self._stage_task.cancel()
        stage = self._stage = _Stage(compute_digest(files), self._loop.time())
        self._held = {digest: held for digest, held in self._held.items() if digest in {*retained, self._loaded, stage.digest}}
        self._stage_task = asyncio.create_task(self._read_candidate(stage, Path(folder), files))
        return self.describe()

    async def swap(self, digest: str) -> SwapReport:
        """Draft with another held drafter. The engine has to be paused."""
        start_time = self._loop.time()
        problem = self._broken or self._unfit or await self._try_swap(digest)
        seconds = self._loop.time() - start_time
        return SwapReport(rank=_RANK, loaded=self._loaded, problem=problem, broken=self._broken, seconds=seconds)

    async def _try_swap(self, digest: str) -> Problem | None:
        if digest == self._loaded:
            return None
        held = self._held.get(digest)
        if held is None:
            return Problem(reason="NotStaged", message=f"no drafter {digest[:12]} is staged on rank {_RANK}: stage it.")
        await asyncio.sleep(self._swap_seconds)
        if self.fault in ("swap-fails", "swap-breaks"):
            if self.fault == "swap-breaks":
                self._broken = Problem(reason="RestoreFailed", message="simulated fault swap-breaks.")
            return Problem(reason="SwapFailed", message=f"simulated fault {self.fault}.")
        if self.fault != "swap-ignored":
            self._load(held.profile)
        self._loaded = digest
        return None

    async def _read_own(self) -> None:
        try:
            folder = self._model
            if not Path(folder).is_dir():  # vLLM has it in the Hub's cache, where the plugin's process puts it too
                source = DrafterSource(repository=self._model, revision=self._revision)
                folder = str((await read_source(source)).drafter.folder)
            self._own = own = await asyncio.to_thread(self._read, Path(folder), None, None)
        except Exception as error:  # noqa: BLE001 - as in the worker, the engine serves on
            self._unfit = _describe_error(error, "OwnDrafterUnreadable")
            return
        self._loaded = own.drafter["digest"]
        self._held[self._loaded] = own

    async def _read_candidate(self, stage: _Stage, folder: Path, files: Mapping[str, str]) -> None:
        try:
            if stage.digest not in self._held:
                while self.fault == "stage-hangs":
                    await asyncio.sleep(_HANG_SECONDS)
                await asyncio.sleep(self.stage_seconds)
                self._held[stage.digest] = await asyncio.to_thread(self._read, folder, files, self._own)
        except Exception as error:  # noqa: BLE001 - a rejection of any kind must not end the engine
            stage.problem = _describe_error(error, "StageFailed")
        stage.end_time = self._loop.time()

    def _read(self, folder: Path, files: Mapping[str, str] | None, own: HeldDrafter | None) -> HeldDrafter:
        """Read a drafter in a thread: the engine's own (both are None), or one that has to fit it.

        Raises CheckpointError, EngineError and OSError.
        """
        with open_checkpoint(folder, None if files is None else list(files)) as checkpoint:
            form = Form(checkpoint.config, checkpoint.tensors)
            if own is not None:
                problem = find_problem(own.form, form, _describe_engine(self._method, own.form))
                if problem is not None:
                    raise CheckpointError(**problem)
            if files is None:
                files = checkpoint.hash_files(lambda: False)
            else:
                checkpoint.load(files, lambda: False)  # for its comparison of the digests
            profile = build_drafter_profile(
                self._method, str(folder), ModelFiles(checkpoint.config, frozenset(checkpoint.tensors))
            )
        flags = read_flags(form.config) if self._method == "eagle3" else {}
        kind = name_kind(self._method, flags)
        return HeldDrafter(Drafter(digest=compute_digest(files), files=dict(files), kind=kind, flags=flags), form, profile)

    def _describe_staging(self) -> Staging | None:
        if (stage := self._stage) is None:
            return None
        return Staging(
            digest=stage.digest,
            state="Reading" if stage.end_time is None else "Rejected" if stage.problem else "Staged",
            problem=stage.problem,
            seconds=(self._loop.time() if stage.end_time is None else stage.end_time) - stage.start_time,
        )


def _find_unfit_reason(method: str, model: str) -> Problem | None:
    """Return why the drafter of the arguments can never be changed in place, or None."""
    if not model:
        what = "the engine has no drafter with weights" if not method else f"{method} has no weights of its own"
        return Problem(reason="NoDrafter", message=f"{what}: set speculative-config's model.")
    if not Path(model).is_dir() and not has_hub():
        message = f"{model} is no folder, and no Hub is known: mount the drafter, or set HF_ENDPOINT."
        return Problem(reason="OwnDrafterUnreadable", message=message)
    return None


def _describe_engine(method: str, own: Form) -> Engine:
    """Return what decides of an engine with this drafter: all gates, and of the target those modules that the drafter lacks."""
    present = {name.rpartition(".weight")[0].rpartition(".")[2] for name in own.tensors}
    architectures = frozenset(own.config.get("architectures") or ())
    return Engine(
        method=method,
        gates=frozenset(FLAGS) if method == "eagle3" else frozenset(),
        shared=frozenset(SHARED) - present,
        same_class=_EAGLE3_ARCHITECTURES if architectures <= _EAGLE3_ARCHITECTURES else frozenset(),
    )


def _describe_error(error: Exception, reason: str) -> Problem:
    if isinstance(error, CheckpointError | RejectionError):
        return Problem(reason=error.reason, message=str(error))
    return Problem(reason=reason, message=f"{type(error).__name__}: {error}")
