"""Reports of pods for tests of single functions: a pod with a state, windows and results of calls."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aerie.api.status import DrafterLocation, InPlaceDrafter, InPlaceRollout, TrialPod
from aerie.engine.drafter_endpoint.calls import DrafterFiles, DrafterSource
from aerie.engine.drafter_endpoint.state import DrafterState, DrafterWindow, LoadedDrafter, PreparedDrafter
from aerie.engine.metrics.sample import Counters
from aerie.rollout.facts.drafters import DrafterObservation
from aerie.rollout.in_place.engine_pods import EnginePod
from tests.unit.rollout.in_place.fleet import Counts, digest_of, drafter_files, folder_of

START = datetime(2026, 1, 1, tzinfo=UTC)
SOURCE = DrafterSource(folder=folder_of("better"))
STABLE = InPlaceDrafter(
    revision="r1",
    drafter="models/eagle3",
    digest=digest_of("eagle3"),
    files=drafter_files("eagle3"),
    location=DrafterLocation(folder=folder_of("eagle3")),
)
CANDIDATE = STABLE.model_copy(
    update={
        "revision": "r2",
        "digest": digest_of("better"),
        "files": drafter_files("better"),
        "location": DrafterLocation(folder=folder_of("better")),
    }
)


def drafter(name: str) -> LoadedDrafter:
    return LoadedDrafter(digest_of(name), drafter_files(name), "eagle3")


def prepared(name: str = "better", source: DrafterSource = SOURCE) -> PreparedDrafter:
    return PreparedDrafter(source, "Ready", 1.0, DrafterFiles(drafter_files(name), folder_of(name)), "eagle3", None, None)


def state(own: str = "eagle3", loaded: str | None = None, **fields: Any) -> DrafterState:
    values: dict[str, Any] = {
        "problem": None,
        "unfit": None,
        "process_id": "0" * 32,
        "process_started": START.timestamp(),
        "method": "eagle3",
        "ranks": 1,
        "is_counting": True,
        "own": drafter(own),
        "loaded": drafter(loaded or own),
        "lease": None,
        "change": None,
        "swaps": 0,
        "failures": 0,
        "last_failure": None,
        "last_rejection": None,
        "prepared": prepared(),
        "windows": (),
        **fields,
    }
    return DrafterState(**values)


def pod(name: str = "a", report: DrafterState | None = None, *, ready: bool = True, **observation: Any) -> EnginePod:
    condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": START.isoformat()}
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": START.isoformat()}
    document = {"metadata": metadata, "status": {"phase": "Running", "conditions": [condition]}}
    return EnginePod(name, document, DrafterObservation(state=report, **observation))


def window(number: int, name: str, turn: str | None, started: float, ended: float | None, settled: float) -> DrafterWindow:
    return DrafterWindow(number, digest_of(name), turn, started, settled, ended, counters(100.0))


def counters(requests: float) -> Counters:
    return Counts(100 * requests, 40 * requests, requests).since(Counts())


def rollout(**fields: Any) -> InPlaceRollout:
    values: dict[str, Any] = {
        "revision": "r2",
        "change": "drafter models/better",
        "drafter": "models/better",
        "location": CANDIDATE.location,
        "phase": "Analyzing",
        "start_time": START,
        "phase_start_time": START,
        "files": CANDIDATE.files,
        "digest": CANDIDATE.digest,
        "kind": "eagle3",
        "replaced": STABLE,
        "seed": "seed",
        "first_window_seconds": 6.0,
        "carryover_seconds": 30.0,
        "trial_start_time": START,
        "pods": [TrialPod(name="a", uid="uid-a", index=0)],
        **fields,
    }
    return InPlaceRollout(**values)
