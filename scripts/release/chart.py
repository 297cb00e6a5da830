"""Copy the chart with the image of a release as its default, for `helm package`.

    python scripts/release/chart.py REGISTRY/NAME sha256:... FOLDER

In a checkout, the chart's image is the one that its user builds. The chart of a release names the released image by digest. Only
the standard library is needed, because the workflow's job installs nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

CHART = Path(__file__).resolve().parents[2] / "charts" / "aerie"


def set_image(values: str, repository: str, digest: str) -> str:
    """Return the text of values.yaml with another default image. Raises ValueError where it has no such keys."""
    for key, value in (("repository", repository), ("digest", digest)):
        values, count = re.subn(rf"(?m)^(image:\n(?:  .*\n)*?  {key}:) .*$", rf"\g<1> {value}", values)
        if count != 1:
            raise ValueError(f"values.yaml has image.{key} {count} times, and once is expected.")
    return values


def main(arguments: list[str]) -> int:
    """Run the command."""
    if len(arguments) != 3 or not re.fullmatch(r"sha256:[0-9a-f]{64}", arguments[1]):
        print("usage: python scripts/release/chart.py REGISTRY/NAME sha256:DIGEST FOLDER", file=sys.stderr)
        return 2
    repository, digest, folder = arguments[0], arguments[1], Path(arguments[2])
    shutil.copytree(CHART, folder)
    values = folder / "values.yaml"
    values.write_text(set_image(values.read_text(), repository, digest))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
