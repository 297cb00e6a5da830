"""Lint of what a release publishes besides Python: workflows by actionlint, manifests by kubeconform.

    .github/workflows                              ──► actionlint
    charts/aerie, rendered by Helm; examples; crds ──► kubeconform, with the schemas of scripts.release.schemas.py

The programs are built from pinned Go modules into the lab's cache, as the lab's own binaries are. Guarantees: nothing but Go
modules is fetched, and a kind without a schema fails, unless it is in `KINDS_WITHOUT_SCHEMA`. Not guaranteed: what only an API
server checks, such as the rules of the definition. actionlint calls shellcheck and pyflakes if they are on the PATH.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from aerie_lab.binaries import ensure_binary, store
from aerie_lab.binaries.families import Binary, BinaryFamily
from aerie_lab.errors import BuildError
from scripts.release.schemas import write_schemas

ROOT = Path(__file__).resolve().parents[2]
MODULES = ROOT / "scripts" / "release" / "lint_modules"
ACTIONLINT = BinaryFamily(
    name="actionlint",
    module="github.com/rhysd/actionlint",
    binaries=(Binary("actionlint", "github.com/rhysd/actionlint/cmd/actionlint"),),
    linker_variables=("github.com/rhysd/actionlint.version={version}",),
    disk_gib=1,
    folder=MODULES,
)
KUBECONFORM = BinaryFamily(
    name="kubeconform",
    module="github.com/yannh/kubeconform",
    binaries=(Binary("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", ("-v",)),),
    linker_variables=("main.version={version}",),
    disk_gib=1,
    folder=MODULES,
)
KINDS_WITHOUT_SCHEMA = ("PodMonitor", "PrometheusRule", "ServiceMonitor")
"""Kinds of the Prometheus operator, whose definitions are not in a module that the lab pins."""


def lint_workflows() -> int:
    """Return actionlint's exit status for all workflows."""
    print("lint: workflows", flush=True)
    return _run([_build(ACTIONLINT), "-no-color", *map(str, sorted((ROOT / ".github/workflows").glob("*.yaml")))])


def lint_manifests(folder: Path) -> int:
    """Return kubeconform's exit status for the chart, the examples and the definition. `folder` gets schemas and manifests."""
    schemas, manifests = folder / "schemas", folder / "manifests"
    write_schemas(schemas, ROOT / "crds")
    manifests.mkdir()
    for case in (None, *sorted((ROOT / "tests/lab/chart/cases").glob("*.yaml"))):
        (manifests / f"chart-{case.stem if case else 'values'}.yaml").write_text(_render_chart(case))
    print("lint: manifests", flush=True)
    location = f"{schemas}/{{{{ .Group }}}}/{{{{ .ResourceKind }}}}_{{{{ .ResourceAPIVersion }}}}.json"
    options = ["-strict", "-summary", "-skip", ",".join(KINDS_WITHOUT_SCHEMA), "-schema-location", location]
    return _run([_build(KUBECONFORM), *options, str(manifests), str(ROOT / "examples"), str(ROOT / "crds")])


def _render_chart(values: Path | None) -> str:
    helm = [str(ensure_binary("helm")), "template", "aerie", str(ROOT / "charts/aerie"), "--namespace", "aerie-system"]
    done = subprocess.run([*helm, *(["--values", str(values)] if values else [])], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"helm cannot render charts/aerie with {values or 'its values'}: {done.stderr.strip()}")
    return done.stdout


def _build(family: BinaryFamily) -> str:
    return str(store.ensure_build(family, lambda line: print(line, file=sys.stderr)) / family.name)


def _run(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    """Run both linters, and return 1 if one of them has reported something."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return 1 if lint_workflows() | lint_manifests(Path(folder)) else 0
    except BuildError as error:
        print(f"lint: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
