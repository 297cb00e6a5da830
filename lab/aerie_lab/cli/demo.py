"""`aerie-lab demo`: the operator at work: installed by its chart, a deployment applied, its drafter changed under traffic.

It brings up a lab of its own with simulated engines, shows each command that it runs and what comes of it, sends a bounded
number of requests over loopback, counts those that fail, and ends the lab. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from aerie_lab.binaries import binary, ensure
from aerie_lab.cli.console import err, out, say
from aerie_lab.cluster import Lab, Settings
from aerie_lab.engine.traffic import Report, Target, open_loop
from aerie_lab.engine.workload import DEFAULT_CLASSES, Lengths, Poisson, Turn, turns
from aerie_lab.errors import LabError, StartError, StateError
from aerie_lab.images.table import SIMULATED

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "aerie"
MANIFEST = Path(__file__).with_name("demo.yaml").resolve()
EAGLE_31 = {"repo": "aerie/Llama-3.1-8B-Instruct-EAGLE3.1", "revision": "3100000000000000000000000000000000000031"}
_HOST = "chat.example.com"
_RATE = 4.0
_MEASURED = (15.0, 60.0)
"""Seconds of traffic on each drafter alone, least and most: until the operator shows an acceptance length."""
_LIMIT = 180.0
"""Seconds for a rollout; a quarter of a minute is usual."""


_MEANING = """\
The new pods started beside the old ones, took over when all of them served, and the old ones drained: so a change is rolled out
today, on spare GPUs. The canary that compares acceptance lengths before it does is what comes next.
Cluster, gateway and operator are real. The engines are simulated, and so are their figures (docs/simulator.md).
Where to look: README.md for the same by hand, examples/, docs/operator.md."""


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab up afterwards.")] = False,
    name: Annotated[str, typer.Option("--name", help="The demo's lab.")] = "demo",
) -> None:
    """Install the operator in a lab, deploy an EAGLE 3 drafter, roll out an EAGLE 3.1 drafter under traffic, and clean up."""
    if not CHART.is_dir():
        raise StateError(f"the demo installs {CHART}, which is not there: run it from a checkout of the repository.")
    ensure("helm", say)
    lab = Lab.up(Settings(name=name, images=[str(SIMULATED)]), say)
    try:
        _show(lab)
        if keep:
            out.print(f"export KUBECONFIG={lab.kubeconfig}")
            err.print(f"try: aerie-lab shell --name {name}   and then: aerie-lab down --name {name}")
    finally:
        if not keep:
            lab.down()
            say("the lab is down")


def _show(lab: Lab) -> None:
    _heading("The operator, from its chart")
    where = ("--namespace", "aerie-system")
    _run(lab, "helm", "install", "aerie", str(CHART), *where, "--create-namespace", "--wait", "--timeout=120s", quiet=True)
    _run(lab, "kubectl", *where, "get", "pods")

    _heading("A deployment of Llama 3.1 8B with an EAGLE 3 drafter")
    _run(lab, "kubectl", "create", "secret", "generic", "hugging-face", "--from-literal=token=any")
    _run(lab, "kubectl", "apply", "-f", str(MANIFEST))
    old = _watch(lab, lambda _: True)["stable"]["revision"]
    out.print("[dim]# what preflight said, from configs and weight headers alone, before a GPU was asked for[/]")
    verdict = '{.status.conditions[?(@.type=="PreflightPassed")].message}{"\\n"}'
    _run(lab, "kubectl", "get", "specdep", "chat", "-o", f"jsonpath={verdict}")
    _say_hello(lab)

    _heading(f"The same under {_RATE:g} requests a second, and an EAGLE 3.1 drafter in the place of the other")
    with _Traffic(Target(lab.gateway_url or "", "chat", _HOST)) as traffic:
        lengths = [_measured(lab)]
        traffic.mark("EAGLE 3")
        change = {"spec": {"drafter": {"source": {"huggingFace": EAGLE_31}}}}
        _run(lab, "kubectl", "patch", "specdep", "chat", "--type=merge", "--patch", json.dumps(change))
        _watch(lab, lambda stable: stable["revision"] != old)
        traffic.mark("EAGLE 3 to EAGLE 3.1")
        lengths += [None, _measured(lab)]
        traffic.mark("EAGLE 3.1")
    _run(lab, "kubectl", "get", "deployments,httproutes")
    _sum_up(traffic, lengths)


def _heading(text: str) -> None:
    out.print(f"\n[bold]{escape(text)}[/]")


def _run(lab: Lab, tool: str, *words: str, quiet: bool = False) -> None:
    """Show a command, run it, and show what it says."""
    typed = shlex.join(words).replace(f"{ROOT}/", "")
    out.print(f"[cyan]$ {tool} {escape(typed)}[/]")
    said = lab.kubectl(*words) if tool == "kubectl" else lab.helm(*words)
    if not quiet:
        out.print(escape(said), end="")


def _watch(lab: Lab, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What `kubectl get --watch` prints until the stable revision is the wanted one and Ready; the status then."""
    words = ["get", "specdep", "chat", "--watch"]
    out.print(f"[cyan]$ kubectl {' '.join(words)}[/]")
    command = [str(binary("kubectl")), f"--kubeconfig={lab.kubeconfig}", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watching:
        printing = threading.Thread(target=_print_changes, args=(watching,), daemon=True)
        printing.start()
        try:
            return _until_ready(lab, wanted)
        finally:
            time.sleep(0.5)  # the last row is on its way
            watching.terminate()
            printing.join(5)


def _print_changes(watching: subprocess.Popen[str]) -> None:
    """Rows as they come, without those that repeat the one before."""
    assert watching.stdout is not None
    last = ""
    for line in watching.stdout:
        row = " ".join(line.split()[:-1])  # all but the age
        if row != last:
            out.print(escape(line.rstrip()))
        last = row


def _until_ready(lab: Lab, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline:
        found = json.loads(lab.kubectl("get", "specdep", "chat", "-o", "json"))
        status: dict[str, Any] = found.get("status") or {}
        conditions = {one["type"]: one["status"] for one in status.get("conditions") or []}
        new = status.get("observedGeneration") == found["metadata"]["generation"]
        if new and status["phase"] == "Ready" and conditions.get("Ready") == "True" and wanted(status["stable"]):
            return status
        time.sleep(0.3)
    raise StartError(f"the deployment was not Ready within {_LIMIT:g} s:\n{lab.kubectl('describe', 'specdep', 'chat')}")


def _measured(lab: Lab) -> float | None:
    """The acceptance length that the status shows after some traffic; None when it shows none in time."""
    least, most = _MEASURED
    deadline, length = time.monotonic() + most, None
    time.sleep(least)
    while length is None and time.monotonic() < deadline:
        status = json.loads(lab.kubectl("get", "specdep", "chat", "-o", "json"))["status"]
        length = status["stable"].get("acceptanceLength")
        time.sleep(0.5)
    _run(lab, "kubectl", "get", "specdep", "chat")
    return length


def _say_hello(lab: Lab) -> None:
    """One chat completion through the gateway; the route may take a moment to reach Envoy."""
    body = {"model": "chat", "messages": [{"role": "user", "content": "Where do eagles nest?"}], "max_tokens": 24}
    out.print(f"[cyan]$ curl {lab.gateway_url}/v1/chat/completions --header 'Host: {_HOST}' ...[/]")
    deadline = time.monotonic() + 30
    with httpx.Client(base_url=lab.gateway_url or "", headers={"Host": _HOST}, timeout=30) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):  # Envoy opens its port with the first route
                answer = client.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    (choice,) = answer.json()["choices"]
                    out.print(escape(f"... {choice['message']['content'].strip()} ..."))
                    return
            time.sleep(0.2)
    raise StartError("the gateway did not answer within 30 s: see `aerie-lab kubectl describe httproute chat`.")


class _Traffic:
    """Requests at a mean rate from entering to leaving, cut into named stretches."""

    def __init__(self, target: Target) -> None:
        self.stretches: list[tuple[str, Report]] = []
        self._report = Report()
        self._target = target
        self._done = threading.Event()
        self._began = 0.0
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(60)
        name, last = self.stretches.pop() if self.stretches else ("", Report())
        told = sum(len(report.outcomes) for _, report in self.stretches)
        self.stretches.append((name, Report(last.seconds, self._report.outcomes[told:])))  # with what was still under way

    def mark(self, name: str) -> None:
        """Call by a name what was answered since the last mark."""
        told = sum(len(report.outcomes) for _, report in self.stretches)
        seconds = time.monotonic() - self._began - sum(report.seconds for _, report in self.stretches)
        self.stretches.append((name, Report(seconds, self._report.outcomes[told:])))

    def _send(self) -> None:
        asyncio.run(open_loop(self._target, self._turns(), report=self._report))

    def _turns(self) -> Iterator[Turn]:
        kinds = [replace(kind, prompt=Lengths(200, 0.5), answer=Lengths(60, 0.5), turns=1.0) for kind in DEFAULT_CLASSES]
        for turn in turns(kinds, Poisson(_RATE), 0.0, 4 * _LIMIT, seed=0):
            if self._done.is_set():
                return
            yield turn


def _sum_up(traffic: _Traffic, lengths: Sequence[float | None]) -> None:
    table = Table(title="\nRequests through the gateway", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("DRAFTER", "REQUESTS", "FAILED", "ACCEPTANCE LENGTH"):
        table.add_column(heading, justify="left" if heading == "DRAFTER" else "right")
    failed = total = 0
    for (name, report), length in zip(traffic.stretches, lengths, strict=True):
        row = report.summary()["all"]
        failed, total = failed + int(row["errors"]), total + int(row["requests"])
        table.add_row(name, f"{row['requests']:.0f}", f"{row['errors']:.0f}", "" if length is None else f"{length:.2f}")
    out.print(table)
    out.print(f"\n{total} requests, {failed} failed.\n{_MEANING}")
    if failed:
        reasons = sum((report.errors for _, report in traffic.stretches), Counter[str | None]())
        raise LabError(f"{failed} of {total} requests failed: {dict(reasons)}.")
