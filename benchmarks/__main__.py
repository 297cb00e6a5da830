"""Runs one benchmark and prints its figures: the last line is one flat JSON object, with the unit in each key.

A benchmark is a module of this package with `measure() -> dict[str, float]`. It may print what it likes before. With
`--save` the figures also go to results/NAME.json, with the date, the machine and the commit they were measured on, and a
benchmark that has `document(docs: Path)` writes its page of the docs.
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
    """The processor, its cores and the memory: what a reader needs to judge a figure."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def commit() -> str:
    """The commit, with `-dirty` when tracked files differ from it."""
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
        asked = f"no benchmark is called '{arguments.name}'" if arguments.name else "no benchmark is named"
        available = ", ".join(names())
        print(f"bench: {asked}: use make bench NAME=..., with one of: {available}.", file=sys.stderr)
        return 2
    # Read before measuring: the run is about the code as it was when it began.
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
        (HERE / "results" / f"{arguments.name}.json").write_text(text)
        if hasattr(module, "document"):
            module.document(HERE.parent / "docs")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
