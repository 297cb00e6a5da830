"""`aerie tune offline --prometheus` against a local server that says what a real one said, and against others.

data/prometheus-3.15.json.gz: what Prometheus 3.15 answered about two simulated engines that it scraped each 5 s (chat-a drafts,
chat-b does not), to the two queries and to two faulty ones, and the engines' own pages at the end of the period, with its time.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from aerie.cli.app import run_command_line
from aerie.cli.console import CommandError
from aerie.cli.inputs import prometheus
from aerie.cli.inputs.prometheus import PrometheusQueryConfig, read_prometheus
from aerie.cli.inputs.recorded import read_recording
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Sample
from aerie_lab.testing.prometheus import build_range_response, merge_responses
from tests.golden import Messages

TOLD: dict[str, Any] = json.loads(gzip.decompress((Path(__file__).parent / "data/prometheus-3.15.json.gz").read_bytes()))
PAGES = {pod: parse_exposition(page.encode()) for pod, page in TOLD["pages"].items()}
PERIOD = timedelta(seconds=75)
Form = dict[str, str]
Say = Callable[[str, Form, dict[str, str]], tuple[int, str]]
MANIFEST = """
apiVersion: aerie.dev/v1alpha1
kind: SpeculativeDeployment
metadata: {name: chat, namespace: models}
spec:
  model: {source: {persistentVolumeClaim: {claimName: models}}}
  engine: {image: "vllm/vllm-openai:v0.33.0"}
  metrics: {source: {prometheus: {address: "http://in-cluster", podLabel: kube_pod, namespaceLabel: ns, matchLabels: {job: a}}}}
"""


@contextlib.contextmanager
def served(say: Say) -> Iterator[str]:
    """The address of a server on this machine; `say` gets path, form and headers and tells status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            status, text = say(self.path, form, dict(self.headers.items()))
            self.send_response(status)
            self.send_header("Location", "http://elsewhere.invalid/")
            self.end_headers()
            with contextlib.suppress(OSError):  # who asked has gone
                self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def real(path: str, _: Form, __: dict[str, str]) -> tuple[int, str]:
    """What the real one said."""
    return 200, json.dumps(TOLD[path.removeprefix("/api/v1/")])


def ranged(*answers: dict[str, Any]) -> Say:
    """What the real one said, but of the period these answers, as one."""

    def say(path: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        return (200, merge_responses(*answers).decode()) if path.endswith("query_range") else real(path, form, headers)

    return say


def fails(server: PrometheusQueryConfig, since: timedelta = PERIOD) -> str:
    with pytest.raises(CommandError) as failure:
        list(read_prometheus(server, since, TOLD["end"]).scrapes)
    return str(failure.value)


# ------------------------------------------------------------------------------------------------------------------- what it says
def test_a_real_answer_gives_what_the_pages_gave() -> None:
    asked: list[tuple[str, Form]] = []

    def say(path: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        asked.append((path, form))
        return real(path, form, headers)

    with served(say) as url:
        recorded = read_prometheus(PrometheusQueryConfig(url, "chat-.*", "default", {"job": "engines"}), PERIOD, TOLD["end"])
        scrapes = list(recorded.scrapes)
    assert not recorded.skip_counts
    assert [at for at, _, _ in scrapes] == sorted(at for at, _, _ in scrapes)
    newest: dict[str, Sample] = {pod: sample for _, pod, sample in scrapes}
    assert newest == PAGES
    first = next(sample for _, pod, sample in scrapes if pod == "chat-a")
    assert 0 < first.counters.generation_tokens < newest["chat-a"].counters.generation_tokens
    (pods, of_pods), (steps, of_steps) = asked
    assert (pods, steps) == ("/api/v1/query", "/api/v1/query_range")
    assert of_pods["query"] == (
        'group by (pod) (last_over_time({__name__=~"vllm:generation_tokens_total",pod=~"chat-.*",namespace="default",'
        'job="engines"}[75000ms]))'
    )
    assert of_steps["query"].endswith('pod=~"chat-.*",namespace="default",job="engines"}')
    assert float(of_steps["end"]) - float(of_steps["start"]) == pytest.approx(75)
    assert float(of_steps["end"]) == pytest.approx(TOLD["end"], abs=0.001)
    assert of_steps["step"] == "15"


def test_a_file_with_the_same_answer_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(TOLD["query_range"]))
    with served(real) as url:
        assert read_recording(file).scrapes == list(
            read_prometheus(PrometheusQueryConfig(url, "chat-.*"), PERIOD, TOLD["end"]).scrapes
        )


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with served(real) as url:
        assert run_command_line(["tune", "offline", "--prometheus", url, "--pods", "chat-.*", "--since", "75s"]) == 1
    assert capsys.readouterr().out.startswith("INSUFFICIENT DATA: nothing is recommended\n")


def test_a_long_period_is_asked_for_in_pieces_that_are_its_whole() -> None:
    pieces: list[tuple[float, float, float]] = []

    def say(path: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        if path.endswith("query_range"):
            pieces.append((float(form["start"]), float(form["end"]), float(form["step"])))
        return real(path, form, headers)

    with served(say) as url:
        list(read_prometheus(PrometheusQueryConfig(url, "chat-.*"), timedelta(hours=24), TOLD["end"]).scrapes)
    assert pieces[0][0] == pytest.approx(TOLD["end"] - 86400, abs=0.01)
    assert pieces[-1][1] == pytest.approx(TOLD["end"], abs=0.01)
    assert {step for _, _, step in pieces} == {30}
    assert all(2 * (1 + (end - start) / 30) <= prometheus.MAX_POINTS_PER_QUERY + 0.1 for start, end, _ in pieces)
    for (_, end, _), (start, _, _) in itertools.pairwise(pieces):
        assert start - end == pytest.approx(30, abs=0.01)


def test_a_pod_that_two_jobs_scrape_counts_for_nothing_and_is_named() -> None:
    page = TOLD["pages"]["chat-a"]
    twice = [build_range_response({"chat-a": [(TOLD["end"], page)]}, job=job) for job in ("a", "b")]
    with served(ranged(*twice)) as url:
        assert fails(PrometheusQueryConfig(url, "chat-.*")).endswith(
            "of pod=~chat-.*: chat-a: is scraped more than once (by job)"
        )


def test_pods_that_came_one_after_the_other_under_one_name_are_not_mixed_up() -> None:
    page = TOLD["pages"]["chat-a"]
    after = [build_range_response({"chat-a": [(at, page)]}, instance=of) for at, of in ((1.0, "10.0.0.1"), (16.0, "10.0.0.2"))]
    with served(ranged(*after)) as url:
        scrapes = list(read_prometheus(PrometheusQueryConfig(url, "chat-.*"), PERIOD, TOLD["end"]).scrapes)
    assert scrapes == [(at, "chat-a", PAGES["chat-a"]) for at in (1.0, 16.0)]


def test_a_manifest_names_pods_namespace_and_labels_and_options_come_before_it(tmp_path: Path) -> None:
    file, token, asked = tmp_path / "chat.yaml", tmp_path / "token", []
    file.write_text(MANIFEST)
    token.write_text("secret\n")

    def say(_: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        asked.append((form["query"], headers.get("Authorization")))
        return 500, ""

    with served(say) as url:
        assert run_command_line(["tune", "offline", "-f", str(file), "--prometheus", url]) == 2
        options = ["--namespace", "other", "--label", "job=b", "--label", "cluster=west", "--prometheus-token", str(token)]
        assert (
            run_command_line(
                ["tune", "offline", "-f", str(file), "--prometheus", url, *options, "--pod-label", "pod", "--pods", "c.*"]
            )
            == 2
        )
    assert [re.sub(r'.*?total",', "", query).partition("}")[0] for query, _ in asked] == [
        'kube_pod=~"chat-.*",ns="models",job="a"',
        'pod=~"c.*",ns="other",job="b",cluster="west"',
    ]
    assert [header for _, header in asked] == [None, "Bearer secret"]


# --------------------------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(
    ("case", "status", "body"),
    [
        ("no token", 401, ""),
        ("no regular expression", 400, TOLD["bad"]),
        ("too many samples", 422, '{"error": "query processing would load too many samples"}'),
        ("redirected", 302, ""),
        ("not found", 404, "404 page not found"),
        ("unavailable", 503, ""),
        ("HTML", 200, "<html>"),
        ("another query's response", 200, json.dumps(TOLD["query_range"])),
        ("no pods", 200, '{"status": "success", "data": {"resultType": "vector", "result": []}}'),
        ("no values", 200, '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}}]}}'),
    ],
)
def test_a_server_of_no_use_is_told_with_the_way_out(case: str, status: int, body: str, messages: Messages) -> None:
    with served(lambda *_: (status, body)) as url:
        told = fails(PrometheusQueryConfig(url, "chat-.*", "default"))
    assert told.startswith(f"--prometheus {url} ")
    messages.check(f"server: {case}", re.sub(r"\d{4}-[-:T0-9]+Z", "TIME", told.replace(url, "URL")))


def test_limits(monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    many = [{"metric": {"pod": f"chat-{number}"}, "value": [0, "1"]} for number in range(prometheus.MAX_PODS + 1)]
    body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": many}})
    with served(lambda *_: (200, body)) as url:
        messages.check("too many pods", fails(PrometheusQueryConfig(url, "chat-.*")))
        monkeypatch.setattr(prometheus, "MAX_RESPONSE_BYTES", 1000)
        messages.check("too large a response", fails(PrometheusQueryConfig(url, "chat-.*")).replace(url, "URL"))
    assert "cannot be reached" in fails(PrometheusQueryConfig(url, "chat-.*"))
    waits = threading.Event()

    def silent(*_: Any) -> tuple[int, str]:
        waits.wait()
        return 200, ""

    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT_SECONDS", 0.1)
    with served(silent) as url:
        try:
            messages.check("no response in time", fails(PrometheusQueryConfig(url, "chat-.*")).replace(url, "URL"))
        finally:
            waits.set()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("no source", []),
        ("two sources", ["--metrics", "a", "--prometheus", "http://b"]),
        ("no pods", ["--prometheus", "http://b"]),
        ("no URL", ["--prometheus", "b:9090", "--pods", "a"]),
        ("pods are no regular expression", ["--prometheus", "http://b", "--pods", "("]),
        ("no label", ["--prometheus", "http://b", "--pods", "a", "--label", "job"]),
        ("no duration", ["--prometheus", "http://b", "--pods", "a", "--since", "1d"]),
        ("too long", ["--prometheus", "http://b", "--pods", "a", "--since", "25h"]),
        ("unreadable token", ["--prometheus", "http://b", "--pods", "a", "--prometheus-token", "/nowhere"]),
        ("unreadable CA", ["--prometheus", "https://b", "--pods", "a", "--prometheus-ca", "/nowhere"]),
    ],
)
def test_a_command_line_that_asks_for_nothing_is_refused(
    case: str, options: list[str], messages: Messages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["tune", "offline", *options]) == 2
    messages.check(f"options: {case}", capsys.readouterr().err)
