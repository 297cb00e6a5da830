"""`aerie-lab demo`: what the lab does, in a minute: pods behind a gateway, traffic split by weight, a rolling restart.

It brings up a lab of its own, sends a bounded number of requests over loopback, prints what was counted, and ends the lab.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from importlib import resources
from typing import Annotated

import httpx
import typer
from rich.table import Table

from aerie_lab.cli.console import err, out, say
from aerie_lab.cluster import Lab, Settings
from aerie_lab.errors import StartError

_HOST = {"Host": "echo.example"}
_REQUESTS = 1000
_RATE = 50
_WEIGHTS = {"one": 70, "two": 30}


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab up afterwards.")] = False,
    name: Annotated[str, typer.Option("--name", help="The demo's lab.")] = "demo",
) -> None:
    """Bring up a lab, split traffic 70/30 over two versions of a service, restart one under load, and clean up."""
    lab = Lab.up(Settings(name=name), say)
    try:
        _show(lab)
        if keep:
            out.print(f"export KUBECONFIG={lab.kubeconfig}")
            err.print(f"try: curl -H 'Host: {_HOST['Host']}' {lab.gateway_url}/   and then: aerie-lab down --name {name}")
    finally:
        if not keep:
            lab.down()
            say("the lab is down")


def _show(lab: Lab) -> None:
    say("applying two Deployments, two Services and an HTTPRoute with weights 70 and 30")
    manifest = resources.files("aerie_lab.cli").joinpath("demo.yaml").read_text()
    lab.kubectl("apply", "-f", "-", stdin=manifest)
    for version in _WEIGHTS:
        lab.kubectl("rollout", "status", f"deployment/echo-{version}", "--timeout=180s")
    out.print(lab.kubectl("get", "nodes,pods,httproutes", "-o", "wide"), end="")
    with httpx.Client(base_url=lab.gateway_url or "", headers=_HOST, timeout=10) as client:
        _wait_for_route(client)
        _print_split(_count(client), lab)
        _restart_under_load(client, lab)


def _wait_for_route(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if client.get("/").status_code == 200:
                return
        except httpx.TransportError:
            pass  # Envoy opens its port with the first route
        time.sleep(0.1)
    raise StartError("the gateway did not serve the route within 30 s: see `aerie-lab kubectl describe httproute echo`.")


def _count(client: httpx.Client) -> collections.Counter[str]:
    return collections.Counter(json.loads(client.get("/").text)["version"] for _ in range(_REQUESTS))


def _print_split(seen: collections.Counter[str], lab: Lab) -> None:
    table = Table(title=f"{_REQUESTS} requests to {lab.gateway_url} through Envoy", title_justify="left", box=None)
    for heading in ("VERSION", "WEIGHT", "SHARE"):
        table.add_column(heading, justify="right")
    for version, weight in _WEIGHTS.items():
        table.add_row(version, f"{weight} %", f"{100 * seen[version] / _REQUESTS:.1f} %")
    out.print(table)


def _restart_under_load(client: httpx.Client, lab: Lab) -> None:
    say(f"rolling restart of echo-one under {_RATE} requests/s")
    restarting = threading.Thread(target=_restart, args=(lab,))
    restarting.start()
    sent, lost, began = 0, 0, time.monotonic()
    while restarting.is_alive() and sent < 60 * _RATE:
        try:
            lost += client.get("/").status_code != 200
        except httpx.TransportError:
            lost += 1
        sent += 1
        time.sleep(max(0.0, began + sent / _RATE - time.monotonic()))
    restarting.join()
    out.print(f"rolling restart: {sent} requests in {time.monotonic() - began:.1f} s, {lost} lost")


def _restart(lab: Lab) -> None:
    lab.kubectl("rollout", "restart", "deployment/echo-one")
    lab.kubectl("rollout", "status", "deployment/echo-one", "--timeout=180s")
