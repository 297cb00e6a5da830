"""Check of the README: it names the two commands everybody needs, and no make target that does not exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = ("make demo", "make test")


def find_errors(readme: str, makefile: str) -> list[str]:
    """Return one sentence for each error."""
    # Only code counts: a fenced block, or a word between backticks.
    blocks = re.findall(r"^```.*?\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    code = [*blocks, *re.findall(r"`([^`\n]+)`", prose)]
    named_commands = {f"make {target}" for text in code for target in re.findall(r"\bmake ([a-z][a-z0-9-]*)", text)}
    targets = {f"make {target}" for target in re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE)}
    unnamed = [command for command in REQUIRED if command not in named_commands]
    messages = [f"README.md does not name `{command}`: write it exactly so." for command in unnamed]
    messages += [
        f"README.md names `{command}`, and the Makefile has no such target: correct one of them."
        for command in sorted((named_commands | set(REQUIRED)) - targets)
    ]
    return messages


def main() -> int:
    messages = find_errors((ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text())
    for problem in messages:
        print(problem, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
