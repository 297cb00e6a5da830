"""The redaction hook: a container of the same pod that gets a prompt and returns it redacted.

Guarantees: a prompt without a valid answer of the hook is not stored. Memory for an answer has a limit. Redirects are not
followed, and no variable of the environment sets a proxy: the prompt stays in the pod. A hook that redacts no prompt for
FAILURE_SECONDS, and not the test prompt either, is a problem until it redacts one. Not guaranteed: what the hook does with a
prompt, and that a hook is a problem that fails for some prompts only.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
from dataclasses import dataclass

import aiohttp

from aerie.recorder.prompts import Prompt, parse_prompt
from aerie.recorder.skip_reasons import SkipReason

FAILURE_SECONDS = 300.0
"""Time without a redacted prompt after which the hook is tested."""
_TEST_PROMPT = Prompt(({"role": "user", "content": "This is a test of the redaction hook."},))
_MAX_ANSWER_BYTES = 2 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hook:
    """Address of the hook, and the time in which it has to answer."""

    url: str
    timeout_seconds: float


class HookClient:
    """Calls the hook, and notes whether it fails."""

    def __init__(self, session: aiohttp.ClientSession, hook: Hook) -> None:
        self._session, self._hook = session, hook
        self._failing_since: float | None = None
        self.problem = ""
        """Why no prompt is redacted; empty if some may be."""

    async def redact(self, prompt: Prompt) -> Prompt | SkipReason:
        """Return the prompt as the hook has redacted it, or HOOK_FAILED."""
        redacted = await _call_hook(self._session, self._hook, prompt)
        if isinstance(redacted, Prompt):
            self._failing_since, self.problem = None, ""
        elif self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()
        return redacted

    async def test(self) -> None:
        """Send the test prompt if a prompt has failed, and none was redacted for FAILURE_SECONDS since."""
        since = self._failing_since
        if since is None or asyncio.get_running_loop().time() - since < FAILURE_SECONDS:
            return
        if not isinstance(await self.redact(_TEST_PROMPT), Prompt) and not self.problem:
            self.problem = "the redaction hook fails for all prompts"
            _log.error("The redaction hook fails for all prompts, so none is stored: see the log of the container hook.")


async def _call_hook(session: aiohttp.ClientSession, hook: Hook, prompt: Prompt) -> Prompt | SkipReason:
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
