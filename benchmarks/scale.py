"""Cost of the operator with a thousand resources: a lab whose engines are processless pods, the operator in its own process.

The operator has brought every resource to its steady state: Job and ConfigMap of the preflight (whose image passes immediately),
Deployment, Service and budget, and the pods of both.

| key                       | what is measured                                                                                  |
|---------------------------|---------------------------------------------------------------------------------------------------|
| resources, children       | SpeculativeDeployments, and objects that the operator has made for them; pods come on top         |
| first_pass_s              | from the start of the process until each resource was reconciled once                             |
| rss_mib                   | most resident memory of the process, from its start to the end of the steady state                |
| steady_writes             | its writes in ten minutes; all resources are annotated each minute, and lists continue as usual;  |
|                           | renewals of the Lease aside                                                                       |
| noop_reconciles_per_s     | passes that find nothing to do, per second of the process's CPU time, the events that cause them  |
|                           | included: resources are annotated, 3,000 times in all                                             |
| event_to_decision_p99_ms  | from a change of a budget by another client until it is reverted, which takes longer             |
| loop_lag_p99_ms           | how late the event loop runs a timer, over the whole life of the process (its own histogram)      |
| failover_s                | from kill -9 of the leader to the first write of the second operator; the longest of three        |
| cost_ms_100, cost_ms_1000 | CPU time of one no-op reconcile,         its event included, with 100 and with 1,000 resources    |
| cost_ratio_1000_to_100    | the second over the first                                                                         |
| large_pods                | pods of one resource more, besides five of 200; the operator reads the pages of all, 3,000        |
| large_cpu_pct, _rollout_s | CPU time in percent of a core, and seconds, while all pods of the large resource are replaced     |
| large_loop_lag_p99_ms     | how late the event loop runs a timer meanwhile; large_rss_mib: most resident memory until then    |
| hostile_*                 | the same over ten minutes with 20 hostile pods (one of each form) among 500 of the five, all five |
|                           | with a rollout in progress; hostile_rss_mib is that of a process of its own                       |
| lease_lost                | whether one of these operators lost its lease                                                     |
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.kube.client import KubeClient, resource_path
from aerie_lab.node.support import PROCESSLESS_ANNOTATION
from aerie_lab.testing import wait_until
from benchmarks._scale_fleets import Fleets
from benchmarks._scale_operator import IMAGE, Operator, quantile

NAMESPACES = [f"scale-{number}" for number in range(10)]
SMALL, LARGE = 100, 1000
STEADY_S = 600.0
ANNOTATE_EVERY_S = 60.0
PASSES = 3000
CHANGES = 300
KILLS = 3
DEFINITION = Path(__file__).resolve().parent.parent / "crds" / "aerie.dev_speculativedeployments.yaml"
API = "aerie.dev/v1alpha1"
CHILDREN = {
    "deployments": "apps/v1",
    "services": "v1",
    "poddisruptionbudgets": "policy/v1",
    "jobs": "batch/v1",
    "configmaps": "v1",
}
# What the preflight Job's image does in this lab.
TABLE = """
[[image]]
repository = "bench.example/preflight"
entrypoint = ["/bin/sh", "-c", "printf '{\\"passed\\": true, \\"summary\\": \\"passed\\"}' > /dev/termination-log"]
"""


def measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder, small_lab(Path(folder)) as lab:
        log = Path(folder) / "operator.log"
        try:
            scale = Scale(lab, log)
            return scale.measure() | Fleets(lab, Path(folder), log, scale.report_progress).measure()
        except BaseException:
            print(log.read_text(errors="replace")[-5000:] if log.exists() else "")
            raise


@contextmanager
def small_lab(folder: Path, name: str = "scale") -> Iterator[Lab]:
    """Start a lab without a gateway, whose preflight Jobs pass immediately, with the definition."""
    table = folder / "images.toml"
    table.write_text(TABLE)
    settings = LabSettings(
        name=name,
        nodes=8,
        pods_per_node=1000,
        gpus_per_node=64,
        cpus_per_node=1024,
        memory_gib_per_node=65536,
        gateway=False,
        image_tables=[str(table)],
    )
    with Lab.up(settings) as lab:
        lab.apply(yaml.safe_load(DEFINITION.read_text()))
        # It fails immediately while the definition has no conditions at all.
        wait = ("wait", "--for=condition=Established", "crd/speculativedeployments.aerie.dev", "--timeout=30s")
        wait_until(lambda: lab.kubectl(*wait), "the definition is established", timeout_seconds=60)
        yield lab


class Scale:
    """One run."""

    def __init__(self, lab: Lab, log: Path) -> None:
        self.lab, self.log, self.began = lab, log, time.monotonic()

    def report_progress(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def operator(self) -> Operator:
        return Operator(self.lab.kubeconfig, self.log)

    def measure(self) -> dict[str, float]:
        for name in NAMESPACES:
            self.lab.kubectl("create", "namespace", name)
        self.populate(0, SMALL)
        with self.operator() as operator:
            self.first_pass(operator, SMALL)
            few = self.cost(operator, SMALL)
        self.populate(SMALL, LARGE)
        with self.operator() as operator:
            first = self.first_pass(operator, LARGE)
            many = self.cost(operator, LARGE)
            reaction = self.reactions()
            writes = self.steady(operator)
            most = operator.memory("VmHWM")
            self.report_progress(f"resident: {operator.memory():.0f} MiB now, {most:.0f} MiB at most")
            lags = operator.metrics().buckets("aerie_event_loop_lag_seconds")
        failover = self.failover()
        return {
            "resources": LARGE,
            "children": sum(len(versions) for versions in self.children().values()),
            "first_pass_s": round(first, 2),
            "rss_mib": round(most, 1),
            "steady_writes": writes,
            "noop_reconciles_per_s": round(1000 / many),
            "event_to_decision_p99_ms": round(reaction),
            "loop_lag_p99_ms": round(1000 * quantile(lags, 0.99), 1),
            "failover_s": round(failover, 1),
            "cost_ms_100": round(few, 2),
            "cost_ms_1000": round(many, 2),
            "cost_ratio_1000_to_100": round(many / few, 2),
        }

    # -- the parts
    def populate(self, first: int, last: int) -> None:
        """Create resources, and let an operator bring them to their steady state."""
        self.report_progress(f"resources {first} to {last} are made")
        self.run(lambda client: run_in_parallel(range(first, last), lambda number: client.apply(resource(number))))
        with self.operator():
            last_report = 0.0
            while (ready := sum(is_ready(item) for item in self.resources())) < last:
                if time.monotonic() - last_report > 15:
                    last_report = time.monotonic()
                    self.report_progress(f"{ready} of {last} are Ready")
                time.sleep(1)
            time.sleep(5)
        self.report_progress(f"all {last} are Ready")

    def first_pass(self, operator: Operator, count: int) -> float:
        seconds = operator.until(lambda metrics: metrics.reconciles >= count, "each resource is reconciled")
        self.report_progress(f"{count} resources were reconciled {seconds:.2f} s after the start")
        time.sleep(30)  # until the lists that follow Kopf's are over
        self.report_progress(f"resident: {operator.memory():.0f} MiB")
        return seconds

    def cost(self, operator: Operator, count: int) -> float:
        """Return the milliseconds of CPU time of a no-op reconcile."""
        before, cpu = operator.metrics().reconciles, operator.cpu()
        for number in range(1, PASSES // count + 1):
            self.annotate_resources(f"cost-{number}", count)
            expected = before + number * count
            # Not scraped more often: a scrape costs as much as a reconcile.
            operator.until(lambda now, expected=expected: now.reconciles >= expected, "all are reconciled again", 600, 0.5)  # type: ignore[misc]
        reconciles, spent = operator.metrics().reconciles - before, operator.cpu() - cpu
        self.report_progress(f"{reconciles:.0f} no-op reconciles took {spent:.2f} s of CPU time with {count} resources")
        return 1000 * spent / reconciles

    def annotate_resources(self, mark: str, count: int) -> None:
        """Annotate every resource: an event for each, and nothing to do."""
        patch = {"metadata": {"annotations": {"bench.example/poke": mark}}}
        self.run(lambda client: run_in_parallel(range(count), lambda number: client.patch(resource_url(number), patch)))

    def reactions(self) -> float:
        """Measure the milliseconds of a reaction, 99th percentile."""
        chance = random.Random(1)  # noqa: S311 - no secrets
        seconds: list[float] = sorted(
            self.run(lambda client: seconds_until_repaired(client, chance.randrange(LARGE))) for _ in range(CHANGES)
        )
        self.report_progress(
            f"a changed budget is repaired after {1000 * statistics.median(seconds):.0f} ms (median of {CHANGES})"
        )
        return 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[-1]

    def steady(self, operator: Operator) -> float:
        """Count the writes of the operator in ten minutes in which nothing needs one."""
        before, children = operator.metrics(), self.children()
        statuses = {name_of(item): item["status"] for item in self.resources()}
        began = time.monotonic()
        for number in range(int(STEADY_S / ANNOTATE_EVERY_S)):
            self.annotate_resources(f"steady-{number}", LARGE)
            time.sleep(max(0.0, began + (number + 1) * ANNOTATE_EVERY_S - time.monotonic()))
            self.report_progress(
                f"steady: {operator.metrics().reconciles - before.reconciles:.0f} reconciles, {operator.memory():.0f} MiB"
            )
        after = operator.metrics()
        writes = {verb: after.writes[verb] - before.writes[verb] for verb in before.writes}
        self.report_progress(
            f"in {time.monotonic() - began:.0f} s: {after.reconciles - before.reconciles:.0f} reconciles, writes {writes}"
        )
        assert {name_of(item): item["status"] for item in self.resources()} == statuses, "a status has changed"
        for kind, versions in self.children().items():
            assert versions == children[kind], f"{kind} have changed"
        return sum(writes.values())

    def failover(self) -> float:
        """Measure the longest failover, in seconds."""
        seconds: list[float] = []
        leader = self.operator()
        try:
            leader.until(lambda now: now.reconciles >= LARGE, "it leads")
            for _ in range(KILLS):
                second = self.operator()
                dead, leader = leader, second  # whatever happens from here on, `second` is what is left to be ended
                try:
                    second.until(lambda _: True, "it stands by")
                    time.sleep(10)
                finally:
                    dead.end(signal.SIGKILL)
                seconds.append(self.run(lambda client: seconds_until_repaired(client, LARGE // 2, timeout_seconds=120)))
                self.report_progress(f"the second operator acted {seconds[-1]:.1f} s after the first was killed")
        finally:
            leader.end()
        return max(seconds)

    # -- the cluster
    def run(self, work: Callable[[KubeClient], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with self.lab.client() as client:
                return await work(client)

        return asyncio.run(connected())

    def resources(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.run(lambda client: client.get(resource_path(API, "speculativedeployments")))["items"]
        return items

    def children(self) -> dict[str, dict[str, str]]:
        """Return the version of each child, by kind."""
        versions = {}
        for kind, version in CHILDREN.items():
            at = resource_path(version, kind)
            listed = self.run(lambda client, at=at: client.get(at, labelSelector="aerie.dev/name"))["items"]  # type: ignore[misc]
            versions[kind] = {name_of(item): item["metadata"]["resourceVersion"] for item in listed}
        return versions


async def run_in_parallel(numbers: Iterable[int], work: Callable[[int], Awaitable[Any]], at_once: int = 16) -> None:
    """Do the work for every number, up to `at_once` in parallel."""
    left = iter(numbers)

    async def work_on_rest() -> None:
        for number in left:
            await work(number)

    await asyncio.gather(*(work_on_rest() for _ in range(at_once)))


async def seconds_until_repaired(client: KubeClient, number: int, timeout_seconds: float = 30.0) -> float:
    """Change the budget of a resource; return the seconds until the change is reverted."""
    budgets = resource_path("policy/v1", "poddisruptionbudgets", namespace_of(number))
    (budget,) = (await client.get(budgets, labelSelector=f"aerie.dev/name={name(number)}"))["items"]
    budget_name, before = budget["metadata"]["name"], budget["spec"]["maxUnavailable"]
    began = time.monotonic()
    changed = await client.patch(f"{budgets}/{budget_name}", {"spec": {"maxUnavailable": 2}})
    version, only = changed["metadata"]["resourceVersion"], f"metadata.name={budget_name}"
    async with asyncio.timeout(timeout_seconds):
        async for _, item in client.watch(budgets, version, fieldSelector=only):
            if item.get("spec", {}).get("maxUnavailable") == before:
                return time.monotonic() - began
    raise AssertionError("the watch has ended")


def name(number: int) -> str:
    return f"chat-{number:04}"


def namespace_of(number: int) -> str:
    return NAMESPACES[number % len(NAMESPACES)]


def resource_url(number: int) -> str:
    return resource_path(API, "speculativedeployments", namespace_of(number), name(number))


def name_of(item: dict[str, Any]) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def is_ready(item: dict[str, Any]) -> bool:
    return bool((item.get("status") or {}).get("phase") == "Ready")


def resource(number: int) -> dict[str, Any]:
    """Return a resource as a user would write it, but with the annotation that makes its pods ready without a process."""

    def source(repository: str) -> dict[str, Any]:
        return {"huggingFace": {"repo": repository, "revision": "0" * 40}}

    return {
        "apiVersion": API,
        "kind": "SpeculativeDeployment",
        "metadata": {"name": name(number), "namespace": namespace_of(number)},
        "spec": {
            "replicas": 1,
            "model": {"source": source("example/target")},
            "engine": {
                "image": "vllm/vllm-openai:v0.33.0",
                "args": ["--max-model-len=8192"],
                "podTemplate": {"metadata": {"annotations": {PROCESSLESS_ANNOTATION: "true"}}, "spec": {}},
            },
            "drafter": {"source": source("example/drafter")},
            "rollout": {"inPlace": {"mode": "Off"}},  # the pods run no process
        },
    }


assert IMAGE.partition(":")[0] in TABLE
