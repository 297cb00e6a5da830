"""Runs the cells of a simulation, and keeps the results of finished ones in a file, for the next run of the same code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import aerie.analysis

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Cell = TypeVar("Cell", bound=DataclassInstance)
else:
    Cell = TypeVar("Cell")
Figures = dict[float, dict[str, float]]
"""Results of a cell, by effect."""


class CellFile(Generic[Cell]):
    """The results of finished cells, and the file that keeps them for the next run; without a file they are kept in memory only.

    Guarantees: a cell is in the file whole or not at all. Results of other code, numbers of runs or seeds are never mixed:
    SystemExit is raised. Not guaranteed: that another version of numpy gives the same results.
    """

    def __init__(self, file: Path | None, cell_type: type[Cell], modules: Sequence[str], runs: int, seed: int) -> None:
        """`cell_type`: dataclass of a cell; `modules`: names of the benchmark's modules that results depend on."""
        self._file = file
        self._origin = {"runs": runs, "seed": seed, "code": _hash_code(modules)}
        self.results: dict[Cell, Figures] = {}
        if file is None or not file.exists():
            return
        saved = json.loads(file.read_text())
        if different := [name for name, value in self._origin.items() if saved["origin"][name] != value]:
            name = different[0]
            raise SystemExit(
                f"bench: CELLS={file} has cells with {name} {saved['origin'][name]}, not {self._origin[name]}: name a new file."
            )
        for row in saved["cells"]:
            self.results[cell_type(**row["cell"])] = {float(effect): values for effect, values in row["figures"].items()}

    def add(self, cell: Cell, by_effect: Figures) -> None:
        """Add a finished cell."""
        self.results[cell] = by_effect
        if self._file is None:
            return
        rows = [{"cell": dataclasses.asdict(cell), "figures": values} for cell, values in self.results.items()]
        written = self._file.with_name(f"{self._file.name}.new")
        written.write_text(json.dumps({"origin": self._origin, "cells": rows}))
        written.replace(self._file)


def complete_cells(
    finished: CellFile[Cell],
    cells: Sequence[Cell],
    run_cells: Callable[[Executor, tuple[Cell, ...]], Iterator[tuple[Cell, Figures]]],
    print_cell: Callable[[Cell, Figures], None],
) -> None:
    """Print the finished cells, then run the others in up to two processes, and add and print each as it ends."""
    for cell, by_effect in finished.results.items():
        print_cell(cell, by_effect)
    remaining = tuple(cell for cell in cells if cell not in finished.results)
    # Forked workers would inherit numpy's threads in an unknown state.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as workers:
        for cell, by_effect in run_cells(workers, remaining):
            finished.add(cell, by_effect)
            print_cell(cell, by_effect)


def _hash_code(modules: Sequence[str]) -> str:
    """Return a digest of the code that the results depend on."""
    here, operator = Path(__file__).parent, Path(aerie.analysis.__file__).parent
    rules = sorted((operator.parent / "forecast").glob("*_rule.py"))
    files = (*(here / f"{name}.py" for name in modules), *sorted(operator.rglob("*.py")), *rules)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
