"""`aerie-lab demo --show refresh`: requests change, and the drafter is trained further on recorded prompts until it fits them.

    traffic    questions ─► texts ──────────► other texts ─────────────────────────────────► questions
    drafter    served ────────────────────────────────────────► by turns ─► refreshed ───────────────►
    meanwhile               prompts recorded    refresh          rollout in place

Models and prompts are those of the bundle (drafter/bundle, domains.py), the engine is real vLLM on CPU. Recorded texts are of
other topics than those by which both drafters are measured, so no training has seen what they are measured on.

Guarantees: every wait has a timeout. Lab, files and the refresh are ended and removed at the end, and before SIGTERM or SIGHUP
ends the process. Errors are: a refresh that exports nothing, a
rollout that is not promoted, a failed request. Acceptance lengths are from vLLM's counters. Not guaranteed: how much is
recovered, which depends on the bundle, and how long it takes beside other work on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from aerie.engine.metrics.exposition import parse_exposition
from aerie.terminal import sanitize_text
from aerie_drafter.bundle import find_bundle_path
from aerie_lab.binaries import ensure_family
from aerie_lab.cli.console import err, out, print_progress
from aerie_lab.cli.demo import DemoRunner, print_heading, run_demo_lab
from aerie_lab.cli.demo_requests import GatewayRequests
from aerie_lab.cli.demo_tools import DemoTools
from aerie_lab.cli.scenarios import REFRESH_SCENARIO
from aerie_lab.cli.status_table import StatusTable, find_tokens_per_step, format_comparison
from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.cluster.signal_cleanup import clean_up_on_signal, defer_signals
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import RequestOutcome, TrafficTarget
from aerie_lab.errors import LabError, StartError
from bundle.domains import build_new_requests, build_old_requests

Json = dict[str, Any]

SETTINGS_FILE, CAPTURE_PATCH = (
    Path(__file__).with_name(name).resolve() for name in ("demo-refresh-settings.yaml", "demo-refresh-capture.yaml")
)
RECORDED_PROMPTS = 320
OLD_QUESTIONS = 1040
"""Questions that the refresh has beside the recorded prompts."""
STAGE_SECONDS = 60.0
"""Seconds of a stage that only measures."""
_SAMPLE_SECONDS, _CURVE_SECONDS = 10.0, 20.0
"""Seconds between two readings of the counters, and of a point of the curve."""
_RECORDING_TIMEOUT_SECONDS, _REFRESH_TIMEOUT_SECONDS = 1200.0, 3600.0
_REFRESH_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Reading:
    """The engine's counters of drafts."""

    seconds: float
    """Since the first reading."""
    drafts: float
    accepted: float


@dataclass(frozen=True)
class Stage:
    """A part of the demo in which traffic and drafter were the same."""

    name: str
    begin: float
    """Seconds since the first reading, as `end`."""
    end: float
    acceptance_length: float | None
    requests: int
    """Requests that were answered."""


def compute_acceptance_length(first: Reading, last: Reading) -> float | None:
    """Return the acceptance length between two readings; None without drafts."""
    drafts = last.drafts - first.drafts
    return round(1 + (last.accepted - first.accepted) / drafts, 3) if drafts > 0 else None


def build_curve(readings: Sequence[Reading], seconds: float) -> list[tuple[float, float]]:
    """Return (seconds, acceptance length) for each interval of at least `seconds`, at its middle."""
    curve = []
    first = readings[0]
    for reading in readings[1:]:
        if reading.seconds - first.seconds >= seconds:
            if (length := compute_acceptance_length(first, reading)) is not None:
                curve.append((round((first.seconds + reading.seconds) / 2, 1), length))
            first = reading
    return curve


def build_timeline(stages: Sequence[Stage], readings: Sequence[Reading], report: Mapping[str, Any], outcome: Json) -> Json:
    """Return what was measured: of each stage, over time, of the refresh and of the rollout."""
    comparison = find_tokens_per_step(outcome.get("comparisons"))
    return {
        "stages": [asdict(stage) for stage in stages],
        "curve": build_curve(readings, _CURVE_SECONDS),
        "refresh": {name: report[name] for name in ("captured", "trained", "new", "old", "draft_vocabulary_coverage", "seconds")},
        "rollout": {"result": outcome["result"]} | {name: comparison.get(name) for name in ("estimate", "lower", "upper")},
    }


def run_refresh_demo(name: str, *, keep: bool = False) -> Json:
    """Run the demo in a lab of this name, and return its timeline. Raises LabError."""
    for family in REFRESH_SCENARIO.required_families:
        ensure_family(family, print_progress)
    with _make_folder(keep=keep) as folder, run_demo_lab(LabSettings(name=name), keep=keep) as lab:
        timeline = RefreshDemo(lab, folder).run()
        if keep:
            out.print(f"export KUBECONFIG={lab.kubeconfig}")
            err.print(f"models and prompts: {folder}; afterwards: aerie-lab down --name {name}")
    return timeline


@contextlib.contextmanager
def _make_folder(*, keep: bool) -> Iterator[Path]:
    """Create a temporary folder. Remove it at the end, or before a signal ends this process, unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix="aerie-demo-"))
    if keep:
        yield folder
        return
    try:
        with clean_up_on_signal(lambda: shutil.rmtree(folder)):
            yield folder
    finally:
        with defer_signals():
            shutil.rmtree(folder)


def run_program(command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float) -> tuple[int, str]:
    """Run a program, and return its exit status and output. It ends with this block, whatever ends it: also a signal.

    Raises LabError after the timeout.
    """
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program,
        clean_up_on_signal(program.kill),
    ):
        try:
            output, _ = program.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise LabError(f"{shlex.join(command)} did not end within {timeout_seconds:g} s.") from None
        finally:
            program.kill()
    return program.returncode, output


class RefreshDemo:
    """The demo in a lab that is up. `folder`: where the volumes are."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.scenario, self.folder = REFRESH_SCENARIO, folder
        self.tools, self.gateway_url = DemoTools(lab.environment()), lab.gateway_url or ""
        self.runner = DemoRunner(self.scenario, self.tools, GatewayRequests(self.scenario, self.gateway_url))
        self.stages: list[Stage] = []
        self._outcomes: list[RequestOutcome] = []
        """All requests, of traffics that have ended."""

    def run(self) -> Json:
        """Run the whole demo, print the timeline, and return it."""
        self._serve()
        questions, texts, other_texts = build_requests()
        with SpeculationReader(self.tools, self._find_pod()) as reader:
            with self._send(questions) as traffic, self._measure(reader, traffic, "questions, served drafter"):
                time.sleep(STAGE_SECONDS)
            with self._send(texts) as traffic, self._measure(reader, traffic, "texts, served drafter"):
                time.sleep(STAGE_SECONDS)
                self._record_prompts()
            with self._send(other_texts) as traffic:
                with self._measure(reader, traffic, "other texts, served drafter, during the refresh"):
                    self._end_capture()
                    report = self._refresh()
                with self._measure(reader, traffic, "other texts, drafters by turns"):
                    outcome = self._roll_out()
                with self._measure(reader, traffic, "other texts, refreshed drafter"):
                    time.sleep(STAGE_SECONDS)
            with self._send(questions) as traffic, self._measure(reader, traffic, "questions, refreshed drafter"):
                time.sleep(STAGE_SECONDS)
        timeline = build_timeline(self.stages, reader.readings, report, outcome)
        print_timeline(timeline)
        failed = [outcome.error for outcome in self._outcomes if outcome.error is not None]
        out.print(f"\n{len(self._outcomes)} requests, {len(failed)} failed.")
        if failed:
            raise LabError(f"{len(failed)} of {len(self._outcomes)} requests failed, the first with: {failed[0]}.")
        return timeline

    def _serve(self) -> None:
        """Install the operator, and serve the target with its drafter."""
        models, prompts = self.folder / "models", self.folder / "prompts"
        for source, name in (("target", "target"), ("eagle31", "served")):
            shutil.copytree(find_bundle_path(source), models / name)
        prompts.mkdir()
        self.runner.install_operator()
        print_heading("A deployment with an EAGLE 3.1 drafter")
        out.print("[dim]# volumes, which are folders of this machine: models has target and drafter, prompts is empty[/]")
        volumes = [item for folder in (models, prompts) for item in build_volume(folder.name, folder)]
        self.tools.run("kubectl", "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": volumes}))
        self.tools.show("kubectl", "apply", "-f", str(self.scenario.manifest))
        self.runner.watch_until(StatusTable("PHASE", "SERVING"), lambda status: status["phase"] == "Ready")
        out.print(self.runner.requests.ask())

    def _find_pod(self) -> str:
        selector = f"--selector=aerie.dev/name={self.scenario.name}"
        words = ("get", "pods", selector, "--field-selector=status.phase=Running", "--output=name")
        return self.tools.run("kubectl", *words).split()[0].removeprefix("pod/")

    @contextlib.contextmanager
    def _send(self, requests: Sequence[Json]) -> Iterator[BackgroundTraffic]:
        """Send chat requests in turn until the end of the block. They have the same fields beside their messages."""
        fields = {name: value for name, value in requests[0].items() if name != "messages"}
        target = TrafficTarget(
            self.gateway_url,
            self.scenario.name,
            self.scenario.host,
            timeout_seconds=120,
            chats=[request["messages"] for request in requests],
            chat_fields=fields,
            ignore_eos=False,  # a drafter is trained on answers, and not on what follows their ends
        )
        with BackgroundTraffic(target, self.scenario.load, self.scenario.classes) as traffic:
            yield traffic
        self._outcomes += traffic.report.outcomes

    @contextlib.contextmanager
    def _measure(self, reader: SpeculationReader, traffic: BackgroundTraffic, name: str) -> Iterator[None]:
        """Measure a stage, and print it and the status at its end."""
        print_heading(f"{name[0].upper()}{name[1:]}")
        first, before = reader.read(), len(traffic.report.outcomes)
        yield
        last, after = reader.read(), len(traffic.report.outcomes)
        stage = Stage(name, first.seconds, last.seconds, compute_acceptance_length(first, last), after - before)
        self.stages.append(stage)
        self.tools.show("kubectl", "get", "specdep", self.scenario.name)
        out.print(f"[bold]acceptance length {stage.acceptance_length}[/] over {stage.end - stage.begin:.0f} s")

    def _record_prompts(self) -> None:
        """Switch the capture on, and wait until enough prompts are recorded."""
        self.tools.show("kubectl", "get", "specdep", self.scenario.name)
        out.print("[dim]# the drafter fits these requests less well: their prompts are recorded from now on[/]")
        patch = ("--type=merge", "--patch-file", str(CAPTURE_PATCH))
        self.tools.show("kubectl", "patch", "specdep", self.scenario.name, *patch)
        self._wait(lambda: self._count_prompts() >= RECORDED_PROMPTS, f"{RECORDED_PROMPTS} prompts are recorded")
        out.print(f"[dim]# {self._count_prompts()} prompts are recorded on the volume[/]")

    def _end_capture(self) -> None:
        """Remove spec.capture, and wait until the recorder has completed its files."""
        patch = json.dumps([{"op": "remove", "path": "/spec/capture"}])
        self.tools.show("kubectl", "patch", "specdep", self.scenario.name, "--type=json", "--patch", patch)
        self._wait(lambda: not list(self.prompts_folder.glob("*.open")), "the recorder has completed its files")

    def _count_prompts(self) -> int:
        files = list(self.prompts_folder.glob("*.jsonl*"))
        return sum(file.read_bytes().count(b"\n") for file in files)

    @property
    def prompts_folder(self) -> Path:
        """The recorder's folder on the volume, which has the name of the resource."""
        return self.folder / "prompts" / self.scenario.name

    def _refresh(self) -> Json:
        """Train the served drafter further, and return the report."""
        models, old = self.folder / "models", self.folder / "old.jsonl"
        questions = choose_evenly(build_old_requests(held_out=False), OLD_QUESTIONS)
        old.write_text("".join(json.dumps(question) + "\n" for question in questions))
        words = ["refresh", str(models / "served"), str(models / "refreshed"), "--target", str(models / "target")]
        words += ["--prompts", str(self.prompts_folder), "--old", str(old)]
        words += ["--old-held-out", str(find_bundle_path("prompts.jsonl")), "--settings", str(SETTINGS_FILE)]
        out.print(f"[cyan]$ aerie-drafter {sanitize_text(shlex.join(words))}[/]")
        command = [sys.executable, "-m", "aerie_drafter.cli", *words, "--work", str(self.folder / "work"), "--output", "json"]
        status, output = run_program(command, {**os.environ, **_REFRESH_ENVIRONMENT}, _REFRESH_TIMEOUT_SECONDS)
        if status not in (0, 1):
            raise LabError(f"aerie-drafter refresh ended with status {status}: its messages are above.")
        report: Json = json.loads(output)
        for reason in report["reasons"]:
            out.print(sanitize_text(reason))
        if not report["accepted"]:
            raise LabError("the refreshed drafter is not better than the served one, so there is nothing to roll out.")
        return report

    def _roll_out(self) -> Json:
        """Change the resource to the refreshed drafter, and return the outcome of its rollout."""
        source = {"persistentVolumeClaim": {"claimName": "models", "path": "refreshed"}}
        patch = json.dumps({"spec": {"drafter": {"source": source}}})
        self.tools.show("kubectl", "patch", "specdep", self.scenario.name, "--type=merge", "--patch", patch)
        before = len(self.runner.read_status().get("rolloutHistory", []))

        def is_over(status: Json) -> bool:
            has_outcome = len(status.get("rolloutHistory", [])) > before
            return has_outcome and status["phase"] in ("Ready", "RolledBack", "Failed")

        self.runner.watch_until(StatusTable("PHASE", "PAIRS", "TOKENS PER STEP, NEW DRAFTER TO OLD"), is_over)
        outcome: Json = self.runner.read_status()["rolloutHistory"][0]
        estimate = format_comparison(find_tokens_per_step(outcome.get("comparisons")))
        out.print(f"[bold]{outcome['result']}[/]: {sanitize_text(outcome['message'])} Tokens per step: {estimate}.")
        if outcome["result"] != "Promoted":
            raise LabError(f"the rollout of the refreshed drafter ended as {outcome['result']} instead of Promoted.")
        return outcome

    def _wait(self, condition: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + _RECORDING_TIMEOUT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                status = self.tools.run("kubectl", "describe", "specdep", self.scenario.name)
                raise StartError(f"{description}: not within {_RECORDING_TIMEOUT_SECONDS:g} s.\n{status}")
            time.sleep(1.0)


class SpeculationReader:
    """Reads a pod's counters of drafts at intervals, and on request, from its start to the end of the block."""

    def __init__(self, tools: DemoTools, pod: str) -> None:
        self._tools, self._path = tools, f"/api/v1/namespaces/default/pods/{pod}:8000/proxy/metrics"
        self.readings: list[Reading] = []
        self._start = time.monotonic()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._read_at_intervals, name="counters", daemon=True)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def read(self) -> Reading:
        """Read the counters now. Raises LabError."""
        with self._lock:
            speculation = parse_exposition(self._tools.run("kubectl", "get", "--raw", self._path).encode()).counters.speculation
            if speculation is None:
                raise LabError(f"{self._path} shows no counters of drafts.")
            reading = Reading(round(time.monotonic() - self._start, 1), speculation.drafts, speculation.accepted)
            self.readings.append(reading)
        return reading

    def _read_at_intervals(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            with contextlib.suppress(LabError):  # one point of the curve less
                self.read()


def build_requests() -> tuple[list[Json], list[Json], list[Json]]:
    """Return questions that no training saw, texts to be recorded, from all topics, and texts of other topics."""
    texts, other_texts = (build_new_requests(held_out=held_out) for held_out in (False, True))
    return build_old_requests(held_out=True), choose_evenly(texts, RECORDED_PROMPTS), other_texts


def choose_evenly(items: Sequence[Json], count: int) -> list[Json]:
    """Return `count` items at equal distances, in their order; all if there are fewer."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def build_volume(name: str, folder: Path) -> list[Json]:
    """Return a volume of a folder of this machine, and the claim of the same name."""
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": name}
    volume = common | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}}
    claim = common | {"resources": {"requests": {"storage": "1Gi"}}}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "default"}, "spec": claim},
    ]


def print_timeline(timeline: Json) -> None:
    """Print a row for each stage, and the parts of the refresh."""
    table = Table(title="\nTimeline", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("TRAFFIC AND DRAFTER", "FROM", "TO", "ACCEPTANCE LENGTH", "REQUESTS"):
        table.add_column(heading, justify="left" if heading == "TRAFFIC AND DRAFTER" else "right")
    for stage in timeline["stages"]:
        times = [f"{stage[name]:.0f} s" for name in ("begin", "end")]
        table.add_row(stage["name"], *times, str(stage["acceptance_length"]), str(stage["requests"]))
    out.print(table)
    refresh, new = timeline["refresh"], timeline["refresh"]["new"]
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in refresh["seconds"].items())
    out.print(f"\nrefresh with {refresh['captured']} recorded prompts: {seconds}")
    out.print(
        f"on {new['prompts']} recorded prompts that were held back: {new['served']:.2f} before, {new['refreshed']:.2f} after"
    )
