"""Print the notes of a release from CHANGELOG.md, after a check that everything has its version.

    python -m scripts.release.notes v0.1.0

The four distributions and the chart (`version`, `appVersion`) need the version of the tag, and the changelog needs a
section about it. Otherwise each error is one sentence, and the exit status is 1: nothing can replace a release that is published.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ("pyproject.toml", "plugin/pyproject.toml", "lab/pyproject.toml", "drafter/pyproject.toml")
CHART = "charts/aerie/Chart.yaml"


def read_versions(root: Path) -> dict[str, str]:
    """Return the version by the place where it is written."""
    versions = {project: str(tomllib.loads((root / project).read_text())["project"]["version"]) for project in PROJECTS}
    chart = re.findall(r"^(version|appVersion): *[\"']?([^\s\"']+)", (root / CHART).read_text(), re.MULTILINE)
    return versions | {f"{CHART}, {key}": version for key, version in chart}


def find_errors(version: str, versions: Mapping[str, str]) -> list[str]:
    """Return one sentence for each place with another version."""
    return [f"{place} has version {other}, and the tag {version}." for place, other in versions.items() if other != version]


def find_notes(changelog: str, version: str) -> str:
    """Return the text of the section of a version, without its heading; empty where there is none."""
    sections = re.split(r"^## +", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if heading.startswith(f"[{version}]"):
            return text.strip()
    return ""


def main(arguments: list[str]) -> int:
    """Run the command."""
    if len(arguments) != 1 or not arguments[0].startswith("v"):
        print("usage: python -m scripts.release.notes vVERSION", file=sys.stderr)
        return 2
    version = arguments[0].removeprefix("v")
    errors = find_errors(version, read_versions(ROOT))
    notes = find_notes((ROOT / "CHANGELOG.md").read_text(), version)
    if not notes:
        errors.append(f"CHANGELOG.md has no text about {version}: write it below the heading `## [{version}]`.")
    for error in errors:
        print(f"release: {error}", file=sys.stderr)
    if not errors:
        print(notes)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
