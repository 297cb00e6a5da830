"""Write the generated files: the CustomResourceDefinition, from the models of the resource; the pages of the reference, each from
what the code has of its subject; the drawn pictures; the revisions of the bundle, where files name them; and in the chart a copy
of the definition, the descriptions of its values, and the dashboards.

python -m scripts.generate            write the files
python -m scripts.generate --check    name the outdated files, and exit with status 1 if there are any
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from aerie.api.crd import build_custom_resource_definition
from scripts import bundle_revisions, chart, dashboards, pictures
from scripts.reference import annotation_table, catalog, checks, cli, events, metrics, resource, training, versions

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "aerie"
FROM_VALUES = ("README.md", "values.schema.json")
FROM_DASHBOARDS = tuple(f"{dashboard.name}.json" for dashboard in dashboards.DASHBOARDS)
PAGES: dict[str, Callable[[], str]] = {
    "annotations.md": annotation_table.page,
    "catalog.md": catalog.page,
    "cli.md": cli.page,
    "events.md": events.page,
    "metrics.md": metrics.page,
    "preflight-checks.md": checks.page,
    "resource.md": resource.page,
    "training.md": training.page,
    "vllm-versions.md": versions.page,
}
"""Pages of docs/reference that are generated, and the function that renders each."""
HEADER = "# Generated from operator/aerie/api by `make crds`. Change the models, not this file.\n"


def files() -> Iterator[tuple[Path, str]]:
    """Yield (path, content) of each generated file."""
    definition = build_custom_resource_definition()
    name = f"{definition['spec']['group']}_{definition['spec']['names']['plural']}.yaml"
    text = HEADER + yaml.safe_dump(definition, sort_keys=False, width=120, allow_unicode=True)
    yield ROOT / "crds" / name, text
    for page_name, render in PAGES.items():
        yield ROOT / "docs" / "reference" / page_name, render()
    for picture_name, picture in pictures.files():
        yield ROOT / "docs" / "pictures" / picture_name, picture
    for chart_path, content in chart.files(CHART, text):
        yield CHART / chart_path, content
    for file_name, content in dashboards.files():
        yield CHART / "files" / "dashboards" / file_name, content
    yield from bundle_revisions.files(ROOT)


def main(arguments: list[str]) -> int:
    try:
        stale = [(path, text) for path, text in files() if not path.exists() or path.read_text() != text]
    except chart.ChartError as error:
        print(f"charts/aerie: {error}", file=sys.stderr)
        return 1
    for path, text in stale:
        if arguments == ["--check"]:
            print(f"{path.relative_to(ROOT)} does not match {_find_source(path)}: run `make crds`.", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and arguments == ["--check"] else 0


def _find_source(path: Path) -> str:
    if path.suffix == ".svg":
        return "scripts/pictures.py"
    if path.name in FROM_VALUES:
        return "charts/aerie/values.yaml"
    if path.suffix in (".py", ".toml") or path.name.startswith("demo"):
        return str(bundle_revisions.REGISTRY)
    return "scripts/dashboards.py" if path.name in FROM_DASHBOARDS else "the code"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
