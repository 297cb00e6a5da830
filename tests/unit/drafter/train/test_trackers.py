"""Values of a training in TensorBoard and W&B: imported only if named, continued by a resumed training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aerie_drafter.errors import ConfigError
from aerie_drafter.train import trackers
from aerie_drafter.train.settings import TrainingSettings
from aerie_drafter.train.trackers import open_trackers
from aerie_drafter.train.trainer import EvaluationReport, StepReport

from .test_progress import TALLY
from .test_settings import MINIMAL


def settings_of(folder: Path, **tracking: Any) -> TrainingSettings:
    return TrainingSettings.model_validate({**MINIMAL, "output": {"folder": str(folder / "drafter")}, "tracking": tracking})


def track(settings: TrainingSettings, *steps: int) -> None:
    with open_trackers(settings) as opened:
        for step in steps:
            for tracker in opened:
                tracker.on_step(StepReport(step, 9, 0, 10.0 + step, 0.1, 1e-4, 100, TALLY))
        for tracker in opened:
            tracker.on_evaluation(EvaluationReport(steps[-1], 1.9, True, TALLY))


def test_without_trackers_their_packages_are_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from aerie_drafter.train.trackers import open_trackers\n"
        "from aerie_drafter.train.settings import TrainingSettings\n"
        f"with open_trackers(TrainingSettings.model_validate({MINIMAL!r})) as opened: assert opened == []\n"
        "assert not {'wandb', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    def fail(_: str) -> None:
        raise ImportError

    monkeypatch.setattr("importlib.import_module", fail)
    message = rf"tracking.{name} is set, and the package {name} is not installed: pip install aerie-drafter\[{name}\]"
    with pytest.raises(ConfigError, match=message):
        track(settings_of(tmp_path, **{name: "x"}), 1)


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = settings_of(tmp_path, tensorboard=str(tmp_path / "board"))
    track(settings, 1, 2, 3)
    track(settings, 3, 4)  # killed after step 3, and resumed after step 2
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 11), (2, 12), (3, 13), (4, 14)]
    assert [event.value for event in board.Scalars("top1/2")] == pytest.approx([2 / 7] * 4)
    assert [event.value for event in board.Scalars("held_out/acceptance_length")][-1:] == pytest.approx([1.9])


def test_wandb_without_a_network_continues_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    settings = settings_of(tmp_path, wandb="drafters")
    track(settings, 1, 2)
    run_id = (tmp_path / "drafter" / trackers.WANDB_RUN_FILE).read_text()
    track(settings, 3)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert runs
    assert {run.name.rpartition("-")[2] for run in runs} == {run_id}
    assert all(list(run.glob("*.wandb")) for run in runs)


def test_figures_are_numbers_by_name() -> None:
    values = trackers.step_values(StepReport(1, 9, 0, 2.0, 0.1, 1e-4, 100, TALLY))
    assert values["loss"] == 2.0
    assert values["drawn/1"] == 0.6
    assert json.dumps(values)
