"""`aerie tune --prometheus` against a local server with the responses of a real one, and against others.

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

pytestmark = pytest.mark.slow

RECORDED: dict[str, Any] = json.loads(gzip.decompress((Path(__file__).parent / "data/prometheus-3.15.json.gz").read_bytes()))
PAGES = {pod: parse_exposition(page.encode()) for pod, page in RECORDED["pages"].items()}
PERIOD = timedelta(seconds=75)
Form = dict[str, str]
Respond = Callable[[str, Form, dict[str, str]], tuple[int, str]]
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
def serve(respond: Respond) -> Iterator[str]:
    """Serve on this machine and yield the address; `respond` gets path, form and headers, and returns status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            status, text = respond(self.path, form, dict(self.headers.items()))
            self.send_response(status)
            self.send_header("Location", "http://elsewhere.invalid/")
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has disconnected
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


def respond_as_recorded(path: str, _: Form, __: dict[str, str]) -> tuple[int, str]:
    """Respond as the real server did."""
    return 200, json.dumps(RECORDED[path.removeprefix("/api/v1/")])


def respond_with_range(*responses: dict[str, Any]) -> Respond:
    """Respond as the real server did, but to range queries with these responses, merged."""

    def respond(path: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        return (
            (200, merge_responses(*responses).decode())
            if path.endswith("query_range")
            else respond_as_recorded(path, form, headers)
        )

    return respond


def read_error(server: PrometheusQueryConfig, since: timedelta = PERIOD) -> str:
    with pytest.raises(CommandError) as failure:
        list(read_prometheus(server, since, RECORDED["end"]).scrapes)
    return str(failure.value)


# ------------------------------------------------------------------------------------------------------------------- what it says
def test_a_real_response_equals_the_recorded_expositions() -> None:
    requests: list[tuple[str, Form]] = []

    def respond(path: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        requests.append((path, form))
        return respond_as_recorded(path, form, headers)

    with serve(respond) as url:
        recorded = read_prometheus(PrometheusQueryConfig(url, "chat-.*", "default", {"job": "engines"}), PERIOD, RECORDED["end"])
        scrapes = list(recorded.scrapes)
    assert not recorded.skip_counts
    assert [timestamp for timestamp, _, _ in scrapes] == sorted(timestamp for timestamp, _, _ in scrapes)
    newest: dict[str, Sample] = {pod: sample for _, pod, sample in scrapes}
    assert newest == PAGES
    first = next(sample for _, pod, sample in scrapes if pod == "chat-a")
    assert 0 < first.counters.generation_tokens < newest["chat-a"].counters.generation_tokens
    (pods_path, pods_form), (range_path, range_form) = requests
    assert (pods_path, range_path) == ("/api/v1/query", "/api/v1/query_range")
    assert pods_form["query"] == (
        'group by (pod) (last_over_time({__name__=~"vllm:generation_tokens_total",pod=~"chat-.*",namespace="default",'
        'job="engines"}[75000ms]))'
    )
    assert range_form["query"].endswith('pod=~"chat-.*",namespace="default",job="engines"}')
    assert float(range_form["end"]) - float(range_form["start"]) == pytest.approx(75)
    assert float(range_form["end"]) == pytest.approx(RECORDED["end"], abs=0.001)
    assert range_form["step"] == "15"


def test_a_file_with_the_same_response_gives_the_same_scrapes(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(RECORDED["query_range"]))
    with serve(respond_as_recorded) as url:
        assert read_recording(file).scrapes == list(
            read_prometheus(PrometheusQueryConfig(url, "chat-.*"), PERIOD, RECORDED["end"]).scrapes
        )


def test_the_command_reports_insufficient_data(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(respond_as_recorded) as url:
        assert run_command_line(["tune", "--prometheus", url, "--pods", "chat-.*", "--since", "75s"]) == 1
    assert capsys.readouterr().out.startswith("INSUFFICIENT DATA: nothing is recommended\n")


def test_a_long_period_is_queried_in_adjacent_parts() -> None:
    parts: list[tuple[float, float, float]] = []

    def respond(path: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        if path.endswith("query_range"):
            parts.append((float(form["start"]), float(form["end"]), float(form["step"])))
        return respond_as_recorded(path, form, headers)

    with serve(respond) as url:
        list(read_prometheus(PrometheusQueryConfig(url, "chat-.*"), timedelta(hours=24), RECORDED["end"]).scrapes)
    assert parts[0][0] == pytest.approx(RECORDED["end"] - 86400, abs=0.01)
    assert parts[-1][1] == pytest.approx(RECORDED["end"], abs=0.01)
    assert {step for _, _, step in parts} == {30}
    assert all(2 * (1 + (end - start) / 30) <= prometheus.MAX_POINTS_PER_QUERY + 0.1 for start, end, _ in parts)
    for (_, end, _), (start, _, _) in itertools.pairwise(parts):
        assert start - end == pytest.approx(30, abs=0.01)


def test_a_pod_that_two_jobs_scrape_is_excluded_and_reported() -> None:
    page = RECORDED["pages"]["chat-a"]
    responses = [build_range_response({"chat-a": [(RECORDED["end"], page)]}, job=job) for job in ("a", "b")]
    with serve(respond_with_range(*responses)) as url:
        assert read_error(PrometheusQueryConfig(url, "chat-.*")).endswith(
            "of pod=~chat-.*: chat-a: is scraped more than once (by job)"
        )


def test_successive_pods_of_one_name_are_separate() -> None:
    page = RECORDED["pages"]["chat-a"]
    responses = [
        build_range_response({"chat-a": [(time, page)]}, instance=instance)
        for time, instance in ((1.0, "10.0.0.1"), (16.0, "10.0.0.2"))
    ]
    with serve(respond_with_range(*responses)) as url:
        scrapes = list(read_prometheus(PrometheusQueryConfig(url, "chat-.*"), PERIOD, RECORDED["end"]).scrapes)
    assert scrapes == [(time, "chat-a", PAGES["chat-a"]) for time in (1.0, 16.0)]


def test_options_override_the_manifests_pods_and_labels(tmp_path: Path) -> None:
    file, token, requests = tmp_path / "chat.yaml", tmp_path / "token", []
    file.write_text(MANIFEST)
    token.write_text("secret\n")

    def respond(_: str, form: Form, headers: dict[str, str]) -> tuple[int, str]:
        requests.append((form["query"], headers.get("Authorization")))
        return 500, ""

    with serve(respond) as url:
        assert run_command_line(["tune", "-f", str(file), "--prometheus", url]) == 2
        options = ["--namespace", "other", "--label", "job=b", "--label", "cluster=west", "--prometheus-token", str(token)]
        assert (
            run_command_line(["tune", "-f", str(file), "--prometheus", url, *options, "--pod-label", "pod", "--pods", "c.*"]) == 2
        )
    assert [re.sub(r'.*?total",', "", query).partition("}")[0] for query, _ in requests] == [
        'kube_pod=~"chat-.*",ns="models",job="a"',
        'pod=~"c.*",ns="other",job="b",cluster="west"',
    ]
    assert [header for _, header in requests] == [None, "Bearer secret"]


# --------------------------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(
    ("case", "status", "body"),
    [
        ("no token", 401, ""),
        ("no regular expression", 400, RECORDED["bad"]),
        ("too many samples", 422, '{"error": "query processing would load too many samples"}'),
        ("redirected", 302, ""),
        ("not found", 404, "404 page not found"),
        ("unavailable", 503, ""),
        ("HTML", 200, "<html>"),
        ("another query's response", 200, json.dumps(RECORDED["query_range"])),
        ("no pods", 200, '{"status": "success", "data": {"resultType": "vector", "result": []}}'),
        ("no values", 200, '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}}]}}'),
    ],
)
def test_an_unusable_server_gives_an_error_with_a_suggestion(case: str, status: int, body: str, messages: Messages) -> None:
    with serve(lambda *_: (status, body)) as url:
        message = read_error(PrometheusQueryConfig(url, "chat-.*", "default"))
    assert message.startswith(f"--prometheus {url} ")
    messages.check(f"server: {case}", re.sub(r"\d{4}-[-:T0-9]+Z", "TIME", message.replace(url, "URL")))


def test_limits_of_pods_size_and_time(monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    many = [{"metric": {"pod": f"chat-{number}"}, "value": [0, "1"]} for number in range(prometheus.MAX_PODS + 1)]
    body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": many}})
    with serve(lambda *_: (200, body)) as url:
        messages.check("too many pods", read_error(PrometheusQueryConfig(url, "chat-.*")))
        monkeypatch.setattr(prometheus, "MAX_RESPONSE_BYTES", 1000)
        messages.check("too large a response", read_error(PrometheusQueryConfig(url, "chat-.*")).replace(url, "URL"))
    assert "cannot be reached" in read_error(PrometheusQueryConfig(url, "chat-.*"))
    released = threading.Event()

    def silent(*_: Any) -> tuple[int, str]:
        released.wait()
        return 200, ""

    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT_SECONDS", 0.1)
    with serve(silent) as url:
        try:
            messages.check("no response in time", read_error(PrometheusQueryConfig(url, "chat-.*")).replace(url, "URL"))
        finally:
            released.set()


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
def test_an_invalid_command_line_is_rejected(
    case: str, options: list[str], messages: Messages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["tune", *options]) == 2
    messages.check(f"options: {case}", capsys.readouterr().err)
