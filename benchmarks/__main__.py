"""Runs one benchmark and prints its results: the last line is one flat JSON object, with the unit in each key.

A benchmark is a module of this package with `measure() -> dict[str, float]`. It may print anything before. With
`--save` the results are also written to results/NAME.json, with the date, the machine and the commit they were measured on,
and a benchmark that has `document(docs: Path)` writes its page of the docs. A benchmark that has `result_name()` names its
file itself.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def machine() -> str:
    """Return the processor, its cores and the memory, which a reader needs to evaluate the results."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def commit() -> str:
    """Return the commit, with `-dirty` when tracked files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", usage="make bench NAME=... [SAVE=1]")
    parser.add_argument("name")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.name not in names():
        problem = f"no benchmark is called '{arguments.name}'" if arguments.name else "no benchmark is named"
        available = ", ".join(names())
        print(f"bench: {problem}: use make bench NAME=..., with one of: {available}.", file=sys.stderr)
        return 2
    # Read before measuring: the run measures the code of its start.
    measured_on = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "commit": commit(),
    }
    module = importlib.import_module(f"benchmarks.{arguments.name}")
    figures = module.measure()
    if arguments.save:
        (HERE / "results").mkdir(exist_ok=True)
        text = json.dumps({**measured_on, **figures}, indent=2) + "\n"
        name = module.result_name() if hasattr(module, "result_name") else arguments.name
        (HERE / "results" / f"{name}.json").write_text(text)
        if hasattr(module, "document"):
            module.document(HERE.parent / "docs" / "measurements")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
