"""The redaction hook: a container of the same pod that gets a prompt and returns it redacted.

Guarantees: a prompt without a valid answer of the hook is not stored. Memory for an answer has a limit. Redirects are not
followed, and no variable of the environment sets a proxy: the prompt stays in the pod. Not guaranteed: what the hook does with
it.
"""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass

import aiohttp

from aerie.recorder.prompts import Prompt, parse_prompt
from aerie.recorder.skip_reasons import SkipReason

_MAX_ANSWER_BYTES = 2 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Hook:
    """Address of the hook, and the time in which it has to answer."""

    url: str
    timeout_seconds: float


async def call_hook(session: aiohttp.ClientSession, hook: Hook, prompt: Prompt) -> Prompt | SkipReason:
    """Return the prompt as the hook has redacted it, or HOOK_FAILED."""
    try:
        async with (
            asyncio.timeout(hook.timeout_seconds),
            session.post(
                hook.url,
                data=io.BytesIO(json.dumps(prompt.to_json()).encode()),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response,
        ):
            if response.status != 200:
                return SkipReason.HOOK_FAILED
            body = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > _MAX_ANSWER_BYTES:
                    return SkipReason.HOOK_FAILED
        redacted = parse_prompt(json.loads(body))
    except (TimeoutError, OSError, aiohttp.ClientError, ValueError, RecursionError):
        return SkipReason.HOOK_FAILED
    return redacted if isinstance(redacted, Prompt) else SkipReason.HOOK_FAILED
