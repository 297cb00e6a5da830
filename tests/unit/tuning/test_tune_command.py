"""`aerie tune` on recorded expositions and on Prometheus's series, and its messages for files it cannot use."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.cli.app import run_command_line
from aerie.cli.console import CommandError
from aerie.cli.inputs.recorded import read_recording
from aerie_lab.engine.fleet import SimulatedFleet, SimulatedPod
from aerie_lab.engine.load_generation.workload import DiurnalArrivals, LengthDistribution, TrafficClass
from aerie_lab.engine.metrics.exposition import render_exposition
from aerie_lab.engine.performance_model.acceptance import Acceptance
from aerie_lab.engine.performance_model.request import EngineSettings
from aerie_lab.engine.performance_model.step import StepTimeFormula
from scripts.record_metrics import SECONDS, iterate_scrapes
from tests.golden import Messages

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of 35 minutes of one engine with K = 3, whose load has a period of 10 minutes."""
    kind = TrafficClass("chat", Acceptance((0.75, 0.7, 0.65)), LengthDistribution(50, 0.3), LengthDistribution(100, 0.3))
    pod = SimulatedPod("chat-0", EngineSettings(num_speculative_tokens=3), StepTimeFormula(4e-2, 1e-3, 4e-3, log_sd=0.03))
    fleet = SimulatedFleet([pod], [kind], DiurnalArrivals(1.0, 0.9, peak_seconds=150.0, day_seconds=600.0), seed=2)
    file = tmp_path_factory.mktemp("recorded") / "chat.jsonl"
    with file.open("w") as out:
        for scrape in fleet.run(2100.0):
            assert scrape.counters is not None
            row = {"time": 1e9 + scrape.time, "replica": scrape.pod, "page": render_exposition(scrape.counters, "m", 1e9 - 3600)}
            out.write(json.dumps(row) + "\n")
    return file


def test_the_text_output_has_all_sections(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["tune", "--metrics", str(pages), "--dense"]) == 0
    text = capsys.readouterr().out
    assert re.match(r"(HOLD|CHANGE to .*|EXPLORE: one canary with .*)\n", text)
    for part in ("Evidence", "Candidates, ", "K=3 ", "no speculation", "Limitations", "measured at K = 3"):
        assert part in text
    assert max(len(line) for line in text.splitlines() if "%" not in line) <= 120


def test_the_json_output_is_reproducible(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for _ in range(2):
        assert run_command_line(["tune", "--metrics", str(pages), "--max-tokens", "5", "-o", "json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    settings = {candidate["setting"] for candidate in answers[0]["candidates"]}
    assert {"off", "1", "2", "3", "4", "5", "up to 5"} <= settings
    current = next(candidate for candidate in answers[0]["candidates"] if candidate["setting"] == "3")
    assert current["gain"]["p50"] == 0
    assert current["acceptanceLength"] == pytest.approx(1 + 0.75 + 0.75 * 0.7 + 0.75 * 0.7 * 0.65, rel=0.03)


def test_the_page_begins_with_a_command_that_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "how-to" / "tune-offline.md").read_text()
    command, *_, shown = re.findall(r"```\n(.*?)\n```", page, re.DOTALL)
    program, *arguments = command.split()
    assert program == "aerie"
    assert run_command_line(arguments) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[:3] == shown.splitlines()[:3]
    assert [line.split()[0] for line in text.splitlines() if line] == [line.split()[0] for line in shown.splitlines() if line]


def test_the_example_is_what_its_script_records() -> None:
    file = ROOT / "examples/metrics/chat.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    count = 9
    for row, scrape in zip(rows[:count], itertools.islice(iterate_scrapes(), count), strict=True):
        assert {**row, "page": ""} == {**scrape, "page": ""}
        names, values = split_page(row["page"])
        expected_names, expected_values = split_page(str(scrape["page"]))
        assert names == expected_names
        assert values == pytest.approx(expected_values, rel=1e-12), "numpy adds in another order with other vector instructions"
    assert rows[-1]["time"] - rows[0]["time"] > 0.95 * SECONDS
    assert {row["replica"] for row in rows} == {"chat-0", "chat-1", "chat-2"}


def split_page(page: str) -> tuple[list[str], list[float]]:
    """Return the lines of a page of metrics without the values, comments whole, and the values."""
    lines = page.splitlines()
    names = [line if line.startswith("#") else line.rpartition(" ")[0] for line in lines]
    return names, [float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")]


def as_series(pages: Path) -> dict[str, object]:
    """Convert the recording to a response of Prometheus: one series for each line of the expositions."""
    series: dict[str, tuple[dict[str, str], list[tuple[float, str]]]] = {}
    for row in map(json.loads, pages.read_text().splitlines()):
        for line in row["page"].splitlines():
            if line.startswith(("vllm:", "process_start")):
                head, _, value = line.rpartition(" ")
                labels = dict(re.findall(r'(\w+)="([^"]*)"', head))
                metric = {"__name__": head.partition("{")[0], "pod": row["replica"], "job": "vllm", **labels}
                series.setdefault(head, (metric, []))[1].append((row["time"], value))
    result = [{"metric": metric, "values": values} for metric, values in series.values()]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def test_series_of_prometheus_equal_the_recorded_expositions(pages: Path, tmp_path: Path) -> None:
    short = tmp_path / "pages.jsonl"
    short.write_text("".join(line + "\n" for line in pages.read_text().splitlines()[:20]))
    packed = tmp_path / "series.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(as_series(short)).encode()))
    assert read_recording(packed).scrapes == read_recording(short).scrapes


def test_insufficient_data_has_its_own_exit_code(pages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("".join(line + "\n" for line in pages.read_text().splitlines()[:8]))
    assert run_command_line(["tune", "--metrics", str(short)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("INSUFFICIENT DATA: nothing is recommended\n")
    assert "and 40 are needed" in text


@pytest.mark.parametrize(
    ("case", "content"),
    [
        ("empty", ""),
        ("no JSON", "nonsense\n"),
        ("no page", '{"time": 1, "replica": "a"}\n'),
        ("half a page", '{"time": 1, "replica": "a", "page": "# half a pa"}\n'),
        ("no matrix", '{"data": {"resultType": "matrix", "result": [{"metric": {}, "values": []}]}}'),
    ],
)
def test_an_invalid_file_is_rejected_with_a_suggestion(tmp_path: Path, case: str, content: str, messages: Messages) -> None:
    file = tmp_path / "metrics"
    file.write_text(content)
    with pytest.raises(CommandError) as error:
        read_recording(file)
    messages.check(f"recording: {case}", str(error.value).replace(str(file), "FILE"))


@pytest.mark.parametrize("schedule", ["1-8", "1-8:3,20-30:1", "1-8:9"])
def test_an_invalid_schedule_is_rejected(pages: Path, schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["tune", "--metrics", str(pages), "--schedule", schedule]) == 2
    assert "--schedule:" in capsys.readouterr().err


def test_the_operator_without_tuning_does_not_load_numpy() -> None:
    """NumPy takes 16 MiB; the operator's limit is 150."""
    code = "import sys, aerie.cli.app, aerie.controller.operator, aerie.tuning; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
