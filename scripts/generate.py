"""Write the generated files: the CustomResourceDefinition and its reference page, from the models of the resource; and in the
chart a copy of the definition and the descriptions of its values.

python -m scripts.generate            write the files
python -m scripts.generate --check    name the outdated files, and exit with status 1 if there are any
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from aerie.api.crd import build_custom_resource_definition
from scripts import chart
from scripts.reference import page

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "aerie"
FROM_VALUES = ("README.md", "values.schema.json")
HEADER = "# Generated from operator/aerie/api by `make crds`. Change the models, not this file.\n"


def files() -> Iterator[tuple[Path, str]]:
    """Yield (path, content) of each generated file."""
    definition = build_custom_resource_definition()
    name = f"{definition['spec']['group']}_{definition['spec']['names']['plural']}.yaml"
    text = HEADER + yaml.safe_dump(definition, sort_keys=False, width=120, allow_unicode=True)
    yield ROOT / "crds" / name, text
    yield ROOT / "docs" / "reference.md", page()
    for chart_path, content in chart.files(CHART, text):
        yield ROOT / "charts" / "aerie" / chart_path, content


def main(arguments: list[str]) -> int:
    try:
        stale = [(path, text) for path, text in files() if not path.exists() or path.read_text() != text]
    except chart.ChartError as error:
        print(f"charts/aerie: {error}", file=sys.stderr)
        return 1
    for path, text in stale:
        if arguments == ["--check"]:
            source = "charts/aerie/values.yaml" if path.name in FROM_VALUES else "operator/aerie/api"
            print(f"{path.relative_to(ROOT)} does not match {source}: run `make crds`.", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
