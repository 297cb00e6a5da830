"""`python -m aerie_lab.engine.load_generation URL MODEL RATE`: short requests until SIGTERM, each outcome as a line of JSON.

It is for a pod: its log is read by aerie_lab.cli.demo_requests. After SIGTERM it ends when the open requests have their answers.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import asdict

from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget

REQUEST_TIMEOUT_SECONDS = 60.0
_PRINT_INTERVAL_SECONDS = 0.5


def main(url: str, model: str, rate: str) -> None:
    stop_event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_event.set())
    printed_count = 0

    def print_outcomes() -> None:
        nonlocal printed_count
        outcomes = traffic.report.outcomes[printed_count:]
        printed_count += len(outcomes)
        sys.stdout.writelines(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
        sys.stdout.flush()

    with BackgroundTraffic(TrafficTarget(url, model, timeout_seconds=REQUEST_TIMEOUT_SECONDS), float(rate)) as traffic:
        while not stop_event.wait(_PRINT_INTERVAL_SECONDS):
            print_outcomes()
    print_outcomes()


if __name__ == "__main__":
    main(*sys.argv[1:])
