"""Headers, names of users and prompts: none of them is in logs and metrics, and only listed fields are in the files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from aerie.recorder.prompts import CHAT_PATH
from tests.unit.evaluator.test_server import connect
from tests.unit.recorder.running_recorder import run, run_hook, run_recorder

PROMPT, SECRET, USER = "prompt-marker-4711", "secret-marker-4712", "user-marker-4713"
REQUESTS: tuple[Any, ...] = (
    {"messages": [{"role": "user", "content": f"{PROMPT} {SECRET}", "name": USER}], "user": USER, "metadata": {USER: USER}},
    {"messages": [{"role": "user", "content": PROMPT}], "n": USER, "temperature": USER, USER: USER, "prediction": USER},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PROMPT}]}]},
    {"messages": [{"role": PROMPT, "content": PROMPT}]},
    f'{{"messages": "{PROMPT}'.encode(),
)


@pytest.mark.parametrize("hook_fails", [False, True])
def test_markers_are_nowhere_but_in_the_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], hook_fails: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"X-Session-ID": USER, "Authorization": f"Bearer {USER}", "X-Prompt": PROMPT, "Cookie": f"a={USER}"}
    hook_headers: list[str] = []
    texts: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        hook_headers.append(str(request.headers))
        return web.Response(status=500, text=PROMPT) if hook_fails else web.json_response(await request.json())

    async def work() -> None:
        async with run_hook(handle) as hook, run_recorder(tmp_path, {SECRET: "-"}, hook) as recorder:
            for body in REQUESTS:
                assert await recorder.send(body, headers=headers) == 202
            outcome = {"hook_failed": 2} if hook_fails else {"recorded": 2}
            await recorder.wait_for(**outcome, not_text=1, invalid=2)
            for malformed in (f"POST {CHAT_PATH} HTTP/1.1\r\nHost: a\r\n{PROMPT} {USER}\r\n\r\n", f"{PROMPT} / HTTP/1.1\r\n\r\n"):
                async with connect(recorder.url) as (reader, writer):
                    writer.write(malformed.encode())
                    writer.write_eof()
                    await reader.read()
            texts.extend([(await recorder.fetch("/metrics"))[1], (await recorder.fetch("/healthz"))[1]])

    run(work)
    stored = "".join(path.read_text() for path in tmp_path.iterdir())
    assert (PROMPT in stored) is not hook_fails
    captured = capfd.readouterr()
    for text in (*texts, *hook_headers, caplog.text, captured.out, captured.err, "".join(map(str, tmp_path.iterdir()))):
        assert not [marker for marker in (PROMPT, SECRET, USER) if marker in text]
    assert SECRET not in stored
    assert USER not in stored
