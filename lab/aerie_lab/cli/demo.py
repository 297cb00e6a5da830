"""`aerie-lab demo`: the operator at work: a better drafter promoted by a canary, and a bad one rolled back, under traffic.

It brings up a lab of its own, with simulated engines or real ones (show.py), shows each command that it runs and what comes of
it, sends a bounded number of requests over loopback, counts those that fail, and ends the lab. Every wait has a limit; a canary
that ends otherwise than it should is an error, as is a failed request.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from aerie.terminal import sanitize_text
from aerie_lab.binaries import binary, ensure
from aerie_lab.cli.console import err, out, say
from aerie_lab.cli.rows import Rows
from aerie_lab.cli.show import SHOWS, Show
from aerie_lab.cluster import Lab, Settings
from aerie_lab.engine.background import Background
from aerie_lab.engine.traffic import Target
from aerie_lab.errors import LabError, StartError, StateError

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "aerie"

_MEANING = """\
A change of the drafter was a canary each time: one pod with the new drafter and one fresh pod with the old one got the same share
of the traffic, and the tokens that requests got in a step were compared block by block, with bounds that hold at every look.
The better drafter's pods were kept when it was promoted: the pod that was judged is one of those that serve now.
Cluster, gateway and operator are real. {engines};
blocks, warm-up and soak are short, for you to watch ({manifest} says what they are otherwise).
Where to look: `.venv/bin/aerie-lab demo --engine {engine} --keep` leaves the lab up, for `kubectl describe specdep {name}`, whose
status has analysis and history. docs/rollouts.md says how it is decided, README.md how to go on by hand."""


def demo(
    engine: Annotated[str, typer.Option("--engine", help=f"What serves: {' or '.join(SHOWS)}.")] = "simulator",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab up afterwards.")] = False,
    name: Annotated[str, typer.Option("--name", help="The demo's lab.")] = "demo",
) -> None:
    """Install the operator in a lab, deploy a drafter, have a better one promoted and a bad one rolled back, and clean up."""
    if not CHART.is_dir():
        raise StateError(f"the demo installs {CHART}, which is not there: run it from a checkout of the repository.")
    if engine not in SHOWS:
        raise StateError(f"--engine {engine}: there is no such engine; write {' or '.join(SHOWS)}.")
    show = SHOWS[engine]
    for family in show.binaries:
        ensure(family, say)
    lab = Lab.up(Settings(name=name, images=[str(file) for file in show.images]), say)
    try:
        _Stage(lab, show).play(engine)
        if keep:
            out.print(f"export KUBECONFIG={lab.kubeconfig}")
            err.print(f"try: aerie-lab shell --name {name}   and then: aerie-lab down --name {name}")
    finally:
        if not keep:
            lab.down()
            say("the lab is down")


@dataclass(frozen=True)
class _Stage:
    """The lab in which the show is played."""

    lab: Lab
    show: Show

    def play(self, engine: str) -> None:
        """All of it."""
        show = self.show
        _heading("The operator, from its chart")
        where = ("--namespace", "aerie-system")
        self._run("helm", "install", "aerie", str(CHART), *where, "--create-namespace", "--wait", "--timeout=120s", quiet=True)
        self._run("kubectl", *where, "get", "pods")

        _heading(f"A deployment of {show.target} with an EAGLE 3 drafter")
        self._run("kubectl", "create", "secret", "generic", "hugging-face", "--from-literal=token=any")
        self._run("kubectl", "apply", "-f", str(show.manifest))
        self._follow(Rows("PHASE", "SERVING"), lambda status: status["phase"] == "Ready")
        out.print("[dim]# what preflight said, from configs and weight headers alone, before a GPU was asked for[/]")
        verdict = '{.status.conditions[?(@.type=="PreflightPassed")].message}{"\\n"}'
        self._run("kubectl", "get", "specdep", show.name, "-o", f"jsonpath={verdict}")
        self._say_hello()
        out.print(f"[dim]# from here on {show.rate:g} requests a second come through the gateway[/]")
        target = Target(self.lab.gateway_url or "", show.name, show.host, timeout=60, chats=show.chats)
        with Background(target, show.rate, show.classes) as traffic:
            _heading("A better drafter, EAGLE 3.1, in the place of the other")
            self._change(show.better, "Promoted")
            traffic.mark("EAGLE 3.1 promoted")
            self._run("kubectl", "get", "pods,httproutes")
            _heading("A drafter that went wrong in training")
            self._change(show.worse, "RolledBack")
            traffic.mark("the other one rolled back")
        self._run("kubectl", "get", "specdep", show.name)
        _sum_up(traffic, self._status())
        out.print(
            sanitize_text(
                _MEANING.format(engines=show.engines, manifest=show.manifest.relative_to(ROOT), engine=engine, name=show.name)
            )
        )
        _refuse_failures(traffic)

    def _run(self, tool: str, *words: str, quiet: bool = False) -> None:
        """Show a command, run it, and show what it says."""
        typed = shlex.join(words).replace(f"{ROOT}/", "")
        out.print(f"[cyan]$ {tool} {sanitize_text(typed)}[/]")
        said = self.lab.kubectl(*words) if tool == "kubectl" else self.lab.helm(*words)
        if not quiet:
            out.print(sanitize_text(said), end="")

    def _status(self) -> Json:
        found: Json = json.loads(self.lab.kubectl("get", "specdep", self.show.name, "-o", "json"))["status"]
        return found

    def _change(self, drafter: dict[str, str], result: str) -> None:
        """Have another drafter tried; its canary has to end with the result."""
        change = {"spec": {"drafter": {"source": {"huggingFace": drafter}}}}
        self._run("kubectl", "patch", "specdep", self.show.name, "--type=merge", "--patch", json.dumps(change))
        drafted = f"{drafter['repo']}@"

        def over(status: Json) -> bool:
            return status["history"][0]["drafter"].startswith(drafted) and status["phase"] in ("Ready", "RolledBack", "Failed")

        self._follow(Rows("PHASE", "TRAFFIC IN %", "BLOCKS", "AL-CONTROL", "AL-CANARY", "CANARY/CONTROL"), over)
        last = self._status()["history"][0]
        out.print(f"[bold]{last['result']}[/]: {sanitize_text(last['reason'])}")
        if last["result"] != result:
            raise LabError(f"the canary of {drafter['repo']} ended as {last['result']} instead of {result}: {last['reason']}")

    def _follow(self, rows: Rows, over: Callable[[Json], bool]) -> None:
        """Show rows as the resource's status changes, until it is as `over` wants it."""
        words = ["get", "specdep", self.show.name, "--watch", "--output=json"]
        out.print(f"[dim]# kubectl {' '.join(words)}, in short:[/]")
        rows.head()
        command = [str(binary("kubectl")), f"--kubeconfig={self.lab.kubeconfig}", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watching:
            limit = threading.Timer(self.show.limit, watching.terminate)
            limit.start()
            try:
                for document in _documents(watching):
                    status = document.get("status") or {}
                    if status.get("observedGeneration") != document["metadata"]["generation"]:
                        continue
                    rows.show(status)
                    if over(status):
                        return
            finally:
                limit.cancel()
                watching.terminate()
        described = self.lab.kubectl("describe", "specdep", self.show.name)
        raise StartError(f"nothing came of it within {self.show.limit:g} s:\n{described}")

    def _say_hello(self) -> None:
        """One chat completion through the gateway; the route may take a moment to reach Envoy."""
        show, url = self.show, self.lab.gateway_url or ""
        body = {"model": show.name, "messages": [{"role": "user", "content": show.question}], "max_tokens": 24}
        out.print(f"[cyan]$ curl {url}/v1/chat/completions --header 'Host: {show.host}' ...[/]")
        deadline = time.monotonic() + 30
        with httpx.Client(base_url=url, headers={"Host": show.host}, timeout=30) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):  # Envoy opens its port with the first route
                    answer = client.post("/v1/chat/completions", json=body)
                    if answer.status_code == 200:
                        (choice,) = answer.json()["choices"]
                        out.print(sanitize_text(f"... {choice['message']['content'].strip()} ..."))
                        return
                time.sleep(0.2)
        raise StartError(f"the gateway did not answer within 30 s: see `aerie-lab kubectl describe httproute {show.name}`.")


def _heading(text: str) -> None:
    out.print(f"\n[bold]{sanitize_text(text)}[/]")


def _documents(watching: subprocess.Popen[str]) -> Iterator[Json]:
    """Objects as kubectl prints them: each ends with a brace at the beginning of a line."""
    assert watching.stdout is not None
    lines: list[str] = []
    for line in watching.stdout:
        lines.append(line)
        if line.startswith("}"):
            yield json.loads("".join(lines))
            lines.clear()


def _sum_up(traffic: Background, status: Json) -> None:
    table = Table(title="\nRequests through the gateway", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("MEANWHILE", "SECONDS", "REQUESTS", "FAILED"):
        table.add_column(heading, justify="left" if heading == "MEANWHILE" else "right")
    for name, report in traffic.stretches:
        row = report.summary()["all"]
        table.add_row(name, f"{report.seconds:.0f}", f"{row['requests']:.0f}", f"{row['errors']:.0f}")
    out.print(table)
    total, failed = _counted(traffic)
    out.print(f"\n{total} requests, {failed} failed.")
    for one in reversed(status["history"][:2]):
        out.print(sanitize_text(f"{one['change']}: {one['result']}. {one['reason']}"))


def _refuse_failures(traffic: Background) -> None:
    total, failed = _counted(traffic)
    if failed:
        raise LabError(f"{failed} of {total} requests failed: {dict(traffic.report.errors)}.")


def _counted(traffic: Background) -> tuple[int, int]:
    """Requests, and those that failed."""
    outcomes = traffic.report.outcomes
    return len(outcomes), sum(one.error is not None for one in outcomes)
