"""`aerie-lab demo`: the operator promotes a better drafter, and rolls back a bad one, under traffic.

It starts its own lab with simulated or real engines (scenarios.py), prints each command with its output, sends a bounded number
of requests, counts failures, and stops the lab, also when SIGTERM ends it. Every wait has a timeout. A rollout with an
unexpected result is an error, and so is a failed request. So is a pod that a rollout in place has created or restarted, and a
user's request on a drafter that no shadow evaluation has accepted yet.

`--show refresh` is another demo, with the same tools (demo_refresh.py).

With `--cluster kind` or `k3d` the place is a cluster of containers instead (container_cluster.py). The steps in it are the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from aerie.terminal import sanitize_text
from aerie_lab.binaries import ensure_family
from aerie_lab.cli.console import err, out, print_progress
from aerie_lab.cli.container_cluster import CLUSTER_PROGRAMS, run_container_cluster
from aerie_lab.cli.demo_requests import DemoRequests, GatewayRequests, PodRequests
from aerie_lab.cli.demo_tools import DemoTools
from aerie_lab.cli.scenarios import CONTAINER_SCENARIO, DEMO_SCENARIOS, DemoScenario, DrafterChange
from aerie_lab.cli.status_table import StatusTable, find_canary_weight, find_tokens_per_step, format_comparison
from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.engine.load_generation.background import IntervalReport
from aerie_lab.errors import LabError, StartError, StateError

Json = dict[str, Any]

REPOSITORY_FOLDER = Path(__file__).resolve().parents[3]
SHOWS = ("rollouts", "refresh")
CHART_FOLDER = REPOSITORY_FOLDER / "charts" / "aerie"

_IN_PLACE_SUMMARY = """\
Each new drafter was fetched by the pods beside their running engines. Then the pods alternated between both drafters in short
windows, in a random order. The operator compared tokens per step, latencies and failures of the same pods with each drafter.
No pod was created or restarted for it: {pod_count} served all {request_count} requests."""
_BY_PODS_SUMMARY = """\
Each new drafter started in a canary pod, and the old one in a new control pod. The gateway sent copies of the {request_count}
requests to an evaluator, which had both pods answer the same ones, and compared tokens per step, latencies, failures and
answers. No user was answered by a new drafter before it was accepted. The canary's pods were promoted without a reload."""
_SUMMARY_TEMPLATE = """\
{rollouts}
Cluster, {receiver} and operator are real. {engines}.
Durations are short, for you to watch ({manifest} has the defaults).
`.venv/bin/aerie-lab demo {options} --keep` leaves the cluster up. `kubectl describe specdep {name}` then shows analysis and
rollout history. In docs/concepts, in-place.md explains rollouts in place, rollouts.md those by pods, and shadow-evaluation.md
what comes first. README.md has the next steps by hand."""
_POD_COLUMNS = "custom-columns=POD:.metadata.name,UID:.metadata.uid,RESTARTS:.status.containerStatuses[0].restartCount"
_RUNNING = "--field-selector=status.phase=Running"
"""Leaves out the pod of the preflight, which has ended."""
_DRAFTER_METRIC = "aerie_drafter_info"
_DRAFTER_METRIC_TIMEOUT_SECONDS = 30.0
_TRAFFIC_SECONDS = 15.0
"""Seconds of requests before the first rollout. With fewer than ten, windows would have their longest length."""


def demo(
    engine: Annotated[str, typer.Option("--engine", help=f"Engine: {' or '.join(DEMO_SCENARIOS)}.")] = "simulator",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help=f"Cluster: lab, or {' or '.join(CLUSTER_PROGRAMS)} with Docker. Tests run the latter two "
            "with fake programs, and their manifests in the lab. They never ran with a container engine.",
        ),
    ] = "lab",
    show: Annotated[
        str,
        typer.Option(
            "--show",
            help="What is shown: rollouts, or refresh: requests change, and the drafter is trained further on recorded prompts, "
            "with real vLLM in the lab.",
        ),
    ] = "rollouts",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the cluster running afterwards.")] = False,
    name: Annotated[
        str, typer.Option("--name", help="Name of the demo's cluster; that of containers begins with aerie-.")
    ] = "demo",
) -> None:
    """Install the operator in a cluster, deploy a drafter, promote a better one, roll back a bad one, and clean up."""
    if not CHART_FOLDER.is_dir():
        raise StateError(f"the demo installs {CHART_FOLDER}, which does not exist: run the demo in a checkout of the repository.")
    if engine not in DEMO_SCENARIOS:
        raise StateError(f"--engine {engine}: no such engine. Choose {' or '.join(DEMO_SCENARIOS)}.")
    if show not in SHOWS:
        raise StateError(f"--show {show}: nothing to show has this name. Choose {' or '.join(SHOWS)}.")
    if show == "refresh":
        if (engine, cluster) != ("simulator", "lab"):
            raise StateError("--show refresh has real vLLM in the lab: leave --engine and --cluster out.")
        from aerie_lab.cli.demo_refresh import (
            run_refresh_demo,
        )  # it has the drafter's packages, which the other demos do not need

        run_refresh_demo(name, keep=keep)
    elif cluster == "lab":
        _run_in_lab(engine, name, keep=keep)
    elif cluster not in CLUSTER_PROGRAMS:
        raise StateError(f"--cluster {cluster}: no such cluster. Choose lab or {' or '.join(CLUSTER_PROGRAMS)}.")
    elif engine != "simulator":
        raise StateError(f"--engine {engine} needs the lab: leave --cluster out.")
    else:
        _run_in_containers(cluster, name, keep=keep)


def _run_in_lab(engine: str, name: str, *, keep: bool) -> None:
    scenario = DEMO_SCENARIOS[engine]
    for family in scenario.required_families:
        ensure_family(family, print_progress)
    settings = LabSettings(name=name, image_tables=[str(file) for file in scenario.image_tables])
    with run_demo_lab(settings, keep=keep) as lab:
        requests = GatewayRequests(scenario, lab.gateway_url or "")
        DemoRunner(scenario, DemoTools(lab.environment()), requests).run(f"--engine {engine}")
        if keep:
            out.print(f"export KUBECONFIG={lab.kubeconfig}")
            err.print(f"try: aerie-lab shell --name {name}   and then: aerie-lab down --name {name}")


@contextlib.contextmanager
def run_demo_lab(settings: LabSettings, *, keep: bool) -> Iterator[Lab]:
    """Start a lab. Take it down at the end, or before a signal ends this process, unless it is to be kept. Raises LabError."""
    lab = Lab.up(settings, print_progress)
    if keep:
        yield lab
        return
    try:
        with lab:
            yield lab
    finally:
        print_progress("the lab is down")


def _run_in_containers(program: str, name: str, *, keep: bool) -> None:
    with run_container_cluster(program, name, keep=keep) as cluster:
        tools = DemoTools(cluster.environment)
        DemoRunner(CONTAINER_SCENARIO, tools, PodRequests(CONTAINER_SCENARIO, tools)).run(f"--cluster {program}")
        if keep:
            out.print(f"export KUBECONFIG={cluster.kubeconfig}")
            err.print(f"afterwards: {shlex.join(cluster.command('delete'))}")


@dataclass(frozen=True)
class DemoRunner:
    """Runs one scenario in a cluster that has the scenario's images."""

    scenario: DemoScenario
    tools: DemoTools
    requests: DemoRequests

    def run(self, options: str) -> None:
        """Run the whole demo."""
        scenario = self.scenario
        self.install_operator()
        for manifest in scenario.prerequisites:
            self.tools.show("kubectl", "apply", "-f", str(manifest))
            self.tools.show("kubectl", "wait", "deployment", "--all", "--for=condition=Available", "--timeout=120s")

        print_heading("A deployment with an EAGLE 3 drafter")
        self.tools.show("kubectl", "apply", "-f", str(scenario.manifest))
        self.watch_until(StatusTable("PHASE", "SERVING"), lambda status: status["phase"] == "Ready")
        out.print("[dim]# the result of preflight, from configs and weight headers alone, before a GPU is requested[/]")
        condition_message = '{.status.conditions[?(@.type=="PreflightPassed")].message}{"\\n"}'
        self.tools.show("kubectl", "get", "specdep", scenario.name, "-o", f"jsonpath={condition_message}")
        out.print(self.requests.ask())
        out.print(f"[dim]# from here on the {self.requests.receiver} receives {scenario.load_text}[/]")
        with self.requests.send() as traffic:
            pods = self.show_pods() if scenario.is_in_place else {}
            if scenario.is_in_place:
                out.print(
                    f"[dim]# the length of the windows follows from the rate of requests: {_TRAFFIC_SECONDS:g} s to measure it[/]"
                )
                time.sleep(_TRAFFIC_SECONDS)
            for change in scenario.changes:
                print_heading(change.title)
                self._change_drafter(change)
                traffic.mark(f"{change.drafter['repo'].partition('/')[2]}: {change.expected_result}")
                if scenario.is_in_place:
                    self.check_pods(pods)
        self.tools.show("kubectl", "get", "specdep", scenario.name)
        _print_traffic_summary(traffic, self.read_status(), self.requests.receiver)
        out.print(
            sanitize_text(
                _SUMMARY_TEMPLATE.format(
                    rollouts=(_IN_PLACE_SUMMARY if scenario.is_in_place else _BY_PODS_SUMMARY).format(
                        pod_count=f"the same {len(pods)} pods" if len(pods) > 1 else "the same pod",
                        request_count=_count_requests(traffic)[0],
                    ),
                    engines=scenario.engines_description,
                    manifest=os.path.relpath(scenario.manifest, REPOSITORY_FOLDER),
                    options=options,
                    receiver=self.requests.receiver,
                    name=scenario.name,
                )
            )
        )
        raise_on_failed_requests(traffic)

    def install_operator(self) -> None:
        print_heading("The operator, from its chart")
        where = ("--namespace", "aerie-system")
        self.tools.show(
            "helm", "install", "aerie", str(CHART_FOLDER), *where, "--create-namespace", "--wait", "--timeout=120s", quiet=True
        )
        self.tools.show("kubectl", *where, "get", "pods")

    def read_status(self) -> Json:
        status: Json = json.loads(self.tools.run("kubectl", "get", "specdep", self.scenario.name, "-o", "json"))["status"]
        return status

    def _change_drafter(self, change: DrafterChange) -> None:
        """Change the drafter, and wait until its rollout ends with the expected result."""
        patch = {"spec": {"drafter": {"source": {"huggingFace": change.drafter}}}}
        self.tools.show("kubectl", "patch", "specdep", self.scenario.name, "--type=merge", "--patch", json.dumps(patch))
        drafter_prefix = f"{change.drafter['repo']}@"
        canary_pods: dict[str, dict[str, int]] = {}

        def is_over(status: Json) -> bool:
            canary = status.get("canary") or {}
            if canary.get("phase") == "Evaluating" and find_canary_weight(status):
                raise LabError(f"users have requests answered by {change.drafter['repo']}, which is not accepted yet: {canary}")
            if canary.get("phase") == "Ramping" and not canary_pods:
                canary_pods[canary["revision"]] = self._list_pods(f"aerie.dev/revision={canary['revision']}")
            is_last_rollout = status["rolloutHistory"][0]["drafter"].startswith(drafter_prefix)
            return is_last_rollout and status["phase"] in ("Ready", "RolledBack", "Failed")

        users = () if self.scenario.is_in_place else ("USERS",)
        self.watch_until(StatusTable("PHASE", *users, "PAIRS", "TOKENS PER STEP, NEW DRAFTER TO OLD"), is_over)
        last = self.read_status()["rolloutHistory"][0]
        estimate = format_comparison(find_tokens_per_step(last.get("comparisons")))
        out.print(f"[bold]{last['result']}[/]: {sanitize_text(last['message'])} Tokens per step: {estimate}.")
        if last["result"] != change.expected_result:
            raise LabError(
                f"the rollout of {change.drafter['repo']} ended as {last['result']} instead of {change.expected_result}: "
                f"{last['message']}"
            )
        for revision, pods in canary_pods.items():
            selector = f"--selector=aerie.dev/revision={revision}"
            self.tools.show("kubectl", "get", "pods", selector, _RUNNING, f"--output={_POD_COLUMNS}")
            if not pods.items() <= self._list_pods(f"aerie.dev/revision={revision}").items():
                raise LabError("the promotion was to keep the canary's pods, and they are others, or restarted.")
            out.print("[dim]# with the canary's pods, without a restart[/]")

    def _list_pods(self, selector: str) -> dict[str, int]:
        """Return the restarts of the resource's engine pods by uid."""
        selectors = f"aerie.dev/name={self.scenario.name},{selector}"
        pods = json.loads(self.tools.run("kubectl", "get", "pods", f"--selector={selectors}", _RUNNING, "--output=json"))["items"]
        return {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}

    def show_pods(self) -> dict[str, int]:
        """Print the pods and the drafter that each serves with; return their restarts by uid."""
        selector = f"--selector=aerie.dev/name={self.scenario.name}"
        self.tools.show("kubectl", "get", "pods", selector, f"--output={_POD_COLUMNS}")
        pods = json.loads(self.tools.run("kubectl", "get", "pods", selector, "--output=json"))["items"]
        for pod in pods:
            path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}:8000/proxy/metrics"
            out.print(f"[cyan]$ kubectl get --raw {path} | grep ^{_DRAFTER_METRIC}[/]")
            out.print(sanitize_text(self._read_drafter_metric(path)))
        return {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}

    def _read_drafter_metric(self, path: str) -> str:
        """Return the metric's line. The plugin reads its engine's drafter after the engine serves, so the line may be late."""
        deadline = time.monotonic() + _DRAFTER_METRIC_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            lines = self.tools.run("kubectl", "get", "--raw", path).splitlines()
            if shown := [line for line in lines if line.startswith(_DRAFTER_METRIC)]:
                return "\n".join(shown)
            time.sleep(0.5)
        raise LabError(f"{path} does not show {_DRAFTER_METRIC} within {_DRAFTER_METRIC_TIMEOUT_SECONDS:g} s.")

    def check_pods(self, pods: dict[str, int]) -> None:
        """Print the pods, and raise LabError if they are others, or one was restarted."""
        if self.show_pods() != pods:
            raise LabError("the rollout was to change the drafter inside the running pods, and they are others, or restarted.")
        out.print("[dim]# the same pods, without a restart[/]")

    def watch_until(self, table: StatusTable, is_over: Callable[[Json], bool]) -> None:
        """Print rows as the resource's status changes, until it `is_over`."""
        words = ["get", "specdep", self.scenario.name, "--watch", "--output=json"]
        out.print(f"[dim]# kubectl {' '.join(words)}[/]")
        table.print_header()
        with self.tools.start("kubectl", *words) as watching:
            timer = threading.Timer(self.scenario.timeout_seconds, watching.terminate)
            timer.start()
            try:
                for document in _read_documents(watching):
                    status = document.get("status") or {}
                    if status.get("observedGeneration") != document["metadata"]["generation"]:
                        continue
                    table.print_row(status)
                    if is_over(status):
                        return
            finally:
                timer.cancel()
                watching.terminate()
        description = self.tools.run("kubectl", "describe", "specdep", self.scenario.name)
        raise StartError(f"the resource did not get there within {self.scenario.timeout_seconds:g} s:\n{description}")


def print_heading(text: str) -> None:
    out.print(f"\n[bold]{sanitize_text(text)}[/]")


def _read_documents(watching: subprocess.Popen[str]) -> Iterator[Json]:
    """Yield the objects that kubectl prints: each ends with a brace at the beginning of a line."""
    assert watching.stdout is not None
    lines: list[str] = []
    for line in watching.stdout:
        lines.append(line)
        if line.startswith("}"):
            yield json.loads("".join(lines))
            lines.clear()


def _print_traffic_summary(traffic: IntervalReport, status: Json, receiver: str) -> None:
    table = Table(title=f"\nRequests through the {receiver}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("INTERVAL", "SECONDS", "REQUESTS", "FAILED"):
        table.add_column(heading, justify="left" if heading == "INTERVAL" else "right")
    for name, report in traffic.intervals:
        row = report.summary()["all"]
        table.add_row(name, f"{report.seconds:.0f}", f"{row['requests']:.0f}", f"{row['errors']:.0f}")
    out.print(table)
    total, failed = _count_requests(traffic)
    out.print(f"\n{total} requests, {failed} failed.")
    for outcome in reversed(status["rolloutHistory"][:2]):
        out.print(sanitize_text(f"{outcome['change']}: {outcome['result']}. {outcome['message']}"))


def raise_on_failed_requests(traffic: IntervalReport) -> None:
    total, failed = _count_requests(traffic)
    if failed:
        raise LabError(f"{failed} of {total} requests failed: {dict(traffic.report.errors)}.")


def _count_requests(traffic: IntervalReport) -> tuple[int, int]:
    """Return the number of requests, and of those that failed."""
    outcomes = traffic.report.outcomes
    return len(outcomes), sum(outcome.error is not None for outcome in outcomes)
