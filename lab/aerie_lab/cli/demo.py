"""`aerie-lab demo`: the operator at work: a better drafter promoted by a canary, and a bad one rolled back, under traffic.

It brings up a lab of its own with simulated engines, shows each command that it runs and what comes of it, sends a bounded
number of requests over loopback, counts those that fail, and ends the lab. Every wait has a limit; a canary that ends otherwise
than it should is an error, as is a failed request.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from aerie_lab.binaries import binary, ensure
from aerie_lab.cli.console import err, out, say
from aerie_lab.cluster import Lab, Settings
from aerie_lab.engine.background import Background
from aerie_lab.engine.traffic import Target
from aerie_lab.errors import LabError, StartError, StateError
from aerie_lab.images.table import SIMULATED

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "aerie"
MANIFEST = Path(__file__).with_name("demo.yaml").resolve()
BETTER = {"repo": "aerie/Llama-3.1-8B-Instruct-EAGLE3.1", "revision": "3100000000000000000000000000000000000031"}
WORSE = {"repo": "aerie/Llama-3.1-8B-Instruct-EAGLE3.1-undertrained", "revision": "1300000000000000000000000000000000000013"}
_HOST = "chat.example.com"
_RATE = 32.0
_LIMIT = 300.0
"""Seconds for a rollout; two minutes are usual."""


_MEANING = """\
A change of the drafter was a canary each time: one pod with the new drafter and one fresh pod with the old one got the same share
of the traffic, and their acceptance lengths were compared block by block, with bounds that may be looked at after every block.
The better drafter's pods were kept when it was promoted: the pod that was judged is one of those that serve now.
Cluster, gateway and operator are real. The engines are simulated, and so are their figures (docs/simulator.md); blocks, warm-up
and soak are short, for you to watch (lab/aerie_lab/cli/demo.yaml says what they are otherwise).
Where to look: `.venv/bin/aerie-lab demo --keep` leaves the lab up, for `kubectl describe specdep chat`, whose status has analysis
and history. README.md has the same by hand; examples/, docs/operator.md."""


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab up afterwards.")] = False,
    name: Annotated[str, typer.Option("--name", help="The demo's lab.")] = "demo",
) -> None:
    """Install the operator in a lab, deploy a drafter, have a better one promoted and a bad one rolled back, and clean up."""
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
    _follow(lab, _Rows("PHASE", "SERVING"), lambda status: status["phase"] == "Ready")
    out.print("[dim]# what preflight said, from configs and weight headers alone, before a GPU was asked for[/]")
    verdict = '{.status.conditions[?(@.type=="PreflightPassed")].message}{"\\n"}'
    _run(lab, "kubectl", "get", "specdep", "chat", "-o", f"jsonpath={verdict}")
    _say_hello(lab)
    out.print(f"[dim]# from here on {_RATE:g} requests a second come through the gateway[/]")
    with Background(Target(lab.gateway_url or "", "chat", _HOST, timeout=60), _RATE) as traffic:
        _heading("A better drafter, EAGLE 3.1, in the place of the other")
        _change(lab, BETTER, "Promoted")
        traffic.mark("EAGLE 3.1 promoted")
        _run(lab, "kubectl", "get", "pods,httproutes")
        _heading("A drafter that went wrong in training")
        _change(lab, WORSE, "RolledBack")
        traffic.mark("undertrained, rolled back")
    _run(lab, "kubectl", "get", "specdep", "chat")
    _sum_up(traffic, _status(lab))


def _heading(text: str) -> None:
    out.print(f"\n[bold]{escape(text)}[/]")


def _run(lab: Lab, tool: str, *words: str, quiet: bool = False) -> None:
    """Show a command, run it, and show what it says."""
    typed = shlex.join(words).replace(f"{ROOT}/", "")
    out.print(f"[cyan]$ {tool} {escape(typed)}[/]")
    said = lab.kubectl(*words) if tool == "kubectl" else lab.helm(*words)
    if not quiet:
        out.print(escape(said), end="")


def _status(lab: Lab) -> Json:
    found: Json = json.loads(lab.kubectl("get", "specdep", "chat", "-o", "json"))["status"]
    return found


def _change(lab: Lab, drafter: Json, result: str) -> None:
    """Have another drafter tried; its canary has to end with the result."""
    change = {"spec": {"drafter": {"source": {"huggingFace": drafter}}}}
    _run(lab, "kubectl", "patch", "specdep", "chat", "--type=merge", "--patch", json.dumps(change))
    drafted = f"{drafter['repo']}@"

    def over(status: Json) -> bool:
        return status["history"][0]["drafter"].startswith(drafted) and status["phase"] in ("Ready", "RolledBack", "Failed")

    _follow(lab, _Rows("PHASE", "TRAFFIC IN %", "BLOCKS", "AL-CONTROL", "AL-CANARY", "CANARY/CONTROL"), over)
    last = _status(lab)["history"][0]
    out.print(f"[bold]{last['result']}[/]: {escape(last['reason'])}")
    if last["result"] != result:
        raise LabError(f"the canary of {drafter['repo']} ended as {last['result']} instead of {result}: {last['reason']}")


def _follow(lab: Lab, rows: _Rows, over: Callable[[Json], bool]) -> None:
    """Show rows as the resource's status changes, until it is as `over` wants it."""
    words = ["get", "specdep", "chat", "--watch", "--output=json"]
    out.print(f"[dim]# kubectl {' '.join(words)}, in short:[/]")
    rows.head()
    command = [str(binary("kubectl")), f"--kubeconfig={lab.kubeconfig}", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watching:
        limit = threading.Timer(_LIMIT, watching.terminate)
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
    raise StartError(f"nothing came of it within {_LIMIT:g} s:\n{lab.kubectl('describe', 'specdep', 'chat')}")


def _documents(watching: subprocess.Popen[str]) -> Iterator[Json]:
    """Objects as kubectl prints them: each ends with a brace at the beginning of a line."""
    assert watching.stdout is not None
    lines: list[str] = []
    for line in watching.stdout:
        lines.append(line)
        if line.startswith("}"):
            yield json.loads("".join(lines))
            lines.clear()


class _Rows:
    """A table of a status as it changes; a row that repeats the one before is left out."""

    WIDTHS = {"TIME": 6, "PHASE": 13, "SERVING": 8, "TRAFFIC IN %": 36, "BLOCKS": 8, "AL-CONTROL": 12, "AL-CANARY": 11}  # noqa: RUF012

    def __init__(self, *columns: str) -> None:
        self._columns, self._last = columns, [""]
        self._began = 0.0

    def head(self) -> None:
        """The headings; time counts from here."""
        self._began = time.monotonic()
        out.print(self._line("TIME", list(self._columns)))

    def show(self, status: Json) -> None:
        """A row, where the status has moved in what the columns show."""
        cells = [_CELLS[name](status) for name in self._columns]
        if cells != self._last:
            out.print(escape(self._line(f"{time.monotonic() - self._began:.0f} s", cells)))
        self._last = cells

    def _line(self, time: str, cells: list[str]) -> str:
        widths = [self.WIDTHS.get(name, 0) for name in self._columns]
        return "".join(cell.ljust(width) for cell, width in zip([time, *cells], [6, *widths], strict=True)).rstrip()


def _arms(status: Json) -> dict[str, Json]:
    """The arms that there are, by name."""
    canary = status.get("canary") or {}
    found = {"stable": status.get("stable"), "canary": canary or None, "control": canary.get("control")}
    return {name: arm for name, arm in found.items() if arm}


def _traffic(status: Json) -> str:
    return ", ".join(f"{name} {arm['weight']}" for name, arm in _arms(status).items() if arm.get("weight"))


def _length(name: str) -> Callable[[Json], str]:
    def shown(status: Json) -> str:
        length = _arms(status).get(name, {}).get("acceptanceLength")
        return "" if length is None else f"{length:.2f}"

    return shown


def _compared(status: Json) -> Json:
    """The comparison of acceptance lengths, while there is a canary that is compared."""
    running = status.get("analysis") or {} if (status.get("canary") or {}).get("readyAt") else {}
    return next((one for one in running.get("comparisons") or [] if one["metric"] == "AcceptanceLength"), {})


def _bounds(status: Json) -> str:
    one = _compared(status)
    if "lower" not in one or "upper" not in one:
        return ""
    return f"{one['estimate']:+.1%}, certainly {one['lower']:+.1%} to {one['upper']:+.1%}".replace("%", " %")


_CELLS: dict[str, Callable[[Json], str]] = {
    "PHASE": lambda status: str(status["phase"]),
    "SERVING": lambda status: f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)}",
    "TRAFFIC IN %": _traffic,
    "BLOCKS": lambda status: str(_compared(status).get("blocks", "")),
    "AL-CONTROL": _length("control"),
    "AL-CANARY": _length("canary"),
    "CANARY/CONTROL": _bounds,
}


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


def _sum_up(traffic: Background, status: Json) -> None:
    table = Table(title="\nRequests through the gateway", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("MEANWHILE", "SECONDS", "REQUESTS", "FAILED"):
        table.add_column(heading, justify="left" if heading == "MEANWHILE" else "right")
    failed = total = 0
    for name, report in traffic.stretches:
        row = report.summary()["all"]
        failed, total = failed + int(row["errors"]), total + int(row["requests"])
        table.add_row(name, f"{report.seconds:.0f}", f"{row['requests']:.0f}", f"{row['errors']:.0f}")
    out.print(table)
    out.print(f"\n{total} requests, {failed} failed.")
    for one in reversed(status["history"][:2]):
        out.print(escape(f"{one['change']}: {one['result']}. {one['reason']}"))
    out.print(escape(_MEANING))
    if failed:
        raise LabError(f"{failed} of {total} requests failed: {dict(traffic.report.errors)}.")
