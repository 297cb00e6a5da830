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
from aerie_lab.binaries import ensure_binary, ensure_family
from aerie_lab.cli.console import err, out, print_progress
from aerie_lab.cli.rows import StatusTable
from aerie_lab.cli.show import DEMO_SCENARIOS, DemoScenario
from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.engine.background import BackgroundTraffic
from aerie_lab.engine.traffic import TrafficTarget
from aerie_lab.errors import LabError, StartError, StateError

Json = dict[str, Any]

REPOSITORY_FOLDER = Path(__file__).resolve().parents[3]
CHART_FOLDER = REPOSITORY_FOLDER / "charts" / "aerie"

_SUMMARY_TEMPLATE = """\
A change of the drafter was a canary each time: one pod with the new drafter and one fresh pod with the old one got the same share
of the traffic, and the tokens that requests got in a step were compared block by block, with bounds that hold at every look.
The better drafter's pods were kept when it was promoted: the pod that was judged is one of those that serve now.
Cluster, gateway and operator are real. {engines};
blocks, warm-up and soak are short, for you to watch ({manifest} says what they are otherwise).
Where to look: `.venv/bin/aerie-lab demo --engine {engine} --keep` leaves the lab up, for `kubectl describe specdep {name}`, whose
status has analysis and history. docs/rollouts.md says how it is decided, README.md how to go on by hand."""


def demo(
    engine: Annotated[str, typer.Option("--engine", help=f"What serves: {' or '.join(DEMO_SCENARIOS)}.")] = "simulator",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab up afterwards.")] = False,
    name: Annotated[str, typer.Option("--name", help="The demo's lab.")] = "demo",
) -> None:
    """Install the operator in a lab, deploy a drafter, have a better one promoted and a bad one rolled back, and clean up."""
    if not CHART_FOLDER.is_dir():
        raise StateError(f"the demo installs {CHART_FOLDER}, which is not there: run it from a checkout of the repository.")
    if engine not in DEMO_SCENARIOS:
        raise StateError(f"--engine {engine}: there is no such engine; write {' or '.join(DEMO_SCENARIOS)}.")
    show = DEMO_SCENARIOS[engine]
    for family in show.required_families:
        ensure_family(family, print_progress)
    lab = Lab.up(LabSettings(name=name, images=[str(file) for file in show.image_tables]), print_progress)
    try:
        _DemoRunner(lab, show).run(engine)
        if keep:
            out.print(f"export KUBECONFIG={lab.kubeconfig}")
            err.print(f"try: aerie-lab shell --name {name}   and then: aerie-lab down --name {name}")
    finally:
        if not keep:
            lab.down()
            print_progress("the lab is down")


@dataclass(frozen=True)
class _DemoRunner:
    """The lab in which the show is played."""

    lab: Lab
    scenario: DemoScenario

    def run(self, engine: str) -> None:
        """All of it."""
        show = self.scenario
        _print_heading("The operator, from its chart")
        where = ("--namespace", "aerie-system")
        self._run_tool(
            "helm", "install", "aerie", str(CHART_FOLDER), *where, "--create-namespace", "--wait", "--timeout=120s", quiet=True
        )
        self._run_tool("kubectl", *where, "get", "pods")

        _print_heading(f"A deployment of {show.target} with an EAGLE 3 drafter")
        self._run_tool("kubectl", "create", "secret", "generic", "hugging-face", "--from-literal=token=any")
        self._run_tool("kubectl", "apply", "-f", str(show.manifest))
        self._watch_until(StatusTable("PHASE", "SERVING"), lambda status: status["phase"] == "Ready")
        out.print("[dim]# what preflight said, from configs and weight headers alone, before a GPU was asked for[/]")
        verdict = '{.status.conditions[?(@.type=="PreflightPassed")].message}{"\\n"}'
        self._run_tool("kubectl", "get", "specdep", show.name, "-o", f"jsonpath={verdict}")
        self._send_first_request()
        out.print(f"[dim]# from here on {show.requests_per_second:g} requests a second come through the gateway[/]")
        target = TrafficTarget(self.lab.gateway_url or "", show.name, show.host, timeout_seconds=60, chats=show.chats)
        with BackgroundTraffic(target, show.requests_per_second, show.classes) as traffic:
            _print_heading("A better drafter, EAGLE 3.1, in the place of the other")
            self._change_drafter(show.better_drafter, "Promoted")
            traffic.mark("EAGLE 3.1 promoted")
            self._run_tool("kubectl", "get", "pods,httproutes")
            _print_heading("A drafter that went wrong in training")
            self._change_drafter(show.worse_drafter, "RolledBack")
            traffic.mark("the other one rolled back")
        self._run_tool("kubectl", "get", "specdep", show.name)
        _print_traffic_summary(traffic, self._read_status())
        out.print(
            sanitize_text(
                _SUMMARY_TEMPLATE.format(
                    engines=show.engines_description,
                    manifest=show.manifest.relative_to(REPOSITORY_FOLDER),
                    engine=engine,
                    name=show.name,
                )
            )
        )
        _raise_on_failed_requests(traffic)

    def _run_tool(self, tool: str, *words: str, quiet: bool = False) -> None:
        """Show a command, run it, and show what it says."""
        typed = shlex.join(words).replace(f"{REPOSITORY_FOLDER}/", "")
        out.print(f"[cyan]$ {tool} {sanitize_text(typed)}[/]")
        said = self.lab.kubectl(*words) if tool == "kubectl" else self.lab.helm(*words)
        if not quiet:
            out.print(sanitize_text(said), end="")

    def _read_status(self) -> Json:
        found: Json = json.loads(self.lab.kubectl("get", "specdep", self.scenario.name, "-o", "json"))["status"]
        return found

    def _change_drafter(self, drafter: dict[str, str], expected_result: str) -> None:
        """Have another drafter tried; its canary has to end with the result."""
        change = {"spec": {"drafter": {"source": {"huggingFace": drafter}}}}
        self._run_tool("kubectl", "patch", "specdep", self.scenario.name, "--type=merge", "--patch", json.dumps(change))
        drafted = f"{drafter['repo']}@"

        def over(status: Json) -> bool:
            return status["history"][0]["drafter"].startswith(drafted) and status["phase"] in ("Ready", "RolledBack", "Failed")

        self._watch_until(StatusTable("PHASE", "TRAFFIC IN %", "BLOCKS", "AL-CONTROL", "AL-CANARY", "CANARY/CONTROL"), over)
        last = self._read_status()["history"][0]
        out.print(f"[bold]{last['result']}[/]: {sanitize_text(last['reason'])}")
        if last["result"] != expected_result:
            raise LabError(
                f"the canary of {drafter['repo']} ended as {last['result']} instead of {expected_result}: {last['reason']}"
            )

    def _watch_until(self, table: StatusTable, is_over: Callable[[Json], bool]) -> None:
        """Show rows as the resource's status changes, until it is as `over` wants it."""
        words = ["get", "specdep", self.scenario.name, "--watch", "--output=json"]
        out.print(f"[dim]# kubectl {' '.join(words)}, in short:[/]")
        table.print_header()
        command = [str(ensure_binary("kubectl")), f"--kubeconfig={self.lab.kubeconfig}", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watching:
            limit = threading.Timer(self.scenario.timeout_seconds, watching.terminate)
            limit.start()
            try:
                for document in _read_documents(watching):
                    status = document.get("status") or {}
                    if status.get("observedGeneration") != document["metadata"]["generation"]:
                        continue
                    table.print_row(status)
                    if is_over(status):
                        return
            finally:
                limit.cancel()
                watching.terminate()
        described = self.lab.kubectl("describe", "specdep", self.scenario.name)
        raise StartError(f"nothing came of it within {self.scenario.timeout_seconds:g} s:\n{described}")

    def _send_first_request(self) -> None:
        """One chat completion through the gateway; the route may take a moment to reach Envoy."""
        show, url = self.scenario, self.lab.gateway_url or ""
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


def _print_heading(text: str) -> None:
    out.print(f"\n[bold]{sanitize_text(text)}[/]")


def _read_documents(watching: subprocess.Popen[str]) -> Iterator[Json]:
    """Objects as kubectl prints them: each ends with a brace at the beginning of a line."""
    assert watching.stdout is not None
    lines: list[str] = []
    for line in watching.stdout:
        lines.append(line)
        if line.startswith("}"):
            yield json.loads("".join(lines))
            lines.clear()


def _print_traffic_summary(traffic: BackgroundTraffic, status: Json) -> None:
    table = Table(title="\nRequests through the gateway", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("MEANWHILE", "SECONDS", "REQUESTS", "FAILED"):
        table.add_column(heading, justify="left" if heading == "MEANWHILE" else "right")
    for name, report in traffic.intervals:
        row = report.summary()["all"]
        table.add_row(name, f"{report.seconds:.0f}", f"{row['requests']:.0f}", f"{row['errors']:.0f}")
    out.print(table)
    total, failed = _count_requests(traffic)
    out.print(f"\n{total} requests, {failed} failed.")
    for one in reversed(status["history"][:2]):
        out.print(sanitize_text(f"{one['change']}: {one['result']}. {one['reason']}"))


def _raise_on_failed_requests(traffic: BackgroundTraffic) -> None:
    total, failed = _count_requests(traffic)
    if failed:
        raise LabError(f"{failed} of {total} requests failed: {dict(traffic.report.errors)}.")


def _count_requests(traffic: BackgroundTraffic) -> tuple[int, int]:
    """Requests, and those that failed."""
    outcomes = traffic.report.outcomes
    return len(outcomes), sum(one.error is not None for one in outcomes)
