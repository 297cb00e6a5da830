"""The flags of `vllm serve` in its parsers: vLLM's own, read in its environment, and the simulator's."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from aerie_lab.engine import arguments

# The module of the parser differs by release.
BUILD_PARSER = """
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
"""Lines of Python that build vLLM's parser, `parser`."""

_FLAGS = f"""
import json
{BUILD_PARSER}
def row(action):
    choices = sorted(map(str, action.choices)) if action.choices is not None else None
    return [action.nargs, choices]
flags = {{name: row(action) for name, action in parser._option_string_actions.items() if action.dest != "help"}}
print("flags" + json.dumps(flags))
"""

Flags = dict[str, list[Any]]
"""Number of values of each flag by name (as in argparse: 0 for a switch, None for exactly one), and its choices, sorted, if it
has any."""


def read_vllm_flags(folder: Path) -> Flags:
    """Return the flags of the vLLM whose programs are in `folder`."""
    python = str(folder / "python")
    process = subprocess.run([python, "-B", "-c", _FLAGS], capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-2000:]
    flags: Flags = json.loads(next(line for line in process.stdout.splitlines() if line.startswith("flags"))[5:])
    return flags


def read_simulator_flags(version: str) -> Flags:
    """Return the flags of the simulator for vLLM `version`."""

    def row(action: argparse.Action) -> list[Any]:
        return [action.nargs, sorted(map(str, action.choices)) if action.choices is not None else None]

    actions = arguments._build_parser(version)._option_string_actions
    return {name: row(action) for name, action in actions.items() if action.dest != "help"}
