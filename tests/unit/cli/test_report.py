"""`kubectl aerie report`: what it shows of real rollouts, that it escapes all text, and that it is the same each time."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from aerie.cli.app import run_command_line
from aerie.cli.console import CommandError
from aerie.cli.report import charts, markdown, page
from aerie.cli.report.contents import Contents, build_contents
from aerie.cli.report.verdict import describe_decision_maker, describe_verdict
from aerie.manifests.rollout_history_config_map import pack_record, unpack_record
from tests.golden import Messages
from tests.unit.cli.report_documents import COMPARED, CONFIG_MAP, ENDED, Documents, documents

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J $x_1$ | `code` @team https://evil.example \"'&"


pytestmark = pytest.mark.slow
DOCS_PICTURE = Path(__file__).parents[3] / "docs" / "pictures" / "report.svg"


def build(name: str, **arguments: Any) -> Contents:
    source = documents(name)
    return build_contents(source.resource, source.config_map, source.events, **arguments)


@cache
def rendered(name: str) -> str:
    return page.render_page(build(name))


class Skeleton(HTMLParser):
    """The elements of a page, without the inside of pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.depth = 0
        self.in_picture = False
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if not self.in_picture and tag not in ("tr", "td", "th", "li", "p", "span", "code", "meta"):
            names = "".join(f" {name}={value}" for name, value in attrs if name in ("class", "id", "lang"))
            self.lines.append(f"{'  ' * self.depth}{tag}{names}")
            self.depth += 1
        self.in_picture = self.in_picture or tag == "svg"
        self.data = ""

    def handle_data(self, data: str) -> None:
        self.data += data

    def handle_endtag(self, tag: str) -> None:
        self.in_picture = self.in_picture and tag != "svg"
        if not self.in_picture and tag not in ("tr", "td", "th", "li", "p", "span", "code"):
            self.depth -= 1
            if tag in ("h1", "h2"):
                self.lines[-1] += f": {self.data}"


@pytest.mark.parametrize("name", COMPARED)
def test_reports_of_real_rollouts(name: str, messages: Messages) -> None:
    contents = build(name)
    messages.check(f"{name}, Markdown", markdown.render_markdown(contents, "report.svg"))
    messages.check(f"{name}, skeleton of the page", "\n".join(Skeleton(rendered(name)).lines))


@pytest.mark.parametrize("name", COMPARED)
def test_page_loads_nothing_and_is_small(name: str) -> None:
    text = rendered(name)
    skeleton = Skeleton(text)
    assert len(text.encode()) < 400 * 1024
    assert not skeleton.tags & {"img", "link", "iframe", "object", "form", "base"}
    assert text.count("<script") == 1, "the numbers, which no browser runs"
    assert not [value for name, value in skeleton.attributes if name in ("src", "href") or name.startswith("on")]
    references = [value or "" for name, value in skeleton.attributes if name == "xlink:href"]
    assert all(reference.startswith("#") for reference in references)
    assert "url(http" not in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    identifiers = [value for name, value in skeleton.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers)), "pictures do not share names"
    assert set(re.findall(r"url\(#([^)]+)\)", text)) | {item[1:] for item in references} <= set(filter(None, identifiers))


@pytest.mark.parametrize("name", COMPARED)
def test_pictures_and_tables_are_described(name: str) -> None:
    text = rendered(name)
    assert text.count("<svg") == text.count('role="img" aria-labelledby') == text.count("<desc") > 0
    assert text.count("<table") == text.count("<caption") > 0
    assert text.count("<th ") == text.count('<th scope="')


def test_the_same_documents_give_the_same_report() -> None:
    assert page.render_page(build("promoted")) == rendered("promoted")
    pictures = [charts.draw_decision(build("promoted")) for _ in range(2)]
    assert pictures[0] == pictures[1]


def test_the_decision_comes_first_and_numbers_are_those_of_the_status() -> None:
    source = documents("promoted")
    text = rendered("promoted")
    headings = re.findall(r"<h[12]>(.*?)</h[12]>", text)
    assert headings[0].startswith("Promoted: models/eagle31 against models/eagle3, tokens per step")
    assert headings[1:5] == ["Decision", "How the decision came about", "Acceptance by position", "Latencies"]
    outcome = source.resource["status"]["rolloutHistory"][0]
    data = json.loads(re.findall(r'id="aerie-report">(.*?)</script>', text, re.DOTALL)[0])
    expected = {item["metric"]: item.get("estimate") for item in outcome["comparisons"]}
    assert {item["metric"]: item["estimate"] for item in data["comparisons"]} == expected
    assert data["result"] == "Promoted"
    blocks = [item for item in data["observations"] if item["phase"] == "Analyzing" and item["samples"]]
    assert [item["samples"] for item in blocks] == list(range(1, len(blocks) + 1))


def test_bounds_narrow_to_the_decision() -> None:
    for name in ("promoted", "rolled-back", "by-turns"):
        contents = build(name)
        observations = [item for item in contents.observations if item.design == contents.design]
        bounds = [item.comparisons.get("TokensPerStep", (None, None, None)) for item in observations]
        widths = [upper - lower for _, lower, upper in bounds if lower is not None and upper is not None]
        assert len(widths) > 3
        assert widths[-1] < widths[0]
        chart = charts.draw_decision(build(name))
        assert chart is not None
        assert "bounds" in chart.description


def test_two_designs_of_one_rollout_are_named() -> None:
    contents = build("by-turns")
    assert list(dict.fromkeys(item.design for item in contents.observations if item.design)) == ["EqualRequests", "ByTurns"]
    text = page.render_page(contents)
    assert "shadow evaluation: equal requests for both drafters, then both drafters by turns in the same pods" in text


@pytest.mark.parametrize("name", ENDED)
def test_without_records_the_resource_says_what_it_can(name: str) -> None:
    source = documents(name)
    contents = build_contents(source.resource, None, None)
    text = page.render_page(contents)
    assert "the operator has no record of this rollout" in text
    assert describe_verdict(contents) == describe_verdict(build(name))
    assert "<svg" not in text
    assert "<h2>Decision</h2>" in text


def test_a_rollout_without_a_comparison_is_reported_as_such() -> None:
    text = page.render_page(build("first-revision"))
    assert "were not compared" in text
    with pytest.raises(CommandError, match="has had no rollout yet"):
        build("no-rollout")


def test_a_revision_selects_its_rollout() -> None:
    history = documents("promoted").resource["status"]["rolloutHistory"]
    first = build("promoted", revision=history[-1]["revision"][:6])
    assert (first.revision, first.observations) == (history[-1]["revision"], ())
    with pytest.raises(CommandError, match=f"Known revisions: {history[0]['revision']}"):
        build("promoted", revision="unknown")


def test_who_decided_and_why() -> None:
    source = documents("promoted")
    assert describe_decision_maker(build("promoted")).startswith("Decided by the operator")
    source.resource["status"]["rolloutHistory"][0]["requestedBy"] = {"user": "dana", "action": "promote", "reason": "tested."}
    contents = build_contents(source.resource, source.config_map, None)
    assert describe_decision_maker(contents) == "Decided by dana (promote). Reason: tested."


def test_requirements_are_shown_where_the_status_has_them() -> None:
    source = documents("promoted")
    comparison = source.resource["status"]["rolloutHistory"][0]["comparisons"][0]
    assert '<th scope="col">Met</th>' in rendered("promoted")
    comparison |= {"requirement": "above -2.0 %", "met": False}
    contents = build_contents(source.resource, source.config_map, None)
    assert "✗ no" in page.render_page(contents)
    assert "| above -2.0 % | ✗ no |" in markdown.render_markdown(contents)
    assert "… not yet |" in markdown.render_markdown(build("in-progress"))
    for item in source.resource["status"]["rolloutHistory"][0]["comparisons"]:  # as an earlier release wrote it
        item.pop("requirement", None)
        item.pop("met", None)
    assert '<th scope="col">Met</th>' not in page.render_page(build_contents(source.resource, source.config_map, None))


def test_trials_show_predicted_and_measured_gains() -> None:
    source = documents("promoted")
    trial: dict[str, Any] = {
        "result": "Promoted",
        "purpose": "Improve",
        "completionTime": "2026-01-01T01:00:00Z",
        "revision": "a",
    }
    trial |= {"fromSetting": {"mode": "Static", "numSpeculativeTokens": 3}, "toSetting": {"mode": "Off"}}
    gains = {"predicted": {"estimate": 0.05, "lower": 0.01, "upper": 0.09}, "measured": {"estimate": -0.02}}
    source.resource["status"]["speculation"] = {"trials": [trial | gains, trial]}
    text = page.render_page(build_contents(source.resource, source.config_map, None))
    assert "K 3 to off: predicted +5.0 %, measured -2.0 %" in text
    assert "+5.0 % (+1.0 % to +9.0 %)" in text


def test_a_thousand_blocks_make_a_page_of_bounded_size() -> None:
    contents = build("long")
    assert 150 < len(contents.observations) <= 200
    assert contents.comparisons[0].samples == 1000
    assert len(page.render_page(contents).encode()) < 400 * 1024


# -- text of the cluster
def poison(value: Any) -> Any:
    """Return a document in which every text that is neither a time nor a word of the API is hostile."""
    if isinstance(value, dict):
        fixed = ("revision", "result", "metric", "phase", "type", "startTime", "completionTime", "eventTime", "design", "uid")
        return {name: item if name in fixed else poison(item) for name, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return f"{value} {HOSTILE}" if isinstance(value, str) else value


def hostile_documents(name: str) -> Documents:
    source = documents(name)
    status = poison(source.resource["status"])
    packed = source.config_map["binaryData"] if source.config_map is not None else {}
    records = {key: pack_record({**poison(unpack_record(text)), "startTime": record_start(text)}) for key, text in packed.items()}
    resource = {**source.resource, "status": status, "spec": poison(source.resource["spec"])}
    for outcome in status.get("rolloutHistory", []):
        outcome["requestedBy"] = {"user": HOSTILE, "reason": HOSTILE, "action": HOSTILE}
    return Documents(resource, {"binaryData": records}, poison(source.events))


def record_start(text: str) -> str:
    record = unpack_record(text)
    assert record is not None
    return str(record["startTime"])


@pytest.mark.parametrize("name", ["promoted", "by-turns", "in-progress"])
def test_text_of_the_cluster_stays_text(name: str) -> None:
    source = hostile_documents(name)
    contents = build_contents(source.resource, source.config_map, source.events, notes=[HOSTILE])
    text = page.render_page(contents)
    skeleton = Skeleton(text)
    assert "onerror" in text
    assert "<img" not in text
    assert "img" not in skeleton.tags
    assert text.count("<script") == text.count("</script") == 1
    assert "\x1b" not in text
    assert not [key for key, _ in skeleton.attributes if key.startswith("on")]
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)  # noqa: S314 - our own
    written = markdown.render_markdown(contents)
    assert "<img" not in re.sub(r"\\<", "", written)
    assert "@team" not in written
    assert "https://" not in written
    separators = [len(re.findall(r"(?<!\\)\|", line)) for line in written.splitlines() if line.startswith("|")]
    assert set(separators) == {7 if "| Required | Met |" in written else 5}


@pytest.mark.parametrize(
    "record",
    [
        {"format": 1},
        {"format": 1, "observations": [{"seconds": "x"}, {"seconds": 1, "comparisons": [], "arms": 3}], "phases": [{}]},
        {"format": 1, "observations": [{"seconds": 1e400, "comparisons": {"TokensPerStep": ["a", None]}}]},
    ],
)
def test_a_record_of_another_form_is_read_as_far_as_it_goes(record: dict[str, Any]) -> None:
    source = documents("promoted")
    assert source.config_map is not None
    (key,) = source.config_map["binaryData"]
    original = unpack_record(source.config_map["binaryData"][key]) or {}
    record = {**record, "revision": original["revision"], "startTime": original["startTime"]}
    packed = json.dumps(record).replace("Infinity", "null")
    contents = build_contents(source.resource, {"binaryData": {key: pack_record(json.loads(packed))}}, None)
    assert page.render_page(contents).startswith("<!doctype html>")


# -- the command
@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that has the documents of a promoted rollout; `forbidden` makes it refuse all but the resource."""
    script = tmp_path / "kubectl"
    script.write_text(
        "#!/bin/sh\nfor word; do case $word in\n"
        '  speculativedeployments.aerie.dev) cat "$KUBECTL_FOLDER/resource.json"; exit;;\n'
        '  configmap) [ -f "$KUBECTL_FOLDER/forbidden" ] && { echo "Error from server (Forbidden): no" >&2; exit 1; }\n'
        '    cat "$KUBECTL_FOLDER/configmap.json"; exit;;\n'
        '  events) [ -f "$KUBECTL_FOLDER/forbidden" ] && { echo "Error from server (Forbidden): no" >&2; exit 1; }\n'
        '    cat "$KUBECTL_FOLDER/events.json"; exit;;\nesac; done\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    source = documents("promoted")
    (tmp_path / "resource.json").write_text(json.dumps(source.resource))
    (tmp_path / "configmap.json").write_text(json.dumps(source.config_map))
    (tmp_path / "events.json").write_text(json.dumps({"items": source.events}))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(tmp_path))
    return tmp_path


def test_each_format_is_written(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["report", "chat", "-o", str(kubectl / "a.html")]) == 0
    assert (kubectl / "a.html").read_text() == rendered("promoted")
    assert run_command_line(["report", "chat", "-o", str(kubectl / "b.md")]) == 0
    assert "](b.svg)" in (kubectl / "b.md").read_text()
    picture = (kubectl / "b.svg").read_text()
    assert "prefers-color-scheme" in ElementTree.fromstring(picture).find("{http://www.w3.org/2000/svg}style").text  # type: ignore[union-attr, operator]  # noqa: S314
    assert run_command_line(["report", "chat", "-o", str(kubectl / "c.svg")]) == 0
    assert (kubectl / "c.svg").read_text() == picture
    capsys.readouterr()
    assert run_command_line(["report", "chat", "-o", "-", "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("### Promoted")


def test_without_rights_for_more_the_report_says_what_it_lacks(kubectl: Path) -> None:
    (kubectl / "forbidden").touch()
    assert run_command_line(["report", "chat", "-o", str(kubectl / "a.html")]) == 0
    text = (kubectl / "a.html").read_text()
    assert "records of rollouts cannot be read" in text
    assert "Events cannot be read" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "report.pdf"], "end it with .html, .md or .svg"),
        (["-o", "/nowhere/report.html"], "cannot be written"),
        (["-o", "-", "--revision", "zzz"], "Known revisions"),
    ],
)
def test_wrong_calls_say_what_to_do(
    kubectl: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kubectl.exists()
    assert run_command_line(["report", "chat", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_curves_there_is_no_picture(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kubectl / "configmap.json").write_text("")
    assert run_command_line(["report", "chat", "-o", "-", "--format", "svg"]) == 2
    assert "--format html" in capsys.readouterr().err
    assert run_command_line(["report", "chat", "-o", str(kubectl / "b.md")]) == 0
    assert not (kubectl / "b.svg").exists()


def test_without_matplotlib_the_error_names_the_extra(kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command_line(["report", "chat", "-o", str(kubectl / "a.html")]) == 2
    assert "aerie-operator[report]" in capsys.readouterr().err
    assert run_command_line(["report", "chat", "-o", "-", "--format", "md"]) == 0, "Markdown alone needs no picture"


def test_the_picture_of_the_docs_is_drawn_by_this_release() -> None:
    chart = charts.draw_decision(build("by-turns"))
    assert chart is not None
    assert DOCS_PICTURE.read_text() == charts.with_theme(chart.svg)


def test_the_record_is_where_the_command_looks() -> None:
    assert documents("promoted").config_map is not None
    assert CONFIG_MAP[1] == "chat-aerie-rollouts"
