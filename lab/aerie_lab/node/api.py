"""The part of a kubelet's HTTPS server that the API server calls for `kubectl logs`.

    GET /containerLogs/NAMESPACE/POD/CONTAINER?follow&previous&tailLines&limitBytes&sinceSeconds&sinceTime&timestamps&stream
    GET /healthz

Guarantees: only a client with a certificate of the lab's authority is answered. exec, attach and port-forward are not
offered; the response states that.
"""

from __future__ import annotations

import datetime
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from aerie_lab.node.container.lifecycle import Container
from aerie_lab.node.logs import LogQuery, stream_log
from aerie_lab.node.nodes import KUBELET_PORT

ContainerLookup = Callable[[str, str, str], Container | None]
"""(namespace, pod, container) -> the container, or None."""


async def serve_kubelet_api(certificates: Path, find_container: ContainerLookup) -> web.AppRunner:
    """Serve on every node's address until the runner is cleaned up."""

    async def logs(request: web.Request) -> web.StreamResponse:
        words = request.match_info
        container = find_container(words["namespace"], words["pod"], words["container"])
        if container is None:
            raise web.HTTPNotFound(text=f"container {words['container']} of pod {words['pod']} is not on this node")
        previous = request.query.get("previous") == "true"
        if previous and container.state.restarts == 0:
            raise web.HTTPBadRequest(text=f'previous terminated container "{container.state.name}" not found')
        if not container.log_path().exists() and not container.state.container_id:
            reason, message = container.state.waiting
            raise web.HTTPBadRequest(text=f'container "{container.state.name}" is waiting to start: {reason} {message}')
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for chunk in stream_log(container.log_path(previous), _parse_log_query(request, previous), container.exit_event):
            await response.write(chunk)
        return response

    async def refuse(request: web.Request) -> web.StreamResponse:
        verb = request.path.strip("/").split("/")[0]
        raise web.HTTPNotImplemented(text=f"the lab's node agent does not offer '{verb}': use `aerie-lab shell` instead")

    async def healthz(_: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    application = web.Application()
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", logs)
    application.router.add_get("/healthz", healthz)
    application.router.add_route("*", "/{rest:.*}", refuse)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.crt"))
    context.load_cert_chain(certificates / "node-agent.crt", certificates / "node-agent.key")
    context.verify_mode = ssl.CERT_REQUIRED
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", KUBELET_PORT, ssl_context=context, shutdown_timeout=1).start()
    return runner


def _parse_log_query(request: web.Request, previous: bool) -> LogQuery:
    query = request.query
    since: float | None = None
    if seconds := query.get("sinceSeconds"):
        since = time.time() - int(seconds)
    elif moment := query.get("sinceTime"):
        since = datetime.datetime.fromisoformat(moment).timestamp()
    stream = query.get("stream", "All").lower()
    return LogQuery(
        tail_lines=int(query["tailLines"]) if "tailLines" in query else None,
        limit_bytes=int(query["limitBytes"]) if "limitBytes" in query else None,
        since=since,
        timestamps=query.get("timestamps") == "true",
        follow=query.get("follow") == "true" and not previous,
        stream=None if stream == "all" else stream,
    )
