"""The flags of `vllm serve` as a parser has them: vLLM's own, asked in its environment, and the simulator's."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from aerie_lab.engine import arguments

# It has moved from release to release.
MAKE = """
import importlib
from vllm.utils.argparse_utils import FlexibleArgumentParser
for place in ("common", "launchers", "openai"):
    try:
        make = importlib.import_module(f"vllm.entrypoints.{place}.cli_args").make_arg_parser
        break
    except ImportError:
        continue
parser = make(FlexibleArgumentParser())
"""
"""Lines of Python that make vLLM's parser, `parser`."""

_FLAGS = f"""
import json
{MAKE}
def row(action):
    choices = sorted(map(str, action.choices)) if action.choices is not None else None
    return [action.nargs, choices]
flags = {{name: row(action) for name, action in parser._option_string_actions.items() if action.dest != "help"}}
print("flags" + json.dumps(flags))
"""

Flags = dict[str, list[Any]]
"""By its name, how many values a flag takes (as argparse has it: 0 for a switch, None for exactly one) and the values, sorted,
where only some are taken."""


def flags_of_vllm(folder: Path) -> Flags:
    """The flags of the vLLM whose programs are in `folder`."""
    python = str(folder / "python")
    done = subprocess.run([python, "-B", "-c", _FLAGS], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found: Flags = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("flags"))[5:])
    return found


def flags_of_the_simulator(version: str) -> Flags:
    """Those that the simulator has for vLLM `version`."""

    def row(action: argparse.Action) -> list[Any]:
        return [action.nargs, sorted(map(str, action.choices)) if action.choices is not None else None]

    named = arguments._build_parser(version)._option_string_actions
    return {name: row(action) for name, action in named.items() if action.dest != "help"}
