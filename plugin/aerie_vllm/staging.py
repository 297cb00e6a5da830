"""A drafter's way from disk into the memory of all ranks, beside the running engine.

Guarantees: what the engine drafts with is not touched, and requests advance between the short calls of the workers. Waiting ends
when all ranks hold the drafter, when a rank rejects it, when the change is superseded, or after `STAGING_SECONDS`; a disk that
hangs delays neither this server nor another change. Not guaranteed: that a drafter stays in memory after others were staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aerie_vllm.engine import Engine
from aerie_vllm.rejection import ChangeFailedError, EndpointError, RejectionError
from aerie_vllm.requests import DrafterFiles
from aerie_vllm.settings import Settings
from aerie_vllm.worker_protocol import Drafter, Report

STAGING_SECONDS = 900.0
"""Longest staging; a drafter of some gigabytes from a slow network disk takes a minute or two."""
_FIRST_POLL_SECONDS, _MAX_POLL_SECONDS = 0.1, 1.0


async def stage_drafter(
    engine: Engine, settings: Settings, drafter: DrafterFiles, retained: Sequence[str], superseded: asyncio.Event
) -> Drafter:
    """Bring a drafter into the memory of all ranks, beside those in `retained`, and return it as the ranks describe it.

    Raises RejectionError, ChangeFailedError if vLLM fails, or EngineDeadError. Nothing has changed then.
    """
    staging = asyncio.ensure_future(_stage_on_ranks(engine, settings, drafter, retained))
    withdrawal = asyncio.ensure_future(superseded.wait())
    try:
        await asyncio.wait((staging, withdrawal), timeout=STAGING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if superseded.is_set():
            message = (
                f"the change to drafter {drafter.digest} was withdrawn, by a return to the own drafter or the server's end: read "
                "the state first."
            )
            raise RejectionError(409, "Superseded", message)
        if not staging.done():
            message = (
                f"drafter {drafter.digest} was not read within {STAGING_SECONDS:.0f} s: check the disk, then repeat the call."
            )
            raise RejectionError(422, "StagingTimeout", message)
        return staging.result()
    finally:
        staging.cancel()
        withdrawal.cancel()


async def _stage_on_ranks(engine: Engine, settings: Settings, drafter: DrafterFiles, retained: Sequence[str]) -> Drafter:
    digest = drafter.digest
    try:
        reports = await engine.describe()
        if (held := _find_held(reports, digest)) is not None:
            return held
        if drafter.folder is None:
            raise RejectionError(422, "NotHeld", f"drafter {digest} is not in the memory of all ranks: send its folder.")
        # In a thread, because a disk may hang.
        resolve = asyncio.get_running_loop().run_in_executor
        folder = await resolve(None, settings.resolve_folder, drafter.folder, tuple(drafter.files))
        reports, poll_seconds = await engine.stage(folder, drafter.files, retained), _FIRST_POLL_SECONDS
        while not _is_read(reports, digest):
            await asyncio.sleep(poll_seconds)
            poll_seconds = min(1.2 * poll_seconds, _MAX_POLL_SECONDS)
            reports = await engine.describe()
    except EndpointError:
        raise
    except Exception as error:
        message = f"vLLM's call of the workers failed ({type(error).__name__}: {error}), so nothing has changed: repeat the call."
        raise ChangeFailedError("StagingFailed", message) from error
    if (held := _find_held(reports, digest)) is None:
        raise RejectionError(409, "NotHeld", f"drafter {digest} is not in the memory of all ranks any more: repeat the call.")
    return held


def _is_read(reports: Sequence[Report], digest: str) -> bool:
    """Whether all ranks have read the drafter. Raises RejectionError if a rank rejects it or reads another."""
    for report in reports:
        staging = report["staging"]
        if staging is None or staging["digest"] != digest:
            raise RejectionError(409, "Superseded", f"rank {report['rank']} reads another drafter now: repeat the call.")
        if (problem := staging["problem"]) is not None:
            raise RejectionError(422, problem["reason"], problem["message"])
    return all(report["staging"] is not None and report["staging"]["state"] == "Staged" for report in reports)


def _find_held(reports: Sequence[Report], digest: str) -> Drafter | None:
    """Return the drafter if all ranks hold it in memory."""
    held = [next((drafter for drafter in report["held"] if drafter["digest"] == digest), None) for report in reports]
    return held[0] if held and None not in held else None
