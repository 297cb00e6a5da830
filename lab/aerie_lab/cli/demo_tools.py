"""kubectl and helm of the cluster of a demo, whatever that cluster is: its environment has KUBECONFIG and PATH."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from aerie.terminal import sanitize_text
from aerie_lab.cli.console import out
from aerie_lab.cli.scenarios import REPOSITORY_FOLDER
from aerie_lab.errors import LabError


@dataclass(frozen=True)
class DemoTools:
    """Programs that find the cluster by their environment."""

    environment: Mapping[str, str]

    def show(self, tool: str, *words: str, quiet: bool = False) -> None:
        """Print a command, run it, and print its output. Raises LabError."""
        command = shlex.join(words).replace(f"{REPOSITORY_FOLDER}/", "")
        out.print(f"[cyan]$ {tool} {sanitize_text(command)}[/]")
        output = self.run(tool, *words)
        if not quiet:
            out.print(sanitize_text(output), end="")

    def run(self, tool: str, *words: str, stdin: str | None = None) -> str:
        """Run a tool, and return its standard output. Raises LabError with its error output."""
        done = subprocess.run([tool, *words], input=stdin, capture_output=True, text=True, env=self.environment, check=False)
        if done.returncode != 0:
            raise LabError(f"{tool} {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def start(self, tool: str, *words: str) -> subprocess.Popen[str]:
        """Start a tool, and return it for its standard output."""
        return subprocess.Popen(
            [tool, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self.environment
        )
