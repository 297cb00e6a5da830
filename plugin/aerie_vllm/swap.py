"""The change of the drafter on all ranks of a running engine: pause, swap, agreement or restoration, resume.

    running -> pause -> swap(new) -> all ranks agree -> commit -> resume
                                  -> else swap(previous) -> all ranks agree -> resume -> ChangeFailedError
                                                         -> else resume -> BrokenError

Guarantees: `commit` is called if and only if all ranks have loaded the new drafter: while the engine is paused, and after all
outputs of the previous drafter are counted. Whatever fails, the engine is resumed before the function returns, unless it has
ended: a resume that fails is retried until it succeeds. After ChangeFailedError all ranks have the previous drafter; after
BrokenError they may not. A pause that is not complete after `PAUSE_SECONDS` is given up. Not guaranteed: a limit of the time in
which no request advances, which is that of the pause, of the slowest rank's swap, and of a resume that is retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aerie_vllm.engine import Engine
from aerie_vllm.rejection import ChangeFailedError, EngineDeadError, RejectionError
from aerie_vllm.worker_protocol import Problem, SwapReport

_log = logging.getLogger(f"vllm.{__name__}")
PAUSE_SECONDS = 10.0
"""Longest wait for a complete pause, which takes one step of the engine; no request advances meanwhile."""
_FIRST_RESUME_RETRY_SECONDS, _MAX_RESUME_RETRY_SECONDS = 0.1, 5.0
_COUNTING_SECONDS, _COUNTING_POLL_SECONDS = 1.0, 0.005
_OUTPUT_CHUNKS = 32
"""Passes of the event loop in which vLLM's output handler has counted a step: it yields after each 128 requests of it."""


class BrokenError(ChangeFailedError):
    """A failed swap could not be undone: the ranks draft with unknown weights."""


@dataclass(frozen=True)
class SwapTimes:
    """How long a swap took."""

    pause_seconds: float
    """Seconds from the pause to the resume, in which no request advanced."""
    swap_seconds: float
    """The slowest rank's part of it."""


async def swap_drafter(engine: Engine, digest: str, previous: str, commit: Callable[[], None]) -> SwapTimes:
    """Change the drafter on all ranks from `previous` to `digest`, which all of them hold.

    Raises RejectionError if somebody else has paused the engine, ChangeFailedError, BrokenError, or EngineDeadError.
    """
    loop = asyncio.get_running_loop()
    if await _is_paused(engine):
        message = "the engine is paused or asleep by another call, which a swap would end: resume it, then repeat this call."
        raise RejectionError(409, "EnginePaused", message)
    started = loop.time()
    # A request that is sent during the pause is served after it.
    engine.file_blocks(digest)
    try:
        await _pause(engine)
        reports = await _swap(engine, digest)
        problem = _find_problem(reports, digest)
        if problem is not None:
            await _restore(engine, previous, problem)
            message = (
                f"the swap to drafter {digest} failed: {problem['message']} Drafter {previous} is loaded again on all ranks."
            )
            raise ChangeFailedError("SwapFailed", message)
        await _wait_until_counted(engine)
        commit()
        await engine.label_tokens(digest)
    except BaseException:
        engine.file_blocks(previous)
        raise
    finally:
        await _resume(engine)
    return SwapTimes(loop.time() - started, max((report["seconds"] for report in reports), default=0.0))


async def _is_paused(engine: Engine) -> bool:
    try:
        return await engine.is_paused()
    except EngineDeadError:
        raise
    except Exception as error:  # whatever vLLM raises, nothing has changed
        raise _pause_failed_error("whether the engine is paused", error) from error


async def _pause(engine: Engine) -> None:
    try:
        await asyncio.wait_for(engine.pause(), PAUSE_SECONDS)
    except EngineDeadError:
        raise
    except asyncio.TimeoutError:
        # vLLM completes none before a KV connector has freed the blocks of all finished requests (Scheduler.has_requests).
        message = (
            f"the engine did not pause within {PAUSE_SECONDS:.0f} s, so it was resumed and nothing was changed. With a KV "
            "connector between pods, the likely cause is finished requests whose keys and values another pod still has to fetch: "
            "repeat the call when it has, or let drafters change by pods (spec.rollout.inPlace.mode: Off)."
        )
        raise ChangeFailedError("PauseTimeout", message) from None
    except Exception as error:  # whatever vLLM raises, nothing has changed
        raise _pause_failed_error("the pause of the engine", error) from error


def _pause_failed_error(subject: str, error: Exception) -> ChangeFailedError:
    message = f"vLLM failed to answer {subject} ({type(error).__name__}: {error}), so nothing was changed: repeat the call."
    return ChangeFailedError("PauseFailed", message)


async def _swap(engine: Engine, digest: str) -> Sequence[SwapReport]:
    """Return the ranks' reports; where the call itself failed, one with that problem, so that it is undone like any other."""
    try:
        return await engine.swap(digest)
    except EngineDeadError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is undone in the same way
        _log.exception("the call of the workers failed")
        problem = Problem(reason="CallFailed", message=f"vLLM's call of the workers failed ({type(error).__name__}: {error}).")
        return [SwapReport(rank=-1, loaded=None, problem=problem, broken=None, seconds=0.0)]


def _find_problem(reports: Sequence[SwapReport], digest: str) -> Problem | None:
    """Return why not all ranks have loaded the drafter, or None if they have."""
    if not reports:
        return {"reason": "NoRanks", "message": "no rank answered."}
    for report in reports:
        rank = f"rank {report['rank']}"
        if (broken := report["broken"]) is not None:
            return {"reason": broken["reason"], "message": f"{rank}: {broken['message']}"}
        if (problem := report["problem"]) is not None:
            return {"reason": problem["reason"], "message": f"{rank}: {problem['message']}"}
        if report["loaded"] != digest:
            return {"reason": "Disagreement", "message": f"{rank} drafts with {report['loaded']}."}
    return None


async def _restore(engine: Engine, previous: str, cause: Problem) -> None:
    """Load the previous drafter again on all ranks. Raises BrokenError if not all of them have it then."""
    problem = _find_problem(await _swap(engine, previous), previous)
    if problem is not None:
        message = (
            f"a swap failed ({cause['message']}), and drafter {previous} could not be loaded again ({problem['message']}). "
            "Answers stay correct, as the target verifies each token; but the drafter's weights are unknown. Restart the pod."
        )
        raise BrokenError("Broken", message)


async def _wait_until_counted(engine: Engine) -> None:
    """Wait until vLLM has counted all outputs that came before the pause, at most a second."""
    deadline = asyncio.get_running_loop().time() + _COUNTING_SECONDS
    while engine.has_pending_outputs() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_COUNTING_POLL_SECONDS)
    for _ in range(_OUTPUT_CHUNKS):
        await asyncio.sleep(0)


async def _resume(engine: Engine) -> None:
    """Resume the engine, however often it fails. Raises EngineDeadError."""
    retry_seconds = _FIRST_RESUME_RETRY_SECONDS
    while not await _is_resumed(engine):
        _log.error("the next attempt to resume the engine is in %.1f s", retry_seconds)
        await asyncio.sleep(retry_seconds)
        retry_seconds = min(2 * retry_seconds, _MAX_RESUME_RETRY_SECONDS)


async def _is_resumed(engine: Engine) -> bool:
    """Try to resume the engine, and return whether it succeeded. Raises EngineDeadError."""
    try:
        await engine.resume()
    except EngineDeadError:
        raise
    except Exception:  # noqa: BLE001 - a paused engine serves nobody, so nothing is worse than giving up
        _log.exception("the engine could not be resumed")
        return False
    return True
