"""An operator as its own process, and its metrics."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

IMAGE = "bench.example/preflight:1"
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Metrics:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [(name, dict(_LABEL.findall(labels)), float(value)) for name, labels, value in _SAMPLE.findall(text)]

    def total(self, name: str, **required_labels: str) -> float:
        """Return the sum over all series with these labels."""
        return sum(
            value
            for sample_name, labels, value in self._samples
            if sample_name == name and required_labels.items() <= labels.items()
        )

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """Return the bounds and cumulative counts of a histogram."""
        return [(float(labels["le"]), value) for sample_name, labels, value in self._samples if sample_name == f"{name}_bucket"]

    @property
    def reconciles(self) -> float:
        """Number of successful reconciles."""
        return self.total("aerie_reconcile_duration_seconds_count", outcome="done")

    @property
    def writes(self) -> Mapping[str, float]:
        """Number of write requests by verb, without the Lease's: it alone is written with PUT."""
        return {verb: self.total("aerie_kube_api_requests_total", verb=verb) for verb in ("PATCH", "POST", "DELETE")}


def quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Return a quantile as Prometheus estimates it: linear within a bucket."""
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / max(1e-9, count - below)
        low, below = bound, count
    return low


class Operator:
    """One process; ended with the block."""

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        port: int | None = None,
        command_prefix: Sequence[str] = (),
        metrics_socket: Path | None = None,
    ) -> None:
        """`command_prefix` runs a command where the operator is to run; `metrics_socket` leads to its `port` there."""
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            transport=httpx.HTTPTransport(uds=None if metrics_socket is None else str(metrics_socket)),
            headers={"Connection": "close"},
        )
        command = [*command_prefix, sys.executable, "-m", "aerie.cli", "operator", "--lease-namespace", "default"]
        command += ["--preflight-image", IMAGE, "--health-port", "0", "--metrics-port", str(port)]
        self.began = time.monotonic()
        with log.open("ab") as output:
            environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the process, if it has not ended yet."""
        self._http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)

    def metrics(self) -> Metrics:
        """Scrape the operator."""
        return Metrics(self._http.get("/metrics").text)

    def until(
        self, check: Callable[[Metrics], bool], description: str, timeout_seconds: float = 120.0, interval: float = 0.1
    ) -> float:
        """Scrape until the check succeeds; return the seconds since the start of the process."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                if check(self.metrics()):
                    return time.monotonic() - self.began
            except httpx.TransportError:
                pass  # it does not listen yet
            if self.process.poll() is not None:
                raise RuntimeError(f"the operator has ended with status {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_seconds:g} s: {description}")
            time.sleep(interval)

    def cpu(self) -> float:
        """Return the seconds of CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(value) for value in fields[11:13]) / os.sysconf("SC_CLK_TCK")

    def memory(self, line: str = "VmRSS") -> float:
        """Return the MiB of resident memory; VmHWM: its peak."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) for row in status if row.startswith(f"{line}:")) / 1024
