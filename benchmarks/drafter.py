"""The drafter: speed and memory of its training compared with two other libraries, and EAGLE 3 against EAGLE 3.1.

PARTS in the environment chooses some of acceptance (`_drafter_acceptance`), states (`_drafter_states`) and training, which is
this module. SHAPE is a name of SHAPES, RIVAL one of RIVALS.

| key                                | what is measured                                                                    |
|------------------------------------|-------------------------------------------------------------------------------------|
| train_tokens_per_s_SHAPE           | tokens per second of one core in whole training steps                               |
| train_peak_memory_mib_SHAPE        | peak of the memory beyond libraries, weights and data                               |
| train_speed_SHAPE_RIVAL            | speed over the rival's at the same shape, horizon and data (more is better)         |
| train_memory_SHAPE_RIVAL           | peak over the rival's (less is better)                                              |
| train_tokens_per_s_ratio           | the smallest of all speed ratios                                                    |
| train_peak_memory_ratio            | the largest of all memory ratios                                                    |
| train_speed_bound_SHAPE_RIVAL      | speed over the rival's if Aerie's step did only what no step can omit               |

The trainings alternate, each in a process of its own, and the median of the rounds counts. The peak comes from runs of their own,
which are not timed: `_drafter_training` says how it is measured, and why it repeats.

The rivals run in their quickest form that trains on CPU. Speculators: attention "sdpa", since its flex attention has no backward
pass there. SpecForge: attention "sdpa" and the teacher over the whole vocabulary; its compact teacher took more time at all
shapes, and 1 to 5 % less memory. Its loss is a Triton kernel, so the reference implementation of the same file takes its place.
torch.compile is off for both, as it is for Aerie.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from benchmarks._drafter_acceptance import measure_acceptance
from benchmarks._drafter_states import measure_states
from benchmarks._parts import measure_parts, name_result

# Batch x tokens. The first has the sizes of the drafters in drafter/bundle; the last those of a small target.
_BUNDLE = {"hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4}
SHAPES: dict[str, dict[str, int]] = {
    "4x256": {"batch": 4, "length": 256, **_BUNDLE, "vocabulary": 2048, "draft_vocabulary": 1024, "steps": 5},
    "1x1024": {"batch": 1, "length": 1024, **_BUNDLE, "vocabulary": 16000, "draft_vocabulary": 4000, "steps": 3},
    "1x2048": {
        "batch": 1,
        "length": 2048,
        "hidden": 512,
        "intermediate": 1408,
        "heads": 8,
        "kv_heads": 4,
        "vocabulary": 32000,
        "draft_vocabulary": 8000,
        "steps": 2,
    },
}
HORIZON = 7
ROUNDS = 3

# Each rival and what it needs beyond this project's own packages, each exactly: it is installed beside them.
RIVALS: dict[str, tuple[str, ...]] = {
    "speculators": (
        "speculators==0.9.0",
        "hs-connectors==0.9.0",
        "transformers==5.19.0",
        "datasets==5.1.0",
        "dill==0.4.1",
        "distro==1.9.0",
        "fsspec==2026.7.0",
        "jiter==0.19.0",
        "loguru==0.7.3",
        "multiprocess==0.70.19",
        "openai==2.54.0",
        "pandas==3.1.1",
        "protobuf==7.36.2",
        "psutil==7.2.2",
        "pyarrow==26.0.1",
        "pydantic-settings==2.16.3",
        "python-dotenv==1.2.4",
        "sniffio==1.3.1",
        "xxhash==4.1.0",
    ),
    # The modules of its training need nothing more; sglang and the others that it names are for its other parts.
    "specforge": ("specforge==0.2.0",),
}
WORKER = Path(__file__).with_name("_drafter_training.py")


def measure() -> dict[str, float]:
    return measure_parts(PARTS)


def result_name() -> str:
    return name_result("drafter", PARTS)


def training() -> dict[str, float]:
    """Run all trainings."""
    pythons = {"aerie": Path(sys.executable)} | {name: rival_python(packages) for name, packages in RIVALS.items()}
    figures: dict[str, float] = {}
    speeds, memories = [], []
    for name in SHAPES:
        rounds = [{side: run(python, side, name, "time") for side, python in pythons.items()} for _ in range(ROUNDS)]
        peaks = {side: run(python, side, name, "memory")["peak_mib"] for side, python in pythons.items()}
        trained = {figures_of_side["parameters"] for one_round in rounds for figures_of_side in one_round.values()}
        if len(trained) > 1:
            raise RuntimeError(f"the sides train different models at {name}: {sorted(trained)} parameters")
        speed = {side: statistics.median(one_round[side]["tokens_per_s"] for one_round in rounds) for side in pythons}
        for side in pythons:
            values = ", ".join(f"{one_round[side]['tokens_per_s']:.0f}" for one_round in rounds)
            print(f"{name} {side}: {values} tokens/s, peak {peaks[side]:.0f} MiB")
        figures[f"train_tokens_per_s_{name}"] = round(speed["aerie"], 1)
        figures[f"train_peak_memory_mib_{name}"] = round(peaks["aerie"])
        necessary = statistics.median(one_round["aerie"]["necessary_share"] for one_round in rounds)
        for rival in RIVALS:
            speeds.append(speed["aerie"] / speed[rival])
            memories.append(peaks["aerie"] / peaks[rival])
            figures[f"train_speed_{name}_{rival}"] = round(speeds[-1], 2)
            figures[f"train_memory_{name}_{rival}"] = round(memories[-1], 2)
            figures[f"train_speed_bound_{name}_{rival}"] = round(speeds[-1] / necessary, 2)
    return figures | {
        "train_tokens_per_s_ratio": round(min(speeds), 2),
        "train_peak_memory_ratio": round(max(memories), 2),
    }


def run(python: Path, side: str, name: str, measure: str) -> dict[str, float]:
    """Run a training in a process of its own and return its results; `measure` is "time" or "memory"."""
    shape = json.dumps(SHAPES[name] | {"horizon": HORIZON})
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    ended = subprocess.run([python, WORKER, side, shape, measure], env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"the training of {side} failed:\n{ended.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def rival_python(packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment that has a rival and sees this one's packages; it is created once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "aerie-bench" / packages[0].replace("==", "-")
    python, done = folder / "bin" / "python", folder / "packages.json"
    if not done.exists() or json.loads(done.read_text()) != list(packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        inside = next((folder / "lib").glob("python3*")) / "site-packages"
        (inside / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *packages], check=True)
        done.write_text(json.dumps(packages))
    return python


PARTS = {"acceptance": measure_acceptance, "states": measure_states, "training": training}
