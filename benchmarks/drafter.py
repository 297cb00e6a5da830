"""The drafter: speed and memory of its training compared with the speculators library's, and EAGLE 3 against EAGLE 3.1.

The second part is `_drafter_drift`, with keys of its own; this is the first.

| key                         | what is measured                                                                            |
|-----------------------------|---------------------------------------------------------------------------------------------|
| train_tokens_per_s          | tokens per second of one core in whole training steps, at SHAPE                             |
| train_tokens_per_s_ratio    | that over the speculators library's at the same shape, horizon and data (more is better)     |
| train_peak_memory_mib       | peak resident memory beyond libraries, weights and data                                     |
| train_peak_memory_ratio     | that over the speculators library's (less is better)                                        |

The two trainings alternate, each in a process of its own, and the median of the rounds counts. The library runs with the
quicker of the two attention forms that it can train with on CPU: its flex attention has no backward there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks._drafter_drift import measure_served

# The sizes are those of a small target, so that a step takes seconds on CPU.
SHAPE = {
    "threads": 1,
    "length": 2048,
    "hidden": 512,
    "intermediate": 1408,
    "heads": 8,
    "kv_heads": 4,
    "vocabulary": 32000,
    "draft_vocabulary": 8000,
    "horizon": 7,
    "steps": 2,
    "attention": "sdpa",  # the library's; "eager" takes more time and memory
}
ROUNDS = 3

# The library and what it needs beyond this project's own packages, each exactly: it is installed beside them.
PACKAGES = (
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
)
WORKER = Path(__file__).with_name("_drafter_training.py")


def measure() -> dict[str, float]:
    return measure_served() | training()


def training() -> dict[str, float]:
    """Run both trainings, alternately."""
    library_python = speculators_python()
    rounds = []
    for index in range(ROUNDS):
        pair = run(Path(sys.executable), "ours"), run(library_python, "speculators")
        if pair[0]["parameters"] != pair[1]["parameters"]:
            raise RuntimeError(f"the two train different models: {pair[0]['parameters']} and {pair[1]['parameters']} parameters")
        rounds.append(pair)
        for name, figures in zip(("aerie", "speculators"), pair, strict=True):
            print(f"round {index + 1}: {name}: {figures['tokens_per_s']:.0f} tokens/s, peak {figures['peak_mib']:.0f} MiB")

    def middle(side: int, key: str) -> float:
        return statistics.median(pair[side][key] for pair in rounds)

    return {
        "train_tokens_per_s": round(middle(0, "tokens_per_s"), 1),
        "train_tokens_per_s_ratio": round(middle(0, "tokens_per_s") / middle(1, "tokens_per_s"), 2),
        "train_peak_memory_mib": round(middle(0, "peak_mib")),
        "train_peak_memory_ratio": round(middle(0, "peak_mib") / middle(1, "peak_mib"), 2),
    }


def run(python: Path, side: str) -> dict[str, float]:
    """Run one training in a process of its own and return its results."""
    shape = json.dumps(SHAPE)
    environment = os.environ | {"OMP_NUM_THREADS": str(SHAPE["threads"]), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run([python, WORKER, side, shape], env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"the training of {side} failed:\n{ended.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def speculators_python() -> Path:
    """Return the interpreter of an environment that has the library and sees this one's packages; it is created once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "aerie-bench" / PACKAGES[0].replace("==", "-")
    python, done = folder / "bin" / "python", folder / "packages.json"
    if not done.exists() or json.loads(done.read_text()) != list(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        inside = next((folder / "lib").glob("python3*")) / "site-packages"
        (inside / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
        done.write_text(json.dumps(PACKAGES))
    return python
